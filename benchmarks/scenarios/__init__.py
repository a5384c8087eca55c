"""All scenarios, in the order in which they run: one module for those of a kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.scenarios import (
    blocks,
    connecting,
    large,
    profile,
    ranks,
    sizes,
    stuck,
    traffic,
)

if TYPE_CHECKING:
    from benchmarks.bench import Group

__all__ = ["GROUPS"]

GROUPS: tuple[Group, ...] = (
    *connecting.GROUPS,
    *ranks.GROUPS,
    *large.GROUPS,
    *stuck.GROUPS,
    *blocks.GROUPS,
    *sizes.GROUPS,
    *traffic.GROUPS,
    *profile.GROUPS,
)
