"""Try every verb on the installed engine, in each mode, and print what came of it as JSON.

``scripts/test-matrix`` runs it with each engine, for docs/versions.json.
"""  # noqa: INP001 - a script, not part of a package

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from aiomooncake import LocalCluster, MooncakeError, ReplicateConfig, connect  # noqa: E402
from aiomooncake.engine.binding import (  # noqa: E402
    Binding,
    find_setup_parameters,
    load_binding,
    native_replicate_config,
)
from aiomooncake.engine.entry_points import RealEntry  # noqa: E402
from tests.adversity.matrix_calls import SIZE, Call, Subject  # noqa: E402
from tests.versions_calls import ALL_CALLS, Neighbour  # noqa: E402

__all__ = ["MODES", "probe"]

MODES: Final = ("memory", "real", "dummy")
_MB: Final = 1 << 20
# An option of each kind that asks for something, to see whether the engine knows it.
_OPTIONS: Final[Mapping[str, object]] = {
    "nof_replica_num": 1,
    "dfs_replica_num": 1,
    "preferred_segments": ["a:1"],
    "preferred_nof_segments": ["b:1"],
    "prefer_alloc_in_same_node": True,
    "soft_pin_action": "enable",
    "soft_pin_ttl_ms": 1000,
    "with_hard_pin": True,
    "data_type": "kvcache",
    "group_ids": ["g"],
}
_SETUP: Final = ("enable_ssd_offload", "tenant_id", "enable_client_http_server")


def probe() -> dict[str, Any]:
    """Try everything; what ``docs/versions.json`` says of an engine, and of the in-memory one."""
    logging.getLogger("aiomooncake").setLevel(logging.ERROR)
    binding = load_binding()
    found: dict[str, Any] = {"version": binding.version, "memory": _tried(_on_memory)}
    with LocalCluster(extra_args=["--eviction_ratio=0"]) as master:
        found["real"] = _tried(lambda: _on_master(master))
        found["dummy"] = _tried(lambda: _on_client(master))
    found["direct"] = isinstance(RealEntry.find(binding), RealEntry)
    found["options"] = [name for name in _OPTIONS if _knows(binding, name)]
    found["options"] += sorted(find_setup_parameters(binding.store_class) & set(_SETUP))
    found["methods"] = sorted(binding.methods)
    return found


Opened = Callable[[], tuple[str, dict[str, Any]]]
"""Answers what connects others to the same cluster, and the options of this store on top."""


def _on_memory() -> tuple[str, dict[str, Any]]:
    return "memory://probe", {"global_segment_size": 64 * _MB}


def _on_master(master: LocalCluster) -> tuple[str, dict[str, Any]]:
    return master.address, {"global_segment_size": 64 * _MB}


def _on_client(master: LocalCluster) -> tuple[str, dict[str, Any]]:
    client = master.blocking.start_client(global_segment_size=64 * _MB)
    options = {"client_server_address": client.address, "mem_pool_size": 16 * _MB}
    return master.address, options


def _tried(opened: Opened) -> dict[str, str] | str:
    """Try the verbs in one mode; why not, as text, where there is no such store."""
    try:
        target, options = opened()
        return asyncio.run(_try_verbs(target, options))
    except MooncakeError as error:
        return f"{type(error).__name__}: {error}"


async def _try_verbs(target: str, options: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    async with connect(target, local_buffer_size=16 * _MB, timeout=20, **options) as store:
        memory = await store.allocate(2 * SIZE)
        for verb, call in ALL_CALLS.items():
            at = Neighbour(store, verb, "probe", memory, 0, target=target)
            found[verb] = await _try(call, at)
            await store.remove_all(force=True)
        await memory.aclose()
    return found


async def _try(call: Call, at: Subject) -> str:
    for key, value in call.stored(at).items():
        await at.store.put(key, value)
    try:
        answer = await call.make(at)
    except MooncakeError as error:
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__[0] != "_")
    if answer != call.usual(at):
        return "wrong"
    for key, written in call.writes(at).items():
        if await at.store.get(key) != written:
            return "wrong"
    return "yes"


def _knows(binding: Binding, option: str) -> bool:
    given: dict[str, Any] = {option: _OPTIONS[option]}
    if option == "soft_pin_ttl_ms":  # of a soft pin only
        given["soft_pin_action"] = "enable"
    try:
        native_replicate_config(binding, ReplicateConfig(**given))
    except MooncakeError:
        return False
    return True


if __name__ == "__main__":
    json.dump(probe(), sys.stdout, indent=1)
