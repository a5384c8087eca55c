"""vLLM: its Mooncake store connector.

Read from ``vllm/distributed/mooncake_store.py`` (the config class and the set-up), formerly in
``vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/worker.py``, from ``rdma_utils.py``
beside it, and from ``docs/features/mooncake_store_connector_usage.md``.
"""

from __future__ import annotations

from typing import Final

from aiomooncake._dialects.rules import Key, Place, Rules, Values
from aiomooncake._dialects.values import json_flag, size
from aiomooncake._settings import SETTINGS
from aiomooncake._values import bad_value, check_text

__all__ = ["VLLM"]

_MODES: Final = ("embedded", "standalone-store")
_UNITS: Final = "gb mb kb b"


def _mode(value: object, name: str) -> str:
    mode = check_text(value, field=name)
    if mode not in _MODES:
        raise bad_value(name, value, f"give {' or '.join(map(repr, _MODES))}")
    return mode


def _devices(value: object, name: str) -> list[str]:
    if not isinstance(value, list):
        raise bad_value(name, value, "give a list with the devices of each GPU of this host")
    parse = SETTINGS["device_name"].parse
    return [parse(device, f"{name}[{gpu}]") for gpu, device in enumerate(value)]


def _finish(values: Values, place: Place) -> None:
    mode, segment = values.pop("mode"), values["global_segment_size"]
    if mode == "embedded" and segment == 0:
        want = "in mode 'embedded' each worker lends memory; give more, or mode 'standalone-store'"
        raise bad_value("global_segment_size", segment, want)
    if mode == "standalone-store" and segment != 0:
        want = "in mode 'standalone-store' the workers lend none; give 0"
        raise bad_value("global_segment_size", segment, want)
    if values["local_buffer_size"] == 0:
        raise bad_value("local_buffer_size", 0, "vLLM wants more than 0")
    devices = values.pop("device_name_per_gpu", None)
    if devices is None:
        return
    if place.gpu is None or place.gpu >= len(devices):
        want = f"give gpu=, the physical number of this worker's GPU, below {len(devices)}"
        raise bad_value("device_name_per_gpu", devices, want)
    values["device_name"] = devices[place.gpu]


VLLM: Final = Rules(
    dialect="vllm",
    project="vLLM",
    keys=(
        Key(("master_server_address",), "master_server_address", required=True),
        Key(("metadata_server",), "metadata_server", required=True),
        Key(
            (),
            "local_hostname",
            ("MOONCAKE_REQUESTER_LOCAL_HOSTNAME",),
            shown="this host's address",
        ),
        Key(("local_hostname",), parse=SETTINGS["local_hostname"].parse, note="not read by vLLM"),
        Key(
            ("mode",),
            "mode",
            default="embedded",
            parse=_mode,
            note="`standalone-store` goes with a `global_segment_size` of 0",
        ),
        Key(
            ("global_segment_size",),
            "global_segment_size",
            default=4 << 30,
            parse=size("global_segment_size", _UNITS),
            note="of each worker",
        ),
        Key(
            ("local_buffer_size",),
            "local_buffer_size",
            default=4 << 30,
            parse=size("local_buffer_size", _UNITS),
            note="more than 0",
        ),
        Key(("protocol",), "protocol", default="rdma"),
        Key(("device_name",), "device_name", default=""),
        Key(
            ("device_name_per_gpu",),
            "device_name_per_gpu",
            parse=_devices,
            note="the entry of `gpu` replaces `device_name`",
        ),
        Key(("tenant_id",), "tenant_id", default="default"),
        Key(
            ("enable_offload",),
            parse=json_flag,
            note="the engine is not told: it bounds the sizes of vLLM's own reads",
        ),
        Key(
            ("enable_ssd_offload",),
            parse=json_flag,
            note="not read by vLLM: its SSD tier belongs to a stand-alone client",
        ),
        Key(
            ("ssd_offload_path",),
            parse=SETTINGS["ssd_offload_path"].parse,
            note="not read by vLLM",
        ),
        Key(
            (),
            variables=("MOONCAKE_PREFERRED_SEGMENT",),
            parse=SETTINGS["client_server_address"].parse,
            note="placement: `ReplicateConfig(preferred_segments=…)`",
        ),
    ),
    place=frozenset({"gpu"}),
    finish=_finish,
)
