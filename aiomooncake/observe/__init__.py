"""Seeing what a store does: snapshots for programs."""

from __future__ import annotations

from aiomooncake.observe.stats import (
    Distribution,
    Health,
    HealthState,
    StoreStats,
    VerbStats,
    WarmupStats,
)

__all__ = ["Distribution", "Health", "HealthState", "StoreStats", "VerbStats", "WarmupStats"]
