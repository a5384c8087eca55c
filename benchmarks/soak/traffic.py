"""The traffic of a soak: many tasks that call all verbs, and check every value that they read."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from aiomooncake import MooncakeError, Store
from benchmarks.soak.values import Ledger, WrongValueError

__all__ = ["Traffic"]

_KEYS: Final = 300
_LARGE_KEYS: Final = 4
_SIZES: Final = (100, 2_000, 20_000, 64_000)
_LARGE: Final = 3_000_000
_ROOM: Final = 1 << 16
"""Bytes of registered memory for one value; no small value is larger."""

_MANY: Final = 8
_CANCELLED: Final = 0.1
_PAUSE: Final = 0.04
_OFF_LOOP: Final = 1 << 18
"""Bytes from which on a value is made and checked in a thread."""

Verb = Callable[["_Worker"], Awaitable[None]]


class Traffic:
    """Runs tasks that call the store's verbs, and counts what became of it.

    Args:
        store: The store.
        seed: What decides which task does what.
        tasks: How many tasks there are.

    Attributes:
        calls: Calls by verb.
        errors: Errors by class; that of each key, where there are many.
        wrong: What was read that must not be, and what was raised that is no `MooncakeError`.
        cancelled: Calls that were cancelled.
        values: Values that were read and checked.
        longest: Seconds of the longest call, and its verb.
    """

    def __init__(self, store: Store, seed: int, tasks: int) -> None:
        self.store = store
        self.ledger = Ledger(seed)
        self.calls: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.cancelled = 0
        self.values = 0
        self.longest = (0.0, "")
        self._workers = [_Worker(self, random.Random(f"{seed} {i}")) for i in range(tasks)]

    async def run(self, seconds: float) -> None:
        """Go on for so long; no call is under way when it returns."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(worker.run(end) for worker in self._workers))

    async def check(self, key: str, value: bytes | memoryview | None) -> None:
        """Check a value that was read; None is a miss, which proves nothing here."""
        if value is None:
            return
        self.values += 1
        if len(value) >= _OFF_LOOP:
            await asyncio.to_thread(self.ledger.check, key, value)
        else:
            self.ledger.check(key, value)

    async def new(self, key: str, nbytes: int) -> bytes:
        """Make a value to be stored."""
        if nbytes >= _OFF_LOOP:
            return await asyncio.to_thread(self.ledger.new, key, nbytes)
        return self.ledger.new(key, nbytes)


class _Worker:
    """One task: its random numbers and its memory."""

    def __init__(self, traffic: Traffic, rng: random.Random) -> None:
        self.traffic = traffic
        self.store = traffic.store
        self.rng = rng

    async def run(self, end: float) -> None:
        verbs, weights = list(_VERBS), list(_VERBS.values())
        async with self.store.allocate(_MANY * _ROOM) as self.buffer:
            while time.monotonic() < end:
                (verb,) = self.rng.choices(verbs, weights)
                await self._call(verb)
                await asyncio.sleep(self.rng.uniform(0, _PAUSE))

    async def _call(self, verb: Verb) -> None:
        traffic, name = self.traffic, verb.__name__
        traffic.calls[name] += 1
        began = time.monotonic()
        task = asyncio.ensure_future(verb(self))
        if self.rng.random() < _CANCELLED:
            await asyncio.wait([task], timeout=self.rng.uniform(0, 0.02))
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            traffic.cancelled += 1
        except WrongValueError as error:
            traffic.wrong.append(f"{name}: {error}")
        except MooncakeError as error:
            traffic.errors[type(error).__name__] += 1
        except Exception as error:  # noqa: BLE001  # that is what is looked for
            traffic.wrong.append(f"{name}: {error!r}")
        traffic.longest = max(traffic.longest, (time.monotonic() - began, name))

    @property
    def key(self) -> str:
        return f"soak{self.rng.randrange(_KEYS)}"

    @property
    def keys(self) -> list[str]:
        return list({self.key for _ in range(self.rng.randint(1, _MANY))})

    async def value(self, key: str) -> bytes:
        return await self.traffic.new(key, self.rng.choice(_SIZES))

    async def values(self) -> dict[str, bytes]:
        return {key: await self.value(key) for key in self.keys}

    def count(self, answers: Iterable[object]) -> None:
        """Count the errors among the answers of many keys."""
        for answer in answers:
            if isinstance(answer, MooncakeError):
                self.traffic.errors[type(answer).__name__] += 1

    async def check(self, keys: Sequence[str], answers: Sequence[Any]) -> None:
        self.count(answers)
        for key, answer in zip(keys, answers, strict=True):
            if not isinstance(answer, MooncakeError):
                await self.traffic.check(key, answer)

    def places(self, count: int) -> list[Any]:
        return [self.buffer[_ROOM * i : _ROOM * (i + 1)] for i in range(count)]

    def seen(self, place: int, nbytes: int | None) -> memoryview | None:
        assert self.buffer.view is not None
        return None if nbytes is None else self.buffer.view[_ROOM * place :][:nbytes]

    def fill(self, values: Mapping[str, bytes]) -> dict[str, Any]:
        assert self.buffer.view is not None
        for i, value in enumerate(values.values()):
            self.buffer.view[_ROOM * i :][: len(value)] = value
        return {
            key: self.buffer[_ROOM * i : _ROOM * i + len(value)]
            for i, (key, value) in enumerate(values.items())
        }


# --- the verbs --------------------------------------------------------------------------------


async def get(on: _Worker) -> None:
    key = on.key
    await on.traffic.check(key, await on.store.get(key))


async def get_many(on: _Worker) -> None:
    keys = on.keys
    await on.check(keys, await on.store.get_many(keys, return_exceptions=True))


async def get_into(on: _Worker) -> None:
    key = on.key
    nbytes = await on.store.get_into(key, on.places(1)[0])
    await on.traffic.check(key, on.seen(0, nbytes))


async def get_many_into(on: _Worker) -> None:
    keys = on.keys
    places = dict(zip(keys, on.places(len(keys)), strict=True))
    sizes = await on.store.get_many_into(places, return_exceptions=True)
    seen = [
        size if isinstance(size, MooncakeError) else on.seen(i, size)
        for i, size in enumerate(sizes)
    ]
    await on.check(keys, seen)


async def get_in_pieces(on: _Worker) -> None:
    key, (whole, *_) = on.key, on.places(1)
    nbytes = await on.store.get_into(key, [whole[:1000], whole[1000:]])
    await on.traffic.check(key, on.seen(0, nbytes))


async def get_large(on: _Worker) -> None:
    key = f"large{on.rng.randrange(_LARGE_KEYS)}"
    await on.traffic.check(key, await on.store.get(key))


async def view(on: _Worker) -> None:
    key = on.key
    async with on.store.view(key) as seen:
        await on.traffic.check(key, seen)
        await asyncio.sleep(on.rng.uniform(0, _PAUSE))
        await on.traffic.check(key, seen)


async def view_many(on: _Worker) -> None:
    keys = on.keys
    async with on.store.view_many(keys) as seen:
        await on.check(keys, seen)


async def put(on: _Worker) -> None:
    key = on.key
    await on.store.put(key, await on.value(key))


async def put_many(on: _Worker) -> None:
    answers = await on.store.put_many(await on.values(), return_exceptions=True)
    on.count(answers.values())


async def put_from(on: _Worker) -> None:
    key = on.key
    (place,) = on.fill({key: await on.value(key)}).values()
    await on.store.put_from(key, place)


async def put_many_from(on: _Worker) -> None:
    places = on.fill(await on.values())
    on.count((await on.store.put_many_from(places, return_exceptions=True)).values())


async def put_parts(on: _Worker) -> None:
    key = on.key
    value = await on.value(key)
    await on.store.put_parts(key, value[:10], bytearray(value[10:50]), memoryview(value)[50:])


async def put_large(on: _Worker) -> None:
    key = f"large{on.rng.randrange(_LARGE_KEYS)}"
    await on.store.put(key, await on.traffic.new(key, _LARGE))


async def upsert(on: _Worker) -> None:
    key = on.key
    await on.store.upsert(key, await on.value(key))


async def remove(on: _Worker) -> None:
    await on.store.remove(on.key)


async def remove_many(on: _Worker) -> None:
    on.count(await on.store.remove_many(on.keys, return_exceptions=True))


async def ask(on: _Worker) -> None:
    store = on.store
    ends = await asyncio.gather(
        store.exists(on.key),
        store.size(on.key),
        store.replicas(on.key),
        store.exists_many(on.keys),
        store.engine.is_exist(on.key),
        return_exceptions=True,
    )
    on.count(ends)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, MooncakeError):
            raise end


async def allocate(on: _Worker) -> None:
    async with on.store.allocate(_ROOM) as buffer:
        key = on.key
        nbytes = await on.store.get_into(key, buffer)
        assert buffer.view is not None
        await on.traffic.check(key, None if nbytes is None else buffer.view[:nbytes])


_VERBS: Mapping[Verb, int] = {
    get: 20,
    get_many: 8,
    get_into: 6,
    get_many_into: 6,
    get_in_pieces: 3,
    get_large: 1,
    view: 4,
    view_many: 4,
    put: 20,
    put_many: 6,
    put_from: 6,
    put_many_from: 6,
    put_parts: 3,
    put_large: 1,
    upsert: 6,
    remove: 4,
    remove_many: 3,
    ask: 8,
    allocate: 1,
}
