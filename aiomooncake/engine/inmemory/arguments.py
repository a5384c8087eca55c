"""Arguments of native calls, taken and refused the way the binding does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from aiomooncake.engine.inmemory.objects import DFS_UNAVAILABLE, INVALID_PARAMS, OK, Placement

__all__ = ["DEFAULTS", "as_key", "as_keys", "read_config"]


_LONGEST_SOFT_PIN: Final = 24 * 60 * 60 * 1000  # the master's --max_kv_soft_pin_ttl by default


class _Defaults:
    """Stands for the binding's default placement; None is refused there, and so it is here."""

    replica_num = 1


DEFAULTS: Final = _Defaults()


def read_config(config: Any, keys: int, *, same_node: bool) -> Placement | int:
    """Read the placement options of a call; the code for those that the engine refuses."""
    if not hasattr(config, "replica_num"):
        raise TypeError("incompatible function arguments: config is no ReplicateConfig")
    if config is DEFAULTS:
        return Placement()
    groups = getattr(config, "group_ids", None)
    if groups is not None and len(groups) != keys:
        return INVALID_PARAMS
    if getattr(config, "prefer_alloc_in_same_node", False) and not same_node:
        return INVALID_PARAMS
    code = _check_copies(config) or _check_soft_pin(config)
    if code != OK:
        return code
    preferred = tuple(getattr(config, "preferred_segments", ()) or ())
    single = getattr(config, "preferred_segment", "")
    return Placement(
        config.replica_num,
        (single,) if single else preferred,
        None if groups is None else tuple(groups),
    )


def _check_copies(config: Any) -> int:
    """Refuse copies that are not in memory: there is no other pool, as in the usual wheels."""
    shared_files = getattr(config, "dfs_replica_num", 0)
    if config.replica_num < 1 or getattr(config, "nof_replica_num", 0) or shared_files > 1:
        return INVALID_PARAMS
    return DFS_UNAVAILABLE if shared_files else OK


def _check_soft_pin(config: Any) -> int:
    ttl = getattr(config, "soft_pin_ttl_ms", None)
    if ttl is None:
        return OK
    enabled = getattr(config, "soft_pin_action", "preserve") == "enable"
    return OK if enabled and ttl <= _LONGEST_SOFT_PIN else INVALID_PARAMS


def as_key(key: Any) -> str:
    """Take a key: text, or bytes that stand for it."""
    if isinstance(key, str):
        if not key.isascii():
            try:
                key.encode()
            except UnicodeEncodeError:
                raise TypeError("incompatible function arguments: a key is UTF-8") from None
        return key
    if isinstance(key, bytes):
        return key.decode(errors="surrogateescape")
    raise TypeError("incompatible function arguments: a key is str")


def as_keys(keys: Any) -> list[str]:
    """Take a list or tuple of keys."""
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Sequence):
        raise TypeError("incompatible function arguments: keys are a list[str]")
    return [as_key(key) for key in keys]
