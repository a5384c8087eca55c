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

from aiomooncake._addresses import parse_master, parse_metadata
from aiomooncake._foreign import FOREIGN_ENV, FOREIGN_KEYS
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

__all__ = [
    "CONFIG_PATH",
    "KEYS",
    "SETTINGS",
    "Parse",
    "Setting",
    "check_names",
    "check_variables",
    "from_environ",
    "from_keys",
    "load_json",
]

MIN_SEGMENT: Final = 1024
MAX_BUFFER: Final = 1024**4
"""Bounds of upstream's ``types.h`` (``MIN_SEGMENT_SIZE``, ``MAX_SEGMENT_SIZE``). The upper one is
checked for the local buffer only: a large ``global_segment_size`` is cut into several segments."""

MAX_TRANSFER_TIMEOUT: Final = 20
"""Seconds. A transfer that reaches 60 s writes into memory later, and keys that wait for one frozen
peer time out one after the other, so a single time-out has to stay well below that."""

_PROTOCOLS: Final = (
    "tcp", "rdma", "efa", "nvmeof", "nvlink", "nvlink_intra", "musa", "hip", "barex", "cxl",
    "ascend", "ub", "ubshmem", "maca", "sunrise_link", "rpc_only",
)  # fmt: skip

Parse = Callable[[object, str], Any]


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


def _protocol(value: object, field: str) -> str:
    name = check_text(value, field=field).lower()
    if re.fullmatch(r"[a-z0-9_]+", name) is None:
        raise bad_value(field, value, 'give a transport, such as "tcp" or "rdma"')
    # Builds of the engine differ, so a foreign name passes; one that looks mistyped does not.
    meant = name if name in _PROTOCOLS else nearest(name, _PROTOCOLS, cutoff=0.65)
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
        parse_master,
        ("MOONCAKE_MASTER", "MOONCAKE_MASTER_SERVER_ADDRESS", "MOONCAKE_MASTER_SERVER_ADDR"),
        ("master_server_addr",),
    ),
    Setting("local_hostname", _host, ("MOONCAKE_LOCAL_HOSTNAME",)),
    Setting(
        "metadata_server",
        parse_metadata,
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
    Setting("fail_fast", _flag),
    Setting("max_abandoned", _count),
    Setting("threads", _count),
)

SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType({each.field: each for each in _TABLE})

CONFIG_PATH: Final = "MOONCAKE_CONFIG_PATH"
_PREFIX: Final = "MOONCAKE_"
_ENV: Final = {name: setting for setting in SETTINGS.values() for name in setting.env}
KEYS: Final = {
    key: setting for setting in SETTINGS.values() for key in (setting.field, *setting.aliases)
}

_NEAR: Final = 0.8
"""How alike (difflib's ratio, without ``MOONCAKE_``) an unknown variable must be to a known one to
count as mistyped. Others belong to somebody else and are left alone."""


def check_names(names: Iterable[str], *, what: str) -> None:
    """Refuse names that are no fields of ``StoreConfig``, with the nearest one."""
    for name in names:
        if name not in SETTINGS:
            raise _unknown(name, what)


def _unknown(name: str, what: str) -> ConfigError:
    meant = nearest(name, KEYS)
    if meant is None:
        return ConfigError(f"{what} {name!r} is unknown. Known are: {', '.join(SETTINGS)}.")
    return ConfigError(f"{what} {name!r} is unknown; did you mean {KEYS[meant].field!r}?")


def from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    """Collect what ``MOONCAKE_…`` variables say, by field. An empty variable counts as not set.

    Raises:
        ConfigError: for a bad value, two names with different values, or a name that looks like a
            mistyped one of ours.
    """
    check_variables(environ, _ENV)
    given = ((name, setting, environ.get(name)) for name, setting in _ENV.items())
    return _collect(given, environ.get("MOONCAKE_STANDALONE_STORAGE"))


def check_variables(environ: Mapping[str, str], known: Iterable[str]) -> None:
    """Refuse a ``…MOONCAKE_…`` variable that looks like a mistyped one of those ``known``.

    What stands before ``MOONCAKE_`` must be the same, and the engine's own are left alone.
    """
    families: dict[str, dict[str, str]] = {}
    for name in known:
        family, mark, rest = name.partition(_PREFIX)
        if mark:
            families.setdefault(family, {})[rest] = name
    for name in environ:
        family, mark, rest = name.partition(_PREFIX)
        ours = families.get(family, {}) if mark else {}
        if rest in ours or name in _ENV or (not family and rest in FOREIGN_ENV):
            continue
        meant = nearest(rest, ours, cutoff=_NEAR)
        if meant is not None:
            raise ConfigError(
                f"Environment variable {name} is unknown; did you mean {ours[meant]}?"
            )


def from_keys(given: Mapping[str, object], *, what: str) -> dict[str, Any]:
    """Collect what the keys of a file or URL say, by field. Empty and null count as not set.

    Raises:
        ConfigError: for a bad value, two names with different values, or an unknown name.
    """
    for key in given:
        if key not in KEYS and key not in FOREIGN_KEYS:
            raise _unknown(key, what)
    return _collect(
        ((key, KEYS[key], value) for key, value in given.items() if key in KEYS),
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


def load_json(path: Path, variable: str = CONFIG_PATH) -> dict[str, Any]:
    """Read a JSON object of settings.

    Args:
        path: the file.
        variable: the environment variable that may have named it, for the error.

    Raises:
        ConfigError: if the file can't be read or is no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_repeats)
    except OSError as error:
        raise ConfigError(
            f"The config file {path} can't be read ({error.strerror}); check the path, and "
            f"{variable} if it came from there."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"The config file {path} is not usable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"The config file {path} must hold a JSON object of settings.")
    return content


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if content.setdefault(key, value) != value:
            raise ValueError(f"key {key!r} stands there twice, with different values.")
    return content
