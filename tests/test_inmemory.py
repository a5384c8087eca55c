from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from aiomooncake.engine.binding import (
    NativeBufferHandle,
    NativeStore,
    find_address_methods,
    find_methods,
)
from aiomooncake.engine.inmemory import Fault, InMemoryEngine, InMemoryStore

MB = 1 << 20


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(clock: Clock) -> InMemoryEngine:
    return InMemoryEngine("test", lease_ttl=5.0, rpc_timeout=20.0, clock=clock)


Join = Callable[..., InMemoryStore]


@pytest.fixture
def join(engine: InMemoryEngine) -> Join:
    def open_store(
        hostname: str = "127.0.0.1", segment: int = 4 * MB, local_buffer: int = MB
    ) -> InMemoryStore:
        store = InMemoryStore(engine)
        code = store.setup(hostname, "P2PHANDSHAKE", segment, local_buffer, "tcp", "", "master:1")
        assert code == 0
        return store

    return open_store


@pytest.fixture
def store(join: Join) -> InMemoryStore:
    return join()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def _until_hit(fault: Fault, hits: int = 1) -> None:
    while fault.hits < hits:
        time.sleep(0)  # lets the other thread run


# --- engines and clients ----------------------------------------------------------------------


def test_it_follows_the_protocol(engine: InMemoryEngine) -> None:
    native: NativeStore = InMemoryStore(engine)
    assert find_methods(NativeStore) <= find_methods(type(native))


def test_its_methods_can_be_told_apart() -> None:
    assert "get_into" in find_address_methods(InMemoryStore)
    assert "put" in find_methods(InMemoryStore) - find_address_methods(InMemoryStore)


def test_engines_are_shared_by_name() -> None:
    first = InMemoryEngine.named("shared")
    assert InMemoryEngine.named("shared") is first
    assert InMemoryEngine.named("other") is not first
    InMemoryEngine.reset("shared")
    InMemoryEngine.reset("other")
    assert InMemoryEngine.named("shared") is not first
    InMemoryEngine.reset("shared")
    InMemoryEngine.reset("never there")


def test_clients_of_an_engine_see_the_same_keys(join: Join) -> None:
    writer, reader = join(), join(segment=0)
    assert writer.put("key", b"value") == 0
    assert reader.get("key") == b"value"
    assert writer.get_hostname() != reader.get_hostname()


def test_a_hostname_with_a_port_is_kept(join: Join) -> None:
    assert join("10.0.0.1:17777").get_hostname() == "10.0.0.1:17777"
    assert join("[fe80::1]:17777").get_hostname() == "[fe80::1]:17777"


def test_a_dummy_client_joins_without_a_segment(engine: InMemoryEngine, store: Any) -> None:
    dummy = InMemoryStore(engine)
    assert dummy.setup_dummy(MB, MB, "127.0.0.1:50052") == 0
    assert dummy.put("key", b"value") == 0
    assert store.get("key") == b"value"


def test_what_would_crash_raises(engine: InMemoryEngine, store: InMemoryStore) -> None:
    with pytest.raises(RuntimeError, match=r"is_exist\(\) before setup would crash"):
        InMemoryStore(engine).is_exist("key")
    assert store.close() == 0
    with pytest.raises(RuntimeError, match=r"put\(\) after close would crash"):
        store.put("key", b"value")
    assert store.get("key") == b""
    assert store.close() == 0
    assert store.health_check() == 1


def test_one_object_has_one_life(store: InMemoryStore) -> None:
    """The real one answers 0 and is then never torn down."""
    with pytest.raises(RuntimeError, match="make a new one"):
        store.setup("127.0.0.1", "P2PHANDSHAKE", MB, MB, "tcp", "", "master:1")
    store.close()
    with pytest.raises(RuntimeError, match="make a new one"):
        store.setup("127.0.0.1", "P2PHANDSHAKE", MB, MB, "tcp", "", "master:1")


def test_the_values_of_a_closed_client_are_gone(join: Join) -> None:
    first, second = join(), join(segment=0)
    second.put("key", b"value")
    first.close()
    assert second.is_exist("key") == 0
    assert second.put("key", b"value") == -200


def test_without_a_segment_nothing_is_ready_until_the_first_mount(join: Join) -> None:
    store = join(segment=0)
    assert store.put("key", b"value") == -200
    assert store.put_batch(["key"], [b"value"]) == -200
    assert store.upsert("key", b"value") == -200
    assert store.allocate_and_mount_segment(1)["ret"] == 0
    assert store.put("key", b"value") == 0


def test_segments_fill_up_and_are_emptied(store: InMemoryStore) -> None:
    names = [str(number) for number in range(5)]
    assert [store.put(name, bytes(MB)) for name in names] == [0, 0, 0, 0, -200]
    store.remove(names[0])
    assert store.put(names[4], bytes(MB)) == 0
    assert store.batch_is_exist(names) == [0, 1, 1, 1, 1]


def test_copies_lie_on_different_segments(join: Join, engine: InMemoryEngine) -> None:
    @dataclass
    class Options:
        replica_num: int = 2

    first, second = join(), join()
    assert first.put("key", b"value", Options()) == 0
    assert len(second.get_replica_desc("key")) == 2
    first.close()
    assert second.get("key") == b"value"


def test_leases_follow_the_clock(store: InMemoryStore, clock: Clock) -> None:
    store.put("key", b"value")
    assert store.get("key") == b"value"
    clock.now = 4.9
    assert store.remove("key") == -706
    clock.now = 5.0
    assert store.remove("key") == 0


def test_an_expired_session_reads_nothing(store: InMemoryStore, clock: Clock) -> None:
    store.put("key", b"value")
    memory = (ctypes.c_char * 8)()
    at = ctypes.addressof(memory)
    store.batch_get_session_start(["key"])
    clock.now = 5.0
    assert store.batch_get_into_multi_buffer_ranges(["key"], [[at]], [[5]], [[0]]) == [-707]
    assert memory.raw == bytes(8)


def test_the_stale_bytes_of_a_key_given_twice_are_zeros(store: InMemoryStore) -> None:
    store.put("key", b"value")
    assert store.get_batch(["key", "key"]) == [bytes(5), b"value"]


# --- handles ----------------------------------------------------------------------------------


def test_a_handle_holds_its_room_until_it_is_dropped(store: InMemoryStore) -> None:
    store.put("key", bytes(MB))
    handle = store.get_buffer("key")
    assert isinstance(handle, NativeBufferHandle)
    assert store.put("other", b"v") == -600
    del handle
    assert store.put("other", b"v") == 0


def test_a_handle_in_a_cycle_gives_its_room_back(store: InMemoryStore) -> None:
    store.put("key", bytes(MB))
    holder: list[Any] = [store.get_buffer("key")]
    holder.append(holder)
    del holder
    gc.collect()
    assert store.put("other", b"v") == 0


def test_a_handle_outlives_its_store(store: InMemoryStore) -> None:
    store.put("key", b"value")
    handle = store.get_buffer("key")
    assert handle is not None
    store.close()
    assert ctypes.string_at(handle.ptr(), handle.size()) == b"value"


# --- faults -----------------------------------------------------------------------------------


def test_a_method_is_not_ready_for_the_first_calls(
    engine: InMemoryEngine, store: InMemoryStore
) -> None:
    fault = engine.fault("put", code=-200, times=2)
    assert [store.put("key", b"value") for _ in range(4)] == [-200, -200, 0, 0]
    assert fault.hits == 2


def test_a_method_is_not_ready_until_told(engine: InMemoryEngine, store: InMemoryStore) -> None:
    fault = engine.fault("put", code=-200)
    assert store.put("key", b"value") == -200
    assert store.put_batch(["other"], [b"value"]) == 0
    fault.remove()
    fault.remove()
    assert store.put("key", b"value") == 0


@pytest.mark.parametrize(
    ("method", "arguments", "answer"),
    [
        ("put_batch", (["a", "b"], [b"1", b"2"]), -800),
        ("batch_put_from", (["a", "b"], [1, 1], [1, 1]), [-800, -800]),
        ("batch_get_into", (["a", "b"], [1, 1], [1, 1]), [-800, -800]),
        ("get", ("a",), b""),
        ("get_batch", (["a", "b"],), [b"", b""]),
        ("get_buffer", ("a",), None),
        ("batch_get_buffer", (["a", "b"],), [None, None]),
        ("get_into_ranges", ([1], [["a"]], [[[0, 1]]], [[[0, 1]]], [[[1, 1]]]), [[[-800, -800]]]),
        ("get_replica_desc", ("a",), []),
        ("batch_get_replica_desc", (["a"],), {}),
        ("is_exist", ("a",), -800),
        ("batch_get_session_end", (["a"],), -800),
        ("unmount_and_free_segment", (["a"],), -1),
        ("mount_segment", ("a", 1), {"ret": -1, "segment_ids": []}),
        ("get_hostname", (), ""),
        ("health_check", (), -800),
    ],
)
def test_a_fault_fails_in_the_shape_of_the_method(
    engine: InMemoryEngine,
    store: InMemoryStore,
    method: str,
    arguments: tuple[Any, ...],
    answer: object,
) -> None:
    engine.fault(method, code=-800)
    assert getattr(store, method)(*arguments) == answer


def test_a_fault_can_mean_one_client(engine: InMemoryEngine, join: Join) -> None:
    first, second = join("first"), join("second:12345")
    by_name = engine.fault("put", code=-200, hostname="first")
    by_port = engine.fault("is_exist", code=-900, hostname="second:12345")
    assert (first.put("key", b"v"), second.put("key", b"v")) == (-200, 0)
    assert (first.is_exist("key"), second.is_exist("key")) == (1, -900)
    assert (by_name.hits, by_port.hits) == (1, 1)


def test_a_held_call_blocks_its_thread_until_the_event(
    engine: InMemoryEngine, store: InMemoryStore, threads: ThreadPoolExecutor
) -> None:
    told = threading.Event()
    fault = engine.fault("put", hold=told)
    call = threads.submit(store.put, "key", b"value")
    _until_hit(fault)
    assert not call.done()
    assert store.is_exist("key") == 0
    told.set()
    assert call.result(5) == 0
    assert store.is_exist("key") == 1


def test_a_delayed_call_takes_longer(engine: InMemoryEngine, store: InMemoryStore) -> None:
    engine.fault("put", delay=0.001, code=-800, times=1)
    assert store.put("key", b"value") == -800


def test_a_setup_can_fail_and_be_tried_again(engine: InMemoryEngine) -> None:
    engine.fault("setup", code=-1, times=1)
    store = InMemoryStore(engine)
    arguments = ("127.0.0.1", "P2PHANDSHAKE", MB, MB, "tcp", "", "master:1")
    assert store.setup(*arguments) == -1
    assert store.put("key", b"value") == -600
    assert store.setup(*arguments) == 0
    assert store.put("key", b"value") == 0


def test_closing_under_a_call_is_the_crash_that_it_is(
    engine: InMemoryEngine, store: InMemoryStore, threads: ThreadPoolExecutor
) -> None:
    """The real engine's close() with calls in flight is a segmentation fault."""
    told = threading.Event()
    fault = engine.fault("get", hold=told)
    call = threads.submit(store.get, "key")
    _until_hit(fault)
    with pytest.raises(RuntimeError, match=r"close\(\) while get is in the engine would crash"):
        store.close()
    told.set()
    assert call.result(5) == b""
    assert store.close() == 0


# --- the master -------------------------------------------------------------------------------


def test_a_master_that_is_down(engine: InMemoryEngine, store: InMemoryStore) -> None:
    store.put("key", b"value")
    engine.down()
    assert store.put("other", b"value") == -900
    assert store.batch_is_exist(["key", "other"]) == [-900, -900]
    assert store.get("key") == b""
    assert store.health_check() == 2
    assert store.get_hostname()
    assert InMemoryStore(engine).setup("h", "P2PHANDSHAKE", MB, MB, "tcp", "", "master:1") == -1
    engine.up()
    assert store.get("key") == b"value"
    assert store.health_check() == 0


def test_a_frozen_master_times_out(engine: InMemoryEngine, store: InMemoryStore) -> None:
    engine.rpc_timeout = 0.001
    engine.freeze()
    assert store.put("key", b"value") == -901
    assert store.get_batch(["key", "other"]) == [b"", b""]
    assert store.health_check() == 2
    assert InMemoryStore(engine).setup("h", "P2PHANDSHAKE", MB, MB, "tcp", "", "master:1") == -1
    assert store.close() == 0


def test_a_thawed_master_answers_the_calls_that_waited(
    engine: InMemoryEngine, store: InMemoryStore, threads: ThreadPoolExecutor
) -> None:
    engine.freeze()
    calls = [threads.submit(store.put, str(number), b"value") for number in range(3)]
    while len(store._blocked) < 3:
        time.sleep(0)  # lets the other threads run
    assert not any(call.done() for call in calls)
    engine.thaw()
    assert [call.result(5) for call in calls] == [0, 0, 0]


def test_memory_moves_without_the_master(engine: InMemoryEngine, store: InMemoryStore) -> None:
    """Sessions need it at their start and end only; the bytes go from peer to peer."""
    memory = ctypes.create_string_buffer(b"ABCDEFGH", 8)
    at = ctypes.addressof(memory)
    store.put("key", b"value")
    store.batch_get_session_start(["key"])
    store.batch_put_session_start(["new"], [8])
    engine.down()
    assert store.batch_put_from_multi_buffer_ranges(["new"], [[at]], [[8]], [[0]]) == [8]
    assert store.batch_get_into_multi_buffer_ranges(["key"], [[at]], [[5]], [[0]]) == [5]
    assert store.batch_put_session_end(["new"]) == [-900]
    assert store.batch_get_session_end(["key"]) == 0
    assert memory.raw == b"valueFGH"


def test_many_threads_lose_nothing(join: Join, threads: ThreadPoolExecutor) -> None:
    stores = [join(local_buffer=MB) for _ in range(4)]

    def work(number: int) -> int:
        store = stores[number]
        for step in range(200):
            key = f"{number}-{step}"
            assert store.put(key, key.encode()) == 0
            handle = store.get_buffer(key)
            assert handle is not None
            assert store.put("shared", b"value") == 0
            assert store.remove(key, True) == 0
        return store.remove_by_regex("nothing")

    assert list(threads.map(work, range(4))) == [0] * 4
    assert stores[0].remove_all(True) == 1
    assert stores[0].put("whole", bytes(MB)) == 0


def test_names_never_show_values(engine: InMemoryEngine, store: InMemoryStore) -> None:
    store.put("secret-key", b"secret")
    fault = engine.fault("put", hold=threading.Event(), times=1)
    shown = repr(engine) + repr(store) + repr(fault) + repr(store.get_buffer("secret-key"))
    assert "secret" not in shown
    assert "up, 1 objects" in repr(engine)
