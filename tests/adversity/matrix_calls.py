"""How each verb of a store is called by the adversity matrix, and what it answers on a good day.

A verb has keys of its own in each column, so that verbs don't disturb each other; a value says
whose it is, so that a wrong one is noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aiomooncake import ReplicateConfig, Store, WarmupPolicy
from aiomooncake.buffers import Buffer
from tests.adversity.matrix import GROUPS

__all__ = ["CALLS", "LARGE", "SIZE", "Call", "Subject", "value_of"]

SIZE: Final = 4096
LARGE: Final = 9 << 20
"""Bytes of a value that travels in pieces."""


def value_of(key: str, nbytes: int = SIZE) -> bytes:
    """Make the value of a key; no other key has it."""
    mark = f"<{key}>".encode()
    return (mark * (nbytes // len(mark) + 1))[:nbytes]


@dataclass(frozen=True)
class Subject:
    """What a call works with.

    Attributes:
        store: The store.
        verb: The verb's name.
        column: The column's name.
        memory: Registered memory of this call's own, of twice ``SIZE``.
        config: Where values are to be placed.
    """

    store: Store
    verb: str
    column: str
    memory: Buffer
    start: int
    config: ReplicateConfig | None = None

    @property
    def prefix(self) -> str:
        """What the verb's keys begin with."""
        return f"{self.column}/{self.verb}/"

    @property
    def keys(self) -> list[str]:
        """The verb's keys."""
        return [self.prefix + "a", self.prefix + "b"]

    @property
    def key(self) -> str:
        """The first one."""
        return self.keys[0]

    @property
    def values(self) -> list[bytes]:
        """Their values."""
        return [value_of(key) for key in self.keys]

    @property
    def value(self) -> bytes:
        """The first one."""
        return self.values[0]

    @property
    def new(self) -> dict[str, bytes]:
        """What a verb that replaces values stores."""
        return {key: value_of("new " + key) for key in self.keys}

    def place(self, number: int) -> Any:
        """Return the memory for the value of one key."""
        start = self.start + number * SIZE
        return self.memory[start : start + SIZE]

    def seen(self, number: int) -> bytes:
        """Return what is in the memory for one key."""
        assert self.memory.view is not None
        start = self.start + number * SIZE
        return bytes(self.memory.view[start : start + SIZE])

    def fill(self, values: list[bytes]) -> None:
        """Fill the memory."""
        assert self.memory.view is not None
        for number, value in enumerate(values):
            start = self.start + number * SIZE
            self.memory.view[start : start + SIZE] = value


Answer = Callable[[Subject], object]
_NEVER: Final[object] = object()


@dataclass(frozen=True)
class Call:
    """One verb.

    Attributes:
        make: Makes the call.
        usual: What it answers on a good day.
        miss: What it answers when its keys are not there.
        stored: What is stored for it beforehand.
        writes: What is there afterwards, when it said that it had gone well; None for a key that
            is gone.
    """

    make: Callable[[Subject], Awaitable[object]]
    usual: Answer
    miss: Answer = lambda _: _NEVER
    stored: Callable[[Subject], Mapping[str, bytes]] = lambda _: {}
    writes: Callable[[Subject], Mapping[str, bytes | None]] = lambda _: {}


def _pair(at: Subject) -> Mapping[str, bytes]:
    return dict(zip(at.keys, at.values, strict=True))


def _one(at: Subject) -> Mapping[str, bytes]:
    return {at.key: at.value}


def _large(at: Subject) -> Mapping[str, bytes]:
    return {at.key: value_of(at.key, LARGE)}


def _no_pair(at: Subject) -> Mapping[str, None]:
    return dict.fromkeys(at.keys)


async def _view(at: Subject) -> bytes | None:
    async with at.store.view(at.key) as view:
        return None if view is None else bytes(view)


async def _view_many(at: Subject) -> list[bytes | None]:
    async with at.store.view_many(at.keys) as views:
        return [None if view is None else bytes(view) for view in views]


async def _get_into(at: Subject) -> bytes | None:
    nbytes = await at.store.get_into(at.key, at.place(0))
    return None if nbytes is None else at.seen(0)[:nbytes]


async def _get_many_into(at: Subject) -> list[bytes | None]:
    sizes = await at.store.get_many_into({key: at.place(i) for i, key in enumerate(at.keys)})
    return [None if size is None else at.seen(i)[:size] for i, size in enumerate(sizes)]


async def _get_session(at: Subject) -> bytes | None:
    async with at.store.get_session([at.key]) as session:
        nbytes = await session.read_into(at.key, 0, at.place(0))
    return None if nbytes is None else at.seen(0)[:nbytes]


async def _put_session(at: Subject) -> None:
    at.fill([at.value])
    async with at.store.put_session({at.key: SIZE}, config=at.config) as session:
        await session.write(at.key, 0, at.place(0))


async def _put_from(at: Subject) -> None:
    at.fill([at.value])
    await at.store.put_from(at.key, at.place(0), config=at.config)


async def _put_many_from(at: Subject) -> object:
    at.fill(at.values)
    places = {key: at.place(i) for i, key in enumerate(at.keys)}
    return await at.store.put_many_from(places, config=at.config)


async def _put_parts(at: Subject) -> None:
    head, tail = at.value[:100], bytearray(at.value[100:])
    await at.store.put_parts(at.key, head, tail, config=at.config)


async def _replicas(at: Subject) -> list[int | None]:
    return [replica.size for replica in await at.store.replicas(at.key)]


async def _replicas_many(at: Subject) -> list[list[int | None]]:
    answers = await at.store.replicas_many(at.keys)
    return [[replica.size for replica in answer] for answer in answers]


async def _remove_all(at: Subject) -> bool:
    return await at.store.remove_all() > 0


async def _allocate(at: Subject) -> bool:
    async with at.store.allocate(SIZE) as buffer:
        return buffer.registered


async def _register(at: Subject) -> bool:
    async with at.store.register(bytearray(SIZE)) as buffer:
        return buffer.registered


async def _warmup(at: Subject) -> bool:
    # A restarted master has room when its clients have mounted their memory again.
    timeout = 10.0 if at.column == "restarted" else 1.5
    policy = WarmupPolicy(timeout=timeout, attempt_timeout=1.5)
    return (await at.store.warmup(policy)).tries > 0


async def _health(at: Subject) -> bool:
    return bool(at.store.health().detail)


async def _stats(at: Subject) -> bool:
    return at.store.stats().calls > 0


async def _blocking(at: Subject) -> int:
    return await asyncio.to_thread(at.store.blocking.is_exist, at.key)


_OK: Answer = lambda _: True  # noqa: E731
_NONE: Answer = lambda _: None  # noqa: E731
_BOTH_NONE: Answer = lambda at: dict.fromkeys(at.keys)  # noqa: E731
_NEITHER: Answer = lambda _: [None, None]  # noqa: E731

CALLS: Final[Mapping[str, Call]] = {
    "get": Call(lambda at: at.store.get(at.key), lambda at: at.value, _NONE, _one),
    "get (9 MB)": Call(
        lambda at: at.store.get(at.key), lambda at: value_of(at.key, LARGE), _NONE, _large
    ),
    "get_into": Call(_get_into, lambda at: at.value, _NONE, _one),
    "view": Call(_view, lambda at: at.value, _NONE, _one),
    "get_session": Call(_get_session, lambda at: at.value, _NONE, _one),
    "get_many": Call(lambda at: at.store.get_many(at.keys), lambda at: at.values, _NEITHER, _pair),
    "get_many_into": Call(_get_many_into, lambda at: at.values, _NEITHER, _pair),
    "view_many": Call(_view_many, lambda at: at.values, _NEITHER, _pair),
    "exists": Call(lambda at: at.store.exists(at.key), _OK, lambda _: False, _one),
    "size": Call(lambda at: at.store.size(at.key), lambda _: SIZE, _NONE, _one),
    "replicas": Call(_replicas, lambda _: [SIZE], lambda _: [], _one),
    "exists_many": Call(
        lambda at: at.store.exists_many(at.keys),
        lambda _: [True, True],
        lambda _: [False, False],
        _pair,
    ),
    "replicas_many": Call(_replicas_many, lambda _: [[SIZE], [SIZE]], lambda _: [[], []], _pair),
    "put": Call(lambda at: at.store.put(at.key, at.value, config=at.config), _NONE, writes=_one),
    "put (9 MB)": Call(
        lambda at: at.store.put(at.key, value_of(at.key, LARGE), config=at.config),
        _NONE,
        writes=_large,
    ),
    "put_parts": Call(_put_parts, _NONE, writes=_one),
    "put_from": Call(_put_from, _NONE, writes=_one),
    "put_session": Call(_put_session, _NONE, writes=_one),
    "put_many": Call(
        lambda at: at.store.put_many(_pair(at), config=at.config), _BOTH_NONE, writes=_pair
    ),
    "put_many_from": Call(_put_many_from, _BOTH_NONE, writes=_pair),
    "upsert": Call(
        lambda at: at.store.upsert(at.key, at.new[at.key], config=at.config),
        _NONE,
        stored=_one,
        writes=lambda at: {at.key: at.new[at.key]},
    ),
    "warmup": Call(_warmup, _OK),
    "remove": Call(
        lambda at: at.store.remove(at.key),
        _OK,
        lambda _: False,
        _one,
        lambda at: {at.key: None},
    ),
    "remove_many": Call(
        lambda at: at.store.remove_many(at.keys),
        lambda _: [True, True],
        lambda _: [False, False],
        _pair,
        _no_pair,
    ),
    "remove_by_regex": Call(
        lambda at: at.store.remove_by_regex(f"^{at.prefix}"),
        lambda _: 2,
        lambda _: 0,
        _pair,
        _no_pair,
    ),
    "remove_all": Call(_remove_all, _OK, lambda _: False, _pair, _no_pair),
    "allocate": Call(_allocate, _OK),
    "register": Call(_register, _OK),
    "health": Call(_health, _OK),
    "stats": Call(_stats, _OK),
    "engine.is_exist": Call(
        lambda at: at.store.engine.is_exist(at.key), lambda _: 1, lambda _: 0, _one
    ),
    "blocking.is_exist": Call(_blocking, lambda _: 1, lambda _: 0, _one),
}

assert set(CALLS) | {"aclose"} == {verb for verbs in GROUPS.values() for verb in verbs}
