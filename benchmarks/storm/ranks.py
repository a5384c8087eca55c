"""Ranks of the simulation: the real warm-up on a store whose every request goes to the model."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from aiomooncake.buffers import Buffer
from aiomooncake.config import StoreConfig
from benchmarks.storm.calibration import Calibration
from benchmarks.storm.master import Master

__all__ = ["Rank", "World"]

_PING_PERIOD = 1.0  # seconds; a client asks for tasks as often

_NO_MEMORY, _RPC_FAIL, _RPC_TIMEOUT, _TRANSFER_FAIL = -200, -900, -901, -800
_DIAGNOSIS = "aiomooncake_diagnosis_"


@dataclass(slots=True)
class World:
    """What all ranks have in common.

    Attributes:
        master: Where their requests go.
        calibration: What their calls take.
        memory_at: Loop time from which the master has a segment to place values on.
    """

    master: Master
    calibration: Calibration
    memory_at: float

    def mounted(self, when: float) -> None:
        """Note that a segment will be mounted."""
        self.memory_at = min(self.memory_at, when)


@dataclass(slots=True)
class Rank:
    """One rank: what `aiomooncake.warmup.warm_up` needs of a store, and its client's pings.

    Attributes:
        rank: Its number.
        starts_at: Loop time at which its warm-up begins.
        engine_at: Loop time from which its Transfer Engine moves values.
        connected: Whether it has a connection to the master, which may be broken.
        registered_at: Loop time from which the master knows the client and its segment.
    """

    rank: int
    world: World
    starts_at: float
    engine_at: float
    connected: bool = True
    registered_at: float = 0.0
    hostname: str = "10.0.0.1:12345"
    config: StoreConfig | None = None
    ready_at: float | None = None
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = Engine(self)

    @property
    def could_be_ready_at(self) -> float:
        """When nothing but the rank's own waiting kept it from being ready."""
        world = self.world
        return max(self.starts_at, self.engine_at, world.memory_at, world.master.back_at)

    def allocate(self, nbytes: int) -> AbstractAsyncContextManager[Buffer]:
        """Refuse: a warm-up by value needs no registered memory."""
        raise NotImplementedError(f"{nbytes} bytes: ranks of the simulation have no memory")

    def discard(self, key: str) -> None:
        """Refuse it: no warm-up is cancelled here."""
        raise NotImplementedError

    async def ping(self, rng: random.Random) -> None:
        """Do what the engine's client does of itself, for ever: ping, poll, mount again."""
        master, loop = self.world.master, asyncio.get_running_loop()
        await asyncio.sleep(self.starts_at + _PING_PERIOD * rng.random() - loop.time())
        while True:
            began = loop.time()
            if loop.time() >= self.registered_at:
                master.post("ping")
                master.post("poll")
            elif await master.reached() and await master.request("ping"):
                await master.request("mount", then=self._mounted)
                master.post("poll")
            await asyncio.sleep(max(0.0, began + _PING_PERIOD - loop.time()))

    def _mounted(self, when: float) -> None:
        self.registered_at = min(self.registered_at, when)
        self.world.mounted(when)


class Engine:
    """The engine's calls that a warm-up makes, with the engine's answers."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._master = rank.world.master
        self._client = rank.world.calibration.client
        self._time = asyncio.get_running_loop().time
        self._values: dict[str, bytes] = {}
        self._puts = 0

    async def put(self, key: str, value: bytes) -> int:
        """Ask where to put a value, move it, and say that it is there."""
        self._puts += 1
        if not await self._reached():
            return _RPC_FAIL
        half = self._client["put"] / 2  # the first half is the way there, the second the transfer
        if not await self._request("put_start", half):
            return _RPC_TIMEOUT
        if self._time() < self._rank.world.memory_at:
            return _NO_MEMORY
        if self._time() < self._rank.engine_at:
            await self._request("put_revoke", half)
            return _TRANSFER_FAIL
        if not await self._request("put_end", half):
            return _RPC_TIMEOUT
        self._values[key] = value
        return 0

    async def is_exist(self, key: str) -> int:
        """Ask whether a key is there."""
        if key.startswith(_DIAGNOSIS) and self._master.away:
            return _RPC_FAIL  # a real diagnosis looks at the port first, which refuses at once
        if not await self._reached():
            return _RPC_FAIL
        if not await self._request("exists", self._client["is_exist"]):
            return _RPC_TIMEOUT
        return int(key in self._values)

    async def get(self, key: str) -> bytes:
        """Ask where a value is, and move it."""
        found = await self._reached() and await self._request("get", self._client["get"])
        return self._values.get(key, b"") if found else b""

    async def remove(self, key: str, force: bool = False) -> int:  # noqa: FBT001, FBT002  # as it is
        """Take a key away."""
        assert force
        if not await self._reached():
            return _RPC_FAIL
        if not await self._request("remove", self._client["remove"]):
            return _RPC_TIMEOUT
        return 0 if self._values.pop(key, None) else -704

    async def _reached(self) -> bool:
        if self._rank.connected and self._master.away:
            self._rank.connected = False  # the broken connection is noticed at once
            return False
        self._rank.connected = self._rank.connected or await self._master.reached()
        return self._rank.connected

    async def _request(self, kind: str, client: float) -> bool:
        return await self._master.request(kind, client, retry=self._puts > 1)
