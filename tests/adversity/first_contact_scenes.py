"""Scenes of :mod:`test_first_contact`: each runs in an interpreter of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np

from aiomooncake import LocalCluster, ReplicateConfig, TransferError
from tests.adversity.exit_scenes import open_store
from tests.adversity.frozen_scenes import attempt
from tests.adversity.peer_scenes import until
from tests.adversity.processes import Peer

LARGE = bytes(24 << 20)


async def _peer_without_a_word(*, kill: bool, metrics: bool, verbs: tuple[str, ...]) -> None:
    async with LocalCluster(client_ttl=120) as cluster:
        with Peer(cluster.address, segment=256 << 20) as peer:
            address = cluster.address
            writer = await open_store(address, global_segment_size=0)
            await writer.put("large", LARGE)
            await writer.put_tensor("tensor", np.zeros(3 << 20))
            await writer.aclose()
            known = {"master_metrics_port": cluster.metrics_port} if metrics else {}
            store = await open_store(address, global_segment_size=0, transfer_timeout=1, **known)
            async with store.allocate(len(LARGE)) as buffer:
                (peer.kill if kill else peer.freeze)()

                async def session_write() -> None:
                    async with store.put_session({"s": len(LARGE)}) as session:
                        await session.write("s", 0, buffer)

                async def session_read() -> None:
                    async with store.get_session(["large"]) as session:
                        await session.read_into("large", 0, buffer)

                calls: dict[str, Callable[[], Awaitable[object]]] = {
                    "get": lambda: store.get("large"),
                    "get_into": lambda: store.get_into("large", buffer),
                    "get_tensor": lambda: store.get_tensor("tensor", like="numpy"),
                    "get_range": lambda: store.get_into("large", buffer, offset=1),
                    "put": lambda: store.put("p", LARGE),
                    "put_from": lambda: store.put_from("pf", buffer),
                    "session_write": session_write,
                    "session_read": session_read,
                }
                for verb in verbs:
                    began = time.monotonic()
                    answer = await attempt(calls[verb]())
                    assert isinstance(answer, TransferError), (verb, answer)
                    assert time.monotonic() - began < 20, verb
                assert not store.stats().tainted
                if not kill:
                    peer.thaw()
                    await until(lambda: store.health().state == "ready")
            await store.aclose()


def frozen_read() -> None:
    asyncio.run(_peer_without_a_word(kill=False, metrics=True, verbs=("get",)))


def frozen_read_without_metrics() -> None:
    verbs = ("get_into", "session_read")
    asyncio.run(_peer_without_a_word(kill=False, metrics=False, verbs=verbs))


def frozen_tensor_without_metrics() -> None:
    asyncio.run(_peer_without_a_word(kill=False, metrics=False, verbs=("get_tensor",)))


def two_frozen_peers() -> None:
    """The second one freezes while the first one is known to be stuck."""

    async def scene() -> None:
        async with LocalCluster(client_ttl=120) as cluster:
            with Peer(cluster.address) as first, Peer(cluster.address) as second:
                store = await open_store(cluster.address, global_segment_size=0, transfer_timeout=1)
                for key, peer in (("small", first), ("large", second)):
                    there = ReplicateConfig(preferred_segment=peer.hostname)
                    writer = await open_store(cluster.address, global_segment_size=0)
                    await writer.put(key, LARGE if key == "large" else b"value", config=there)
                    await writer.aclose()
                first.freeze()
                assert isinstance(await attempt(store.get("small")), TransferError)
                await until(lambda: store.health().state == "degraded")
                second.freeze()
                began = time.monotonic()
                assert isinstance(await attempt(store.get("large")), TransferError)
                assert time.monotonic() - began < 20
                first.thaw()
                second.thaw()
                await until(lambda: store.health().state == "ready")
                await store.aclose()

    asyncio.run(scene())


def frozen_write() -> None:
    verbs = ("put", "session_write")
    asyncio.run(_peer_without_a_word(kill=False, metrics=True, verbs=verbs))


def killed() -> None:
    verbs = ("get", "get_into", "get_range", "put", "put_from", "session_write", "session_read")
    asyncio.run(_peer_without_a_word(kill=True, metrics=False, verbs=verbs))
