"""What the threads of stores do for a loop in virtual time.

The counts that a store keeps go down a moment before its loop is told, and they do not say which
calls only wait: they can't tell whether a thread has something to say yet. So while loops in
virtual time run, the few places through which all calls of stores go are wrapped.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future as ThreadFuture
from typing import Any, Final

from aiomooncake.engine.client import EngineClient
from aiomooncake.engine.inmemory import Fault, InMemoryEngine
from aiomooncake.engine.workers import Call, Lane, Visit

__all__ = ["Watch", "watching"]


class Watch:
    """The calls of one loop's stores that are not over, and its stores that are being closed."""

    def __init__(self) -> None:
        self.calls: set[Call] = set()
        self.closing: set[EngineClient] = set()

    @property
    def at_work(self) -> bool:
        """Whether a thread does something that the loop may be waiting for."""
        return any(map(_is_at_work, list(self.calls))) or any(map(_is_closing, list(self.closing)))


_waits: Final[dict[int, threading.Event]] = {}
"""What threads wait for that only a test brings, by native id."""


def _is_at_work(call: Call) -> bool:
    if isinstance(call, Visit):  # on a thread of the user's
        return True
    if call.dropped or call.abandoned:
        return False
    event = _waits.get(call.native_id) if call.started else None
    return event is None or event.is_set()


def _is_closing(client: EngineClient) -> bool:
    calls = client.gate.calls()
    # The closing waits for these; without any it is about to tear down, or to tell that it has.
    return not calls or any(map(_is_at_work, calls))


def _watch_of(loop: object) -> Watch | None:
    watch = getattr(loop, "watch", None)
    return watch if isinstance(watch, Watch) else None


# --- calls ------------------------------------------------------------------------------------


class _Told:
    """What a thread does at the end of a call; after it the call is over."""

    def __init__(self, watch: Watch, tell: Callable[[Call], None]) -> None:
        self._watch = watch
        self._tell = tell

    def __call__(self, call: Call) -> None:
        self._tell(call)
        if call.on_done is self:  # else the call is drained, and there is more to be told
            self._watch.calls.discard(call)


_submit_itself = Lane.submit
_drain_itself = EngineClient._drain  # noqa: SLF001  # that is what this module is for


def _submit(lane: Lane, call: Call) -> None:
    watch = _watch_of(asyncio._get_running_loop())  # noqa: SLF001  # a documented function
    if watch is not None:
        call.on_done = _Told(watch, call.on_done)
        watch.calls.add(call)
    try:
        _submit_itself(lane, call)
    except BaseException:
        if watch is not None:
            watch.calls.discard(call)
        raise


async def _drain(client: EngineClient, call: Call, loop: asyncio.AbstractEventLoop) -> None:
    try:
        await _drain_itself(client, call, loop)
    finally:
        watch = _watch_of(loop)
        if watch is not None:
            watch.calls.discard(call)


# --- closing ----------------------------------------------------------------------------------

_start_closing_itself = EngineClient._start_closing  # noqa: SLF001
_close_itself = EngineClient._close_in_thread  # noqa: SLF001


def _start_closing(client: EngineClient, closing: ThreadFuture[None]) -> None:
    watch = _watch_of(client._loop)  # noqa: SLF001
    if watch is not None:
        watch.closing.add(client)
    _start_closing_itself(client, closing)


def _close(client: EngineClient, closing: ThreadFuture[None]) -> None:
    try:
        _close_itself(client, closing)
    finally:
        watch = _watch_of(client._loop)  # noqa: SLF001
        if watch is not None:
            watch.closing.discard(client)


# --- hanging in the in-memory engine ----------------------------------------------------------

_strike_itself = Fault.strike
_disturb_itself = InMemoryEngine.disturb


def _strike(fault: Fault) -> int | None:
    with _waiting_for(fault.hold):
        return _strike_itself(fault)


def _disturb(
    engine: InMemoryEngine,
    method: str,
    hostnames: tuple[str, ...],
    *,
    asks_master: bool,
    rpc_timeout: float,
) -> int | None:
    with _waiting_for(engine._thawed if asks_master else None):  # noqa: SLF001
        return _disturb_itself(
            engine, method, hostnames, asks_master=asks_master, rpc_timeout=rpc_timeout
        )


@contextlib.contextmanager
def _waiting_for(event: threading.Event | None) -> Iterator[None]:
    """Say what this thread is going to wait for; when that is there already, it is at work."""
    thread = threading.get_native_id()
    before = _waits.pop(thread, None)
    if event is not None:
        _waits[thread] = event
    try:
        yield
    finally:
        _waits.pop(thread, None)
        if before is not None:
            _waits[thread] = before


# --- while loops in virtual time run ----------------------------------------------------------


class _Wrapping:
    """Wraps the places for the first loop that runs, and unwraps them after the last."""

    _PLACES: Final[tuple[tuple[type, str, Any, Any], ...]] = (
        (Lane, "submit", _submit_itself, _submit),
        (EngineClient, "_drain", _drain_itself, _drain),
        (EngineClient, "_start_closing", _start_closing_itself, _start_closing),
        (EngineClient, "_close_in_thread", _close_itself, _close),
        (Fault, "strike", _strike_itself, _strike),
        (InMemoryEngine, "disturb", _disturb_itself, _disturb),
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loops = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._loops += 1
            if self._loops == 1:
                for owner, name, _, wrapped in self._PLACES:
                    setattr(owner, name, wrapped)
        try:
            yield
        finally:
            with self._lock:
                self._loops -= 1
                if not self._loops:
                    for owner, name, itself, _ in self._PLACES:
                        setattr(owner, name, itself)


watching: Final = _Wrapping()
"""The context in which a loop in virtual time runs."""
