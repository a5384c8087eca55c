"""Programmable faults of the in-memory engine: codes, delays and hangs, per method."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeGuard

from aiomooncake.errors import InvalidArgumentError

__all__ = ["Fault", "FaultBoard"]


class Fault:
    """What happens to the calls of one method, until it is removed or used up.

    It strikes on the calling thread, so that the layers above see a native call that really
    blocks: first the hold, then the delay, then the code. Without a code the call goes on as if
    nothing had been; without any of them it is only counted.

    Args:
        method: Native method, such as ``"put"``.
        code: Engine code that the call fails with, in the shape that the method fails in: a code
            per key, ``b""`` from ``get``, and so on.
        delay: Seconds the call takes longer.
        hold: The call hangs until this event is set.
        times: Calls it strikes; None = all until it is removed.
        hostname: Only the client with this hostname (as given to ``setup``, or with the port it
            got) is struck; None = every client.
        remove: Takes the fault off the board.

    Raises:
        InvalidArgumentError: A value that cannot be meant.
    """

    __slots__ = (
        "_hits",
        "_lock",
        "_remove",
        "code",
        "delay",
        "hold",
        "hostname",
        "method",
        "times",
    )

    def __init__(
        self,
        method: str,
        *,
        code: int | None,
        delay: float,
        hold: threading.Event | None,
        times: int | None,
        hostname: str | None,
        remove: Callable[[Fault], None],
    ) -> None:
        _check(code, delay, hold, times)
        self.method = method
        self.code = code
        self.delay = delay
        self.hold = hold
        self.times = times
        self.hostname = hostname
        self._hits = 0
        self._lock = threading.Lock()
        self._remove = remove

    @property
    def hits(self) -> int:
        """Calls struck so far; one that is held counts from its beginning."""
        return self._hits

    def remove(self) -> None:
        """Let later calls through; calls that are held stay until their event is set."""
        self._remove(self)

    def claim(self, method: str, hostnames: tuple[str, ...]) -> bool:
        """Count a call if this fault is meant for it."""
        if method != self.method:
            return False
        if self.hostname is not None and self.hostname not in hostnames:
            return False
        with self._lock:
            if self.times is not None and self._hits >= self.times:
                return False
            self._hits += 1
        return True

    def strike(self) -> int | None:
        """Block as programmed; the code to fail with, or None."""
        if self.hold is not None:
            self.hold.wait()
        if self.delay > 0:
            time.sleep(self.delay)
        return self.code

    def __repr__(self) -> str:
        times = "" if self.times is None else f"/{self.times}"
        held = "" if self.hold is None else " hold"
        return (
            f"<Fault {self.method} code={self.code} delay={self.delay}{held} "
            f"hits={self._hits}{times}>"
        )


def _check(code: object, delay: object, hold: object, times: object) -> None:
    """Refuse here what would fail in the middle of a call, on its thread, or never strike."""
    if code is not None and not (_is_integer(code) and code < 0):
        raise InvalidArgumentError(
            f"code must be a code of the engine's, an integer below 0, got {code!r}"
        )
    if isinstance(delay, bool) or not (isinstance(delay, (int, float)) and 0 <= delay < math.inf):
        raise InvalidArgumentError(f"delay must be a number of seconds from 0 on, got {delay!r}")
    if hold is not None and not isinstance(hold, threading.Event):
        raise InvalidArgumentError(
            f"hold must be a threading.Event, because calls wait for it on threads, got {hold!r}"
        )
    if times is not None and not (_is_integer(times) and times > 0):
        raise InvalidArgumentError(
            f"times must be a number of calls from 1 on, or None for all of them, got {times!r}"
        )


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


class FaultBoard:
    """The faults of one engine. Thread-safe; empty (and false) most of the time."""

    def __init__(self) -> None:
        self._faults: tuple[Fault, ...] = ()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._faults)

    def add(
        self,
        method: str,
        *,
        code: int | None,
        delay: float,
        hold: threading.Event | None,
        times: int | None,
        hostname: str | None,
    ) -> Fault:
        """Put a fault on the board; see :class:`Fault`."""
        fault = Fault(
            method,
            code=code,
            delay=delay,
            hold=hold,
            times=times,
            hostname=hostname,
            remove=self._drop,
        )
        with self._lock:
            self._faults = (*self._faults, fault)
        return fault

    def _drop(self, fault: Fault) -> None:
        with self._lock:
            self._faults = tuple(other for other in self._faults if other is not fault)

    def strike(self, method: str, hostnames: tuple[str, ...]) -> int | None:
        """Let every fault meant for this call strike, in the order they were added."""
        for fault in self._faults:
            if fault.claim(method, hostnames):
                code = fault.strike()
                if code is not None:
                    return code
        return None
