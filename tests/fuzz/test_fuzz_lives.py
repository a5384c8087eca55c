"""Stores that are opened, used, closed and opened again in any order: right, or refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiomooncake import (
    InternalError,
    LocalCluster,
    MooncakeError,
    Store,
    StoreClosedError,
    TaintedStoreError,
    WarmupPolicy,
    connect,
)
from aiomooncake.buffers import Buffer
from aiomooncake.engine.inmemory import InMemoryEngine
from tests.conftest import Closing
from tests.fuzz.strategies import bounded, examples, only_typed_errors

MB = 1 << 20
PLACES = 3
SIZES: dict[str, Any] = {"global_segment_size": 16 * MB, "local_buffer_size": MB}

VERBS: dict[str, Callable[[Store], Awaitable[Any]]] = {
    "get": lambda store: store.get("key"),
    "put": lambda store: store.put("key", b"value"),
    "upsert": lambda store: store.upsert("key", bytes(200_000)),
    "remove": lambda store: store.remove("key", force=True),
    "get_many": lambda store: store.get_many(["key", "other", "key"]),
    "put_many": lambda store: store.put_many({"key": b"v", "other": bytes(300_000)}),
    "exists": lambda store: store.exists("key"),
    "size": lambda store: store.size("key"),
    "remove_all": lambda store: store.remove_all(force=True),
    "raw": lambda store: store.engine.is_exist("key"),
    "warmup": lambda store: store.warmup(WarmupPolicy(timeout=0.3)),
}
steps = st.one_of(
    st.tuples(st.just("open"), st.integers(0, PLACES - 1)),
    st.tuples(st.just("verb"), st.integers(0, PLACES - 1), st.sampled_from(sorted(VERBS))),
    st.tuples(st.just("verb"), st.integers(0, PLACES - 1), st.sampled_from(sorted(VERBS))),
    st.tuples(
        st.just("cancel"),
        st.integers(0, PLACES - 1),
        st.sampled_from(sorted(VERBS)),
        st.integers(0, 4),
    ),
    st.tuples(st.just("together"), st.integers(0, PLACES - 1)),
    st.tuples(st.just("close"), st.integers(0, PLACES - 1)),
    st.tuples(st.just("close under calls"), st.integers(0, PLACES - 1)),
    st.tuples(st.just("allocate"), st.integers(0, PLACES - 1)),
    st.tuples(st.just("use memory"), st.integers(0, PLACES - 1)),
    st.tuples(st.just("free"), st.integers(0, PLACES - 1)),
    st.tuples(st.just("view"), st.integers(0, PLACES - 1)),
    st.tuples(st.just("thread"), st.integers(0, PLACES - 1)),
    st.tuples(st.just("state"), st.integers(0, PLACES - 1)),
    st.tuples(st.just("another loop"), st.integers(0, PLACES - 1)),
    st.tuples(st.just("outage"), st.just(0)),
)


@dataclass
class Lives:
    """A few places for stores, one after the other in each.

    Attributes:
        connect: Opens a store.
        engine: The engine in memory, if it is that one.
        stores: What is in each place now.
        buffers: Memory of that store.
        opened: All stores that there ever were.
    """

    connect: Callable[[], Awaitable[Store]]
    engine: InMemoryEngine | None = None
    stores: list[Store | None] = field(default_factory=lambda: [None] * PLACES)
    buffers: list[Buffer | None] = field(default_factory=lambda: [None] * PLACES)
    opened: list[Store] = field(default_factory=list)

    async def play(self, some: list[tuple[Any, ...]]) -> None:
        for step, place, *more in some:
            store = self.stores[place]
            if step in ("open", "outage"):
                await bounded(getattr(self, step)(place))
            elif store is not None:
                closed = store.closed
                try:
                    await bounded(getattr(self, step.replace(" ", "_"))(store, place, *more))
                    assert not closed or step in ("close", "state", "free"), step
                except StoreClosedError:
                    assert store.closed
                except (InternalError, TaintedStoreError):
                    raise
                except MooncakeError:
                    pass  # an outage; a peer that has just closed; another loop
        if self.engine is not None:
            self.engine.up()

    async def open(self, place: int) -> None:
        with only_typed_errors():  # in an outage it is refused
            store = self.stores[place] = await self.connect()
            self.opened.append(store)
            self.buffers[place] = None

    async def outage(self, _: int) -> None:
        if self.engine is not None:
            await asyncio.sleep(0)
            (self.engine.down if self.engine.reachable else self.engine.up)()

    async def verb(self, store: Store, _: int, verb: str) -> None:
        await VERBS[verb](store)

    async def cancel(self, store: Store, _: int, verb: str, turns: int) -> None:
        task = asyncio.ensure_future(VERBS[verb](store))
        for _turn in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if store.closed:
            raise StoreClosedError("it may have been cancelled before it was refused")

    async def together(self, store: Store, _: int) -> None:
        for answer in await asyncio.gather(
            *(verb(store) for name, verb in VERBS.items() if name != "warmup"),
            return_exceptions=True,
        ):
            if isinstance(answer, BaseException):
                raise answer

    async def close(self, store: Store, _: int) -> None:
        await asyncio.gather(store.aclose(), store.aclose())
        assert store.closed

    async def close_under_calls(self, store: Store, place: int) -> None:
        calls = asyncio.ensure_future(self.together(store, place))
        await asyncio.sleep(0)
        await store.aclose()
        await calls

    async def allocate(self, store: Store, place: int) -> None:
        self.buffers[place] = await store.allocate(4096)

    async def use_memory(self, store: Store, place: int) -> None:
        buffer = self.buffers[place] or await store.allocate(4096)
        self.buffers[place] = buffer
        await store.put_from("key", buffer[0:100])
        await store.get_into("key", buffer[0:1], offset=0)

    async def free(self, _store: Store, place: int) -> None:
        buffer, self.buffers[place] = self.buffers[place], None
        if buffer is not None:
            await asyncio.gather(buffer.aclose(), buffer.aclose())

    async def view(self, store: Store, _: int) -> None:
        async with store.view("key") as view:
            assert view is None or len(bytes(view)) == view.nbytes

    async def thread(self, store: Store, _: int) -> None:
        await asyncio.to_thread(store.blocking.is_exist, "key")

    async def state(self, store: Store, _: int) -> None:
        assert store.health().state
        assert store.stats().abandoned >= 0
        assert repr(store)

    async def another_loop(self, store: Store, _: int) -> None:
        await store.exists("key")  # now it belongs to this one
        await asyncio.to_thread(lambda: asyncio.run(store.get("key")))
        raise AssertionError("two loops at once")


def test_lives_on_the_engine_in_memory() -> None:
    @examples(150)
    @given(st.lists(steps, min_size=5, max_size=25))
    def any_life(some: list[tuple[Any, ...]]) -> None:
        engine = InMemoryEngine("lives", rpc_timeout=0.2)

        async def life() -> None:
            lives = Lives(lambda: _open("memory://lives", engine=engine), engine)
            try:
                await lives.play([("open", 0), *some])
            finally:
                await asyncio.gather(*(store.aclose() for store in lives.opened))

        asyncio.run(life())

    any_life()


@pytest.mark.timeout(90)
def test_lives_on_the_real_engine(cluster: LocalCluster, closing: Closing) -> None:
    """All of them side by side in one loop: each close takes a second or two."""
    found: list[list[tuple[Any, ...]]] = []

    @examples(10)
    @given(st.lists(steps, min_size=8, max_size=16))
    def draw_lives(some: list[tuple[Any, ...]]) -> None:
        found.append(some)

    async def life(some: list[tuple[Any, ...]]) -> None:
        lives = Lives(lambda: _open(cluster.address))
        try:
            await lives.play([("open", 0), *some])
        finally:
            for store in lives.opened:
                closing.add(store._client)

    async def all_of_them() -> None:
        await asyncio.gather(*map(life, found))

    draw_lives()
    asyncio.run(all_of_them())


async def _open(target: str, **options: Any) -> Store:
    return await connect(target, **SIZES, **options)
