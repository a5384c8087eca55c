"""Addresses of masters and metadata servers: what passes, and what is told before the engine."""

from __future__ import annotations

import traceback

import pytest

from aiomooncake import ConfigError, StoreConfig
from aiomooncake._addresses import hosts_of
from aiomooncake.config import parse_target

MASTER = "10.0.0.1:50051"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("P2PHandshake", "P2PHANDSHAKE"),
        ("http://10.0.0.2:8080/metadata", None),
        ("HTTP://host/metadata", "http://host/metadata"),
        ("http://[::1]:8080/metadata", None),
        ("https://user:pa@ss@host:8443/a/b?token=x", None),
        ("etcd://10.0.0.2:2379", None),
        ("etcd://10.0.0.2:2379;10.0.0.3:2379", None),
        ("etcd://10.0.0.2:2379,[fd00::3]:2379", None),
        ("etcd://http://10.0.0.2:2379;https://10.0.0.3:2379", None),
        ("10.0.0.2:2379", None),  # etcd too, for the engine
        ("10.0.0.2:2379,10.0.0.3:2379", None),
        ("etcd:2379", None),  # a host may have that name
        ("etcd:2379,b:2379", None),
        ("redis://10.0.0.2:6379", None),
        ("redis://user:secret@10.0.0.2:6379", None),
    ],
)
def test_metadata_servers_that_pass(given: str, kept: str | None) -> None:
    config = StoreConfig(MASTER, metadata_server=given)
    assert config.metadata_server == (kept or given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("P2P_HANDSHAKE", 'did you mean "P2PHANDSHAKE"'),
        ("P2PHANDSHAK", 'did you mean "P2PHANDSHAKE"'),
        ("localhost", "etcd://host:2379"),
        ("localhost:http", "etcd://host:2379"),
        ("http://", "nothing follows the ://"),
        ("etcd://", 'nothing follows the ://; give it as in "etcd://host:2379'),
        ("http:/127.0.0.1:8080/metadata", 'the // is missing: give it as in "http://host:8080'),
        ("etcd:127.0.0.1:2379", "the // is missing"),
        ("redis:user:secret@host:6379", "the // is missing"),
        ("http:///metadata", "http://host:8080/metadata"),
        ("http://:8080/metadata", "http://host:8080/metadata"),
        ("http://user:secret@/metadata", "http://host:8080/metadata"),
        ("http://host:0/metadata", "http://host:8080/metadata"),
        ("http://host:65536/metadata", "http://host:8080/metadata"),
        ("http://127.0.0.1:99999/metadata", "a port is a number between 1 and 65535"),
        ("etcd://a:x", "a port is a number between 1 and 65535"),
        ("etcd://a:2379;[::1]:x", "a port is a number between 1 and 65535"),
        ("https://user:secret@[::1]:x/m", "a port is a number between 1 and 65535"),
        ("http://host:secret@:x/metadata", "http://host:8080/metadata"),
        ("http://::1:8080/metadata", "IPv6 address in brackets"),
        ("http://host:8080", "the path is missing"),
        ("http://host:8080/", "the path is missing"),
        ("https://host?token=secret", "the path is missing"),
        ("http://host:8080/meta data", "it holds a space"),
        ("http://host:8080/metadata\n", "control character"),
        ("htp://host:8080/metadata", "a URL that starts with http"),
        ("k8s://ns/lease", "a URL that starts with http"),
        ("etcd://host", "etcd://host:2379"),
        ("etcd://a:2379;b", "etcd://host:2379"),
        ("etcd://a:2379;b:port", "etcd://host:2379"),
        ("etcd://;", "etcd://host:2379"),
        ("etcd://a:2379; b:2379", "it holds a space"),
        ("etcd://a:2379/", "etcd://host:2379"),
        ("etcd://user:secret;x:1@a", "leave user and password out"),
        ("etcd://user:secret@a:2379", "leave user and password out"),
        ("http://user:secret@h\udcff:1/x", "no valid Unicode"),
        ("redis://host:x", "redis://host:6379"),
        ("redis://user:secret@", "redis://host:6379"),
    ],
)
def test_metadata_servers_that_are_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        StoreConfig(MASTER, metadata_server=given)
    told = str(refused.value)
    assert told.startswith("metadata_server=")
    assert said in told
    assert "secret" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "address",
    [
        "etcd://10.0.0.2:2379",
        "etcd://10.0.0.2:2379;10.0.0.3:2379",
        "etcd://[::1]:2379,b:2379",
        "etcd://http://a:2379",
        "redis://10.0.0.2",
        "redis://[::1]:6379",
        "redis://user:secret@10.0.0.2:6379/",
        "k8s://lease",
        "k8s://name-space/mooncake.master",
    ],
)
def test_masters_behind_a_coordinator_pass(address: str) -> None:
    assert StoreConfig(address).master_server_address == address
    target = parse_target(address)
    assert (target.kind, target.address) == ("master", address)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://10.0.0.1:9003", "master_metrics_port"),
        ("HTTPS://user:secret@host/x", "master_metrics_port"),
        ("etcd://", "nothing follows"),
        ("etcd:127.0.0.1:2379", 'did you mean "etcd://"?'),
        ("Redis:127.0.0.1:6379", 'did you mean "redis://"?'),
        ("10.0.0.1:50051:3", "there is a colon too many"),
        ("::1:50051", "an IPv6 address stands in brackets"),
        ("fd00:0:1:2:50051", "an IPv6 address stands in brackets"),
        ("10.0.0.1:70000", "the port is a number between 1 and 65535"),
        ("etcd://a", "etcd://host:2379"),
        ("etcd://a:x", "a port is a number between 1 and 65535"),
        ("etcd://a:2379;b:0", "etcd://host:2379"),
        ("etcd://a:2379/", "etcd://host:2379"),
        ("redis://user:secret@:6379", "redis://host:6379"),
        ("redis://h:6379:1", "redis://host:6379"),
        ("k8s://", "nothing follows"),
        ("k8s:///lease", "k8s://namespace/lease"),
        ("k8s://ns/", "k8s://namespace/lease"),
        ("k8s://a/b/c", "k8s://namespace/lease"),
        ("k8s://Name/Lease", "k8s://namespace/lease"),
    ],
)
def test_masters_that_are_refused(address: str, said: str) -> None:
    for make in (StoreConfig, parse_target):
        with pytest.raises(ConfigError) as refused:
            make(address)
        assert said in str(refused.value)
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "hosts"),
    [
        ("http://user:p/w@h@host/metadata", None),
        ("http://u:p@host/metadata?x=a@b:1", [("host", 80)]),
        ("https://[::1]/m", [("::1", 443)]),
        ("etcd://a:1;http://b:2,", [("a", 1), ("b", 2)]),
        ("a:1,b:2", [("a", 1), ("b", 2)]),
        ("redis://h", [("h", 6379)]),
        ("k8s://ns/lease", None),
        ("etcd://a", None),
    ],
)
def test_the_hosts_that_an_address_names(address: str, hosts: list[tuple[str, int]] | None) -> None:
    if hosts is None:
        with pytest.raises(ConfigError):
            hosts_of(address)
    else:
        assert hosts_of(address) == hosts
