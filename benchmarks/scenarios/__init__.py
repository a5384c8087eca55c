"""All scenarios, in the order in which they run: one module for those of a kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.scenarios import (
    blocks,
    compat,
    connecting,
    gateway,
    large,
    lmcache,
    profile,
    ranks,
    sglang,
    sizes,
    stuck,
    tensors,
    traffic,
    vllm,
)

if TYPE_CHECKING:
    from benchmarks.bench import Group

__all__ = ["GROUPS"]

GROUPS: tuple[Group, ...] = (
    *connecting.GROUPS,
    *ranks.GROUPS,
    *large.GROUPS,
    *tensors.GROUPS,
    *stuck.GROUPS,
    *blocks.GROUPS,
    *lmcache.GROUPS,
    *vllm.GROUPS,
    *sglang.GROUPS,
    *sizes.GROUPS,
    *traffic.GROUPS,
    *compat.GROUPS,
    *gateway.GROUPS,
    *profile.GROUPS,
)
