"""The verbs of a store as a user's type checker sees them; nothing of it runs."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from typing_extensions import assert_type

import aiomooncake
from aiomooncake import (
    Health,
    LocalCluster,
    MooncakeError,
    RankGroup,
    Replica,
    ReplicateConfig,
    Store,
    StoreConfig,
    StoreStats,
    WarmupPolicy,
    WarmupProgress,
    WarmupReport,
)
from aiomooncake.buffers import Buffer, Slice
from aiomooncake.segments import Segment
from aiomooncake.sessions import GetSession, PutSession
from aiomooncake.tasks import TaskProgress

config = ReplicateConfig(replica_num=2)
some: bool = bool(config)
Results: TypeAlias = list[bytes | MooncakeError | None]


async def opening() -> None:
    assert_type(await aiomooncake.connect("127.0.0.1:50051", rank=3), Store)
    async with aiomooncake.connect(StoreConfig("127.0.0.1:50051"), warmup=True) as store:
        assert_type(store, Store)
    async with aiomooncake.connect_ranks("memory://name", 2) as group:
        assert_type(group, RankGroup)
        assert_type(group[0], Store)
        assert_type(await group.warmup(), dict[int | str, WarmupReport])
    async with aiomooncake.adopt(object()) as adopted:
        assert_type(adopted, Store)
    with LocalCluster() as cluster:
        assert_type(cluster.address, str)


async def single_keys(store: Store) -> None:
    assert_type(await store.get("k"), bytes | None)
    assert_type(await store.exists("k"), bool)
    assert_type(await store.size("k"), int | None)
    assert_type(await store.replicas("k"), tuple[Replica, ...])
    assert_type(await store.put("k", b"v", config=config), None)
    assert_type(await store.put("k", array("i", [1])), None)
    assert_type(await store.upsert("k", mmap.mmap(-1, 1)), None)
    assert_type(await store.put_parts("k", b"v", bytearray(b"w")), None)
    assert_type(await store.remove("k", force=True), bool)
    assert_type(await store.remove_by_regex("k", force=True), int)
    assert_type(await store.remove_all(force=True), int)


async def many_keys(store: Store) -> None:
    assert_type(await store.get_many(["k"]), list[bytes | None])
    assert_type(await store.get_many(["k"], return_exceptions=True), Results)
    assert_type(await store.get_many({"k"}, return_exceptions=some), Results)
    assert_type(await store.exists_many(["k"]), list[bool])
    answers = await store.exists_many(["k"], return_exceptions=True)
    assert_type(answers, list[bool | MooncakeError])
    assert_type(await store.remove_many(["k"], force=True), list[bool])
    removed = await store.remove_many(["k"], return_exceptions=True)
    assert_type(removed, list[bool | MooncakeError])
    assert_type(await store.replicas_many(["k"]), list[tuple[Replica, ...]])
    places = await store.replicas_many(["k"], return_exceptions=True)
    assert_type(places, list[tuple[Replica, ...] | MooncakeError])
    assert_type(await store.put_many({"k": b"v"}), dict[str, MooncakeError | None])


async def without_copies(store: Store) -> None:
    async with store.view("k") as view:
        assert_type(view, memoryview | None)
    async with store.view_many(["k"]) as views:
        assert_type(views, list[memoryview | None])
    async with store.allocate("1MiB") as buffer:
        assert_type(buffer, Buffer)
        assert_type(buffer[0:4096], Slice)
        assert_type(buffer.view, memoryview | None)
    registered = await store.register(bytearray(8))
    assert_type(registered, Buffer)
    assert_type(await store.register(address=1, nbytes=8, owner=object()), Buffer)
    assert_type(await store.put_from("k", registered[0:4]), None)
    assert_type(await store.put_from("k", [registered[0:4], registered[4:8]]), None)
    assert_type(await store.get_into("k", registered, offset=4), int | None)
    stored = await store.put_many_from({"k": registered[0:4]}, config=config)
    assert_type(stored, dict[str, MooncakeError | None])
    assert_type(await store.get_many_into({"k": registered[0:4]}), list[Any])
    assert_type(await registered.aclose(), None)


async def placing(store: Store) -> None:
    async with store.mount_segment("512MiB") as segment:
        assert_type(segment, Segment)
        assert_type(segment.name, str)
        assert_type(segment.ids, tuple[str, ...])
        assert_type(segment.nbytes, int)
        assert_type(await segment.aclose(grace_period=2), None)
    mounted = await store.mount_segment(path=Path("/dev/shm/memory"), offset="4KiB")
    assert_type(mounted, Segment)
    assert_type(await store.copy("k", ["host:1"], on_progress=copied), None)
    assert_type(await store.move("k", "host:1", "host:2"), None)


def copied(progress: TaskProgress) -> None:
    assert_type(progress.status, str)
    assert_type(progress.seconds, float)


async def ranges(store: Store, buffer: Buffer) -> None:
    async with store.put_session({"k": 10, "l": "1MiB"}, config=config) as putting:
        assert_type(putting, PutSession)
        assert_type(putting.sizes, Mapping[str, int])
        assert_type(await putting.write("k", 0, buffer[0:10]), None)
    async with store.get_session(["k"]) as getting:
        assert_type(getting, GetSession)
        assert_type(await getting.read_into("k", 0, buffer), int | None)


def heard(progress: WarmupProgress) -> None:
    assert_type(progress.attempt.ok, bool)


async def life(store: Store) -> None:
    assert_type(await store.warmup(WarmupPolicy(timeout=1.0), on_attempt=heard), WarmupReport)
    assert_type(store.health(), Health)
    assert_type(store.stats(), StoreStats)
    assert_type(store.hostname, str)
    assert_type(store.closed, bool)
    assert_type(store.rank, int | str | None)
    assert_type(store.config, StoreConfig | None)
    assert_type(await store.aclose(timeout=None), None)


async def mistakes(store: Store) -> None:
    await store.fetch("k")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    await store.get(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await store.put_from("k", b"v")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await store.get_into("k", bytearray(1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    len(await store.get("k"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await store.remove("k", True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
