"""Scenes of :mod:`tests.test_trouble_reports`: each runs in an interpreter of its own."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings

import aiomooncake
from aiomooncake import ReplicateConfig, Store
from tests.adversity.call_scenes import settled
from tests.adversity.exit_scenes import open_store


def on(store: Store) -> ReplicateConfig:
    """Store it in this store's own memory: others on the master may be closing."""
    return ReplicateConfig(preferred_segments=[store.hostname])


def other_module_first(address: str) -> None:
    """kvcache-ai/Mooncake#1426: ``mooncake.engine`` before ``mooncake.store`` was a SIGSEGV.

    In SGLang the transfer engine is loaded by another feature, in a thread, before the store.
    """

    def load() -> None:
        import mooncake.engine

        assert mooncake.engine.TransferEngine()

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()

    async def main() -> None:
        async with await open_store(address) as store:
            await store.put("1426", b"value", config=on(store))
            assert await store.get("1426") == b"value"

    asyncio.run(main())


def buffer_after_close(address: str) -> None:
    """kvcache-ai/Mooncake#639: a buffer that was let go of after ``close()`` was a SIGSEGV."""

    async def main() -> None:
        store = await open_store(address)
        await store.put("639", b"v" * 100_000, config=on(store))
        handle = await store.engine.get_buffer("639")
        view = store.view("639")
        async with view as seen:
            assert seen is not None
            kept = seen[10:20]
            buffer = await store.allocate(4096)
            await store.aclose()
            assert bytes(kept) == b"v" * 10
        assert handle is not None
        assert bytes(memoryview(handle)[:3]) == b"vvv"
        del handle
        gc.collect()
        assert bytes(kept) == b"v" * 10
        await buffer.aclose()

    asyncio.run(main())


def never_closed(address: str) -> None:
    """vllm-project/vllm#45206: connectors came and went, and none of their stores was closed."""

    async def main() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for turn in range(3):
                store = await aiomooncake.connect(address, global_segment_size="16mb")
                await store.put(f"45206-{turn}", b"value", config=on(store))
                del store
                gc.collect()
        assert [each.category for each in caught] == [ResourceWarning] * 3
        await settled()
        left = await aiomooncake.connect(address, global_segment_size="16mb")
        globals()["left"] = left  # to the end of the process

    asyncio.run(main())
