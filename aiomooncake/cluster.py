"""A private Mooncake on loopback, for tests, demos and ``local://``: the wheel's own servers.

`LocalCluster` runs a ``mooncake_master``, and beside it as many stand-alone clients
(`StandaloneClient`, the wheel's ``mooncake_client``) as are asked for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from aiomooncake._programs import HOST, find_program, health, name_taken
from aiomooncake._server import BlockingServer, Server, check_flags, in_worker
from aiomooncake._time_limits import process_limits, setup_limits
from aiomooncake.config import StoreConfig
from aiomooncake.errors import InvalidArgumentError

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self  # for type checkers only, which bring it along

    from aiomooncake._child import ChildProcess

__all__ = ["BlockingClient", "BlockingCluster", "LocalCluster", "StandaloneClient"]

_ENDLESS = 1e9  # seconds, 30 years: the master counts them in whole milliseconds


class LocalCluster(Server):
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
        binary: The program to run, instead of the installed wheel's own. A ``mooncake_client``
            that lies beside it is the one that `start_client` runs.
        start_timeout: Seconds until the master must be ready, and each of its clients.

    Raises:
        InvalidArgumentError: A value that cannot be meant.
    """

    blocking: BlockingCluster

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

    @property
    def metrics_port(self) -> int:
        """Return the port of the master's HTTP server, as `address` does."""
        return self.blocking.ports[1]

    @property
    def metrics_url(self) -> str:
        """Return the base address of the master's HTTP server (``/health``, ``/metrics`` …)."""
        return f"http://{HOST}:{self.metrics_port}"

    async def start_client(
        self,
        *,
        global_segment_size: int | str = "512MiB",
        local_buffer_size: int | str = 0,
        extra_args: Sequence[str] = (),
    ) -> StandaloneClient:
        """Start a stand-alone client of this master, and wait until it serves.

        It ends when the cluster is stopped, or by its own `stop`. A cancelled start leaves no
        process behind.

        Args:
            global_segment_size: Memory that it lends to the cluster, in bytes or as ``"512MiB"``.
            local_buffer_size: A local buffer of its own. The "dummy" clients that it serves bring
                theirs along, so it needs none.
            extra_args: Further command-line flags of ``mooncake_client``; they win over those
                given here.

        Raises:
            ClusterError: The master does not run; or the client ended or was not ready in time,
                then the text holds its last output.
            ConfigError: A size that is none.
            EngineNotInstalledError: There is no such program, or a system library is missing.
        """
        return await in_worker(
            lambda hurry: self.blocking.start_client(
                global_segment_size=global_segment_size,
                local_buffer_size=local_buffer_size,
                extra_args=extra_args,
                hurry=hurry,
            ),
            lambda client: client.blocking.stop(),
        )

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


class StandaloneClient(Server):
    """A ``mooncake_client`` process that `LocalCluster.start_client` has started.

    It lends a segment to the cluster and serves the "dummy" clients of this machine, which
    connect with ``client_server_address=client.address``. Its verbs are those of the cluster,
    under ``client.blocking`` for callers without a loop: it is killed, frozen and brought back on
    the same port, never outlives the process that started it, and is inert in a forked child.

    Its service listens on loopback only; its transfer engine listens on all interfaces, as that of
    every client of Mooncake does (the engine has no setting for it). The engine's time-outs are
    set for it as `connect` sets them, unless the variables are set already.

    The program ends at once when it is told to, without a word to the master: after `stop` as after
    `kill` the segment stays listed until the master's ``client_ttl`` is over.
    """

    blocking: BlockingClient

    def __init__(self, blocking: BlockingClient) -> None:
        self.blocking = blocking


class BlockingCluster(BlockingServer):
    """Hold the master's process of a `LocalCluster`, and its stand-alone clients."""

    _face = "LocalCluster"
    _noun = "the master"
    _variable = "cluster"
    _port_count = 2

    def __init__(
        self,
        *,
        lease_ttl: float,
        client_ttl: float,
        extra_args: Sequence[str],
        binary: str | os.PathLike[str] | None,
        start_timeout: float,
    ) -> None:
        check_flags(extra_args)
        for name, value in (("lease_ttl", lease_ttl), ("start_timeout", start_timeout)):
            if not _is_time(value) or value <= 0:
                raise InvalidArgumentError(
                    f"{name} must be a number of seconds above 0, got {value!r}"
                )
        if not _is_time(client_ttl) or client_ttl < 1 or client_ttl != int(client_ttl):
            raise InvalidArgumentError(
                f"client_ttl must be a whole number of seconds, at least 1 (the master counts in "
                f"seconds), got {client_ttl!r}"
            )
        if binary is not None and not _is_path(binary):
            raise InvalidArgumentError(
                f"binary must be the path of a program, got {type(binary).__name__}"
            )
        super().__init__(start_timeout)
        self._flags = (
            f"--default_kv_lease_ttl={max(1, round(lease_ttl * 1000))}",
            f"--client_ttl={int(client_ttl)}",
            *extra_args,
        )
        self._binary = binary
        self._clients: list[BlockingClient] = []

    def start_client(
        self,
        *,
        global_segment_size: int | str = "512MiB",
        local_buffer_size: int | str = 0,
        extra_args: Sequence[str] = (),
        hurry: threading.Event | None = None,
    ) -> StandaloneClient:
        """Start a stand-alone client; see `LocalCluster.start_client`."""
        self._refuse_in_child("start a client")
        check_flags(extra_args)
        with self._lock:
            self._running_process("be joined by a client")
            config = StoreConfig(
                self.address,
                global_segment_size=global_segment_size,
                local_buffer_size=local_buffer_size,
            )
            client = BlockingClient(config, extra_args, self._client_binary(), self._start_timeout)
            self._clients.append(client)
        try:
            client.start(hurry)
        except BaseException:
            with self._lock:
                self._clients.remove(client)
            raise
        return StandaloneClient(client)

    def stop(self, hurry: threading.Event | None = None) -> None:
        """End the clients by force, then the master gently; see `LocalCluster.stop`."""
        if os.getpid() == self._owner:
            for client in tuple(self._clients):
                client.kill()
                client.stop()
        super().stop(hurry)

    def _client_binary(self) -> Path | None:
        if self._binary is not None:
            beside = Path(self._binary).with_name("mooncake_client")
            if beside.is_file():
                return beside
        return None

    def _program(self) -> Path:
        return find_program("mooncake_master", self._binary)

    def _arguments(self, ports: Sequence[int]) -> Sequence[str]:
        rpc_port, http_port = ports
        return (
            f"--rpc_address={HOST}",
            f"--rpc_port={rpc_port}",
            f"--metrics_host={HOST}",
            f"--metrics_port={http_port}",
            # Masters up to 0.3.12 don't know --metrics_host: gflags skips what is named here.
            "--undefok=metrics_host",
            *self._flags,
        )

    def _obstacle(self, process: ChildProcess, ports: Sequence[int]) -> str:
        # /health turns ready before the RPC port is bound, and a port that was lost to another
        # master is answered by that one: ready is who listens itself on both.
        answer = health(ports[1])
        if answer:
            return f"/health: {answer}"
        return "" if process.listens_on(ports) else "it does not listen on its ports"


class BlockingClient(BlockingServer):
    """Hold the process of a `StandaloneClient`."""

    _face = "StandaloneClient"
    _noun = "the stand-alone client"
    _variable = "client"
    _port_count = 1

    def __init__(
        self,
        config: StoreConfig,
        extra_args: Sequence[str],
        binary: Path | None,
        start_timeout: float,
    ) -> None:
        super().__init__(start_timeout)
        self._config = config
        self._flags = tuple(extra_args)
        self._binary = binary

    def _program(self) -> Path:
        return find_program("mooncake_client", self._binary)

    def _arguments(self, ports: Sequence[int]) -> Sequence[str]:
        config = self._config
        flags = [
            # Without a port: the next life must not be taken for this one, whose segment the
            # master lists until its client_ttl.
            f"--host={HOST}",
            f"--port={ports[0]}",
            f"--master_server_address={config.master_server_address}",
            f"--metadata_server={config.metadata_server}",
            f"--protocol={config.protocol}",
            f"--global_segment_size={config.global_segment_size}",
        ]
        if config.local_buffer_size:  # programs up to 0.3.11 don't know the flag: let them say so
            flags.append(f"--local_buffer_size={config.local_buffer_size}")
        return (*flags, *self._flags)

    def _environment(self) -> Mapping[str, str]:
        return {**process_limits(self._config), **setup_limits(self._config)}

    def _obstacle(self, process: ChildProcess, ports: Sequence[int]) -> str:
        # It opens its port last: by then the master has mounted its segment and its shared-memory
        # socket listens.
        return "" if process.listens_on(ports) else f"it does not listen on port {ports[0]} yet"

    def _conflicts(self, ports: Sequence[int]) -> list[str]:
        names = [f"@mooncake_client_{port}.sock" for port in ports]
        busy = [f"The abstract socket {name}" for name in names if name_taken(name)]
        return super()._conflicts(ports) + busy


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < _ENDLESS


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))
