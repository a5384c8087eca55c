"""Threads of one store: jobs, lanes, and what happens to a call that nobody waits for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["Call", "Lane", "stopping"]


def _nothing() -> None:
    """Stand for the job of a call that is over."""


class Call:
    """One job for a worker thread: what it does, how old it is, what came of it.

    A call is *queued*, then *running*, then *done*; or *dropped* before it started. The thread
    that runs it, not the task that awaits it, decides when it is over.
    """

    __slots__ = (
        "abandoned",
        "args",
        "aside",
        "dropped",
        "error",
        "finished",
        "fn",
        "name",
        "native_id",
        "on_done",
        "result",
        "started",
        "stop",
        "tidies",
    )

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        on_done: Callable[[Call], None],
    ) -> None:
        self.name = name
        self.fn = fn
        self.args = args
        self.on_done = on_done
        self.result: Any = None
        self.error: BaseException | None = None
        self.started = 0.0  # time.monotonic(), 0.0 while queued
        self.finished = 0.0
        self.native_id = 0
        self.dropped = False
        # Done also when the store closes, which would leave something behind without it.
        self.tidies = False
        self.abandoned = False
        self.aside = False
        # Jobs of several native calls (a large value in pieces) look at this between them.
        self.stop = False

    @property
    def age(self) -> float:
        """Seconds since a thread took the call up; 0.0 while it is queued."""
        return time.monotonic() - self.started if self.started else 0.0

    def run(self) -> None:
        """Do the job on this thread; never raises. Whoever runs it reports it by ``on_done``."""
        fn, args = self.fn, self.args
        self.take_up()
        _current.call = self
        try:
            self.result = fn(*args)
        except BaseException as exc:  # noqa: BLE001  # whoever awaits the call gets it
            self.error = exc
        finally:
            _current.call = None
        # Drop the arguments before anybody hears of the end: whoever waits for a buffer to be
        # let go must find it let go.
        self.forget()
        del fn, args
        self.finished = time.monotonic()

    def take_up(self) -> None:
        """Note that this thread runs the call from now on."""
        if not self.started:
            # In this order: whoever finds it started finds the thread too.
            self.native_id = threading.get_native_id()
            self.started = time.monotonic()

    def outcome(self) -> Any:
        """Return the result of a job that is over, or raise its error, once.

        The error's traceback leads to this call: kept here it would be a cycle, which holds the
        caller's memory until somebody collects garbage.
        """
        error, self.error = self.error, None
        if error is None:
            return self.result
        try:
            raise error
        finally:
            del error

    def forget(self) -> None:
        """Let go of what the call was going to use, or has used."""
        self.fn = _nothing
        self.args = ()

    def __repr__(self) -> str:
        state = "done" if self.finished else f"{self.age:.1f} s" if self.started else "queued"
        return f"<Call {self.name} {state}>"


class Visit(Call):
    """A call that runs on the thread of its caller: only what the gate asks of a call."""

    __slots__ = ()

    def __init__(self, name: str, on_done: Callable[[Call], None]) -> None:
        # Not by super(): most of the rest is for threads and those who wait.
        self.name = name
        self.on_done = on_done
        self.error = None
        self.tidies = False
        self.started = time.monotonic()
        self.finished = 0.0


_current = threading.local()


def stopping() -> bool:
    """Whether nobody waits any more for the job that runs on this thread.

    Jobs of several native calls ask between them.
    """
    call: Call | None = getattr(_current, "call", None)
    return call is not None and call.stop


class Lane:
    """A queue with up to ``limit`` threads of its own, grown when they are needed.

    A thread whose call was set aside no longer counts against ``limit``: another one may take
    its place, so that a stuck call does not hold those that came after it. It leaves when its
    call returns.

    The threads are daemons, because non-daemon ones make the interpreter wait for a call that
    is stuck on a frozen peer. What that would risk at exit is taken care of in
    :mod:`aiomooncake.engine.process`.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0  # alive and not lost to a call that was set aside
        self._wanted = 0  # calls queued or running, without those
        self.aside = 0  # calls set aside that still run
        self._serial = 0
        self._closed = False

    def submit(self, call: Call) -> None:
        """Queue a call.

        Raises:
            RuntimeError: No thread could be started (and none is there).
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the lane {self.name} is closed")
            self._wanted += 1
            if self._wanted > self._threads and self._threads < self.limit:
                try:
                    self._spawn()
                except RuntimeError:
                    if not self._threads:
                        self._wanted -= 1
                        raise
            self._queue.put(call)

    def drop(self, call: Call) -> bool:
        """Take a call back that no thread has taken up; False when it is too late."""
        with self._lock:
            if call.started or call.finished:
                return False
            call.dropped = True
            call.forget()
            return True

    def abandon(self, call: Call) -> bool:
        """Give up on a call that is running; False when it has ended meanwhile."""
        with self._lock:
            if call.finished or call.abandoned:
                return False
            call.abandoned = True
            call.stop = True
        self.set_aside(call)
        return True

    def set_aside(self, call: Call) -> bool:
        """Let another thread in for a call that takes long; False when it is not running."""
        with self._lock:
            if call.finished or not call.started or call.aside:
                return False
            call.aside = True
            self.aside += 1
            self._threads -= 1
            self._wanted -= 1
            if self._wanted > self._threads and not self._closed:
                # Without a replacement the queue still moves when this thread comes back.
                with contextlib.suppress(RuntimeError):
                    self._spawn()
        # Its priority stays: a thread of a low one that takes the GIL on a busy machine holds up
        # the loop for seconds, and all threads that it starts inherit it, the engine's own too.
        return True

    def close(self) -> None:
        """Let the threads go when the queue is empty; does not wait for them."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._queue.put(None)

    def forked(self) -> None:
        """Forget the threads, which do not exist in a forked child, and a lock they may hold."""
        self._lock = threading.Lock()
        self._threads = 0
        self._closed = True

    def _spawn(self) -> None:
        self._serial += 1
        thread = threading.Thread(
            target=self._work, name=f"aiomooncake-{self.name}-{self._serial}", daemon=True
        )
        thread.start()
        self._threads += 1

    def _work(self) -> None:
        while True:
            call = self._queue.get()
            if call is None:
                return
            with self._lock:
                if call.dropped:
                    self._wanted -= 1
                    continue
                call.take_up()
            call.run()
            # Free before anybody hears of the end: a task that calls again at once finds this
            # thread, which is warm, instead of starting or waking another one.
            with self._lock:
                if call.aside:
                    self.aside -= 1
                else:
                    self._wanted -= 1
            call.on_done(call)
            aside = call.aside
            # Also of a thread that ends: a traceback that somebody keeps may hold its frame.
            del call
            if aside:  # already replaced
                return

    def __repr__(self) -> str:
        return f"<Lane {self.name} threads={self._threads}/{self.limit} calls={self._wanted}>"
