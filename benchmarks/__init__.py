"""Benchmarks of aiomooncake against the other ways to use Mooncake from asyncio."""

from __future__ import annotations
