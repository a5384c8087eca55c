"""Programs that run beside the tests: scenes that may crash, and peers that may be frozen.

A scene is a function of a module of this folder. It runs in an interpreter of its own, so that a
crash of the engine shows as a signal instead of taking the tests along.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

__all__ = ["Ended", "Peer", "run_scene"]

_ROOT = Path(__file__).resolve().parents[2]
# What the wheel's own modules do is not ours to judge.
_WARNINGS = ["-W", "error", "-W", "ignore::DeprecationWarning"]


@dataclass(frozen=True)
class Ended:
    """How a scene ended.

    Attributes:
        code: Its exit code, or the negative number of the signal that ended it.
        seconds: How long it ran.
        out: What it wrote to its standard output.
        err: What it wrote to its standard error.
    """

    code: int
    seconds: float
    out: str
    err: str

    def check(self, *, within: float, code: int = 0) -> Ended:
        """Fail unless it ended by itself, with this exit code, and in time."""
        how = f"signal {signal.Signals(-self.code).name}" if self.code < 0 else f"code {self.code}"
        story = f"after {self.seconds:.1f} s\n{self.out}\n{self.err[-6000:]}"
        assert self.code == code, f"the scene ended with {how} {story}"
        assert self.seconds < within, f"the scene took too long: {story}"
        return self


def run_scene(
    scene: Callable[..., object], *args: object, timeout: float = 40.0, **environ: str
) -> Ended:
    """Run ``scene(*args)``, as text, in a fresh interpreter; kill it after ``timeout`` seconds.

    The output goes through files: a pipe is held open by children of the scene.
    """
    call = (
        # A shell that runs the tests in the background ignores it for all that they start.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"import sys; from {scene.__module__} import {scene.__name__}; "
        f"{scene.__name__}(*sys.argv[1:])"
    )
    command = [sys.executable, *_WARNINGS, "-X", "faulthandler", "-c", call]
    began = time.monotonic()
    with _Output() as out, _Output() as err:
        with subprocess.Popen(
            [*command, *map(str, args)],
            stdin=subprocess.DEVNULL,
            stdout=out.descriptor,
            stderr=err.descriptor,
            start_new_session=True,
            env=_environ(environ),
        ) as process:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                # Its faulthandler tells where it hangs, and those of its forked children too.
                os.killpg(process.pid, signal.SIGABRT)
                process.wait()
                raise AssertionError(
                    f"{scene.__name__} still ran after {timeout:g} s\n{out.text()}\n{err.text()}"
                ) from None
            finally:
                _kill_group(process)
        seconds = time.monotonic() - began
        return Ended(process.returncode, seconds, out.text(), err.text())


def _environ(more: dict[str, str]) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "MOONCAKE_"))}
    return {**environ, "PYTHONPATH": str(_ROOT), "MC_LOG_LEVEL": "ERROR", **more}


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing behind: neither the scene nor children it forked."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _Output:
    def __enter__(self) -> _Output:
        self.descriptor = os.memfd_create("scene")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def text(self) -> str:
        size = os.fstat(self.descriptor).st_size
        return os.pread(self.descriptor, size, 0).decode(errors="replace")


class Peer:
    """Another process with a client of its own, over the raw binding, that holds values.

    Use it with ``with``. It can be frozen, thawed and killed.

    Args:
        master: The master's address.
        keys: How many keys it stores: ``peer0`` … with 4096 bytes each, see :meth:`value`.
        segment: Bytes of memory that it shares.
    """

    def __init__(self, master: str, *, keys: int = 1, segment: int = 64 << 20) -> None:
        command = [sys.executable, "-c", _PEER, master, str(segment), str(keys)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environ({}),
            text=True,
        )
        assert self._process.stdout is not None
        self.hostname = self._process.stdout.readline().strip()
        assert self.hostname, "the peer did not start"
        self.pid = self._process.pid

    @staticmethod
    def value(number: int) -> bytes:
        """Tell what the peer stored under ``peer<number>``."""
        return b"%08d" % number * 512

    def freeze(self) -> None:
        """Stop it; returns when it stands still."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


# It ends when its parent does: its standard input ends then.
_PEER = """
import os, sys
import mooncake.store
master, segment, keys = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = mooncake.store.MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 16 << 20, "tcp", "", master)
config = mooncake.store.ReplicateConfig()
config.preferred_segment = store.get_hostname()
for number in range(keys):
    code = code or store.put(f"peer{number}", b"%08d" % number * 512, config)
if code == 0:
    print(store.get_hostname(), flush=True)
    sys.stdin.read()
os._exit(1)
"""
