"""What users of the binding give it, as ours: arguments of a set-up, and placement options."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from aiomooncake.config import ReplicateConfig, StoreConfig
from aiomooncake.errors import ConfigError, NotSupportedError

__all__ = ["DEFAULT_MASTER", "OnlyNativeError", "read_placement", "read_setup"]

log = logging.getLogger("aiomooncake")

# The engine's own defaults, for a set-up by dictionary (upstream's types.h).
DEFAULT_MASTER: Final = "127.0.0.1:50051"
_DEFAULT_SIZE: Final = 16 << 20

# Its words where they are not ours.
_FIELDS: Final = {
    "rdma_devices": "device_name",
    "master_server_addr": "master_server_address",
}
_IPC: Final = "ipc_socket_path"

MakeConfig = Callable[[], StoreConfig]


class OnlyNativeError(Exception):
    """Placement options can't be said in ours: only the binding's own call can take them."""


# --- set-up -----------------------------------------------------------------------------------


def read_setup(*args: Any, **kwargs: Any) -> tuple[MakeConfig, object | None]:
    """Tell the two forms of the binding's set-up apart.

    Returns:
        What makes the config (it raises ConfigError and NotSupportedError), and the shared
        transfer engine or None.

    Raises:
        TypeError: The arguments fit neither form.
    """
    config = args[0] if len(args) == 1 and not kwargs else kwargs.get("config")
    if isinstance(config, dict) and len(args) + len(kwargs) == 1:
        return functools.partial(_from_dictionary, config), None
    given, engine = _by_position(*args, **kwargs)
    return functools.partial(_from_values, given), engine


def _by_position(  # noqa: PLR0917  # as the binding takes them
    local_hostname: str,
    metadata_server: str,
    global_segment_size: int,
    local_buffer_size: int,
    protocol: str,
    rdma_devices: str,
    master_server_addr: str,
    engine: object | None = None,
    enable_ssd_offload: bool = False,  # noqa: FBT001, FBT002  # as the binding takes it
    ssd_offload_path: str = "",
    tenant_id: str = "default",
    enable_client_http_server: bool = False,  # noqa: FBT001, FBT002  # as the binding takes it
    client_http_port: int = 9300,
) -> tuple[dict[str, Any], object | None]:
    given = dict(locals())
    return given, given.pop("engine")


_NAMES: Final = frozenset(_by_position.__annotations__) - {"engine", "return"}


def _from_dictionary(given: Mapping[Any, Any]) -> StoreConfig:
    if given.get(_IPC):
        raise NotSupportedError(
            f"{_IPC}, by which a client serves others on its host, is not offered: run the wheel's "
            "mooncake_client for that, and connect by setup_dummy()"
        )
    unknown = sorted(str(name) for name in given if name not in _NAMES and name != _IPC)
    if unknown:
        log.warning("setup ignores %s, as the engine does", ", ".join(unknown))
    return _from_values(
        {
            "local_hostname": "",
            "metadata_server": "",
            "global_segment_size": _DEFAULT_SIZE,
            "local_buffer_size": _DEFAULT_SIZE,
            "master_server_addr": DEFAULT_MASTER,
            **{name: given[name] for name in _NAMES if name in given},
        }
    )


def _from_values(given: Mapping[str, Any]) -> StoreConfig:
    if not given["local_hostname"]:
        raise ConfigError(
            "local_hostname is empty: give the address by which peers reach this host"
        )
    return StoreConfig(**{_FIELDS.get(name, name): value for name, value in given.items()})


# --- placement --------------------------------------------------------------------------------


def read_placement(config: Any, native_class: Any) -> ReplicateConfig:
    """Make our placement options of the binding's; ours are taken as they are.

    Raises:
        OnlyNativeError: They are something else; or the engine will refuse them; or this engine
            knows an option that we don't.
    """
    if isinstance(config, ReplicateConfig):
        return config
    if not isinstance(config, native_class):
        raise OnlyNativeError
    names = _options_of(native_class)
    values = (getattr(config, name) for name in names)
    return _placement(
        names, tuple(tuple(value) if isinstance(value, list) else value for value in values)
    )


@functools.cache
def _options_of(native_class: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(native_class) if not name.startswith("_"))


@functools.lru_cache(maxsize=64)
def _placement(names: tuple[str, ...], values: tuple[Any, ...]) -> ReplicateConfig:
    given = dict(zip(names, values, strict=True))
    for name in given.keys() & {"soft_pin_action", "data_type"}:
        given[name] = given[name].name.lower()
    try:
        return ReplicateConfig(**given)
    except (ConfigError, TypeError):
        raise OnlyNativeError from None
