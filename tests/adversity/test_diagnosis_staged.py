"""Every kind of diagnosis, staged with real processes, and named rightly by a warm-up."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from aiomooncake import (
    Diagnosis,
    DiagnosisKind,
    LocalCluster,
    NoSpaceError,
    ReplicateConfig,
    Store,
    WarmupError,
    WarmupPolicy,
)
from aiomooncake.diagnosis import DIAGNOSIS_TIMEOUT
from tests.adversity import diagnosis_scenes as scenes
from tests.adversity.other_wheel import old_master
from tests.adversity.processes import Peer, run_scene
from tests.conftest import MB, OpenStore

QUICK = WarmupPolicy(timeout=1.0, attempt_timeout=5.0)
# A transport time-out, an RPC time-out, and a busy machine.
SLACK = 3.0


async def diagnosed(
    store: Store, policy: WarmupPolicy = QUICK, *, at_once: bool = False
) -> Diagnosis:
    """Let a warm-up fail in the time its policy allows; what it says is wrong."""
    began = time.monotonic()
    with pytest.raises(WarmupError) as failed:
        await store.warmup(policy)
    seconds = time.monotonic() - began
    found: Diagnosis = failed.value.diagnosis
    assert found.permanent == at_once
    if at_once:
        assert len(failed.value.attempts) == 1
        assert seconds < SLACK
    else:
        assert policy.timeout is not None
        assert seconds < policy.timeout + DIAGNOSIS_TIMEOUT + SLACK
    return found


async def connect_to(master: LocalCluster, open_store: OpenStore, **options: object) -> Store:
    sizes = {"global_segment_size": 32 * MB, "local_buffer_size": 16 * MB}
    given = {**sizes, "master_metrics_port": master.metrics_port, **options}
    return await open_store(master.address, **given)


@pytest.fixture
def patient_cluster() -> Iterator[LocalCluster]:
    """A master that keeps the segment of a client that stands still."""
    master = LocalCluster(client_ttl=60)
    master.blocking.start()
    yield master
    master.blocking.kill()
    master.blocking.stop()


async def test_a_killed_master(own_cluster: LocalCluster, open_store: OpenStore) -> None:
    store = await connect_to(own_cluster, open_store)
    await own_cluster.kill()
    found = await diagnosed(store)
    assert found.kind is DiagnosisKind.MASTER_UNREACHABLE
    assert f"{own_cluster.address}: Connection refused" in found.explanation


@pytest.mark.parametrize("metrics", [True, False])
async def test_a_paused_master(
    own_cluster: LocalCluster, open_store: OpenStore, metrics: bool
) -> None:
    port = own_cluster.metrics_port if metrics else None
    store = await connect_to(own_cluster, open_store, master_metrics_port=port)
    await own_cluster.pause()
    found = await diagnosed(store)
    assert found.kind is DiagnosisKind.MASTER_SILENT
    assert own_cluster.address in found.explanation
    await own_cluster.resume()


@pytest.mark.parametrize("metrics", [True, False])
async def test_no_segment_anywhere(
    own_cluster: LocalCluster, open_store: OpenStore, metrics: bool
) -> None:
    port = own_cluster.metrics_port if metrics else None
    store = await connect_to(
        own_cluster, open_store, global_segment_size=0, master_metrics_port=port
    )
    found = await diagnosed(store)
    assert found.kind is DiagnosisKind.NO_SEGMENT
    assert ("lists 0" if metrics else "global_segment_size=0") in found.evidence


async def test_segments_full_of_pinned_values(
    own_cluster: LocalCluster, open_store: OpenStore
) -> None:
    store = await connect_to(own_cluster, open_store, global_segment_size=16 * MB)
    pinned = ReplicateConfig(with_hard_pin=True)
    values = {f"pinned{number}": b"v" * MB for number in range(20)}
    answers = await store.put_many(values, config=pinned, return_exceptions=True)
    assert {type(answer) for answer in answers.values()} == {type(None), NoSpaceError}
    found = await diagnosed(store, WarmupPolicy(timeout=1.0, value_size=2 * MB))
    assert found.kind is DiagnosisKind.OUT_OF_SPACE
    assert "16 MiB in use" in found.evidence


async def test_a_value_larger_than_what_is_free(
    own_cluster: LocalCluster, open_store: OpenStore
) -> None:
    store = await connect_to(own_cluster, open_store, global_segment_size=16 * MB)
    await store.put("pinned", b"v" * 10 * MB, config=ReplicateConfig(with_hard_pin=True))
    found = await diagnosed(store, WarmupPolicy(timeout=1.0, value_size=8 * MB))
    assert found.kind is DiagnosisKind.OUT_OF_SPACE
    await store.warmup(QUICK)  # a small one fits


@pytest.mark.timeout(300)
async def test_a_master_of_another_version(open_store: OpenStore) -> None:
    """``exists`` answers and every ``put`` is -900, without a line in any log."""
    async with LocalCluster(binary=old_master()) as master:
        store = await connect_to(master, open_store)
        assert not await store.exists("k")
        found = await diagnosed(store, WarmupPolicy(), at_once=True)
        assert found.kind is DiagnosisKind.VERSION_MISMATCH
        assert "a second put answered -900 RPC_FAIL" in found.evidence
        await store.aclose()


@pytest.mark.parametrize("metrics", [True, False])
async def test_a_frozen_peer(
    patient_cluster: LocalCluster, open_store: OpenStore, metrics: bool
) -> None:
    with Peer(patient_cluster.address) as peer:
        port = patient_cluster.metrics_port if metrics else None
        store = await connect_to(
            patient_cluster, open_store, global_segment_size=0, master_metrics_port=port
        )
        await store.warmup()
        peer.freeze()
        found = await diagnosed(store)
    assert found.kind is DiagnosisKind.PEER_UNREACHABLE
    assert (f"(segment {peer.hostname}): no answer in time" in found.explanation) == metrics
    assert ("which one: unknown" in found.explanation) != metrics


async def test_a_peer_that_died_a_moment_ago(
    patient_cluster: LocalCluster, open_store: OpenStore
) -> None:
    with Peer(patient_cluster.address) as peer:
        store = await connect_to(patient_cluster, open_store, global_segment_size=0)
        peer.kill()
        found = await diagnosed(store)
    assert found.kind is DiagnosisKind.PEER_UNREACHABLE
    assert f"(segment {peer.hostname}): Connection refused" in found.explanation


async def test_a_local_buffer_smaller_than_the_value(
    own_cluster: LocalCluster, open_store: OpenStore
) -> None:
    store = await connect_to(own_cluster, open_store, local_buffer_size=4 * MB)
    found = await diagnosed(store, WarmupPolicy(value_size=8 * MB), at_once=True)
    assert found.kind is DiagnosisKind.LOCAL_BUFFER_TOO_SMALL
    assert "8 MiB does not fit in the local buffer of 4 MiB" in found.explanation


async def test_a_local_buffer_that_is_held(
    own_cluster: LocalCluster, open_store: OpenStore
) -> None:
    store = await connect_to(own_cluster, open_store, local_buffer_size=4 * MB)
    held = []
    for number in range(6):
        await store.put(f"held{number}", b"v" * (MB // 2))
        held.append(await store.engine.get_buffer(f"held{number}"))
    found = await diagnosed(store, WarmupPolicy(timeout=1.0, value_size=2 * MB))
    assert found.kind is DiagnosisKind.LOCAL_BUFFER_TOO_SMALL
    assert "has no room left for 2 MiB" in found.explanation
    held.clear()
    await store.warmup(WarmupPolicy(timeout=1.0, value_size=2 * MB))


def test_of_an_adopted_store_little_is_known(own_cluster: LocalCluster) -> None:
    run_scene(scenes.adopt_without_a_segment, own_cluster.address).check(within=10)
