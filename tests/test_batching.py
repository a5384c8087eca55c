"""Calls that wait together travel together; on the in-memory engine.

What is promised about concurrent calls of one store on the same key, each part with its test:

* A call that was awaited is seen by every call made after it, also when an older call of the key
  is still under way (``test_a_read_sees_every_write_that_was_finished_before_it``).
* Reads of a key that wait together are one read and share its answer
  (``test_reads_of_the_same_key_share_one_answer``).
* Writes of a key (``put``, ``upsert``, ``remove``, ``put_many`` and the like, whatever their
  options, size and way) go one after the other in the order of asking, each with an answer of its
  own
  (``test_writes_of_a_key_take_turns_whatever_their_verb_and_options``): a ``put`` behind one that
  fails tries itself, and of several ``upsert`` the last one stays.
* A write that was cancelled on its way may still happen, before the next write of its key; one that
  was cancelled while it waited never does
  (``test_a_write_that_was_cancelled_on_its_way_keeps_its_turn``).
* A read and a write that overlap happen in any order, each of them whole. So do writes by other
  stores, by ``store.engine``, and what removes many keys: ``remove_many``, ``remove_by_regex``,
  ``remove_all``.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from aiomooncake import (
    BatchError,
    InternalError,
    InvalidArgumentError,
    NoSpaceError,
    ReplicateConfig,
    RpcError,
    Store,
    StoreClosedError,
    TransferError,
    connect,
)
from aiomooncake._turns import Turns
from aiomooncake.engine.inmemory import InMemoryEngine

if TYPE_CHECKING:
    from tests.conftest import Hold

    Eventually = Callable[[Callable[[], object]], Awaitable[None]]

KB, MB = 1 << 10, 1 << 20

GET = ("get_into", "batch_get_into")
PUT = ("put_from", "batch_put_from")
UPSERT = ("upsert_from", "batch_upsert_from")
EXISTS = ("is_exist", "batch_is_exist")
SIZE = ("get_size",)
REMOVE = ("remove", "batch_remove")
OWNERS = ("batch_get_replica_desc",)
LARGE = ("batch_get_into_multi_buffer_ranges",)


@dataclass
class Made:
    """One call of the engine."""

    method: str
    keys: list[str]
    args: tuple[Any, ...]
    answer: Any = None

    @property
    def options(self) -> ReplicateConfig | None:
        last = self.args[-1] if self.args else None
        return last if isinstance(last, ReplicateConfig) else None


def _nothing(_: Made) -> None:
    pass


class Seen:
    """The calls that reach the engine of a store; a test may act in them, on their thread."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Made] = []
        self.before: Callable[[Made], object] = _nothing
        self.after: Callable[[Made], object] = _nothing
        native = store._client.native_object
        for method in (*GET, *PUT, *UPSERT, *EXISTS, *SIZE, *REMOVE, *OWNERS, *LARGE):
            monkeypatch.setattr(native, method, self._recorded(method, getattr(native, method)))

    def _recorded(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(first: Any, *args: Any) -> Any:
            made = Made(method, [first] if isinstance(first, str) else list(first), args)
            self.calls.append(made)
            self.before(made)
            made.answer = call(first, *args)
            self.after(made)
            return made.answer

        return recorded

    def of(self, *methods: str) -> list[Made]:
        return [made for made in list(self.calls) if made.method in methods]

    def keys(self, *methods: str) -> list[list[str]]:
        return [made.keys for made in self.of(*methods)]


@pytest.fixture
def engine() -> InMemoryEngine:
    return InMemoryEngine("batching")


@pytest.fixture(autouse=True)
def overdue(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set after how many seconds a batch is overdue: never, unless a test says so."""

    def set_overdue(seconds: float) -> None:
        for module in ("lanes", "hedging", "engine.client"):
            monkeypatch.setattr(f"aiomooncake.{module}.OVERDUE", seconds)

    set_overdue(600.0)
    return set_overdue


@pytest.fixture
async def store(engine: InMemoryEngine, open_store: Any) -> AsyncIterator[Store]:
    store: Store = await open_store("memory://batching", engine=engine, rank=43)
    yield store
    assert not store.stats().tainted


@pytest.fixture
def seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(store, monkeypatch)


def start(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(call)


async def turns(count: int = 20) -> None:
    """Let the loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


async def fill(store: Store, keys: Iterable[str]) -> None:
    await store.put_many({key: value_of(key) for key in keys})


def value_of(key: str) -> bytes:
    return b"value of " + key.encode()


def names(count: int, prefix: str = "key") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def hang(engine: InMemoryEngine, ways: tuple[str, ...], hold: Hold, **what: Any) -> None:
    for method in ways:
        engine.fault(method, hold=hold, **what)


async def occupy(
    engine: InMemoryEngine, store: Store, hold: Hold, count: int = 2
) -> list[asyncio.Task[Any]]:
    """Let as many gets hang as batches of gets may be under way."""
    hang(engine, GET, hold, times=count)
    stuck = []
    for i in range(count):
        stuck.append(start(store.get(f"stuck{i}")))
        await hold()
    return stuck


def batch_of_gets(store: Store, keys: Iterable[str]) -> list[asyncio.Task[Any]]:
    return [start(store.get(key)) for key in keys]


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task


# --- together, and at once --------------------------------------------------------------------


async def test_gets_that_wait_together_make_few_engine_calls(store: Store, seen: Seen) -> None:
    keys = names(512)
    await fill(store, keys)
    seen.calls.clear()
    values = await asyncio.gather(*map(store.get, keys))
    assert values == [value_of(key) for key in keys]
    assert sorted(seen.keys(*GET)) == sorted([keys[:256], keys[256:]])
    assert len(seen.calls) == 2


ONE: dict[str, tuple[tuple[str, ...], Callable[[Store], Coroutine[Any, Any, Any]]]] = {
    "get": (GET, lambda store: store.get("key")),
    "exists": (EXISTS, lambda store: store.exists("key")),
    "size": (SIZE, lambda store: store.size("key")),
    "put": (PUT, lambda store: store.put("new", b"value")),
    "upsert": (UPSERT, lambda store: store.upsert("key", b"value")),
    "remove": (REMOVE, lambda store: store.remove("key")),
}


@pytest.mark.parametrize("verb", ONE)
async def test_a_call_leaves_at_the_end_of_its_turn_of_the_loop(
    engine: InMemoryEngine, store: Store, seen: Seen, hold: Hold, verb: str
) -> None:
    ways, call = ONE[verb]
    await fill(store, ["key"])
    seen.calls.clear()
    hang(engine, ways, hold)
    task = start(call(store))
    await turns(1)  # it asks
    assert store.stats().in_flight == 0
    await turns(1)  # and is on its way
    assert store.stats().in_flight == 1
    hold.set()
    await task
    assert len(seen.calls) == len(seen.of(*ways)) == 1
    assert len(seen.calls[0].keys) == 1


@pytest.mark.parametrize("verb", ONE)
async def test_what_comes_while_batches_are_under_way_is_the_next_batch(
    engine: InMemoryEngine, store: Store, seen: Seen, hold: Hold, verb: str
) -> None:
    calls: dict[str, Callable[[str], Coroutine[Any, Any, Any]]] = {
        "get": store.get,
        "exists": store.exists,
        "size": store.size,
        "put": lambda key: store.put(key, b"value"),
        "upsert": lambda key: store.upsert(key, b"value"),
        "remove": store.remove,
    }
    ways, _ = ONE[verb]
    hang(engine, ways, hold)
    width = 4 if verb in ("put", "upsert", "remove") else 2
    first = []
    for key in names(width, "first"):
        first.append(start(calls[verb](key)))
        await hold()
    later = []
    for key in names(10, "later"):
        later.append(start(calls[verb](key)))
        await turns()
    assert store.stats().in_flight == width
    hold.set()
    await asyncio.gather(*first, *later)
    if verb == "size":  # owners and sizes come together; what is missing is asked for singly
        assert seen.keys(*OWNERS) == [names(10, "later")]
        return
    assert seen.keys(*ways) == [*([key] for key in names(width, "first")), names(10, "later")]


async def test_puts_of_many_keys_and_of_single_ones_travel_together(
    engine: InMemoryEngine, store: Store, seen: Seen, hold: Hold
) -> None:
    hang(engine, PUT, hold)
    first = []
    for key in names(4):  # as many as may be under way
        first.append(start(store.put(key, b"v")))
        await hold()
    later = [
        start(store.put("a", b"a")),
        start(store.put_many({"b": b"b", "c": b"c"})),
        start(store.put("d", b"d")),
    ]
    await turns()
    hold.set()
    await asyncio.gather(*first, *later)
    assert [sorted(keys) for keys in seen.keys(*PUT)[4:]] == [["a", "b", "c", "d"]]


async def test_many_keys_are_batches_of_their_own_side_by_side(
    engine: InMemoryEngine, store: Store, seen: Seen, hold: Hold
) -> None:
    keys = names(600)
    await fill(store, keys)
    seen.calls.clear()
    hang(engine, GET, hold)
    task = start(store.get_many([*keys, "nope", "key0"]))
    await hold(2)
    hold.set()
    assert await task == [*map(value_of, keys), None, value_of("key0")]
    assert sorted(len(each) for each in seen.keys(*GET)) == [89, 256, 256]
    assert await store.exists_many(["key1", "nope", "key1"]) == [True, False, True]
    assert seen.keys(*EXISTS) == [["key1", "nope"]]
    assert await store.remove_many(["a", "b", "a"]) == [False] * 3
    assert seen.keys(*REMOVE) == [["a", "b"]]


async def test_the_loop_hears_of_a_batch_once(
    store: Store, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = names(200)
    loop = asyncio.get_running_loop()
    heard: list[object] = []
    tell = loop.call_soon_threadsafe

    def counted(callback: Any, *args: Any, **options: Any) -> asyncio.Handle:
        heard.append(callback)
        return tell(callback, *args, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    await asyncio.gather(*(store.put(key, value_of(key)) for key in keys))
    assert len(heard) == 1
    await asyncio.gather(*map(store.get, keys))
    assert len(heard) == len(seen.calls) == 2


async def test_merging_can_be_turned_off(
    engine: InMemoryEngine, open_store: Any, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    store = await open_store("memory://batching", engine=engine, merge=False)
    seen = Seen(store, monkeypatch)
    keys = names(12)
    await asyncio.gather(*(store.put(key, value_of(key)) for key in keys))
    assert sorted(seen.keys(*PUT)) == sorted([key] for key in keys)
    seen.calls.clear()
    hang(engine, GET, hold)
    reading = [start(store.get(key)) for key in keys]
    await hold(4)  # side by side, as many as there are threads
    assert store.stats().in_flight == 12
    hold.set()
    assert await asyncio.gather(*reading) == [value_of(key) for key in keys]
    assert sorted(seen.keys(*GET)) == sorted([key] for key in keys)


# --- bounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "ways", "most"),
    [("get", GET, 256), ("exists", EXISTS, 1000), ("remove", REMOVE, 1000)],
)
async def test_a_batch_is_bounded_in_keys(
    store: Store, seen: Seen, verb: str, ways: tuple[str, ...], most: int
) -> None:
    keys = names(2 * most + 30)
    await asyncio.gather(*(getattr(store, verb)(key) for key in keys))
    assert sorted(len(each) for each in seen.keys(*ways)) == [30, most, most]
    assert sorted(key for each in seen.keys(*ways) for key in each) == sorted(keys)


async def test_a_batch_of_writes_is_bounded_in_keys(store: Store, seen: Seen) -> None:
    keys = names(300)
    await asyncio.gather(*(store.put(key, b"v") for key in keys))
    assert sorted(len(each) for each in seen.keys(*PUT)) == [44, 256]


async def test_a_batch_is_bounded_in_bytes(store: Store, seen: Seen) -> None:
    keys = names(20)
    await asyncio.gather(*(store.put(key, key.encode() * (MB // len(key))) for key in keys))
    for made in seen.of(*PUT):
        assert sum(made.args[1] if made.method == "batch_put_from" else [0]) <= 8 * MB
    assert len(seen.of(*PUT)) == 3
    for _ in range(2):  # also when the sizes are known beforehand
        seen.calls.clear()
        values = await asyncio.gather(*map(store.get, keys))
        assert values == [key.encode() * (MB // len(key)) for key in keys]
        for made in seen.of("batch_get_into"):
            assert sum(made.args[1]) <= 8 * MB


# --- the same key -----------------------------------------------------------------------------


async def test_reads_of_the_same_key_share_one_answer(store: Store, seen: Seen) -> None:
    await fill(store, ["hot", "cold"])
    seen.calls.clear()
    values = await asyncio.gather(*(store.get("hot") for _ in range(512)), store.get("cold"))
    assert values == [value_of("hot")] * 512 + [value_of("cold")]
    assert seen.keys(*GET) == [["hot", "cold"]]
    assert await asyncio.gather(*(store.size("hot") for _ in range(9))) == [12] * 9
    assert all(await asyncio.gather(*(store.exists("hot") for _ in range(9))))
    assert len(seen.calls) == 3


async def test_a_read_sees_every_write_that_was_finished_before_it(
    store: Store, seen: Seen, hold: Hold
) -> None:
    """It joins no batch that has left, although that one carries the same key."""
    slow = [hold]

    def answer_late(made: Made) -> None:
        if slow and made.method in GET:
            slow.pop().wait()

    seen.after = answer_late
    before = start(store.get("key"))
    await hold()  # it has found nothing, and does not say so yet
    await store.put("key", b"value")
    assert await store.get("key") == b"value"
    assert await store.get_many(["key", "other"]) == [b"value", None]
    hold.set()
    assert await before is None


async def test_a_second_put_of_a_key_waits_for_the_first(
    engine: InMemoryEngine, store: Store, seen: Seen, hold: Hold
) -> None:
    """The engine answers it 0 at once, although the first one may still fail."""
    hang(engine, PUT, hold, times=1)
    first = start(store.put("key", b"first"))
    await hold()
    second = start(store.put("key", b"second"))
    await store.put("other", b"other")
    assert seen.keys(*PUT) == [["key"], ["other"]]
    assert not second.done()
    hold.set()
    await asyncio.gather(first, second)
    assert await store.get("key") == b"first"
    assert len(seen.of(*PUT)) == 3


async def test_a_put_behind_one_that_fails_tries_itself(
    engine: InMemoryEngine, store: Store
) -> None:
    for method in PUT:
        engine.fault(method, code=-800, times=1)
    first, second, third = await asyncio.gather(
        *(store.put("key", value) for value in (b"first", b"second", b"third")),
        return_exceptions=True,
    )
    assert isinstance(first, TransferError)
    assert second is third is None
    assert await store.get("key") == b"second"


async def test_of_upserts_that_overlap_the_last_one_stays(store: Store, seen: Seen) -> None:
    for _ in range(5):
        await asyncio.gather(*(store.upsert("key", b"%d" % i) for i in range(10)))
        assert await store.get("key") == b"9"
    assert seen.keys(*UPSERT) == [["key"]] * 50


async def test_writes_of_a_key_take_turns_whatever_their_verb_and_options(
    engine: InMemoryEngine, store: Store, seen: Seen, hold: Hold
) -> None:
    hang(engine, PUT, hold, times=1)
    writes = [
        start(write)
        for write in (
            store.put("key", b"1"),
            store.upsert("key", b"2"),
            store.remove("key", force=True),
            store.put("key", b"3", config=ReplicateConfig(with_hard_pin=True)),
            store.put("key", bytearray(1 * MB)),  # travels alone
            store.put_parts("key", b"5", b"6"),
            store.put("key", bytes(2 * MB)),
            store.upsert("key", b"7"),
        )
    ]
    await hold()
    await turns()
    assert len(seen.calls) == 1
    hold.set()
    assert await asyncio.gather(*writes) == [None, None, True, None, None, None, None, None]
    assert [made.method.removeprefix("batch_") for made in seen.calls] == [
        "put_from",
        "upsert_from",
        "remove",
        "put_from",
        "put_from",
        "put_from",
        "put_from",
        "upsert_from",
    ]
    assert await store.get("key") == b"7"


async def test_a_write_that_was_cancelled_on_its_way_keeps_its_turn(
    engine: InMemoryEngine, store: Store, seen: Seen, hold: Hold
) -> None:
    hang(engine, PUT, hold, times=1)
    first = start(store.put("key", b"first"))
    await hold()
    await cancel([first])
    second = start(store.put("key", b"second"))
    third = start(store.put("key", bytearray(1 * MB)))
    await turns()
    assert len(seen.calls) == 1
    hold.set()
    await asyncio.gather(second, third)
    assert await store.get("key") == b"first"


@pytest.mark.parametrize("order", ["cancelled first", "turn first"])
async def test_a_turn_is_passed_on_by_one_who_is_cancelled_as_it_comes(order: str) -> None:
    """Whoever was cancelled in the same turn of the loop lost it, and the key was never free."""
    all_turns = Turns()
    await all_turns.mine("key")
    second, third = start(all_turns.mine("key")), start(all_turns.mine("key"))
    await turns()
    if order == "cancelled first":
        second.cancel()
        all_turns.end("key")
    else:
        all_turns.end("key")
        second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await asyncio.wait_for(third, 5)
    all_turns.end("key")
    assert all_turns.take("key")


async def test_no_key_is_twice_in_a_batch_of_writes(store: Store, seen: Seen) -> None:
    """Of a key given twice the engine stores the last value, and answers 0 for both."""
    keys = names(10)
    await asyncio.gather(*(store.put(key, b"%d" % i) for i in range(5) for key in keys))
    await asyncio.gather(*(store.remove(key) for _ in range(5) for key in keys))
    for made in seen.calls:
        assert len(set(made.keys)) == len(made.keys)
    assert sum(len(made.keys) for made in seen.calls) == 100


async def test_a_put_that_is_cancelled_behind_another_is_never_made(
    engine: InMemoryEngine, store: Store, seen: Seen, hold: Hold
) -> None:
    hang(engine, PUT, hold, times=1)
    first, second, third = (start(store.put("key", value)) for value in (b"1", b"2", b"3"))
    await hold()
    await cancel([second])
    hold.set()
    await asyncio.gather(first, third)
    assert len(seen.of(*PUT)) == 2


# --- options ----------------------------------------------------------------------------------


async def test_writes_with_different_options_never_share_a_batch(store: Store, seen: Seen) -> None:
    two = ReplicateConfig(replica_num=2)
    pinned = ReplicateConfig(with_hard_pin=True)
    configs = [None, two, pinned]
    await asyncio.gather(*(store.put(f"{i}", b"v", config=configs[i % 3]) for i in range(12)))
    made = {tuple(made.keys): made.options for made in seen.of(*PUT)}
    assert made == {
        ("0", "3", "6", "9"): None,
        ("1", "4", "7", "10"): two,
        ("2", "5", "8", "11"): pinned,
    }


async def test_a_removal_by_force_shares_no_batch_with_another(store: Store, seen: Seen) -> None:
    await asyncio.gather(*(store.remove(f"{i}", force=i % 2 == 0) for i in range(6)))
    made = {tuple(made.keys): made.args for made in seen.of(*REMOVE)}
    assert made == {("0", "2", "4"): (True,), ("1", "3", "5"): (False,)}


async def test_groups_are_joined_with_their_keys(store: Store, seen: Seen) -> None:
    await asyncio.gather(
        store.put_many({"d": b"v", "e": b"v"}, config=ReplicateConfig(group_ids=["D", "E"])),
        store.put("a", b"v", config=ReplicateConfig(group_ids=["A"])),
        store.put("b", b"v", config=ReplicateConfig(group_ids=["B"])),
        store.put("c", b"v", config=ReplicateConfig()),
        store.put("f", b"v", config=ReplicateConfig(group_ids=["F"], replica_num=2)),
    )
    made = {
        key: (made.options.replica_num, made.options.group_ids and made.options.group_ids[i])
        for made in seen.of(*PUT)
        for i, key in enumerate(made.keys)
        if made.options is not None
    }
    assert made == {
        "a": (1, "A"),
        "b": (1, "B"),
        "c": (1, None),
        "d": (1, "D"),
        "e": (1, "E"),
        "f": (2, "F"),
    }


async def test_groups_are_cut_with_their_keys(store: Store, seen: Seen) -> None:
    """In batches of 256, and a large value by itself."""
    values: dict[str, Any] = dict.fromkeys(names(300), b"v")
    values["key7"] = bytes(2 * MB)
    groups = [f"group of {key}" for key in values]
    await store.put_many(values, config=ReplicateConfig(group_ids=groups))
    cut = {
        key: made.options.group_ids[i]
        for made in seen.of(*PUT)
        for i, key in enumerate(made.keys)
        if made.options is not None and made.options.group_ids is not None
    }
    assert cut == dict(zip(values, groups, strict=True))
    assert sorted(len(made.keys) for made in seen.of(*PUT)) == [1, 43, 256]


# --- cancellation -----------------------------------------------------------------------------


async def test_an_item_that_is_cancelled_while_it_waits_leaves_its_batch(
    engine: InMemoryEngine, store: Store, seen: Seen, hold: Hold
) -> None:
    await fill(store, ["a", "b", "c"])
    stuck = await occupy(engine, store, hold)
    a, b, c = batch_of_gets(store, "abc")
    again = start(store.get("a"))
    await turns()
    await cancel([a, b])
    hold.set()
    # The key of "a" is still awaited by another task.
    answers: list[bytes | None] = await asyncio.gather(c, again)
    assert answers == [value_of("c"), value_of("a")]
    assert seen.keys(*GET)[2:] == [["a", "c"]]
    await asyncio.gather(*stuck)


async def test_a_batch_that_everybody_has_left_is_not_sent(
    engine: InMemoryEngine, store: Store, seen: Seen, hold: Hold
) -> None:
    stuck = await occupy(engine, store, hold)
    waiting = batch_of_gets(store, names(5))
    await turns()
    await cancel(waiting)
    hold.set()
    await asyncio.gather(*stuck)
    await turns()
    assert len(seen.of(*GET)) == 2
    assert await store.get("stuck0") is None


async def test_a_batch_under_way_is_abandoned_when_the_last_one_leaves(
    engine: InMemoryEngine, store: Store, hold: Hold, eventually: Eventually
) -> None:
    hang(engine, GET, hold, times=1)
    first, *others = batch_of_gets(store, names(5))
    await hold()
    await cancel(others)
    assert (store.stats().in_flight, store.stats().abandoned) == (1, 0)
    await cancel([first])
    assert (store.stats().in_flight, store.stats().abandoned) == (1, 1)
    hold.set()
    await eventually(lambda: store.stats().in_flight == 0)
    assert store.stats().abandoned == 0


async def test_those_who_stay_get_their_answer(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    await fill(store, names(5))
    hang(engine, GET, hold, times=1)
    first, *others = batch_of_gets(store, names(5))
    await hold()
    await cancel(others)
    hold.set()
    assert await first == value_of("key0")
    assert store.stats().abandoned == 0


async def test_batches_that_were_given_up_do_not_shut_their_lane(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    """They counted as under way until they returned: after two of them no get left any more."""
    await fill(store, ["key"])
    await cancel(await occupy(engine, store, hold))
    assert store.stats().abandoned == 2
    assert await store.get("key") == value_of("key")


async def test_a_batch_that_waits_for_a_thread_is_dropped_when_everybody_leaves(
    engine: InMemoryEngine, open_store: Any, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    store = await open_store("memory://batching", engine=engine, threads=1)
    seen = Seen(store, monkeypatch)
    (stuck,) = await occupy(engine, store, hold, 1)
    waiting = batch_of_gets(store, names(5))
    await turns()
    assert store.stats().in_flight == 2
    await cancel(waiting)
    assert (store.stats().in_flight, store.stats().abandoned) == (1, 0)
    hold.set()
    await stuck
    assert await store.get("key") is None
    assert seen.keys(*GET) == [["stuck0"], ["key"]]


async def test_many_keys_that_are_cancelled_leave_no_exception_behind(
    engine: InMemoryEngine, store: Store, hold: Hold, eventually: Eventually
) -> None:
    """An answer that comes when nobody waits must not be "never retrieved"."""
    for method in GET:
        engine.fault(method, hold=hold, code=-900)
    many = start(store.get_many(names(600)))
    await hold(2)
    await cancel([many])
    hold.set()
    await eventually(lambda: store.stats().in_flight == 0)
    await turns()
    gc.collect()


async def test_many_keys_cancelled_when_some_are_answered_leave_nothing_behind(
    store: Store, seen: Seen, hold: Hold, eventually: Eventually
) -> None:
    await fill(store, names(300))
    seen.before = lambda made: hold.wait() if "key299" in made.keys else None
    many = start(store.get_many(names(300)))
    await hold()
    await eventually(lambda: [made for made in seen.of(*GET) if made.answer])
    await cancel([many])
    hold.set()
    await eventually(lambda: store.stats().in_flight == 0)
    assert await store.get_many(names(300)) == [value_of(key) for key in names(300)]


# --- bad neighbours ---------------------------------------------------------------------------


def spoil(seen: Seen, monkeypatch: pytest.MonkeyPatch, bad: dict[str, int]) -> None:
    """Let the engine answer these codes for these keys."""

    def after(made: Made) -> None:
        if isinstance(made.answer, list):
            made.answer[:] = [
                bad.get(key, code) for key, code in zip(made.keys, made.answer, strict=True)
            ]

    monkeypatch.setattr(seen, "after", after)


async def test_a_key_that_fails_does_not_hurt_its_neighbours(
    store: Store, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(store, names(4))
    seen.calls.clear()
    spoil(seen, monkeypatch, {"key1": -800, "key2": -900})
    zero, one, two, three, missing = await asyncio.gather(
        *map(store.get, [*names(4), "missing"]), return_exceptions=True
    )
    assert (zero, three, missing) == (value_of("key0"), value_of("key3"), None)
    assert isinstance(one, TransferError)
    assert isinstance(two, RpcError)
    assert (one.key, two.key) == ("key1", "key2")
    assert store.stats().errors == {"TRANSFER_FAIL": 1, "RPC_FAIL": 1}
    with pytest.raises(BatchError) as caught:
        await store.get_many(names(4))
    assert [type(result) for result in caught.value.results] == [
        bytes,
        TransferError,
        RpcError,
        bytes,
    ]


async def test_a_write_that_fails_does_not_hurt_its_neighbours(
    store: Store, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(seen, monkeypatch, {"key1": -200})
    answers = await asyncio.gather(
        *(store.put(key, b"v") for key in names(3)),
        store.put("empty", b""),
        store.put("text", "text"),
        return_exceptions=True,
    )
    kinds = [type(answer) for answer in answers]
    assert kinds == [
        type(None),
        NoSpaceError,
        type(None),
        InvalidArgumentError,
        InvalidArgumentError,
    ]
    assert seen.keys(*PUT) == [names(3)]  # what is wrong beforehand never leaves


async def test_a_lease_that_runs_out_costs_only_its_own_key_a_second_read(
    store: Store, seen: Seen
) -> None:
    await fill(store, names(4))
    seen.calls.clear()
    late = ["key2"]

    def after(made: Made) -> None:
        if made.method in GET and late:
            made.answer[made.keys.index(late.pop())] = -707

    seen.after = after
    assert await store.get_many(names(4)) == [value_of(key) for key in names(4)]
    assert seen.keys(*GET) == [names(4), ["key2"]]


async def test_each_waiter_gets_an_error_object_of_its_own(
    engine: InMemoryEngine, store: Store
) -> None:
    """Raising an error changes its traceback."""
    for method in GET:
        engine.fault(method, code=-900)
    errors = await asyncio.gather(*(store.get("key") for _ in range(3)), return_exceptions=True)
    assert len({id(error) for error in errors}) == 3
    for error in errors:
        assert isinstance(error, RpcError)
        assert (error.code, error.key, error.rank) == (-900, "key", 43)
        assert str(error) == str(errors[0])


async def test_what_fails_as_a_whole_fails_for_each(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    native: Any = store._client.native_object
    monkeypatch.setattr(native, "batch_get_into", lambda *_: [0])
    errors = await asyncio.gather(*map(store.get, names(3)), return_exceptions=True)
    assert all(isinstance(error, InternalError) for error in errors)
    assert len({id(error) for error in errors}) == 3
    with pytest.raises(InternalError):
        await store.get_many(names(3))


async def test_a_batch_that_fails_holds_its_values_no_longer(
    store: Store, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """Its error and its call referred to each other, and the error's frames to the values."""
    native: Any = store._client.native_object
    monkeypatch.setattr(native, "batch_put_from", lambda *_: [0])
    value = os.urandom(100)
    held = sys.getrefcount(value)
    gc.disable()
    try:
        errors = await asyncio.gather(
            store.put("a", value), store.put("b", value), return_exceptions=True
        )
        assert [type(error) for error in errors] == [InternalError, InternalError]
        del errors
        await eventually(lambda: sys.getrefcount(value) == held)  # the thread lets go too
    finally:
        gc.enable()


# --- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 20 * KB, 100 * KB, 256 * KB, 300 * KB, 1 * MB])
async def test_the_room_for_a_read_follows_what_was_read_lately(
    store: Store, seen: Seen, size: int
) -> None:
    """A first guess that is too small costs a call for nothing, so it is made only once."""
    keys = names(6)
    for key in keys:
        await store.put(key, key.encode() * (size // 4))
    for round_ in range(3):
        seen.calls.clear()
        values = await asyncio.gather(*map(store.get, keys))
        assert values == [key.encode() * (size // 4) for key in keys]
        if round_:
            answers = [answer for made in seen.of("batch_get_into") for answer in made.answer]
            assert sorted(answers) == [size] * 6


async def test_small_values_after_large_ones_travel_in_one_call_again(
    store: Store, seen: Seen
) -> None:
    await store.put_many({key: bytes(300 * KB) for key in names(3, "large")})
    await fill(store, names(256))
    await store.get_many(names(3, "large"))
    for _ in range(12):
        await store.get_many(names(256))
    seen.calls.clear()
    assert await store.get_many(names(256)) == [value_of(key) for key in names(256)]
    assert len(seen.calls) == 1


async def test_a_large_value_does_not_hold_the_small_ones_of_its_batch(
    engine: InMemoryEngine, store: Store, hold: Hold
) -> None:
    large = os.urandom(KB) * 9 * KB
    await store.put("large", large)
    await fill(store, names(5))
    hang(engine, LARGE, hold)
    reading = [start(store.get("large")) for _ in range(3)]
    assert await asyncio.gather(*map(store.get, names(5))) == [value_of(k) for k in names(5)]
    await hold()
    assert await store.get("key1") == value_of("key1")
    assert not any(task.done() for task in reading)
    hold.set()
    for value in await asyncio.gather(*reading):
        assert value == large


async def test_a_large_value_is_read_once_for_all_who_wait_for_it(store: Store, seen: Seen) -> None:
    large = bytes(9 * MB)
    await store.put("large", large)
    seen.calls.clear()
    values = await asyncio.gather(*(store.get("large") for _ in range(5)), store.get("other"))
    assert values == [large] * 5 + [None]
    assert len(seen.of(*LARGE)) == 2  # pieces


async def test_a_value_of_some_megabytes_that_is_alone_is_read_by_its_batch(
    store: Store, seen: Seen
) -> None:
    """A tensor of 1 MB, larger by its header, took two threads and asked for its size twice."""
    value = os.urandom(MB + 304)
    await store.put("value", value)
    await store.get("value")  # a guess, which was too small
    seen.calls.clear()
    assert await store.get("value") == value
    assert [made.method for made in seen.calls] == ["batch_get_replica_desc", "get_into"]
    # Beside others it is read by itself, as before.
    await fill(store, names(2))
    seen.calls.clear()
    assert await asyncio.gather(*map(store.get, ["value", "key0", "key1"])) == [
        value, value_of("key0"), value_of("key1"),
    ]  # fmt: skip
    assert seen.keys("get_into", "get_size") == [["value"], ["value"]]


async def test_the_size_of_values_that_are_alike_is_not_asked_for(store: Store, seen: Seen) -> None:
    sizes = {"a": 1536 * KB, "b": 1536 * KB, "smaller": 300 * KB, "larger": 3 * MB, "large": 9 * MB}
    values = {key: os.urandom(KB) * (size // KB) for key, size in sizes.items()}
    await store.put_many(values)
    for other in ("smaller", "larger", "large", "gone"):
        for key in ("a", "b", "a"):
            assert await store.get(key) == values[key]
        seen.calls.clear()
        assert await store.get("b") == values["b"]
        assert [made.method for made in seen.calls] == ["get_into"]
        assert await store.get(other) == values.get(other)
        assert await store.get("a") == values["a"]
    await store.remove("b", force=True)
    await store.put("b", values["smaller"])
    assert await store.get("b") == values["smaller"]


async def test_a_value_that_is_replaced_between_two_questions_is_read_whole(
    store: Store, seen: Seen
) -> None:
    """Its size was asked for beforehand, and another one is there when it is read."""
    for size in (1200 * KB, 4 * MB, 300 * KB):
        await store.upsert("value", bytes(1536 * KB))
        await store.get("value")
        other = os.urandom(KB) * (size // KB)

        def replace(made: Made, other: bytes = other) -> None:
            if made.method == "batch_get_replica_desc":
                seen.after = _nothing
                store.blocking.upsert("value", other)

        seen.after = replace
        await fill(store, ["value2"])
        await store.get("value2")  # its size is not what is expected next
        assert await store.get("value") == other
        assert seen.after is _nothing


async def test_a_large_read_goes_on_until_the_last_one_leaves(
    engine: InMemoryEngine, store: Store, seen: Seen, hold: Hold, eventually: Eventually
) -> None:
    large = bytes(33 * MB)
    await store.put("large", large)
    hang(engine, LARGE, hold)
    first, second = batch_of_gets(store, ["large", "large"])
    await hold()
    await cancel([first])
    assert store.stats().abandoned == 0
    await cancel([second])
    await turns()
    assert store.stats().abandoned == 1
    hold.set()
    await eventually(lambda: store.stats().in_flight == 0)
    assert len(seen.of(*LARGE)) == 1  # of five pieces


# --- stuck batches ----------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["get", "put", "exists"])
async def test_stuck_batches_do_not_hold_the_keys_that_come_later(
    engine: InMemoryEngine,
    open_store: Any,
    overdue: Callable[[float], None],
    hold: Hold,
    verb: str,
) -> None:
    """With one thread the second one hangs when it is overdue already, and is looked at again."""
    overdue(0.01)
    store = await open_store("memory://batching", engine=engine, threads=1)
    calls: dict[str, Callable[[str], Coroutine[Any, Any, Any]]] = {
        "get": store.get,
        "put": lambda key: store.put(key, b"v"),
        "exists": store.exists,
    }
    ways, _ = ONE[verb]
    hang(engine, ways, hold, times=5)
    stuck = []
    for key in names(5, "stuck"):
        stuck.append(start(calls[verb](key)))
        await hold()
    await asyncio.wait_for(calls[verb]("later"), 5)
    assert not any(task.done() for task in stuck)
    assert (store.stats().in_flight, store.stats().abandoned) == (5, 0)
    hold.set()
    await asyncio.gather(*stuck)


async def test_stuck_reads_of_many_keys_do_not_hold_later_ones(
    engine: InMemoryEngine, open_store: Any, overdue: Callable[[float], None], hold: Hold
) -> None:
    overdue(0.01)
    store = await open_store("memory://batching", engine=engine, threads=1)
    hang(engine, ("batch_get_into",), hold, times=3)
    stuck = []
    for i in range(3):
        stuck.append(start(store.get_many([f"a{i}", f"b{i}"])))
        await hold()
    assert await asyncio.wait_for(store.get("later"), 5) is None
    assert await asyncio.wait_for(store.get_many(["later", "latest"]), 5) == [None, None]
    hold.set()
    assert await asyncio.gather(*stuck) == [[None, None]] * 3


async def test_stuck_writes_that_travel_alone_do_not_hold_later_ones(
    engine: InMemoryEngine, open_store: Any, overdue: Callable[[float], None], hold: Hold
) -> None:
    overdue(0.01)
    store = await open_store("memory://batching", engine=engine, threads=1)
    hang(engine, ("put_from",), hold, times=3)
    stuck = []
    for i in range(3):
        stuck.append(start(store.put(f"stuck{i}", bytearray(100 * KB))))
        await hold()
    await asyncio.wait_for(store.put("later", bytearray(100 * KB)), 5)
    hold.set()
    await asyncio.gather(*stuck)


class Peers:
    """A store with 40 values in its own memory, and a peer with one value that may be frozen."""

    own = names(40, "own")

    def __init__(self, store: Store, peer: Store, seen: Seen, hold: Hold) -> None:
        self.store = store
        self.peer = peer
        self.seen = seen
        self._hold = hold
        self.code: int | None = None
        seen.before = self._before
        seen.after = self._after

    def _stuck(self, made: Made) -> bool:
        return made.method in GET and "theirs" in made.keys

    def _before(self, made: Made) -> None:
        if self._stuck(made):
            self._hold.wait()

    def _after(self, made: Made) -> None:
        if self._stuck(made) and self.code is not None:
            if made.method == "get_into":
                made.answer = self.code
            else:  # the leases of the others run out meanwhile
                made.answer = [self.code if key == "theirs" else -707 for key in made.keys]

    def read(self, *more: str) -> tuple[asyncio.Task[Any], list[asyncio.Task[Any]]]:
        """Read all of them in one turn of the loop: the frozen one, and the others."""
        theirs, *others = batch_of_gets(self.store, ["theirs", *self.own, *more])
        return theirs, others


@pytest.fixture
async def peer(engine: InMemoryEngine, open_store: Any) -> Store:
    opened: Store = await open_store("memory://batching", engine=engine)
    return opened


@pytest.fixture
async def peers(
    store: Store, peer: Store, seen: Seen, hold: Hold, overdue: Callable[[float], None]
) -> Peers:
    overdue(0.01)
    for holder, keys in ((store, Peers.own), (peer, ["theirs"])):
        config = ReplicateConfig(preferred_segments=(holder.hostname,))
        await store.put_many({key: value_of(key) for key in keys}, config=config)
    seen.calls.clear()
    return Peers(store, peer, seen, hold)


async def test_keys_of_healthy_owners_do_not_wait_for_a_stuck_one(peers: Peers, hold: Hold) -> None:
    theirs, others = peers.read("missing")
    values = await asyncio.wait_for(asyncio.gather(*others), 5)
    assert values == [*map(value_of, peers.own), None]
    assert not theirs.done()
    hold.set()
    assert await theirs == value_of("theirs")


async def test_a_key_of_a_stuck_owner_fails_when_its_batch_does(peers: Peers, hold: Hold) -> None:
    peers.code = -800
    theirs, others = peers.read()
    await asyncio.wait_for(asyncio.gather(*others), 5)
    hold.set()
    with pytest.raises(TransferError) as caught:
        await theirs
    assert caught.value.key == "theirs"


async def test_of_many_keys_only_the_one_on_a_stuck_owner_fails(peers: Peers, hold: Hold) -> None:
    """They are answered together, so they wait for it; the others are right all the same."""
    peers.code = -800
    many = start(peers.store.get_many([*peers.own, "theirs"], return_exceptions=True))
    await hold()
    assert await asyncio.wait_for(peers.store.get("own7"), 5) == value_of("own7")
    hold.set()
    *values, error = await many
    assert values == [*map(value_of, peers.own)]
    assert isinstance(error, TransferError)


async def test_what_is_asked_meanwhile_is_answered(peers: Peers, hold: Hold) -> None:
    theirs, others = peers.read()
    await hold()
    for key in peers.own:
        assert await asyncio.wait_for(peers.store.get(key), 5) == value_of(key)
    await peers.store.put("new", b"new")
    assert await peers.store.get_many(["new", "own1"]) == [b"new", value_of("own1")]
    hold.set()
    await asyncio.gather(theirs, *others)


async def test_an_owner_that_was_stuck_a_moment_ago_is_not_tried_twice_again(
    peers: Peers, hold: Hold, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try of it takes a thread, and burns a core in the real engine."""
    monkeypatch.setattr("aiomooncake.hedging.StuckPeers._FOR", 600.0)
    reading = [peers.read()]
    await asyncio.wait_for(asyncio.gather(*reading[0][1]), 5)
    await hold(2)
    batching = peers.store._batching
    assert batching is not None
    await eventually(lambda: batching.gets.stuck_peers._until)
    for _ in range(3):
        reading.append(peers.read())
        await asyncio.wait_for(asyncio.gather(*reading[-1][1]), 5)
    # The second try of the first round only.
    assert [made.keys for made in peers.seen.of(*GET)].count(["theirs"]) == 1
    hold.set()
    assert await asyncio.gather(*(theirs for theirs, _ in reading)) == [value_of("theirs")] * 4
    # It has answered, the second try too.
    await eventually(lambda: not batching.gets.stuck_peers._until)


async def test_a_batch_whose_keys_were_all_read_another_way_is_given_up(
    engine: InMemoryEngine, peers: Peers, hold: Hold, eventually: Eventually
) -> None:
    peers.seen.before = _nothing
    engine.fault("batch_get_into", hold=hold, times=1)
    theirs, others = peers.read()
    values = await asyncio.wait_for(asyncio.gather(theirs, *others), 5)
    assert values == [*map(value_of, ["theirs", *peers.own])]
    stats = peers.store.stats()
    assert (stats.in_flight, stats.abandoned) == (1, 1)
    hold.set()
    await eventually(lambda: peers.store.stats().in_flight == 0)
    assert peers.store.stats().abandoned == 0


async def test_a_batch_is_given_up_when_the_one_on_a_stuck_owner_leaves(
    peers: Peers, hold: Hold, eventually: Eventually
) -> None:
    """The 40 that were answered another way counted as waiting still."""
    theirs, others = peers.read()
    await asyncio.wait_for(asyncio.gather(*others), 5)
    await cancel([theirs])
    assert peers.store.stats().abandoned == 1
    hold.set()
    await eventually(lambda: peers.store.stats().in_flight == 0)


async def test_a_batch_is_hedged_once_however_long_it_takes(
    peers: Peers, hold: Hold, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that can't be set aside, because too many are, is found late again and again."""
    late: list[object] = []

    def refused(lane: object, call: object) -> bool:
        late.append(call)
        return False

    monkeypatch.setattr(peers.store._client, "set_aside", refused)
    theirs, others = peers.read()
    await eventually(lambda: len(late) > 4)
    assert await asyncio.gather(*others) == [*map(value_of, peers.own)]
    assert len(peers.seen.of(*OWNERS)) == 1
    hold.set()
    await theirs


async def test_without_an_answer_about_owners_the_batch_itself_counts(
    engine: InMemoryEngine, peers: Peers, hold: Hold, eventually: Eventually
) -> None:
    engine.fault("batch_get_replica_desc", code=-901)
    theirs, others = peers.read()
    await eventually(lambda: peers.seen.of(*OWNERS))
    await turns()
    assert not any(task.done() for task in others)
    hold.set()
    assert await asyncio.gather(theirs, *others) == [*map(value_of, ["theirs", *peers.own])]


async def test_a_key_that_waits_alone_is_not_hedged(
    peers: Peers, hold: Hold, eventually: Eventually
) -> None:
    theirs = start(peers.store.get("theirs"))
    await hold()
    await eventually(lambda: peers.store._client.small.aside == 1)
    assert await peers.store.get("own1") == value_of("own1")
    hold.set()
    await theirs
    assert not peers.seen.of(*OWNERS)


async def test_a_large_value_beside_a_stuck_owner_is_read_once(
    peers: Peers, hold: Hold, eventually: Eventually
) -> None:
    """The second try and the batch both answer that it is large."""
    large = bytes(9 * MB)
    store = peers.store
    await store.put("large", large, config=ReplicateConfig(preferred_segments=(store.hostname,)))
    peers.seen.calls.clear()
    theirs, others = peers.read("large")
    values = await asyncio.wait_for(asyncio.gather(*others), 5)
    assert values == [*map(value_of, peers.own), large]
    hold.set()
    await theirs
    await eventually(lambda: store.stats().in_flight == 0)
    assert len(peers.seen.of(*LARGE)) == 2  # pieces


# --- ends -------------------------------------------------------------------------------------


async def test_a_store_that_closes_refuses_the_items_that_wait(
    engine: InMemoryEngine, store: Store, seen: Seen, hold: Hold, overdue: Callable[[float], None]
) -> None:
    """At the latest when the batches in front of them are overdue."""
    await fill(store, names(2, "stuck"))
    overdue(0.01)
    stuck = await occupy(engine, store, hold)
    waiting = batch_of_gets(store, names(5))
    await turns()
    closing = start(store.aclose())
    for task in waiting:
        with pytest.raises(StoreClosedError):
            await asyncio.wait_for(task, 5)
    assert not closing.done()
    hold.set()
    assert await asyncio.gather(*stuck) == [value_of("stuck0"), value_of("stuck1")]
    await closing
    assert len(seen.of(*GET)) == 2


async def test_a_store_that_closes_drops_batches_without_a_thread(
    engine: InMemoryEngine, open_store: Any, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    store = await open_store("memory://batching", engine=engine, threads=1)
    seen = Seen(store, monkeypatch)
    (stuck,) = await occupy(engine, store, hold, 1)
    waiting = batch_of_gets(store, names(5))
    await turns()
    closing = start(store.aclose())
    for task in waiting:
        with pytest.raises(StoreClosedError):
            await task
    hold.set()
    await asyncio.gather(stuck, closing)
    assert seen.keys(*GET) == [["stuck0"]]


@pytest.mark.parametrize("how", ["cancelled", "deserted"])
async def test_the_next_loop_takes_over_what_a_closed_one_has_left(
    engine: InMemoryEngine,
    hold: Hold,
    eventually: Eventually,
    loop_errors: list[str],
    how: str,
) -> None:
    """Batches under way and items that wait, in a loop that is closed, hold nothing up."""
    left: list[asyncio.Task[Any]] = []

    async def leave() -> Store:
        opened = await connect("memory://batching", engine=engine)
        await fill(opened, names(3))
        hang(engine, GET, hold, times=2)
        hang(engine, PUT, hold, times=1)
        left.append(start(opened.put("new", b"new")))
        for key in names(2):
            left.append(start(opened.get(key)))
            await turns()
        await hold(3)
        left.extend([start(opened.get("key2")), start(opened.put("new", b"newer"))])
        await turns()
        return opened

    def in_a_loop_of_its_own() -> Store:
        if how == "cancelled":
            return asyncio.run(leave())
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(leave())
        finally:
            loop.close()

    store = await asyncio.to_thread(in_a_loop_of_its_own)
    assert store.stats().in_flight == 3
    for key in names(3):
        assert await store.get(key) == value_of(key)
    hold.set()
    await eventually(lambda: store.stats().in_flight == 0)
    await store.put("newest", b"newest")
    assert await store.get_many(["new", "newest"]) == [b"new", b"newest"]
    await store.aclose()
    assert all(task.cancelled() for task in left) == (how == "cancelled")
    left.clear()
    gc.collect()
    if how == "deserted":  # asyncio says so of every task
        loop_errors.clear()


async def test_lanes_of_options_do_not_pile_up(store: Store) -> None:
    for i in range(50):
        config = ReplicateConfig(preferred_segments=(f"segment{i}",))
        await store.put(f"{i}", b"v", config=config)
    assert store._batching is not None
    assert len(store._batching._writes) <= 2


async def test_threads_stay_within_the_lanes(store: Store) -> None:
    keys = names(2000)
    await asyncio.gather(*(store.put(key, value_of(key)) for key in keys))
    for _ in range(3):
        assert await asyncio.gather(*map(store.get, keys)) == [*map(value_of, keys)]
    small = [t for t in threading.enumerate() if t.name.startswith("aiomooncake-TP43-small")]
    assert len(small) <= 4


@pytest.mark.parametrize("nbytes", [8, 9 << 20])
async def test_a_write_whose_segment_went_is_no_miss(
    engine: InMemoryEngine, store: Store, nbytes: int
) -> None:
    """A put onto a frozen peer answered -704 when that peer's segment expired meanwhile."""
    for method in ("put_from", "batch_put_from", "batch_put_session_end"):
        engine.fault(method, code=-704)
    with pytest.raises(TransferError, match="was being stored in went meanwhile") as caught:
        await store.put("key", bytes(nbytes))
    assert caught.value.retryable
