"""Load the engine's binding once, and find out by looking what it can do."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import os
import re
import sys
import threading
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from aiomooncake.engine.missing import explain_import_error
from aiomooncake.engine.protocol import NativeBufferHandle, NativeStore
from aiomooncake.errors import EngineNotInstalledError, InvalidArgumentError, NotSupportedError

if TYPE_CHECKING:
    from aiomooncake.config import ReplicateConfig

__all__ = [
    "Binding",
    "NativeBufferHandle",
    "NativeStore",
    "find_address_methods",
    "find_methods",
    "find_setup_parameters",
    "installed_distributions",
    "installed_version",
    "load_binding",
    "native_replicate_config",
]

# All of them install the same package `mooncake`.
_CANDIDATES: Final = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-efa",
    "mooncake-transfer-engine-efa-non-cuda",
    "mooncake-transfer-engine-efa-cuda13",
    "mooncake-transfer-engine-musa",
    "mooncake-transfer-engine-npu",
    "mooncake-transfer-engine-rocm",
)

# A parameter of a pybind11 signature: after "(" or ", ", perhaps starred, and before ":".
_PARAMETER: Final = re.compile(r"[(,]\s*\*{0,2}(\w+)\s*[:,)=]")

# Options of ReplicateConfig that came later than the oldest wheel that is supported.
_SINCE: Final = {
    "nof_replica_num": "0.3.12.post1",
    "dfs_replica_num": "0.3.13",
    "preferred_nof_segments": "0.3.12.post1",
    "soft_pin_action": "0.3.13",
    "soft_pin_ttl_ms": "0.3.13",
    "data_type": "0.3.11.post1",
    "group_ids": "0.3.12.post1",
}

_lock: Final = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """The loaded engine and what it offers.

    Attributes:
        module: ``mooncake.store``.
        store_class: The class of the native clients.
        replicate_config_class: The class of the placement options.
        shared_object: The file of native code that defines ``store_class``.
        version: Version of the wheel; None when it is not known or several wheels disagree.
        distributions: The engine wheels that are installed; more than one overwrite each other.
        methods: Public methods of ``store_class``.
        address_methods: Those of them that are given addresses of the caller's memory.
    """

    module: ModuleType
    store_class: type[Any]
    replicate_config_class: type[Any]
    shared_object: Path
    version: str | None
    distributions: tuple[str, ...]
    methods: frozenset[str]
    address_methods: frozenset[str]


def load_binding() -> Binding:
    """Import the engine, once per process; safe from any thread.

    The first import takes 20-45 ms with the GIL held and reads the ``MC_*`` variables of the
    transport, so these must be set before.

    Raises:
        EngineNotInstalledError: The engine can't be imported; says what is missing.
    """
    with _lock:
        return _load()


@functools.cache
def _load() -> Binding:
    # Read when the native code loads; later has no effect. It does not silence errors, of which a
    # healthy store makes many (each set-up, each value that is larger than was guessed).
    quiet = "MC_LOG_LEVEL" not in os.environ
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    distributions = installed_distributions()
    try:
        module = importlib.import_module("mooncake.store")
        store_class = module.MooncakeDistributedStore
        replicate_config_class = module.ReplicateConfig
    except (ImportError, AttributeError) as exc:
        raise EngineNotInstalledError(
            explain_import_error(exc, distributions, sys.platform)
        ) from exc
    if len(distributions) > 1:
        _warn_overlaid(distributions)
    # From 0.3.14 on `mooncake.store` is a package and the native module is `mooncake._store`.
    shared_object = sys.modules[store_class.__module__].__file__
    if quiet:
        _silence(shared_object or "")
        # Child processes would take it for their user's wish.
        os.environ.pop("MC_LOG_LEVEL", None)
    return Binding(
        module=module,
        store_class=store_class,
        replicate_config_class=replicate_config_class,
        shared_object=Path(shared_object or ""),
        version=_one_version(distributions),
        distributions=tuple(distributions),
        methods=find_methods(store_class),
        address_methods=find_address_methods(store_class),
    )


def _silence(shared_object: str) -> None:
    """Keep the engine's log to what is fatal: what failed is told by exceptions.

    ``FLAGS_minloglevel`` is glog's own variable (0 INFO, 1 WARNING, 2 ERROR, 3 FATAL), which
    ``MC_LOG_LEVEL`` sets too, but only as far as ERROR.
    """
    # A wheel that links glog in another way stays as loud as it is.
    with contextlib.suppress(OSError, ValueError):
        lib = ctypes.CDLL(shared_object)
        ctypes.c_int.in_dll(lib, "_ZN3fLI17FLAGS_minloglevelE").value = 3


def installed_distributions() -> dict[str, str]:
    """Return the engine wheels that are installed, name to version."""
    found: dict[str, str] = {}
    for name in _CANDIDATES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def installed_version() -> str | None:
    """Return the version of the engine wheel; None when there is none, or several disagree.

    Once the engine is loaded no files are read for it, so that errors can tell it on a loop.
    """
    if _load.cache_info().currsize:
        return _load().version
    return _one_version(installed_distributions())


def _one_version(distributions: dict[str, str]) -> str | None:
    versions = set(distributions.values())
    return versions.pop() if len(versions) == 1 else None


def _warn_overlaid(distributions: dict[str, str]) -> None:
    wheels = " and ".join(f"{name} {version}" for name, version in distributions.items())
    warnings.warn(
        f"{wheels} are installed on top of each other: all of them install the package "
        f"`mooncake`, so their files are mixed and which engine runs is a matter of luck. Keep "
        f"one: pip uninstall -y {' '.join(distributions)}, then install the one you want",
        RuntimeWarning,
        stacklevel=4,
    )


def find_methods(store_class: type[Any]) -> frozenset[str]:
    """Return the public methods of a store class."""
    return frozenset(
        name
        for name in dir(store_class)
        if not name.startswith("_") and callable(getattr(store_class, name))
    )


def find_address_methods(store_class: type[Any]) -> frozenset[str]:
    """Return the methods whose call names memory of the caller.

    Known by a parameter that ends in ``_ptr`` or ``_ptrs``, or by ``_into`` in the name (which
    writes into the caller's tensors). The engine goes on reading or writing that memory when the
    caller no longer waits, so such calls must be drained.
    """
    return frozenset(name for name in find_methods(store_class) if _names_memory(store_class, name))


def find_setup_parameters(store_class: type[Any]) -> frozenset[str]:
    """Return the names of what ``setup`` takes; empty when the binding does not tell."""
    return frozenset(_parameters("setup", store_class.setup))


def _names_memory(store_class: type[Any], name: str) -> bool:
    if "into" in name.split("_"):
        return True
    return any(
        parameter.endswith(("_ptr", "_ptrs"))
        for parameter in _parameters(name, getattr(store_class, name))
    )


def _parameters(name: str, method: Any) -> list[str]:
    # pybind11 writes the signature of each overload into the docstring, on a line of its own.
    signatures = [line for line in (method.__doc__ or "").splitlines() if f"{name}(self: " in line]
    if not signatures:
        try:
            return list(inspect.signature(method).parameters)
        except (TypeError, ValueError):
            return []
    return [found for line in signatures for found in _PARAMETER.findall(line)]


def native_replicate_config(binding: Binding, config: ReplicateConfig) -> Any:
    """Turn placement options into the engine's own object.

    Only what differs from the defaults is set, so that an older wheel that lacks an option
    refuses it only where it is asked for.

    Raises:
        NotSupportedError: This wheel does not know an option, or a value of it.
        InvalidArgumentError: The engine does not take the value.
    """
    native = binding.replicate_config_class()
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if value == field.default:
            continue
        if name == "soft_pin_action" and value == "enable" and hasattr(native, "with_soft_pin"):
            native.with_soft_pin = True  # all that wheels up to 0.3.12.post1 know
            continue
        wheel = f"engine {binding.version}" if binding.version else "the installed engine"
        if not hasattr(native, name):
            newer = f"install {_SINCE[name]} or newer" if name in _SINCE else "upgrade it"
            raise NotSupportedError(
                f"ReplicateConfig.{name} is not known to {wheel}: {newer}, or leave {name} out"
            )
        try:
            setattr(native, name, _native_value(getattr(native, name), value))
        except AttributeError:
            raise NotSupportedError(
                f"ReplicateConfig.{name}={value!r} is not known to {wheel}: upgrade it or choose "
                f"another value"
            ) from None
        except (TypeError, ValueError) as exc:
            raise InvalidArgumentError(
                f"ReplicateConfig.{name}={value!r} is refused by {wheel}: {exc}"
            ) from exc
    return native


def _native_value(current: object, value: object) -> object:
    # Words stand for members of pybind11's enums: "kvcache" for ObjectDataType.KVCACHE.
    if isinstance(value, str) and not isinstance(current, str) and current is not None:
        return getattr(type(current), value.upper())
    return list(value) if isinstance(value, tuple) else value
