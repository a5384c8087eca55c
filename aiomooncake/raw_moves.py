"""The binding's own reads and writes beside peers that do not answer.

Calls by hand pass no lane and, on a thread of the caller, no loop: nothing else notices that one
takes long, or knows that it need not be tried. A peer that froze before the first transfer to it
would keep such a call for 60 s for each key (:mod:`aiomooncake.engine.handshakes`).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiomooncake.avoiding import TRANSFER_FAIL
from aiomooncake.engine import methods
from aiomooncake.engine.client import OVERDUE
from aiomooncake.engine.mirror import is_read
from aiomooncake.errors import rank_label
from aiomooncake.replicas import first_copies

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.engine.peers import PeerWatch

__all__ = ["RawMoves"]

# The reads that are kept off peers: what they answer for a key that could not be read, and how deep
# in lists the numbers stand that they take.
_READS: Final[Mapping[str, tuple[Any, int]]] = {
    "get": (b"", 0),
    "get_buffer": (None, 0),
    "get_into": (TRANSFER_FAIL, 0),
    "get_batch": (b"", 1),
    "batch_get_buffer": (None, 1),
    "batch_get_into": (TRANSFER_FAIL, 1),
    "batch_get_into_multi_buffers": (TRANSFER_FAIL, 2),
}
_TOO_LARGE: Final = 1 << 64
"""For an address or a size."""

_AGAIN: Final = 1.0
"""Seconds between two knocks at the peers of one call."""

_STAY: Final = 60.0
"""Seconds for which the thread that watches stays after the last call.

To start one takes 1 ms on a busy machine, for which a call that comes now and then would wait.
"""

Move = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Makes a call of a method with its arguments."""


_Call = tuple[str, Sequence[Any], Mapping[str, Any]]
"""A method's name and its arguments."""


class RawMoves:
    """Makes the mirrors' calls that move bytes; blocking, from any thread."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        # Looked at only when a call takes long.
        self._under_way: dict[int, _Call] = {}
        self._watching = False

    def of(self, name: str) -> Move:
        """Find the way to make calls of a method.

        It answers what the binding does. Keys on peers that are known not to answer are not tried:
        their answer is that of a transfer that failed.
        """
        client, watched = self._client, self._watched(name)
        if name not in _READS:
            return watched

        def move(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            peers = client.peers
            if peers is None or not peers.stuck:
                return watched(method, args, kwargs)
            return self._around(peers.stuck, name, partial(watched, method), args, kwargs)

        return move

    def _watched(self, name: str) -> Move:
        """Make the way of calls that somebody looks at when they take long."""
        client, numbers, under_way = self._client, self._numbers, self._under_way

        # As little as possible, as in the mirrors.
        def move(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            number = next(numbers)
            under_way[number] = name, args, kwargs
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
        failed, depth = _READS[name]
        refused: Collection[str] = ()
        # What is wrong with a call, the binding tells.
        with contextlib.suppress(TypeError, ValueError):
            columns, options = _understand(name, depth, args, kwargs)
            refused = self._held_by(stuck, columns[0])
        if not refused:
            return call(args, kwargs)
        if not depth:
            return failed
        keys = columns[0]
        answers = [failed] * len(keys)
        places = [place for place, key in enumerate(keys) if key not in refused]
        if places:
            some = [[column[place] for place in places] for column in columns]
            found = call([*some, *options], {})
            for place, answer in zip(places, found, strict=True):
                answers[place] = answer
        return answers

    def _held_by(self, peers: Collection[str], keys: Sequence[str]) -> set[str]:
        """Find the keys that would be read from these peers."""
        copies = first_copies(self._client.native_object, keys)
        return {key for key, copy in copies.items() if copy.transport_endpoint in peers}

    # ------------------------------------------------------------------ calls that take long

    def _begin(self) -> None:
        peers = self._client.peers
        if peers is None:
            return
        with self._lock:
            if self._watching:
                return
            label = rank_label(self._client.rank) or "store"
            thread = threading.Thread(
                target=self._watch, args=(peers,), name=f"aiomooncake-{label}-moves", daemon=True
            )
            self._watching = True
            try:
                thread.start()
            except RuntimeError:  # too many threads, or the exit: the next call tries again
                self._watching = False

    def _watch(self, peers: PeerWatch) -> None:
        while True:
            try:
                self._watch_until_idle(peers)
            finally:
                self._watching = False
            with self._lock:
                # A call that came before that line was told that somebody watches.
                if not self._under_way or self._watching or peers.stopped.is_set():
                    return
                self._watching = True

    def _watch_until_idle(self, peers: PeerWatch) -> None:
        due: dict[int, float] = {}  # when the peers of each call are to be knocked at
        until = time.monotonic() + _STAY
        while not peers.stopped.wait(OVERDUE):
            now = time.monotonic()
            calls = dict(self._under_way)
            if calls:
                until = now + _STAY
            elif now > until:
                return
            due = {number: due.get(number, now + OVERDUE) for number in calls}
            late = [number for number, at in due.items() if at <= now]
            if late and peers.wants_news:
                due.update(dict.fromkeys(late, now + _AGAIN))
                self._knock(peers, [calls[number] for number in late])

    def _knock(self, peers: PeerWatch, late: Sequence[_Call]) -> None:
        """Let the peers be knocked at that may be the cause."""
        keys: set[str] = set()
        for name, args, kwargs in late:
            found: Sequence[str] = ()
            if is_read(name):
                # Arguments may be anything: those of one call must not hide the others.
                with contextlib.suppress(Exception):
                    found = _keys(name, args, kwargs)
            if found:
                keys.update(found)
            else:
                # Its keys can't be told, or it writes: the engine does not say where.
                peers.suspect_all()
        if not keys:
            return
        copies: Mapping[str, Any] = {}
        with contextlib.suppress(Exception):  # the store closes, or its master is away
            native = self._client.native_object
            copies = self._client.ask("owners", first_copies, native, list(keys))
        peers.suspect(copy.transport_endpoint for copy in copies.values())
        if len(copies) < len(keys):
            peers.suspect_all()  # what is read has other keys: parts of a tensor, say

    def __repr__(self) -> str:
        return f"<RawMoves under_way={len(self._under_way)}>"


def _bound(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Find the arguments of a call by name.

    Raises:
        TypeError: The binding's method does not take them.
    """
    signature = inspect.signature(getattr(methods.BlockingMethods, name))
    given = dict(signature.bind(None, *args, **kwargs).arguments)
    del given["self"]
    return given


def _understand(
    name: str, depth: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[list[Any]], list[bool]]:
    """Take the arguments of one of :data:`_READS` apart: an entry per key, and the others.

    Raises:
        TypeError: They are not all of the kind that the binding takes.
        ValueError: They are, but their values or lengths are not.
    """
    keys, *others = _bound(name, args, kwargs).values()
    if not depth:
        return [[_text(keys)], *([_number(other, 0)] for other in others)], []
    numbers, options = others[:2], others[2:]
    columns = [[_text(key) for key in _listed(keys)], *(_number(each, depth) for each in numbers)]
    if any(len(column) != len(columns[0]) for column in columns):
        raise ValueError
    if any(type(option) is not bool for option in options):
        raise TypeError
    return columns, options


def _keys(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Find the keys that a read names; raises anything where they can't be told."""
    given = _bound(name, args, kwargs)
    return list(_flat(next(given[each] for each in given if each.endswith(("key", "keys")))))


def _flat(keys: Any) -> Iterator[str]:
    if isinstance(keys, (str, bytes)):
        yield _text(keys)
    else:
        for each in _listed(keys):
            yield from _flat(each)


def _text(key: Any) -> str:
    """Read a key as the binding does, which takes bytes too."""
    if isinstance(key, bytes):
        return key.decode()
    if not isinstance(key, str):
        raise TypeError
    key.encode()  # a lone surrogate is refused
    return key


def _listed(given: Any) -> list[Any]:
    """List what the binding takes for a list: sequences, and arrays."""
    if isinstance(given, (str, bytes)):
        raise TypeError
    if isinstance(given, Sequence):
        return list(given)
    listed = given.tolist() if hasattr(given, "tolist") else None
    if not isinstance(listed, list):
        raise TypeError
    return listed


def _number(given: Any, depth: int) -> Any:
    """Read an address or a size, or lists of them."""
    if depth:
        return [_number(each, depth - 1) for each in _listed(given)]
    number = operator.index(given)
    if not 0 <= number < _TOO_LARGE:
        raise ValueError
    return number
