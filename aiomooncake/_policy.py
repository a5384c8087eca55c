"""What a warm-up is told and what it tells: policy, attempts, report. Public by ``warmup``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from aiomooncake.errors import InvalidArgumentError

__all__ = ["Step", "WarmupAttempt", "WarmupPolicy", "WarmupProgress", "WarmupReport"]

Step = Literal["register", "put", "exists", "get", "done"]

_MAX_VALUE: Final = 16 * 1024 * 1024
"""Bytes of a probe value at most: filling and comparing it happens on the loop (4 ms for these)."""

_ABOVE_0: Final = math.ulp(0.0)


@dataclass(frozen=True, slots=True)
class WarmupPolicy:
    """How long and how often to try.

    Attributes:
        timeout: Seconds for all attempts together; None for no such bound.
        max_attempts: Attempts at most; None for no such bound. One of the two must be set.
        initial_delay: Seconds to wait after the first failed attempt.
        backoff: What each further wait is multiplied with.
        max_delay: Seconds that a wait grows to at most.
        jitter: Share by which each wait is lengthened at random, at most.
        attempt_timeout: Seconds for one attempt; a call that is still under way then is abandoned.
        value_size: Bytes of the value that is written and read.
        key_prefix: What the key of a probe begins with; 32 random digits follow.

    Raises:
        InvalidArgumentError: A value is out of its range.
    """

    timeout: float | None = 60.0
    max_attempts: int | None = None
    initial_delay: float = 0.1
    backoff: float = 2.0
    max_delay: float = 1.0
    jitter: float = 0.1
    attempt_timeout: float = 10.0
    value_size: int = 4096
    key_prefix: str = "aiomooncake_warmup_"

    def __post_init__(self) -> None:
        """Refuse what makes no sense, before anything waits for it."""
        if self.timeout is None and self.max_attempts is None:
            raise InvalidArgumentError(
                "WarmupPolicy: timeout and max_attempts are both None, so a warm-up could go on "
                "for ever; set one of them"
            )
        if self.timeout is not None:
            _check("timeout", self.timeout, "a number of seconds above 0, or None")
        if self.max_attempts is not None:
            _check("max_attempts", self.max_attempts, "a count of at least 1, or None", least=1)
        _check("initial_delay", self.initial_delay, "a number of seconds above 0")
        _check("backoff", self.backoff, "a factor of at least 1", least=1)
        _check("max_delay", self.max_delay, "initial_delay or more", least=self.initial_delay)
        _check("jitter", self.jitter, "a share from 0 to 1", least=0, most=1)
        _check("attempt_timeout", self.attempt_timeout, "a number of seconds above 0")
        size = f"a number of bytes from 1 to {_MAX_VALUE}"
        _check("value_size", self.value_size, size, least=1, most=_MAX_VALUE)

    @classmethod
    def sglang(cls) -> WarmupPolicy:
        """Return the contract of SGLang's Mooncake backend: ten tries, 1.0 s apart, no jitter."""
        return cls(
            timeout=None, max_attempts=10, initial_delay=1.0, backoff=1.0, max_delay=1.0, jitter=0.0
        )


@dataclass(frozen=True, slots=True)
class WarmupAttempt:
    """One attempt: what it came to.

    Attributes:
        number: Which one, from 1.
        step: The step that failed, or ``done``.
        code: The engine's answer; None if there was none (a call that hung, a read without data).
        name: The code's name, ``OK``, or what stands for it: ``TIMEOUT``, ``NOT_FOUND``,
            ``NO_DATA``, ``WRONG_DATA``, ``TOO_MANY_ABANDONED``.
        seconds: How long it took.
        delay: Seconds waited afterwards; for the hook those that are planned.
    """

    number: int
    step: Step
    code: int | None
    name: str
    seconds: float
    delay: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether all three steps went well."""
        return self.step == "done"

    def __str__(self) -> str:
        """Return what a log line says of it: step and answer."""
        return f"{self.step} ret={self.name if self.code is None else f'{self.code} {self.name}'}"


@dataclass(frozen=True, slots=True)
class WarmupProgress:
    """What the per-attempt hook is told.

    Attributes:
        rank: Which rank tried; None for a store without one.
        hostname: The store's own address.
        attempt: What the attempt came to.
    """

    rank: int | str | None
    hostname: str
    attempt: WarmupAttempt


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """A warm-up that went well.

    Attributes:
        rank: Which rank it was; None for a store without one.
        hostname: The store's own address.
        attempts: All attempts, oldest first; the last one is the successful one.
        seconds: From the start until the store was ready.
    """

    rank: int | str | None
    hostname: str
    attempts: tuple[WarmupAttempt, ...]
    seconds: float

    @property
    def tries(self) -> int:
        """How many attempts it took."""
        return len(self.attempts)


def _check(
    field: str, value: object, wanted: str, *, least: float = _ABOVE_0, most: float = math.inf
) -> None:
    """Refuse what is no number from ``least`` to ``most``, and say what would be right."""
    if isinstance(value, (int, float)) and math.isfinite(value) and least <= value <= most:
        return
    raise InvalidArgumentError(f"WarmupPolicy: {field}={value!r} must be {wanted}")
