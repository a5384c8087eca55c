"""Moves of the callers' memory travel together; on the in-memory engine.

What becomes of the memory when calls hang, are cancelled or fail is tested in
:mod:`test_zero_copy_threads`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from aiomooncake import (
    BatchError,
    BufferTooSmallError,
    InvalidArgumentError,
    ReplicateConfig,
    Store,
    TransferError,
)
from aiomooncake.buffers import Buffer, Slice
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.lanes import Batch
from aiomooncake.testing import LoopStallProbe

if TYPE_CHECKING:
    from tests.conftest import Hold

    Eventually = Callable[[Callable[[], object]], Awaitable[None]]

KB, MB = 1 << 10, 1 << 20

PUT, GET = "batch_put_from", "batch_get_into"
PUT_PARTS, GET_PARTS = "batch_put_from_multi_buffers", "batch_get_into_multi_buffers"
SINGLE = ("put_from", "get_into")
QUESTIONS = ("get_size", "batch_get_replica_desc")
VERBS = {"one": (PUT, GET), "parts": (PUT_PARTS, GET_PARTS)}
kinds = pytest.mark.parametrize("kind", VERBS)


@dataclass
class Made:
    """One call of the engine."""

    method: str
    keys: list[str]
    args: tuple[Any, ...]


class Seen:
    """The calls that reach the engine; a test may change their answers."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Made] = []
        self.codes: dict[str, list[int]] = {}
        native = store._client.native_object
        for method in (PUT, GET, PUT_PARTS, GET_PARTS, *SINGLE, *QUESTIONS):
            monkeypatch.setattr(native, method, self._recorded(method, getattr(native, method)))

    def _recorded(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(first: Any, *args: Any) -> Any:
            keys = [first] if isinstance(first, str) else list(first)
            self.calls.append(Made(method, keys, args))
            answer = call(first, *args)
            if method in (PUT, GET, PUT_PARTS, GET_PARTS):
                for i, key in enumerate(keys):
                    if self.codes.get(key):
                        answer[i] = self.codes[key].pop(0)
            return answer

        return recorded

    def keys(self, *methods: str) -> list[list[str]]:
        return [made.keys for made in list(self.calls) if made.method in methods]

    @property
    def methods(self) -> list[str]:
        return [made.method for made in self.calls]


@pytest.fixture
def engine() -> InMemoryEngine:
    return InMemoryEngine("memory-lane")


@pytest.fixture(autouse=True)
def overdue(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set after how many seconds a batch is overdue: never, unless a test says so."""

    def set_overdue(seconds: float) -> None:
        for module in ("lanes", "engine.client"):
            monkeypatch.setattr(f"aiomooncake.{module}.OVERDUE", seconds)

    set_overdue(600.0)
    return set_overdue


@pytest.fixture
def soon_overdue(overdue: Callable[[float], None]) -> None:
    """Let batches be overdue soon."""
    overdue(0.01)


@pytest.fixture
async def store(engine: InMemoryEngine, open_store: Any) -> AsyncIterator[Store]:
    store: Store = await open_store("memory://memory-lane", engine=engine, rank=44)
    yield store
    assert not store.stats().tainted


@pytest.fixture
async def buffer(store: Store) -> Buffer:
    """Two halves: where values come from, each byte of a slot another, and where they go to."""
    buffer = await store.allocate("64MiB")
    assert buffer.view is not None
    buffer.view[: 32 * MB] = bytes(range(256)) * (32 * MB // 256)
    return buffer


@pytest.fixture
def seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(store, monkeypatch)


def start(call: Awaitable[Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(call)


async def turns(count: int = 20) -> None:
    """Let the loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


def names(count: int, prefix: str = "key") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def slots(
    buffer: Buffer, keys: list[str], size: int = 1000, *, kind: str = "one", at: int = 0
) -> dict[str, Any]:
    """Give each key some memory, in one piece or in three."""
    memory: dict[str, Any] = {}
    for i, key in enumerate(keys):
        slot = buffer[at + i * size : at + (i + 1) * size]
        memory[key] = slot if kind == "one" else [slot[:1], slot[1 : size // 2], slot[size // 2 :]]
    return memory


INTO = 32 * MB


def bytes_of(place: Slice | list[Slice]) -> bytes:
    parts = place if isinstance(place, list) else [place]
    return b"".join(bytes(part.view or b"") for part in parts)


# --- together ---------------------------------------------------------------------------------


@kinds
async def test_many_keys_of_a_call_are_one_engine_call(
    store: Store, buffer: Buffer, seen: Seen, kind: str
) -> None:
    keys = names(200)
    source, target = slots(buffer, keys, kind=kind), slots(buffer, keys, kind=kind, at=INTO)
    assert await store.put_many_from(source) == dict.fromkeys(keys)
    assert await store.get_many_into(target) == [1000] * 200
    assert seen.methods == list(VERBS[kind])
    assert seen.keys(*VERBS[kind]) == [keys, keys]
    assert [bytes_of(target[key]) for key in keys] == [bytes_of(source[key]) for key in keys]


@kinds
async def test_what_several_tasks_ask_for_together_is_one_engine_call(
    store: Store, buffer: Buffer, seen: Seen, kind: str
) -> None:
    """Calls of many keys and of single ones, each with answers of its own."""
    put, get = VERBS[kind]
    a, b, single = names(16, "a"), names(16, "b"), "single"
    source = slots(buffer, [*a, *b, single], kind=kind)
    await asyncio.gather(
        store.put_many_from({key: source[key] for key in a}),
        store.put_from(single, source[single]),
        store.put_many_from({key: source[key] for key in b}),
    )
    assert seen.keys(put) == [[*a, single, *b]]
    target = slots(buffer, [*a, "gone", *b, single], kind=kind, at=INTO)
    answers = await asyncio.gather(
        store.get_many_into({key: target[key] for key in [*a, "gone"]}),
        store.get_into(single, target[single]),
        store.get_many_into({key: target[key] for key in b}),
    )
    assert answers == [[*[1000] * 16, None], 1000, [1000] * 16]
    assert seen.keys(get) == [[*a, "gone", single, *b]]
    for key in (*a, *b, single):
        assert bytes_of(target[key]) == bytes_of(source[key])


async def test_values_of_all_kinds_come_back_in_order(
    store: Store, buffer: Buffer, seen: Seen
) -> None:
    """Each kind is one engine call, but for values that travel in pieces."""
    small, parts, large, large_parts = names(9), names(9, "p"), "large", "large parts"
    source = slots(buffer, small) | slots(buffer, parts, kind="parts", at=MB)
    source[large] = buffer[: 9 * MB]
    source[large_parts] = [buffer[10 * MB : 15 * MB], buffer[3 : 5 * MB]]
    order = sorted(source, key=lambda key: key[::-1])
    sizes = [len(bytes_of(source[key])) for key in order]
    assert await store.put_many_from({key: source[key] for key in order}) == dict.fromkeys(source)
    target = slots(buffer, small, at=INTO) | slots(buffer, parts, kind="parts", at=INTO + MB)
    target[large] = buffer[INTO + 2 * MB : INTO + 12 * MB]
    target[large_parts] = [buffer[INTO + 12 * MB : INTO + 20 * MB], buffer[INTO + 20 * MB :]]
    assert await store.get_many_into({key: target[key] for key in order}) == sizes
    for key in order:
        assert bytes_of(target[key])[: len(bytes_of(source[key]))] == bytes_of(source[key])
    assert len(seen.keys(PUT)) == len(seen.keys(GET)) == 1
    merged = [key for key in order if key.startswith("p")]
    assert seen.keys(PUT_PARTS) == [merged]


async def test_middle_sized_values_travel_together_too(
    store: Store, buffer: Buffer, seen: Seen
) -> None:
    keys = names(4)
    await store.put_many_from(slots(buffer, keys, 5 * MB))
    await store.put_from("8 MB", buffer[: 8 * MB])
    assert [made.keys for made in seen.calls] == [keys, ["8 MB"]]


@kinds
async def test_merging_can_be_turned_off(
    engine: InMemoryEngine, open_store: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    store = await open_store("memory://memory-lane", engine=engine, merge=False)
    seen = Seen(store, monkeypatch)
    keys = names(5)
    async with store.allocate(5000) as buffer:
        await store.put_many_from(slots(buffer, keys, kind=kind))
        assert await store.get_many_into(slots(buffer, keys, kind=kind)) == [1000] * 5
    assert sorted(made.keys for made in seen.calls) == sorted([key] for key in keys * 2)


# --- bounds -----------------------------------------------------------------------------------


@kinds
async def test_a_batch_is_bounded_in_keys(
    store: Store, buffer: Buffer, seen: Seen, kind: str
) -> None:
    keys = names(1500)
    await store.put_many_from(slots(buffer, keys, 10, kind=kind))
    assert await store.get_many_into(slots(buffer, keys, 10, kind=kind, at=INTO)) == [10] * 1500
    for method in VERBS[kind]:
        asked = seen.keys(method)
        assert sorted(itertools.chain(*asked)) == sorted(keys)
        assert max(map(len, asked)) == 256
        assert len(asked) <= 7


@kinds
async def test_a_batch_is_bounded_in_bytes(
    store: Store, buffer: Buffer, seen: Seen, kind: str
) -> None:
    """Of several calls too; 32 MB travel in one."""
    calls = [names(4, "a"), names(4, "b"), names(4, "c")]
    for i, keys in enumerate(calls):  # they share memory, 3 MB each
        await store.put_many_from(slots(buffer, keys, 3 * MB, kind=kind, at=i))
    targets = [slots(buffer, keys, 3 * MB, kind=kind, at=INTO + 12 * MB * (i % 2)) for i, keys
               in enumerate(calls)]  # fmt: skip
    assert await asyncio.gather(*map(store.get_many_into, targets)) == [[3 * MB] * 4] * 3
    asked = sorted(seen.keys(VERBS[kind][1]))  # side by side
    assert asked == [[*calls[0], *calls[1]], calls[2]]


async def test_a_native_call_is_bounded_in_pieces(
    store: Store, buffer: Buffer, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport refuses more than so many at a time."""
    monkeypatch.setattr("aiomooncake.parts.MANY_PARTS", 7)
    keys = names(5)
    groups = [f"group of {key}" for key in keys]
    source = slots(buffer, keys, kind="parts")
    source[keys[3]] = [buffer[i : i + 1] for i in range(9)]
    await store.put_many_from(source, config=ReplicateConfig(group_ids=groups))
    assert seen.keys(PUT_PARTS) == [keys[:2], keys[2:3], keys[3:4], keys[4:]]
    cut = [list(made.args[-1].group_ids) for made in seen.calls]
    assert cut == [groups[:2], groups[2:3], groups[3:4], groups[4:]]
    target = slots(buffer, keys, kind="parts", at=INTO)
    assert await store.get_many_into(target) == [1000, 1000, 1000, 9, 1000]
    assert [bytes_of(target[key])[:9] for key in keys] == [
        bytes_of(source[key])[:9] for key in keys
    ]
    assert max(sum(map(len, made.args[0])) for made in seen.calls if made.method == GET_PARTS) <= 7


async def test_batches_are_smaller_while_moves_are_slow(store: Store, seen: Seen) -> None:
    """So that calls stay short over a slow link too; and large again when they are quick."""
    keys = names(8)
    lane = store._merging().into
    async with store.allocate("32MiB") as buffer:
        items = slots(buffer, keys, 4 * MB)
        await store.put_many_from(items)
        for _ in range(2):  # as if two batches had been overdue
            lane._late(Batch([]))
        batches: list[list[int]] = []
        for _ in range(3):
            seen.calls.clear()
            assert await store.get_many_into(items) == [4 * MB] * 8
            batches.append([len(asked) for asked in seen.keys(GET)])
    assert batches[0][:2] == [2, 2]  # of 8 MB, side by side
    assert batches[2] == [8]


async def test_twelve_thousand_keys_do_not_stop_the_loop(store: Store, buffer: Buffer) -> None:
    """Nor do they keep others waiting until all of them are done."""
    keys = names(12_000)
    native: Any = store._client.native_object
    # The engine itself is written in Python here, and holds the GIL.
    native.put_from = lambda *_: 0
    native.batch_put_from = lambda asked, *_: [0] * len(asked)
    native.batch_get_into = lambda _asked, _places, sizes: list(sizes)
    async with LoopStallProbe() as probe:
        storing = start(store.put_many_from(slots(buffer, keys, 100)))
        await turns(30)
        await store.put_from("other", buffer[:5])
        assert not storing.done()
        assert await storing == dict.fromkeys(keys)
        assert await store.get_many_into(slots(buffer, keys, 100, at=INTO)) == [100] * 12_000
    assert probe.longest < 0.2  # 5 ms on a free machine


# --- the same key -----------------------------------------------------------------------------


@kinds
async def test_no_key_is_twice_in_a_batch(
    store: Store, buffer: Buffer, seen: Seen, kind: str
) -> None:
    """The engine writes only one place of a key given twice, although both answer its size."""
    keys = names(20)
    await asyncio.gather(
        *(store.put_many_from(slots(buffer, keys, kind=kind, at=i)) for i in range(3))
    )
    targets = [slots(buffer, keys[i:], kind=kind, at=INTO + i * MB) for i in range(3)]
    read = await asyncio.gather(*map(store.get_many_into, targets))
    assert read == [[1000] * (20 - i) for i in range(3)]
    for made in seen.calls:
        assert len(set(made.keys)) == len(made.keys)
    for target in targets:
        for i, key in enumerate(keys):
            if key in target:
                assert bytes_of(target[key]) == bytes(buffer.view[i * 1000 : (i + 1) * 1000])  # type: ignore[index]


async def test_a_key_that_is_being_written_does_not_hold_its_neighbours(
    engine: InMemoryEngine, store: Store, buffer: Buffer, seen: Seen, hold: Hold
) -> None:
    """And is stored in its turn, behind the write that is under way."""
    engine.fault("put_from", hold=hold, times=1, code=-800)
    first = start(store.put("b", b"first"))
    await hold()
    many = start(store.put_many_from(slots(buffer, ["a", "b", "c"])))
    await turns()
    while not await store.exists("c"):
        await turns()
    assert await store.exists_many(["a", "b"]) == [True, False]
    assert not many.done()
    hold.set()
    with pytest.raises(TransferError):
        await first
    assert await many == {"a": None, "b": None, "c": None}
    assert await store.size("b") == 1000
    assert sorted(seen.keys(PUT, "put_from")) == [["a"], ["b"], ["b"], ["c"]] or sorted(
        seen.keys(PUT, "put_from")
    ) == [["a", "c"], ["b"], ["b"]]


async def test_writes_take_turns_with_moves_whatever_their_way(
    store: Store, buffer: Buffer, seen: Seen
) -> None:
    writes: list[Awaitable[Any]] = [
        store.put_many_from({"key": buffer[:3], "other": buffer[:4]}),
        store.upsert("key", b"second"),
        store.put_many_from({"key": [buffer[:3], buffer[5:6]], "another": buffer[:4]}),
        store.remove("key", force=True),
        store.put_from("key", [buffer[1:2], buffer[1:4]]),
    ]
    await asyncio.gather(*writes)
    assert await store.get("key") == bytes([1, 1, 2, 3])
    assert await store.get_many(["other", "another"]) == [bytes(range(4))] * 2


# --- what goes wrong with one key ---------------------------------------------------------------


@kinds
async def test_a_key_that_fails_does_not_hurt_its_neighbours(
    store: Store, buffer: Buffer, seen: Seen, kind: str
) -> None:
    keys = names(4)
    seen.codes = {"key1": [-200], "key2": [-800]}
    with pytest.raises(BatchError, match="put_many_from failed for 2 of 4") as caught:
        await store.put_many_from(slots(buffer, keys, kind=kind))
    results = caught.value.results
    assert [getattr(results[key], "code", None) for key in keys] == [None, -200, -800, None]
    assert [getattr(results[key], "key", None) for key in keys] == [None, "key1", "key2", None]
    seen.codes = {"key0": [-900], "key2": [-800]}
    answers = await store.get_many_into(
        slots(buffer, keys, kind=kind, at=INTO), return_exceptions=True
    )
    assert [getattr(answer, "code", answer) for answer in answers] == [-900, 1000, -800, 1000]
    assert answers[2].key == "key2"
    assert isinstance(answers[2], TransferError)
    # A transfer that failed is not tried again: it takes seconds each time.
    assert len(seen.keys(VERBS[kind][1])) == 1
    seen.codes = {"key3": [-800]}
    with pytest.raises(TransferError, match=r"\[TP44\].*key3"):
        await store.get_into("key3", slots(buffer, keys, kind=kind, at=INTO)["key3"])


@kinds
async def test_leases_that_run_out_are_taken_again_together(
    store: Store, buffer: Buffer, seen: Seen, kind: str
) -> None:
    """As those of all healthy keys do beside one on a frozen peer."""
    keys = names(50)
    get = VERBS[kind][1]
    source = slots(buffer, keys, kind=kind)
    await store.put_many_from(source)
    seen.calls.clear()
    seen.codes = {key: [-707] for key in keys[1:]} | {keys[0]: [-800]}
    target = slots(buffer, keys, kind=kind, at=INTO)
    answers = await store.get_many_into(target, return_exceptions=True)
    assert isinstance(answers[0], TransferError)
    assert answers[1:] == [1000] * 49
    assert seen.keys(get) == [keys, keys[1:]]
    seen.codes = {keys[1]: [-707] * 9, keys[2]: [-707]}
    answers = await store.get_many_into(
        {key: target[key] for key in keys[:3]}, return_exceptions=True
    )
    assert answers[0] == answers[2] == 1000
    if kind == "parts":
        assert answers[1].code == -707
    else:  # settled by a single read
        assert answers[1] == 1000


# --- memory that is not as large as its value ---------------------------------------------------


async def test_parts_that_do_not_fit_their_values_cost_one_more_call(
    store: Store, buffer: Buffer, seen: Seen
) -> None:
    """The engine answers -800 for memory that is larger, as for a transfer that failed."""
    keys = names(30)
    source = slots(buffer, keys)
    await store.put_many_from(source)
    seen.calls.clear()
    target: dict[str, Any] = {}
    for i, key in enumerate([*keys, "gone"]):
        slot = buffer[INTO + i * 4000 : INTO + (i + 1) * 4000]
        # 990 to 1019 bytes in all: too small, as large, or larger; in two to four pieces.
        cuts = [0, 300, 600 + i, 990 + i, 1500 if i == 29 else 990 + i]
        target[key] = [slot[a:b] for a, b in itertools.pairwise(cuts) if b > a]
    answers = await store.get_many_into(target, return_exceptions=True)
    for i, key in enumerate(keys):
        if i < 10:
            assert isinstance(answers[i], BufferTooSmallError)
            assert f"1000 bytes, the memory {990 + i}" in str(answers[i])
            assert not any(bytes_of(target[key]))
        else:
            assert answers[i] == 1000
            assert bytes_of(target[key]) == bytes_of(source[key]) + bytes(
                len(bytes_of(target[key])) - 1000
            )
    assert answers[30] is None
    assert seen.methods == [GET_PARTS, "batch_get_replica_desc", GET_PARTS]
    assert seen.keys(GET_PARTS) == [[*keys, "gone"], keys[11:]]


async def test_parts_as_large_as_their_values_cost_one_call(
    store: Store, buffer: Buffer, seen: Seen
) -> None:
    await store.put_many_from(slots(buffer, names(9)))
    seen.calls.clear()
    await store.get_many_into(slots(buffer, names(9), kind="parts", at=INTO))
    assert seen.methods == [GET_PARTS]


async def test_a_value_that_goes_or_changes_while_its_parts_are_read(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold
) -> None:
    await store.put_many({"goes": b"value", "grows": b"value", "shrinks": b"value", "stays": b"v"})
    engine.fault("batch_get_replica_desc", hold=hold, times=1)
    at = itertools.count(INTO, 100)
    keys = ["goes", "grows", "shrinks", "stays"]
    target = {key: [buffer[(n := next(at)) : n + 3], buffer[n + 3 : n + 10]] for key in keys}
    reading = start(store.get_many_into(target, return_exceptions=True))
    await hold()
    await store.remove("goes", force=True)
    await store.upsert("grows", b"12345678901")
    await store.upsert("shrinks", b"12")
    hold.set()
    gone, grown, shrunk, stayed = await reading
    assert (gone, shrunk, stayed) == (None, 2, 1)
    assert isinstance(grown, BufferTooSmallError)
    assert bytes_of(target["shrinks"]) == b"12" + bytes(8)


async def test_a_list_of_one_slice_is_a_slice(store: Store, buffer: Buffer, seen: Seen) -> None:
    one: Any = [buffer[:5]]
    await store.put_many_from({"a": one, "b": (buffer[5:9],)})
    into: Any = [buffer[INTO : INTO + 9]]
    assert await store.get_into("a", into) == 5
    assert await store.get_into("a", into, offset=2) == 3
    assert bytes_of(into)[:3] == bytes([2, 3, 4])
    assert seen.keys(PUT) == [["a", "b"]]
    assert not seen.keys(PUT_PARTS, GET_PARTS)


# --- options ----------------------------------------------------------------------------------


async def test_groups_travel_with_their_keys(
    store: Store, buffer: Buffer, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all ways, cut into batches, and beside the writes of others."""
    sessions: dict[str, list[str]] = {}
    native: Any = store._client.native_object
    begin = native.batch_put_session_start

    def started(keys: list[str], sizes: list[int], options: Any) -> Any:
        sessions.update(zip(keys, options.group_ids, strict=True))
        return begin(keys, sizes, options)

    monkeypatch.setattr(native, "batch_put_session_start", started)
    keys = [*names(300), *names(9, "p"), "large"]
    source = slots(buffer, keys[:300], 10) | slots(buffer, keys[300:309], kind="parts", at=MB)
    source["large"] = buffer[: 9 * MB]
    config = ReplicateConfig(group_ids=[f"group of {key}" for key in keys])
    await asyncio.gather(
        store.put_many_from(source, config=config),
        store.put_from("mine", buffer[:5], config=ReplicateConfig(group_ids=["group of mine"])),
        store.put_from("none", buffer[:5], config=ReplicateConfig(with_hard_pin=True)),
    )
    found: dict[str, Any] = dict(sessions)
    for made in seen.calls:
        options = made.args[-1]
        assert isinstance(options, ReplicateConfig)
        found |= dict(zip(made.keys, options.group_ids or itertools.repeat(None)))  # noqa: B905
    assert found == {key: f"group of {key}" for key in [*keys, "mine"]} | {"none": None}
    with pytest.raises(InvalidArgumentError, match="310 group_ids for 1 keys"):
        await store.put_many_from({"key": buffer[:5]}, config=config)


# --- stuck batches, progress, ends --------------------------------------------------------------


@kinds
@pytest.mark.usefixtures("soon_overdue")
async def test_a_stuck_batch_does_not_hold_the_moves_that_come_later(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold, kind: str
) -> None:
    for method in VERBS[kind]:
        engine.fault(method, hold=hold, times=3)
    stuck = []
    for i in range(3):
        for verb in (store.put_many_from, store.get_many_into):
            memory = slots(buffer, names(3, f"{i}-{verb.__name__}-"), kind=kind, at=INTO)
            stuck.append(start(verb(memory)))
            await hold()
    later = names(3, "later")
    await asyncio.wait_for(store.put_many_from(slots(buffer, later, kind=kind)), 5)
    target = slots(buffer, later, kind=kind, at=INTO + MB)
    assert await asyncio.wait_for(store.get_many_into(target), 5) == [1000] * 3
    assert not any(task.done() for task in stuck)
    hold.set()
    await asyncio.gather(*stuck)


async def test_progress_is_told_while_batches_are_still_under_way(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold, eventually: Eventually
) -> None:
    keys = names(600)
    await store.put_many_from(slots(buffer, keys, 10))
    told: list[tuple[int, int]] = []
    native: Any = store._client.native_object
    read = native.batch_get_into

    def late(asked: list[str], *args: Any) -> Any:
        if keys[-1] in asked:
            hold.wait()
        return read(asked, *args)

    native.batch_get_into = late
    items = slots(buffer, [*keys, "gone"], 10, at=INTO)
    reading = start(store.get_many_into(items, on_progress=lambda *news: told.append(news)))
    await hold()
    await eventually(lambda: len(told) >= 512)
    assert told == [(10 * i, 6010) for i in range(1, len(told) + 1)]
    assert not reading.done()
    hold.set()
    assert await reading == [*[10] * 600, None]
    assert told[-1] == (6010, 6010)
    assert len(told) == 601


async def test_progress_counts_what_went_well(store: Store, buffer: Buffer, seen: Seen) -> None:
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))
        raise KeyError("theirs")

    seen.codes = {"key1": [-200]}
    items = slots(buffer, names(3), 10)
    items["large"] = buffer[: 9 * MB]
    await store.put_many_from(items, return_exceptions=True, on_progress=tell)
    total = 9 * MB + 30
    assert max(told) == (total - 10, total)
    assert len(told) == 3


async def test_many_keys_cancelled_half_way_are_let_go_once(
    engine: InMemoryEngine, store: Store, buffer: Buffer, hold: Hold, eventually: Eventually
) -> None:
    """Some are stored, some are on their way, some wait; the engine is told of no more."""
    keys = names(3000)
    released: list[int] = []
    engine.fault(PUT, hold=hold)
    task = start(
        store.put_many_from(slots(buffer, keys, 10), on_release=lambda: released.append(1))
    )
    await hold(4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert not released
    assert buffer._users == 1
    hold.set()
    await eventually(lambda: released)
    await eventually(lambda: store.stats().in_flight == 0)
    assert (released, buffer._users) == ([1], 0)
    assert sum(await store.exists_many(keys)) == 1024
    # All keys may be written again.
    assert await store.put_many_from(slots(buffer, keys, 10)) == dict.fromkeys(keys)


async def test_memory_is_held_from_the_first_check_on(store: Store) -> None:
    """Thousands of keys are checked over several turns of the loop."""
    buffer = await store.allocate(10_000)
    keys = names(3000)
    storing = start(store.put_many_from(dict.fromkeys(keys, buffer[:3])))
    await asyncio.sleep(0)
    closing = start(buffer.aclose())
    assert await storing == dict.fromkeys(keys)
    await closing
    with pytest.raises(InvalidArgumentError, match="closed"):
        await store.put_many_from({"key": buffer[:3]})


async def test_a_bad_key_among_thousands_is_refused_before_anything_is_moved(
    store: Store, buffer: Buffer, seen: Seen
) -> None:
    bad: Any
    for bad in ("", b"bytes", "\ud800", None):
        items: dict[Any, Any] = dict.fromkeys(names(2500), buffer[:1])
        items[bad] = buffer[1:2]
        with pytest.raises(InvalidArgumentError):
            await store.put_many_from(items)
        with pytest.raises(InvalidArgumentError):
            await store.get_many_into(items)
    assert not seen.calls
    assert buffer._users == 0
    assert await store.put_many_from({"ключ": buffer[:1], "k" * 9: buffer[:2]}) == {
        "ключ": None,
        "k" * 9: None,
    }
    assert await store.get("ключ") == b"\0"
