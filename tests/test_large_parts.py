"""Values in several pieces of memory travel in short calls too, when they are large."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from aiomooncake import Store
from aiomooncake.engine.inmemory import InMemoryEngine, InMemoryStore
from aiomooncake.moves import PIECE
from tests.conftest import Hold

MB = 1 << 20
RANGES = "batch_put_from_multi_buffer_ranges"


def content(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


LAYOUTS: dict[str, list[bytes]] = {
    "a head": [b"head", content(20 * MB + 5)],
    "a tail": [content(9 * MB), b"tail"],
    "around it": [content(MB), content(17 * MB), content(3 * MB - 1), b"end"],
    "cut at the end of a piece": [b"head", content(2 * PIECE - 4)],
    "two large ones": [content(9 * MB), content(9 * MB)],
    "many": [content(9 * MB), *[b"x"] * 1100],
}


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_parts_come_back_as_one_value(store: Store, layout: str) -> None:
    key, parts = uuid.uuid4().hex, LAYOUTS[layout]
    await store.put_parts(key, *parts)
    assert await store.get(key) == b"".join(parts)
    await store.remove(key, force=True)


@pytest.mark.parametrize("store", ["memory"], indirect=True)
async def test_no_call_moves_more_than_a_piece(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []
    native = getattr(InMemoryStore, RANGES)

    def call(self: InMemoryStore, keys: Any, ptrs: Any, sizes: Any, offsets: Any) -> Any:
        calls.append(tuple(sizes[0]))
        return native(self, keys, ptrs, sizes, offsets)

    monkeypatch.setattr(InMemoryStore, RANGES, call)
    key = uuid.uuid4().hex
    await store.put_parts(key, b"head", content(20 * MB))
    assert calls == [(4, PIECE - 4), (PIECE,), (4 * MB + 4,)]
    await store.remove(key, force=True)


@pytest.mark.parametrize("store", ["memory"], indirect=True)
async def test_a_put_that_is_cancelled_between_two_pieces_leaves_nothing(
    store: Store, hold: Hold
) -> None:
    fault = InMemoryEngine.named("shared").fault(RANGES, hold=hold, times=1)
    key = uuid.uuid4().hex
    putting = asyncio.ensure_future(store.put_parts(key, b"head", bytearray(20 * MB)))
    await hold()
    putting.cancel()
    for _ in range(5):  # so that the call hears of it
        await asyncio.sleep(0)
    hold.set()
    with pytest.raises(asyncio.CancelledError):
        await putting
    fault.remove()
    assert not await store.exists(key)
    await store.put_parts(key, b"head", content(20 * MB))
    assert await store.get(key) == b"head" + content(20 * MB)
    await store.remove(key, force=True)
