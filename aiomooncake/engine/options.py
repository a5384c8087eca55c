"""What a set-up asks for, held against what this wheel and this host can give.

Checked before the engine is touched. A wheel does not know the options that came after it: the
direct way would leave them out silently, and the binding answers ``TypeError`` from inside. And
where the engine's C++ code throws an exception (a directory that is not there, memory that can't be
had), the process ends at once, because only the binding could catch it, under the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiomooncake.engine.binding import find_setup_parameters, installed_version
from aiomooncake.engine.since import OLDEST
from aiomooncake.errors import ConfigError, InvalidArgumentError, NotSupportedError

if TYPE_CHECKING:
    from aiomooncake.config import StoreConfig
    from aiomooncake.engine.binding import Binding

N = TypeVar("N", int, float)

__all__ = [
    "check_dummy_options",
    "check_installed",
    "check_methods",
    "check_options",
    "check_version",
    "check_wheel",
    "was_taken",
]

# What the verbs call, of which wheels before 0.3.10.post2 lack one or the other.
_NEEDED: Final = frozenset({"batch_remove", "batch_upsert_from", "health_check", "upsert_from"})
# Came with 0.3.13, whose dummy clients are the first that are right: earlier ones cut a value to
# the memory it is read into, and can't store one of some MB. That does not show from outside.
_WITH_RIGHT_DUMMIES: Final = "batch_get_session_start"
_RIGHT_DUMMIES: Final = "0.3.13"

_looking: Final = threading.Lock()
# A refusal is not kept, so an upgrade helps at once.
_taken: Final[set[bool]] = set()
_RELEASE: Final = re.compile(r"([0-9]+)\.([0-9]+)\.([0-9]+)(?:\.post([0-9]+))?", re.ASCII)

_OFFLOAD: Final = ("enable_ssd_offload", "ssd_offload_path")
_NEWEST: Final = ("tenant_id", "enable_client_http_server", "client_http_port")
# What the exported setup_real takes, by the end of its mangled argument list.
_OF_TAIL: Final = {"bS8_": _OFFLOAD, "bS8_S8_bi": (*_OFFLOAD, *_NEWEST)}

# Options of StoreConfig that not every wheel knows: the value that asks for nothing, what becomes
# of any other where it is not known, and the first wheel that knows it.
_LATER: Final = (
    ("enable_ssd_offload", False, "nothing would be moved to disk", "0.3.10.post2"),
    ("tenant_id", "default", "it would share its keys with all tenants", "0.3.12.post1"),
    (
        "enable_client_http_server",
        False,
        "nothing would listen on client_http_port",
        "0.3.12.post1",
    ),
)

# Upstream's defaults, and the numbers in the environment that its file storage refuses.
_OFFLOAD_PATH: Final = "/data/file_storage"
_OFFLOAD_BUFFER: Final = 1280 << 20
_AT_LEAST_ONE: Final = (
    "MOONCAKE_OFFLOAD_TOTAL_KEYS_LIMIT",
    "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES",
)
_OF_BUCKETS: Final = (
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT",
    "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES",
)
_BUCKETS: Final = "bucket_storage_backend"
_ON_DISK: Final = (_BUCKETS, "file_per_key_storage_backend", "offset_allocator_storage_backend")
_HIGH, _LOW = "DISK_EVICTION_HIGH_WATERMARK_RATIO", "DISK_EVICTION_LOW_WATERMARK_RATIO"

# What the engine has for each kind of metadata server, if it was built with it: a type that it
# exports.
_METADATA: Final = "_ZTIN8mooncake{}StoragePluginE"
_PLUGINS: Final = {"http": "17HTTP", "https": "17HTTP", "etcd": "17Etcd", "redis": "18Redis"}

_MAP_HUGETLB: Final = 0x40000  # Linux's; Python has no name for it
_HUGE_PAGE: Final = 2 << 20


def check_wheel(binding: Binding, *, dummy: bool) -> None:
    """Refuse a wheel that is too old for a client of this kind.

    Raises:
        NotSupportedError: It is; says which one is not.
    """
    check_methods(binding.methods, binding.version)
    if dummy and _WITH_RIGHT_DUMMIES not in binding.methods:
        raise _wrong_dummies(binding.version)


def check_installed(*, dummy: bool) -> None:
    """Refuse the installed wheel before it is loaded, if its version says that it is too old.

    Reads files: not for a loop.

    Raises:
        NotSupportedError: It is; in the words of :func:`check_wheel`.
    """
    with _looking:  # of many ranks that begin at once, one reads; the others don't ask for the GIL
        if not was_taken(dummy=dummy):
            check_version(installed_version(), dummy=dummy)
            _taken.add(dummy)


def was_taken(*, dummy: bool) -> bool:
    """Tell whether :func:`check_installed` took the wheel for a client of this kind before."""
    return dummy in _taken


def check_version(version: str | None, *, dummy: bool) -> None:
    """Refuse a wheel by its version; one that is not known, or no plain release, passes.

    Raises:
        NotSupportedError: It is too old for a client of this kind.
    """
    if _is_before(version, OLDEST):
        raise NotSupportedError(
            f"{_name(version)} is too old for aiomooncake: install {OLDEST} or newer"
        )
    if dummy and _is_before(version, _RIGHT_DUMMIES):
        raise _wrong_dummies(version)


def _wrong_dummies(version: str | None) -> NotSupportedError:
    return NotSupportedError(
        f"{_name(version)} is too old for dummy clients, which cut large values short: install "
        f"{_RIGHT_DUMMIES} or newer, or connect to the master instead, without "
        "client_server_address"
    )


def _is_before(version: str | None, oldest: str) -> bool:
    releases = [_RELEASE.fullmatch(each or "") for each in (version, oldest)]
    mine, least = ([int(n or -1) for n in each.groups()] if each else [] for each in releases)
    return bool(mine) and mine < least


def check_methods(
    methods: frozenset[str], version: str | None = None, *, rank: int | str | None = None
) -> None:
    """Refuse a wheel whose stores lack a method that the verbs call.

    Args:
        methods: What they have.
        version: The wheel's; that of the installed one if left out.
        rank: Rank, for the error.

    Raises:
        NotSupportedError: It is too old; names what is missing.
    """
    missing = sorted(_NEEDED - methods)
    if missing:
        wheel = _name(version or installed_version())
        raise NotSupportedError(
            f"{wheel} is too old, it has no {', '.join(missing)}: install {OLDEST} or newer",
            rank=rank,
        )


def _name(version: str | None) -> str:
    return f"engine {version}" if version else "the installed engine"


def check_options(
    binding: Binding,
    direct_tail: str | None,
    config: StoreConfig,
    transfer_engine: object | None,
) -> None:
    """Check a set-up of a real client; blocking (files, a port), for a worker thread.

    Args:
        binding: The loaded binding.
        direct_tail: How the argument list of the exported ``setup_real`` ends, mangled; None when
            the binding's own ``setup`` will be called.
        config: What is asked for.
        transfer_engine: The transfer engine to share, or None.

    Raises:
        NotSupportedError: This wheel does not know an option that was asked for.
        InvalidArgumentError: That is no transfer engine, or it was not initialised.
        ConfigError: The host can't give what was asked for.
    """
    _check_known(binding, direct_tail if transfer_engine is None else None, config)
    if transfer_engine is not None:
        _check_transfer_engine(transfer_engine)
    if config.tenant_id.startswith("_"):
        raise ConfigError(
            f"tenant_id={config.tenant_id!r} begins with an underscore, which the engine keeps for "
            "itself and refuses call by call: give another name"
        )
    _check_metadata(binding, config)
    _check_memory(config.local_buffer_size, "local_buffer_size", huge=_uses_huge_pages())
    if config.enable_ssd_offload:
        _check_offload(config.ssd_offload_path)
    if config.enable_client_http_server:
        _check_port(config.client_http_port)


def _check_metadata(binding: Binding, config: StoreConfig) -> None:
    """Refuse a kind of metadata server that the wheel is built without: it ends the process."""
    scheme, mark, _ = config.metadata_server.partition("://")
    if not mark:
        return
    symbols = ctypes.CDLL(str(binding.shared_object))
    if not hasattr(symbols, _METADATA.format("21Metadata")) or scheme not in _PLUGINS:
        return  # not as we know it: let the engine say
    if not hasattr(symbols, _METADATA.format(_PLUGINS[scheme])):
        raise NotSupportedError(
            f"this wheel was built without {scheme}:// metadata servers, and would end the "
            'process: use metadata_server="P2PHANDSHAKE" (none is needed), or another kind'
        )


def check_dummy_options(config: StoreConfig) -> None:
    """Refuse options that a dummy client can't pass on to its stand-alone client.

    Raises:
        NotSupportedError: One of them was asked for.
    """
    for name, unasked, _, _ in _LATER:
        if getattr(config, name) != unasked:
            raise NotSupportedError(
                f"{name}={getattr(config, name)!r} is a matter of the stand-alone client that "
                "client_server_address names, and a dummy client can't pass it on: give it to "
                "mooncake_client, and leave it out here"
            )


def _check_known(binding: Binding, direct_tail: str | None, config: StoreConfig) -> None:
    if direct_tail is not None:
        known = frozenset(_OF_TAIL[direct_tail])
    else:
        known = find_setup_parameters(binding.store_class)
        if not known:
            return  # a binding without signatures: it will tell itself
    for name, unasked, otherwise, since in _LATER:
        if getattr(config, name) != unasked and name not in known:
            raise NotSupportedError(
                f"{name}={getattr(config, name)!r} is not known to {_name(binding.version)}, and "
                f"{otherwise}: install {since} or newer, or leave it out"
            )


def _check_transfer_engine(transfer_engine: object) -> None:
    inner: Any = transfer_engine
    get_engine = getattr(transfer_engine, "get_engine", None)
    if get_engine is not None:
        inner = get_engine()
        if inner is None:
            raise InvalidArgumentError(
                "transfer_engine= was not initialised, so there is nothing to share: call its "
                'initialize(hostname, "P2PHANDSHAKE", protocol, devices) first and see that it '
                "answers 0"
            )
    if type(inner).__name__ != "InnerTransferEngine":
        raise InvalidArgumentError(
            "transfer_engine= takes a mooncake.engine.TransferEngine, not "
            f"{type(transfer_engine).__name__}"
        )


def _uses_huge_pages() -> bool:
    # The engine asks only whether it is set. With an arena it takes them from there.
    return "MC_STORE_USE_HUGEPAGE" in os.environ and "MC_MMAP_ARENA_POOL_SIZE" not in os.environ


def _check_memory(nbytes: int, field: str, *, huge: bool = False) -> None:
    """Ask the kernel for memory as the engine will, and give it back untouched."""
    if not nbytes:
        return
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    kind, cure = "", "give less"
    if huge:
        flags |= _MAP_HUGETLB
        nbytes = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        kind = " of huge pages (MC_STORE_USE_HUGEPAGE is set)"
        cure = "give less, or reserve more of them (/proc/sys/vm/nr_hugepages)"
    try:
        mmap.mmap(-1, nbytes, flags=flags).close()
    except (OSError, OverflowError) as exc:
        raise ConfigError(
            f"{field} asks for {nbytes} bytes{kind}, which this host can't give ({exc}): {cure}"
        ) from exc


def _check_offload(path: str) -> None:
    """Check what the engine's file storage throws an exception for.

    Other storage than directories (a distributed file system, NVMe) has rules of its own.
    """
    environ = os.environ
    backend = environ.get("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", _BUCKETS)
    for name in (*_AT_LEAST_ONE, *(_OF_BUCKETS if backend == _BUCKETS else ())):
        if _number(int, 1, name) < 1:
            raise ConfigError(f"{name}={environ[name]} is too small: give at least 1")
    high = _number(float, 0.9, f"MOONCAKE_OFFLOAD_{_HIGH}", f"MOONCAKE_{_HIGH}")
    low = _number(float, 0.8, f"MOONCAKE_OFFLOAD_{_LOW}", f"MOONCAKE_{_LOW}")
    if not 0 < low < high <= 1:
        raise ConfigError(
            f"MOONCAKE_OFFLOAD_{_LOW} ({low:g}) and MOONCAKE_OFFLOAD_{_HIGH} ({high:g}) must be "
            "ratios between 0 and 1, the low one lower than the high one"
        )
    if backend in _ON_DISK:
        _check_directory(path or environ.get("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", _OFFLOAD_PATH))
    buffer = "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES"
    _check_memory(_number(int, _OFFLOAD_BUFFER, buffer), buffer)


def _number(kind: Callable[[str], N], default: N, *names: str) -> N:
    """Read the first of these variables that is set; the default also for what is no number."""
    for name in names:
        with contextlib.suppress(KeyError, ValueError):
            return kind(os.environ[name])
    return default


def _check_directory(path: str) -> None:
    place = PurePosixPath(path)
    trouble = ""
    if not place.is_absolute() or ".." in place.parts:
        trouble = 'is not an absolute path without ".."'
    else:
        try:
            status = os.lstat(path)
        except OSError as exc:
            trouble = f"can't be used ({exc.strerror})"
        else:
            if stat.S_ISLNK(status.st_mode):
                trouble = "is a symbolic link, which the engine does not follow"
            elif not stat.S_ISDIR(status.st_mode):
                trouble = "is not a directory"
            elif not os.access(path, os.W_OK):
                trouble = "can't be written to"
    if trouble:
        raise ConfigError(
            f"enable_ssd_offload needs a directory of this client's own, but {path!r} {trouble}: "
            "create one, and name it by ssd_offload_path or MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"
        )


def _check_port(port: int) -> None:
    """Refuse a port that is taken: the engine would go on without its HTTP server, silently."""
    with socket.socket() as probe:
        # As the engine does, so that a port is free at once when its last owner has gone.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104  # where the engine will listen
            probe.listen(1)
        except OSError as exc:
            raise ConfigError(
                f"client_http_port={port} can't be listened on ({exc.strerror}), so this client's "
                "metrics would be missing: give another port, to each rank its own"
            ) from exc
