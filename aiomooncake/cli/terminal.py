"""What a command does to its process: where output goes, who writes it, which signals end it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import queue
import signal
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from aiomooncake.cli.exits import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from types import TracebackType

    from rich.console import RenderableType

__all__ = ["Interrupted", "Screen", "log_to", "run", "tame_engine"]

T = TypeVar("T")

_STATES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red"}

_FRAME: Final = 0.1  # seconds between two frames of the live table


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """A signal ended the command, which has left cleanly.

    Attributes:
        exit_code: What the process should exit with.
    """

    def __init__(self, number: int) -> None:
        super().__init__("interrupted" if number == signal.SIGINT else "terminated")
        self.exit_code = INTERRUPTED + number


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as ``asyncio.run`` does; SIGINT and SIGTERM cancel it.

    That happens once: the coroutine then closes what it has opened. The next signal acts as ever.

    Raises:
        Interrupted: A signal came.
    """

    async def until_signal() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        came: list[int] = []

        def end(number: int) -> None:
            came.append(number)
            loop.remove_signal_handler(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end, number)
        try:
            return await task
        except asyncio.CancelledError:
            if came:
                raise Interrupted(came[0]) from None
            raise
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    try:
        return asyncio.run(until_signal())
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT) from None


def tame_engine(*, shown: bool) -> None:
    """Part the engine's output from ours, for the rest of the process.

    The engine writes to descriptors 1 and 2 from native threads, some lines before its log level
    counts. So Python's streams move to copies of the two descriptors, and what is left to the
    engine leads to nowhere, or to stderr if it is to be shown. Streams that are not the
    process's own (a test's, a notebook's) stay as they are.
    """
    if shown:
        # Read when the engine is imported.
        os.environ.setdefault("MC_LOG_LEVEL", "INFO")
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        try:
            own = stream is not None and stream.fileno() == number
        except (OSError, ValueError):
            own = False
        if not own:
            continue
        stream.flush()
        copy = os.fdopen(
            os.dup(number),
            "w",
            buffering=1 if stream.line_buffering else -1,
            encoding=stream.encoding,
            errors="backslashreplace",
            closefd=False,  # open to the end of the process, as the first three are
        )
        setattr(sys, name, copy)
        if shown:
            os.dup2(2, number)
        else:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


class Screen:
    """Where a command writes: stdout for people, log lines to stderr; a live table on a terminal.

    One thread of its own does all the writing, so that a slow or stopped terminal (Ctrl-S) never
    stops the event loop, and lines never tear the table. Everything that was printed is out when
    the ``with`` block is left, also after an interrupt.

    Args:
        live: Whether a table may be redrawn in place; only done on a terminal that can.
        quiet: Drop everything but log lines.
    """

    def __init__(self, *, live: bool = True, quiet: bool = False) -> None:
        self._out = Console(file=sys.stdout, highlight=False, quiet=quiet)
        self._err = Console(file=sys.stderr, highlight=False)
        terminal = sys.stdout is not None and sys.stdout.isatty()
        self._width = self._out.width if terminal else None
        self.live = live and terminal and not self._out.is_dumb_terminal and not quiet
        self._table: Live | None = None
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="aiomooncake-screen", daemon=True)

    def __repr__(self) -> str:
        return f"<Screen {'live' if self.live else 'line by line'}>"

    def __enter__(self) -> Screen:
        self._writer.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._jobs.put(None)
        self._writer.join()

    def line(self, text: str = "", style: str = "") -> None:
        """Print one line for people, however long; above the live table if there is one."""
        self._jobs.put(functools.partial(self._out.print, Text(text, style), soft_wrap=True))

    def fact(self, label: str, text: str, style: str = "") -> None:
        """Print a labelled text; on a terminal it is filled, with the label standing out."""
        self._labelled((f"  {label:<9}", "dim"), text, style)

    def finding(self, state: str, name: str, text: str) -> None:
        """Print what a check has found; with an empty state, what belongs to the line before."""
        style = _STATES.get(state, "dim")
        indented = bool(name) or not state
        self._labelled((f"  {state:<4}  ", style), text, "", name=f"{name:<10}" * indented)

    def _labelled(self, label: tuple[str, str], text: str, style: str, *, name: str = "") -> None:
        indent = " " * (len(label[0]) + len(name))
        if self._width is not None:
            # Not narrower than a word or two, whatever the terminal says.
            lines = textwrap.wrap(text, max(20, self._width - len(indent)))
            text = f"\n{indent}".join(lines)
        line = Text.assemble(label, (name, "bold"), (text, style))
        self._jobs.put(functools.partial(self._out.print, line, soft_wrap=True))

    def error(self, text: str) -> None:
        """Say on stderr why the command failed."""
        line = Text.assemble(("error: ", "bold red"), text)
        self._jobs.put(functools.partial(self._err.print, line, soft_wrap=True))

    def log(self, text: str) -> None:
        """Write a log line to stderr; past the live table when both are on the terminal."""
        console = self._out if self.live and self._err.is_terminal else self._err
        self._jobs.put(functools.partial(console.print, Text(text), soft_wrap=True))

    @contextlib.contextmanager
    def table(self, render: Callable[[], RenderableType]) -> Iterator[None]:
        """Keep a table up to date on the screen; its last state stays there."""
        if not self.live:
            yield
            return
        self._jobs.put(functools.partial(self._begin, render))
        try:
            yield
        finally:
            self._jobs.put(self._end)

    def _begin(self, render: Callable[[], RenderableType]) -> None:
        self._table = Live(
            console=self._out,
            get_renderable=render,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._table.start(refresh=True)

    def _end(self) -> None:
        if self._table is not None:
            self._table.stop()
            self._table = None

    def _write(self) -> None:
        """Do the jobs as they come; redraw the table when none has come for a while."""
        while True:
            try:
                job = self._jobs.get(timeout=_FRAME if self._table is not None else None)
            except queue.Empty:
                job = self._table.refresh if self._table is not None else self._end
            if job is None:
                return
            # A pipe that nobody reads any more (rich exits on it), or a terminal that is gone:
            # what remains of the work is not worth breaking off.
            with contextlib.suppress(OSError, SystemExit):
                job()


class _ScreenHandler(logging.Handler):
    """Hands log lines to a screen."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.log(self.format(record))


def _tells_more(record: logging.LogRecord) -> bool:
    """Whether a record says more than the table, which shows every attempt of a warm-up."""
    return not hasattr(record, "mooncake_attempt")


@contextlib.contextmanager
def log_to(screen: Screen, *, verbose: bool) -> Iterator[None]:
    """Send log lines and Python's warnings to the screen: only what matters, or all of them."""
    handler = _ScreenHandler(screen)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    )
    logger, root = logging.getLogger("aiomooncake"), logging.getLogger()
    before = logger.level
    if verbose:
        logger.setLevel(logging.INFO)
    else:
        handler.addFilter(_tells_more)
    root.addHandler(handler)
    logging.captureWarnings(capture=True)
    try:
        yield
    finally:
        logging.captureWarnings(capture=False)
        root.removeHandler(handler)
        logger.setLevel(before)
