"""Set-up and tear-down of a native client, with the GIL released where the wheel allows it.

``setup()`` and ``close()`` of the binding never release the GIL: run in a worker thread they
still stop every Python thread, for up to 90 s against a dead master. The shared object exports
the C++ functions behind them, and a ``ctypes.CDLL`` call runs without the GIL. That way is taken
only when everything about it can be verified:

* the binding has ``_get_pyclient_capsule`` (0.3.11.post1 and newer),
* the exact mangled names are exported; a mangled name *is* the argument list, so a wheel with
  another signature has another name,
* the object's first word is the vtable of ``mooncake::RealClient``.

Otherwise the binding's own methods are used, warned about once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiomooncake.config import StoreConfig
    from aiomooncake.engine.binding import Binding, NativeStore

__all__ = ["DirectEntry", "Lifecycle", "give_memory_back", "prepare_environment"]

log = logging.getLogger("aiomooncake")

_STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
# setup_real(const string& local_hostname, const string& metadata_server, size_t segment,
#   size_t local_buffer, const string& protocol, const string& devices, const string& master,
#   const shared_ptr<TransferEngine>&, const string& ipc_socket_path, …)
_SETUP_STEM = (
    f"_ZN8mooncake10RealClient10setup_realERK{_STRING}S8_mmS8_S8_S8_"
    "RKSt10shared_ptrINS_14TransferEngineEES8_"
)
# What follows in the versions that exist: nothing (0.3.9); (bool enable_ssd_offload,
# const string& ssd_path) (0.3.10.post2, 0.3.11.post1); and (const string& tenant_id,
# bool enable_client_http_server, int client_http_port) on top (0.3.12 … 0.3.14).
_SETUP_TAILS = ("bS8_S8_bi", "bS8_", "")
_TEAR_DOWN = "_ZN8mooncake10RealClient11tearDownAllEv"
_VTABLE = "_ZTVN8mooncake10RealClientE"
_CAPSULE = b"mooncake.PyClient.shared_ptr"
# Itanium C++ ABI: an object points past the vtable's offset-to-top and type_info words.
_VTABLE_HEADER = 16

# By item: an attribute of ctypes.pythonapi is shared with the whole process.
_get_pointer = ctypes.pythonapi["PyCapsule_GetPointer"]
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_get_pointer.restype = ctypes.c_void_p

_PLACEHOLDER_MASTER = "127.0.0.1:1"
_QUEUED_PER_PEER = "32"
_ADMISSION_MS = "10000"


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


@dataclass(frozen=True)
class DirectEntry:
    """The exported C++ functions of one shared object."""

    setup_real: Callable[..., int]
    tail: str
    tear_down: Callable[..., int]
    vtable: int

    @classmethod
    def find(cls, binding: Binding) -> DirectEntry | str:
        """Look for everything the direct way needs; the reason as text when it is not there."""
        if "_get_pyclient_capsule" not in dir(binding.store_class):
            return "the binding has no _get_pyclient_capsule"
        try:
            lib = ctypes.CDLL(str(binding.shared_object))
        except OSError as exc:
            return f"its shared object can't be opened again ({exc})"
        tear_down = getattr(lib, _TEAR_DOWN, None)
        if tear_down is None:
            return "RealClient::tearDownAll is not exported"
        for tail in _SETUP_TAILS:
            setup_real = getattr(lib, _SETUP_STEM + tail, None)
            if setup_real is not None:
                break
        else:
            return "RealClient::setup_real is not exported with a known argument list"
        try:
            vtable = ctypes.addressof(ctypes.c_char.in_dll(lib, _VTABLE)) + _VTABLE_HEADER
        except ValueError:
            return "the vtable of RealClient is not exported"
        setup_real.restype = ctypes.c_int
        tear_down.restype = ctypes.c_int
        tear_down.argtypes = [ctypes.c_void_p]
        return cls(setup_real, tail, tear_down, vtable)

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
        ]
        if self.tail:
            arguments += [ctypes.c_bool(config.enable_ssd_offload), ctypes.byref(ssd)]
        if self.tail == _SETUP_TAILS[0]:
            arguments += [
                ctypes.byref(tenant),
                ctypes.c_bool(config.enable_client_http_server),
                ctypes.c_int(config.client_http_port),
            ]
        return int(self.setup_real(*arguments))


class Lifecycle:
    """How native clients of one binding are made and unmade. Blocking: for worker threads.

    Args:
        binding: The loaded binding.
        direct: Use the exported entry points where they can be verified.
    """

    def __init__(self, binding: Binding, *, direct: bool) -> None:
        self.binding = binding
        found: DirectEntry | str = (
            DirectEntry.find(binding) if direct else "it is turned off (direct=False)"
        )
        self.direct = found if isinstance(found, DirectEntry) else None
        if isinstance(found, str):
            _warn_once(binding, found)

    def setup(
        self,
        config: StoreConfig,
        local_hostname: str,
        transfer_engine: object | None,
        keep: Callable[[NativeStore], None],
    ) -> int:
        """Make a client and set it up; the engine's code (0: it is ready).

        ``keep`` is given the object before the call that may hang. It must be torn down, whatever
        the code.
        """
        native = self.binding.store_class()
        keep(native)
        if self.direct is not None and transfer_engine is None:
            # An empty hostname makes the client object and fails at once; without an object
            # there is no address to call on.
            native.setup("", config.metadata_server, 0, 0, "tcp", "", _PLACEHOLDER_MASTER)
            address = self.direct.address(native)
            if address is not None:
                return self.direct.setup(address, config, local_hostname)
            _warn_once(self.binding, "the client object is not a RealClient")
            # One object, one life: this one has begun a set-up.
            native = self.binding.store_class()
            keep(native)
        return self._setup_holding_gil(native, config, local_hostname, transfer_engine)

    def tear_down(self, native: NativeStore) -> int:
        """End the client's life; nothing may be called on it afterwards.

        After the direct way the binding's ``close()`` must not be called: an object that was
        torn down directly answers most calls, one that was closed crashes.
        """
        address = self.direct.address(native) if self.direct is not None else None
        if self.direct is not None and address is not None:
            return int(self.direct.tear_down(address))
        return int(native.close())

    def _setup_holding_gil(
        self,
        native: NativeStore,
        config: StoreConfig,
        local_hostname: str,
        transfer_engine: object | None,
    ) -> int:
        options: dict[str, Any] = {}
        if transfer_engine is not None:
            # setup() takes what is inside a mooncake.engine.TransferEngine.
            get_engine = getattr(transfer_engine, "get_engine", None)
            options["engine"] = transfer_engine if get_engine is None else get_engine()
        if config.enable_ssd_offload:
            options["enable_ssd_offload"] = True
            options["ssd_offload_path"] = config.ssd_offload_path
        if config.tenant_id != "default":
            options["tenant_id"] = config.tenant_id
        if config.enable_client_http_server:
            options["enable_client_http_server"] = True
            options["client_http_port"] = config.client_http_port
        return int(
            native.setup(
                local_hostname,
                config.metadata_server,
                config.global_segment_size,
                config.local_buffer_size,
                config.protocol,
                config.device_name,
                config.master_server_address,
                **options,
            )
        )


def prepare_environment(config: StoreConfig) -> None:
    """Set the engine's time-outs, unless the user has set them.

    No transfer may reach the engine's own limit of 60 s, or it writes into memory later. A peer
    is served by four lanes, one time-out each after the other, so both the time-out and the
    number of transfers queued for one peer are bounded: on a frozen peer a batch of 200 keys
    ended after 23 s with these values (28 s for 40 keys with the engine's queue of 1024), and a
    batch of 256 keys on a healthy one took as long as with the engine's own.

    They are read by native code, so this must run before the engine is imported; the RPC
    time-outs and the number of tries are read at each set-up.
    """
    seconds = str(max(1, round(config.transfer_timeout)))
    os.environ.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", seconds)
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", seconds)
    os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", _QUEUED_PER_PEER)
    # Longer than the engine's 1 s: a peer that is busy with large transfers is not a failure.
    os.environ.setdefault("MC_TCP_ADMISSION_TIMEOUT_MS", _ADMISSION_MS)
    # The tries are ours: each with a fresh object, bounded by connect's own timeout.
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    _set_ours("MC_RPC_TIMEOUT_MS", str(round(config.rpc_timeout * 1000)))
    _set_ours("MC_RPC_CONNECT_TIMEOUT_MS", str(round(config.rpc_connect_timeout * 1000)))


def give_memory_back() -> None:
    """Return what a client has freed to the operating system; for a worker thread.

    The 25 MB of a client lie in small pieces over the heaps of many threads, and the C library
    keeps freed pieces: 20 stores that were opened and closed left 400 MB behind. This takes
    5-20 ms without the GIL.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc's
        trim(0)


_ours: dict[str, str] = {}
_warned: set[str] = set()
_lock = threading.Lock()


def _set_ours(name: str, value: str) -> None:
    """Set a variable that differs from store to store, but never one that the user has set."""
    with _lock:
        if os.environ.get(name) == _ours.get(name) and _ours.get(name) != value:
            _ours[name] = os.environ[name] = value


def _warn_once(binding: Binding, why: str) -> None:
    with _lock:
        if why in _warned:
            return
        _warned.add(why)
    log.warning(
        "set-up and close of Mooncake %s hold the GIL, and the event loop stands still meanwhile "
        "(25-90 ms for a set-up and 1-2 s for a close on a healthy master): %s",
        binding.version or "(unknown version)",
        why,
    )
