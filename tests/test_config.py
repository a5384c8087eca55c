"""Settings: from code, environment, file and URL; what is wrong is named with what is right."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from aiomooncake._foreign import FOREIGN_ENV
from aiomooncake._settings import SETTINGS
from aiomooncake.config import (
    ReplicateConfig,
    StoreConfig,
    Target,
    parse_size,
    parse_target,
    split_address,
)
from aiomooncake.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MASTER = "10.0.0.1:50051"


# --- sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4gb", 4 << 30),
        ("4 GB", 4 << 30),
        ("4GiB", 4 << 30),
        ("4Gi", 4 << 30),
        (" 4g ", 4 << 30),
        ("16mb", 16 << 20),
        ("512m", 512 << 20),
        ("512MiB", 512 << 20),
        ("1.5g", 3 << 29),
        ("2tb", 2 << 40),
        ("3kB", 3072),
        ("123", 123),
        ("123b", 123),
        ("123 B", 123),
        ("0", 0),
        (0, 0),
        (4096, 4096),
        (4096.0, 4096),
    ],
)
def test_sizes_of_every_spelling(text: object, size: int) -> None:
    assert parse_size(text, field="f") == size


@pytest.mark.parametrize(
    "value",
    [
        True, None, -1, -4096.0, "-4gb", "", " ", "gb", "4xb", "4bb", "4ib", "4gbb", "1_000", "1e9",
        "infinite", "nan", float("nan"), float("inf"), 1.5, "1.5", "1.5b", "0.1gb", "4,5gb", "0x10",
        b"4gb", [4], 2**63, "9" * 5000, "٤gb",
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_its_field(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^buffer=.* is not usable: ") as caught:
        parse_size(value, field="buffer")
    assert len(str(caught.value)) < 400


def test_a_size_beyond_whole_bytes_says_what_it_comes_to() -> None:
    with pytest.raises(ConfigError, match=r"comes to 107374182\.4 bytes"):
        parse_size("0.1gb", field="f")


# --- addresses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("localhost:50051", ("localhost", 50051)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("node-1.rack_2.example.:65535", ("node-1.rack_2.example.", 65535)),
        ("[::1]:50051", ("::1", 50051)),
        ("[fe80::1%eth0]:50051", ("fe80::1%eth0", 50051)),
    ],
)
def test_addresses_are_split(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text, field="f") == parts


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("10.0.0.1", "the port is missing"),
        ("[::1]", "the port is missing"),
        ("::1", "brackets"),
        ("::1:50051", "brackets"),
        ("fe80::1", "brackets"),
        ("[::1", "IPv6 address as in"),
        ("[::1]50051", "IPv6 address as in"),
        ("[nonsense]:1", "not an IPv6 address"),
        ("h:0", "between 1 and 65535"),
        ("h:65536", "between 1 and 65535"),
        ("h:", "between 1 and 65535"),
        ("h:+1", "between 1 and 65535"),
        ("h:\uff15", "between 1 and 65535"),
        (":1", "give host:port"),
        ("", "give host:port"),
        ("h h:1", "space"),
        ("h\u00a0h:1", "space"),
        ("h:1\n", "control character"),
        ("h\x00:1", "control character"),
        ("h/x:1", "give host:port"),
        ("u:pw@h:1", "no user or password"),
    ],
)
def test_bad_addresses_say_why(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        split_address(text, field="peer")
    assert str(caught.value).startswith("peer=")
    assert "pw" not in str(caught.value)


# --- StoreConfig ----------------------------------------------------------------------------


def test_defaults() -> None:
    config = StoreConfig(MASTER)
    assert config.master_server_address == MASTER
    assert config.global_segment_size == 512 << 20
    assert config.local_buffer_size == 64 << 20
    assert config.mem_pool_size == 0
    assert (config.protocol, config.metadata_server) == ("tcp", "P2PHANDSHAKE")
    assert (config.rpc_timeout, config.rpc_connect_timeout, config.transfer_timeout) == (2.5, 2, 2)
    assert config.local_hostname is None


def test_every_field_is_in_the_table_and_the_other_way_round() -> None:
    assert [field.name for field in dataclasses.fields(StoreConfig)] == list(SETTINGS)


def test_only_the_master_is_positional() -> None:
    with pytest.raises(TypeError):
        StoreConfig(MASTER, "node1")  # type: ignore[call-arg]


def test_values_are_normalised() -> None:
    config = StoreConfig(
        MASTER,
        protocol=" RDMA ",
        metadata_server="p2phandshake",
        global_segment_size="4gb",
        local_buffer_size=0,
        local_hostname="node1:12345",
        client_server_address="",
    )
    assert config.protocol == "rdma"
    assert config.metadata_server == "P2PHANDSHAKE"
    assert config.global_segment_size == 4 << 30
    assert config.local_buffer_size == 0
    assert config.client_server_address is None


@pytest.mark.parametrize(
    "address",
    ["h:1", "[::1]:50051", "etcd://a:2379,b:2379", "redis://h:6379/0", "k8s://ns/lease"],
)
def test_masters_may_be_named_in_many_ways(address: str) -> None:
    assert StoreConfig(address).master_server_address == address


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("master_server_address", "h"),
        ("master_server_address", "::1"),
        ("master_server_address", "tcp://h:1"),
        ("master_server_address", "etcd://"),
        ("master_server_address", None),
        ("local_hostname", "h h"),
        ("local_hostname", "fe80::1"),
        ("local_hostname", "h:0"),
        ("local_hostname", "h\n"),
        ("metadata_server", ""),
        ("metadata_server", "a b"),
        ("global_segment_size", 1023),
        ("global_segment_size", -1),
        ("global_segment_size", "lots"),
        ("global_segment_size", True),
        ("local_buffer_size", "1b"),
        ("local_buffer_size", "1025gb"),
        ("mem_pool_size", 12),
        ("protocol", ""),
        ("protocol", "tcpp"),
        ("protocol", "rmda"),
        ("protocol", "t c p"),
        ("device_name", 3),
        ("tenant_id", ""),
        ("tenant_id", "a b"),
        ("client_server_address", "h"),
        ("master_metrics_port", 0),
        ("master_metrics_port", 65536),
        ("client_http_port", "many"),
        ("client_http_port", 9300.5),
        ("client_http_port", None),
        ("enable_ssd_offload", "perhaps"),
        ("ssd_offload_path", "/a\x00b"),
        ("rpc_timeout", 0),
        ("rpc_timeout", float("nan")),
        ("rpc_timeout", float("inf")),
        ("rpc_timeout", "soon"),
        ("rpc_connect_timeout", -1),
        ("rpc_connect_timeout", True),
        ("transfer_timeout", 0),
        ("transfer_timeout", 21),
        ("transfer_timeout", 1.5),
        ("max_abandoned", 0),
        ("threads", 0),
        ("threads", "9" * 30),
    ],
)
def test_a_bad_value_is_named_with_its_field_and_the_cure(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}=.* is not usable: ."):
        StoreConfig(**{"master_server_address": MASTER, field: value})  # type: ignore[arg-type]


def test_an_unknown_transport_passes_unless_it_looks_mistyped() -> None:
    assert StoreConfig(MASTER, protocol="quantum").protocol == "quantum"
    with pytest.raises(ConfigError, match=r"did you mean 'rdma'\?$"):
        StoreConfig(MASTER, protocol="rmda")


def test_more_than_one_tebibyte_may_be_lent() -> None:
    """Upstream cuts a large segment into several; only the local buffer has an upper bound."""
    assert StoreConfig(MASTER, global_segment_size="2tb").global_segment_size == 2 << 40


def test_without_a_master_there_must_be_a_client() -> None:
    assert StoreConfig("", client_server_address="127.0.0.1:50052").master_server_address == ""
    with pytest.raises(ConfigError, match="master_server_address is empty"):
        StoreConfig("")


def test_a_config_is_frozen_slotted_hashable_and_copies() -> None:
    config = StoreConfig(MASTER, global_segment_size="4gb")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.threads = 3  # type: ignore[misc]
    assert not hasattr(config, "__dict__")
    assert hash(config) == hash(StoreConfig(MASTER, global_segment_size=4 << 30))
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


def test_replace_checks_like_the_constructor() -> None:
    config = StoreConfig(MASTER)
    assert config.replace(global_segment_size="1gb").global_segment_size == 1 << 30
    with pytest.raises(
        ConfigError, match=r"'global_segmnt_size' is unknown; did you mean 'global_s"
    ):
        config.replace(global_segmnt_size="1gb")
    with pytest.raises(ConfigError, match="did you mean 'device_name'"):
        config.replace(rdma_devices="mlx5_0")
    with pytest.raises(ConfigError, match=r"^threads="):
        config.replace(threads=0)


def test_repr_shows_what_differs_and_hides_secrets() -> None:
    assert repr(StoreConfig(MASTER)) == f"StoreConfig('{MASTER}')"
    shown = repr(
        StoreConfig(
            "redis://me:hunter?2@h:6379/0",
            metadata_server="http://u:hunter2@h/m?a=1&access_token=hunter2&b=2",
            threads=3,
        )
    )
    assert "hunter" not in shown
    assert "me" not in shown.split(",")[0]
    assert shown == (
        "StoreConfig('redis://***@h:6379/0', "
        "metadata_server='http://***@h/m?a=1&access_token=***&b=2', threads=3)"
    )


def test_an_error_hides_secrets_too() -> None:
    with pytest.raises(ConfigError) as caught:
        StoreConfig("tcp://u:hunter2@h:1")
    assert "hunter2" not in str(caught.value)


# --- the environment ------------------------------------------------------------------------


def test_the_environment_of_an_operator() -> None:
    config = StoreConfig.from_env(
        {
            "MOONCAKE_MASTER": MASTER,
            "MOONCAKE_LOCAL_HOSTNAME": "node1",
            "MOONCAKE_TE_META_DATA_SERVER": "http://h:8080/metadata",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": "4gb",
            "MOONCAKE_LOCAL_BUFFER_SIZE": "1048576",
            "MOONCAKE_PROTOCOL": "RDMA",
            "MOONCAKE_DEVICE": "mlx5_0",
            "MOONCAKE_TENANT_ID": "blue",
            "MOONCAKE_MASTER_METRICS_PORT": "9003",
            "MOONCAKE_OFFLOAD_ENABLED": "on",
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "/nvme/my cache",
            "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER": "1",
            "MOONCAKE_CLIENT_HTTP_PORT": "9301",
            "PATH": "/bin",
        }
    )
    assert config == StoreConfig(
        MASTER,
        local_hostname="node1",
        metadata_server="http://h:8080/metadata",
        global_segment_size=4 << 30,
        local_buffer_size=1 << 20,
        protocol="rdma",
        device_name="mlx5_0",
        tenant_id="blue",
        master_metrics_port=9003,
        enable_ssd_offload=True,
        ssd_offload_path="/nvme/my cache",
        enable_client_http_server=True,
        client_http_port=9301,
    )


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", MASTER)
    assert StoreConfig.from_env().master_server_address == MASTER


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("MOONCAKE_MASTER_SERVER_ADDRESS", "master_server_address", "h:1"),
        ("MOONCAKE_MASTER_SERVER_ADDR", "master_server_address", "h:1"),
        ("MOONCAKE_METADATA_SERVER", "metadata_server", "h:2"),
        ("MOONCAKE_DEVICE_NAME", "device_name", "mlx5_0"),
        ("MOONCAKE_CLIENT", "client_server_address", "h:3"),
    ],
)
def test_other_spellings_of_a_variable(name: str, field: str, value: str) -> None:
    config = StoreConfig.from_env({"MOONCAKE_CLIENT": "h:3", name: value})
    assert getattr(config, field) == value


def test_an_empty_variable_counts_as_not_set() -> None:
    config = StoreConfig.from_env(
        {"MOONCAKE_MASTER": MASTER, "MOONCAKE_DEVICE": "", "MOONCAKE_PROTOCOL": " "}
    )
    assert config == StoreConfig(MASTER)


def test_two_spellings_may_agree_but_not_differ() -> None:
    both = {"MOONCAKE_MASTER": MASTER, "MOONCAKE_MASTER_SERVER_ADDRESS": MASTER}
    assert StoreConfig.from_env(both) == StoreConfig(MASTER)
    with pytest.raises(
        ConfigError, match=r"MOONCAKE_MASTER='.*MOONCAKE_MASTER_SERVER_ADDRESS='h:1"
    ):
        StoreConfig.from_env({**both, "MOONCAKE_MASTER_SERVER_ADDRESS": "h:1"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MOONCAKE_MASTR", "MOONCAKE_MASTER"),
        ("MOONCAKE_PROTOCOLL", "MOONCAKE_PROTOCOL"),
        ("MOONCAKE_GLOBAL_SEGMENT_SZE", "MOONCAKE_GLOBAL_SEGMENT_SIZE"),
        ("MOONCAKE_OFFLOAD_ENABLE", "MOONCAKE_OFFLOAD_ENABLED"),
        ("MOONCAKE_TENANT", "MOONCAKE_TENANT_ID"),
    ],
)
def test_a_mistyped_variable_is_an_error_that_names_the_right_one(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is unknown; did you mean {meant}\?"):
        StoreConfig.from_env({"MOONCAKE_MASTER": MASTER, name: "x"})


def test_variables_of_the_engine_and_of_others_are_left_alone() -> None:
    environ = {f"MOONCAKE_{name}": "1" for name in FOREIGN_ENV - {"CONFIG_PATH"}}
    config = StoreConfig.from_env({**environ, "MOONCAKE_MASTER": MASTER, "MOONCAKE_VERSION": "1"})
    assert config == StoreConfig(MASTER)


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^MOONCAKE_CLIENT_HTTP_PORT='x' is not usable"):
        StoreConfig.from_env({"MOONCAKE_MASTER": MASTER, "MOONCAKE_CLIENT_HTTP_PORT": "x"})


def test_an_environment_without_a_master_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match="set MOONCAKE_MASTER=host:port, or MOONCAKE_CONFIG_PATH"):
        StoreConfig.from_env({})


def test_a_client_address_is_ignored_where_it_is_switched_off() -> None:
    """SGLang's MOONCAKE_STANDALONE_STORAGE decides which of the two addresses counts."""
    environ = {"MOONCAKE_MASTER": MASTER, "MOONCAKE_CLIENT": "h:1"}
    assert StoreConfig.from_env(environ).client_server_address == "h:1"
    environ["MOONCAKE_STANDALONE_STORAGE"] = "false"
    assert StoreConfig.from_env(environ).client_server_address is None


# --- files ----------------------------------------------------------------------------------


def write(path: Path, content: object) -> Path:
    file = path / "mooncake.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_a_file_of_the_wheel(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {
            "local_hostname": "localhost",
            "metadata_server": "localhost:8080",
            "global_segment_size": 3355443200,
            "local_buffer_size": "1GB",
            "protocol": "tcp",
            "device_name": None,
            "master_server_address": "localhost:8081",
            "enable_ssd_offload": "true",
            "client_http_port": "9300",
            "check_server": False,
            "storage_root_dir": "",
        },
    )
    config = StoreConfig.from_file(file)
    assert config == StoreConfig.from_file(str(file))
    assert config.local_buffer_size == 1 << 30
    assert config.enable_ssd_offload is True
    assert config.master_server_address == "localhost:8081"


def test_a_file_with_the_engines_own_keys(tmp_path: Path) -> None:
    file = write(tmp_path, {"master_server_addr": "h:1", "rdma_devices": "mlx5_0"})
    assert StoreConfig.from_file(file) == StoreConfig("h:1", device_name="mlx5_0")


def test_the_environment_overrides_its_file(tmp_path: Path) -> None:
    file = write(tmp_path, {"master_server_address": "h:1", "threads": 3, "protocol": "rdma"})
    config = StoreConfig.from_env(
        {"MOONCAKE_CONFIG_PATH": str(file), "MOONCAKE_MASTER": MASTER, "MOONCAKE_PROTOCOL": ""}
    )
    assert config == StoreConfig(MASTER, threads=3, protocol="rdma")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is not usable JSON"),
        ("[]", "must hold a JSON object"),
        ('{"protocol": "tcp", "protocol": "rdma"}', "'protocol' stands there twice"),
        ({"master_server_adress": "h:1"}, r"unknown; did you mean 'master_server_address'\?"),
        ({"rdma_device": "x"}, r"did you mean 'device_name'\?"),
        ({"zzz": 1}, "'zzz' is unknown. Known are: master_server_address, "),
        ({"device_name": "a", "rdma_devices": "b"}, "both set device_name and differ"),
        ({"master_server_address": "h:1", "threads": []}, r"^threads=\[\] is not usable"),
        ({}, "master_server_address is empty"),
    ],
)
def test_a_bad_file_says_why(tmp_path: Path, content: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        StoreConfig.from_file(write(tmp_path, content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json can't be read \(No such file"):
        StoreConfig.from_file(tmp_path / "nowhere.json")


# --- URLs and targets -----------------------------------------------------------------------


def test_a_url_with_parameters() -> None:
    url = f"mooncake://{MASTER}/?protocol=TCP&global_segment_size=4%20GB&rdma_devices=a,b&direct=no"
    assert StoreConfig.from_url(url) == StoreConfig(
        MASTER, global_segment_size="4gb", device_name="a,b", direct=False
    )
    assert StoreConfig.from_url("MOONCAKE://[::1]:50051").master_server_address == "[::1]:50051"


def test_a_url_of_a_dummy_client_needs_no_master() -> None:
    config = StoreConfig.from_url("mooncake://?client_server_address=h:1")
    assert config == StoreConfig("", client_server_address="h:1")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "give host:port"),
        ("10.0.0.1", "the port is missing"),
        ("moncake://h:1", r'did you mean "mooncake://"\?$'),
        ("ftp://h:1", "give host:port or"),
        (
            "mooncake://",
            "^target='mooncake://' is .*it names no master: give .mooncake://host:port",
        ),
        ("mooncakestore:///?device=a", "'mooncakestore:///[?]device=a' is .*names no master"),
        ("mooncake://h", "the port is missing"),
        ("mooncake://h:1/x", "the port is a number"),
        ("mooncake://h:1#x", "the port is a number"),
        ("mooncake://u:p@h:1", "no user or password"),
        ("mooncake://h:1?protocol", "parameters look like"),
        ("mooncake://h:1?threads=1&threads=2", "sets threads twice"),
        (
            "mooncake://h:1?thread=1",
            r"^URL parameter 'thread' is unknown; did you mean 'threads'\?",
        ),
        ("mooncake://h:1?threads=x", "^threads='x' is not usable"),
        ("mooncake://h:1?master_server_addr=h:2", "stands before"),
        ("local://somewhere", "has no address"),
        ("memory://", "give a name"),
        ("memory://a/b", "give a name"),
        ("h:1 ?", "space"),
    ],
)
def test_bad_targets_say_why(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_target(text)


def test_only_mooncake_urls_make_a_config() -> None:
    for url in ("local://", "memory://x"):
        with pytest.raises(ConfigError, match="connect takes the others"):
            StoreConfig.from_url(url)


def test_a_target_is_told_by_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    config = StoreConfig(MASTER)
    assert parse_target(MASTER) == Target("master", MASTER)
    assert parse_target(config) == Target("master", MASTER, config=config)
    assert parse_target("local://?threads=2") == Target("local", overrides={"threads": 2})
    assert parse_target("memory://Test.1") == Target("memory", "Test.1")
    assert parse_target("ETCD://h:2379") == Target("master", "etcd://h:2379")
    monkeypatch.setenv("MOONCAKE_MASTER", MASTER)
    assert parse_target(None).config == config


def test_a_target_becomes_a_config() -> None:
    made = parse_target(f"mooncake://{MASTER}?threads=2&protocol=rdma").to_config(threads="3")
    assert made == StoreConfig(MASTER, threads=3, protocol="rdma")
    made = parse_target("local://?threads=2").to_config("127.0.0.1:1", max_abandoned=2)
    assert made == StoreConfig("127.0.0.1:1", threads=2, max_abandoned=2)
    assert parse_target("memory://x").to_config().master_server_address == "memory://x"
    assert parse_target(StoreConfig(MASTER)).to_config(threads=5).threads == 5


@pytest.mark.parametrize("target", [MASTER, StoreConfig(MASTER)])
def test_a_target_refuses_unknown_overrides(target: str | StoreConfig) -> None:
    with pytest.raises(ConfigError, match="'protocl' is unknown; did you mean 'protocol'"):
        parse_target(target).to_config(protocl="tcp")


def test_repr_of_a_target_hides_secrets() -> None:
    assert repr(parse_target("redis://u:pw@h:1")) == "Target('master', 'redis://***@h:1')"


# --- ReplicateConfig ------------------------------------------------------------------------


def test_replicate_defaults_are_the_engines() -> None:
    config = ReplicateConfig()
    assert (config.replica_num, config.nof_replica_num, config.dfs_replica_num) == (1, 0, 0)
    assert (config.soft_pin_action, config.data_type) == ("preserve", "unknown")
    assert config.group_ids is None


def test_the_soft_pin_of_older_wheels_has_another_name() -> None:
    """The nearest name is `with_hard_pin`, which never lets go of the object."""
    with pytest.raises(ConfigError, match="did you mean 'soft_pin_action'"):
        ReplicateConfig().replace(with_soft_pin=True)


def test_replicate_lists_become_tuples() -> None:
    config = ReplicateConfig(2, preferred_segments=["h:1", "h:2"], group_ids=["a", "", "b c"])
    assert config.preferred_segments == ("h:1", "h:2")
    assert config.group_ids == ("a", "", "b c")
    assert hash(config) == hash(config.replace(replica_num=2))
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"replica_num": 0}, "replica_num"),
        ({"replica_num": -1}, "replica_num"),
        ({"replica_num": True}, "replica_num"),
        ({"dfs_replica_num": 2}, "dfs_replica_num"),
        ({"dfs_replica_num": 1, "replica_num": 0}, "dfs_replica_num"),
        ({"prefer_alloc_in_same_node": True, "replica_num": 2}, "prefer_alloc_in_same_node"),
        ({"prefer_alloc_in_same_node": True, "nof_replica_num": 1}, "prefer_alloc_in_same_node"),
        ({"prefer_alloc_in_same_node": 1}, "prefer_alloc_in_same_node"),
        ({"with_hard_pin": "yes"}, "with_hard_pin"),
        ({"soft_pin_ttl_ms": 10}, "soft_pin_ttl_ms"),
        ({"soft_pin_ttl_ms": -1, "soft_pin_action": "enable"}, "soft_pin_ttl_ms"),
        ({"soft_pin_action": "ENABLE"}, "soft_pin_action"),
        ({"data_type": "video"}, "data_type"),
        ({"preferred_segments": "h:1"}, "preferred_segments"),
        ({"preferred_segments": [1]}, "preferred_segments"),
        ({"preferred_segment": "h:1", "preferred_segments": ["h:1"]}, "preferred_segment"),
        ({"group_ids": "abc"}, "group_ids"),
    ],
)
def test_bad_placement_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}=.* is not usable: ."):
        ReplicateConfig(**changes)


def test_an_unknown_placement_field_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'replica_num'"):
        ReplicateConfig().replace(replicas_num=2)


def test_placement_that_goes_together() -> None:
    assert ReplicateConfig(0, nof_replica_num=1).replica_num == 0
    assert ReplicateConfig(soft_pin_action="enable", soft_pin_ttl_ms=0).soft_pin_ttl_ms == 0
    assert ReplicateConfig(dfs_replica_num=1).dfs_replica_num == 1


def test_config_of_an_in_memory_store_is_a_target_again() -> None:
    """``connect(store.config)`` once took the way to a real master."""
    config = parse_target("memory://again").to_config()
    target = parse_target(config)
    assert (target.kind, target.address, target.config) == ("memory", "again", config)
