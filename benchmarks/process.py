"""Processes of the benchmark: each peer works in one of its own, and is told what to do.

A peer measured beside another one in the same process would share its settings, its memory and
its GIL; and the alternatives hold the GIL for minutes, so that only another process can end
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

__all__ = ["Job", "OverCapError", "Worker", "WorkerError"]

_ROOT = Path(__file__).parent.parent
_BEAT = 0.02  # seconds between two signs of life of a loop that may stand still
_TAIL = 3000  # characters of a failed worker's output that are shown
_LEAVE = 5.0  # seconds


class WorkerError(RuntimeError):
    """A worker failed; the text holds its traceback and the end of its output."""


class OverCapError(Exception):
    """The work did not end within its cap, and the worker was killed.

    Attributes:
        still: Seconds since its loop had shown a sign of life; None when it gave none at all.
    """

    def __init__(self, still: float | None) -> None:
        super().__init__("the work did not end within its cap")
        self.still = still


class Job:
    """What a worker can do: its ``async`` methods, called by name from the other process.

    Arguments and results are JSON. An instance lives as long as its worker.
    """

    def __init__(self, emit: Callable[[dict[str, Any]], None]) -> None:
        self._emit = emit

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Show signs of life, so that a loop that stands still for ever is known by its silence."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def beat() -> None:
            nonlocal timer
            self._emit({"beat": True})
            timer = loop.call_later(_BEAT, beat)

        beat()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


class Worker:
    """A process that runs a :class:`Job`; it is killed when this process ends or lets go of it.

    The kernel ties it to the *thread* that starts it, which must live as long.

    Args:
        job: The job's class; importable by name.
        loop: ``"asyncio"`` or ``"uvloop"``.
    """

    def __init__(self, job: type[Job], *, loop: str = "asyncio") -> None:
        self._name = f"{job.__module__}:{job.__qualname__}"
        self._log: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # close() closes it
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._last_beat: float | None = None
        self._frozen = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._worker", self._name, loop, str(os.getpid())],
            cwd=_ROOT,
            env={**os.environ, "MC_LOG_LEVEL": "ERROR"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, method: str, *, within: float = 60.0, **arguments: Any) -> Any:
        """Call a method of the job and return its result.

        Args:
            method: Its name.
            within: Seconds.
            **arguments: Its arguments.

        Raises:
            WorkerError: It raised, or the process died.
            OverCapError: It took longer; the process is gone.
        """
        self.send(method, **arguments)
        return self.receive(within)

    def send(self, method: str, **arguments: Any) -> None:
        """Begin a call; :meth:`receive` ends it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # receive() tells

    def receive(self, within: float = 60.0) -> Any:
        """Wait for the result of a call that was begun."""
        try:
            answer = self._answers.get(timeout=within)
        except queue.Empty:
            last, now = self._last_beat, time.monotonic()
            self.close(kill=True)
            raise OverCapError(None if last is None else now - last) from None
        if answer is None:
            code = self._process.wait()
            raise WorkerError(f"{self._name} ended with code {code}\n{self._output()}")
        if "error" in answer:
            raise WorkerError(f"{self._name} failed:\n{answer['error']}\n{self._output()}")
        return answer["result"]

    def freeze(self) -> None:
        """Stop the process where it is, as a machine that hangs; :meth:`close` still works."""
        self._frozen = True
        self._process.send_signal(signal.SIGSTOP)

    def close(self, *, kill: bool = False) -> None:
        """Let the process go; it leaves without tidying up."""
        if (
            self._process.poll() is None
            and not (kill or self._frozen)
            and self._process.stdin is not None
        ):
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(_LEAVE)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "beat" in answer:
                self._last_beat = time.monotonic()
            else:
                self._answers.put(answer)
        self._answers.put(None)

    def _output(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0)
        return self._log.read()[-_TAIL:]

    def __repr__(self) -> str:
        return f"<Worker {self._name} pid {self._process.pid}>"
