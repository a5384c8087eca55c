"""Every verb in every fault: what it answers, in what time, and how the store is afterwards."""

from __future__ import annotations

import asyncio
import inspect
import runpy
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aiomooncake import BatchError, LocalCluster, RpcError, Store
from tests.adversity import matrix_scenes as scenes
from tests.adversity.matrix import GROUPS
from tests.adversity.processes import run_scene
from tests.conftest import OpenStore

_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "scene",
    [
        scenes.frozen_master,
        scenes.killed_master,
        scenes.bad_lines,
        scenes.frozen_owner,
        scenes.killed_owner,
        scenes.held_buffer_and_leases,
        scenes.full_segment,
        scenes.evicting_segment,
        scenes.frozen_client,
    ],
)
@pytest.mark.timeout(150)
def test_every_verb(scene: Callable[[], None]) -> None:
    run_scene(scene, timeout=140).check(within=120)


async def test_many_keys_cost_no_more_than_a_few(
    own_cluster: LocalCluster, open_store: OpenStore
) -> None:
    """Each key cost a time-out of its own where the engine has no honest call for many of them."""
    store = await open_store(own_cluster.address, rpc_timeout=0.5, fail_fast=False, timeout=20)
    await own_cluster.pause()
    keys = [f"key{number}" for number in range(40)]
    began = time.monotonic()
    with pytest.raises(BatchError) as failed:
        await store.view_many(keys)
    sizes = await asyncio.gather(*map(store.size, keys), return_exceptions=True)
    assert time.monotonic() - began < 10
    assert all(isinstance(error, RpcError) for error in [*failed.value.errors.values(), *sizes])
    await own_cluster.resume()


def test_no_verb_is_left_out() -> None:
    public = {
        name
        for name, member in inspect.getmembers(Store)
        if inspect.isfunction(member) and not name.startswith("_")
    }
    tested = {verb.split()[0] for verbs in GROUPS.values() for verb in verbs}
    # They take a second on a good day; tests/contract/test_placing_faults.py has them.
    elsewhere = {"copy", "move", "mount_segment"}
    # These go by put_parts, get, put_from and get_into, which are in the table.
    elsewhere |= {name for name in public if "tensor" in name}
    assert public - elsewhere == {verb for verb in tested if "." not in verb}


def test_the_documentation_is_up_to_date() -> None:
    script = runpy.run_path(str(_ROOT / "scripts" / "adversity_table.py"))
    text = (_ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert script["page"](text) == text, "run scripts/adversity_table.py"
