"""Seeing what a store does: snapshots for programs."""

from __future__ import annotations

from aiomooncake.observe.stats import Health, StoreStats

__all__ = ["Health", "StoreStats"]
