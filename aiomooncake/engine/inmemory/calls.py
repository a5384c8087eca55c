"""The way into each method of the in-memory store: its state, its faults, its ways to fail."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from aiomooncake.engine.inmemory.memory import LocalBuffer
from aiomooncake.engine.inmemory.objects import INTERNAL, INVALID_PARAMS, InMemoryEngine
from aiomooncake.engine.protocol import Allocated

__all__ = [
    "Client",
    "Life",
    "code",
    "code_per_key",
    "code_per_range",
    "crash",
    "empty_dict",
    "empty_list",
    "internal",
    "native",
    "no_hostname",
    "segments",
]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Client")
Failure = Callable[..., Any]
"""Makes a method's answer from an error code and the arguments of the call."""


class Life(Enum):
    """Where a client is in its one life."""

    NEW = "before setup"
    FAILED = "after a setup that failed"
    OPEN = "open"
    CLOSED = "after close"


class Client:
    """What a native client has before it has any methods."""

    def __init__(self, engine: InMemoryEngine, rpc_timeout: float) -> None:
        self._engine = engine
        self._rpc_timeout = rpc_timeout
        self._life = Life.NEW
        self._local = LocalBuffer(0)
        self._hostnames: tuple[str, ...] = ()
        self._blocked: dict[int, str] = {}
        """Calls that a fault or a frozen master holds up just now, by thread."""

    def _disturb(self, method: str, *, asks_master: bool) -> int | None:
        """Let the engine's faults act on this call; the code to fail with, or None."""
        thread = threading.get_ident()
        self._blocked[thread] = method
        try:
            answer = self._engine.disturb(
                method, self._hostnames, asks_master=asks_master, rpc_timeout=self._rpc_timeout
            )
        finally:
            self._blocked.pop(thread, None)
        if self._life is Life.CLOSED:
            raise crash(method, "while close() runs")
        return answer


def crash(method: str, when: str) -> RuntimeError:
    """Return the error that stands for the engine's segmentation fault."""
    return RuntimeError(f"{method}() {when} would crash the process (SIGSEGV in the real engine)")


def code(answer: int, *_args: Any, **_kwargs: Any) -> int:
    """Fail with the code itself."""
    return answer


def code_per_key(answer: int, keys: Sequence[str], *_args: Any, **_kwargs: Any) -> list[int]:
    """Fail with the code for every key."""
    return [answer] * len(keys)


def code_per_range(answer: int, *args: Any, **kwargs: Any) -> list[list[list[int]]]:
    """Fail with the code for every range."""
    all_sizes = kwargs["all_sizes"] if "all_sizes" in kwargs else args[-1]
    return [[[answer] * len(sizes) for sizes in per_key] for per_key in all_sizes]


def segments(_answer: int, *_args: Any, **_kwargs: Any) -> Allocated:
    """Fail as the mounting methods do: always -1."""
    return {"ret": INTERNAL, "segment_ids": [], "allocated_size": 0}


def internal(_answer: int, *_args: Any, **_kwargs: Any) -> int:
    """Fail with -1, whatever went wrong."""
    return INTERNAL


def empty_list(_answer: int, *_args: Any, **_kwargs: Any) -> list[Any]:
    """Fail with an empty list."""
    return []


def empty_dict(_answer: int, *_args: Any, **_kwargs: Any) -> dict[Any, Any]:
    """Fail with an empty dict."""
    return {}


def no_hostname(_answer: int) -> str:
    """Fail with an empty text."""
    return ""


_CRASHES: Final = None


def native(
    fails: Failure,
    *,
    unset: Failure | None = _CRASHES,
    fragile: bool = False,
    asks_master: bool = True,
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Guard a method as the real one is guarded.

    Args:
        fails: What it answers for an error code.
        unset: What it answers for -600 before ``setup`` and after ``close``; None = it crashes
            (measured, one by one, in forked children of the real engine).
        fragile: Whether it crashes after a failed ``setup`` too.
        asks_master: Whether it needs the master. The others go on when the master is gone.
    """

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        name = method.__name__

        @functools.wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if self._life is not Life.OPEN:
                failed = self._life is Life.FAILED
                answer = fails if failed and not fragile and unset is None else unset
                if answer is None:
                    raise crash(name, self._life.value)
                return answer(INVALID_PARAMS, *args, **kwargs)  # type: ignore[no-any-return]
            if not self._engine.calm:
                wrong = self._disturb(name, asks_master=asks_master)
                if wrong is not None:
                    return fails(wrong, *args, **kwargs)  # type: ignore[no-any-return]
            return method(self, *args, **kwargs)

        return call

    return decorate
