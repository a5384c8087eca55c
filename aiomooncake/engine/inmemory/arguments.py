"""Arguments of native calls, taken and refused the way the binding does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from aiomooncake.engine.inmemory.objects import INVALID_PARAMS, Placement

__all__ = ["DEFAULTS", "as_key", "as_keys", "read_config"]


class _Defaults:
    """Stands for the binding's default placement; None is refused there, and so it is here."""

    replica_num = 1


DEFAULTS: Final = _Defaults()


def read_config(config: Any, keys: int, *, same_node: bool) -> Placement | int:
    """Read the placement options of a call; -600 for those that the engine refuses."""
    if not hasattr(config, "replica_num"):
        raise TypeError("incompatible function arguments: config is no ReplicateConfig")
    groups = getattr(config, "group_ids", None)
    if config.replica_num < 1 or (groups is not None and len(groups) != keys):
        return INVALID_PARAMS
    if getattr(config, "prefer_alloc_in_same_node", False) and not same_node:
        return INVALID_PARAMS
    preferred = tuple(getattr(config, "preferred_segments", ()) or ())
    single = getattr(config, "preferred_segment", "")
    return Placement(config.replica_num, preferred or ((single,) if single else ()))


def as_key(key: Any) -> str:
    """Take a key: text, or bytes that stand for it."""
    if isinstance(key, str):
        return key
    if isinstance(key, bytes):
        return key.decode(errors="surrogateescape")
    raise TypeError("incompatible function arguments: a key is str")


def as_keys(keys: Any) -> list[str]:
    """Take a list or tuple of keys."""
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Sequence):
        raise TypeError("incompatible function arguments: keys are a list[str]")
    return [as_key(key) for key in keys]
