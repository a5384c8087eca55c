"""The binding's own reads and writes beside peers that do not answer.

Calls by hand pass no lane and, on a thread of the caller, no loop: nothing else notices that one
takes long, or knows that it need not be tried. A peer that froze before the first transfer to it
would keep such a call for 60 s for each key (:mod:`aiomooncake.engine.handshakes`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiomooncake.avoiding import TRANSFER_FAIL
from aiomooncake.engine.client import OVERDUE
from aiomooncake.engine.mirror import is_read
from aiomooncake.errors import MooncakeError, rank_label
from aiomooncake.replicas import first_copies

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.engine.peers import PeerWatch

__all__ = ["RawMoves"]

# The reads that are kept off peers: what they answer for a key that could not be read, and their
# arguments that have an entry per key.
_READS: Final[Mapping[str, tuple[Any, tuple[str, ...]]]] = {
    "get": (b"", ("key",)),
    "get_buffer": (None, ("key",)),
    "get_into": (TRANSFER_FAIL, ("key",)),
    "get_batch": (b"", ("keys",)),
    "batch_get_buffer": (None, ("keys",)),
    "batch_get_into": (TRANSFER_FAIL, ("keys", "buffer_ptrs", "sizes")),
    "batch_get_into_multi_buffers": (TRANSFER_FAIL, ("keys", "all_buffer_ptrs", "all_sizes")),
}

_AGAIN: Final = 1.0
"""Seconds between two knocks at the peers of one call."""

_STAY: Final = 60.0
"""Seconds for which the thread that watches stays after the last call.

To start one takes 1 ms on a busy machine, for which a call that comes now and then would wait.
"""

Move = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Makes a call of a method with its arguments."""


class RawMoves:
    """Makes the mirrors' calls that move bytes; blocking, from any thread."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        # Their arguments, and whether they read: looked at only when a call takes long.
        self._under_way: dict[int, tuple[Sequence[Any], Mapping[str, Any], bool]] = {}
        self._watching = False

    def of(self, name: str) -> Move:
        """Find the way to make calls of a method.

        It answers what the binding does. Keys on peers that are known not to answer are not tried:
        their answer is that of a transfer that failed.
        """
        client, watched = self._client, self._watched(reads=is_read(name))
        if name not in _READS:
            return watched

        def move(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            peers = client.peers
            if peers is None or not peers.stuck:
                return watched(method, args, kwargs)
            return self._around(peers.stuck, name, partial(watched, method), args, kwargs)

        return move

    def _watched(self, *, reads: bool) -> Move:
        """Make the way of calls that somebody looks at when they take long."""
        client, numbers, under_way = self._client, self._numbers, self._under_way

        # As little as possible, as in the mirrors.
        def move(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            number = next(numbers)
            under_way[number] = args, kwargs, reads
            if not self._watching:
                self._begin()
            try:
                return client.timed(method, *args, **kwargs)
            finally:
                del under_way[number]

        return move

    def _around(
        self,
        stuck: Collection[str],
        name: str,
        call: Callable[[Sequence[Any], Mapping[str, Any]], Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Read what is not on peers that are stuck."""
        failed, names = _READS[name]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not set(names) <= given.keys():
            return call(args, kwargs)  # the binding says what is missing
        columns = [given.pop(each) for each in names]
        if names == ("key",):
            return failed if self._held_by(stuck, columns) else call(args, kwargs)
        keys = columns[0]
        refused = self._held_by(stuck, keys)
        if not refused or any(len(column) != len(keys) for column in columns):
            return call(args, kwargs)
        answers = [failed] * len(keys)
        places = [place for place, key in enumerate(keys) if key not in refused]
        if places:
            some = [[column[place] for place in places] for column in columns]
            found = call([*some, *args[len(names) :]], given)
            for place, answer in zip(places, found, strict=True):
                answers[place] = answer
        return answers

    def _held_by(self, peers: Collection[str], keys: Sequence[str]) -> set[str]:
        """Find the keys that would be read from these peers."""
        try:
            copies = first_copies(self._client.native_object, keys)
        except TypeError:  # these are no keys, which the call itself tells
            return set()
        return {key for key, copy in copies.items() if copy.transport_endpoint in peers}

    # ------------------------------------------------------------------ calls that take long

    def _begin(self) -> None:
        if self._client.peers is None:
            return
        with self._lock:
            if self._watching:
                return
            label = rank_label(self._client.rank) or "store"
            thread = threading.Thread(
                target=self._watch, name=f"aiomooncake-{label}-moves", daemon=True
            )
            # With too many threads, or when the interpreter exits, the next call tries again.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._watching = True

    def _watch(self) -> None:
        peers = self._client.peers
        due: dict[int, float] = {}  # when the peers of each call are to be knocked at
        until = time.monotonic() + _STAY
        while peers is not None and not peers.stopped.wait(OVERDUE):
            now = time.monotonic()
            calls = dict(self._under_way)
            if calls:
                until = now + _STAY
            elif now > until:
                with self._lock:
                    self._watching = False
                    # A call that came before this line was told that somebody watches.
                    if not self._under_way:
                        return
                    self._watching = True
            due = {number: due.get(number, now + OVERDUE) for number in calls}
            late = [number for number, at in due.items() if at <= now]
            if late and peers.wants_news:
                due.update(dict.fromkeys(late, now + _AGAIN))
                self._knock(peers, [calls[number] for number in late])

    def _knock(
        self,
        peers: PeerWatch,
        late: Sequence[tuple[Sequence[Any], Mapping[str, Any], bool]],
    ) -> None:
        """Let the peers be knocked at that may be the cause."""
        keys: set[str] = set()
        for args, kwargs, reads in late:
            if reads:
                keys.update(_keys(args, kwargs))
            else:
                peers.suspect_all()  # the engine does not say where it stores a value
        if not keys:
            return
        with contextlib.suppress(MooncakeError, TypeError):  # the store closes, or these are none
            native = self._client.native_object
            found = self._client.ask("owners", first_copies, native, list(keys))
            peers.suspect(copy.transport_endpoint for copy in found.values())

    def __repr__(self) -> str:
        return f"<RawMoves under_way={len(self._under_way)}>"


def _keys(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[str]:
    """Find the keys that a read names."""
    keys = args[0] if args else kwargs.get("keys", kwargs.get("key"))
    if isinstance(keys, str):
        return (keys,)
    return keys if isinstance(keys, (list, tuple)) else ()
