"""The exit codes: one table, for the commands and for their help."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from aiomooncake._verdict import DiagnosisKind
from aiomooncake.errors import ClusterError, EngineNotInstalledError, SetupError, WarmupError

__all__ = [
    "CALL_FAILED",
    "EXITS",
    "INTERRUPTED",
    "MISSING",
    "OTHER_FAILURE",
    "epilog",
    "exit_code",
    "exit_code_of",
]

OTHER_FAILURE: Final = 1
MISSING: Final = 1
"""``get``, ``exists`` and ``rm``: a key is not there, as with ``grep``."""

CALL_FAILED: Final = 6
INTERRUPTED: Final = 128
"""What a shell adds to the number of the signal that ended a program."""


@dataclass(frozen=True, slots=True)
class Exit:
    """One exit code.

    Attributes:
        code: The number.
        cause: The error class, the diagnosis or the doctor's word that leads to it; None where
            none of them decides.
        meaning: What the help says.
    """

    code: int
    cause: type[BaseException] | DiagnosisKind | str | None
    meaning: str


# Published: a number never changes its meaning.
EXITS: Final = (
    Exit(0, None, "every rank is ready; everything went well; doctor: at most warnings"),
    Exit(1, None, "get, exists, rm: a key is not there; else: another failure, its text says"),
    Exit(2, None, "usage: a wrong option, setting or environment variable"),
    Exit(3, EngineNotInstalledError, "the engine is not installed or can't be loaded"),
    Exit(4, SetupError, "connect failed: no master in time, or the engine refuses"),
    Exit(5, ClusterError, "demo, local://: the private master did not start"),
    Exit(CALL_FAILED, None, "put, get, exists, rm, bench: a call failed; its text says why"),
    Exit(10, DiagnosisKind.MASTER_UNREACHABLE, "the master is not there, or went away"),
    Exit(11, DiagnosisKind.MASTER_SILENT, "the master does not answer"),
    Exit(12, DiagnosisKind.NO_SEGMENT, "no memory is mounted anywhere"),
    Exit(13, DiagnosisKind.OUT_OF_SPACE, "the mounted memory is full"),
    Exit(14, DiagnosisKind.VERSION_MISMATCH, "client and master are of different versions"),
    Exit(15, DiagnosisKind.PEER_UNREACHABLE, "a peer that holds memory does not answer"),
    Exit(16, DiagnosisKind.LOCAL_BUFFER_TOO_SMALL, "the local buffer is too small"),
    Exit(17, DiagnosisKind.TENANT_REFUSED, "the tenant is not known, or over its quota"),
    Exit(18, DiagnosisKind.UNKNOWN, "a cause that could not be found"),
    Exit(19, DiagnosisKind.CLIENT_UNREACHABLE, "the stand-alone client does not answer"),
    Exit(20, "not-a-master", "doctor: something else answers at the master's address"),
    Exit(21, "host-unfit", "doctor: this host lacks something (a device, an address, memory)"),
    Exit(INTERRUPTED + 2, None, "interrupted (Ctrl-C), left cleanly"),
    Exit(INTERRUPTED + 15, None, "terminated (SIGTERM), left cleanly"),
)


def exit_code(error: BaseException) -> int:
    """Return the exit code of a failed command; of several ranks the first failed one decides."""
    if isinstance(error, WarmupError):
        kind = error.diagnosis.kind if error.diagnosis is not None else DiagnosisKind.UNKNOWN
        return next(each.code for each in EXITS if each.cause is kind)
    for each in EXITS:
        if isinstance(each.cause, type) and isinstance(error, each.cause):
            return each.code
    return OTHER_FAILURE


def exit_code_of(kind: str) -> int:
    """Return the exit code of a diagnosis, or of a word of the doctor's."""
    return next(
        each.code for each in EXITS if isinstance(each.cause, str) and str(each.cause) == kind
    )


def epilog(*examples: str, codes: Collection[int] | None = None) -> str:
    r"""Return examples and the table for a help text; ``\b`` keeps click from filling the lines.

    Args:
        *examples: Command lines, without the program's name.
        codes: Which exit codes the command has; None for all.
    """
    lines = []
    for each in EXITS:
        if codes is None or each.code in codes:
            kind = f"{each.cause}: " if isinstance(each.cause, str) else ""
            lines.append(f"{each.code:>5}  {kind}{each.meaning}")
    blocks = ["\b\nExit codes:\n" + "\n".join(lines)]
    if examples:
        shown = (f"  {each}" for each in examples)
        blocks.insert(0, "\b\nExamples:\n" + "\n".join(shown))
    return "\n\n".join(blocks)
