"""How native clients are made and unmade, with the GIL released where the wheel allows it.

``setup()``, ``setup_dummy()`` and ``close()`` of the binding never release the GIL: run in a
worker thread they still stop every Python thread, for up to 90 s against a dead master. So the C++
functions behind them are called (:mod:`aiomooncake.engine.entry_points`); where that is not
possible, the binding's own methods are used, warned about once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aiomooncake._time_limits import process_limits, setup_limits
from aiomooncake.engine import blocks
from aiomooncake.engine.binding import find_setup_parameters
from aiomooncake.engine.entry_points import DummyEntry, RealEntry
from aiomooncake.engine.knock import answers
from aiomooncake.engine.options import check_options, check_wheel

if TYPE_CHECKING:
    from aiomooncake.config import StoreConfig
    from aiomooncake.engine.binding import Binding, NativeStore
    from aiomooncake.engine.entry_points import Entry
    from aiomooncake.engine.shared import SharedMemory

__all__ = [
    "DummyLifecycle",
    "Lifecycle",
    "RealLifecycle",
    "give_memory_back",
    "prepare_environment",
]

log = logging.getLogger("aiomooncake")

_PLACEHOLDER_MASTER = "127.0.0.1:1"
_UNREACHABLE = 2  # of health_check()
_PAUSE = 0.25
_PROBE_TIMEOUT = 1.0
_FIRST_PING = 0.002

# Takes one connection on its standard input, which is a listening socket, and ends; that resets
# the connection. Nobody may ever come.
_HANG_UP = """
import socket
listener = socket.socket(fileno=0)
listener.settimeout(10)
print(flush=True)
listener.accept()
"""

E = TypeVar("E", RealEntry, DummyEntry)

Keep = Callable[["NativeStore"], None]


class Lifecycle(Protocol):
    """How one kind of native client is made and unmade. Blocking: for worker threads."""

    def setup(self, keep: Keep) -> int:
        """Make a client and set it up; the engine's code (0: it is ready).

        ``keep`` is given the object before the call that may hang. It must be torn down, whatever
        the code.
        """

    def tear_down(self, native: NativeStore) -> int:
        """End the client's life; nothing may be called on it afterwards."""


class RealLifecycle:
    """The life of a client that brings its own memory and talks to the master.

    Attributes:
        entry: The way without the GIL; None when there is none.

    Args:
        binding: The loaded binding.
        config: What to connect to; its ``direct`` chooses the exported entry points.
        local_hostname: The address by which peers reach this client.
        transfer_engine: A transfer engine to share; its set-up holds the GIL.
    """

    def __init__(
        self,
        binding: Binding,
        config: StoreConfig,
        local_hostname: str,
        transfer_engine: object | None,
    ) -> None:
        check_wheel(binding, dummy=False)
        _warn_of_early_reads(binding)
        if "_get_pyclient_capsule" not in dir(binding.store_class):
            # 0.3.10.post2 takes memory of any process on this host for its own, and crashes.
            os.environ.setdefault("MC_STORE_MEMCPY", "0")
        self._binding = binding
        self.entry = _entry(RealEntry, binding, config)
        self._config = config
        self._local_hostname = local_hostname
        self._transfer_engine = transfer_engine

    def setup(self, keep: Keep) -> int:
        """Make a client and set it up; see :class:`Lifecycle`."""
        config = self._config
        tail = self.entry.tail if self.entry is not None else None
        check_options(self._binding, tail, config, self._transfer_engine)
        native = self._binding.store_class()
        keep(native)
        if self.entry is not None and self._transfer_engine is None:
            # An empty hostname makes the client object and fails at once; without an object
            # there is no address to call on.
            native.setup("", config.metadata_server, 0, 0, "tcp", "", _PLACEHOLDER_MASTER)
            address = self.entry.address(native)
            if address is not None:
                return self.entry.setup(address, config, self._local_hostname)
            _warn_of_the_gil(self._binding, "the client object is not a RealClient")
            # One object, one life: this one has begun a set-up.
            native = self._binding.store_class()
            keep(native)
        return self._setup_holding_gil(native)

    def tear_down(self, native: NativeStore) -> int:
        """End the client's life; see :class:`Lifecycle`."""
        code = _tear_down(self.entry, native)
        if self.entry is not None and self._config.enable_ssd_offload:
            self.entry.destroy(native)
        return code

    def _setup_holding_gil(self, native: NativeStore) -> int:
        config = self._config
        options: dict[str, Any] = {}
        if self._transfer_engine is not None:
            # setup() takes what is inside a mooncake.engine.TransferEngine.
            get_engine = getattr(self._transfer_engine, "get_engine", None)
            options["engine"] = self._transfer_engine if get_engine is None else get_engine()
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
                self._local_hostname,
                config.metadata_server,
                config.global_segment_size,
                config.local_buffer_size,
                config.protocol,
                config.device_name,
                config.master_server_address,
                **options,
            )
        )


class DummyLifecycle:
    """The life of a client that works through a stand-alone client process on this host.

    Args:
        binding: The loaded binding.
        config: Its ``client_server_address`` is the process, its ``mem_pool_size`` the memory that
            the engine shares of itself, as its local buffer.
        server: Host and port of that address.
        shared: The memory that the store shares.
    """

    def __init__(
        self,
        binding: Binding,
        config: StoreConfig,
        server: tuple[str, int],
        shared: SharedMemory,
    ) -> None:
        check_wheel(binding, dummy=True)
        self._binding = binding
        self.entry = _entry(DummyEntry, binding, config)
        self._config = config
        self._address = config.client_server_address or ""
        self._server = server
        self._shared = shared

    def setup(self, keep: Keep) -> int:
        """Make a client and set it up; see :class:`Lifecycle`."""
        native, code = self._setup(keep)
        # The ping thread has begun, and before its first answer the client is "unreachable".
        deadline = time.monotonic() + _PROBE_TIMEOUT
        while code == 0 and native.health_check() and time.monotonic() < deadline:
            time.sleep(_FIRST_PING)
        blocks.attach(native, self._server)
        return code

    def _setup(self, keep: Keep) -> tuple[NativeStore, int]:
        native = self._binding.store_class()
        keep(native)
        config = self._config
        if self.entry is not None and _make_dummy(native):
            address = self.entry.address(native)
            if address is not None:
                return native, self.entry.setup(address, config, self._address, self._server[1])
            _warn_of_the_gil(self._binding, "the client object is not a DummyClient")
            native = self._binding.store_class()
            keep(native)
        nbytes = config.mem_pool_size
        return native, int(native.setup_dummy(nbytes, nbytes, self._address))

    def tear_down(self, native: NativeStore) -> int:
        """End the client's life; see :class:`Lifecycle`.

        An engine with memory of its own frees that first and ends its ping thread then. That
        thread is in the middle of the memory while the stand-alone client is frozen, or has just
        come back, and the process would crash: so the tear-down waits for the end of that, however
        long it takes.
        """
        if self._config.mem_pool_size:
            while (there := answers(self._server)) is not None:
                if there and native.health_check() != _UNREACHABLE:
                    break
                time.sleep(_PAUSE)
        with self._shared.detached(native):
            return _tear_down(self.entry, native)


def _entry(kind: type[E], binding: Binding, config: StoreConfig) -> E | None:
    """Find the way without the GIL; where there is none, warn of it."""
    found = kind.find(binding) if config.direct else "it is turned off (direct=False)"
    if isinstance(found, str):
        _warn_of_the_gil(binding, found)
        return None
    return found


def _make_dummy(native: NativeStore) -> bool:
    """Let the binding make its ``DummyClient``; False when no process could be started for it.

    Without an object there is no address to call on, and ``setup_dummy`` makes one only together
    with a connection, under the GIL: 4.3 s where nobody listens, and for ever against a process
    that is frozen. So it is given a server that hangs up at once (3-5 ms). That can't be a thread
    of this process, which would need the GIL.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        command = [sys.executable, "-I", "-S", "-c", _HANG_UP]
        try:
            server = subprocess.Popen(command, stdin=listener.fileno(), stdout=subprocess.PIPE)
        except OSError as exc:
            log.warning("can't start %s to make a dummy client: %s", sys.executable, exc)
            return False
        port = listener.getsockname()[1]
    with server:
        ready = server.stdout is not None and server.stdout.readline()
        if ready:
            native.setup_dummy(0, 0, f"127.0.0.1:{port}")
        else:
            log.warning("%s ended before it could help to make a dummy client", sys.executable)
    return bool(ready)


def _tear_down(entry: Entry | None, native: NativeStore) -> int:
    # After the direct way the binding's ``close()`` must not be called: an object that was torn
    # down directly answers most calls, one that was closed crashes.
    address = entry.address(native) if entry is not None else None
    if entry is not None and address is not None:
        return int(entry.tear_down(address))
    return int(native.close())


def prepare_environment(config: StoreConfig) -> None:
    """Set the engine's time-outs, unless the user has set them; before the engine is imported."""
    for name, value in process_limits(config).items():
        os.environ.setdefault(name, value)
    for name, value in setup_limits(config).items():
        _set_ours(name, value)


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
_warned: set[tuple[str, ...]] = set()
_lock = threading.Lock()


def _set_ours(name: str, value: str) -> None:
    """Set a variable that differs from store to store, but never one that the user has set."""
    with _lock:
        if os.environ.get(name) == _ours.get(name) and _ours.get(name) != value:
            _ours[name] = os.environ[name] = value


def _warn_of_the_gil(binding: Binding, why: str) -> None:
    _warn_once(
        "set-up and close of Mooncake %s hold the GIL, and the event loop stands still meanwhile "
        "(25-90 ms for a set-up and 1-2 s for a close on a healthy master): %s",
        binding.version or "(unknown version)",
        why,
    )


def _warn_of_early_reads(binding: Binding) -> None:
    parameters = find_setup_parameters(binding.store_class)
    if parameters and "tenant_id" not in parameters:  # which came with the wheel that mended it
        _warn_once(
            "Mooncake %s says that a value is stored in another process a moment before all of it "
            "is there: one that is read at once may end in zeros; install 0.3.12.post1 or newer",
            binding.version or "(unknown version)",
        )


def _warn_once(text: str, *args: str) -> None:
    with _lock:
        if (text, *args) in _warned:
            return
        _warned.add((text, *args))
    log.warning(text, *args)
