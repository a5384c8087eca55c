"""A private ``mooncake_master`` process on loopback, for tests, demos and ``local://``.

The work is written once, as plain blocking code in `BlockingCluster`; `LocalCluster` runs it in
worker threads. Nothing here is tied to an event loop, and nothing here imports the engine.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread

from aiomooncake._child import ChildProcess
from aiomooncake._master_process import HOST, await_ready, choose_ports, find_master, taken
from aiomooncake.errors import (
    ClusterError,
    ForkedProcessError,
    InvalidArgumentError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from typing_extensions import Self  # for type checkers only, which bring it along

__all__ = ["BlockingCluster", "LocalCluster"]

logger = logging.getLogger("aiomooncake")

_PORT_TRIES = 3  # starts with fresh ports; each loses the port race only to a rare neighbour


class LocalCluster:
    """Run a private ``mooncake_master`` on free loopback ports.

    Enter it with ``with`` or ``async with``, or await `start` and `stop`; without a loop call
    ``cluster.blocking.start()`` and ``cluster.blocking.stop()``. It belongs to no event
    loop: it may be started in one and stopped in another. The ports are chosen at the first start
    and stay the same, so that clients find a restarted master again. The process never outlives
    the one that started it, not even when that is killed. In a forked child the object is inert:
    `stop` does nothing there and every other call raises `ForkedProcessError`.

    Args:
        lease_ttl: Seconds for which a read protects a key from removal
            (``--default_kv_lease_ttl``, kept in milliseconds).
        client_ttl: Whole seconds after which a silent client loses its segment (``--client_ttl``).
        extra_args: Further command-line flags of the master; they win over those given here.
        binary: The program to run, instead of the installed wheel's own.
        start_timeout: Seconds until the master must be ready.

    Raises:
        InvalidArgumentError: A value that cannot be meant.
    """

    def __init__(
        self,
        *,
        lease_ttl: float = 2.0,
        client_ttl: float = 3.0,
        extra_args: Sequence[str] = (),
        binary: str | os.PathLike[str] | None = None,
        start_timeout: float = 15.0,
    ) -> None:
        self.blocking = BlockingCluster(
            lease_ttl=lease_ttl,
            client_ttl=client_ttl,
            extra_args=extra_args,
            binary=binary,
            start_timeout=start_timeout,
        )

    def __repr__(self) -> str:
        return f"<LocalCluster {self.blocking.describe()}>"

    @property
    def address(self) -> str:
        """Return ``host:port`` for clients. Raises `ClusterError` before the first start."""
        return f"{HOST}:{self.blocking.ports[0]}"

    @property
    def metrics_port(self) -> int:
        """Return the port of the master's HTTP server, as `address` does."""
        return self.blocking.ports[1]

    @property
    def metrics_url(self) -> str:
        """Return the base address of the master's HTTP server (``/health``, ``/metrics`` …)."""
        return f"http://{HOST}:{self.metrics_port}"

    @property
    def pid(self) -> int | None:
        """Return the process id of the master, or None when none was started."""
        return self.blocking.pid

    @property
    def running(self) -> bool:
        """Tell whether the master's process lives; a paused one does."""
        return self.blocking.running

    def output(self) -> str:
        """Return what the present master has written; kept after `kill`, dropped by `stop`."""
        return self.blocking.output()

    async def start(self) -> None:
        """Start the master and wait until it serves; nothing happens when it already runs.

        A cancelled start leaves no process behind.

        Raises:
            ClusterError: It ended or was not ready in time; the text holds its last output.
            EngineNotInstalledError: There is no master to run, or a system library is missing.
        """
        await _in_worker(self.blocking.start)

    async def stop(self) -> None:
        """End the master by SIGTERM, and by SIGKILL if it lingers; nothing happens when none runs.

        Runs to its end also in a cancelled scope. A task that is cancelled meanwhile goes over to
        SIGKILL at once.
        """
        with anyio.CancelScope(shield=True):
            await _in_worker(self.blocking.stop)

    async def kill(self) -> None:
        """Kill the master as a crash would (SIGKILL); `start` brings it back on the same ports."""
        with anyio.CancelScope(shield=True):
            await _in_worker(lambda _: self.blocking.kill())

    async def pause(self) -> None:
        """Freeze the master (SIGSTOP): its ports stay open, nothing answers.

        Raises:
            ClusterError: The master does not run.
        """
        await _in_worker(lambda _: self.blocking.pause())

    async def resume(self) -> None:
        """Let a paused master go on (SIGCONT).

        Raises:
            ClusterError: The master does not run.
        """
        await _in_worker(lambda _: self.blocking.resume())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        self.blocking.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.blocking.stop()


class BlockingCluster:
    """Hold the process of a `LocalCluster` and offer its verbs as plain calls, from any thread.

    ``hurry`` is how a waiting caller gets out of the longer calls: once it is set, `start` gives
    up and `stop` kills.
    """

    def __init__(
        self,
        *,
        lease_ttl: float,
        client_ttl: float,
        extra_args: Sequence[str],
        binary: str | os.PathLike[str] | None,
        start_timeout: float,
    ) -> None:
        if isinstance(extra_args, str):
            raise InvalidArgumentError(
                f"extra_args must be a sequence of flags, got the text {extra_args!r}: "
                f"give [{extra_args!r}]"
            )
        for name, value in (("lease_ttl", lease_ttl), ("start_timeout", start_timeout)):
            if not (0 < value < math.inf):
                raise InvalidArgumentError(
                    f"{name} must be a number of seconds above 0, got {value!r}"
                )
        if not (1 <= client_ttl < math.inf and client_ttl == int(client_ttl)):
            raise InvalidArgumentError(
                f"client_ttl must be a whole number of seconds, at least 1 (the master counts in "
                f"seconds), got {client_ttl!r}"
            )
        self._flags = (
            f"--default_kv_lease_ttl={max(1, round(lease_ttl * 1000))}",
            f"--client_ttl={int(client_ttl)}",
            *extra_args,
        )
        self._binary = binary
        self._start_timeout = start_timeout
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._ports: tuple[int, int] | None = None
        self._master: ChildProcess | None = None

    def __repr__(self) -> str:
        return f"<BlockingCluster {self.describe()}>"

    def describe(self) -> str:
        """Return address and state, for ``repr``."""
        if self._ports is None:
            return "not started"
        state = f"pid {self.pid}" if self.running else "not running"
        return f"{HOST}:{self._ports[0]} {state}"

    @property
    def ports(self) -> tuple[int, int]:
        """Return the RPC port and the HTTP port. Raises `ClusterError` before the first start."""
        if self._ports is None:
            raise ClusterError(
                "the cluster has no address yet: await cluster.start() first, or call "
                "cluster.blocking.start() without a loop"
            )
        return self._ports

    @property
    def pid(self) -> int | None:
        """Return the process id of the master, or None when none was started."""
        master = self._master
        return master.pid if master is not None else None

    @property
    def running(self) -> bool:
        """Tell whether the master's process lives; a paused one does."""
        master = self._master
        if master is None:
            return False
        if os.getpid() == self._owner:
            return master.running
        # A forked child can't wait for its parent's child: ask whether the process is there.
        try:
            os.kill(master.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def output(self) -> str:
        """Return what the present master has written; kept after `kill`, dropped by `stop`."""
        master = self._master
        return master.text() if master is not None else ""

    def start(self, hurry: threading.Event | None = None) -> None:
        """Start the master and wait until it serves; see `LocalCluster.start`."""
        self._refuse_in_child("started")
        with self._lock:
            if self.running:
                return
            if self._ports is not None:
                self._launch(self._ports, hurry)
                return
            for tries_left in reversed(range(_PORT_TRIES)):
                ports = choose_ports()
                try:
                    self._launch(ports, hurry)
                except ClusterError:
                    if not tries_left or not taken(ports):
                        raise
                else:
                    self._ports = ports
                    return

    def stop(self, hurry: threading.Event | None = None) -> None:
        """End the master gently, then by force; see `LocalCluster.stop`."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            master, self._master = self._master, None
            if master is not None:
                master.terminate(hurry)
                master.dispose()

    def kill(self) -> None:
        """Kill the master as a crash would; see `LocalCluster.kill`."""
        self._refuse_in_child("killed")
        with self._lock:
            if self._master is not None:
                self._master.kill()

    def pause(self) -> None:
        """Freeze the master; returns when it stands still. See `LocalCluster.pause`."""
        self._refuse_in_child("paused")
        with self._lock:
            self._running_master("paused").pause()

    def resume(self) -> None:
        """Let a paused master go on; see `LocalCluster.resume`."""
        self._refuse_in_child("resumed")
        with self._lock:
            self._running_master("resumed").resume()

    def _refuse_in_child(self, action: str) -> None:
        if os.getpid() != self._owner:
            raise ForkedProcessError(
                f"this LocalCluster belongs to process {self._owner} and can't be {action} in its "
                f"forked child {os.getpid()}: make a new one here"
            )

    def _running_master(self, action: str) -> ChildProcess:
        if self._master is None or not self.running:
            raise ClusterError(
                f"the master does not run and can't be {action}: start the cluster first"
            )
        return self._master

    def _launch(self, ports: tuple[int, int], hurry: threading.Event | None) -> None:
        rpc_port, http_port = ports
        command = (
            str(find_master(self._binary)),
            f"--rpc_address={HOST}",
            f"--rpc_port={rpc_port}",
            f"--metrics_host={HOST}",
            f"--metrics_port={http_port}",
            # Masters up to 0.3.12 don't know --metrics_host: gflags skips what is named here.
            "--undefok=metrics_host",
            *self._flags,
        )
        if self._master is not None:
            self._master.dispose()
        began = time.monotonic()
        master = self._master = ChildProcess(command, self)
        try:
            await_ready(master, ports, self._start_timeout, hurry)
        except BaseException:
            self._master = None
            master.kill()
            master.dispose()
            raise
        logger.debug(
            "private master %s:%d (pid %d) is ready after %.3f s",
            HOST,
            rpc_port,
            master.pid,
            time.monotonic() - began,
        )


async def _in_worker(work: Callable[[threading.Event], None]) -> None:
    """Run ``work(hurry)`` in a worker thread; a cancellation sets ``hurry`` and waits for its end.

    That holds for anyio's cancellation and for asyncio's own, also when it comes repeatedly.
    """
    hurry, begun, ended = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        try:
            if not hurry.is_set():
                work(hurry)
        finally:
            ended.set()

    try:
        await to_thread.run_sync(run, abandon_on_cancel=True)
    except anyio.get_cancelled_exc_class():
        # Either run() sees hurry and does nothing, or begun is seen here: never neither.
        hurry.set()
        while begun.is_set() and not ended.is_set():
            with (
                contextlib.suppress(anyio.get_cancelled_exc_class()),
                anyio.CancelScope(shield=True),
            ):
                await anyio.sleep(0.002)
        raise
