"""Scenes of :mod:`test_hedging`: each runs in an interpreter of its own.

The transport's time-outs are read when the engine is imported, so they can be short only there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiomooncake import LocalCluster, MooncakeError, ReplicateConfig, Store
from aiomooncake.testing import LoopStallProbe
from tests.adversity.call_scenes import NO_STALL, settled
from tests.adversity.exit_scenes import open_store
from tests.adversity.processes import Peer

TIMEOUT = 1
"""Seconds of the transport's time-out."""

SLACK = 2.0
"""Seconds that a failure may take longer than the time-out, on a machine that is busy."""

PROMPT = 0.5
"""Seconds within which a healthy key is answered, on a machine that does nothing else.

On one that is busy, ten times what the same reads take there before anything hangs come on top.
"""

KEYS = 40

THREADS = 2 + 4 + 8 + 2 + 4 + 8
"""Control, small and what was set aside of it (as many as may be abandoned), bulk, and hedge."""


def value(key: str) -> bytes:
    return key.encode().ljust(4096, b".")


class Clock:
    """How long each call of a turn took."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seconds: dict[str, float] = {}

    async def timed(self, key: str, call: Awaitable[bytes | None]) -> bytes | MooncakeError | None:
        try:
            return await call
        except MooncakeError as error:
            return error
        finally:
            self.seconds[key] = time.monotonic() - self.began


@dataclass
class Scene:
    """A store, its 40 healthy keys, and ``peer0`` in a peer that stands still."""

    store: Store
    healthy: dict[str, bytes]
    prompt: float


@asynccontextmanager
async def beside_a_frozen_peer(*, theirs: bool) -> AsyncIterator[Scene]:
    """Freeze a peer beside healthy keys.

    ``theirs`` puts the healthy keys into another process: memory of the same one takes another
    way through the engine.
    """
    # The peer's segment must outlive its being frozen.
    async with LocalCluster(client_ttl=60) as cluster:
        with (
            Peer(cluster.address, keys=1) as frozen,
            # There is a peer0 already, so this one holds the others.
            Peer(cluster.address, keys=KEYS + 1 if theirs else 0),
        ):
            store = await open_store(cluster.address, transfer_timeout=TIMEOUT)
            if theirs:
                healthy = {f"peer{i}": Peer.value(i) for i in range(1, KEYS + 1)}
            else:
                healthy = {f"own{i}": value(f"own{i}") for i in range(KEYS)}
                mine = ReplicateConfig(preferred_segments=(store.hostname,))
                await store.put_many(healthy, config=mine)
            slowest = 0.0
            for _ in range(5):
                clock = Clock()
                reading = [clock.timed(key, store.get(key)) for key in [*healthy, "peer0"]]
                assert await asyncio.gather(*reading) == [*healthy.values(), Peer.value(0)]
                slowest = max(slowest, *clock.seconds.values())
            frozen.freeze()
            async with LoopStallProbe() as probe:
                yield Scene(store, healthy, PROMPT + 10 * slowest)
            assert probe.longest < NO_STALL, probe
            frozen.kill()
            await store.aclose()
        await settled()


def threads() -> int:
    return sum(thread.name.startswith("aiomooncake-") for thread in threading.enumerate())


async def read_together(scene: Scene) -> None:
    """Read all of them in one turn of the loop; in the middle, the one that is stuck."""
    store, healthy = scene.store, scene.healthy
    clock = Clock()
    keys = list(healthy)
    keys.insert(KEYS // 2, "peer0")
    reading = {
        key: asyncio.ensure_future(clock.timed(key, store.get(key))) for key in [*keys, "missing"]
    }
    await asyncio.sleep(0)
    # What is asked while they hang is answered at once.
    while not reading["peer0"].done():
        later = Clock()
        for key in (keys[0], keys[-1]):
            assert await later.timed(key, store.get(key)) == healthy[key]
        assert later.seconds[keys[-1]] < scene.prompt, later.seconds
        assert threads() <= THREADS + 1  # the one that starts masters
        await asyncio.sleep(0.02)
    answers = {key: await task for key, task in reading.items()}
    error = answers.pop("peer0")
    assert isinstance(error, MooncakeError), error
    assert error.key == "peer0"
    assert clock.seconds.pop("peer0") < TIMEOUT + SLACK
    assert answers.pop("missing") is None
    assert answers == healthy
    slowest = max(clock.seconds, key=clock.seconds.__getitem__)
    assert clock.seconds[slowest] < scene.prompt, (slowest, clock.seconds[slowest])


def own_keys() -> None:
    async def main() -> None:
        async with beside_a_frozen_peer(theirs=False) as scene:
            await read_together(scene)

    asyncio.run(main())


def keys_of_a_healthy_peer() -> None:
    async def main() -> None:
        async with beside_a_frozen_peer(theirs=True) as scene:
            await read_together(scene)

    asyncio.run(main())


def again_and_again() -> None:
    """Round after round, while the rounds before hang: no thread is lost for good."""

    async def main() -> None:
        async with beside_a_frozen_peer(theirs=False) as scene:
            store, healthy = scene.store, scene.healthy
            stuck = []
            for _ in range(6):
                clock = Clock()
                stuck.append(asyncio.ensure_future(clock.timed("peer0", store.get("peer0"))))
                answers = await asyncio.gather(
                    *(clock.timed(key, store.get(key)) for key in healthy)
                )
                assert answers == list(healthy.values())
                assert max(clock.seconds.values()) < scene.prompt, max(clock.seconds.values())
                assert threads() <= THREADS + 1
            for error in await asyncio.gather(*stuck):
                assert isinstance(error, MooncakeError), error
            assert not store.stats().abandoned
            deadline = time.monotonic() + 10
            while store.stats().in_flight:
                assert time.monotonic() < deadline, store.stats()
                await asyncio.sleep(0.01)
            assert threads() <= 2 + 4 + 2 + 4 + 1
            assert not store.stats().tainted

    asyncio.run(main())
