"""A job for the benchmark's workers, which import it by name."""

from __future__ import annotations

import asyncio

from benchmarks.process import Job


class Echo(Job):
    """What the tests let a worker do."""

    async def echo(self, text: str) -> str:
        return text

    async def fail(self) -> None:
        raise ValueError("no luck today")

    async def hang(self) -> None:
        async with self.beating():
            await asyncio.Event().wait()

    async def leave(self) -> None:
        raise SystemExit(3)
