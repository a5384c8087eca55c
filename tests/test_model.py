"""Random mixes of all verbs, many at once and some cancelled, against a model that is a dict.

What the model knows: the engine keeps the first value, ``upsert`` replaces it. Calls on the same
key that overlap may happen in any order, each of them whole; a write that was cancelled may have
happened or not. So the model keeps, per key, the values that may be there, and each group of
calls that ran together must be explained by some order of them.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiomooncake import (
    BufferTooSmallError,
    InvalidArgumentError,
    LocalCluster,
    ObjectLeasedError,
    ObjectNotReadyError,
    ReplicateConfig,
    Store,
    connect,
)
from aiomooncake.buffers import Buffer
from aiomooncake.engine.inmemory import InMemoryEngine
from tests.adversity.processes import Peer

KB, MB = 1 << 10, 1 << 20
LOCAL = 256 * KB
KEYS = [f"model-{name}" for name in "abc"]
SLOW_TURNS, LAST_TURN = 8, 16
REGION = 2 * MB  # of the registered memory; one for each call of a group
GROUP = 7
# Calls of the in-memory engine that last a moment, so that others come in between.
SLOW_CALLS = [
    "batch_put_from_multi_buffer_ranges",
    "batch_put_from",
    "put_from",
    "get_size",
    "batch_get_session_start",
    "batch_get_into",
    "batch_get_into_multi_buffers",
    "batch_put_from_multi_buffers",
    "batch_get_replica_desc",
    "batch_get_buffer",
]
# Smaller than they are, so that values of these sizes travel in every way there is.
LIMITS = {
    "aiomooncake.moves.PIECE": 100 * KB,
    "aiomooncake.transfers.MERGED_VALUE": 150 * KB,
    "aiomooncake.store.MERGED_VALUE": 150 * KB,
    "aiomooncake.many.PIECE": 100 * KB,
    "aiomooncake.parts.MANY_PARTS": 3,
    "aiomooncake.lanes.MERGED_BYTES": 300 * KB,
    "aiomooncake.memory_lane.MOST_BYTES": 300 * KB,
    "aiomooncake.memory_lane.LEAST_BYTES": 70 * KB,
}
PIECE = LIMITS["aiomooncake.moves.PIECE"]


@functools.lru_cache(maxsize=512)
def content(size: int, seed: int) -> bytes:
    """Bytes that repeat at a prime distance, so that a piece in the wrong place is noticed."""
    block = bytes((i * 7 + i // 251 + seed) % 256 for i in range(min(size, 8191)))
    return (block * (size // len(block) + 1))[:size]


# --- what is asked ----------------------------------------------------------------------------

READS = ["get", "get_many", "view", "view_many", "exists", "exists_many", "size"]
INTO = ["get_into", "get_into parts", "get_into range", "get_many_into"]
PUTS = [
    "put",
    "put mutable",
    "put_many",
    "put_parts",
    "put_from",
    "put_from parts",
    "put_many_from",
]
WRITES = ["upsert", "remove", "remove_many"]


@dataclass(frozen=True)
class Ask:
    """One call.

    Attributes:
        verb: What is called, and how.
        keys: Places in :data:`KEYS`; verbs of one key take the first.
        size: Bytes of the value, or of the memory that is read into.
        seed: Makes the value; also tells where parts are cut, and where a range begins.
        cancel: Turns of the loop after which it is cancelled, the last ones slow; or None.
        option: Whether placement options are given, ``force`` or ``on_release``.
    """

    verb: str
    keys: list[int]
    size: int
    seed: int
    cancel: int | None
    option: bool


sizes = st.one_of(
    st.integers(1, 5000),
    st.sampled_from([16 * KB, 64 * KB, 64 * KB + 1, PIECE, PIECE + 1, 150 * KB, 150 * KB + 1]),
    st.integers(64 * KB, 2 * LOCAL),
)
asks = st.builds(
    Ask,
    verb=st.sampled_from([*READS, *INTO, *PUTS, *PUTS, *WRITES]),
    keys=st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=3),
    size=sizes,
    seed=st.integers(0, 250),
    cancel=st.one_of(st.none(), st.none(), st.integers(1, LAST_TURN)),
    option=st.booleans(),
)
plays = st.lists(st.lists(asks, min_size=3, max_size=GROUP), min_size=2, max_size=6)


# --- what the model makes of it ---------------------------------------------------------------

State = bytes | None
CANCELLED = "cancelled"
LEASED = "leased"
NOT_READY = "not ready"  # beside a write: remove_many does not wait for its turn
TOO_SMALL = "too small"
BEYOND = "beyond the end"


@dataclass(frozen=True, eq=False)
class Event:
    """What one call did with one key.

    Attributes:
        kind: ``get``, ``into``, ``exists``, ``size``, ``put``, ``upsert`` or ``remove``.
        value: What was to be stored, or (room, offset) of the memory that was read into.
        answer: What came back.
    """

    kind: str
    value: Any
    answer: Any

    @property
    def writes(self) -> bool:
        return self.kind in ("put", "upsert", "remove")

    def happen(self, state: State) -> Iterator[State]:
        """The states after it, if it may have happened in this one."""
        if self.answer is CANCELLED:
            yield state
        if self.kind == "put":
            yield self.value if state is None else state
        elif self.kind == "upsert":
            yield self.value
        elif self.kind == "remove":
            if self.answer in (LEASED, NOT_READY):
                yield state
            elif self.answer in (CANCELLED, state is not None):
                yield None
        elif self.answer == self.expected(state):
            yield state

    def expected(self, state: State) -> Any:
        """What a read answers in a state."""
        if self.kind == "exists":
            return state is not None
        if self.kind == "size":
            return None if state is None else len(state)
        if self.kind == "get" or state is None:
            return state
        room, offset = self.value
        if offset is None:
            return state if len(state) <= room else TOO_SMALL
        return state[offset : offset + room] or BEYOND


def after(states: set[State], events: Sequence[Event]) -> set[State]:
    """The states that may come of these, in any order that explains the answers; none if none."""
    found: set[State] = set()
    seen: set[tuple[int, State]] = set()

    def go_on(left: int, state: State) -> None:
        if (left, state) in seen:
            return
        seen.add((left, state))
        if not left:
            found.add(state)
        for i, event in enumerate(events):
            if left >> i & 1:
                for then in event.happen(state):
                    go_on(left & ~(1 << i), then)

    for state in states:
        go_on((1 << len(events)) - 1, state)
    return found


# --- how it is played -------------------------------------------------------------------------


class Player:
    """Plays calls on a store, on one loop, and checks them against the model."""

    def __init__(self, store: Store, buffer: Buffer, elsewhere: ReplicateConfig) -> None:
        self.store = store
        self.buffer = buffer
        self.elsewhere = elsewhere
        self.real = elsewhere.preferred_segments != ("nowhere",)
        self.room = store._views.room
        self.kept = len(store._client._kept)

    async def play(self, groups: list[list[Ask]]) -> None:
        await self.store.remove_by_regex("^model-", force=True)
        states: dict[str, set[State]] = {key: {None} for key in KEYS}
        for group in groups:
            events: dict[str, list[Event]] = {key: [] for key in KEYS}
            await self.together(group, events)
            for key in KEYS:
                explained = self.explainable(states[key], events[key])
                then = after(states[key], explained)
                assert then, (
                    f"{key}: nothing explains {summary(explained)} from {states[key]!r:.200}"
                )
                states[key] = then
        for key, value in zip(KEYS, await self.store.get_many(KEYS), strict=True):
            assert value in states[key], f"{key} ended as {value!r:.100}"
        # The thread of a call that is over may still hold what it handed out.
        for _ in range(5000):
            if self.store._views.room == self.room:
                break
            await asyncio.sleep(0.001)
        self.check_nothing_is_lost()

    def explainable(self, states: set[State], events: list[Event]) -> list[Event]:
        """Leave out what the engine itself does not promise: whole reads beside an ``upsert``.

        The in-memory engine mixes values only when they are read in several calls; the real one
        also reuses the memory of a value that is removed by force while it is read.
        """
        replaced = any(event.kind == "upsert" for event in events)
        removed = any(event.kind == "remove" for event in events)
        values = [*states, *(event.value for event in events if event.kind in ("put", "upsert"))]
        in_pieces = any(value and len(value) > PIECE for value in values)
        in_parts = {id(e) for e in events if e.kind == "into" and e.value[1] is not None}
        return [
            event
            for event in events
            if event.writes
            or not (
                (self.real and (replaced or removed))
                or (replaced and (in_pieces or id(event) in in_parts))
            )
        ]

    async def together(self, group: list[Ask], events: dict[str, list[Event]]) -> None:
        tasks = [asyncio.ensure_future(self.ask(ask, i, events)) for i, ask in enumerate(group)]
        for turn in range(1, LAST_TURN + 1):
            await asyncio.sleep(0 if turn < SLOW_TURNS else 0.0004)
            for ask, task in zip(group, tasks, strict=True):
                if ask.cancel == turn:
                    task.cancel()
            if all(task.done() for task in tasks):
                break
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
        # What was left behind may still happen.
        deadline = time.monotonic() + 10
        while self.store.stats().in_flight or self.buffer._users:
            assert time.monotonic() < deadline, self.store._client.gate.describe_calls()
            await asyncio.sleep(0.0002)

    async def ask(self, ask: Ask, place: int, events: dict[str, list[Event]]) -> None:
        """Make one call, and note what it did with each key."""
        keys = [KEYS[i] for i in ask.keys]
        verb = ask.verb
        if verb in ("put_many", "put_many_from", "get_many_into"):
            keys = list(dict.fromkeys(keys))
        elif not verb.endswith("_many"):
            keys = keys[:1]
        notes: list[tuple[str, Any]]
        kind = {"get_many": "get", "view": "get", "view_many": "get", "exists_many": "exists"}.get(
            verb, verb
        )
        if verb in INTO:
            offset = ask.seed * 100 if verb == "get_into range" else None
            room = min(ask.size, REGION // 4)
            notes, kind = [(key, (room, offset)) for key in keys], "into"
        elif verb.startswith("remove"):
            notes, kind = [(key, None) for key in keys], "remove"
        elif verb in (*PUTS, "upsert"):
            notes = [(key, content(ask.size, ask.seed + i)) for i, key in enumerate(keys)]
            kind = "upsert" if verb == "upsert" else "put"
        else:
            notes = [(key, None) for key in keys]
        answers: list[Any] = [CANCELLED] * len(keys)
        try:
            answers = await getattr(self, verb.replace(" ", "_"))(ask, keys, notes, place)
        finally:
            # A key may be given twice: it is asked for once, and answered twice.
            for (key, value), answer in dict.fromkeys(zip(notes, answers, strict=True)):
                events[key].append(Event(kind, value, answer))

    # ------------------------------------------------------------------ reads

    async def get(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        return [await self.store.get(keys[0])]

    async def get_many(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        return list(await self.store.get_many(keys))

    async def exists(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        return [await self.store.exists(keys[0])]

    async def exists_many(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        return list(await self.store.exists_many(keys))

    async def size(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        return [await self.store.size(keys[0])]

    async def view(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        async with self.store.view(keys[0]) as view:
            return [await self.look_at(view, ask)]

    async def view_many(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        async with self.store.view_many(keys) as views:
            return [await self.look_at(view, ask) for view in views]

    async def look_at(self, view: memoryview | None, ask: Ask) -> bytes | None:
        if view is None:
            return None
        value = bytes(view)
        for _ in range(ask.seed % 20):
            await asyncio.sleep(0)
        assert view == value  # whatever the others do meanwhile
        return value

    # ------------------------------------------------------------------ into memory

    async def get_into(
        self, ask: Ask, keys: list[str], notes: Any, place: int, *, parts: bool = False
    ) -> list[Any]:
        (_, (room, offset)) = notes[0]
        start = place * REGION
        self.buffer_view[start : start + room + 9] = b"\xee" * (room + 9)
        memory: Any = self.buffer[start : start + room]
        if parts:
            memory = cut(memory, ask.seed)
        try:
            read = await self.store.get_into(keys[0], memory, offset=offset, **self.release(ask))
        except BufferTooSmallError:
            return [TOO_SMALL]
        except InvalidArgumentError as exc:
            if exc.code is not None:  # the engine's own refusal
                raise
            return [BEYOND]
        assert self.buffer_view[start + room : start + room + 9] == b"\xee" * 9
        return [None if read is None else bytes(self.buffer_view[start : start + read])]

    async def get_into_parts(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        return await self.get_into(ask, keys, notes, place, parts=True)

    get_into_range = get_into

    async def get_many_into(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        (_, (room, _)) = notes[0]
        memory = {
            key: self.buffer[start : start + room]
            for i, key in enumerate(keys)
            for start in [place * REGION + i * REGION // 4]
        }
        answers = await self.store.get_many_into(
            some_cut(memory, ask.seed), return_exceptions=True, **self.release(ask)
        )
        return [
            TOO_SMALL
            if isinstance(read, BufferTooSmallError)
            else bytes(self.buffer_view[memory[key].offset :][:read])
            if isinstance(read, int)
            else read
            for key, read in zip(keys, answers, strict=True)
        ]

    # ------------------------------------------------------------------ writes

    async def put(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        return [await self.store.put(keys[0], notes[0][1], **self.where(ask))]  # type: ignore[func-returns-value]

    async def put_mutable(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        value = bytearray(notes[0][1])
        await self.store.put(keys[0], value, **self.where(ask))
        value.clear()
        return [None]

    async def put_many(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        return list((await self.store.put_many(dict(notes), **self.where(ask))).values())

    async def put_parts(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        value = memoryview(notes[0][1])
        cut = len(value) * ask.seed // 256
        strided = memoryview(bytes(value[cut:]) * 2)[: len(value) - cut]
        await self.store.put_parts(keys[0], value[:cut], strided, **self.where(ask))
        return [None]

    async def put_from(
        self, ask: Ask, keys: list[str], notes: Any, place: int, *, parts: bool = False
    ) -> list[Any]:
        memory: Any = self.filled(notes[0][1], place * REGION)
        if parts:
            memory = cut(memory, ask.seed)
        await self.store.put_from(keys[0], memory, **self.where(ask), **self.release(ask))
        return [None]

    async def put_from_parts(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        return await self.put_from(ask, keys, notes, place, parts=True)

    async def put_many_from(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        items = {
            key: self.filled(value, place * REGION + i * REGION // 4)
            for i, (key, value) in enumerate(notes)
        }
        stored = await self.store.put_many_from(
            some_cut(items, ask.seed), **self.where(ask), **self.release(ask)
        )
        return list(stored.values())

    async def upsert(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        await self.store.upsert(keys[0], notes[0][1], **self.where(ask))
        return [None]

    async def remove(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        try:
            return [await self.store.remove(keys[0], force=ask.option)]
        except ObjectLeasedError:
            return [LEASED]

    async def remove_many(self, ask: Ask, keys: list[str], notes: Any, place: int) -> list[Any]:
        answers = await self.store.remove_many(keys, force=ask.option, return_exceptions=True)
        refused = {ObjectLeasedError: LEASED, ObjectNotReadyError: NOT_READY}
        return [refused.get(type(answer), answer) for answer in answers]  # type: ignore[arg-type]

    # ------------------------------------------------------------------ small helpers

    @property
    def buffer_view(self) -> memoryview:
        assert self.buffer.view is not None
        return self.buffer.view

    def filled(self, value: bytes, start: int) -> Any:
        self.buffer_view[start : start + len(value)] = value
        return self.buffer[start : start + len(value)]

    def where(self, ask: Ask) -> dict[str, Any]:
        return {"config": self.elsewhere} if ask.option else {}

    def release(self, ask: Ask) -> dict[str, Any]:
        """Every other call that names memory is left behind when it is cancelled."""
        return {"on_release": lambda: None} if ask.seed % 2 else {}

    def check_nothing_is_lost(self) -> None:
        store = self.store
        stats = store.stats()
        assert (stats.in_flight, stats.abandoned, stats.tainted) == (0, 0, False)
        assert store._views.room == self.room
        assert len(store._client._kept) == self.kept
        assert self.buffer._users == 0
        assert not store._transfers._registrations._regions
        assert not store._transfers._putting
        batching = store._batching
        assert batching is not None
        assert not batching._turns._busy
        lanes = [
            batching.gets,
            batching.exists,
            batching.sizes,
            batching.into,
            batching.into_parts,
            batching.views,
        ]
        for lane in [*lanes, *batching._writes.values()]:
            assert lane.idle
            assert lane._under_way == 0
        if not self.real:
            native: Any = store._client.native_object
            assert len(native._registered) == 1 + len(store._transfers._pool._free)


def cut(memory: Any, seed: int) -> list[Any]:
    """Cut memory in two, or leave it whole."""
    place = memory.nbytes * seed // 256
    return [part for part in (memory[:place], memory[place:]) if part.nbytes]


def some_cut(items: dict[str, Any], seed: int) -> dict[str, Any]:
    """Cut some of the memory."""
    return {
        key: cut(memory, seed) if (seed >> i) % 2 else memory
        for i, (key, memory) in enumerate(items.items())
    }


def summary(events: Sequence[Event]) -> str:
    def short(value: Any) -> str:
        return f"{len(value)}×{value[:1]!r}" if isinstance(value, bytes) else repr(value)

    return (
        ", ".join(f"{e.kind}({short(e.value)}) -> {short(e.answer)}" for e in events) or "nothing"
    )


# --- the tests --------------------------------------------------------------------------------


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LIMITS.items():
        monkeypatch.setattr(name, value)


def check(opened: Callable[[], Awaitable[Player]], closing: Any, examples: int) -> None:
    """Play examples on a loop and a store that they all share."""
    loop = asyncio.new_event_loop()
    player = loop.run_until_complete(opened())

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(plays)
    def model_holds(groups: list[list[Ask]]) -> None:
        loop.run_until_complete(player.play(groups))

    try:
        model_holds()
    finally:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        closing.add(player.store._client)


async def player_of(store: Store, elsewhere: str) -> Player:
    buffer = await store.allocate(GROUP * REGION)
    return Player(store, buffer, ReplicateConfig(preferred_segments=[elsewhere]))


@pytest.mark.parametrize("local_buffer", [LOCAL, 0])
@pytest.mark.usefixtures("limits")
def test_the_in_memory_engine_keeps_to_the_model(closing: Any, local_buffer: int) -> None:
    engine = InMemoryEngine("model")

    async def opened() -> Player:
        for method in SLOW_CALLS:
            engine.fault(method, delay=0.0002)
        store = await connect(
            "memory://model",
            engine=engine,
            global_segment_size=64 * MB,
            local_buffer_size=local_buffer,
            threads=3,
            max_abandoned=64,
        )
        return await player_of(store, "nowhere")

    check(opened, closing, 200 if local_buffer else 50)


@pytest.mark.usefixtures("limits")
def test_the_real_engine_keeps_to_the_model(closing: Any, cluster: LocalCluster) -> None:
    """Values of another process take another way through the engine."""
    with Peer(cluster.address) as peer:

        async def opened() -> Player:
            store = await connect(
                cluster.address,
                global_segment_size=64 * MB,
                local_buffer_size=LOCAL,
                max_abandoned=64,
            )
            return await player_of(store, peer.hostname)

        check(opened, closing, 25)
