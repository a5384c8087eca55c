"""The verbs for hands-on work: ``put``, ``get``, ``exists`` and ``rm``.

They lend no memory, so that nothing that they store is lost when they end.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
import click

from aiomooncake._verdict import DiagnosisKind, size_text
from aiomooncake.cli.exits import (
    CALL_FAILED,
    MISSING,
    OTHER_FAILURE,
    epilog,
    exit_code_of,
)
from aiomooncake.cli.options import (
    HELP,
    caught,
    common,
    finish,
    in_options,
    master_option,
    metrics_option,
    read_overrides,
    read_target,
    set_option,
    time_option,
)
from aiomooncake.cli.terminal import Screen, log_to, tame_engine
from aiomooncake.connect import connect
from aiomooncake.diagnosis import Diagnosis, diagnose
from aiomooncake.errors import (
    ConfigError,
    InvalidArgumentError,
    MooncakeError,
    OperationTimeoutError,
    SetupError,
    shorten_key,
)
from aiomooncake.store import Store

__all__ = ["VERBS"]

F = TypeVar("F", bound=Callable[..., Any])

_CODES: Final = frozenset({*range(7), *range(10, 20), 130, 143})
_CLOSE_TIMEOUT: Final = 2.0
"""Seconds that a call which hangs in the engine is waited for at the end."""

_SHOWN: Final = 1024
"""Bytes of a value that are looked at before it is written to a terminal."""


def _connecting(command: F) -> F:
    """Add the options of a command that opens a store."""
    for option in (
        common,
        set_option,
        metrics_option,
        time_option(30.0, "For connecting, and then for the call."),
        master_option,
    ):
        command = option(command)
    return command


class _Session:
    """One store for one command, and how it went.

    Args:
        options: What the shared options were given.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        overrides = read_overrides(
            options["settings"],
            master_metrics_port=("--metrics-port", options["metrics_port"]),
        )
        self._target, parsed = read_target(options["master"], "--master")
        # A value in memory of our own would be gone with us; in the in-memory engine it is anyway.
        self._overrides = {"global_segment_size": 0} | overrides
        if parsed.kind != "master":
            self._overrides = overrides
        try:
            config = parsed.to_config("127.0.0.1:1", **self._overrides)
        except ConfigError as exc:
            raise click.UsageError(str(exc)) from exc
        self._asks_master = config.master_metrics_port is not None
        self._diagnosis: Diagnosis | None = None

    def run(
        self,
        work: Callable[[Store, Screen], Coroutine[Any, Any, int]],
        *,
        step: str,
        value_size: int = 1,
    ) -> None:
        """Connect, work, close, and exit.

        Args:
            work: What to do; returns the exit code.
            step: What a diagnosis should say failed.
            value_size: Bytes that are written.
        """
        code = OTHER_FAILURE
        tame_engine(shown=self._options["engine_log"])

        async def session() -> None:
            nonlocal code
            timeout = self._options["timeout"]
            store = await connect(self._target, timeout=timeout, **self._overrides)
            try:
                code = await asyncio.wait_for(work(store, screen), timeout)
            except asyncio.TimeoutError:
                self._diagnosis = await diagnose(store, step=step, code=None, value_size=value_size)
                raise OperationTimeoutError(
                    f"{step} has not ended after {timeout:g} s; allow more time with timeout="
                ) from None
            except MooncakeError as error:
                if error.code is not None:
                    self._diagnosis = await diagnose(
                        store, step=step, code=error.code, value_size=value_size
                    )
                raise
            finally:
                await store.aclose(_CLOSE_TIMEOUT)

        with Screen(live=False) as screen, log_to(screen, verbose=self._options["verbose"]):
            error = caught(session)
            if error is not None:
                code = self._explain(finish(error, screen), error, screen)
        sys.exit(code)

    def _explain(self, code: int, error: BaseException, screen: Screen) -> int:
        """Say what the diagnosis of a failed call found; the exit code."""
        if not isinstance(error, MooncakeError) or isinstance(error, SetupError):
            return code
        if isinstance(error, InvalidArgumentError) and error.code is None:
            return 2
        found = self._diagnosis
        if found is None or found.kind is DiagnosisKind.UNKNOWN:
            return CALL_FAILED if code == OTHER_FAILURE else code
        explanation = in_options(found.explanation)
        if found.kind is DiagnosisKind.NO_SEGMENT and not self._asks_master:
            explanation = (
                "no memory is mounted anywhere, or none has room for the value; with "
                "--metrics-port this command would tell which"
            )
        screen.log(f"cause: {explanation}")
        screen.log(f"cure:  {in_options(found.cure)}")
        return exit_code_of(found.kind)


@click.command(
    context_settings=HELP,
    epilog=epilog(
        "aiomooncake put greeting hello.txt --master 10.0.0.1:50051",
        "tar c folder | aiomooncake put folder.tar",
        codes=_CODES,
    ),
)
@click.argument("key")
@click.argument("file", default="-")
@click.option("--replace", is_flag=True, help="Replace the value of a key that is there.")
@_connecting
def put(*, key: str, file: str, replace: bool, **options: Any) -> None:
    """Store FILE, or what comes by stdin, under KEY.

    The value goes into memory that other clients lend; where there is none, that is said. A key
    that is there keeps its value, and the command fails, unless --replace is given.
    """
    session = _Session(options)
    try:
        value = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as exc:
        raise click.BadParameter(f"{file!r}: {exc.strerror}", param_hint="'FILE'") from exc
    if not value:
        raise click.UsageError("the value is empty, and the engine stores no empty ones")

    async def work(store: Store, screen: Screen) -> int:
        if replace:
            await store.upsert(key, value)
            return 0
        if await store.exists(key):
            screen.error(
                f"{shorten_key(key)} is there already, and keeps its value: --replace replaces it"
            )
            return CALL_FAILED
        await store.put(key, value)
        # The engine says yes as well beside the unfinished write of a client that has gone.
        if not await store.exists(key):
            screen.error(
                f"{shorten_key(key)} is held by a write of another client that has not ended: the "
                "value was not stored; try again in a minute, or take another key"
            )
            return CALL_FAILED
        return 0

    session.run(work, step="put", value_size=len(value))


@click.command(
    context_settings=HELP,
    epilog=epilog(
        "aiomooncake get greeting --master 10.0.0.1:50051",
        "aiomooncake get folder.tar | tar x",
        "aiomooncake get greeting -o hello.txt",
        codes=_CODES,
    ),
)
@click.argument("key")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True),
    default="-",
    metavar="FILE",
    help="Where to write; by default to stdout. A file is touched only if the key is there.",
)
@_connecting
def get(*, key: str, output: str, **options: Any) -> None:
    """Write the value of KEY to stdout, as raw bytes.

    Nothing else is written there. To a terminal only text is written.
    """
    session = _Session(options)

    async def work(store: Store, screen: Screen) -> int:
        value = await store.get(key)
        if value is None:
            screen.log(f"{shorten_key(key)} is not there")
            return MISSING
        if output == "-" and sys.stdout.isatty() and not _is_text(value):
            screen.error(
                f"the value ({size_text(len(value))}) is binary, and stdout is a terminal: give "
                "-o FILE, or a pipe"
            )
            return CALL_FAILED
        try:
            await anyio.to_thread.run_sync(_write, output, value)
        except OSError as exc:
            if exc.errno != errno.EPIPE:  # who reads has read enough
                screen.error(f"can't write to {output}: {exc.strerror}")
            return CALL_FAILED
        return 0

    session.run(work, step="get")


@click.command(
    context_settings=HELP,
    epilog=epilog(
        "aiomooncake exists greeting --master 10.0.0.1:50051 && echo there",
        codes=_CODES,
    ),
)
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@_connecting
def exists(*, keys: tuple[str, ...], **options: Any) -> None:
    """Tell for each KEY whether it is there, and its size.

    Being asked for protects a key from removal until its lease ends (five seconds, unless the
    master says otherwise), as any read does.
    """
    session = _Session(options)

    async def work(store: Store, screen: Screen) -> int:
        code = 0
        for key in keys:
            size = await store.size(key)
            screen.line(f"{key}: {'missing' if size is None else size_text(size)}")
            if size is None:
                code = MISSING
        return code

    session.run(work, step="exists")


@click.command(
    context_settings=HELP,
    epilog=epilog(
        "aiomooncake rm greeting folder.tar --master 10.0.0.1:50051",
        "aiomooncake rm --force greeting",
        codes=_CODES,
    ),
)
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@click.option("--force", is_flag=True, help="Also what was read a moment ago, and is leased.")
@_connecting
def rm(*, keys: tuple[str, ...], force: bool, **options: Any) -> None:
    """Remove each KEY.

    All of them are tried. The exit code is 1 if one was not there.
    """
    session = _Session(options)

    async def work(store: Store, screen: Screen) -> int:
        code = 0
        answers = await store.remove_many(keys, force=force, return_exceptions=True)
        for key, answer in zip(keys, answers, strict=True):
            if isinstance(answer, MooncakeError):
                screen.error(in_options(str(answer)))
                code = CALL_FAILED
            elif not answer:
                screen.log(f"{shorten_key(key)} is not there")
                code = code or MISSING
        return code

    session.run(work, step="remove")


def _is_text(value: bytes) -> bool:
    head = value[:_SHOWN]
    try:
        text = head.decode()
    except UnicodeDecodeError as exc:
        if exc.start < len(head) - 4:  # else a character that was cut
            return False
        text = head[: exc.start].decode()
    return all(char.isprintable() or char in "\t\r\n" for char in text)


def _write(output: str, value: bytes) -> None:
    """Write a value to a file, or to stdout."""
    if output != "-":
        Path(output).write_bytes(value)
        return
    sys.stdout.flush()
    view = memoryview(value)
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]


VERBS: Final = (put, get, exists, rm)
