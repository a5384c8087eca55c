"""Seeing what a store does: snapshots for programs."""

from __future__ import annotations

from aiomooncake.observe.stats import Health, HealthState, StoreStats

__all__ = ["Health", "HealthState", "StoreStats"]
