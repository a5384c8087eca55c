"""The one table of settings: field, environment variables, keys of files and URLs, parser.

Sources of the names: the wheel's ``mooncake_config.py``, the engine's own ``setup`` dictionary, and
the Mooncake backends of SGLang, vLLM and LMCache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from aiomooncake._values import (
    bad_value,
    check_text,
    mask_secrets,
    nearest,
    parse_flag,
    parse_integer,
    parse_port,
    parse_seconds,
    parse_size,
    split_address,
    split_host,
)
from aiomooncake.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SETTINGS", "Setting", "check_names", "from_environ", "from_keys", "read_file"]

MIN_SEGMENT: Final = 1024
MAX_BUFFER: Final = 1024**4
"""Bounds of upstream's ``types.h`` (``MIN_SEGMENT_SIZE``, ``MAX_SEGMENT_SIZE``). The upper one is
checked for the local buffer only: a large ``global_segment_size`` is cut into several segments."""

MAX_TRANSFER_TIMEOUT: Final = 20
"""Seconds. A transfer that reaches 60 s writes into memory later, and keys that wait for one frozen
peer time out one after the other, so a single time-out has to stay well below that."""

MASTER_SCHEMES: Final = ("etcd", "redis", "k8s", "http", "https", "memory")
"""Ways to name a master other than by host and port: they are passed on to the engine."""

_PROTOCOLS: Final = (
    "tcp", "rdma", "efa", "nvmeof", "nvlink", "nvlink_intra", "musa", "hip", "barex", "cxl",
    "ascend", "ub", "ubshmem", "maca", "sunrise_link", "rpc_only",
)  # fmt: skip

Parse = Callable[[object, str], Any]


def _master(value: object, field: str) -> str:
    address = check_text(value, field=field)
    scheme, mark, rest = address.partition("://")
    if not mark:
        if address:
            split_address(address, field=field)
        return address
    if scheme.lower() not in MASTER_SCHEMES:
        want = f"give host:port, or a URL that starts with {', '.join(MASTER_SCHEMES[:-1])}"
        raise bad_value(field, value, want)
    if not rest:
        raise bad_value(field, value, "nothing follows the ://")
    return f"{scheme.lower()}://{rest}"


def _host(value: object, field: str) -> str | None:
    host = None if value is None else check_text(value, field=field)
    if host:
        split_host(host, field=field)
    return host or None


def _client(value: object, field: str) -> str | None:
    address = None if value is None else check_text(value, field=field)
    if address:
        split_address(address, field=field)
    return address or None


def _metadata(value: object, field: str) -> str:
    server = check_text(value, field=field)
    if not server:
        raise bad_value(field, value, 'give "P2PHANDSHAKE", or the URL of a metadata server')
    # The engine compares this word case by case, and takes any other spelling for a host.
    return server.upper() if server.upper() == "P2PHANDSHAKE" else server


def _protocol(value: object, field: str) -> str:
    name = check_text(value, field=field).lower()
    if re.fullmatch(r"[a-z0-9_]+", name) is None:
        raise bad_value(field, value, 'give a transport, such as "tcp" or "rdma"')
    # Builds of the engine differ, so a foreign name passes; one that looks mistyped does not.
    meant = name if name in _PROTOCOLS else nearest(name, _PROTOCOLS, cutoff=0.7)
    if meant not in (name, None):
        raise bad_value(field, value, f"did you mean {meant!r}?")
    return name


def _text(value: object, field: str) -> str:
    return check_text(value, field=field, spaces=True)


def _tenant(value: object, field: str) -> str:
    tenant = check_text(value, field=field)
    if not tenant:
        raise bad_value(field, value, 'give the tenant\'s name; it is "default" where none is used')
    return tenant


def _segment(value: object, field: str) -> int:
    size = parse_size(value, field=field)
    if 0 < size < MIN_SEGMENT:
        raise bad_value(field, value, f"give 0 or at least {MIN_SEGMENT} bytes")
    return size


def _buffer(value: object, field: str) -> int:
    size = _segment(value, field)
    if size > MAX_BUFFER:
        raise bad_value(field, value, f"give at most {MAX_BUFFER} bytes (1 TiB)")
    return size


def _port(value: object, field: str) -> int:
    return parse_port(value, field=field)


def _optional_port(value: object, field: str) -> int | None:
    return None if value is None else parse_port(value, field=field)


def _flag(value: object, field: str) -> bool:
    return parse_flag(value, field=field)


def _seconds(value: object, field: str) -> float:
    return parse_seconds(value, field=field)


def _transfer_timeout(value: object, field: str) -> int:
    try:
        return parse_integer(value, field=field, least=1, most=MAX_TRANSFER_TIMEOUT)
    except ConfigError:
        want = (
            f"give whole seconds, 1 to {MAX_TRANSFER_TIMEOUT}: it bounds one step of a transfer, "
            "and no transfer may come near the engine's own 60 s"
        )
        raise bad_value(field, value, want) from None


def _count(value: object, field: str) -> int:
    return parse_integer(value, field=field, least=1)


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of ``StoreConfig``.

    Attributes:
        field: its name.
        parse: turns what was given into what is kept; takes the value and the name it came by.
        env: the environment variables that set it.
        aliases: keys of files and URLs that mean it, beside its own name.
    """

    field: str
    parse: Parse
    env: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


_TABLE: Final = (
    Setting(
        "master_server_address",
        _master,
        ("MOONCAKE_MASTER", "MOONCAKE_MASTER_SERVER_ADDRESS", "MOONCAKE_MASTER_SERVER_ADDR"),
        ("master_server_addr",),
    ),
    Setting("local_hostname", _host, ("MOONCAKE_LOCAL_HOSTNAME",)),
    Setting(
        "metadata_server",
        _metadata,
        ("MOONCAKE_TE_META_DATA_SERVER", "MOONCAKE_METADATA_SERVER"),
    ),
    Setting("global_segment_size", _segment, ("MOONCAKE_GLOBAL_SEGMENT_SIZE",)),
    Setting("local_buffer_size", _buffer, ("MOONCAKE_LOCAL_BUFFER_SIZE",)),
    Setting("protocol", _protocol, ("MOONCAKE_PROTOCOL",)),
    Setting(
        "device_name",
        _text,
        ("MOONCAKE_DEVICE", "MOONCAKE_DEVICE_NAME", "MOONCAKE_RDMA_DEVICES"),
        ("rdma_devices",),
    ),
    Setting("tenant_id", _tenant, ("MOONCAKE_TENANT_ID",)),
    Setting(
        "client_server_address",
        _client,
        ("MOONCAKE_CLIENT", "MOONCAKE_CLIENT_SERVER_ADDRESS"),
    ),
    Setting("mem_pool_size", _segment, ("MOONCAKE_MEM_POOL_SIZE",)),
    Setting("master_metrics_port", _optional_port, ("MOONCAKE_MASTER_METRICS_PORT",)),
    Setting(
        "enable_ssd_offload",
        _flag,
        ("MOONCAKE_OFFLOAD_ENABLED", "MOONCAKE_ENABLE_SSD_OFFLOAD"),
    ),
    Setting("ssd_offload_path", _text, ("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",)),
    Setting("enable_client_http_server", _flag, ("MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",)),
    Setting("client_http_port", _port, ("MOONCAKE_CLIENT_HTTP_PORT",)),
    Setting("rpc_timeout", _seconds),
    Setting("rpc_connect_timeout", _seconds),
    Setting("transfer_timeout", _transfer_timeout),
    Setting("direct", _flag),
    Setting("merge", _flag),
    Setting("max_abandoned", _count),
    Setting("threads", _count),
)

SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType({each.field: each for each in _TABLE})

CONFIG_PATH: Final = "MOONCAKE_CONFIG_PATH"
_PREFIX: Final = "MOONCAKE_"
_ENV: Final = {name: setting for setting in SETTINGS.values() for name in setting.env}
_KEYS: Final = {
    key: setting for setting in SETTINGS.values() for key in (setting.field, *setting.aliases)
}

# Keys that other programs keep in the same file, for themselves.
_FOREIGN_KEYS: Final = frozenset(
    """
    alloc_in_same_node check_server enable_offload mode mooncake_page_first_multi_buffer
    mooncake_prefer_local_alloc prefer_local_alloc standalone_storage storage_root_dir
    use_ascend_direct
    """.split()  # noqa: SIM905 - a hundred quotes and commas would hide the names
)

# Variables that the engine or its neighbours read themselves; without MOONCAKE_.
_FOREIGN_ENV: Final = frozenset(
    """
    ABORT_REQUEST_TIMEOUT AWS_ACCESS_KEY_ID AWS_BUCKET_NAME AWS_CONNECT_TIMEOUT_MS AWS_REGION
    AWS_REQUEST_CHECKSUM_CALCULATION AWS_REQUEST_TIMEOUT_MS AWS_RESPONSE_CHECKSUM_VALIDATION
    AWS_S3_ENDPOINT AWS_SECRET_ACCESS_KEY AWS_USE_HTTPS AWS_USE_VIRTUAL_ADDRESSING BOOTSTRAP_PORT
    BUCKET_EVICTION_POLICY BUCKET_MAX_TOTAL_SIZE CHECK_SERVER CONFIG_PATH DFS_ALIGNMENT
    DFS_DEFERRED_FREE_SECONDS DFS_ENABLED DFS_EVICTION_CHECK_INTERVAL DFS_EVICTION_ENABLED
    DFS_EVICTION_HIGH_WATERMARK DFS_EVICTION_LOW_WATERMARK DFS_FS_ADAPTER DFS_ROOT_DIR
    DFS_SHARD_CAPACITY DFS_SHARD_COUNT DFS_SINGLE_TENANT DISABLE_HIP_DMABUF
    DISK_EVICTION_HIGH_WATERMARK_RATIO DISK_EVICTION_LOW_WATERMARK_RATIO DISTRIBUTED_FS_TYPE
    DISTRIBUTED_HEALTH_CHECK DISTRIBUTED_ROOT_DIR ENABLE_DFS ENABLE_TEST_FAILPOINTS
    EP_ACTIVE_QPS_PER_RANK EP_DEVICE_FILTER EP_MACA_ALLOC EP_MACA_ALLOW_NODE_P2P EP_MACA_DISABLE_IPC
    EP_MACA_IPC EP_MACA_P2P_PAIRS EP_NUM_LOCAL_RANKS EP_USE_MACA EP_USE_MUSA MASTER_CONTROL_BASE
    NVME_KV_BATCH_SUBMIT_CONCURRENCY NVME_KV_DEVICE_PATH NVME_KV_DRIVER NVME_KV_IO_CONCURRENCY
    NVME_KV_MAX_IO_CONCURRENCY NVME_KV_NSID NVME_KV_PREPARE_CONCURRENCY
    NVME_KV_PROTOCOL_MAX_VALUE_SIZE NVME_KV_QUEUE_DEPTH NVME_KV_READ_PLAN_BATCH_SIZE
    NVME_KV_ROOT_SUBMIT_CONCURRENCY NVME_KV_RUNTIME_TRANSFER_LIMIT
    NVME_KV_TRANSFER_ALIGNMENT_BYTES NVME_KV_TRANSPORT NVME_KV_VALUE_BLOCK_UNIT_BYTES
    OFFLOAD_BUCKET_DISK_SCAN_CACHE_MS OFFLOAD_BUCKET_EVICTION_POLICY OFFLOAD_BUCKET_KEYS_LIMIT
    OFFLOAD_BUCKET_MAX_PHYSICAL_BYTES OFFLOAD_BUCKET_MAX_TOTAL_SIZE OFFLOAD_BUCKET_SIZE_LIMIT_BYTES
    OFFLOAD_CLIENT_BUFFER_GC_INTERVAL_SECONDS OFFLOAD_CLIENT_BUFFER_GC_TTL_MS
    OFFLOAD_DISK_EVICTION_HIGH_WATERMARK_RATIO OFFLOAD_DISK_EVICTION_LOW_WATERMARK_RATIO
    OFFLOAD_ENABLE_DISK_WATERMARK_EVICTION OFFLOAD_ENABLE_EVICTION OFFLOAD_FSDIR
    OFFLOAD_HEARTBEAT_INTERVAL_SECONDS OFFLOAD_LOCAL_BUFFER_SIZE_BYTES
    OFFLOAD_SCANMETA_ITERATOR_KEYS_LIMIT OFFLOAD_STORAGE_BACKEND_DESCRIPTOR
    OFFLOAD_TOTAL_KEYS_LIMIT OFFLOAD_TOTAL_SIZE_LIMIT_BYTES OFFLOAD_USE_URING
    OFFSET_EVICTION_POLICY OFFSET_HIGH_RATIO OFFSET_LOW_RATIO OFFSET_MAX_CAPACITY_NODES
    OFFSET_MAX_EVICT_PER_OFFLOAD OFFSET_PERSIST_INTERVAL_SECONDS OFFSET_PERSIST_MODE
    OFFSET_RECORD_CRC P2P_CHUNK_SIZE P2P_POOL_SIZE PG_AUTO_DEACTIVATE_ON_FAILURE
    PG_AUTO_SYNC_ON_FAILURE PG_CORE_SO_PATH SCANMETA_ITERATOR_KEYS_LIMIT SENDER_WORKERS
    SIDE_CHANNEL_PORT SNAPSHOT_LOCAL_PATH STANDALONE_STORAGE STORAGE_ROOT_DIR STORE_CHECKSUM
    STORE_CLUSTER_ID TENANT_QUOTA_ETCD_ENDPOINTS TEST_FAILPOINT_DIR TEST_FAILPOINT_TIMEOUT_SEC
    USE_URING
    """.split()  # noqa: SIM905 - a hundred quotes and commas would hide the names
)

_NEAR: Final = 0.8
"""How alike (difflib's ratio, without ``MOONCAKE_``) an unknown variable must be to a known one to
count as mistyped. Others belong to somebody else and are left alone."""


def check_names(names: Iterable[str], *, what: str) -> None:
    """Refuse names that are no fields of ``StoreConfig``, with the nearest one."""
    for name in names:
        if name not in SETTINGS:
            raise _unknown(name, what)


def _unknown(name: str, what: str) -> ConfigError:
    meant = nearest(name, _KEYS)
    if meant is None:
        return ConfigError(f"{what} {name!r} is unknown. Known are: {', '.join(SETTINGS)}.")
    return ConfigError(f"{what} {name!r} is unknown; did you mean {_KEYS[meant].field!r}?")


def from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    """Collect what ``MOONCAKE_…`` variables say, by field. An empty variable counts as not set.

    Raises:
        ConfigError: for a bad value, two names with different values, or a name that looks like a
            mistyped one of ours.
    """
    known = {name.removeprefix(_PREFIX): name for name in _ENV}
    for name in environ:
        rest = name.removeprefix(_PREFIX)
        if rest != name and rest not in known and rest not in _FOREIGN_ENV:
            meant = nearest(rest, known, cutoff=_NEAR)
            if meant is not None:
                raise ConfigError(
                    f"Environment variable {name} is unknown; did you mean {known[meant]}?"
                )
    given = ((name, setting, environ.get(name)) for name, setting in _ENV.items())
    return _collect(given, environ.get("MOONCAKE_STANDALONE_STORAGE"))


def from_keys(given: Mapping[str, object], *, what: str) -> dict[str, Any]:
    """Collect what the keys of a file or URL say, by field. Empty and null count as not set.

    Raises:
        ConfigError: for a bad value, two names with different values, or an unknown name.
    """
    for key in given:
        if key not in _KEYS and key not in _FOREIGN_KEYS:
            raise _unknown(key, what)
    return _collect(
        ((key, _KEYS[key], value) for key, value in given.items() if key in _KEYS),
        given.get("standalone_storage"),
    )


def _collect(
    given: Iterable[tuple[str, Setting, object]], standalone: object = None
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    named: dict[str, tuple[str, object]] = {}
    for name, setting, value in given:
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        parsed = setting.parse(value, name)
        other, raw = named.setdefault(setting.field, (name, value))
        if values.setdefault(setting.field, parsed) != parsed:
            raise ConfigError(
                f"{other}={_shown(raw)} and {name}={_shown(value)} both set {setting.field} and "
                "differ; keep one of them."
            )
    # SGLang ignores the client's address unless this switch is on; an explicit "off" means the same
    # here, so that one environment serves both.
    if standalone not in (None, "") and not parse_flag(standalone, field="standalone_storage"):
        values.pop("client_server_address", None)
    return values


def _shown(value: object) -> str:
    return repr(mask_secrets(value) if isinstance(value, str) else value)


def read_file(path: Path) -> dict[str, Any]:
    """Read a JSON object of settings and collect it by field.

    Raises:
        ConfigError: if the file can't be read, is no JSON object, or says something wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_repeats)
    except OSError as error:
        raise ConfigError(
            f"The config file {path} can't be read ({error.strerror}); check the path, and "
            f"{CONFIG_PATH} if it came from there."
        ) from error
    except ValueError as error:
        raise ConfigError(f"The config file {path} is not usable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"The config file {path} must hold a JSON object of settings.")
    return from_keys(content, what=f"In the config file {path}, key")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if content.setdefault(key, value) != value:
            raise ValueError(f"key {key!r} stands there twice, with different values.")
    return content
