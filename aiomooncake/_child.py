"""A child process that never outlives this one, with its output.

The ground under `_server`: it knows processes and signals, not Mooncake.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

__all__ = ["ChildProcess", "ticks"]

logger = logging.getLogger("aiomooncake")

_STOP_GRACE = 5.0  # seconds from SIGTERM to SIGKILL; a healthy master takes 0.1-1.0
_LISTEN = "0A"  # TCP_LISTEN, as /proc/<pid>/net/tcp writes it

# Becomes the program by exec, so that pid and signals are the program's own. PR_SET_PDEATHSIG (1)
# outlives exec; a parent that ended before it was set is noticed by getppid. Signals that are
# ignored, as Python does with two, would stay so.
_LAUNCHER = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if ctypes.CDLL(None).prctl(1, 9, 0, 0, 0) != 0:
    sys.exit("cannot tie the process to its parent: prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != int(parent):
    sys.exit("the parent ended")
for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(ignored, signal.SIG_DFL)
try:
    os.execv(command[0], command)
except OSError as error:
    sys.exit(f"cannot execute {command[0]}: {error.strerror}")
"""


class ChildProcess:
    """A running program and what it writes.

    The program is killed when this process ends, also by SIGKILL, and when ``keeper`` is dropped.

    Args:
        command: The program's absolute path and its arguments.
        keeper: Whose life bounds the program's.
        environment: Variables for it, beside those of this process, which win.
    """

    def __init__(
        self, command: Sequence[str], keeper: object, environment: Mapping[str, str]
    ) -> None:
        self.name = Path(command[0]).name
        # Has no name in the file system: private, and gone with the last process that holds it.
        self._output = cast("BinaryIO", tempfile.TemporaryFile(prefix="aiomooncake-"))  # noqa: SIM115 - dispose() closes it
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
        try:
            self._process = _spawner(os.getpid()).start(
                launcher, self._output, {**environment, **os.environ}
            )
        except BaseException:
            self._output.close()
            raise
        self._finalizer = weakref.finalize(
            keeper, _bury, self._process, self._output, self.name, os.getpid()
        )

    def __repr__(self) -> str:
        state = "running" if self.running else self.exit_text
        return f"<ChildProcess {self.name} pid {self.pid} {state}>"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives; a paused one does."""
        return self._process.poll() is None

    @property
    def exit_text(self) -> str:
        """How the process ended: its exit code or the name of the signal."""
        code = self._process.returncode
        if code is None or code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
        return f"signal {-code}"

    def text(self) -> str:
        """Return the output so far; nothing after `dispose`."""
        if self._output.closed:
            return ""
        # pread: the file's position is shared with the process, which writes there.
        descriptor = self._output.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def listens_on(self, ports: Collection[int]) -> bool:
        """Tell whether the process itself holds listening TCP sockets on all of ``ports``."""
        owned = set()
        with contextlib.suppress(OSError):  # the process ends meanwhile
            for entry in Path(f"/proc/{self.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    owned.add(str(entry.readlink()))
        listening = set()
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(OSError), Path(f"/proc/{self.pid}/net/{table}").open() as rows:
                for row in rows:
                    _, local, _, state, *_, inode = row.split()[:10]
                    if state == _LISTEN and f"socket:[{inode}]" in owned:
                        listening.add(int(local.rpartition(":")[2], 16))
        return listening.issuperset(ports)

    def pause(self) -> None:
        """Freeze the process; returns when it stands still (or has ended meanwhile)."""
        self._process.send_signal(signal.SIGSTOP)
        # The signal is only queued so far. WNOWAIT leaves the exit status to Popen.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._process.send_signal(signal.SIGCONT)

    def terminate(self, hurry: threading.Event | None) -> None:
        """Ask the process to end; kill it after 5 s, or as soon as ``hurry`` is set."""
        self._process.terminate()
        self.resume()  # a paused process would not see the SIGTERM
        for _ in ticks(_STOP_GRACE, hurry):
            if not self.running:
                return
        if hurry is None or not hurry.is_set():
            logger.warning(
                "%s (pid %d) did not end within %g s of SIGTERM and is killed",
                self.name,
                self.pid,
                _STOP_GRACE,
            )
        self.kill()

    def kill(self) -> None:
        """Kill and reap the process, a paused one too."""
        self._process.kill()
        self._process.wait()

    def dispose(self) -> None:
        """Let go of the ended process and of its output."""
        self._finalizer()


def ticks(timeout: float, hurry: threading.Event | None) -> Iterator[None]:
    """Yield at once and at growing distances (2 to 50 ms) until time is up or ``hurry`` is set."""
    pause = (hurry or threading.Event()).wait
    deadline = time.monotonic() + timeout
    delay = 0.002
    while True:
        yield
        left = deadline - time.monotonic()
        if left <= 0 or pause(min(delay, left)):
            return
        delay = min(delay * 1.5, 0.05)


def _bury(process: subprocess.Popen[bytes], output: BinaryIO, name: str, owner: int) -> None:
    """Leave neither process, zombie nor file; warn when the process still ran."""
    if os.getpid() != owner:
        process.returncode = 0  # we are a forked child: Popen must neither wait for it nor warn
        output.close()
        return
    dropped = process.poll() is None
    if dropped:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    output.close()
    if dropped:
        warnings.warn(
            f"{name} (pid {process.pid}) still ran when its owner was dropped, and was killed: "
            "stop the owner, or enter it in a with statement",
            ResourceWarning,
            stacklevel=2,
        )


class _Spawner:
    """Start child processes from one thread that lives as long as this process.

    PR_SET_PDEATHSIG fires when the *thread* that started a child ends, and a start may well run
    in a worker thread that does.
    """

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[
            tuple[Sequence[str], BinaryIO, Mapping[str, str], Future[subprocess.Popen[bytes]]]
        ] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="aiomooncake-spawner", daemon=True).start()

    def start(
        self, command: Sequence[str], output: BinaryIO, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start ``command``, which writes to ``output``, in the lasting thread."""
        started: Future[subprocess.Popen[bytes]] = Future()
        self._orders.put((command, output, environment, started))
        return started.result()

    def _serve(self) -> None:
        while True:
            command, output, environment, started = self._orders.get()
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    # Ctrl-C is meant for this process, whose clients need the child to the end.
                    start_new_session=True,
                )
            except Exception as error:  # noqa: BLE001 - handed to the caller
                started.set_exception(error)
            else:
                started.set_result(process)
                del process
            del command, output, environment, started  # this thread must not keep the objects alive


@functools.cache
def _spawner(_pid: int) -> _Spawner:
    """Return the spawner of this process; per pid, because threads don't survive a fork."""
    return _Spawner()
