"""Configuration of SGLang, vLLM, LMCache and the wheel: their keys, spellings and defaults."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from aiomooncake._dialects import RULES
from aiomooncake._dialects.rules import _OWN, Dialect
from aiomooncake._dialects.wheel import SETUP
from aiomooncake._settings import SETTINGS
from aiomooncake.config import StoreConfig, parse_target
from aiomooncake.errors import ConfigError
from tests.conftest import OpenStore, _need_engine

if TYPE_CHECKING:
    from aiomooncake import LocalCluster

ROOT = Path(__file__).parent.parent
CONFIGS = Path(__file__).parent / "data" / "configs"
MASTER = "10.0.0.1:50051"
GIB = 1 << 30
MIB = 1 << 20

LEAST: dict[Dialect, dict[str, Any]] = {
    "sglang": {"master_server_address": MASTER},
    "vllm": {"master_server_address": MASTER, "metadata_server": "P2PHANDSHAKE"},
    "lmcache": {
        "master_server_address": MASTER,
        "metadata_server": "P2PHANDSHAKE",
        "local_hostname": "node1",
    },
    "wheel": {
        "master_server_address": MASTER,
        "metadata_server": "P2PHANDSHAKE",
        "local_hostname": "node1",
    },
}
"""What each project can't do without."""


def read(dialect: Dialect, given: dict[str, Any] | None = None, **place: Any) -> StoreConfig:
    """Read the least that a project wants, and something more."""
    return StoreConfig.from_mapping({**LEAST[dialect], **(given or {})}, dialect=dialect, **place)


# --- what stands in their documentation -------------------------------------------------------


def fill(text: str) -> str:
    return (
        text.replace("$DEVICE_LIST", "mlx5_0,mlx5_1")
        .replace("{IP of Machine}", "10.0.0.7")
        .replace("{RDMA device}", "mlx5_0")
    )


def load_env(path: Path) -> dict[str, str]:
    pairs = (line.partition("=") for line in fill(path.read_text(encoding="utf-8")).splitlines())
    return {name: value.strip('"') for name, _, value in pairs}


def load_yaml(path: Path) -> dict[str, Any]:
    """Load the part of YAML that the files here use; a test needs no more of it."""
    words = {"true": True, "True": True, "false": False, "False": False}
    found: dict[str, Any] = {}
    level = found
    for line in path.read_text(encoding="utf-8").splitlines():
        name, colon, value = line.partition(" #")[0].partition(":")
        if not colon or name.startswith("#"):
            continue
        if not name.startswith(" "):
            level = found
        text = value.strip()
        if text:
            number = int(text) if text.isdigit() else text.strip('"')
            level[name.strip()] = words.get(text, number)
        else:
            level = found[name] = {}
    return found


SGLANG_DOCUMENTED = {
    "local_hostname": "localhost",
    "protocol": "rdma",
    "local_buffer_size": 16 * MIB,
    "global_segment_size": 4 * GIB,
}
VLLM_DOCUMENTED = {
    "master_server_address": "127.0.0.1:50051",
    "protocol": "rdma",
    "global_segment_size": 80 * GIB,
    "local_buffer_size": 4 * GIB,
    "local_hostname": None,
}

FILES: list[tuple[Dialect, str, dict[str, Any]]] = [
    (
        "sglang",
        "mooncake_config.json",
        {**SGLANG_DOCUMENTED, "metadata_server": "http://localhost:8080/metadata"},
    ),
    (
        "sglang",
        "store_service.json",
        {"device_name": "erdma_0,erdma_1", "global_segment_size": 2560 * MIB},
    ),
    ("sglang", "extra_config.json", SGLANG_DOCUMENTED),
    (
        "sglang",
        "dummy_client.json",
        {"client_server_address": "127.0.0.1:50052", "master_server_address": ""},
    ),
    ("vllm", "embedded.json", VLLM_DOCUMENTED),
    ("vllm", "disk_offload.json", {"global_segment_size": 0, "device_name": "mlx5_0"}),
    ("vllm", "tenant.json", {**VLLM_DOCUMENTED, "tenant_id": "tenant-a"}),
    ("vllm", "first_version.json", VLLM_DOCUMENTED),
    (
        "wheel",
        "docstring.json",
        {"protocol": "tcp", "ssd_offload_path": "/nvme/mooncake_offload"},
    ),
    ("wheel", "docstring_rdma.json", {"protocol": "rdma", "device_name": "mlx5_0"}),
    ("wheel", "store_service.json", {"global_segment_size": 256 * MIB}),
]


@pytest.mark.parametrize(("dialect", "name", "expected"), FILES, ids=[row[1] for row in FILES])
def test_documented_files_load(dialect: Dialect, name: str, expected: dict[str, Any]) -> None:
    path = CONFIGS / dialect / name
    config = StoreConfig.from_file(path, dialect=dialect)
    assert {field: getattr(config, field) for field in expected} == expected
    content = json.loads(path.read_text(encoding="utf-8"))
    assert StoreConfig.from_mapping(content, dialect=dialect) == config


@pytest.mark.parametrize(
    ("dialect", "name", "expected"),
    [
        (
            "sglang",
            "launch_server.env",
            {**SGLANG_DOCUMENTED, "metadata_server": "http://127.0.0.1:8080/metadata"},
        ),
        (
            "sglang",
            "best_practices.env",
            {"global_segment_size": 816043786240, "device_name": "mlx5_0,mlx5_1"},
        ),
        ("wheel", "store_service.env", {"global_segment_size": 4 * GIB, "local_buffer_size": 0}),
    ],
)
def test_documented_environments_load(
    dialect: Dialect, name: str, expected: dict[str, Any]
) -> None:
    config = StoreConfig.from_env(load_env(CONFIGS / dialect / name), dialect=dialect)
    assert {field: getattr(config, field) for field in expected} == expected
    assert config.master_server_address == "127.0.0.1:50051"


def test_documented_lmcache_settings_load(caplog: pytest.LogCaptureFixture) -> None:
    given = load_yaml(CONFIGS / "lmcache" / "mooncake-config.yaml")
    assert given["extra_config"]["mooncake_prefer_local_alloc"] is True
    expected = StoreConfig(
        "localhost:50051",
        local_hostname="localhost",
        metadata_server="http://localhost:8080/metadata",
        protocol="rdma",
        global_segment_size=20 * GIB,
        local_buffer_size=0,
    )
    assert StoreConfig.from_mapping(given, dialect="lmcache") == expected
    assert StoreConfig.from_mapping(given["extra_config"], dialect="lmcache") == expected
    first = load_yaml(CONFIGS / "lmcache" / "first_version.yaml")
    config = StoreConfig.from_mapping(first, dialect="lmcache")
    assert (config.protocol, config.transfer_timeout) == ("tcp", 2)
    assert not caplog.records


def test_the_settings_that_lmcaches_server_passes_on_load() -> None:
    """LMCache's ``mooncake_store`` adapter gives them to the engine's ``setup`` as they are."""
    given = json.loads(
        fill((CONFIGS / "wheel/lmcache_l2_adapter.json").read_text(encoding="utf-8"))
    )
    assert StoreConfig.from_mapping(given, dialect="wheel") == StoreConfig(
        "127.0.0.1:50051",
        local_hostname="10.0.0.7",
        protocol="rdma",
        device_name="mlx5_0",
        global_segment_size=30 * GIB,
        local_buffer_size=GIB,
    )


def test_every_file_has_its_source() -> None:
    sources = (CONFIGS / "SOURCES.md").read_text(encoding="utf-8")
    files = [path for path in CONFIGS.rglob("*") if path.is_file() and path.name != "SOURCES.md"]
    assert len(files) == 17
    for path in files:
        assert path.name in sources


# --- defaults ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        (
            "sglang",
            StoreConfig(
                MASTER,
                local_hostname="localhost",
                protocol="rdma",
                global_segment_size=4 * GIB,
                local_buffer_size=16 * MIB,
                client_http_port=9301,
            ),
        ),
        (
            "vllm",
            StoreConfig(
                MASTER, protocol="rdma", global_segment_size=4 * GIB, local_buffer_size=4 * GIB
            ),
        ),
        (
            "lmcache",
            StoreConfig(
                MASTER,
                local_hostname="node1",
                global_segment_size=3355443200,
                local_buffer_size=GIB,
            ),
        ),
        (
            "wheel",
            StoreConfig(
                MASTER,
                local_hostname="node1",
                global_segment_size=3355443200,
                local_buffer_size=GIB,
            ),
        ),
    ],
)
def test_defaults_are_the_projects_own(
    dialect: Dialect, expected: StoreConfig, tmp_path: Path
) -> None:
    given = dict(LEAST[dialect])
    path = tmp_path / "c.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    assert read(dialect) == expected
    assert StoreConfig.from_file(path, dialect=dialect) == expected
    assert given == LEAST[dialect]
    nulls = dict.fromkeys(RULES[dialect].names())
    assert StoreConfig.from_mapping({**nulls, **given}, dialect=dialect) == expected


def test_the_dictionary_of_setup_has_the_engines_defaults() -> None:
    given = {"local_hostname": "node1", "metadata_server": "P2PHANDSHAKE"}
    expected = StoreConfig(
        "127.0.0.1:50051",
        local_hostname="node1",
        global_segment_size=16 * MIB,
        local_buffer_size=16 * MIB,
    )
    assert StoreConfig.from_mapping(given, dialect="wheel") == expected
    given["master_server_addr"] = MASTER
    config = StoreConfig.from_mapping(given, dialect="wheel")
    assert config == expected.replace(master_server_address=MASTER)


@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_what_is_missing_is_named(dialect: Dialect, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    for name in LEAST[dialect]:
        rest = {key: value for key, value in LEAST[dialect].items() if key != name}
        path.write_text(json.dumps({**rest, "protocol": "tcp"}), encoding="utf-8")
        with pytest.raises(ConfigError, match=f"dialect '{dialect}'.*{name}"):
            StoreConfig.from_file(path, dialect=dialect)


# --- the wheel's own reader, side by side -----------------------------------------------------


@pytest.fixture
def theirs() -> Any:
    """The wheel's own reader of files and variables."""
    _need_engine()
    return importlib.import_module("mooncake.mooncake_config").MooncakeConfig


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"global_segment_size": "4gb", "local_buffer_size": "1.5 G"},
        {"global_segment_size": "0.1gb", "local_buffer_size": "2048"},
        {"global_segment_size": "16MB", "local_buffer_size": "64k"},
        {"global_segment_size": "1t", "local_buffer_size": "4096b"},
        {"global_segment_size": 0, "local_buffer_size": "0"},
        {"protocol": "RDMA", "device_name": "mlx5_0,mlx5_1"},
        {"enable_ssd_offload": "ENABLE", "ssd_offload_path": "/nvme", "tenant_id": 7},
        {"enable_client_http_server": 1, "client_http_port": "9400"},
        {"enable_client_http_server": "off"},
    ],
)
def test_the_wheels_own_reader_reads_the_same(
    given: dict[str, Any], theirs: Any, tmp_path: Path
) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**LEAST["wheel"], **given}), encoding="utf-8")
    same(StoreConfig.from_file(path, dialect="wheel"), theirs.from_file(str(path)))


@pytest.mark.parametrize("name", ["docstring.json", "docstring_rdma.json", "store_service.json"])
def test_the_wheels_own_reader_reads_the_documented_files_the_same(name: str, theirs: Any) -> None:
    path = CONFIGS / "wheel" / name
    same(StoreConfig.from_file(path, dialect="wheel"), theirs.from_file(str(path)))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MOONCAKE_OFFLOAD_ENABLED": "true", "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "/nvme"},
        {"MOONCAKE_ENABLE_CLIENT_HTTP_SERVER": "on", "MOONCAKE_CLIENT_HTTP_PORT": "9400"},
        {"MOONCAKE_GLOBAL_SEGMENT_SIZE": "500mb", "MOONCAKE_LOCAL_BUFFER_SIZE": "0"},
        {"MOONCAKE_LOCAL_HOSTNAME": "n1", "MOONCAKE_DEVICE": "mlx5_0", "MOONCAKE_TENANT_ID": "t"},
    ],
)
def test_the_wheels_own_reader_reads_variables_the_same(
    environ: dict[str, str], theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in RULES["wheel"].variables():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    monkeypatch.setenv("MOONCAKE_MASTER", MASTER)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    same(StoreConfig.from_env(dialect="wheel"), theirs.load_from_env())


def same(config: StoreConfig, other: Any) -> None:
    fields = [spec.name for spec in dataclasses.fields(other)]
    assert {name: getattr(config, name) for name in fields} == dataclasses.asdict(other)


# --- sizes and switches -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "value", "size"),
    [
        ("sglang", "4gb", 4 * GIB),
        ("sglang", " 4 GB ", 4 * GIB),
        ("sglang", "4294967296", 4 * GIB),
        ("sglang", 4294967296.0, 4 * GIB),
        ("vllm", "1.5 GB", 3 * GIB // 2),
        ("vllm", "512mb", 512 * MIB),
        ("vllm", "2048kb", 2 * MIB),
        ("vllm", "2147483648", 2 * GIB),
        ("vllm", "4096B", 4096),
        ("lmcache", "4g", 4 * GIB),
        ("lmcache", "1.5TB", 3 << 39),
        ("wheel", ".5gb", GIB // 2),
    ],
)
def test_sizes_as_the_projects_write_them(dialect: Dialect, value: object, size: int) -> None:
    config = read(dialect, {"global_segment_size": value})
    assert config.global_segment_size == size


@pytest.mark.parametrize(
    ("dialect", "value", "cure"),
    [
        ("sglang", "512mb", "give bytes, or a whole number with GB"),
        ("sglang", "1.5gb", "give bytes, or a whole number with GB"),
        ("sglang", "4g", "give bytes, or a whole number with GB"),
        ("sglang", "gb", "give bytes, or a whole number with GB"),
        ("vllm", "4g", "give bytes, or a number with GB, MB, KB, B"),
        ("vllm", "4GiB", "give bytes, or a number with GB, MB, KB, B"),
        ("vllm", "1.2.3gb", "give bytes, or a number with GB, MB, KB, B"),
        ("vllm", True, "give bytes"),
        ("lmcache", "4GiB", "give bytes, or a number with KB, MB, GB, TB, K, M, G, T, B"),
        ("lmcache", "infinite", "give bytes"),
        ("wheel", "-1", "give bytes"),
        ("wheel", -1, "a size lies between 0 and"),
        ("wheel", 1.5, "give whole bytes"),
        ("wheel", "12", "give 0 or at least 1024 bytes"),
        ("wheel", [4], "give bytes"),
    ],
)
def test_sizes_that_a_project_does_not_write_are_refused(
    dialect: Dialect, value: object, cure: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(dialect, {"global_segment_size": value})
    assert f"In the mapping (dialect '{dialect}'): global_segment_size=" in str(caught.value)
    assert cure in str(caught.value)


def test_a_quoted_switch_is_refused_where_any_text_would_be_true() -> None:
    for dialect, name in (("sglang", "standalone_storage"), ("vllm", "enable_offload")):
        with pytest.raises(ConfigError, match=f"{name}='false' .* without quotes"):
            read(dialect, {name: "false"})  # type: ignore[arg-type]
    assert read("sglang", {"enable_ssd_offload": 1}).enable_ssd_offload
    environ = {"MOONCAKE_MASTER": MASTER, "MOONCAKE_ENABLE_SSD_OFFLOAD": "Y"}
    assert StoreConfig.from_env(environ, dialect="sglang").enable_ssd_offload
    environ["MOONCAKE_ENABLE_SSD_OFFLOAD"] = "on"
    with pytest.raises(ConfigError, match=r"MOONCAKE_ENABLE_SSD_OFFLOAD='on' .* one of true, 1"):
        StoreConfig.from_env(environ, dialect="sglang")


# --- where the process stands -----------------------------------------------------------------


def test_sglang_divides_the_segment_among_the_ranks() -> None:
    assert read("sglang", tp_size=8).global_segment_size == GIB // 2
    assert read("sglang", tp_size=8, pp_size=2).global_segment_size == GIB // 4
    assert read("sglang", {"global_segment_size": 1 << 40}, tp_size=3).global_segment_size == (
        (1 << 40) // 3
    )
    assert read("sglang", {"global_segment_size": 0}, tp_size=8).global_segment_size == 0
    with pytest.raises(ConfigError, match=r"global_segment_size=4096 .* among 8 ranks .* 1024"):
        read("sglang", {"global_segment_size": 4096}, tp_size=8)


def test_sglang_adds_the_rank_to_the_clients_metrics_port() -> None:
    config = read("sglang", rank=5, tp_size=4, pp_size=2)
    assert (config.client_http_port, config.enable_client_http_server) == (9306, False)
    environ = {"MOONCAKE_MASTER": MASTER, "MOONCAKE_CLIENT_METRICS_PORT_BASE": "65530"}
    config = StoreConfig.from_env(environ, dialect="sglang", rank=5, tp_size=8)
    assert config.client_http_port == 65535
    with pytest.raises(ConfigError, match=r"_PORT_BASE \+ rank=65536"):
        StoreConfig.from_env(environ, dialect="sglang", rank=6, tp_size=8)


@pytest.mark.parametrize(
    "devices",
    [
        {0: "mlx5_0", 1: "mlx5_1,mlx5_2", 2: ""},
        {"0": "mlx5_0", "1": "mlx5_1,mlx5_2", "2": ""},
        '{"0": "mlx5_0", "1": "mlx5_1,mlx5_2", "2": ""}',
        ' {"0": "mlx5_0", "1": "mlx5_1,mlx5_2", "2": ""} ',
    ],
)
def test_sglang_chooses_from_a_map_of_devices(devices: object) -> None:
    def of(rank: int) -> str:
        return read("sglang", {"device_name": devices}, rank=rank, tp_size=4).device_name

    assert (of(0), of(1), of(2)) == ("mlx5_0", "mlx5_1,mlx5_2", "")
    assert of(5) == of(1), "the map is by tensor-parallel rank"
    with pytest.raises(ConfigError, match=r"device_name=.* add an entry for .* rank 3"):
        of(7)
    with pytest.raises(ConfigError, match=r"device_name=.* give rank= and tp_size="):
        read("sglang", {"device_name": devices})


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ('{"0": "mlx5_0"', "no JSON"),
        ({"first": "mlx5_0"}, r"the rank in device_name\['first'\]"),
        ({0: 7}, r"device_name\['?0'?\]=7 is not usable: give a text"),
        (["mlx5_0"], "or a map by rank"),
    ],
)
def test_a_bad_map_of_devices_is_refused(devices: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read("sglang", {"device_name": devices}, rank=0, tp_size=2)


def test_vllm_chooses_from_its_devices_by_gpu() -> None:
    given = {"device_name": "mlx5_9", "device_name_per_gpu": ["mlx5_0", "mlx5_1,mlx5_2"]}
    assert read("vllm", given, gpu=1).device_name == "mlx5_1,mlx5_2"
    assert read("vllm", {"device_name": "mlx5_9"}, gpu=1).device_name == "mlx5_9"
    for gpu in (None, 2):
        with pytest.raises(ConfigError, match=r"device_name_per_gpu=.* give gpu=.* below 2"):
            read("vllm", given, gpu=gpu)
    with pytest.raises(ConfigError, match=r"device_name_per_gpu='mlx5_0' .* give a list"):
        read("vllm", {"device_name_per_gpu": "mlx5_0"}, gpu=0)


def test_a_place_that_a_dialect_does_not_use_is_refused(tmp_path: Path) -> None:
    for dialect in get_args(Dialect):
        for name in ("rank", "tp_size", "pp_size", "gpu"):
            if name in RULES[dialect].place:
                continue
            with pytest.raises(ConfigError, match=f"{name}=1 .* does not use it; leave it out"):
                read(dialect, None, **{name: 1})
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"master_server_address": MASTER}), encoding="utf-8")
    ours = "our own configuration does not use it"
    with pytest.raises(ConfigError, match=ours):
        StoreConfig.from_mapping({"master_server_address": MASTER}, rank=0)
    with pytest.raises(ConfigError, match=ours):
        StoreConfig.from_file(path, tp_size=1)
    with pytest.raises(ConfigError, match=ours):
        StoreConfig.from_env({"MOONCAKE_MASTER": MASTER}, gpu=0)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ({"rank": 1}, "rank=1 .* give tp_size= too"),
        ({"rank": -1, "tp_size": 1}, "rank=-1 .* at least 0"),
        ({"tp_size": 0}, "tp_size=0 .* at least 1"),
        ({"tp_size": "x"}, "tp_size='x' .* integer"),
        ({"rank": True, "tp_size": 1}, "rank=True .* integer"),
    ],
)
def test_a_bad_place_is_refused(place: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read("sglang", **place)


# --- what a table can't say -------------------------------------------------------------------


def test_sglangs_switch_decides_between_a_client_and_a_dummy_client() -> None:
    both = {"client_server_address": "127.0.0.1:50052"}
    assert read("sglang", both).client_server_address is None
    config = read("sglang", {**both, "standalone_storage": True})
    assert config.client_server_address == "127.0.0.1:50052"
    assert config.master_server_address == MASTER
    with pytest.raises(ConfigError, match="standalone_storage is true, but client_server_address"):
        read("sglang", {"standalone_storage": True})
    with pytest.raises(ConfigError, match="standalone_storage with client_server_address"):
        StoreConfig.from_mapping(both, dialect="sglang")
    environ = {"MOONCAKE_CLIENT": "h:1", "MOONCAKE_STANDALONE_STORAGE": "1"}
    assert StoreConfig.from_env(environ, dialect="sglang").client_server_address == "h:1"


def test_sglangs_metrics_port_counts_where_it_is_given_or_checked() -> None:
    assert read("sglang").master_metrics_port is None
    assert read("sglang", {"check_server": True}).master_metrics_port == 9003
    given = {"check_server": True, "master_metrics_port": "9004"}
    assert read("sglang", given).master_metrics_port == 9004
    assert read("sglang", {"master_metrics_port": 9004}).master_metrics_port == 9004


def test_sglang_reads_its_file_or_its_variables(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"master_server_address": MASTER}), encoding="utf-8")
    environ = {
        "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH": str(path),
        "MOONCAKE_MASTER": "elsewhere:1",
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_TENANT_ID": "t",
        "SGLANG_MOONCAKE_LOCAL_BUFFER_SIZE": "33554432",
        "LOCAL_HOSTNAME": "old",
    }
    config = StoreConfig.from_env(environ, dialect="sglang")
    assert config == read("sglang").replace(local_buffer_size=32 * MIB)
    del environ["SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"]
    config = StoreConfig.from_env(environ, dialect="sglang")
    assert (config.master_server_address, config.protocol) == ("elsewhere:1", "tcp")
    assert (config.local_hostname, config.local_buffer_size) == ("old", 32 * MIB)
    environ["MOONCAKE_LOCAL_HOSTNAME"] = "new"
    assert StoreConfig.from_env(environ, dialect="sglang").local_hostname == "new"
    environ["SGLANG_MOONCAKE_LOCAL_BUFFER_SIZE"] = "32mb"
    with pytest.raises(ConfigError, match=r"LOCAL_BUFFER_SIZE='32mb' is not usable: give bytes\."):
        StoreConfig.from_env(environ, dialect="sglang")


def test_vllms_mode_and_segment_belong_together() -> None:
    config = read("vllm", {"mode": "standalone-store", "global_segment_size": 0})
    assert config.global_segment_size == 0
    for given, why in (
        ({"mode": "standalone-store"}, "'standalone-store' the workers lend none; give 0"),
        ({"global_segment_size": "0"}, "in mode 'embedded' each worker lends memory"),
        ({"mode": "standalone"}, "give 'embedded' or 'standalone-store'"),
        ({"local_buffer_size": 0}, "vLLM wants more than 0"),
        ({"tenant_id": 7}, "tenant_id=7 is not usable: give a text"),
    ):
        with pytest.raises(ConfigError, match=why):
            read("vllm", given)


def test_vllm_reads_its_file_and_two_variables(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**LEAST["vllm"], "local_hostname": "n9"}), encoding="utf-8")
    environ = {"MOONCAKE_CONFIG_PATH": str(path), "MOONCAKE_MASTER": "elsewhere:1"}
    assert StoreConfig.from_env(environ, dialect="vllm") == read("vllm")
    environ["MOONCAKE_REQUESTER_LOCAL_HOSTNAME"] = "n1"
    environ["MOONCAKE_PREFERRED_SEGMENT"] = "127.0.0.1:50053"
    config = StoreConfig.from_env(environ, dialect="vllm")
    assert config == read("vllm").replace(local_hostname="n1")
    del environ["MOONCAKE_CONFIG_PATH"]
    with pytest.raises(ConfigError, match="set MOONCAKE_CONFIG_PATH to vLLM's JSON file"):
        StoreConfig.from_env(environ, dialect="vllm")


def test_lmcaches_prefixed_keys_win() -> None:
    given = {
        "protocol": "tcp",
        "mooncake_protocol": "rdma",
        "device_name": "mlx5_0",
        "mooncake_rdma_devices": "mlx5_1",
        "mooncake_device_name": "mlx5_2",
        "mooncake_master_server_addr": "m:1",
        "mooncake_tenant_id": "t",
        "mooncake_enable_ssd_offload": "yes",
    }
    config = read("lmcache", given)
    assert (config.protocol, config.device_name) == ("rdma", "mlx5_1")
    assert (config.master_server_address, config.tenant_id) == ("m:1", "t")
    assert config.enable_ssd_offload
    assert read("lmcache", {"mooncake_device_name": "d", "device_name": "e"}).device_name == "d"
    assert read("lmcache", {"master_server_address": "mooncakestore://m:1/"}) == read(
        "lmcache", {"master_server_address": "m:1"}
    )


def test_lmcaches_url_counts_where_the_settings_name_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    extra: dict[str, Any] = {"local_hostname": "n", "metadata_server": "P2PHANDSHAKE"}
    url = "mooncakestore://10.0.0.1:50051/?device=mlx5_0"

    def load(url: str) -> StoreConfig:
        given = {"chunk_size": 256, "remote_url": url, "extra_config": extra}
        return StoreConfig.from_mapping(given, dialect="lmcache")

    config = load(url)
    assert (config.master_server_address, config.device_name) == (MASTER, "mlx5_0")
    extra["device_name"] = "mlx5_7"
    extra["master_server_address"] = "elsewhere:1"
    assert not caplog.records
    config = load(url)
    assert (config.master_server_address, config.device_name) == ("elsewhere:1", "mlx5_7")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "remote_url names the master 10.0.0.1:50051" in record.getMessage()
    assert "elsewhere:1" in record.getMessage()
    assert load("plugin://mooncakestore").master_server_address == "elsewhere:1"
    for bad, why in (
        ("redis://10.0.0.1:6379", "names another backend"),
        ("mooncakestore://10.0.0.1", "port is missing"),
        ("mooncakestore://a:1,b:2", "is not usable"),
    ):
        with pytest.raises(ConfigError, match=f"remote_url='.*{why}"):
            load(bad)


def test_lmcache_reads_its_file_or_its_variables(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(LEAST["lmcache"]), encoding="utf-8")
    extra = {**LEAST["lmcache"], "protocol": "rdma"}
    del extra["master_server_address"]
    environ = {
        "MOONCAKE_CONFIG_PATH": str(path),
        "LMCACHE_REMOTE_URL": "mooncakestore://m:1",
        "LMCACHE_EXTRA_CONFIG": json.dumps(extra),
    }
    assert StoreConfig.from_env(environ, dialect="lmcache") == read("lmcache")
    del environ["MOONCAKE_CONFIG_PATH"]
    config = StoreConfig.from_env(environ, dialect="lmcache")
    assert (config.master_server_address, config.protocol) == ("m:1", "rdma")

    whole = tmp_path / "lmcache.json"
    whole.write_text(json.dumps({"chunk_size": 16, "extra_config": extra}), encoding="utf-8")
    environ = {"LMCACHE_CONFIG_FILE": str(whole), "LMCACHE_REMOTE_URL": "mooncakestore://m:1"}
    assert StoreConfig.from_env(environ, dialect="lmcache") == config
    environ = {"LMCACHE_CONFIG_FILE": str(CONFIGS / "lmcache" / "mooncake-config.yaml")}
    with pytest.raises(ConfigError, match=r"YAML is not read here: .*from_mapping"):
        StoreConfig.from_env(environ, dialect="lmcache")
    with pytest.raises(ConfigError, match="LMCACHE_EXTRA_CONFIG is no JSON"):
        StoreConfig.from_env({"LMCACHE_EXTRA_CONFIG": "{"}, dialect="lmcache")
    with pytest.raises(ConfigError, match="set MOONCAKE_CONFIG_PATH to a JSON file, or"):
        StoreConfig.from_env({}, dialect="lmcache")


def test_a_wheels_mapping_is_told_by_its_spellings(tmp_path: Path) -> None:
    given = {**LEAST["wheel"], "rdma_devices": "mlx5_0"}
    with pytest.raises(ConfigError, match=r"'master_server_address' .* 'master_server_addr'"):
        StoreConfig.from_mapping(given, dialect="wheel")
    given["master_server_addr"] = given.pop("master_server_address")
    config = StoreConfig.from_mapping(given, dialect="wheel")
    assert (config.device_name, config.local_buffer_size) == ("mlx5_0", 16 * MIB)
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"local_hostname": "n", "metadata_server": "P2PHANDSHAKE"}))
    with pytest.raises(ConfigError, match="master_server_address is missing"):
        StoreConfig.from_file(path, dialect="wheel")


# --- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", get_args(Dialect))
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("protocl", "protocol"),
        ("metadata_sever", "metadata_server"),
        ("global_segment_sizes", "global_segment_size"),
        ("devicename", "device_name"),
        ("local_host_name", "local_hostname"),
    ],
)
def test_a_mistyped_key_is_told_everywhere(dialect: Dialect, name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"key '{name}' is unknown; did you mean '{meant}'"):
        read(dialect, {name: "x"})


@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_our_own_keys_are_not_taken_for_the_projects(dialect: Dialect) -> None:
    with pytest.raises(ConfigError, match=r"aiomooncake's own.*\.replace\(rpc_timeout=…\)"):
        read(dialect, {"rpc_timeout": 3})


@pytest.mark.parametrize(
    ("dialect", "name", "meant"),
    [
        ("sglang", "rdma_devices", "device_name"),
        ("vllm", "master_server_addr", "master_server_address"),
        ("lmcache", "tenant_id", "mooncake_tenant_id"),
        ("lmcache", "rdma_devices", "mooncake_rdma_devices"),
        ("wheel", "master_server_addr", "master_server_address"),
    ],
)
def test_anothers_spelling_that_would_do_nothing_is_told(
    dialect: Dialect, name: str, meant: str
) -> None:
    given = {key: value for key, value in LEAST[dialect].items() if not key.startswith("master")}
    if name != "master_server_addr":
        given["master_server_address"] = MASTER
    elif dialect == "wheel":
        given["device_name"] = ""
    with pytest.raises(ConfigError, match=f"'{name}' is not one of .* '{meant}'|'device_name' is"):
        StoreConfig.from_mapping({**given, name: "x:1"}, dialect=dialect)
    own = {meant: "x:1"}
    if dialect != "wheel":
        assert read(dialect, {**own, name: "other:1"}) == read(dialect, own)


@pytest.mark.parametrize("dialect", ["vllm", "wheel"])
def test_a_key_that_resembles_nothing_is_refused_where_the_file_is_mooncakes(
    dialect: Dialect,
) -> None:
    with pytest.raises(
        ConfigError, match=r"key 'zzz' is unknown\. Known are: master_server_address"
    ):
        read(dialect, {"zzz": 1})


# Keys that stand in these settings for other parts, from the projects' sources and documentation.
OTHERS: list[tuple[Dialect, str]] = [
    (
        "sglang",
        """
        extra_backend_tag enable_group_semantics tp_lcm_size prefetch_threshold backend_name
        prefetch_timeout_base prefetch_timeout_per_ki_token hicache_storage_pass_prefix_keys
        module_path class_name interface_v1 use_direct_io
        """,
    ),
    (
        "lmcache",
        """
        save_chunk_meta use_exists_sync enable_sparse create_lookup_server_only_on_worker_0
        save_only_first_rank first_rank_max_blocking_time gpu_to_numa_mapping lookup_backoff_time
        remote_storage_plugin.x.module_path remote_storage_plugin.x.class_name use_odirect
        mooncake_page_first_multi_buffer mooncake_layer_merged_page_objects nixl_buffer_size
        nixl_buffer_device cufile_buffer_size gds_path shared_cpu_cache_size_gb max_local_cpu_size
        local_disk_rehydrate_recursive remote_enable_mla_worker_id_as0 fs_connector_read_ahead
        s3_num_io_threads s3_region internal_api_server_port controller_url
        """,
    ),
    ("vllm", "local_hostname mode check_server standalone_storage prefer_local_alloc tenant_id"),
    ("wheel", "mode enable_offload standalone_storage check_server master_metrics_port"),
]


@pytest.mark.parametrize(("dialect", "names"), OTHERS)
def test_keys_of_others_are_left_alone(dialect: Dialect, names: str) -> None:
    values = {"tenant_id": "default", "mode": "embedded", "local_hostname": "n9"}
    for name in names.split():
        assert read(dialect, {name: values.get(name, 1)}) == read(dialect)


@pytest.mark.parametrize(
    ("dialect", "name", "meant"),
    [
        ("sglang", "MOONCAKE_PROTOCL", "MOONCAKE_PROTOCOL"),
        ("sglang", "MOONCAKE_STANDALONE_STORGE", "MOONCAKE_STANDALONE_STORAGE"),
        (
            "sglang",
            "SGLANG_HICACHE_MOONCAKE_CONFIG_PTH",
            "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH",
        ),
        (
            "sglang",
            "SGLANG_MOONCAKE_LOCAL_BUFER_SIZE",
            "SGLANG_MOONCAKE_LOCAL_BUFFER_SIZE",
        ),
        ("vllm", "MOONCAKE_CONFIG_PAHT", "MOONCAKE_CONFIG_PATH"),
        ("lmcache", "MOONCAKE_CONFIG_PAHT", "MOONCAKE_CONFIG_PATH"),
        ("wheel", "MOONCAKE_CLIENT_HTP_PORT", "MOONCAKE_CLIENT_HTTP_PORT"),
    ],
)
def test_a_mistyped_variable_is_told(dialect: Dialect, name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"variable {name} is unknown; did you mean {meant}"):
        StoreConfig.from_env({"MOONCAKE_MASTER": MASTER, name: "x"}, dialect=dialect)


def test_variables_of_others_are_left_alone() -> None:
    others = {
        "SGLANG_HICACHE_MOONCAKE_REUSE_TE": "1",
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "NVLINK",
        "SGLANG_MOONCAKE_SEND_AUX_TCP": "1",
        "SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES": "0",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": "8998",
        "MOONCAKE_OFFLOAD_ENABLED": "1",
        "MOONCAKE_LOCAL_BUFFER_SIZE": "nonsense",
        "MOONCAKE_PREFERRED_SEGMENT": "h:1",
    }
    config = StoreConfig.from_env({"MOONCAKE_MASTER": MASTER, **others}, dialect="sglang")
    assert config == read("sglang")


@pytest.mark.parametrize("dialect", get_args(Dialect))
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"protocol": "rdna"}, "protocol='rdna' is not usable: did you mean 'rdma'?"),
        ({"master_server_address": "10.0.0.1"}, "master_server_address='10.0.0.1' is not usable"),
        ({"local_hostname": "a b"}, "local_hostname='a b' is not usable: it holds a space"),
        ({"metadata_server": 5}, "metadata_server=5 is not usable: give a text"),
    ],
)
def test_a_bad_value_is_named_with_its_dialect(
    dialect: Dialect, given: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**LEAST[dialect], **given}), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        StoreConfig.from_file(path, dialect=dialect)
    start = f"In the config file {path} (dialect '{dialect}'): {told}"
    assert str(caught.value).startswith(start)


def test_a_bad_variable_and_a_bad_ignored_value_are_named() -> None:
    environ = {"MOONCAKE_MASTER": MASTER, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "4gib"}
    with pytest.raises(ConfigError, match=r"^In the environment \(dialect 'sglang'\): MOONCAKE_"):
        StoreConfig.from_env(environ, dialect="sglang")
    with pytest.raises(ConfigError, match="transfer_timeout='soon' is not usable: give seconds"):
        read("lmcache", {"transfer_timeout": "soon"})
    with pytest.raises(ConfigError, match="local_buffer_size='much' is not usable"):
        read("sglang", {"local_buffer_size": "much"})


def test_secrets_stay_out_of_the_errors() -> None:
    with pytest.raises(ConfigError) as caught:
        read("vllm", {"metadata_server": "redis://user:hunter2@h:1/ x"})
    assert "hunter2" not in str(caught.value)


def test_what_is_no_dialect_or_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dialect='sgl' .* did you mean 'sglang'"):
        StoreConfig.from_file(tmp_path / "none", dialect="sgl")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dialect=7 .* one of 'sglang', 'vllm', 'lmcache', 'wh"):
        StoreConfig.from_env({}, dialect=7)  # type: ignore[arg-type]
    for bad, why in (
        ("x", "give a mapping"),
        (["x"], "give a mapping"),
        ({1: 2}, "key 1, which is no text"),
    ):
        for dialect in (None, *get_args(Dialect)):
            with pytest.raises(ConfigError, match=f"given (is|has) .*{why}"):
                StoreConfig.from_mapping(bad, dialect=dialect)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"extra_config (is|has) .*{why}"):
            StoreConfig.from_mapping({"extra_config": bad}, dialect="lmcache")
    with pytest.raises(ConfigError, match="did you mean 'extra_config'"):
        StoreConfig.from_mapping({"extra_confg": {}}, dialect="lmcache")


def test_a_file_that_can_not_be_read_names_the_variable_that_chose_it(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    environ = {"SGLANG_HICACHE_MOONCAKE_CONFIG_PATH": str(path)}
    with pytest.raises(ConfigError, match=r"none\.json can't be read .* SGLANG_HICACHE_MOONCAKE_C"):
        StoreConfig.from_env(environ, dialect="sglang")
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        StoreConfig.from_file(path, dialect="sglang")


_ALL_NAMES = sorted(
    {name for rules in (*RULES.values(), SETUP) for name in (*rules.names(), *SETTINGS)}
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@drawn(
    dialect=st.sampled_from(get_args(Dialect)),
    given=st.dictionaries(st.sampled_from([*_ALL_NAMES, "extra_config"]), _VALUES, max_size=6),
    place=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("rank", "tp_size", "pp_size", "gpu"), _VALUES)
    ),
)
def test_nonsense_is_a_config_error_and_nothing_else(
    dialect: Dialect, given: dict[str, Any], place: dict[str, Any]
) -> None:
    before = repr(given)
    for whole in (given, {**LEAST[dialect], **given}):
        told: str = dialect
        try:
            StoreConfig.from_mapping(whole, dialect=dialect, **place)
        except ConfigError as error:
            told = str(error)
        assert dialect in told
    assert repr(given) == before


# --- without a dialect ------------------------------------------------------------------------


def test_a_mapping_without_a_dialect_is_ours() -> None:
    given = {"master_server_addr": MASTER, "rdma_devices": "mlx5_0", "rpc_timeout": 3, "mode": "x"}
    config = StoreConfig.from_mapping(given)
    assert config == StoreConfig(MASTER, device_name="mlx5_0", rpc_timeout=3)
    with pytest.raises(ConfigError, match="Key 'protocl' is unknown; did you mean 'protocol'"):
        StoreConfig.from_mapping({"master_server_address": MASTER, "protocl": "tcp"})


@pytest.mark.parametrize(
    "url", ["mooncakestore://10.0.0.1:50051", "MooncakeStore://10.0.0.1:50051/"]
)
def test_lmcaches_url_is_a_target(url: str) -> None:
    assert parse_target(url).address == MASTER
    assert StoreConfig.from_url(url) == StoreConfig(MASTER)


def test_lmcaches_url_takes_its_parameter_and_ours() -> None:
    config = StoreConfig.from_url("mooncakestore://10.0.0.1:50051/?device=mlx5_0&protocol=rdma")
    assert config == StoreConfig(MASTER, device_name="mlx5_0", protocol="rdma")
    for bad in (
        "mooncakestore://10.0.0.1",
        "mooncakestore://a:1,b:2",
        "mooncakestore://a:1?device=x&device_name=y",
        "mooncakestore://a:1?devise=x",
        "mooncake://a:1?device=x",
        "mooncakestor://a:1",
    ):
        with pytest.raises(ConfigError):
            parse_target(bad)


# --- the tables and the documentation ---------------------------------------------------------


@pytest.mark.parametrize("rules", [*RULES.values(), SETUP], ids=lambda rules: rules.project)
def test_the_tables_are_sound(rules: Any) -> None:
    for key in rules.keys:
        assert key.names or key.variables
        assert key.parse is not None or key.into in SETTINGS
        assert key.into in SETTINGS or key.note, "what is no field needs a word"
        if key.into in SETTINGS and key.default is not None:
            assert key.read(key.default, "f") == key.default
    named = [name for key in rules.keys for name in (*key.names, *key.variables)]
    assert len(named) == len(set(named))
    assert len([key.into for key in rules.keys if key.into]) == len(
        {key.into for key in rules.keys if key.into}
    )


def test_the_fields_that_no_project_has_are_ours() -> None:
    tables = (*RULES.values(), SETUP)
    used = {key.into for rules in tables for key in rules.keys}
    used |= {name for rules in tables for name in rules.names()}
    assert set(SETTINGS) - used == set(_OWN)


def test_the_documentation_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "configuration_table.py"))
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert script["page"](text) == text, "run scripts/configuration_table.py"
    for rules in (*RULES.values(), SETUP):
        for name in (*rules.names(), *rules.variables(), rules.path_variable):
            assert f"`{name}`" in text


# --- the real engine --------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", [*get_args(Dialect), "setup"])
async def test_a_config_of_each_dialect_opens_a_store(
    dialect: str, cluster: LocalCluster, open_store: OpenStore
) -> None:
    given: dict[str, Any] = {
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "global_segment_size": 16 * MIB,
        "local_buffer_size": 16 * MIB,
        "master_server_address": cluster.address,
        "local_hostname": "127.0.0.1",
    }
    config: StoreConfig
    if dialect == "setup":
        given["master_server_addr"] = given.pop("master_server_address")
        config = StoreConfig.from_mapping(given, dialect="wheel")
    elif dialect == "lmcache":
        url = f"mooncakestore://{given.pop('master_server_address')}/"
        settings = {"remote_url": url, "extra_config": given}
        config = StoreConfig.from_mapping(settings, dialect="lmcache")
    elif dialect == "sglang":
        given["global_segment_size"] = 128 * MIB
        config = StoreConfig.from_mapping(given, dialect="sglang", rank=9, tp_size=4, pp_size=2)
        assert config.client_http_port == 9310
    else:
        config = StoreConfig.from_mapping(given, dialect=dialect)  # type: ignore[arg-type]
    assert config.global_segment_size == config.local_buffer_size == 16 * MIB
    store = await open_store(config, timeout=20)
    await store.put(f"dialect-{dialect}", b"value")
    assert await store.get(f"dialect-{dialect}") == b"value"
