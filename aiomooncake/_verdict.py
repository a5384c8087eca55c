"""What a diagnosis says, and how it writes numbers and addresses. Public by ``diagnosis``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from aiomooncake.errors import code_name

__all__ = [
    "Diagnosis",
    "DiagnosisKind",
    "address_text",
    "answer_text",
    "count_text",
    "size_text",
]

_KIB: Final = 1024


class DiagnosisKind(str, Enum):
    """What is wrong, as one word for programs."""

    CLIENT_UNREACHABLE = "client-unreachable"
    MASTER_UNREACHABLE = "master-unreachable"
    MASTER_SILENT = "master-silent"
    NO_SEGMENT = "no-segment"
    OUT_OF_SPACE = "out-of-space"
    VERSION_MISMATCH = "version-mismatch"
    PEER_UNREACHABLE = "peer-unreachable"
    LOCAL_BUFFER_TOO_SMALL = "local-buffer-too-small"
    TENANT_REFUSED = "tenant-refused"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        """Return the word itself, the same on every Python."""
        return self.value


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong with a store that could not be warmed up.

    Attributes:
        kind: The fault as one word.
        explanation: What is wrong, in one sentence, with addresses and sizes.
        evidence: How that was found.
        cure: What to do about it.
        permanent: Whether waiting can't mend it; if so warm-up fails at once.
    """

    kind: DiagnosisKind
    explanation: str
    evidence: str
    cure: str
    permanent: bool = False

    @property
    def retryable(self) -> bool:
        """Whether trying again later may succeed without anybody's help."""
        return not self.permanent

    def __str__(self) -> str:
        """Return all of it as one line, without a final full stop."""
        evidence = f" ({self.evidence})" if self.evidence else ""
        return f"{self.kind}: {self.explanation}{evidence}. Cure: {self.cure}"


def answer_text(code: int | None) -> str:
    """Write a code with its name."""
    return "no answer" if code is None else f"{code} {code_name(code)}" if code else "0"


def address_text(host: str, port: int) -> str:
    """Write an address, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def count_text(number: int, noun: str) -> str:
    """Write a number and its noun, which takes an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size_text(number: int) -> str:
    """Write a number of bytes as a reader would."""
    left = float(number)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if left < _KIB:
            return f"{left:.4g} {unit}"
        left /= _KIB
    return f"{left:.4g} TiB"
