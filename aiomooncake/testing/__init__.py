"""Helpers for testing programs that use Mooncake, and aiomooncake itself."""

from __future__ import annotations

from aiomooncake.testing.stall import LoopStallProbe, Stall

__all__ = ["LoopStallProbe", "Stall"]
