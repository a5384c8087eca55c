"""The gate that every native call passes: nothing reaches the binding when it would crash."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum

from aiomooncake.engine.workers import Call
from aiomooncake.errors import (
    ForkedProcessError,
    MooncakeError,
    StoreClosedError,
    TaintedStoreError,
    TooManyAbandonedError,
    rank_label,
)

__all__ = ["Gate", "State"]

STUCK_AFTER = 1.0
"""Seconds after which a call that nobody waits for counts as stuck."""

# How many calls a message about stuck calls names.
_NAMED_CALLS = 8


class State(Enum):
    """Where a native object is in its one life."""

    NEW = "new"
    OPEN = "open"
    REOPENING = "reopening"
    CLOSING = "closing"
    CLOSED = "closed"
    FORKED = "forked"


class Gate:
    """Counts the calls of one native object, and refuses those it would not survive.

    Almost every method of the binding is a segmentation fault before set-up, during close and
    after it, and hangs in a forked child. So a call is let in only while the state is OPEN, and
    the object is torn down only when the last call has left.
    """

    def __init__(self, rank: int | str | None, max_abandoned: int) -> None:
        self.state = State.NEW
        self.tainted: str | None = None
        # While the master is away: makes the error of a call that need not be tried.
        self.away: Callable[[str], MooncakeError] | None = None
        self._rank = rank
        self._max_abandoned = max_abandoned
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._inside: dict[Call, None] = {}
        self._given_up: set[Call] = set()
        self._renewing = False

    def open(self) -> None:
        """Let calls in."""
        with self._lock:
            if self.state is State.NEW:
                self.state = State.OPEN

    def enter(
        self,
        call: Call,
        *,
        reads: bool = False,
        opening: bool = False,
        closing: bool = False,
        trial: bool = False,
        giving_back: bool = False,
    ) -> None:
        """Let one call in; it must leave, whatever happens.

        ``opening`` and ``closing`` are the engine layer's own: the set-up comes in before the
        gate is open or while it is opened anew, the tear-down after it was shut. A ``trial`` comes
        in while the master is away, to see whether it is back, or because it needs no master. One
        that is ``giving_back`` memory comes in as soon as a new object may know it.

        Raises:
            RpcError: The master is away.
            ForkedProcessError: In a child of the process that opened the store.
            StoreClosedError: Before the store is open, while it closes, and after that.
            TaintedStoreError: A read of a store whose memory can't be trusted.
        """
        # Before the lock: in a forked child it may be held by a thread that is not there.
        wanted = State.CLOSING if closing else State.OPEN
        if opening:
            wanted = State.REOPENING if self.state is State.REOPENING else State.NEW
        if not self._takes(wanted, giving_back=giving_back):
            raise self.refusal(call.name)
        away = self.away
        if away is not None and wanted is State.OPEN and not trial:
            raise away(call.name)
        with self._lock:
            if not self._takes(wanted, giving_back=giving_back):
                raise self.refusal(call.name)
            if reads and self.tainted is not None:
                raise TaintedStoreError(
                    f"{call.name} refused: {self.tainted}, so the engine may still write into "
                    "memory that was given back; close this store and connect again",
                    rank=self._rank,
                )
            self._inside[call] = None

    def _takes(self, wanted: State, *, giving_back: bool) -> bool:
        return self.state is wanted or (giving_back and self._is_renewing)

    @property
    def _is_renewing(self) -> bool:
        return self._renewing and self.state is State.REOPENING

    def check_abandoned(self, name: str) -> None:
        """Refuse a call that may get stuck while too many are.

        Calls that were given up a moment ago and are healthy don't count.

        Raises:
            TooManyAbandonedError: Too many calls are stuck that nobody waits for.
        """
        if self.state is not State.OPEN or len(self._given_up) < self._max_abandoned:
            return
        with self._lock:
            stuck = sum(call.age >= STUCK_AFTER for call in self._given_up)
        if stuck >= self._max_abandoned:
            raise TooManyAbandonedError(
                f"{name} refused: {stuck} calls that were cancelled or timed out are still stuck "
                "in the engine; look for a frozen peer or master, and try again when they have "
                "returned",
                rank=self._rank,
            )

    def leave(self, call: Call) -> None:
        """Note that a call is over."""
        with self._lock:
            self._inside.pop(call, None)
            self._given_up.discard(call)
            # Nobody waits for that before the gate is shut.
            if not self._inside and self.state is not State.OPEN:
                self._empty.notify_all()

    def note_abandoned(self, call: Call) -> None:
        """Count a call that nobody waits for any more and that is still running."""
        with self._lock:
            if call in self._inside:
                self._given_up.add(call)

    def taint(self, why: str) -> None:
        """Stop answering reads: the engine may write into memory that was given back."""
        with self._lock:
            if self.tainted is None:
                self.tainted = why

    def pause(self) -> bool:
        """Refuse new calls until :meth:`reopened`; False when it is not open."""
        with self._lock:
            if self.state is not State.OPEN:
                return False
            self.state = State.REOPENING
            self._renewing = False
            return True

    def renewing(self) -> None:
        """Note that there is a new object, which is being told what the old one knew."""
        with self._lock:
            self._renewing = True

    def reopened(self) -> None:
        """Let calls in to a new object, which can be trusted."""
        with self._lock:
            if self.state is State.REOPENING:
                self.state = State.OPEN
                self.tainted = None

    def shut(self) -> bool:
        """Refuse new calls from now on; False when somebody else did so before."""
        with self._lock:
            if self.state not in (State.NEW, State.OPEN, State.REOPENING):
                return False
            self.state = State.CLOSING
            return True

    def closed(self) -> None:
        """Note that the native object is gone."""
        with self._lock:
            if self.state is not State.FORKED:
                self.state = State.CLOSED

    def forked(self) -> list[Call]:
        """Refuse everything; called in the child, where the lock can't be trusted.

        Returns:
            The calls that were inside; their threads do not exist here.
        """
        self.state = State.FORKED
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        calls = list(self._inside)
        self._inside.clear()
        self._given_up.clear()
        return calls

    def drained(self, timeout: float | None) -> bool:
        """Wait on this thread until no call is inside; False when ``timeout`` seconds passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self._inside:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._empty.wait(left)
            return True

    @property
    def is_open(self) -> bool:
        """Whether calls are let in."""
        return self.state is State.OPEN

    @property
    def trusted(self) -> bool:
        """Whether the engine writes into no memory that was given back."""
        return self.tainted is None or self._is_renewing

    @property
    def in_flight(self) -> int:
        """Calls queued or running, abandoned ones included."""
        return len(self._inside)

    @property
    def abandoned(self) -> int:
        """Calls still running that nobody waits for."""
        return len(self._given_up)

    def calls(self) -> list[Call]:
        """List the calls inside, oldest first."""
        with self._lock:
            return list(self._inside)

    def describe_calls(self) -> str:
        """Name the calls inside and their ages, for a warning."""
        calls = self.calls()
        named = ", ".join(f"{call.name} ({call.age:.1f} s)" for call in calls[:_NAMED_CALLS])
        more = len(calls) - _NAMED_CALLS
        return f"{named} and {more} more" if more > 0 else named

    def refusal(self, name: str) -> MooncakeError:
        """Make the error that says why a call is refused in this state."""
        state = self.state
        if state is State.FORKED:
            return ForkedProcessError(
                f"{name} refused: this store was opened in the parent process, and the engine's "
                "threads do not exist in a forked child; start workers with the spawn method, or "
                "connect after the fork in a parent that never connected",
                rank=self._rank,
            )
        if state is State.REOPENING:
            return TaintedStoreError(
                f"{name} refused: {self.tainted}, so the store is opened anew; try again in a few "
                "seconds",
                rank=self._rank,
            )
        what = {
            State.NEW: "the store is not open yet; await connect() first",
            State.CLOSING: "the store is closing; make calls before aclose()",
            State.CLOSED: "the store is closed; open a new one with connect()",
            State.OPEN: "the store is open already",
        }[state]
        return StoreClosedError(f"{name} refused: {what}", rank=self._rank)

    def __repr__(self) -> str:
        label = rank_label(self._rank)
        return f"<Gate {label} {self.state.value} in_flight={self.in_flight}>"
