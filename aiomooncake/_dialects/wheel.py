"""The engine's wheel: its ``MooncakeConfig``, and the dictionary form of the binding's ``setup``.

Read from ``mooncake/mooncake_config.py`` and ``mooncake/mooncake_store_service.py`` in the wheel,
and from ``setup_internal`` in upstream's ``mooncake-store/src/real_client.cpp``. The two differ in
two spellings and in their defaults; the spellings tell which of them a mapping is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aiomooncake._dialects.rules import Key, Rules
from aiomooncake._dialects.values import flag, loose_text, size
from aiomooncake._settings import SETTINGS

__all__ = ["ENGINE_FLAG", "ENGINE_UNITS", "SETUP", "WHEEL", "rules_for"]

ENGINE_UNITS: Final = "kb mb gb tb k m g t b"
ENGINE_FLAG: Final = flag("true 1 yes on enable", "false 0 no off disable")

WHEEL: Final = Rules(
    dialect="wheel",
    project="the wheel's MooncakeConfig",
    keys=(
        Key(
            ("master_server_address",),
            "master_server_address",
            ("MOONCAKE_MASTER",),
            required=True,
        ),
        Key(
            ("metadata_server",),
            "metadata_server",
            ("MOONCAKE_TE_META_DATA_SERVER",),
            variable_default="P2PHANDSHAKE",
            required=True,
        ),
        Key(
            ("local_hostname",),
            "local_hostname",
            ("MOONCAKE_LOCAL_HOSTNAME",),
            variable_default="localhost",
            required=True,
        ),
        Key(
            ("global_segment_size",),
            "global_segment_size",
            ("MOONCAKE_GLOBAL_SEGMENT_SIZE",),
            default=3355443200,
            parse=size("global_segment_size", ENGINE_UNITS),
        ),
        Key(
            ("local_buffer_size",),
            "local_buffer_size",
            ("MOONCAKE_LOCAL_BUFFER_SIZE",),
            default=1 << 30,
            parse=size("local_buffer_size", ENGINE_UNITS),
        ),
        Key(("protocol",), "protocol", ("MOONCAKE_PROTOCOL",), default="tcp"),
        Key(("device_name",), "device_name", ("MOONCAKE_DEVICE",), default=""),
        Key(
            ("enable_ssd_offload",),
            "enable_ssd_offload",
            ("MOONCAKE_OFFLOAD_ENABLED",),
            default=False,
            parse=ENGINE_FLAG,
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
            ("enable_client_http_server",),
            "enable_client_http_server",
            ("MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",),
            default=False,
            parse=ENGINE_FLAG,
        ),
        Key(
            ("client_http_port",),
            "client_http_port",
            ("MOONCAKE_CLIENT_HTTP_PORT",),
            default=9300,
        ),
    ),
)

SETUP: Final = Rules(
    dialect="wheel",
    project="the engine's setup()",
    keys=(
        Key(
            ("master_server_addr",),
            "master_server_address",
            default="127.0.0.1:50051",
        ),
        Key(("metadata_server",), "metadata_server", required=True),
        Key(("local_hostname",), "local_hostname", required=True),
        Key(
            ("global_segment_size",),
            "global_segment_size",
            default=16 << 20,
            parse=size("global_segment_size", ENGINE_UNITS),
        ),
        Key(
            ("local_buffer_size",),
            "local_buffer_size",
            default=16 << 20,
            parse=size("local_buffer_size", ENGINE_UNITS),
        ),
        Key(("protocol",), "protocol", default="tcp"),
        Key(("rdma_devices",), "device_name", default=""),
        Key(
            ("enable_ssd_offload",),
            "enable_ssd_offload",
            default=False,
            parse=ENGINE_FLAG,
        ),
        Key(("ssd_offload_path",), "ssd_offload_path", default=""),
        Key(("tenant_id",), "tenant_id", default="default", parse=loose_text("tenant_id")),
        Key(
            ("enable_client_http_server",),
            "enable_client_http_server",
            default=False,
            parse=ENGINE_FLAG,
        ),
        Key(("client_http_port",), "client_http_port", default=9300),
        Key(
            ("ipc_socket_path",),
            parse=SETTINGS["ssd_offload_path"].parse,
            note="a socket for dummy clients, which a store of ours does not serve",
        ),
    ),
    # LMCache's server passes the settings of its `mooncake_store` adapter on as they are; these
    # are its own.
    foreign=frozenset(
        {"type", "num_workers", "eviction", "per_op_workers", "preregister_l1_memory"}
    ),
)


def rules_for(names: Iterable[str], *, file: bool) -> Rules:
    """Tell by its keys whether a mapping is ``MooncakeConfig``'s or the one for ``setup``.

    Args:
        names: the keys.
        file: whether it was read from a file, as only ``MooncakeConfig``'s are.
    """
    given = set(names)
    if given & {"master_server_addr", "rdma_devices", "ipc_socket_path"}:
        return SETUP
    if file or given & {"master_server_address", "device_name"}:
        return WHEEL
    return SETUP
