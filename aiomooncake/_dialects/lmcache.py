"""LMCache: its ``mooncakestore`` remote backend.

Read from ``lmcache/v1/storage_backend/connector/mooncakestore_connector.py`` and
``mooncakestore_adapter.py``, and from ``docs/source/kv_cache/storage_backends/mooncake.rst``. Newer
versions pass every key that begins with ``mooncake_`` on to the engine's ``setup`` and take no
address from ``remote_url``; older ones know the plain keys only, and the URL wins.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

from aiomooncake._dialects.rules import Key, Place, Rules, Values
from aiomooncake._dialects.values import is_unset, loose_text, size
from aiomooncake._dialects.wheel import ENGINE_FLAG, ENGINE_UNITS
from aiomooncake._settings import SETTINGS, Parse, load_json
from aiomooncake._values import (
    bad_value,
    check_keys,
    check_text,
    mask_secrets,
    nearest,
    parse_seconds,
    split_address,
)
from aiomooncake.errors import ConfigError

__all__ = ["LMCACHE", "SCHEME", "gather", "unpack"]

SCHEME: Final = "mooncakestore"
_THIS_HOST: Final = ("localhost", "127.0.0.1", "[::1]")

log = logging.getLogger("aiomooncake")


def _plain(*names: str) -> tuple[str, ...]:
    """Return the keys for a thing: those with ``mooncake_`` win over those without."""
    return (*(f"mooncake_{name}" for name in names), names[-1])


def _master(value: object, name: str) -> str:
    text = check_text(value, field=name)
    scheme, mark, rest = text.partition("://")
    if mark and scheme.lower() == SCHEME:
        text = rest.removesuffix("/")
    address: str = SETTINGS["master_server_address"].parse(text, name)
    return address


def _url(value: object, name: str) -> tuple[str, str]:
    """Read ``mooncakestore://host:port/?device=…`` into the master's address and the devices."""
    text = check_text(value, field=name)
    scheme, _, rest = text.partition("://")
    if scheme.lower() == "plugin":
        return "", ""
    if scheme.lower() != SCHEME:
        want = f'it names another backend than Mooncake; give "{SCHEME}://host:port"'
        raise bad_value(name, value, want)
    place, _, query = rest.partition("?")
    address = place.partition("/")[0]
    split_address(address, field=name)
    devices = parse_qs(query).get("device", [""])
    return address, SETTINGS["device_name"].parse(devices[0], name)


def unpack(given: Mapping[str, object]) -> dict[str, object]:
    """Return the part of an LMCache configuration that is about Mooncake.

    Args:
        given: the whole configuration, with ``remote_url`` and ``extra_config``; or what stands in
            ``extra_config``; or the content of the file that ``MOONCAKE_CONFIG_PATH`` names.
    """
    for name in given:
        if nearest(name, ("extra_config",), cutoff=0.85) and name != "extra_config":
            raise ConfigError(f"key {name!r} is unknown; did you mean 'extra_config'?")
    if "extra_config" not in given:
        return dict(given)
    extra = given["extra_config"]
    settings = {} if extra is None else dict(check_keys(extra, field="extra_config"))
    url = given.get("remote_url")
    return settings if is_unset(url) else {**settings, "remote_url": url}


def gather(environ: Mapping[str, str]) -> dict[str, object]:
    """Read what LMCache reads where ``MOONCAKE_CONFIG_PATH`` is not set.

    That is the file that ``LMCACHE_CONFIG_FILE`` names (YAML there; only JSON here), with
    ``LMCACHE_REMOTE_URL`` and ``LMCACHE_EXTRA_CONFIG`` (JSON) over it.
    """
    given: dict[str, Any] = {}
    path = environ.get("LMCACHE_CONFIG_FILE")
    if path:
        try:
            given = load_json(Path(path), "LMCACHE_CONFIG_FILE")
        except ConfigError as error:
            if not isinstance(error.__cause__, ValueError):
                raise
            raise ConfigError(
                f"{error}. YAML is not read here: load it yourself, and give the mapping to "
                "StoreConfig.from_mapping."
            ) from error.__cause__
    url = environ.get("LMCACHE_REMOTE_URL")
    if not is_unset(url):
        given["remote_url"] = url
    extra = environ.get("LMCACHE_EXTRA_CONFIG")
    if extra is not None and not is_unset(extra):
        try:
            given["extra_config"] = json.loads(extra)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"LMCACHE_EXTRA_CONFIG is no JSON: {error}.") from None
    if not given:
        raise ConfigError(
            "set MOONCAKE_CONFIG_PATH to a JSON file, or LMCACHE_EXTRA_CONFIG (and "
            "LMCACHE_REMOTE_URL) to LMCache's settings."
        )
    given.setdefault("extra_config", {})
    return unpack(given)


def _host_of(address: str) -> str:
    """Return an address such that those of this very host are the same."""
    host, colon, port = address.rpartition(":")
    return f"localhost:{port}" if colon and host in _THIS_HOST else address


def _finish(values: Values, _: Place) -> None:
    address, devices = values.pop("remote_url", ("", ""))
    master = values.setdefault("master_server_address", address)
    if address and _host_of(master) != _host_of(address):
        log.warning(
            "LMCache's remote_url names the master %s and its extra_config %s: the latter is used, "
            "as newer versions of LMCache do (older ones use the former); make them the same",
            mask_secrets(address),
            mask_secrets(master),
        )
    if devices and not values["device_name"]:
        values["device_name"] = devices


def _number(value: object, name: str) -> float:
    return parse_seconds(value, field=name)


def _engine(field: str, *names: str, default: Any, parse: Parse | None = None) -> Key:
    """Return the key of a thing that only reaches the engine with ``mooncake_`` before it."""
    return Key(
        tuple(f"mooncake_{name}" for name in names or (field,)), field, default=default, parse=parse
    )


LMCACHE: Final = Rules(
    dialect="lmcache",
    project="LMCache",
    keys=(
        Key(
            _plain("master_server_addr", "master_server_address"),
            "master_server_address",
            parse=_master,
            shown="from `remote_url`",
        ),
        Key(
            ("remote_url",),
            "remote_url",
            ("LMCACHE_REMOTE_URL",),
            parse=_url,
            note="`mooncakestore://host:port/?device=…`, beside `extra_config`: its address and "
            "devices count where `extra_config` names none",
        ),
        Key(_plain("metadata_server"), "metadata_server", required=True),
        Key(_plain("local_hostname"), "local_hostname", required=True),
        Key(
            _plain("global_segment_size"),
            "global_segment_size",
            default=3355443200,
            parse=size("global_segment_size", ENGINE_UNITS),
            note="of each worker",
        ),
        Key(
            _plain("local_buffer_size"),
            "local_buffer_size",
            default=1 << 30,
            parse=size("local_buffer_size", ENGINE_UNITS),
        ),
        Key(_plain("protocol"), "protocol", default="tcp"),
        Key(_plain("rdma_devices", "device_name"), "device_name", default=""),
        _engine("tenant_id", default="default", parse=loose_text("tenant_id")),
        _engine("enable_ssd_offload", default=False, parse=ENGINE_FLAG),
        _engine("ssd_offload_path", default=""),
        _engine("enable_client_http_server", default=False, parse=ENGINE_FLAG),
        _engine("client_http_port", default=9300),
        Key(
            ("transfer_timeout", "mooncake_transfer_timeout"),
            parse=_number,
            note="the engine is not told: LMCache waits so long for a put (`asyncio.timeout`)",
        ),
        Key(
            ("mooncake_prefer_local_alloc", "prefer_local_alloc"),
            parse=ENGINE_FLAG,
            note="placement: `ReplicateConfig(preferred_segments=[store.hostname])`",
        ),
        Key(
            ("storage_root_dir", "mooncake_storage_root_dir"),
            parse=SETTINGS["ssd_offload_path"].parse,
            note="LMCache sets `MOONCAKE_STORAGE_ROOT_DIR`, which the engine reads no longer",
        ),
        Key(
            ("mooncake_ipc_socket_path",),
            parse=SETTINGS["ssd_offload_path"].parse,
            note="a socket for dummy clients, which a store of ours does not serve",
        ),
    ),
    strict=False,
    finish=_finish,
    no_master="give master_server_address in extra_config, or remote_url",
)
