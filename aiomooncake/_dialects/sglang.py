"""SGLang: the Mooncake storage backend of its hierarchical cache.

Read from ``python/sglang/srt/mem_cache/storage/mooncake_store/mooncake_store.py`` (the config class
and the constructor) and ``python/sglang/srt/environ.py`` (variables and defaults).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from aiomooncake._dialects.rules import Key, Place, Rules, Values
from aiomooncake._dialects.values import flag, json_flag, loose_text, size
from aiomooncake._settings import MIN_SEGMENT, SETTINGS
from aiomooncake._values import bad_value, parse_integer, parse_port
from aiomooncake.errors import ConfigError

__all__ = ["SGLANG"]

_METRICS_PORT: Final = 9003
_SIZE: Final = size("global_segment_size", "gb", fractions=False)
_FLAG: Final = flag("true 1 yes y", "false 0 no n")


def _device(value: object, name: str) -> str | dict[str, str]:
    """Read a device list, or a map from rank to one: an object, or the JSON text of one."""
    entries: object = value
    if isinstance(value, str):
        if not value.strip().startswith("{"):
            text: str = SETTINGS["device_name"].parse(value, name)
            return text
        try:
            entries = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise bad_value(name, value, f"the map of devices is no JSON ({error})") from None
    if not isinstance(entries, Mapping):
        raise bad_value(name, value, 'give devices as in "mlx5_0,mlx5_1", or a map by rank')
    devices: dict[str, str] = {}
    for rank, device in entries.items():
        where = f"{name}[{rank!r}]"
        number = str(parse_integer(rank, field=f"the rank in {where}", least=0))
        devices[number] = SETTINGS["device_name"].parse(device, where)
    return devices


def _finish(values: Values, place: Place) -> None:
    if place.rank is not None and place.tp_size is None:
        raise bad_value("rank", place.rank, "give tp_size= too (and pp_size=, unless it is 1)")
    _share(values, place)
    devices = values["device_name"]
    if isinstance(devices, dict):
        values["device_name"] = _device_of(devices, place)
    if values.pop("check_server"):
        values.setdefault("master_metrics_port", _METRICS_PORT)
    port = values["client_http_port"] + (place.rank or 0)
    values["client_http_port"] = parse_port(port, field="MOONCAKE_CLIENT_METRICS_PORT_BASE + rank")
    if not values.pop("standalone_storage"):
        values.pop("client_server_address", None)
    elif "client_server_address" not in values:
        raise ConfigError(
            "standalone_storage is true, but client_server_address (MOONCAKE_CLIENT) is missing."
        )


def _share(values: Values, place: Place) -> None:
    """Divide the segment among the ranks of one model replica, as the constructor does."""
    whole = values["global_segment_size"]
    ranks = (place.tp_size or 1) * (place.pp_size or 1)
    share = whole // ranks
    if whole and share < MIN_SEGMENT:
        want = f"divided among {ranks} ranks it is less than {MIN_SEGMENT} bytes; give more, or 0"
        raise bad_value("global_segment_size", whole, want)
    values["global_segment_size"] = share


def _device_of(devices: Mapping[str, str], place: Place) -> str:
    if place.rank is None or place.tp_size is None:
        want = "it is a map by tensor-parallel rank: give rank= and tp_size="
        raise bad_value("device_name", dict(devices), want)
    tp_rank = str(place.rank % place.tp_size)
    if tp_rank not in devices:
        want = f'add an entry for tensor-parallel rank {tp_rank}; "" lets the engine choose'
        raise bad_value("device_name", dict(devices), want)
    return devices[tp_rank]


SGLANG: Final = Rules(
    dialect="sglang",
    project="SGLang",
    keys=(
        Key(
            ("local_hostname",),
            "local_hostname",
            ("MOONCAKE_LOCAL_HOSTNAME", "LOCAL_HOSTNAME"),
            default="localhost",
        ),
        Key(
            ("metadata_server",),
            "metadata_server",
            ("MOONCAKE_TE_META_DATA_SERVER",),
            default="P2PHANDSHAKE",
        ),
        Key(
            ("global_segment_size",),
            "global_segment_size",
            ("MOONCAKE_GLOBAL_SEGMENT_SIZE",),
            default=4 << 30,
            parse=_SIZE,
            note="of all ranks together: divided by `tp_size` × `pp_size`",
        ),
        Key(
            (),
            "local_buffer_size",
            ("SGLANG_MOONCAKE_LOCAL_BUFFER_SIZE",),
            default=16 << 20,
            note="bytes",
            parse=size("local_buffer_size", "", fractions=False),
        ),
        Key(
            ("local_buffer_size",),
            parse=size("local_buffer_size", "gb"),
            note="not read by SGLang: the variable above decides",
        ),
        Key(
            ("protocol",),
            "protocol",
            ("MOONCAKE_PROTOCOL",),
            default="rdma",
            note="`tcp` in older versions of SGLang",
        ),
        Key(
            ("device_name",),
            "device_name",
            ("MOONCAKE_DEVICE",),
            default="",
            parse=_device,
            note="also a map (an object, or its JSON as text) from tensor-parallel rank to devices",
        ),
        Key(("master_server_address",), "master_server_address", ("MOONCAKE_MASTER",)),
        Key(
            ("client_server_address",),
            "client_server_address",
            ("MOONCAKE_CLIENT",),
            note="counts only with `standalone_storage`",
        ),
        Key(
            ("standalone_storage",),
            "standalone_storage",
            ("MOONCAKE_STANDALONE_STORAGE",),
            default=False,
            parse=json_flag,
            parse_variable=_FLAG,
            note="true makes the store a dummy client of `client_server_address`",
        ),
        Key(
            ("master_metrics_port",),
            "master_metrics_port",
            ("MOONCAKE_MASTER_METRICS_PORT",),
            shown=f"{_METRICS_PORT}, with `check_server`",
        ),
        Key(
            ("check_server",),
            "check_server",
            ("MOONCAKE_CHECK_SERVER",),
            default=False,
            parse=json_flag,
            parse_variable=_FLAG,
            note="true: set-up asks the metrics port",
        ),
        Key(
            ("enable_ssd_offload",),
            "enable_ssd_offload",
            ("MOONCAKE_ENABLE_SSD_OFFLOAD",),
            default=False,
            parse=json_flag,
            parse_variable=_FLAG,
        ),
        Key(
            ("ssd_offload_path",),
            "ssd_offload_path",
            ("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",),
            default="",
        ),
        Key(
            ("tenant_id",),
            "tenant_id",
            ("MOONCAKE_TENANT_ID",),
            default="default",
            parse=loose_text("tenant_id"),
        ),
        Key(
            (),
            "client_http_port",
            ("MOONCAKE_CLIENT_METRICS_PORT_BASE",),
            default=9301,
            shown="`9301` + `rank`",
            note="`rank` is added; `enable_client_http_server` is left to the caller, as SGLang "
            "leaves it to an argument",
        ),
    ),
    place=frozenset({"rank", "tp_size", "pp_size"}),
    path_variable="SGLANG_HICACHE_MOONCAKE_CONFIG_PATH",
    strict=False,
    finish=_finish,
    no_master=(
        "give master_server_address (MOONCAKE_MASTER), or standalone_storage with "
        "client_server_address"
    ),
)
