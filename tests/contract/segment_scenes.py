"""A store reads what lies in a segment of its own while that is taken back; a program."""

from __future__ import annotations

import asyncio
import sys

import aiomooncake
from aiomooncake import ReplicateConfig
from tests.conftest import MB


async def main(address: str) -> None:
    async with (
        aiomooncake.connect(address, global_segment_size=0, local_buffer_size=0) as store,
        store.allocate(32 * MB) as buffer,
        store.allocate(32 * MB) as back,
    ):

        async def read(key: str) -> int:
            reads = 0
            # Whole, as a copy within the process: pieces are too short to be hit.
            while await store.engine.get_into(key, back.address, back.nbytes) > 0:
                reads += 1
            return reads

        segment = await store.mount_segment(64 * MB)
        there = ReplicateConfig(preferred_segment=segment.name)
        await store.put_from("there", buffer, config=there)
        reading = [asyncio.ensure_future(read("there")) for _ in range(4)]
        await asyncio.sleep(0)
        await segment.aclose()
        assert min(await asyncio.gather(*reading)) > 1


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
