"""The in-memory engine's master: segments, objects, leases, and the faults it can be given."""

from __future__ import annotations

import itertools
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from aiomooncake._values import nearest
from aiomooncake.engine.inmemory.descriptors import (
    BufferDescriptor,
    MemoryDescriptor,
    ReplicaDescriptor,
    ReplicaStatus,
)
from aiomooncake.engine.inmemory.faults import Fault, FaultBoard
from aiomooncake.errors import InvalidArgumentError

__all__ = [
    "InMemoryEngine",
    "Placement",
    "StoredObject",
]

OK: Final = 0
INTERNAL: Final = -1
NO_AVAILABLE_HANDLE: Final = -200
INVALID_PARAMS: Final = -600
ILLEGAL_CLIENT: Final = -601
REPLICA_NOT_READY: Final = -703
NOT_FOUND: Final = -704
ALREADY_EXISTS: Final = -705
HAS_LEASE: Final = -706
LEASE_EXPIRED: Final = -707
TRANSFER_FAIL: Final = -800
RPC_FAIL: Final = -900
RPC_TIMEOUT: Final = -901
UNAVAILABLE: Final = -1010
DFS_UNAVAILABLE: Final = -1601

# The engine's patterns are ECMAScript's: of the groups that begin with "(?" only these exist.
_FOREIGN_GROUP: Final = re.compile(r"\(\?(?![:=!])")
_CLASSES: Final = {
    "[:alpha:]": "a-zA-Z",
    "[:digit:]": "0-9",
    "[:alnum:]": "a-zA-Z0-9",
    "[:upper:]": "A-Z",
    "[:lower:]": "a-z",
    "[:space:]": r"\s",
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Those of the placement options that the in-memory engine acts upon.

    Attributes:
        replica_num: Copies, each on a segment of another name.
        preferred: Names of segments to try first, in this order.
        groups: A routing group per key of the call, ``""`` for none; None = they are not given.
    """

    replica_num: int = 1
    preferred: tuple[str, ...] = ()
    groups: tuple[str, ...] | None = None

    def of(self, place: int) -> Placement:
        """Return the options of one key of the call."""
        return self if self.groups is None else replace(self, groups=(self.groups[place],))

    @property
    def group(self) -> str:
        """The routing group of the single key that these options are of."""
        return "" if self.groups is None else self.groups[0]


@dataclass(slots=True, eq=False)
class _Segment:
    """Memory that one client offers."""

    id: str
    owner: object
    hostname: str
    endpoint: str
    capacity: int
    used: int = 0
    until: float = math.inf  # when it is taken away; nothing is placed in it meanwhile

    @property
    def is_leaving(self) -> bool:
        """Whether it is being taken back."""
        return self.until < math.inf

    def has_room(self, size: int) -> bool:
        """Whether a value may be placed here."""
        return self.capacity - self.used >= size and not self.is_leaving


@dataclass(slots=True, eq=False)
class StoredObject:
    """A value, complete or still being written by a put session."""

    key: str
    owner: object
    size: int
    data: bytes | bytearray
    complete: bool
    copies: list[tuple[_Segment, int]] = field(default_factory=list)
    lease_until: float = 0.0
    group: str = ""


def _complete(key: str, owner: object, data: bytes, group: str) -> StoredObject:
    return StoredObject(key, owner, len(data), data, complete=True, group=group)


class InMemoryEngine:
    """A whole cluster in this process: what the master knows, and the memory of all segments.

    Clients (:class:`~aiomooncake.engine.inmemory.InMemoryStore`) of one engine see the same keys.
    Nothing is ever evicted: a full cluster answers -200.

    Args:
        name: For messages; :meth:`named` shares engines by it.
        lease_ttl: Seconds for which a read protects a key from removal. Upstream's default.
        rpc_timeout: Seconds until a call on a frozen master fails with -901; None = each client's
            own.
        clock: Seconds, for the leases.
    """

    families: ClassVar[tuple[str, ...]] = ()
    """Names of faults that mean several methods."""

    _named: ClassVar[dict[str, InMemoryEngine]] = {}
    _named_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        name: str = "",
        *,
        lease_ttl: float = 5.0,
        rpc_timeout: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.lease_ttl = lease_ttl
        self.rpc_timeout = rpc_timeout
        self.clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, StoredObject] = {}
        self._segments: dict[str, _Segment] = {}
        # Those that tasks find: the last one of each name, and none when that is taken away.
        self._by_name: dict[str, _Segment] = {}
        self._numbers = itertools.count(1)
        self._addresses = itertools.count(1 << 40, 1 << 12)
        self._grown_groups: set[str] = set()  # with a member whose lease was not renewed yet
        self._faults = FaultBoard()
        self._thawed = threading.Event()
        self._thawed.set()
        self._down = False
        self._leaving: list[_Segment] = []
        self.tasks: dict[tuple[int, ...], list[Any]] = {}  # what is told of each, the last first

    @classmethod
    def named(cls, name: str) -> InMemoryEngine:
        """Return the engine of this name in this process, a new one the first time."""
        with cls._named_lock:
            engine = cls._named.get(name)
            if engine is None:
                engine = cls._named[name] = cls(name)
            return engine

    @classmethod
    def reset(cls, name: str) -> None:
        """Forget the engine of this name; clients that are open keep the old one."""
        with cls._named_lock:
            cls._named.pop(name, None)

    def __repr__(self) -> str:
        state = "down" if self._down else "up" if self._thawed.is_set() else "frozen"
        return (
            f"<InMemoryEngine {self.name!r} {state}, {len(self._objects)} objects, "
            f"{len(self._segments)} segments>"
        )

    # ------------------------------------------------------------------ faults

    def fault(
        self,
        method: str,
        *,
        code: int | None = None,
        delay: float = 0.0,
        hold: threading.Event | None = None,
        times: int | None = None,
        hostname: str | None = None,
    ) -> Fault:
        """Make calls of a native method fail, last, or hang; see :class:`Fault`.

        "Not ready until told" is ``fault("put", code=-200)`` and its ``remove()``; "not ready for
        the first three calls" is ``times=3``.

        Raises:
            InvalidArgumentError: There is no such method, so nothing would be struck; or a value
                that cannot be meant.
        """
        from aiomooncake.engine.inmemory.store import InMemoryStore  # which imports this module

        methods = [name for name in dir(InMemoryStore) if not name.startswith("_")]
        if method not in methods:
            meant = nearest(str(method), [*self.families, *methods])
            raise InvalidArgumentError(
                f"fault({method!r}): the engine has no such method"
                + (f", did you mean {meant!r}?" if meant else ":")
                + " give one that dir(store.engine) lists"
                + (f", or a family: {', '.join(self.families)}" if self.families else "")
            )
        return self._faults.add(
            method, code=code, delay=delay, hold=hold, times=times, hostname=hostname
        )

    def freeze(self) -> None:
        """Stop answering: calls block until :meth:`thaw`, or fail after the ``rpc_timeout``.

        That is the engine's if it has one, else that of each store.
        """
        self._thawed.clear()

    def thaw(self) -> None:
        """Answer again, also the calls that wait."""
        self._thawed.set()

    def down(self) -> None:
        """Be unreachable: calls fail at once with -900. The values stay."""
        self._down = True

    def up(self) -> None:
        """Be reachable again."""
        self._down = False

    @property
    def calm(self) -> bool:
        """Whether calls go through undisturbed."""
        return not self._faults and not self._down and self._thawed.is_set()

    @property
    def reachable(self) -> bool:
        """Whether the master would answer now."""
        return not self._down and self._thawed.is_set()

    def disturb(
        self, method: str, hostnames: tuple[str, ...], *, asks_master: bool, rpc_timeout: float
    ) -> int | None:
        """Do to a call what is programmed, on its thread; the code to fail with, or None."""
        code = self._faults.strike(method, hostnames)
        if code is not None:
            return code
        if not asks_master:
            return None
        if self.rpc_timeout is not None:
            rpc_timeout = self.rpc_timeout
        if not self._thawed.wait(rpc_timeout):
            return RPC_TIMEOUT
        return RPC_FAIL if self._down else None

    # ------------------------------------------------------------------ segments

    def next_number(self) -> int:
        """Return a number that was not given out before."""
        return next(self._numbers)

    def mount(self, owner: object, hostname: str, endpoint: str, size: int) -> str:
        """Add a segment; its identifier."""
        segment = _Segment(f"{self.next_number()}-{id(owner)}", owner, hostname, endpoint, size)
        with self._lock:
            self._segments[segment.id] = self._by_name[hostname] = segment
        return segment.id

    def unmount(self, segment_ids: Sequence[str], grace_period: float = 0.0) -> None:
        """Take segments away, and with them the values that lie nowhere else.

        Args:
            segment_ids: Their identifiers.
            grace_period: Seconds in which nothing new is placed in them, before they go.
        """
        with self._lock:
            segments = [self._segments[each] for each in segment_ids if each in self._segments]
            if grace_period:
                for segment in segments:
                    segment.until = self.clock() + grace_period
                self._leaving += segments
            else:
                self._take_away(segments)

    def _take_away(self, segments: Sequence[_Segment]) -> None:
        gone = {segment.id for segment in segments}
        for segment in segments:
            self._segments.pop(segment.id, None)
            if self._by_name.get(segment.hostname) is segment:
                del self._by_name[segment.hostname]
        for stored in list(self._objects.values()):
            stored.copies = [copy for copy in stored.copies if copy[0].id not in gone]
            if not stored.copies:
                del self._objects[stored.key]

    def _sweep(self) -> None:
        """Take away segments whose grace period has ended."""
        now = self.clock()
        over = [segment for segment in self._leaving if segment.until <= now]
        if over:
            self._leaving = [segment for segment in self._leaving if segment.until > now]
            self._take_away(over)

    def _place(self, stored: StoredObject, placement: Placement) -> int:
        """Find room, under as many names as copies are wanted; fewer are accepted."""
        if self._leaving:
            self._sweep()
        segments = [s for s in self._segments.values() if s.has_room(stored.size)]
        segments.sort(key=lambda s: s.used - s.capacity)
        roomy: dict[str, _Segment] = {}
        for segment in segments:
            # Several segments of one client have one name.
            roomy.setdefault(segment.hostname, segment)
        names = dict.fromkeys([*placement.preferred, *roomy])
        for name in [name for name in names if name in roomy][: placement.replica_num]:
            roomy[name].used += stored.size
            stored.copies.append((roomy[name], next(self._addresses)))
        return OK if stored.copies else NO_AVAILABLE_HANDLE

    def _drop(self, stored: StoredObject) -> None:
        del self._objects[stored.key]
        for segment, _ in stored.copies:
            segment.used -= stored.size

    # ------------------------------------------------------------------ writing

    def put(self, owner: object, key: str, data: bytes, placement: Placement) -> int:
        """Store a value if the key is free; 0 as well if it is not."""
        if not key:
            return INVALID_PARAMS
        with self._lock:
            if key in self._objects:
                return OK
            return self._add(_complete(key, owner, data, placement.group), placement)

    def upsert(self, owner: object, key: str, data: bytes, placement: Placement) -> int:
        """Store or replace a value. A replacement of another size that finds no room loses both.

        One of the same size stays where it is, whatever the placement says. The routing group of
        a key can't be changed.
        """
        if not key:
            return INVALID_PARAMS
        group = placement.group
        with self._lock:
            stored = self._objects.get(key)
            if stored is not None:
                if placement.groups is not None and group != stored.group:
                    return INVALID_PARAMS
                if stored.complete and stored.size == len(data):
                    stored.data = data
                    return OK
                if stored.complete:
                    group = stored.group
                self._drop(stored)
            return self._add(_complete(key, owner, data, group), placement)

    def reserve(
        self, owner: object, key: str, size: int, placement: Placement
    ) -> StoredObject | int:
        """Take room for a value that a put session will write."""
        if not key or size <= 0:
            return INVALID_PARAMS
        with self._lock:
            if key in self._objects:
                return ALREADY_EXISTS
            stored = StoredObject(key, owner, size, b"", complete=False, group=placement.group)
            code = self._add(stored, placement)
            if code == OK:
                stored.data = bytearray(size)
            return stored if code == OK else code

    def _add(self, stored: StoredObject, placement: Placement) -> int:
        code = self._place(stored, placement)
        if code == OK:
            self._objects[stored.key] = stored
            if stored.group:
                self._grown_groups.add(stored.group)
        return code

    def complete(self, stored: StoredObject) -> int:
        """Make a reserved value readable."""
        with self._lock:
            current = self._objects.get(stored.key)
            if current is None:
                return NOT_FOUND
            if current is stored:
                stored.data = bytes(stored.data)
                stored.complete = True
                return OK
            # Replaced by an upsert meanwhile.
            return OK if current.owner is stored.owner else ILLEGAL_CLIENT

    def revoke(self, stored: StoredObject) -> int:
        """Give a reserved value up."""
        with self._lock:
            if self._objects.get(stored.key) is not stored:
                return NOT_FOUND
            self._drop(stored)
            return OK

    # ------------------------------------------------------------------ reading

    def query(self, key: str) -> StoredObject | int:
        """Look a value up and renew its lease."""
        with self._lock:
            stored = self._readable(key)
            if not isinstance(stored, int):
                self._renew(stored)
            return stored

    def _readable(self, key: str) -> StoredObject | int:
        if self._leaving:
            self._sweep()
        stored = self._objects.get(key)
        if stored is None:
            return NOT_FOUND
        return stored if stored.complete else REPLICA_NOT_READY

    def _renew(self, stored: StoredObject) -> None:
        """Renew a lease; in a group that of all members, but not when half of it is left."""
        now = self.clock()
        members: Iterable[StoredObject] = [stored]
        if stored.group:
            if stored.lease_until > now + self.lease_ttl / 2 and (
                stored.group not in self._grown_groups
            ):
                return
            self._grown_groups.discard(stored.group)
            members = [each for each in self._objects.values() if each.group == stored.group]
        for member in members:
            member.lease_until = now + self.lease_ttl

    def describe(self, stored: StoredObject) -> list[ReplicaDescriptor]:
        """Return a descriptor per copy."""
        with self._lock:
            return [
                ReplicaDescriptor(
                    ReplicaStatus.COMPLETE,
                    MemoryDescriptor(BufferDescriptor(stored.size, address, segment.endpoint)),
                )
                for segment, address in stored.copies
            ]

    # ------------------------------------------------------------------ copies

    def check_copies(self, key: str, targets: Sequence[str], source: str | None = None) -> int:
        """Tell whether a value can be copied to segments, or a copy moved."""
        with self._lock:
            stored = self._readable(key)
            if isinstance(stored, int):
                return stored
            if not targets or source in targets:
                return INVALID_PARAMS
            for target in targets:
                if target not in self._by_name:
                    return INVALID_PARAMS
                if self._by_name[target].is_leaving:
                    return UNAVAILABLE
            held = {segment.hostname for segment, _ in stored.copies}
            if source is not None:
                if source not in held:
                    return INVALID_PARAMS
                held = {source}
            return INTERNAL if held.isdisjoint(self._by_name) else OK

    def copy(self, key: str, targets: Sequence[str], source: str | None = None) -> str:
        """Copy a value to segments; or move it there. Why it failed, by name, or nothing."""
        with self._lock:
            stored = self._readable(key)
            if isinstance(stored, int):
                return "OBJECT_NOT_FOUND"
            held = {segment.hostname for segment, _ in stored.copies}
            chosen: dict[str, _Segment] = {}
            for segment in self._segments.values():
                if segment.hostname in targets and segment.has_room(stored.size):
                    chosen.setdefault(segment.hostname, segment)
            wanted = [name for name in dict.fromkeys(targets) if name not in held]
            if not all(name in chosen for name in wanted):
                return "NO_AVAILABLE_HANDLE"
            for name in wanted:
                chosen[name].used += stored.size
                stored.copies.append((chosen[name], next(self._addresses)))
            if source is not None:
                self._drop_copies(stored, source)
            return ""

    def clear(self, owner: object, key: str, name: str) -> bool:
        """Drop the copies of an owner's value on a segment (all without a name); unless leased."""
        with self._lock:
            stored = self._readable(key)
            if isinstance(stored, int) or stored.owner is not owner:
                return False
            if self.clock() < stored.lease_until:
                return False
            if not name:
                self._drop(stored)
                return True
            return self._drop_copies(stored, name)

    def _drop_copies(self, stored: StoredObject, name: str) -> bool:
        """Drop the copies on a segment; whether there were any."""
        there = [copy for copy in stored.copies if copy[0].hostname == name]
        for segment, _ in there:
            segment.used -= stored.size
        stored.copies = [copy for copy in stored.copies if copy not in there]
        if not stored.copies:
            del self._objects[stored.key]
        return bool(there)

    # ------------------------------------------------------------------ removing

    def remove(self, key: str, *, force: bool) -> int:
        """Remove a value that no lease protects."""
        with self._lock:
            stored = self._readable(key)
            if isinstance(stored, int):
                return stored
            if not force and self.clock() < stored.lease_until:
                return HAS_LEASE
            self._drop(stored)
            return OK

    def remove_matching(self, pattern: str | None, *, force: bool) -> int:
        """Remove what a pattern is found in (None: everything); the number of values that went."""
        found: Callable[[str], object] | None = None
        if pattern is not None:
            if _FOREIGN_GROUP.search(pattern):
                return INVALID_PARAMS
            for name, members in _CLASSES.items():
                pattern = pattern.replace(name, members)
            try:
                found = re.compile(pattern).search
            except (re.error, RecursionError, OverflowError):
                return INVALID_PARAMS
        with self._lock:
            now = self.clock()
            gone = [
                stored
                for stored in self._objects.values()
                if stored.complete
                and (force or now >= stored.lease_until)
                and (found is None or found(stored.key))
            ]
            for stored in gone:
                self._drop(stored)
            return len(gone)
