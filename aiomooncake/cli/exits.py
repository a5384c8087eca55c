"""The exit codes: one table, for the commands and for their help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiomooncake._verdict import DiagnosisKind
from aiomooncake.errors import ClusterError, EngineNotInstalledError, SetupError, WarmupError

__all__ = ["EXITS", "INTERRUPTED", "OTHER_FAILURE", "epilog", "exit_code"]

OTHER_FAILURE: Final = 1
INTERRUPTED: Final = 128
"""What a shell adds to the number of the signal that ended a program."""


@dataclass(frozen=True, slots=True)
class Exit:
    """One exit code.

    Attributes:
        code: The number.
        cause: The error class or the diagnosis that leads to it; None where neither decides.
        meaning: What the help says.
    """

    code: int
    cause: type[BaseException] | DiagnosisKind | None
    meaning: str


# Published: a number never changes its meaning.
EXITS: Final = (
    Exit(0, None, "every rank is ready; demo: everything went well"),
    Exit(OTHER_FAILURE, None, "another failure; its text says which"),
    Exit(2, None, "usage: a wrong option, setting or environment variable"),
    Exit(3, EngineNotInstalledError, "the engine is not installed or can't be loaded"),
    Exit(4, SetupError, "connect failed: no master in time, or the engine refuses"),
    Exit(5, ClusterError, "demo: the private master did not start"),
    Exit(10, DiagnosisKind.MASTER_UNREACHABLE, "the master went away"),
    Exit(11, DiagnosisKind.MASTER_SILENT, "the master does not answer"),
    Exit(12, DiagnosisKind.NO_SEGMENT, "no memory is mounted anywhere"),
    Exit(13, DiagnosisKind.OUT_OF_SPACE, "the mounted memory is full"),
    Exit(14, DiagnosisKind.VERSION_MISMATCH, "client and master are of different versions"),
    Exit(15, DiagnosisKind.PEER_UNREACHABLE, "a peer that holds memory does not answer"),
    Exit(16, DiagnosisKind.LOCAL_BUFFER_TOO_SMALL, "the local buffer is too small"),
    Exit(17, DiagnosisKind.TENANT_REFUSED, "the tenant is not known, or over its quota"),
    Exit(18, DiagnosisKind.UNKNOWN, "a cause that could not be found"),
    Exit(19, DiagnosisKind.CLIENT_UNREACHABLE, "the stand-alone client does not answer"),
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


def epilog() -> str:
    r"""Return the table for a help text; ``\b`` keeps click from filling the lines anew."""
    lines = []
    for each in EXITS:
        kind = f"{each.cause}: " if isinstance(each.cause, DiagnosisKind) else ""
        lines.append(f"{each.code:>5}  {kind}{each.meaning}")
    return "\b\nExit codes:\n" + "\n".join(lines)
