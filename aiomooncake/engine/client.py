"""One open native client: its gate, its threads, and the way from a task to a native call."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import wait
from functools import partial
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import anyio

from aiomooncake._codes import RPC_CODES
from aiomooncake.engine import blocks
from aiomooncake.engine.binding import NativeStore
from aiomooncake.engine.gate import Gate, State
from aiomooncake.engine.lifecycle import give_memory_back
from aiomooncake.engine.peers import PeerWatch
from aiomooncake.engine.process import track, untrack
from aiomooncake.engine.reopening import Reopening
from aiomooncake.engine.shared import SharedMemory, mended
from aiomooncake.engine.watch import MasterWatch
from aiomooncake.engine.workers import Call, Lane, Visit
from aiomooncake.errors import (
    InternalError,
    MooncakeError,
    StoreClosedError,
    WrongLoopError,
    rank_label,
)
from aiomooncake.observe.counters import Counters
from aiomooncake.observe.logs import StoreLog

T = TypeVar("T")
Job = Callable[[Sequence[Any]], Sequence[Any]]
"""Does the work for items that have a key, and answers a result or an error for each."""

__all__ = ["OVERDUE", "TAINT_AFTER", "EngineClient", "close_dropped"]

TAINT_AFTER = 55.0
"""Seconds in one native call after which its store is not trusted any more.

A transfer that reaches the engine's own limit of 60 s stays queued and writes later.
"""

# A dummy client gives up a request after 30 s, which nothing can change, and the process that was
# frozen does it when it goes on.
_DUMMY_TAINT_AFTER = 25.0

OVERDUE = 0.1
"""Seconds after which a call no longer holds up those behind it in the lane of small ones."""

_KNOCK_AGAIN: Final = 1.0
"""Seconds between two knocks at peers while a large value is on its way."""

# What health_check() of a native object answers after its close(), and before its set-up.
_CLOSED: Final = 1
_BULK_THREADS = 2
_CONTROL_THREADS = 2
_HEDGE_THREADS = 4


@runtime_checkable
class Forgettable(Protocol):
    """What has registered memory with a client, and can take that back."""

    def forget(self, native: NativeStore) -> None:
        """Unregister the memory. Blocking."""

    def drop(self) -> None:
        """Let go of the memory."""


@runtime_checkable
class Renewable(Protocol):
    """What has registered memory with a client, and does it again with a new native object."""

    def renew(self, native: NativeStore) -> bool:
        """Register the memory with the new object, for the old one is gone; whether it knows it."""


def _nothing() -> None:
    """Stand for an ``over`` that nobody gave."""


def _ignore(_: object) -> None:
    """Stand for an ``on_lane`` that nobody set."""


class EngineClient:
    """A native object in its one life, and the only way to call it.

    Args:
        rank: Rank of the store, for messages.
        threads: Threads of the small lane.
        max_abandoned: Stuck calls nobody waits for, beyond which new calls fail at once.
        tear_down: Ends the object's life (blocking), or None when it belongs to somebody else.
        guarded: Whether the object must be kept from forks and from the interpreter's exit.
        shared: The shared memory of an object that works through a stand-alone client process.
    """

    def __init__(
        self,
        *,
        rank: int | str | None,
        threads: int,
        max_abandoned: int,
        tear_down: Callable[[Any], object] | None,
        guarded: bool,
        shared: SharedMemory | None = None,
    ) -> None:
        self.native: NativeStore | None = None
        self.rank = rank
        self.gate = Gate(rank, max_abandoned)
        label = rank_label(rank) or "store"
        self.control = Lane(f"{label}-control", _CONTROL_THREADS)
        self.small = Lane(f"{label}-small", threads)
        self.bulk = Lane(f"{label}-bulk", _BULK_THREADS)
        self.hedge = Lane(f"{label}-hedge", _HEDGE_THREADS)
        self._lanes = (self.control, self.small, self.bulk, self.hedge)
        self.counters = Counters()
        self.dummy = shared is not None
        self.by_value = shared is None or shared.by_value
        self._shared = shared
        self._taint_after = TAINT_AFTER if shared is None else _DUMMY_TAINT_AFTER
        self._max_aside = max_abandoned
        self._tear_down = tear_down
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._closing: ThreadFuture[None] | None = None
        self._kept: dict[int, object] = {}  # by identity: threads add while others take away
        self.hostname = ""
        self.watch: MasterWatch | None = None
        self.reopening: Reopening | None = None
        # Done when nothing can be written late any more; None when there is nothing to wait for.
        self.late_writes: ThreadFuture[None] | None = None
        self.peers: PeerWatch | None = None
        self.since = time.time()
        self.closed_by_owner = False
        self.on_change: Callable[[], object] = _nothing
        self.on_lane: Callable[[Any], object] = _ignore  # told of each new lane of waiting calls
        track(self, guarded=guarded)

    async def set_up(self, set_up: Callable[[Callable[[NativeStore], None]], int]) -> int:
        """Run the blocking set-up in a thread and open the gate if its code is 0.

        ``set_up`` gets a function to hand the native object to as soon as it exists. When this
        await is cancelled, :meth:`begin_close` tears the object down after the set-up returned.
        """
        code = await self.run(self.control, "setup", set_up, self._keep, opening=True)
        if code == 0:
            self.gate.open()
            self.since = time.time()
        return code

    def take(self, native: NativeStore) -> None:
        """Open the gate to an object that somebody else has set up."""
        self._keep(native)
        self.gate.open()

    def _keep(self, native: NativeStore) -> None:
        self.native = native

    @property
    def owns_native(self) -> bool:
        """Whether closing tears the native object down."""
        return self._tear_down is not None

    @property
    def native_object(self) -> NativeStore:
        """The native object, for jobs that were let in."""
        native = self.native
        if native is None:
            raise InternalError("a job ran before the set-up", rank=self.rank)
        return native

    def move(self, method: Callable[..., T], *args: Any) -> T:
        """Make one native call that moves bytes, on the thread of a job.

        Raises:
            MemoryLostError: Memory that it names is not shared with the stand-alone client any
                more; other keys of the call may be stored or read.
        """
        answer = self.timed(method, *args)
        if self._shared is not None:
            self._shared.check(self.native_object, args, answer)
        return answer

    def timed(self, method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Make one native call that moves bytes, and leave its answer to the caller.

        One that took too long may go on in the transport, so the store is tainted by it.
        """
        began = time.monotonic()
        try:
            return method(*args, **kwargs)
        finally:
            seconds = time.monotonic() - began
            if seconds >= self._taint_after:
                if self.reopening is not None:
                    self._expect_late_writes()
                self.gate.taint(f"a transfer was in the engine for {seconds:.0f} s")
                if self.reopening is not None:
                    self.reopening.begin()

    def _expect_late_writes(self) -> None:
        with self._lock:
            if self.late_writes is None:
                self.late_writes = ThreadFuture()

    def no_late_writes(self) -> None:
        """Give memory back that the native object could write into: it is torn down."""
        with self._lock:
            ended, self.late_writes = self.late_writes, None
        if ended is not None:
            ended.set_result(None)

    async def written(self) -> None:
        """Wait until the engine can't write any more into memory of calls that have ended."""
        ended = self.late_writes
        if ended is None:
            return
        over = asyncio.wrap_future(ended)
        cancelled: asyncio.CancelledError | None = None
        # As in draining: whoever is cancelled meanwhile must not have the memory back either.
        with anyio.CancelScope(shield=True):
            while not over.done():
                try:
                    await asyncio.shield(over)
                except asyncio.CancelledError as exc:
                    cancelled = exc
        if cancelled is not None:
            raise cancelled

    def note_error(self, error: MooncakeError) -> None:
        """Count an error that the engine answered, and look into one that may be an outage."""
        self.counters.count_code(error.code_name)
        if error.code in RPC_CODES:
            self.suspect_master()

    def suspect_master(self) -> None:
        """Look whether the master is there, since a request to it failed; from any thread."""
        if self.watch is not None:
            self.watch.suspect()

    @property
    def log(self) -> StoreLog:
        """The logger, for what concerns this store."""
        return StoreLog(self.rank, self.hostname)

    @property
    def master_away(self) -> bool:
        """Whether the master is known not to answer."""
        return self.watch is not None and self.watch.presence == "away"

    def changed(self) -> None:
        """Note that the store's health has changed; from any thread."""
        self.since = time.time()
        self.on_change()

    def owner_has_closed(self, code: int) -> bool:
        """Learn from an answer of ``health_check()`` whether an adopted object was closed.

        Once closed, it stays so for this store: what it has registered is gone, even when the owner
        sets the object up again.
        """
        if not self.closed_by_owner and code == _CLOSED and not self.owns_native:
            self.closed_by_owner = True
            self.changed()
        return self.closed_by_owner

    def call_on_loop(self, fn: Callable[[], object]) -> None:
        """Call something on the store's loop, or here if it has none that runs."""
        loop = self._loop
        if loop is not None and loop.is_running():
            with contextlib.suppress(RuntimeError):  # it is closed meanwhile
                loop.call_soon_threadsafe(fn)
                return
        fn()

    def keep_until_gone(self, thing: object) -> None:
        """Hold on to memory that the engine may touch until it is torn down."""
        self._kept[id(thing)] = thing

    def keep_no_longer(self, thing: object, *, never_known: bool = False) -> None:
        """Let go of memory that the engine does not know any more; unless nothing is certain."""
        if never_known or self.gate.trusted:
            self._kept.pop(id(thing), None)

    # ------------------------------------------------------------------ calls

    async def run(
        self,
        lane: Lane,
        name: str,
        fn: Callable[..., T],
        *args: Any,
        reads: bool = False,
        drain: bool = False,
        opening: bool = False,
        bounded: bool = False,
        trial: bool = False,
        giving_back: bool = False,
        keys: int = 0,
        over: Callable[[], None] = _nothing,
        knock: Callable[[], object] | None = None,
    ) -> T:
        """Run a blocking job on a lane and await it.

        Cancelled while it waits for a thread, the job never runs. Cancelled while it runs, the
        await ends at once and the job is counted as abandoned; with ``drain`` the job names
        memory of the caller, so it is waited for first, however often the task is cancelled.
        ``over`` is called once, on any thread, when the job has ended or will never run.
        A ``bounded`` job can't get stuck, and is let in however many others are; a ``trial`` also
        while the master is away; one that is ``giving_back`` memory also while the store is opened
        anew, once there is an object that may know the memory. ``keys`` is how many travel in it,
        where it is a batch. ``knock`` is called again and again on the loop while a job of the bulk
        lane takes long: it knocks at the peers that may be the cause (by default at all that are
        known).

        Raises:
            MooncakeError: What :meth:`Gate.enter` refuses, and what the job raises.
            WrongLoopError: Another live event loop uses this store.
        """
        try:
            loop = self.use_loop(name)
        except BaseException:
            over()
            raise
        waiter: asyncio.Future[None] = loop.create_future()

        def on_done(call: Call) -> None:
            over()
            self._over(call, keys)
            # The loop may be closed under a call that is still running.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, waiter)

        call = Call(name, self._guarded(name, fn), args, on_done)
        try:
            self._enter(
                call,
                reads=reads,
                opening=opening,
                trial=trial,
                bounded=bounded,
                giving_back=giving_back,
            )
            self._submit(lane, call)
        except BaseException:
            over()
            raise
        timers: list[asyncio.TimerHandle] = []
        if lane in (self.small, self.hedge):
            timers.append(loop.call_later(OVERDUE, self._late, lane, call, timers))
        elif lane is self.bulk and self.peers is not None:
            knock = knock or self.peers.suspect_all
            timers.append(loop.call_later(OVERDUE, self._slow, knock, timers))
        try:
            await waiter
        except asyncio.CancelledError:
            if lane.drop(call):
                self.gate.leave(call)
                over()
            elif drain:
                call.stop = True
                await self._drain(call, loop)
            elif not call.finished:
                self._abandon(lane, call)
            raise
        finally:
            for timer in timers:
                timer.cancel()
        self.note_lag(call)
        return call.outcome()  # type: ignore[no-any-return]

    def start(
        self,
        lane: Lane,
        name: str,
        fn: Job,
        items: Sequence[Any],
        *,
        done: Callable[[Call], object] = _ignore,
        over: Callable[[], None] = _nothing,
        keys: int = 0,
        reads: bool = False,
    ) -> Call:
        """Run a blocking job on a lane; ``done`` gets the call on the loop when it is over.

        ``over`` is called before that, on the job's thread, also when the loop is closed.

        Raises:
            MooncakeError: What the gate refuses.
        """
        loop = asyncio.get_running_loop()

        def on_done(call: Call) -> None:
            over()
            self._over(call, keys)
            # The loop may be closed under a call that is still running.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done, call)

        call = Call(name, self._guarded(name, fn), (items,), on_done)
        self._enter(call, reads=reads)
        self._submit(lane, call)
        return call

    def give_up(self, lane: Lane, call: Call) -> bool:
        """Stop waiting for a call; True if it was queued and is dropped.

        One that runs is counted as abandoned until it ends.
        """
        if lane.drop(call):
            self.gate.leave(call)
            return True
        if not call.finished:
            self._abandon(lane, call)
        return False

    def set_aside(self, lane: Lane, call: Call) -> bool:
        """Keep a started call that takes long from holding up its lane; False when it can't be.

        As many as may be abandoned, since each of them burns a core.
        """
        if self.peers is not None:  # one of them may be frozen
            self.peers.suspect_all()
        if self.dummy:  # a request to a frozen process ends after 30 s, whatever is set
            self.suspect_master()
        return lane.aside < self._max_aside and lane.set_aside(call)

    def _late(self, lane: Lane, call: Call, timers: list[asyncio.TimerHandle]) -> None:
        """Set a call aside that takes long, now or when it is possible."""
        if not self.set_aside(lane, call):  # it waits for a thread, or too many are aside
            loop = asyncio.get_running_loop()
            timers[:] = [loop.call_later(OVERDUE, self._late, lane, call, timers)]

    def _slow(self, knock: Callable[[], object], timers: list[asyncio.TimerHandle]) -> None:
        """Knock at peers while a large value takes long: one may never say its first word."""
        knock()
        loop = asyncio.get_running_loop()
        timers[:] = [loop.call_later(_KNOCK_AGAIN, self._slow, knock, timers)]

    def use_loop(self, name: str) -> asyncio.AbstractEventLoop:
        """Bind this store to the running loop, or count that a call was refused.

        Raises:
            WrongLoopError: Another live event loop uses this store.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._take_loop(loop, name)
        return loop

    def note_lag(self, call: Call) -> None:
        """Note how long the loop took to hear of the end of a call."""
        self.counters.count_lag(time.monotonic() - call.finished)

    def run_blocking(
        self,
        name: str,
        fn: Callable[..., T],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        reads: bool = False,
    ) -> T:
        """Run a blocking job on the calling thread, through the gate."""
        fn = self._guarded(name, fn)
        visit = Visit(name, self._over)
        self._enter(visit, reads=reads)
        try:
            return fn(*args, **kwargs) if kwargs else fn(*args)
        finally:
            visit.finished = time.monotonic()
            self._over(visit)

    def ask(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        """Run a job that can't get stuck on the calling thread, also while the master is away.

        It is a question of our own, and not counted.
        """
        call = Call(name, fn, args, self.gate.leave)
        self.gate.enter(call, trial=True)
        call.run()
        call.on_done(call)
        return call.outcome()  # type: ignore[no-any-return]

    def _guarded(self, name: str, fn: Callable[..., T]) -> Callable[..., T]:
        """Add to a job what its kind of client needs: most need nothing."""
        if self._shared is not None:
            return partial(mended, fn)
        return fn if self.owns_native else partial(self._lent, name, fn)

    def _lent(self, name: str, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a job unless the native object's owner has closed it: most calls would crash.

        The flag is read in 0.4 us.
        """
        if self.owner_has_closed(self.native_object.health_check()):
            error = StoreClosedError(
                f"{name} refused: the owner of this adopted engine has closed it; close the store "
                "before the engine, and adopt one that is open",
                rank=self.rank,
            )
            self.counters.count_refused(error)
            raise error
        return fn(*args, **kwargs)

    def _submit(self, lane: Lane, call: Call) -> None:
        try:
            lane.submit(call)
        except BaseException:
            self.gate.leave(call)
            raise

    def _enter(
        self,
        call: Call,
        *,
        reads: bool,
        opening: bool = False,
        trial: bool = False,
        bounded: bool = False,
        giving_back: bool = False,
    ) -> None:
        """Let a call of the store's user in, or count that it was refused."""
        try:
            if not bounded:
                self.gate.check_abandoned(call.name)
            self.gate.enter(
                call,
                reads=reads,
                opening=opening,
                trial=trial or bounded,
                giving_back=giving_back,
            )
        except MooncakeError as exc:
            self.counters.count_refused(exc)
            raise

    def _over(self, call: Call, keys: int = 0) -> None:
        self.counters.count_job(call.name, call.finished - call.started, keys)
        self.gate.leave(call)

    def _abandon(self, lane: Lane, call: Call) -> None:
        self.gate.note_abandoned(call)
        if lane.abandon(call):
            self.counters.count_given_up()

    async def _drain(self, call: Call, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until the job is over, whatever happens to this task."""
        ended: asyncio.Future[None] = loop.create_future()
        call_over = call.on_done

        def on_done(done: Call) -> None:
            call_over(done)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, ended)

        call.on_done = on_done
        if call.finished:
            return
        # The shield keeps anyio from cancelling again and again; the loop below stands native
        # cancellation, which knows no shield.
        with anyio.CancelScope(shield=True):
            while not ended.done():
                try:
                    await asyncio.shield(ended)
                except asyncio.CancelledError:
                    if ended.cancelled():
                        raise

    def _take_loop(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        with self._lock:
            bound = self._loop
            in_use = self.gate.state in (State.OPEN, State.REOPENING)
            if bound is None or bound.is_closed() or not in_use:
                self._loop = loop
                return
        error = WrongLoopError(
            f"{name} refused: this store belongs to another event loop that is still alive; use "
            "one store per loop, asyncio.run_coroutine_threadsafe to that loop, or "
            "store.blocking from threads without a loop",
            rank=self.rank,
        )
        self.counters.count_refused(error)
        raise error

    # ------------------------------------------------------------------ the end

    def begin_close(self) -> ThreadFuture[None]:
        """Refuse new calls, drop queued ones, and tear down when the last call has returned.

        Needs no loop and never blocks: a thread of its own waits. Idempotent; the future is done
        when the native object is gone.
        """
        with self._lock:
            if self._closing is not None:
                return self._closing
            closing = self._closing = ThreadFuture()
        if self.gate.shut():
            for watch in (self.watch, self.peers):
                if watch is not None:
                    watch.stop()
            self.changed()  # without the lock: the user's hook may close the store too
            self._drop_queued()
            self._start_closing(closing)
        else:  # shut by the interpreter's exit: the object is left as it is
            closing.set_result(None)
        return closing

    def _start_closing(self, closing: ThreadFuture[None]) -> None:
        try:
            threading.Thread(
                target=self._close_in_thread,
                args=(closing,),
                name=f"aiomooncake-{rank_label(self.rank) or 'store'}-close",
                daemon=True,
            ).start()
        except RuntimeError:  # from Python 3.12 on also when the interpreter exits
            self.log.warning("%s is left open: no thread could be started to close it", self)
            closing.set_result(None)

    def quiet(self, timeout: float) -> bool:
        """Wait on this thread until nothing of this object runs, neither call nor close."""
        deadline = time.monotonic() + timeout
        closing = self._closing
        if closing is not None:
            wait([closing], timeout=max(0.0, timeout))
            if not closing.done():
                return False
        return self.gate.drained(max(0.0, deadline - time.monotonic()))

    def forked(self) -> None:
        """Refuse everything; called in a forked child, where no lock can be trusted.

        The threads that would end the calls in flight and a close do not exist here, so these
        are over; nothing of the native object may be touched.
        """
        self._lock = threading.Lock()
        self.counters = Counters()
        self._closing = ThreadFuture()
        self._closing.set_result(None)
        for lane in self._lanes:
            lane.forked()
        for call in self.gate.forked():
            call.error = self.gate.refusal(call.name)
            call.started = call.finished = time.monotonic()
            call.on_done(call)

    async def close(self, timeout: float | None) -> None:
        """Close and wait up to ``timeout`` seconds; then warn, and let it end in the background."""
        closing = self.begin_close()
        if closing.done():
            return
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def on_done(_: ThreadFuture[None]) -> None:
            # The loop may be closed when a close that took longer ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, ended)

        closing.add_done_callback(on_done)
        await asyncio.wait([ended], timeout=timeout)
        if not closing.done():
            calls = self.gate.describe_calls()
            self.log.warning(
                "%sclosing a store took longer than %.1f s and goes on in the background: %s",
                f"[{rank_label(self.rank)}] " if self.rank is not None else "",
                timeout,
                f"calls stuck in the engine: {calls}"
                if calls
                else "the engine's tear-down is slow",
            )
            return
        closing.result()

    def _drop_queued(self) -> None:
        for call in self.gate.calls():
            if not call.tidies and any(lane.drop(call) for lane in self._lanes):
                call.error = StoreClosedError(
                    f"{call.name} was dropped while it waited for a thread: the store is closing",
                    rank=self.rank,
                )
                self.counters.count_refused(call.error)
                call.started = call.finished = time.monotonic()
                call.on_done(call)

    def _close_in_thread(self, closing: ThreadFuture[None]) -> None:
        error: BaseException | None = None
        try:
            if self.reopening is not None:
                self.reopening.stop()
            self.gate.drained(None)
            for lane in self._lanes:
                lane.close()
            # A re-opening that was stopped may have left no object, but what belongs to it.
            left = self.native is not None or self.reopening is not None
            if self._tear_down is not None and left:
                # A call like the others, so that whoever looks for stuck ones finds it.
                last = Call("tear-down", self._tear_down, (self.native,), self._over)
                self.gate.enter(last, closing=True)
                last.run()
                last.on_done(last)
                if last.error is not None:
                    raise last.error
        except BaseException as exc:  # noqa: BLE001  # whoever waits for the end gets it
            error = exc
        self._let_go()
        self.gate.closed()
        self.changed()
        if error is None:
            closing.set_result(None)
        else:
            closing.set_exception(error)

    def visit(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        """Run a job of the re-opening on the calling thread, counted as a call."""
        call = Call(name, fn, args, self._over)
        try:
            self.gate.enter(call, opening=True)
        except StoreClosedError:  # a close has begun, and waits for the re-opening to end
            self.gate.enter(call, closing=True)
        call.run()
        call.on_done(call)
        return call.outcome()  # type: ignore[no-any-return]

    def renew(self, native: NativeStore) -> None:
        """Go on with a new native object that is set up, and tell it what the old one knew."""
        self.native = native
        self.gate.renewing()
        for name, thing in list(self._kept.items()):
            # What is left is memory that only the old object could touch.
            if not (isinstance(thing, Renewable) and thing.renew(native)):
                self._kept.pop(name, None)
        self.hostname = native.get_hostname()
        self.counters.count_reopening()
        self.gate.reopened()
        self.changed()

    def _let_go(self) -> None:
        """Let go of the native object and of the memory that it could touch."""
        if self._tear_down is None and self.native is not None:
            self._forget(self.native)
        untrack(self)
        self.native = None
        self.no_late_writes()
        self._let_go_of_memory()
        if self._shared is not None:
            blocks.free_unused()
        if self._tear_down is not None:
            give_memory_back()

    def _let_go_of_memory(self) -> None:
        """Let go of the memory that was kept for the engine, and of what has more of it."""
        if self._tear_down is not None:
            for thing in self._kept.values():
                if isinstance(thing, Forgettable):
                    thing.drop()
        self._kept.clear()

    def _forget(self, native: NativeStore) -> None:
        """Let an engine that lives on forget our memory; not one that its owner has closed."""
        if self.closed_by_owner or native.health_check() == _CLOSED:
            return
        if self.gate.tainted is not None:
            return
        for thing in list(self._kept.values()):
            if isinstance(thing, Forgettable):
                thing.forget(native)

    def __repr__(self) -> str:
        return f"<EngineClient {self.gate!r}>"


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def close_dropped(client: EngineClient, label: str) -> None:
    """Close, in the background, the client of a store that was dropped without ``aclose``.

    An adopted one needs no closing, so that ``adopt(native).warmup()`` is a line of its own.
    """
    if client.gate.state is State.OPEN:
        client.begin_close()
        if not client.owns_native:
            return
        warnings.warn(
            f"unclosed {label}: it closes in the background; use 'async with' or "
            "await store.aclose()",
            ResourceWarning,
            stacklevel=2,
        )
