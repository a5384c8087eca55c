"""Upstream's examples for segments that come and go, and for copies that the cluster makes.

As in ``test_upstream_values.py``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aiomooncake import (
    InvalidArgumentError,
    LocalCluster,
    ObjectNotFoundError,
    ReplicateConfig,
    Store,
)
from aiomooncake.tasks import TaskProgress
from tests.conftest import MB, OpenStore
from tests.examples.upstream.conftest import Config

KEYS = ["key1", "key2", "key3"]
ENDED = ("SUCCESS", "FAILED")


@pytest.fixture
async def lender(upstream_cluster: LocalCluster, store: Store, open_store: OpenStore) -> Store:
    """A client that lends nothing when it is opened: of several segments one can't be copied to."""
    return await open_store(upstream_cluster.address, global_segment_size=0, local_buffer_size=MB)


@pytest.fixture
def shared_file(tmp_path: Path) -> Path:
    """A file of 16 MiB, for upstream's ``/dev/shm/mooncake_segment``."""
    path = tmp_path / "mooncake_segment"
    with path.open("wb") as file:
        file.truncate(16 * MB)
    return path


async def test_mount_segment(store: Store, lender: Store, shared_file: Path) -> None:
    """Class MooncakeDistributedStore, ``mount_segment()`` and ``unmount_segment()``.

    Upstream doesn't say that the file must be there, and be as large. Without a grace period, its
    default, memory is unmapped under the client's own reads: our mirror gives one.
    """
    mount, unmount = lender.engine.mount_segment, lender.engine.unmount_segment
    result = await mount(str(shared_file), 16 * MB, offset=0, protocol="tcp", location="")
    assert result["ret"] == 0
    assert len(result["segment_ids"]) == 1
    there = ReplicateConfig(preferred_segment=lender.hostname)
    await store.put("key", b"value", config=there)
    assert b"value" in await asyncio.to_thread(shared_file.read_bytes)
    nothing = {"ret": -1, "segment_ids": []}
    assert await mount(str(shared_file), 32 * MB) == nothing
    assert await mount(f"{shared_file}.nope", 16 * MB) == nothing
    assert await unmount(result["segment_ids"], grace_period_seconds=1) == 0
    assert await unmount(["1-2"]) == -1

    async with lender.mount_segment("8MiB", path=shared_file) as segment:
        assert (segment.nbytes, segment.name) == (8 * MB, lender.hostname)
    with pytest.raises(InvalidArgumentError):
        await lender.mount_segment("32MiB", path=shared_file)
    with pytest.raises(InvalidArgumentError):
        await lender.mount_segment(path=f"{shared_file}.nope")


async def test_allocate_and_mount_segment(store: Store, lender: Store) -> None:
    """Class MooncakeDistributedStore, ``allocate_and_mount_segment()``, ``unmount_and_free_…()``.

    "May be rounded up": to 16 MiB.
    """
    lend, take_back = (
        lender.engine.allocate_and_mount_segment,
        lender.engine.unmount_and_free_segment,
    )
    for asked, given in ((16 * MB, 16 * MB), (1, 16 * MB), (17 * MB, 32 * MB)):
        result = await lend(asked, protocol="tcp", location="")
        assert (result["ret"], result["allocated_size"]) == (0, given)
        assert await take_back(result["segment_ids"], grace_period_seconds=1) == 0
    assert await take_back(["1-2"]) == -1

    async with lender.mount_segment("17MiB") as segment:
        assert segment.nbytes == 32 * MB
        there = ReplicateConfig(preferred_segment=segment.name)
        await store.put("key", b"value", config=there)
    assert await store.get("key") == b"value"  # for a second more


# --- tasks ------------------------------------------------------------------------------------


async def ended(store: Store, task: tuple[int, int]) -> tuple[Any, list[str]]:
    """Ask as upstream's loop does until a task has ended; tell what was heard of it."""
    heard: list[str] = []
    while True:
        response, code = await store.engine.query_task(task)
        assert code == 0
        assert response is not None
        if response.status.name not in heard:
            heard.append(response.status.name)
        if heard[-1] in ENDED:
            return response, heard
        await asyncio.sleep(0.02)  # the engine tells nobody


async def test_copy_tasks(store: Store, peer: Store, native: Config) -> None:
    """Class MooncakeDistributedStore, ``create_copy_task()`` and ``query_task()``, their example.

    A task is a pair of integers.
    """
    here, target = native(preferred_segment=store.hostname), peer.hostname
    assert await store.engine.put_batch(KEYS, [b"1", b"2", b"3"], here) == 0
    tasks = []
    for key in KEYS:
        task, code = await store.engine.create_copy_task(key, [target])
        assert code == 0
        tasks.append(task)
    await store.put("ours", b"4", config=ReplicateConfig(preferred_segment=store.hostname))
    told: list[TaskProgress] = []
    copying = asyncio.create_task(store.copy("ours", [target], on_progress=told.append))
    for task, (response, heard) in zip(
        tasks, await asyncio.gather(*(ended(store, task) for task in tasks)), strict=True
    ):
        assert (response.id, response.status.name, heard[-1]) == (task, "SUCCESS", "SUCCESS")
        assert response.type.name == "REPLICA_COPY"
        assert 0 < response.created_at_ms_epoch <= response.last_updated_at_ms_epoch
        assert len(response.assigned_client) == 2
        assert response.message == "Task completed successfully"
    await copying
    assert told[-1].status == "success"
    assert [len(copies) for copies in await store.replicas_many([*KEYS, "ours"])] == [2] * 4


async def test_move_tasks(store: Store, peer: Store, native: Config) -> None:
    """Class MooncakeDistributedStore, ``create_move_task()``."""
    source, target = store.hostname, peer.hostname
    assert await store.engine.put("my_key", b"value", native(preferred_segment=source)) == 0
    await store.put("ours", b"value", config=ReplicateConfig(preferred_segment=source))
    before = await store.replicas("my_key")
    task, code = await store.engine.create_move_task("my_key", source, target)
    assert code == 0
    moving = asyncio.create_task(store.move("ours", source, target))
    response, _ = await ended(store, task)
    assert (response.type.name, response.status.name) == ("REPLICA_MOVE", "SUCCESS")
    await moving
    after = await store.replicas_many(["my_key", "ours"])
    assert after[0][0].endpoint == after[1][0].endpoint != before[0].endpoint
    assert await store.get_many(["my_key", "ours"]) == [b"value"] * 2


async def test_tasks_that_are_refused(store: Store, peer: Store) -> None:
    """Class MooncakeDistributedStore, "Submission-time failures", and a task nobody knows."""
    here, there = store.hostname, peer.hostname
    await store.put("my_key", b"value", config=ReplicateConfig(preferred_segment=here))
    engine, nothing = store.engine, (0, 0)
    assert await engine.create_copy_task("nothing", [there]) == (nothing, -704)
    assert await engine.create_copy_task("my_key", ["segment1", "segment2"]) == (nothing, -600)
    assert await engine.create_move_task("nothing", here, there) == (nothing, -704)
    assert await engine.create_move_task("my_key", "old_segment", there) == (nothing, -600)
    assert await engine.create_move_task("my_key", here, "new_segment") == (nothing, -600)
    assert await engine.query_task((1, 2)) == (None, -1400)

    with pytest.raises(ObjectNotFoundError):
        await store.copy("nothing", [there])
    with pytest.raises(InvalidArgumentError):
        await store.copy("my_key", ["segment1", "segment2"])
    with pytest.raises(InvalidArgumentError):
        await store.move("my_key", here, "new_segment")
