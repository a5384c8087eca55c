"""One server process of the engine wheel, on loopback ports that it keeps over its lives.

The work is written once, as plain blocking code in `BlockingServer`; `Server` runs it in worker
threads. Nothing here is tied to an event loop, and nothing here imports the engine.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeVar

import anyio
from anyio import to_thread

from aiomooncake._child import ChildProcess
from aiomooncake._programs import HOST, await_ready, choose_ports, taken
from aiomooncake.errors import ClusterError, ForkedProcessError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["BlockingServer", "Server", "check_flags", "in_worker"]

logger = logging.getLogger("aiomooncake")

_PORT_TRIES = 3  # starts with fresh ports; each loses the port race only to a rare neighbour

_T = TypeVar("_T")


class BlockingServer(ABC):
    """Hold a server's process and offer its verbs as plain calls, from any thread.

    ``hurry`` is how a waiting caller gets out of the longer calls: once it is set, `start` gives
    up and `stop` kills.

    Args:
        start_timeout: Seconds until the server must be ready.
    """

    _face: ClassVar[str]
    """The public class."""
    _noun: ClassVar[str]
    """What the server is called in error texts."""
    _variable: ClassVar[str]
    """What the object is called in error texts that show how to start it."""
    _port_count: ClassVar[int]

    def __init__(self, start_timeout: float) -> None:
        self._start_timeout = start_timeout
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._ports: tuple[int, ...] | None = None
        self._process: ChildProcess | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"

    def describe(self) -> str:
        """Return address and state, for ``repr``."""
        if self._ports is None:
            return "not started"
        state = f"pid {self.pid}" if self.running else "not running"
        return f"{HOST}:{self._ports[0]} {state}"

    @property
    def ports(self) -> tuple[int, ...]:
        """Return the ports, the one of `address` first; `ClusterError` before the first start."""
        if self._ports is None:
            raise ClusterError(
                f"{self._noun} has no address yet: await {self._variable}.start() first, or call "
                f"{self._variable}.blocking.start() without a loop"
            )
        return self._ports

    @property
    def address(self) -> str:
        """Return ``host:port`` for clients. Raises `ClusterError` before the first start."""
        return f"{HOST}:{self.ports[0]}"

    @property
    def pid(self) -> int | None:
        """Return the process id of the server, or None when none was started."""
        process = self._process
        return process.pid if process is not None else None

    @property
    def running(self) -> bool:
        """Tell whether the server's process lives; a paused one does."""
        process = self._process
        if process is None:
            return False
        if os.getpid() == self._owner:
            return process.running
        # A forked child can't wait for its parent's child: ask whether the process is there.
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def output(self) -> str:
        """Return what the present process has written; kept after `kill`, dropped by `stop`."""
        process = self._process
        return process.text() if process is not None else ""

    def start(self, hurry: threading.Event | None = None) -> bool:
        """Start the server and wait until it serves; see `Server.start`.

        Returns:
            Whether it was this call that started it.
        """
        self._refuse_in_child("be started")
        with self._lock:
            if self.running:
                return False
            if self._ports is not None:
                self._launch(self._ports, hurry)
                return True
            for tries_left in reversed(range(_PORT_TRIES)):
                ports = choose_ports(self._port_count)
                try:
                    self._launch(ports, hurry)
                except ClusterError as error:
                    # Who held a port may have let it go meanwhile.
                    lost = os.strerror(errno.EADDRINUSE) in str(error) or self._conflicts(ports)
                    if not tries_left or not lost:
                        raise
                else:
                    self._ports = ports
                    return True
        return False  # not reached: the last try raises

    def stop(self, hurry: threading.Event | None = None) -> None:
        """End the server gently, then by force; see `Server.stop`."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.terminate(hurry)
                process.dispose()

    def kill(self) -> None:
        """Kill the server as a crash would; see `Server.kill`."""
        self._refuse_in_child("be killed")
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def pause(self) -> None:
        """Freeze the server; returns when it stands still. See `Server.pause`."""
        self._refuse_in_child("be paused")
        with self._lock:
            self._running_process("be paused").pause()

    def resume(self) -> None:
        """Let a paused server go on; see `Server.resume`."""
        self._refuse_in_child("be resumed")
        with self._lock:
            self._running_process("be resumed").resume()

    @abstractmethod
    def _program(self) -> Path:
        """Find the program to run."""

    @abstractmethod
    def _arguments(self, ports: Sequence[int]) -> Sequence[str]:
        """Return its command-line flags."""

    @abstractmethod
    def _obstacle(self, process: ChildProcess, ports: Sequence[int]) -> str:
        """Say what stands against the readiness of ``process``; empty when nothing does."""

    def _environment(self) -> Mapping[str, str]:
        """Return variables for the process; those of this process win."""
        return {}

    def _conflicts(self, ports: Sequence[int]) -> list[str]:
        """Name the addresses on ``ports`` that others hold."""
        return [f"Port {port} of {HOST}" for port in taken(ports)]

    def _refuse_in_child(self, action: str) -> None:
        if os.getpid() != self._owner:
            raise ForkedProcessError(
                f"this {self._face} belongs to process {self._owner} and can't {action} in its "
                f"forked child {os.getpid()}: make a new one here"
            )

    def _running_process(self, action: str) -> ChildProcess:
        if self._process is None or not self.running:
            raise ClusterError(
                f"{self._noun} does not run and can't {action}: await {self._variable}.start() "
                "first"
            )
        return self._process

    def _launch(self, ports: tuple[int, ...], hurry: threading.Event | None) -> None:
        command = (str(self._program()), *self._arguments(ports))
        if self._process is not None:
            self._process.dispose()
        began = time.monotonic()
        process = self._process = ChildProcess(command, self, self._environment())
        try:
            await_ready(
                process,
                lambda: self._obstacle(process, ports),
                lambda: self._conflicts(ports),
                self._start_timeout,
                hurry,
            )
        except BaseException:
            self._process = None
            process.kill()
            process.dispose()
            raise
        logger.debug(
            "%s %s:%d (pid %d) is ready after %.3f s",
            process.name,
            HOST,
            ports[0],
            process.pid,
            time.monotonic() - began,
        )


class Server:
    """The awaitable face of a `BlockingServer`, which is its ``blocking``."""

    blocking: BlockingServer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.blocking.describe()}>"

    @property
    def address(self) -> str:
        """Return ``host:port`` for clients. Raises `ClusterError` before the first start."""
        return self.blocking.address

    @property
    def pid(self) -> int | None:
        """Return the id of the process, or None when none was started."""
        return self.blocking.pid

    @property
    def running(self) -> bool:
        """Tell whether the process lives; a paused one does."""
        return self.blocking.running

    def output(self) -> str:
        """Return what the present process has written; kept after `kill`, dropped by `stop`."""
        return self.blocking.output()

    async def start(self) -> None:
        """Start the process and wait until it serves; nothing happens when it already runs.

        A cancelled start leaves no process behind.

        Raises:
            ClusterError: It ended or was not ready in time; the text holds its last output.
            EngineNotInstalledError: There is no such program, or a system library is missing.
        """
        await in_worker(self.blocking.start, self._take_back)

    def _take_back(self, started: object) -> None:
        if started:
            self.blocking.stop()

    async def stop(self) -> None:
        """End the process by SIGTERM, and by SIGKILL if it lingers; nothing happens without one.

        Runs to its end also in a cancelled scope. A task that is cancelled meanwhile goes over to
        SIGKILL at once.
        """
        with anyio.CancelScope(shield=True):
            await in_worker(self.blocking.stop)

    async def kill(self) -> None:
        """Kill the process as a crash would (SIGKILL); `start` brings it back on the same ports."""
        with anyio.CancelScope(shield=True):
            await in_worker(lambda _: self.blocking.kill())

    async def pause(self) -> None:
        """Freeze the process (SIGSTOP): its ports stay open, nothing answers.

        Raises:
            ClusterError: It does not run.
        """
        await in_worker(lambda _: self.blocking.pause())

    async def resume(self) -> None:
        """Let a paused process go on (SIGCONT).

        Raises:
            ClusterError: It does not run.
        """
        await in_worker(lambda _: self.blocking.resume())


def check_flags(flags: Sequence[str]) -> None:
    """Refuse a text where a sequence of command-line flags is meant."""
    if isinstance(flags, str):
        raise InvalidArgumentError(
            f"extra_args must be a sequence of flags, got the text {flags!r}: give [{flags!r}]"
        )
    if not all(map(_is_flag, flags)):
        raise InvalidArgumentError(
            'extra_args must be a sequence of texts such as ["--eviction_ratio=0"]'
        )


def _is_flag(flag: object) -> bool:
    """Tell whether the system takes it for an argument of a program."""
    if not isinstance(flag, str) or "\0" in flag:
        return False
    try:
        os.fsencode(flag)
    except UnicodeEncodeError:
        return False
    return True


async def in_worker(
    work: Callable[[threading.Event], _T], undo: Callable[[_T], object] | None = None
) -> _T:
    """Run ``work(hurry)`` in a worker thread; a cancellation sets ``hurry`` and waits for its end.

    That holds for anyio's cancellation and for asyncio's own, also when it comes repeatedly. Where
    it comes too late, so that nobody gets what the work has made, ``undo`` is given that.
    """
    hurry, begun, ended = threading.Event(), threading.Event(), threading.Event()
    made: list[_T] = []

    def run() -> _T:
        begun.set()
        try:
            if hurry.is_set():
                raise ClusterError("it was cancelled before it began")  # nobody listens any more
            made.append(work(hurry))
            return made[0]
        finally:
            ended.set()

    try:
        return await to_thread.run_sync(run, abandon_on_cancel=True)
    except anyio.get_cancelled_exc_class():
        # Either run() sees hurry and does nothing, or begun is seen here: never neither.
        hurry.set()
        while begun.is_set() and not ended.is_set():
            with (
                contextlib.suppress(anyio.get_cancelled_exc_class()),
                anyio.CancelScope(shield=True),
            ):
                await anyio.sleep(0.002)
        if made and undo is not None:
            with (
                contextlib.suppress(anyio.get_cancelled_exc_class()),
                anyio.CancelScope(shield=True),
            ):
                await in_worker(lambda _: undo(made[0]))
        raise
