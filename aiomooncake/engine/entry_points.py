"""The engine's exported C++ functions for set-up and tear-down, verified before any use.

``setup()``, ``setup_dummy()`` and ``close()`` of the binding never release the GIL; a
``ctypes.CDLL`` call of the C++ functions behind them does. That way is taken only when everything
about it can be verified:

* the binding has ``_get_pyclient_capsule`` (0.3.11.post1 and newer),
* the exact mangled names are exported; a mangled name *is* the argument list, so a wheel with
  another signature has another name,
* the object's first word is the vtable of the class that the functions belong to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiomooncake.engine.last_reference import destroy

if TYPE_CHECKING:
    from aiomooncake.config import StoreConfig
    from aiomooncake.engine.binding import Binding

__all__ = ["DummyEntry", "Entry", "RealEntry"]

_STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
# setup_real(const string& local_hostname, const string& metadata_server, size_t segment,
#   size_t local_buffer, const string& protocol, const string& devices, const string& master,
#   const shared_ptr<TransferEngine>&, const string& ipc_socket_path, …)
_SETUP_REAL = (
    f"_ZN8mooncake10RealClient10setup_realERK{_STRING}S8_mmS8_S8_S8_"
    "RKSt10shared_ptrINS_14TransferEngineEES8_"
)
# What follows in the versions that have the capsule: (bool enable_ssd_offload,
# const string& ssd_path) (0.3.11.post1); and (const string& tenant_id,
# bool enable_client_http_server, int client_http_port) on top (0.3.12 … 0.3.14).
_SETUP_TAILS = ("bS8_S8_bi", "bS8_")
# setup_dummy(size_t mem_pool_size, size_t local_buffer_size, const string& server_address,
#   const string& ipc_socket_path)
_SETUP_DUMMY = f"_ZN8mooncake11DummyClient11setup_dummyEmmRK{_STRING}S8_"
_CAPSULE = b"mooncake.PyClient.shared_ptr"
# Itanium C++ ABI: an object points past the vtable's offset-to-top and type_info words.
_VTABLE_HEADER = 16

# By item: an attribute of ctypes.pythonapi is shared with the whole process.
_get_pointer = ctypes.pythonapi["PyCapsule_GetPointer"]
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_get_pointer.restype = ctypes.c_void_p


class _String(ctypes.Structure):
    """A ``const std::string`` of libstdc++ that borrows its characters."""

    _fields_ = (
        ("data", ctypes.c_char_p),
        ("length", ctypes.c_size_t),
        ("local", ctypes.c_char * 16),
    )

    @classmethod
    def of(cls, text: str) -> _String:
        raw = text.encode()
        return cls(raw, len(raw))


class _MissingError(Exception):
    """What the direct way needs is not there; says what."""


@dataclass(frozen=True)
class Entry:
    """The exported functions of one C++ class.

    Attributes:
        set_up: Its set-up, untyped: the argument list is the subclass's business.
        tear_down: Its ``tearDownAll``.
        vtable: The first word of every object of the class.
    """

    set_up: Callable[..., int]
    tear_down: Callable[..., int]
    vtable: int

    def address(self, native: Any) -> int | None:
        """Find the C++ object behind a binding object; None when it is not what we expect."""
        capsule = native._get_pyclient_capsule()
        try:
            shared_ptr = _get_pointer(capsule, _CAPSULE)
        except ValueError:
            return None
        if not shared_ptr:
            return None
        address = ctypes.c_void_p.from_address(shared_ptr).value
        if not address or ctypes.c_void_p.from_address(address).value != self.vtable:
            return None
        return address


@dataclass(frozen=True)
class RealEntry(Entry):
    """The way into ``mooncake::RealClient``.

    Attributes:
        tail: How its argument list ends, mangled.
        destructor: The destructor that frees the object too; None when it is not exported.
    """

    tail: str
    destructor: Callable[[int], object] | None = None

    @classmethod
    def find(cls, binding: Binding) -> RealEntry | str:
        """Look for everything the direct way needs; the reason as text when it is not there."""
        try:
            lib = _library(binding)
            parts = _class_parts(lib, "10RealClient")
        except _MissingError as exc:
            return str(exc)
        for tail in _SETUP_TAILS:
            set_up = getattr(lib, _SETUP_REAL + tail, None)
            if set_up is not None:
                set_up.restype = ctypes.c_int
                destructor = getattr(lib, "_ZN8mooncake10RealClientD0Ev", None)
                if destructor is not None:
                    destructor.restype = None
                    destructor.argtypes = [ctypes.c_void_p]
                return cls(set_up, *parts, tail, destructor)
        return "RealClient::setup_real is not exported with a known argument list"

    def destroy(self, native: Any) -> bool:
        """Destroy the C++ object that was torn down; False, and nothing is done, for any doubt."""
        if self.destructor is None or self.address(native) is None:
            return False
        capsule = native._get_pyclient_capsule()
        return destroy(native, _get_pointer(capsule, _CAPSULE), self.destructor)

    def setup(self, address: int, config: StoreConfig, local_hostname: str) -> int:
        """Run ``RealClient::setup_real`` without the GIL."""
        host, metadata, protocol, devices, master, ipc, ssd, tenant = (
            _String.of(text)
            for text in (
                local_hostname,
                config.metadata_server,
                config.protocol,
                config.device_name,
                config.master_server_address,
                "",
                config.ssd_offload_path,
                config.tenant_id,
            )
        )
        null_engine = (ctypes.c_char * 16)()
        arguments: list[Any] = [
            ctypes.c_void_p(address),
            ctypes.byref(host),
            ctypes.byref(metadata),
            ctypes.c_size_t(config.global_segment_size),
            ctypes.c_size_t(config.local_buffer_size),
            ctypes.byref(protocol),
            ctypes.byref(devices),
            ctypes.byref(master),
            ctypes.byref(null_engine),
            ctypes.byref(ipc),
            ctypes.c_bool(config.enable_ssd_offload),
            ctypes.byref(ssd),
        ]
        if self.tail == _SETUP_TAILS[0]:
            arguments += [
                ctypes.byref(tenant),
                ctypes.c_bool(config.enable_client_http_server),
                ctypes.c_int(config.client_http_port),
            ]
        return int(self.set_up(*arguments))


@dataclass(frozen=True)
class DummyEntry(Entry):
    """The way into ``mooncake::DummyClient``."""

    @classmethod
    def find(cls, binding: Binding) -> DummyEntry | str:
        """Look for everything the direct way needs; the reason as text when it is not there."""
        try:
            lib = _library(binding)
            parts = _class_parts(lib, "11DummyClient")
        except _MissingError as exc:
            return str(exc)
        set_up = getattr(lib, _SETUP_DUMMY, None)
        if set_up is None:
            return "DummyClient::setup_dummy is not exported with the known argument list"
        set_up.restype = ctypes.c_int
        return cls(set_up, *parts)

    def setup(self, address: int, config: StoreConfig, server: str, port: int) -> int:
        """Run ``DummyClient::setup_dummy`` without the GIL.

        Args:
            address: The object.
            config: Sizes of its shared memory.
            server: ``host:port`` of the stand-alone client.
            port: That port; the client's Unix socket is named by it.
        """
        where = _String.of(server)
        socket = _String.of(f"@mooncake_client_{port}.sock")
        return int(
            self.set_up(
                ctypes.c_void_p(address),
                ctypes.c_size_t(config.mem_pool_size),
                ctypes.c_size_t(config.mem_pool_size),
                ctypes.byref(where),
                ctypes.byref(socket),
            )
        )


def _library(binding: Binding) -> ctypes.CDLL:
    if "_get_pyclient_capsule" not in dir(binding.store_class):
        raise _MissingError("the binding has no _get_pyclient_capsule")
    try:
        return ctypes.CDLL(str(binding.shared_object))
    except OSError as exc:
        raise _MissingError(f"its shared object can't be opened again ({exc})") from None


def _class_parts(lib: ctypes.CDLL, mangled: str) -> tuple[Callable[..., int], int]:
    """Find ``tearDownAll`` and the vtable of a class in namespace ``mooncake``."""
    name = mangled.lstrip("0123456789")
    tear_down = getattr(lib, f"_ZN8mooncake{mangled}11tearDownAllEv", None)
    if tear_down is None:
        raise _MissingError(f"{name}::tearDownAll is not exported")
    try:
        vtable = ctypes.c_char.in_dll(lib, f"_ZTVN8mooncake{mangled}E")
    except ValueError:
        raise _MissingError(f"the vtable of {name} is not exported") from None
    tear_down.restype = ctypes.c_int
    tear_down.argtypes = [ctypes.c_void_p]
    return tear_down, ctypes.addressof(vtable) + _VTABLE_HEADER
