"""What to connect to, and how: :class:`StoreConfig`, and the targets that ``connect`` takes."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import parse_qsl

from aiomooncake._addresses import MASTER_SCHEMES, P2PHANDSHAKE
from aiomooncake._dialects import (
    Dialect,
    Place,
    check_dialect,
    read_environ,
    read_file,
    read_mapping,
)
from aiomooncake._dialects.lmcache import SCHEME as LMCACHE_SCHEME
from aiomooncake._replicate import DataType, ReplicateConfig, SoftPinAction
from aiomooncake._settings import (
    CONFIG_PATH,
    SETTINGS,
    check_names,
    from_environ,
    from_keys,
    load_json,
)
from aiomooncake._values import (
    bad_value,
    check_keys,
    check_text,
    mask_secrets,
    nearest,
    parse_size,
    split_address,
)
from aiomooncake.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DataType",
    "Dialect",
    "ReplicateConfig",
    "SoftPinAction",
    "StoreConfig",
    "Target",
    "parse_size",
    "parse_target",
    "split_address",
]

_SCHEMES: Final = ("mooncake", "local", LMCACHE_SCHEME, *MASTER_SCHEMES)
_COORDINATED: Final = frozenset({"http", "https", *MASTER_SCHEMES}) - {"memory"}
"""What the field's own parser takes, or refuses with its reason: a master has no HTTP address."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)


class _Size:
    """The type of a field that takes a size in any form and holds bytes.

    It only tells type checkers so, by its ``__set__`` and ``__get__``: ``slots=True`` puts a slot
    in its place, and ``__post_init__`` does the conversion.
    """

    def __init__(self, default: str) -> None:
        self._default = default

    def __get__(self, instance: object, owner: type | None = None) -> int:
        return self._default  # type: ignore[return-value]  # dataclass asks for the default here

    def __set__(self, instance: object, value: int | str) -> None:
        raise AttributeError


@dataclass(frozen=True, slots=True, repr=False)
class StoreConfig:
    """What one store connects to and what it brings along.

    Sizes are given in bytes or as ``"512MiB"``, ``"4gb"`` … and read back in bytes; a unit is
    always a power of 1024. Durations are seconds. Every value is checked when the config is made.
    The ``MC_…`` variables named below win over the field where the user has set them.

    Attributes:
        master_server_address: the master, ``"host:port"``; or ``"etcd://…"``, ``"redis://…"``,
            ``"k8s://…"`` for a master found through a coordinator (``docs/metadata.md``). Empty
            only next to ``client_server_address``. Environment: ``MOONCAKE_MASTER``.
        local_hostname: the address other clients reach this one by, with or without a port; None =
            the address of the route to the master. Whatever it is, the engine's two ports for
            transfers listen on all interfaces and ask for no password: it has no setting for that,
            so keep them in a network of their own. ``MOONCAKE_LOCAL_HOSTNAME``.
        metadata_server: ``"P2PHANDSHAKE"`` (none is needed) or the URL of a metadata server:
            ``http``, ``https``, ``etcd`` or ``redis``, as far as the wheel was built with it. The
            engine's own log, where it is shown, shows the URL whole.
            ``MOONCAKE_TE_META_DATA_SERVER``.
        global_segment_size: memory this client lends to the cluster; 0 = none, else at least 1024
            bytes (upstream's ``MIN_SEGMENT_SIZE``). ``MOONCAKE_GLOBAL_SEGMENT_SIZE``.
        local_buffer_size: memory that values pass through on their way; 0 = zero-copy only, at most
            1 TiB (upstream's ``MAX_SEGMENT_SIZE``). ``MOONCAKE_LOCAL_BUFFER_SIZE``.
        protocol: the transport, kept in lower case. ``MOONCAKE_PROTOCOL``.
        device_name: RDMA devices, separated by commas; empty = found by the engine.
            ``MOONCAKE_DEVICE``.
        tenant_id: whose keys these are. ``MOONCAKE_TENANT_ID``.
        client_server_address: ``"host:port"`` of a stand-alone client on this host; when it is set
            the store is a "dummy" client of that one. ``MOONCAKE_CLIENT``.
        mem_pool_size: memory that the engine of a dummy client shares of itself, which only the
            binding's own calls by value need (``store.engine.put``, tensors); then at most one
            store of a process can have such memory: with two of them neither finds back to a
            stand-alone client that was restarted. The verbs share their memory as they need it,
            and ``local_buffer_size`` has no meaning for a dummy client.
        master_metrics_port: the master's HTTP port (its ``--metrics_port``); lets set-up ask
            ``/health`` and warm-up name a peer that is stuck. ``MOONCAKE_MASTER_METRICS_PORT``.
        enable_ssd_offload: let the engine move values to local disk. ``MOONCAKE_OFFLOAD_ENABLED``.
        ssd_offload_path: the directory for that; empty = the engine's own choice.
            ``MOONCAKE_OFFLOAD_FILE_STORAGE_PATH``.
        enable_client_http_server: serve this client's health and metrics over HTTP.
            ``MOONCAKE_ENABLE_CLIENT_HTTP_SERVER``.
        client_http_port: the port for that (9300 upstream). ``MOONCAKE_CLIENT_HTTP_PORT``.
        rpc_timeout: how long a request to the master may take, in seconds. The engine's own default
            of 30 s makes closing on a frozen master take 106 s. ``MC_RPC_TIMEOUT_MS``.
        rpc_connect_timeout: the same for connecting to it. ``MC_RPC_CONNECT_TIMEOUT_MS``.
        transfer_timeout: whole seconds, 1 to 20, after which a transfer that does not move is given
            up. The engine's default is 30 s, and at 60 s it writes into memory later; peers are
            waited for one after the other. ``MC_TCP_STATUS_TIMEOUT_SEC`` and
            ``MC_TCP_PROGRESS_TIMEOUT_SEC``, read once per process.
        direct: set up and tear down through the engine's exported entry points, which leave the GIL
            free; False = through the binding, which stops every thread meanwhile.
        merge: let calls of single keys that wait together travel in one engine call; False = each
            travels by itself.
        fail_fast: while the master is known to be away, let calls fail at once instead of each
            waiting for its time-out, and avoid peers that do not answer; a thread looks for their
            return meanwhile.
        max_abandoned: calls that were cancelled and are still stuck in the engine; beyond this many
            further calls fail at once, since each stuck one burns a core.
        threads: worker threads for calls of small values. A thread in a transfer spins, so more of
            them than cores make every call slower: 258 us for a get with one, 677 us with eight, on
            two cores and from another process.
    """

    master_server_address: str
    _: KW_ONLY
    local_hostname: str | None = None
    metadata_server: str = P2PHANDSHAKE
    global_segment_size: _Size = _Size("512MiB")
    local_buffer_size: _Size = _Size("64MiB")
    protocol: str = "tcp"
    device_name: str = ""
    tenant_id: str = "default"
    client_server_address: str | None = None
    mem_pool_size: _Size = _Size("0")
    master_metrics_port: int | None = None
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    enable_client_http_server: bool = False
    client_http_port: int = 9300
    rpc_timeout: float = 2.5
    rpc_connect_timeout: float = 2.0
    transfer_timeout: int = 2
    direct: bool = True
    merge: bool = True
    fail_fast: bool = True
    max_abandoned: int = 8
    threads: int = 4

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            object.__setattr__(self, name, setting.parse(getattr(self, name), name))
        if not self.master_server_address and self.client_server_address is None:
            raise ConfigError(
                "master_server_address is empty: give the master's host:port, or the "
                "client_server_address of a stand-alone client."
            )

    def __repr__(self) -> str:
        """Show what differs from the defaults, without users, passwords and tokens."""
        parts = [repr(mask_secrets(self.master_server_address))]
        for spec in dataclasses.fields(self)[1:]:
            value = getattr(self, spec.name)
            default = SETTINGS[spec.name].parse(spec.default, spec.name)
            if value != default:
                shown = mask_secrets(value) if isinstance(value, str) else value
                parts.append(f"{spec.name}={shown!r}")
        return f"StoreConfig({', '.join(parts)})"

    def replace(self, **changes: Any) -> StoreConfig:
        """Return a copy with some fields changed.

        Raises:
            ConfigError: for an unknown field or a bad value.
        """
        check_names(changes, what="Option")
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        dialect: Dialect | None = None,
        rank: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        gpu: int | None = None,
    ) -> StoreConfig:
        """Read the ``MOONCAKE_…`` variables, over the file that ``MOONCAKE_CONFIG_PATH`` names.

        With a dialect: the variables, and the file, that the project reads.

        Args:
            environ: the variables; by default the process's own.
            dialect: whose configuration it is; :meth:`from_mapping` explains it and the rest.

        Raises:
            ConfigError: for a bad value, a mistyped name, or when no master is named.
        """
        environ = os.environ if environ is None else environ
        place = Place(rank, tp_size, pp_size, gpu)
        if dialect is not None:
            return _build(read_environ(check_dialect(dialect), environ, place))
        place.check((), "our own configuration")
        path = environ.get(CONFIG_PATH)
        values = _from_own_file(Path(path)) if path else {}
        values.update(from_environ(environ))
        if not values.get("master_server_address") and not values.get("client_server_address"):
            raise ConfigError(
                "The environment names no master: set MOONCAKE_MASTER=host:port, or "
                f"{CONFIG_PATH} to a JSON file with master_server_address."
            )
        return _build(values)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        dialect: Dialect | None = None,
        rank: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        gpu: int | None = None,
    ) -> StoreConfig:
        """Read a JSON file, such as the one that ``MOONCAKE_CONFIG_PATH`` names.

        It blocks for as long as a small read takes: in a running loop use ``to_thread`` for files
        on slow disks.

        Args:
            path: the file.
            dialect: whose file it is; :meth:`from_mapping` explains it and the rest.

        Raises:
            ConfigError: if it can't be read, names no master, or says something wrong.
        """
        place = Place(rank, tp_size, pp_size, gpu)
        if dialect is not None:
            return _build(read_file(check_dialect(dialect), Path(path), place))
        place.check((), "our own configuration")
        return _build(_from_own_file(Path(path)))

    @classmethod
    def from_mapping(
        cls,
        given: Mapping[str, Any],
        *,
        dialect: Dialect | None = None,
        rank: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        gpu: int | None = None,
    ) -> StoreConfig:
        """Read a mapping from keys to values, such as a framework's extra configuration.

        A dialect brings that project's own keys, spellings of values and **defaults**, which
        ``docs/configuration.md`` lists; what it does not know, such as ``rpc_timeout``, is set by
        :meth:`replace`. Some need to know where this process stands, and only they take it.

        Args:
            given: the mapping. For ``"sglang"`` its storage backend's extra config, for
                ``"lmcache"`` LMCache's whole configuration or its ``extra_config``, for ``"wheel"``
                also the dictionary that the binding's ``setup`` takes.
            dialect: ``"sglang"``, ``"vllm"``, ``"lmcache"`` or ``"wheel"``; None = our own keys
                and defaults, as in a file.
            rank: the global rank, as ``torch.distributed`` counts: chooses from a map of devices,
                and is added to the client's metrics port. It goes with ``tp_size``.
            tp_size: tensor-parallel ranks; the segment is divided among all ranks of a replica.
            pp_size: pipeline stages, likewise; None = 1.
            gpu: the physical number of the worker's GPU; chooses from ``device_name_per_gpu``.

        Raises:
            ConfigError: naming key, value, dialect and cure.
        """
        place = Place(rank, tp_size, pp_size, gpu)
        given = check_keys(given, field="given")
        if dialect is not None:
            return _build(read_mapping(check_dialect(dialect), given, place))
        place.check((), "our own configuration")
        return _build(from_keys(given, what="Key"))

    @classmethod
    def from_url(cls, url: str) -> StoreConfig:
        """Read ``"mooncake://host:port?protocol=tcp&global_segment_size=4gb"``.

        LMCache's ``"mooncakestore://host:port/?device=…"`` is read too, with our defaults.

        Raises:
            ConfigError: for another scheme, an unknown parameter or a bad value.
        """
        target = parse_target(url)
        if target.kind != "master":
            raise bad_value("url", url, 'give "mooncake://host:port"; connect takes the others')
        return target.to_config()


def _from_own_file(path: Path) -> dict[str, Any]:
    return from_keys(load_json(path), what=f"In the config file {path}, key")


def _build(values: Mapping[str, Any]) -> StoreConfig:
    return StoreConfig(**{"master_server_address": "", **values})


@dataclass(frozen=True, slots=True)
class Target:
    """What a caller of ``connect`` named.

    Attributes:
        kind: ``"master"`` (a running one), ``"local"`` (a private one, to be started) or
            ``"memory"`` (the in-memory engine).
        address: the master's address, or the name of the in-memory cluster; empty for ``"local"``.
        overrides: the fields that a URL's parameters set.
        config: the finished config, when there is one already.
    """

    kind: Literal["master", "local", "memory"]
    address: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    config: StoreConfig | None = None

    def __repr__(self) -> str:
        """Show kind and address, without users, passwords and tokens."""
        return f"Target({self.kind!r}, {mask_secrets(self.address)!r})"

    def to_config(self, address: str | None = None, **overrides: Any) -> StoreConfig:
        """Make the config, with a caller's overrides on top of what the target says.

        Args:
            address: where the private master of a ``"local"`` target listens.
            **overrides: fields of :class:`StoreConfig`.

        Raises:
            ConfigError: for an unknown field or a bad value.
        """
        if self.config is not None:
            return self.config.replace(**overrides)
        check_names(overrides, what="Option")
        if address is None:
            address = f"memory://{self.address}" if self.kind == "memory" else self.address
        return StoreConfig(**{"master_server_address": address, **self.overrides, **overrides})


def parse_target(target: str | StoreConfig | None) -> Target:
    """Understand what ``connect`` was given.

    Args:
        target: ``"host:port"``, ``"mooncake://host:port?…"``, LMCache's
            ``"mooncakestore://host:port/?device=…"``, ``"etcd://…"`` and the like,
            ``"local://?…"``, ``"memory://name?…"``, a config, or None for the environment.

    Raises:
        ConfigError: if it is none of these, or a part of it is wrong.
    """
    if target is None:
        target = StoreConfig.from_env()
    if isinstance(target, StoreConfig):
        scheme, _, name = target.master_server_address.partition("://")
        if scheme == "memory":
            return Target("memory", name, config=target)
        return Target("master", target.master_server_address, config=target)
    text = check_text(target, field="target")
    scheme, mark, rest = text.partition("://")
    scheme = scheme.lower()
    if not mark:
        split_address(text, field="target")
        return Target("master", text)
    if scheme in _COORDINATED:
        return Target("master", SETTINGS["master_server_address"].parse(text, "target"))
    if scheme not in _SCHEMES:
        meant = nearest(scheme, _SCHEMES)
        hint = (
            f'did you mean "{meant}://"?' if meant else 'give host:port or "mooncake://host:port"'
        )
        raise bad_value("target", text, hint)
    place, _, query = rest.partition("?")
    place = place.removesuffix("/")
    aliases = {"device": "device_name"} if scheme == LMCACHE_SCHEME else {}
    overrides = _parameters(query, text, aliases)
    if scheme == "local":
        if place:
            raise bad_value("target", text, 'a private master has no address: give "local://"')
        return Target("local", overrides=overrides)
    if scheme == "memory":
        if not _NAME.fullmatch(place):
            raise bad_value("target", text, 'give a name of letters, digits, "-", "_" and "."')
        return Target("memory", place, overrides)
    if place or "client_server_address" not in overrides:
        _check_master(place, text, scheme)
    return Target("master", place, overrides)


def _check_master(place: str, text: str, scheme: str) -> None:
    if not place:
        raise bad_value("target", text, f'it names no master: give "{scheme}://host:port"')
    split_address(place, field="target")


def _parameters(query: str, text: str, aliases: Mapping[str, str]) -> dict[str, Any]:
    if not query:
        return {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError:
        raise bad_value("target", text, "parameters look like ?name=value&name=value") from None
    given: dict[str, str] = {}
    for spelling, value in pairs:
        name = aliases.get(spelling, spelling)
        if given.setdefault(name, value) != value:
            raise bad_value("target", text, f"it sets {name} twice, with different values")
    overrides = from_keys(given, what="URL parameter")
    if "master_server_address" in overrides:
        raise bad_value("target", text, 'the master stands before the "?"')
    return overrides
