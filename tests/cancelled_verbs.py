"""Every verb of a store in each of its ways, and what it may leave behind when it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from aiomooncake import Store
from aiomooncake.buffers import Buffer
from tests.cancelling import How, eventually, quiet

__all__ = ["LARGE", "MB", "SMALL", "VERBS", "Ground", "Verb", "check", "fill", "prepared"]

MB = 1 << 20
SMALL = b"small" * 1000
LARGE = b"large" * (4 * MB)  # in three pieces
KEYS = 600  # more than one turn of the loop moves


@dataclass
class Ground:
    """What the verbs are called on.

    Attributes:
        key: Under which the present run stores.
        buffer: Registered memory, with room for a small value twice.
        wide: Registered memory with room for a large value.
        released: Calls of ``on_release``.
    """

    store: Store
    buffer: Buffer
    wide: Buffer
    key: str = "run"
    released: list[int] = field(default_factory=list)

    def release(self) -> None:
        self.released.append(1)

    def small_items(self, count: int) -> dict[str, Any]:
        return {f"{self.key}-{i}": self.buffer[i : i + 100] for i in range(count)}


Call = Callable[[Ground], Coroutine[Any, Any, Any]]


@dataclass(frozen=True)
class Verb:
    """How a verb is called, and what it leaves when it is not cancelled.

    Attributes:
        call: Calls it.
        answer: What it answers.
        stores: What it stores under the ground's key.
        drains: Whether it is waited for when it is cancelled.
        dummy: How it is cancelled on a dummy client; nothing for what that can't do.
    """

    call: Call
    answer: Any = None
    stores: bytes = b""
    drains: bool = False
    dummy: tuple[How, ...] = ("late", "again")


async def behind(ground: Ground, value: Any) -> None:
    """Store a value when it is its turn, behind another one of the same key."""
    first = asyncio.ensure_future(ground.store.put(ground.key, value))
    try:
        await asyncio.sleep(0)
        await ground.store.put(ground.key, value)
        await first
    finally:
        first.cancel()
        await asyncio.wait({first})


async def viewed(ground: Ground) -> bytes:
    async with ground.store.view("there") as view:
        assert view is not None
        await asyncio.sleep(0)
        return bytes(view)


async def many_viewed(ground: Ground) -> list[Any]:
    async with ground.store.view_many(["there", "absent", "there"]) as views:
        await asyncio.sleep(0)
        return [None if view is None else bytes(view) for view in views]


async def allocated(ground: Ground) -> None:
    async with ground.store.allocate(5000) as buffer:
        await ground.store.put_from(ground.key, buffer)


async def registered(ground: Ground) -> None:
    async with ground.store.register(OWN) as buffer:
        await ground.store.put_from(ground.key, buffer)


async def named(ground: Ground) -> int:
    """Call the binding by address."""
    buffer = ground.buffer
    code: int = await ground.store.engine.put_from(ground.key, buffer.address, 5000)
    return code + int(await ground.store.engine.get_into("there", buffer.address + 5000, 5000))


async def warmed(ground: Ground) -> None:
    await ground.store.warmup()


OWN = bytearray(5000)
_ABSENT_TOO = ["there", "absent", "large"]

VERBS: dict[str, Verb] = {
    "get": Verb(lambda g: g.store.get("there"), SMALL),
    "get of a large value": Verb(lambda g: g.store.get("large"), LARGE),
    "get of a missing key": Verb(lambda g: g.store.get("absent"), None),
    "exists": Verb(lambda g: g.store.exists("there"), True),
    "size": Verb(lambda g: g.store.size("there"), 5000),
    "replicas": Verb(lambda g: g.store.replicas("absent"), (), dummy=()),
    "get_many": Verb(lambda g: g.store.get_many(_ABSENT_TOO), [SMALL, None, LARGE]),
    "exists_many": Verb(
        lambda g: g.store.exists_many(["there"] + [f"absent{i}" for i in range(2500)]),
        [True] + [False] * 2500,
    ),
    "replicas_many": Verb(lambda g: g.store.replicas_many(["absent"]), [()], dummy=()),
    "remove": Verb(lambda g: g.store.remove("absent"), False),
    "remove_many": Verb(lambda g: g.store.remove_many(["absent", "gone"]), [False, False]),
    "remove_by_regex": Verb(lambda g: g.store.remove_by_regex("^absent"), 0),
    "put": Verb(lambda g: g.store.put(g.key, SMALL), stores=SMALL),
    "put of memory that is copied": Verb(
        lambda g: g.store.put(g.key, bytearray(SMALL)), stores=SMALL
    ),
    "put of a large value": Verb(lambda g: g.store.put(g.key, LARGE), stores=LARGE),
    "put of a large value that may change": Verb(
        lambda g: g.store.put(g.key, memoryview(bytearray(LARGE))), stores=LARGE, drains=True
    ),
    "upsert": Verb(lambda g: g.store.upsert(g.key, SMALL), stores=SMALL),
    "put behind another": Verb(lambda g: behind(g, SMALL), stores=SMALL),
    "put of a large value behind another": Verb(lambda g: behind(g, LARGE), stores=LARGE),
    "put_many": Verb(
        lambda g: g.store.put_many({g.key: SMALL, g.key + "2": bytearray(9), g.key + "3": LARGE}),
        stores=SMALL,
    ),
    "put_parts": Verb(lambda g: g.store.put_parts(g.key, SMALL[:9], SMALL[9:]), stores=SMALL),
    "put_parts of large ones": Verb(
        lambda g: g.store.put_parts(g.key, LARGE[:9], LARGE[9:]), stores=LARGE
    ),
    "put_from": Verb(lambda g: g.store.put_from(g.key, g.buffer[:5000]), stores=SMALL, drains=True),
    "put_from in parts": Verb(
        lambda g: g.store.put_from(g.key, [g.buffer[:9], g.buffer[9:5000]]),
        stores=SMALL,
        drains=True,
    ),
    "put_from of a large value": Verb(
        lambda g: g.store.put_from(g.key, g.wide), stores=LARGE, drains=True
    ),
    "put_many_from": Verb(
        lambda g: g.store.put_many_from(
            {g.key: g.buffer[:5000], g.key + "2": g.wide, g.key + "3": [g.buffer[:1], g.wide[:2]]}
        ),
        stores=SMALL,
        drains=True,
    ),
    "put_many_from of many keys": Verb(
        lambda g: g.store.put_many_from({g.key: g.buffer[:5000], **g.small_items(KEYS)}),
        stores=SMALL,
        drains=True,
    ),
    "get_into": Verb(lambda g: g.store.get_into("there", g.buffer[5000:]), 5000, drains=True),
    "get_into in parts": Verb(
        lambda g: g.store.get_into("there", [g.buffer[5000:5009], g.buffer[5009:]]),
        5000,
        drains=True,
    ),
    "get_into of a large value": Verb(
        lambda g: g.store.get_into("large", g.wide), len(LARGE), drains=True
    ),
    "get_into from an offset": Verb(
        lambda g: g.store.get_into("there", g.buffer[5000:], offset=10), 4990, drains=True
    ),
    "get_many_into": Verb(
        lambda g: g.store.get_many_into(
            {"there": g.buffer[5000:], "absent": g.buffer[:1], "large": g.wide}
        ),
        [5000, None, len(LARGE)],
        drains=True,
    ),
    "put_from, released": Verb(
        lambda g: g.store.put_from(g.key, g.buffer[:5000], on_release=g.release), stores=SMALL
    ),
    "put_from of a large value, released": Verb(
        lambda g: g.store.put_from(g.key, g.wide, on_release=g.release), stores=LARGE
    ),
    "put_many_from, released": Verb(
        lambda g: g.store.put_many_from(
            {g.key: g.buffer[:5000], g.key + "2": g.wide, **g.small_items(KEYS)},
            on_release=g.release,
        ),
        stores=SMALL,
    ),
    "get_into, released": Verb(
        lambda g: g.store.get_into("there", g.buffer[5000:], on_release=g.release), 5000
    ),
    "get_into of a large value, released": Verb(
        lambda g: g.store.get_into("large", g.wide, on_release=g.release), len(LARGE)
    ),
    "get_many_into, released": Verb(
        lambda g: g.store.get_many_into(
            {"there": [g.buffer[5000:5001], g.buffer[5001:]], "large": g.wide},
            on_release=g.release,
        ),
        [5000, len(LARGE)],
    ),
    "view": Verb(viewed, SMALL),
    "view_many": Verb(many_viewed, [SMALL, None, SMALL]),
    "allocate": Verb(allocated, stores=bytes(5000), drains=True, dummy=("late",)),
    "register": Verb(registered, stores=bytes(5000), drains=True, dummy=()),
    "a call by address": Verb(named, 5000, stores=SMALL, drains=True),
    "a raw call": Verb(lambda g: g.store.engine.is_exist("there"), 1),
    "warmup": Verb(warmed, dummy=()),  # which only takes longer there
}


async def prepared(store: Store) -> Ground:
    await store.remove_all(force=True)
    buffer = await store.allocate(10_000)
    wide = await store.allocate(len(LARGE))
    assert buffer.view is not None
    assert wide.view is not None
    await store.put("there", SMALL)
    await store.put("large", LARGE)
    return Ground(store, buffer, wide)


def fill(ground: Ground) -> None:
    assert ground.buffer.view is not None
    assert ground.wide.view is not None
    ground.buffer.view[:5000] = SMALL
    ground.wide.view[:] = LARGE


async def check(ground: Ground, verb: Verb, outcome: Any, *, told: int, room: int) -> None:
    """Check what a call that was cancelled, or came too soon for that, has left behind."""
    store = ground.store
    await quiet(store)
    if not isinstance(outcome, asyncio.CancelledError) and not isinstance(outcome, dict):
        assert outcome == verb.answer
    assert len(ground.released) == told, f"{len(ground.released)} releases, not {told}"
    assert (ground.buffer._users, ground.wide._users) == (0, 0)
    kept = store._client._kept
    assert sum(isinstance(thing, Buffer) for thing in kept.values()) == 2, kept
    # The thread that brought a view may not have let go of it yet.
    await eventually(lambda: store._views.room == room, lambda: f"room {store._views.room}")
    assert await store.get("there") == SMALL
    if verb.stores:
        # It is there as a whole, or can be stored.
        await store.put(ground.key, b"another")
        assert await store.get(ground.key) in (verb.stores, b"another")
        await store.remove_by_regex("^run", force=True)
