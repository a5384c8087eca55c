"""A storm of cancellations, for :mod:`tests.test_cancellation`: in an interpreter of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

import aiomooncake
from aiomooncake import BatchError, BufferTooSmallError, ObjectLeasedError, Store
from aiomooncake.buffers import Buffer
from tests.cancelling import quiet

MB = 1 << 20
KEYS = [f"key{i}" for i in range(40)]
WORKERS = 100
LARGE = 10 * MB  # in two pieces
LONGEST = 0.05  # seconds until a cancellation
CONNECTIONS = 100

Call = Callable[[], Coroutine[Any, Any, Any]]


class Failure(Exception):  # noqa: N818  # it is none of the library's
    """What a task of a group fails with, so that its neighbours are cancelled."""


def value_of(key: str, copies: int = 500) -> bytes:
    return key.encode() * copies


def check_value(key: str, value: object) -> None:
    if value is not None:
        unit = key.encode()
        assert bytes(value) == unit * (len(value) // len(unit)), f"{key}: wrong bytes"  # type: ignore[call-overload, arg-type]


@dataclass
class Storm:
    """Calls of all kinds, by a seed.

    Attributes:
        lent: How often memory was lent with ``on_release``.
        released: How often it was given back.
        ends: How the calls ended.
    """

    store: Store
    memory: Buffer
    wide: Buffer
    random: random.Random
    lent: int = 0
    released: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    serial: int = 0

    def release(self) -> None:
        self.released += 1

    def place(self) -> Any:
        start = self.random.randrange(0, self.memory.nbytes - 4096, 4096)
        return self.memory[start : start + 4096]

    # ------------------------------------------------------------------ calls

    async def get(self) -> None:
        key = self.random.choice(KEYS)
        check_value(key, await self.store.get(key))

    async def put(self) -> None:
        key = self.random.choice(KEYS)
        await self.store.put(key, value_of(key, self.random.choice((100, 500, 3000))))

    async def put_mutable(self) -> None:
        key = self.random.choice(KEYS)
        value = bytearray(value_of(key, 30_000))
        try:
            await self.store.put(key, value)
        finally:
            value[:] = bytes(len(value))  # it is ours again

    async def upsert(self) -> None:
        await self.store.upsert(f"own{self.random.randrange(20)}", b"u" * 3000)

    async def remove(self) -> None:
        with contextlib.suppress(ObjectLeasedError):
            # Not by force, which may give a reader that is under way the bytes of another value.
            await self.store.remove(self.random.choice(KEYS))

    async def many(self) -> None:
        keys = self.random.sample(KEYS, 20)
        for key, value in zip(keys, await self.store.get_many(keys), strict=True):
            check_value(key, value)

    async def put_many(self) -> None:
        await self.store.put_many({key: value_of(key) for key in self.random.sample(KEYS, 10)})

    async def remove_many(self) -> None:
        with contextlib.suppress(BatchError):
            await self.store.remove_many(self.random.sample(KEYS, 5))

    async def ask(self) -> None:
        key = self.random.choice(KEYS)
        await self.random.choice((self.store.exists, self.store.size, self.store.replicas))(key)

    async def view(self) -> None:
        key = self.random.choice(KEYS)
        async with self.store.view(key) as view:
            await asyncio.sleep(0)
            check_value(key, view)

    async def put_from(self) -> None:
        await self.store.put_from(f"from{self.random.randrange(20)}", self.place())

    async def get_into(self) -> None:
        with contextlib.suppress(BufferTooSmallError):
            await self.store.get_into(self.random.choice(KEYS), self.place())

    async def lend(self) -> None:
        """Move memory that is given back by ``on_release``."""
        keys = [f"lent{self.random.randrange(60)}" for _ in range(8)]
        items = {key: self.place() for key in keys}
        move = self.random.choice((self.store.put_many_from, self.store.get_many_into))
        self.lent += 1
        await move(items, on_release=self.release, return_exceptions=True)

    async def register(self) -> None:
        async with self.store.register(bytearray(5000)) as buffer:
            await self.store.put_from(f"from{self.random.randrange(20)}", buffer)

    async def large(self) -> None:
        """Store and read values in pieces."""
        self.serial += 1
        key = f"large{self.serial}"
        try:
            await self.store.put(key, bytes(LARGE))
            await self.store.get_into(key, self.wide)
        finally:
            with anyio.CancelScope(shield=True):
                await self.store.remove(key, force=True)

    def any_call(self) -> Call:
        usual = [self.get, self.put, self.put_mutable, self.upsert, self.remove, self.many]
        usual += [self.put_many, self.remove_many, self.ask, self.view, self.put_from]
        usual += [self.get_into, self.lend, self.register]
        return self.large if self.random.random() < 0.003 else self.random.choice(usual)

    # ------------------------------------------------------------------ cancellations

    def moment(self) -> float:
        return self.random.choice((0.0, self.random.random() * LONGEST))

    async def by_cancel(self, call: Call) -> None:
        task = asyncio.ensure_future(call())
        await asyncio.sleep(self.moment())
        for _ in range(self.random.randrange(3)):
            await asyncio.sleep(0)
        while not task.done():
            task.cancel()
            if self.random.random() < 0.7:
                await asyncio.wait({task})
            await asyncio.sleep(0)
        if task.cancelled():
            raise asyncio.CancelledError
        task.result()

    async def by_wait_for(self, call: Call) -> None:
        await asyncio.wait_for(call(), self.moment() or 1e-5)

    async def by_scope(self, call: Call) -> None:
        with anyio.move_on_after(self.moment()) as scope:
            await call()
        if scope.cancelled_caught:
            raise TimeoutError

    async def by_neighbour(self, call: Call) -> None:
        """Fail a task of a group, which cancels all others."""

        async def fail() -> None:
            await asyncio.sleep(self.moment())
            raise Failure

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(call)
                group.start_soon(self.get)
                group.start_soon(fail)
        except BaseException as exc:
            left = exc.split(Failure)[1] if hasattr(exc, "split") else exc  # an ExceptionGroup
            if left is not None:
                raise
            raise Failure from None

    async def one(self) -> None:
        call = self.any_call()
        way = self.random.choice(
            (self.by_cancel, self.by_wait_for, self.by_scope, self.by_neighbour)
        )
        # Its own cancellation of a task is what is wanted here.
        try:
            await way(call)
        except (asyncio.CancelledError, asyncio.TimeoutError, TimeoutError, Failure):
            self.ends[f"{way.__name__}: cancelled"] += 1
        else:
            self.ends[f"{way.__name__}: completed"] += 1

    @property
    def cancelled(self) -> int:
        return sum(count for end, count in self.ends.items() if end.endswith("cancelled"))


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    threads: int
    descriptors: int

    @classmethod
    def now(cls) -> Held:
        return cls(threading.active_count(), len(list(Path("/proc/self/fd").iterdir())))


async def storm(store: Store, seed: int, cancellations: int) -> None:
    memory, wide = await store.allocate(MB), await store.allocate(LARGE)
    room = store._views.room
    weather = Storm(store, memory, wide, random.Random(seed))

    async def work(until: int) -> None:
        while weather.cancelled < until:
            await weather.one()

    async def blow(until: int) -> Held:
        workers: list[Awaitable[None]] = [work(until) for _ in range(WORKERS)]
        await asyncio.gather(*workers)
        await quiet(store)
        return Held.now()

    before = await blow(cancellations // 5)
    after = await blow(cancellations)
    print(dict(weather.ends), before, after)
    # The lanes may have all their threads now; beside them are the main one and some that look.
    assert after.threads <= sum(lane.limit for lane in store._client._lanes) + 4, (before, after)
    # The engine keeps as many connections to the master as were ever in use at once.
    assert after.descriptors <= before.descriptors + CONNECTIONS, (before, after)
    assert weather.released == weather.lent > cancellations / 50
    gc.collect()
    assert store._views.room == room
    assert (memory._users, wide._users) == (0, 0)
    for key in KEYS:
        await store.remove(key, force=True)
        await store.put(key, b"after")
    assert await store.get_many(KEYS) == [b"after"] * len(KEYS)
    await memory.aclose()
    await wide.aclose()


def blow(address: str, seed: str, cancellations: str) -> None:
    """Cancel thousands of calls of one store, then see that it works and that nothing is left."""

    async def main() -> None:
        sizes: dict[str, Any] = {"global_segment_size": 512 * MB, "local_buffer_size": 16 * MB}
        async with aiomooncake.connect(address, **sizes) as store:
            await storm(store, int(seed), int(cancellations))

    asyncio.run(main())
