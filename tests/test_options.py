"""Options of a set-up: they do what they say, and what can't be had is refused before it starts."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiomooncake import (
    ConfigError,
    InvalidArgumentError,
    LocalCluster,
    NotSupportedError,
    ReplicateConfig,
    Store,
    StoreConfig,
    TenantError,
)
from aiomooncake.engine.binding import find_setup_parameters, load_binding, native_replicate_config
from aiomooncake.engine.options import check_dummy_options, check_options
from tests.adversity import option_scenes as scenes
from tests.adversity.other_wheel import old_engine
from tests.adversity.processes import run_scene

OpenStore = Callable[..., Awaitable[Store]]

MB = 1 << 20
SMALL: dict[str, Any] = {"global_segment_size": 16 * MB, "local_buffer_size": 4 * MB}
ROOT = Path(__file__).parents[1]

# --- what a wheel knows -----------------------------------------------------------------------

# The signatures of 0.3.9, of 0.3.10.post2 and 0.3.11.post1, and of 0.3.12.post1 and newer.
_FIRST = (
    "local_hostname: str, metadata_server: str, global_segment_size: typing.SupportsInt, "
    "local_buffer_size: typing.SupportsInt, protocol: str, rdma_devices: str, "
    "master_server_addr: str, engine: object = None"
)
_OFFLOAD = ", enable_ssd_offload: bool = False, ssd_offload_path: str = ''"
_NEWEST = (
    ", tenant_id: str = 'default', enable_client_http_server: bool = False, "
    "client_http_port: int = 9300"
)
SIGNATURES = {
    "0.3.9": _FIRST,
    "0.3.11.post1": _FIRST + _OFFLOAD,
    "0.3.13": _FIRST + _OFFLOAD + _NEWEST,
}
# 0.3.9 has no direct way.
TAILS = {"0.3.11.post1": "bS8_", "0.3.13": "bS8_S8_bi"}

TENANT = {"tenant_id": "red"}
HTTP = {"enable_client_http_server": True}


def fake_binding(version: str) -> Any:
    """A binding as pybind11 makes it: the signature stands in the docstring."""
    signature = SIGNATURES[version]

    def setup() -> None: ...

    setup.__doc__ = (
        "setup(*args, **kwargs)\nOverloaded function.\n\n"
        f"1. setup(self: mooncake.store.MooncakeDistributedStore, {signature}) -> int\n\n"
        "2. setup(self: mooncake.store.MooncakeDistributedStore, config: dict) -> int\n\n"
        "Supported keys:\n  tenant_id: Tenant identifier (default 'default').\n"
    )
    store_class = type("MooncakeDistributedStore", (), {"setup": staticmethod(setup)})
    return SimpleNamespace(store_class=store_class, version=version)


def config(**options: Any) -> StoreConfig:
    return StoreConfig("127.0.0.1:1", **options)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("version", "options", "unknown"),
    [
        ("0.3.9", {}, ""),
        ("0.3.9", {"ssd_offload_path": "/unused", "client_http_port": 1}, ""),
        ("0.3.9", {"enable_ssd_offload": True}, "enable_ssd_offload=True"),
        ("0.3.9", TENANT, "tenant_id='red'"),
        ("0.3.9", HTTP, "enable_client_http_server=True"),
        ("0.3.11.post1", {"enable_ssd_offload": True}, ""),
        ("0.3.11.post1", TENANT, "tenant_id='red'"),
        ("0.3.11.post1", HTTP, "enable_client_http_server=True"),
        ("0.3.13", {"enable_ssd_offload": True, **TENANT}, ""),
    ],
)
def test_an_option_that_the_wheel_does_not_know_is_refused(
    tmp_path: Path, version: str, options: dict[str, Any], unknown: str, direct: bool
) -> None:
    wanted = config(**{"ssd_offload_path": str(tmp_path), **options})
    binding, tail = fake_binding(version), TAILS.get(version) if direct else None
    if not unknown:
        check_options(binding, tail, wanted, None)
        return
    with pytest.raises(NotSupportedError) as caught:
        check_options(binding, tail, wanted, None)
    text = str(caught.value)
    assert text.startswith(f"{unknown} is not known to engine {version}, and ")
    assert text.endswith(" or newer, or leave it out")


def test_a_shared_engine_goes_through_the_binding(tmp_path: Path) -> None:
    """What the exported function takes does not matter then."""
    engine = SimpleNamespace(get_engine=type("InnerTransferEngine", (), {}))
    check_options(fake_binding("0.3.13"), "bS8_", config(**TENANT), engine)
    with pytest.raises(NotSupportedError, match="tenant_id"):
        check_options(fake_binding("0.3.9"), "bS8_S8_bi", config(**TENANT), engine)


def test_a_binding_without_signatures_is_believed() -> None:
    silent = SimpleNamespace(setup=SimpleNamespace(__doc__=None))
    binding: Any = SimpleNamespace(store_class=silent, version=None)
    check_options(binding, None, config(**TENANT), None)


def test_the_installed_wheel_is_understood() -> None:
    known = find_setup_parameters(load_binding().store_class)
    assert {"tenant_id", "enable_ssd_offload", "client_http_port", "engine"} <= known


@pytest.mark.timeout(300)
def test_an_old_wheel_is_understood() -> None:
    version = "0.3.11.post1"
    path = f"{old_engine(version)}:{ROOT}"
    run_scene(scenes.ask_an_old_wheel, version, PYTHONPATH=path).check(within=30)


@pytest.mark.parametrize(
    "options", [TENANT, HTTP, {"enable_ssd_offload": True}], ids=lambda options: next(iter(options))
)
def test_a_dummy_client_refuses_what_it_can_not_pass_on(options: dict[str, Any]) -> None:
    check_dummy_options(config(client_server_address="127.0.0.1:2"))
    with pytest.raises(NotSupportedError, match=f"{next(iter(options))}=.* stand-alone client"):
        check_dummy_options(config(client_server_address="127.0.0.1:2", **options))


def test_soft_pins_of_older_wheels() -> None:
    """Up to 0.3.12.post1 the option is a switch, without a time."""

    class Native:
        def __init__(self) -> None:
            self.replica_num = 1
            self.with_soft_pin = False

    binding: Any = SimpleNamespace(replicate_config_class=Native, version="0.3.11.post1")
    assert native_replicate_config(binding, ReplicateConfig(soft_pin_action="enable")).with_soft_pin
    assert not native_replicate_config(binding, ReplicateConfig()).with_soft_pin
    later: list[dict[str, Any]] = [
        {"soft_pin_action": "disable"},
        {"with_hard_pin": True},
        {"group_ids": ["a"]},
    ]
    for options in later:
        given = ReplicateConfig(**options)
        with pytest.raises(
            NotSupportedError, match=f"{next(iter(options))} is not known to engine"
        ):
            native_replicate_config(binding, given)
    timed = ReplicateConfig(soft_pin_action="enable", soft_pin_ttl_ms=5)
    with pytest.raises(NotSupportedError, match="soft_pin_ttl_ms is not known"):
        native_replicate_config(binding, timed)


# --- tenants ----------------------------------------------------------------------------------


@pytest.fixture
def tenants(tmp_path: Path) -> LocalCluster:
    """A master that tells tenants apart: each must have a quota."""
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text(
        "version: 1\ntenants:\n  - name: red\n    quota: 64MB\n  - name: blue\n    quota: 4MB\n"
    )
    return LocalCluster(
        extra_args=[
            "--enable_multi_tenants=true",
            "--tenant_quota_connector_type=file",
            f"--tenant_quota_connector_uri={quotas}",
        ]
    )


async def test_tenants_do_not_see_each_others_keys(
    tenants: LocalCluster, open_store: OpenStore
) -> None:
    async with tenants as master:
        red, blue, nobody = await asyncio.gather(
            open_store(master.address, tenant_id="red", **SMALL),
            open_store(master.address, tenant_id="blue", **SMALL),
            open_store(master.address, **SMALL),
        )
        await red.put("key", b"red")
        assert await blue.get("key") is None
        assert not await blue.exists("key")
        assert await blue.replicas("key") == ()
        await blue.put("key", b"of blue")
        assert (await red.get("key"), await blue.get("key")) == (b"red", b"of blue")
        assert await blue.remove_all(force=True) == 1
        assert await red.get("key") == b"red"
        with pytest.raises(TenantError, match="-1700 TENANT_QUOTA_EXCEEDED"):
            await blue.put("large", bytes(5 * MB))
        with pytest.raises(TenantError, match="-1701 TENANT_NOT_REGISTERED"):
            await nobody.put("key", b"value")
        assert await nobody.get("key") is None
        await asyncio.gather(*[store.aclose() for store in (red, blue, nobody)])


async def test_a_master_that_knows_no_tenants_mixes_them(
    cluster: LocalCluster, open_store: OpenStore
) -> None:
    """It must be told to tell them apart (``--enable_multi_tenants``), and does not say so."""
    red = await open_store(cluster.address, tenant_id="red", **SMALL)
    blue = await open_store(cluster.address, tenant_id="blue", **SMALL)
    await red.put("of a tenant", b"red")
    assert await blue.get("of a tenant") == b"red"
    await red.remove("of a tenant", force=True)


async def test_a_reserved_tenant_is_refused(cluster: LocalCluster, open_store: OpenStore) -> None:
    with pytest.raises(ConfigError, match="tenant_id='_red' begins with an underscore"):
        await open_store(cluster.address, tenant_id="_red", **SMALL)


# --- the client's HTTP server -----------------------------------------------------------------


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free: int = probe.getsockname()[1]
        return free


def ask(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        body: bytes = answer.read()
        return body


async def test_the_client_serves_its_health_and_metrics(
    cluster: LocalCluster, open_store: OpenStore, port: int
) -> None:
    options = {"enable_client_http_server": True, "client_http_port": port, **SMALL}
    store = await open_store(cluster.address, **options)
    assert await asyncio.to_thread(ask, port, "/health") == b'{"status":"healthy","code":0}'
    await store.put("counted", b"value")
    assert b"mooncake_client_" in await asyncio.to_thread(ask, port, "/metrics")
    assert b"Summary" in await asyncio.to_thread(ask, port, "/metrics/summary")
    await store.remove("counted", force=True)
    # The engine itself would open the second one without a server, and say nothing.
    with pytest.raises(ConfigError, match=f"client_http_port={port} can't be listened on"):
        await open_store(cluster.address, **options)
    await store.aclose()
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(ask, port, "/health")
    again = await open_store(cluster.address, **options)
    assert await asyncio.to_thread(ask, port, "/health") == b'{"status":"healthy","code":0}'
    await again.aclose()


# --- in processes of their own ----------------------------------------------------------------


@pytest.mark.timeout(120)
def test_values_are_offloaded_to_disk(tmp_path: Path) -> None:
    run_scene(
        scenes.offload_to_disk,
        tmp_path,
        timeout=110,
        MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR="file_per_key_storage_backend",
        MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS="3",
        MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES=str(16 * MB),
    ).check(within=100)


def test_offloading_without_a_place_is_refused(tmp_path: Path) -> None:
    buffer = str(16 * MB)
    run_scene(
        scenes.offload_without_a_place, tmp_path, MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES=buffer
    ).check(within=30)


def test_two_stores_share_a_transfer_engine() -> None:
    run_scene(scenes.share_an_engine).check(within=40)


def test_memory_that_is_not_there_is_refused() -> None:
    run_scene(scenes.ask_for_too_much_memory).check(within=30)


# --- what the checks say ----------------------------------------------------------------------


def test_a_directory_that_can_not_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    wanted = config(enable_ssd_offload=True, ssd_offload_path=str(tmp_path))
    with pytest.raises(ConfigError, match="can't be written to: create one, and name it by"):
        check_options(fake_binding("0.3.13"), None, wanted, None)


def test_other_storage_than_directories_has_rules_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", "nvme_kv_storage_backend")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES", "no number")
    check_options(fake_binding("0.3.13"), None, config(enable_ssd_offload=True), None)


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        (object(), "takes a mooncake.engine.TransferEngine, not object"),
        (SimpleNamespace(get_engine=lambda: None), "was not initialised"),
    ],
)
def test_what_is_no_transfer_engine_is_refused(engine: object, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        check_options(fake_binding("0.3.13"), None, config(), engine)
