"""Scenes of :mod:`test_zero_copy`: each runs in an interpreter of its own."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import Any

import numpy as np

import aiomooncake
from aiomooncake import Store

MB = 1 << 20
VALUE = bytes(range(256)) * 4096


async def connect(address: str) -> Store:
    """Open a store; on a real master without a segment.

    One that was left behind would fail the puts of others for a while.
    """
    segment = 64 * MB if address.startswith("memory:") else 0
    return await aiomooncake.connect(
        address, global_segment_size=segment, local_buffer_size=16 * MB
    )


def views_outlive_the_store(address: str) -> None:
    """What was derived from views is read after the store is closed, and freed at exit."""

    async def main() -> tuple[Any, ...]:
        store = await connect(address)
        await store.upsert("outlives", VALUE)
        kept = await store.view("outlives")
        async with store.view("outlives") as view:
            assert view is not None
            part, array = view[5:9], np.frombuffer(view, np.uint8)
            await store.remove("outlives", force=True)
            await store.aclose()
            assert view == VALUE
        return kept, part, array

    kept, part, array = asyncio.run(main())
    gc.collect()
    assert kept == array.tobytes() == VALUE
    del kept, array
    gc.collect()
    assert part == VALUE[5:9]
    print("fine", flush=True)
    globals()["held until the exit"] = part


def buffers_are_left_behind(address: str) -> None:
    """Buffers, views and the store are dropped as they are, with a call under way."""
    warnings.simplefilter("ignore", ResourceWarning)

    async def main() -> None:
        store = await connect(address)
        buffer = await store.allocate(9 * MB)
        await store.put_from("left", buffer)
        view = await store.view("left")
        await store.remove("left", force=True)
        moving = asyncio.ensure_future(store.put_from("left", buffer))
        await asyncio.sleep(0)
        globals()["held until the exit"] = (store, buffer, view, moving)

    asyncio.run(main())
    print("fine", flush=True)
