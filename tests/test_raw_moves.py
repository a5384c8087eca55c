"""Calls by hand beside peers that do not answer; on the in-memory engine.

The same on the real one, with a peer that is frozen: :mod:`tests.adversity.test_avoided_peer`.
"""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiomooncake import ReplicateConfig, Store
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.raw_moves import RawMoves

if TYPE_CHECKING:
    from tests.conftest import Hold

    Eventually = Callable[[Callable[[], object]], Awaitable[None]]
    Late = Callable[..., Awaitable[None]]

NO_TEXT = b"\xff\xfe"
ALL = "all"


class Peers:
    """Stands for the watch of the peers, and notes at whom it is asked to knock."""

    wants_news = True
    asking = False
    elsewhere = ()

    def __init__(self) -> None:
        self.stuck: dict[str, float] = {}
        self.suspects: set[str] = set()
        self.stopped = threading.Event()

    def suspect(self, endpoints: Iterable[str]) -> None:
        self.suspects.update(endpoints)

    def suspect_all(self) -> None:
        self.suspects.add(ALL)

    def stop(self) -> None:
        self.stopped.set()


@pytest.fixture
def engine() -> InMemoryEngine:
    return InMemoryEngine("raw")


@pytest.fixture
async def theirs(engine: InMemoryEngine, open_store: Any) -> str:
    """The end point of another client, which holds the key "theirs"."""
    peer: Store = await open_store("memory://raw", engine=engine)
    place = ReplicateConfig(preferred_segments=(peer.hostname,))
    await peer.put_many({"theirs": b"their value"}, config=place)
    (copy,) = await peer.replicas("theirs")
    assert copy.endpoint is not None
    return copy.endpoint


@pytest.fixture
async def store(
    engine: InMemoryEngine, open_store: Any, theirs: str, monkeypatch: pytest.MonkeyPatch
) -> Store:
    opened: Store = await open_store("memory://raw", engine=engine)
    place = ReplicateConfig(preferred_segments=(opened.hostname,))
    await opened.put_many({"own0": b"value0", "own1": b"value1"}, config=place)
    native: Any = opened._client.native_object
    asked = native.batch_get_replica_desc

    def batch_get_replica_desc(keys: Any) -> Any:
        for key in keys:  # as the binding does: it answers a dict, whose keys are str
            if isinstance(key, bytes):
                key.decode()
        return asked(keys)

    monkeypatch.setattr(native, "batch_get_replica_desc", batch_get_replica_desc)
    monkeypatch.setattr("aiomooncake.raw_moves.OVERDUE", 0.005)
    return opened


@pytest.fixture
def peers(store: Store) -> Peers:
    watch = Peers()
    store._client.peers = watch  # type: ignore[assignment]
    return watch


# --- calls that take long -----------------------------------------------------------------------


@pytest.fixture
async def late(engine: InMemoryEngine, store: Store, hold: Hold) -> AsyncIterator[Late]:
    """Make calls on threads that are held in the engine until the test is over."""
    calls: list[asyncio.Future[Any]] = []

    async def make(method: str, *args: Any) -> None:
        engine.fault(method, hold=hold, times=1)
        call = asyncio.to_thread(getattr(store.blocking, method), *args)
        calls.append(asyncio.ensure_future(call))
        await hold()

    yield make
    hold.set()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize(
    "call",
    [
        ("get", "theirs"),
        ("get", b"theirs"),
        ("get_batch", ("theirs", b"own0")),
        ("get_batch", np.array(["theirs"])),
        ("get_batch", collections.deque(["theirs"])),
        ("get_into_ranges", [0], [["theirs"]], [[[0]]], [[[0]]], [[[1]]]),
    ],
)
async def test_the_owner_of_what_is_read_late_is_knocked_at(
    late: Late, peers: Peers, theirs: str, eventually: Eventually, call: tuple[Any, ...]
) -> None:
    """Only str keys in a list or tuple that came first were looked up."""
    await late(*call)
    await eventually(lambda: theirs in peers.suspects)
    assert ALL not in peers.suspects


@pytest.mark.parametrize(
    "call",
    [
        ("get", "nothing"),
        ("get", NO_TEXT),
        ("get_batch", [NO_TEXT, "own0"]),
        ("get_batch", ["own0", "nothing"]),
        ("get_batch", 5),
        ("get_tensor_with_tp", "theirs_in_parts", 0, 2),
        ("put", "new", b"value"),
    ],
)
async def test_all_are_knocked_at_where_nobody_tells_whose_a_late_call_is(
    late: Late, peers: Peers, eventually: Eventually, call: tuple[Any, ...]
) -> None:
    """Nobody was, for a read whose keys could not be told, or are those of its parts."""
    await late(*call)
    await eventually(lambda: ALL in peers.suspects)


@pytest.mark.parametrize(
    "odd",
    [("get", NO_TEXT), ("get_batch", [5]), ("get_into_ranges", [["own0"]]), ("get", "\ud800")],
)
async def test_an_odd_late_call_does_not_hide_the_others(
    late: Late, peers: Peers, theirs: str, eventually: Eventually, odd: tuple[Any, ...]
) -> None:
    """All keys were looked up in one set: one that is none failed it, or ended the watch."""
    await late(*odd)
    await late("batch_get_buffer", ["theirs"])
    await eventually(lambda: {theirs, ALL} <= peers.suspects)


async def test_a_watch_that_failed_is_begun_again(store: Store, peers: Peers) -> None:
    """It was taken for one that goes on, for ever."""

    class Failing(Peers):
        @property
        def stopped(self) -> Any:
            raise MemoryError

        @stopped.setter
        def stopped(self, _: object) -> None: ...

    moves = RawMoves(store._client)
    moves._watching = True
    with pytest.raises(MemoryError):
        moves._watch(Failing())  # type: ignore[arg-type]
    assert not moves._watching


# --- the way around -----------------------------------------------------------------------------

KEYS = ["own0", "theirs", "own1", "nothing"]
AROUND: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], Any]] = {
    "get": ("get", ("theirs",), {}, b""),
    "bytes": ("get", (b"theirs",), {}, b""),
    "buffer": ("get_buffer", (b"theirs",), {}, None),
    "into": ("get_into", ("theirs",), {"buffer_ptr": 0, "size": np.int64(9)}, -800),
    "batch": ("get_batch", (KEYS,), {}, [b"value0", b"", b"value1", b""]),
    "batch of bytes": ("get_batch", ([b"own0", b"theirs"],), {}, [b"value0", b""]),
    "batch of an array": ("get_batch", (np.array(KEYS[:2]),), {}, [b"value0", b""]),
    "batch of a deque": ("get_batch", (collections.deque(KEYS[:2]),), {}, [b"value0", b""]),
    "batch into": (
        "batch_get_into",
        (("theirs", "nothing"), np.array([0, 0]), range(2)),
        {},
        [-800, -704],
    ),
    "batch into by name": (
        "batch_get_into",
        (),
        {"sizes": [9], "buffer_ptrs": [0], "keys": ["theirs"]},
        [-800],
    ),
    "parts": (
        "batch_get_into_multi_buffers",
        (["theirs"], [[0, 9]], [(9, 9)], True),
        {},
        [-800],
    ),
}


@pytest.mark.parametrize("case", AROUND)
async def test_a_read_goes_around_a_peer_that_is_stuck(
    store: Store, peers: Peers, theirs: str, case: str
) -> None:
    method, args, kwargs, answer = AROUND[case]
    peers.stuck[theirs] = 0.0
    call = getattr(store.blocking, method)
    assert await asyncio.to_thread(call, *args, **kwargs) == answer


FOUR = [1, 2, 3, 4]
REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "a name for what has none": ("get", (), {"key": "theirs"}),
    "a name for keys that have none": ("get_batch", (), {"keys": KEYS}),
    "one more": ("get", ("theirs", 1), {}),
    "one less": ("get_into", ("theirs", 1), {}),
    "an unknown name": ("get_into", ("theirs", 1, 9), {"foo": 1}),
    "no address": ("get_into", ("theirs", "x", 9), {}),
    "a negative size": ("get_into", ("theirs", 1, -1), {}),
    "a size that is too large": ("get_into", ("theirs", 1, 1 << 64), {}),
    "no key among keys": ("get_batch", (["theirs", 5],), {}),
    "a key that is no text": ("get_batch", (["theirs", NO_TEXT],), {}),
    "half a character": ("get_batch", (["theirs", "\ud800"],), {}),
    "keys that are a dict": ("get_batch", (dict.fromkeys(KEYS),), {}),
    "keys that are a set": ("get_batch", (set(KEYS),), {}),
    "keys that are a text": ("get_batch", ("theirs",), {}),
    "no address at the peer's place": ("batch_get_into", (KEYS, [1, 1.5, 3, 4], FOUR), {}),
    "a negative size there": ("batch_get_into", (KEYS, FOUR, [1, -1, 3, 4]), {}),
    "addresses that are a dict": ("batch_get_into", (KEYS, dict.fromkeys(FOUR), FOUR), {}),
    "an address for all": ("batch_get_into", (KEYS, 5, FOUR), {}),
    "too few addresses": ("batch_get_into", (KEYS, FOUR[:3], FOUR), {}),
    "sizes that are no list": ("batch_get_into_multi_buffers", (["theirs"], [[1]], [1]), {}),
    "a size in parts that is none": (
        "batch_get_into_multi_buffers",
        (["theirs"],),
        {"all_buffer_ptrs": [[1]], "all_sizes": ["x"]},
    ),
    "no option": ("batch_get_into_multi_buffers", (["theirs"], [[1]], [[1]], "x"), {}),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_wrong_with_a_call_is_told_by_the_binding_beside_a_stuck_peer_too(
    store: Store, peers: Peers, theirs: str, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """It was answered as if the transfer had failed, or with errors of our own."""
    method, args, kwargs = REFUSED[case]
    calls: list[Any] = []

    def binding(*given: Any, **named: Any) -> str:
        calls.append((given, named))
        return "the binding's answer"

    monkeypatch.setattr(store._client.native_object, method, binding)
    peers.stuck[theirs] = 0.0
    call = getattr(store.blocking, method)
    assert await asyncio.to_thread(call, *args, **kwargs) == "the binding's answer"
    assert calls == [(args, kwargs)]


async def test_a_generator_of_keys_reaches_the_binding_unread(
    store: Store, peers: Peers, theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store._client.native_object, "get_batch", list)
    peers.stuck[theirs] = 0.0
    get_batch: Any = store.blocking.get_batch
    assert await asyncio.to_thread(get_batch, (key for key in KEYS)) == KEYS


async def test_a_key_that_is_no_text_is_read_beside_a_stuck_peer(
    store: Store, peers: Peers, theirs: str
) -> None:
    """Looking for its owner raised UnicodeDecodeError."""
    await asyncio.to_thread(store.blocking.put, NO_TEXT, b"odd")  # type: ignore[arg-type]
    peers.stuck[theirs] = 0.0
    assert await asyncio.to_thread(store.blocking.get, NO_TEXT) == b"odd"  # type: ignore[arg-type]
