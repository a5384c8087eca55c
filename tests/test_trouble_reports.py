"""Trouble that users of Mooncake Store reported in public, staged again for a user of aiomooncake.

Each test names a report, and what its cause was. What is promised: a right answer, or an error that
says what is wrong, in bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from aiomooncake import (
    ClusterError,
    DiagnosisKind,
    LeaseExpiredError,
    LocalCluster,
    MooncakeError,
    ObjectLeasedError,
    ReplicateConfig,
    SetupError,
    SetupTimeoutError,
    Store,
    WarmupError,
    WarmupPolicy,
    connect,
    connect_ranks,
)
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.master import segments
from tests.adversity import report_scenes as scenes
from tests.adversity.processes import Peer, run_scene
from tests.conftest import OpenStore

MB = 1 << 20
SIZES: dict[str, Any] = {"global_segment_size": 64 * MB, "local_buffer_size": 4 * MB}


@contextlib.contextmanager
def within(seconds: float) -> Any:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def on(store: Store) -> ReplicateConfig:
    """Store it in this store's own memory: other tests' stores may be closing beside it."""
    return ReplicateConfig(preferred_segments=[store.hostname])


# --- start-up ---------------------------------------------------------------------------------


async def test_a_rank_whose_first_put_meets_a_peer_that_is_not_there() -> None:
    """sgl-project/sglang#17195: some ranks asserted on their first put, and killed the scheduler.

    The master placed it on the segment of a peer that did not listen (there: not yet; here: no
    longer), so that the connection was refused. Once there is a peer that answers, all are ready.
    """
    async with LocalCluster(client_ttl=1) as cluster:
        gone = await cluster.start_client(global_segment_size="64mb")
        async with connect_ranks(cluster.address, 3, global_segment_size=0) as group:
            await gone.kill()
            warming = asyncio.ensure_future(group.warmup(WarmupPolicy(timeout=20)))
            await cluster.start_client(global_segment_size="64mb")
            with within(20):
                reports = await warming
            assert set(reports) == {0, 1, 2}
            # Until the master drops its segment, some puts are placed on it by chance.
            while len(await segments("127.0.0.1", cluster.metrics_port, 1.0)) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            for store in group:
                await store.put(f"key{store.rank}", b"value")
                assert await store.get(f"key{store.rank}") == b"value"


async def test_a_set_up_that_fails_is_an_error() -> None:
    """sgl-project/sglang#12740: set-up answered an integer, nobody looked, and requests failed."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with within(3), pytest.raises(SetupTimeoutError, match=f"127.0.0.1:{port}"):
            await connect(f"127.0.0.1:{port}", timeout=0.5)


async def test_a_port_that_is_no_master(cluster: LocalCluster) -> None:
    """kvcache-ai/Mooncake#709: an instance was started with another server's port as its master.

    It seemed to come up, and every request failed later.
    """
    with within(8), pytest.raises(SetupError) as refused:
        await connect(cluster.metrics_url.removeprefix("http://"), timeout=4, **SIZES)
    assert "the engine answered" in str(refused.value)


async def test_stores_that_are_opened_at_the_same_time_have_addresses_of_their_own(
    cluster: LocalCluster, open_store: OpenStore
) -> None:
    """kvcache-ai/Mooncake#736: clients that chose their ports at once came out with the same one.

    Then bytes were asked of the wrong one, and reads failed now and then.
    """
    with Peer(cluster.address):
        stores = await asyncio.gather(*(open_store(cluster.address, **SIZES) for _ in range(6)))
    assert len({store.hostname for store in stores}) == len(stores)
    for place, store in enumerate(stores):
        await store.put(f"736-{place}", bytes([place]) * 100_000, config=on(store))
    for reader in stores:
        values = await reader.get_many([f"736-{place}" for place in range(len(stores))])
        assert values == [bytes([place]) * 100_000 for place in range(len(stores))]


async def test_one_port_for_two_stores(cluster: LocalCluster, open_store: OpenStore) -> None:
    """kvcache-ai/Mooncake#863: a producer and a consumer on one host, configured with one port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        name = f"127.0.0.1:{free.getsockname()[1]}"
    with within(20):
        first = await open_store(cluster.address, local_hostname=name, **SIZES)
        second = await open_store(cluster.address, local_hostname=name, **SIZES)
    for number, store in enumerate((first, second)):
        await store.put(f"863-{number}", b"%d" % number * 10_000, config=on(store))
    for store in (first, second):
        assert await store.get_many(["863-0", "863-1"]) == [b"0" * 10_000, b"1" * 10_000]


async def test_a_master_on_ipv6() -> None:
    """kvcache-ai/Mooncake#1182: a master on IPv6 was up, and its clients could not find it."""
    if not socket.has_ipv6 or not _binds("::1"):
        pytest.skip("this host has no IPv6")
    async with LocalCluster(extra_args=["--rpc_address=::1"]) as cluster:
        port = cluster.address.rpartition(":")[2]
        options = {**SIZES, "local_hostname": "127.0.0.1"}
        async with connect(f"[::1]:{port}", timeout=20, **options) as store:
            await store.put("key", b"value")
            assert await store.get("key") == b"value"


def _binds(host: str) -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


async def test_versions_that_do_not_talk() -> None:
    """kvcache-ai/Mooncake#2579: an engine image with another version of the client than the master.

    Look-ups worked, every put was -900 and left no trace in any log: a hit rate of zero.
    """
    engine = InMemoryEngine("versions")
    async with connect("memory://versions", engine=engine, **SIZES) as store:
        for method in ("put", "put_from", "batch_put_from"):
            engine.fault(method, code=-900)
        with within(10), pytest.raises(WarmupError) as failed:
            await store.warmup(WarmupPolicy(timeout=5))
    assert failed.value.diagnosis.kind is DiagnosisKind.VERSION_MISMATCH


async def test_a_taken_port_is_named() -> None:
    """radixark/miles#2389: somebody held the master's metrics port; all one saw was a time-out."""
    cluster = LocalCluster()
    await cluster.start()
    try:
        await cluster.kill()
        with socket.socket() as other:
            other.bind(("127.0.0.1", cluster.metrics_port))
            other.listen()
            with within(10), pytest.raises(ClusterError, match=f"{cluster.metrics_port} .*in use"):
                await cluster.start()
        await cluster.start()
        assert cluster.running
    finally:
        await cluster.kill()
        await cluster.stop()


# --- answers ----------------------------------------------------------------------------------


async def test_a_key_asked_for_twice(cluster: LocalCluster, open_store: OpenStore) -> None:
    """kvcache-ai/Mooncake#3876: of two equal keys in a batch one was memory nobody had filled."""
    store = await open_store(cluster.address, **SIZES)
    values = {f"3876-{i}": bytes([i]) * 5000 for i in range(3)}
    await store.put_many(values, config=on(store))
    keys = ["3876-0", "3876-1", "3876-0", "none", "3876-2", "3876-1", "none"]
    assert await store.get_many(keys) == [values.get(key) for key in keys]
    assert await asyncio.gather(*map(store.get, keys)) == [values.get(key) for key in keys]
    async with store.view_many(keys) as views:
        assert [view and bytes(view) for view in views] == [values.get(key) for key in keys]


async def test_values_of_a_peer_that_died() -> None:
    """Ascend/TransferQueue#94, LMCache/LMCache#497: a failed read was ``b""``, just like a miss.

    kvcache-ai/Mooncake#1249: for as long as the master lists a dead peer, reads of it fail. They
    fail in words and soon, and when its time is up they are misses.
    """
    async with LocalCluster(client_ttl=2) as cluster:
        with Peer(cluster.address) as peer:
            async with connect(cluster.address, **SIZES) as store:
                assert await store.get("peer0") == Peer.value(0)
                peer.kill()
                failures, deadline = 0, time.monotonic() + 15
                while True:
                    with within(8):
                        try:
                            answer = await store.get("peer0")
                        except MooncakeError as exc:
                            assert exc.code is not None  # noqa: PT017  # one of many
                            failures += 1
                        else:
                            assert answer is None
                            break
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.1)
                assert failures
                await store.put("peer0", b"anew")
                assert await store.get("peer0") == b"anew"


async def test_values_of_a_store_that_was_closed(
    cluster: LocalCluster, open_store: OpenStore
) -> None:
    """kvcache-ai/Mooncake#607: what a client had stored could not be read once it was closed.

    It takes its memory along. That is a miss, and not a failure.
    """
    reader = await open_store(cluster.address, **SIZES)
    async with connect(cluster.address, **SIZES) as writer:
        await writer.put("607", b"value", config=on(writer))
        assert await reader.get("607") == b"value"
    with within(5):
        assert await reader.get("607") is None
        assert not await reader.exists("607")
    await reader.put("607", b"again", config=on(reader))
    assert await reader.get("607") == b"again"


async def test_more_than_the_local_buffer_holds(
    cluster: LocalCluster, open_store: OpenStore
) -> None:
    """LMCache/LMCache#1224, kvcache-ai/Mooncake#915: puts failed as soon as many were under way.

    There was no room for all of them in the local buffer.
    """
    store = await open_store(
        cluster.address, global_segment_size=128 * MB, local_buffer_size=4 * MB
    )
    values = {f"1224-{i}": bytes([i]) * (2 * MB) for i in range(24)}
    await asyncio.gather(
        *(store.put(key, value, config=on(store)) for key, value in values.items())
    )
    assert await asyncio.gather(*map(store.get, values)) == list(values.values())
    assert await store.get_many(list(values)) == list(values.values())
    await store.remove_many(list(values), force=True)


async def test_leases_that_are_shorter_than_a_batch() -> None:
    """kvcache-ai/Mooncake#3076: of 6722 keys in one batch each was -707: their leases had run out.

    Batches are cut, so that most keys come in time; the others are named, and may be asked again.
    """
    keys = [f"peer{i}" for i in range(1500)]
    async with LocalCluster(lease_ttl=0.02) as cluster:
        with Peer(cluster.address, keys=len(keys)):
            async with connect(cluster.address, global_segment_size=0) as store:
                found: dict[str, Any] = {}
                left = keys
                with within(20):
                    while left:
                        answers = await store.get_many(left, return_exceptions=True)
                        found |= dict(zip(left, answers, strict=True))
                        left = [key for key in left if isinstance(found[key], LeaseExpiredError)]
                assert list(found.values()) == [Peer.value(i) for i in range(len(keys))]


async def test_a_removal_that_was_refused_is_tried_again(
    cluster: LocalCluster, open_store: OpenStore
) -> None:
    """sgl-project/SpecForge#832: -706 for leased keys, -704 for those that were gone already.

    Both counted as failures, so that a removal that was repeated never came to an end; and the
    look-up in between renewed the lease.
    """
    store = await open_store(cluster.address, **SIZES)
    await store.put_many({"832-a": b"1", "832-b": b"2"}, config=on(store))
    assert await store.get("832-a") == b"1"
    answers = await store.remove_many(["832-a", "832-b", "832-c"], return_exceptions=True)
    assert isinstance(answers[0], ObjectLeasedError)
    assert answers[0].retryable
    assert answers[1:] == [True, False]
    with within(10):
        while True:
            try:
                assert await store.remove("832-a") is True
            except ObjectLeasedError:
                await asyncio.sleep(0.2)
            else:
                break
    assert await store.remove_many(["832-a", "832-b", "832-c"]) == [False] * 3


async def test_many_writers_of_one_key(cluster: LocalCluster, open_store: OpenStore) -> None:
    """kvcache-ai/Mooncake#727: two clients that stored one key at once ended the master."""
    stores = await asyncio.gather(*(open_store(cluster.address, **SIZES) for _ in range(2)))
    for turn in range(10):
        key = f"727-{turn}"
        values = [b"%d-%d" % (turn, i) * 2000 for i in range(8)]
        await asyncio.gather(
            *(stores[i % 2].put(key, value, config=on(stores[0])) for i, value in enumerate(values))
        )
        found = {await store.get(key) for store in stores}
        assert len(found) == 1
        assert found <= set(values)
    assert cluster.running


async def test_a_writer_that_died_under_its_put() -> None:
    """kvcache-ai/Mooncake#974, #849: a key stays unfinished when its writer is killed.

    It is no value, is told as that, and other keys are none the worse. Newer masters let go of it
    after a while (30 s, unless told otherwise).
    """
    soon = ["--put_start_discard_timeout_sec=3", "--put_start_release_timeout_sec=5"]
    async with (
        LocalCluster(client_ttl=1, extra_args=soon) as cluster,
        connect(cluster.address, **SIZES) as store,
    ):
        await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", _HALF_A_PUT, cluster.address],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        with within(10):
            assert not await store.exists("974")
            with contextlib.suppress(MooncakeError):
                assert await store.get("974") is None
            answers = await store.get_many(["974", "other"], return_exceptions=True)
            assert answers[0] is None or isinstance(answers[0], MooncakeError)
            assert answers[1] is None
            await store.put("other", b"value")
            assert await store.get("other") == b"value"
        with within(30):  # when the master has noticed
            while True:
                with contextlib.suppress(MooncakeError):
                    await store.put("974", b"anew")
                with contextlib.suppress(MooncakeError):
                    if await store.get("974") == b"anew":
                        break
                await asyncio.sleep(0.2)


_HALF_A_PUT = """
import os, sys
import mooncake.store
store = mooncake.store.MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", sys.argv[1]) == 0
assert store.batch_put_session_start(["974"], [4096]) == [0]
os._exit(0)
"""


# --- the process ------------------------------------------------------------------------------


def test_the_process_lives_and_ends(cluster: LocalCluster) -> None:
    """kvcache-ai/Mooncake#1426, #639, vllm-project/vllm#45206: as the scenes say, side by side."""
    together = [scenes.other_module_first, scenes.buffer_after_close, scenes.never_closed]
    with ThreadPoolExecutor() as threads:
        for ended in threads.map(lambda scene: run_scene(scene, cluster.address), together):
            ended.check(within=30)
            assert "Traceback" not in ended.err, ended.err
