"""The commands and their options."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click

from aiomooncake._settings import from_keys
from aiomooncake._values import mask_secrets
from aiomooncake._verdict import count_text
from aiomooncake._version import __version__
from aiomooncake.cli.board import Board
from aiomooncake.cli.demo import Demo
from aiomooncake.cli.exits import epilog, exit_code
from aiomooncake.cli.terminal import Interrupted, Screen, log_to, run, tame_engine
from aiomooncake.config import StoreConfig, parse_target
from aiomooncake.errors import (
    ConfigError,
    EngineNotInstalledError,
    InvalidArgumentError,
    MooncakeError,
    WarmupError,
)
from aiomooncake.ranks import connect_ranks
from aiomooncake.warmup import WarmupPolicy

__all__ = ["cli"]

F = TypeVar("F", bound=Callable[..., Any])

_DEMO_RANKS = 64  # each of them mounts 32 MiB
_MOST_RANKS = 256
_LEAST = 0.05  # seconds for a warm-up after a connect that took all the time there was


def _common(command: F) -> F:
    """Add the options that every command has."""
    for option in (
        click.option("-v", "--verbose", is_flag=True, help="Write the library's log to stderr."),
        click.option("--engine-log", is_flag=True, help="Write the engine's own log to stderr."),
    ):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=epilog())
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Mooncake Store from asyncio, without a blocked event loop."""


@cli.command(epilog=epilog())
@click.option(
    "--ranks",
    type=click.IntRange(1, _DEMO_RANKS),
    default=8,
    show_default=True,
    metavar="N",
    help="How many ranks.",
)
@click.option(
    "--mount-after",
    type=click.FloatRange(0, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long no memory is mounted.",
)
@click.option(
    "--memory",
    is_flag=True,
    default=sys.platform != "linux",
    help="Use the in-memory engine, which needs no wheel. Always so elsewhere than on Linux.",
)
@_common
def demo(*, ranks: int, mount_after: float, memory: bool, engine_log: bool, verbose: bool) -> None:
    """Show the start-up race, and how it is survived.

    Starts a private master and many ranks, whose memory is mounted late: until then each put
    answers -200, which kills a server that asserts on its first one. Then stores and reads values
    through every rank, and leaves.
    """
    tame_engine(shown=engine_log)
    with Screen(live=not engine_log) as screen, log_to(screen, verbose=verbose):
        error = _caught(Demo(ranks, mount_after, memory, screen).run)
        code = _finish(error, screen)
        if isinstance(error, EngineNotInstalledError):
            screen.log("Without an engine: aiomooncake demo --memory")
    sys.exit(code)


@cli.command(epilog=epilog())
@click.option(
    "--master",
    metavar="HOST:PORT",
    help="The master, or any URL that connect() takes. By default the environment names it, and "
    "says everything else: MOONCAKE_MASTER, MOONCAKE_PROTOCOL, ... or MOONCAKE_CONFIG_PATH.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, _MOST_RANKS),
    default=1,
    show_default=True,
    metavar="N",
    help="How many ranks, side by side.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="For connecting and warming up together.",
)
@click.option("--max-attempts", type=click.IntRange(1), metavar="N", help="Tries of each rank.")
@click.option("--metrics-port", metavar="PORT", help="The master's HTTP port, to ask for causes.")
@click.option(
    "--segment-size",
    metavar="SIZE",
    help="Memory that each rank lends meanwhile, such as 64MiB; 0 to test only what is there. "
    "By default as the environment says, else 512MiB.",
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any field of StoreConfig."
)
@_common
def warmup(
    *,
    master: str | None,
    ranks: int,
    as_json: bool,
    timeout: float,
    max_attempts: int | None,
    metrics_port: str | None,
    segment_size: str | None,
    settings: tuple[str, ...],
    engine_log: bool,
    verbose: bool,
) -> None:
    """Connect ranks to a master and wait until each of them can store and read.

    For start-up scripts and readiness probes: exits with 0 only if every rank is ready.
    """
    given = {"master_metrics_port": metrics_port, "global_segment_size": segment_size}
    try:
        overrides = from_keys({**given, **_pairs(settings)}, what="--set")
        target = _target(master)
        parsed = parse_target(target)
        parsed.to_config("127.0.0.1:1", **overrides)
        policy = WarmupPolicy(timeout=timeout, max_attempts=max_attempts)
    except (ConfigError, InvalidArgumentError) as exc:
        raise click.UsageError(str(exc)) from exc
    place = mask_secrets(parsed.address)
    if parsed.kind != "master":
        place = f"{parsed.kind}://{place}"
    tame_engine(shown=engine_log)
    board = Board.of(range(ranks))

    async def work() -> None:
        screen.line(f"{count_text(ranks, 'rank')}, master {place}", "bold")
        began = time.monotonic()
        async with connect_ranks(target, ranks, timeout=timeout, **overrides) as group:
            left = max(_LEAST, timeout - (time.monotonic() - began))
            await board.watch(group, replace(policy, timeout=left), screen)
            seconds = time.monotonic() - began
            screen.line(f"{count_text(ranks, 'rank')} ready in {seconds:.2f} s", "bold green")

    with Screen(live=not engine_log, quiet=as_json) as screen, log_to(screen, verbose=verbose):
        error = _caught(work)
        board.explain(screen)
        code = _finish(error, screen)
    if as_json:
        click.echo(json.dumps(board.document(place, error, exit_code=code), indent=2))
    sys.exit(code)


def _target(master: str | None) -> str | StoreConfig:
    """Return what to connect to: a URL says everything by itself, an address joins the rest."""
    if master is not None and "://" in master:
        return master
    return StoreConfig.from_env(
        {**os.environ, "MOONCAKE_MASTER": master} if master is not None else None
    )


def _pairs(settings: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for text in settings:
        key, mark, value = text.partition("=")
        if not mark:
            raise ConfigError(f"--set {text!r}: give KEY=VALUE, such as protocol=rdma")
        pairs[key] = value
    return pairs


def _caught(work: Callable[[], Any]) -> MooncakeError | Interrupted | None:
    """Run a command's work and return how it failed."""
    try:
        run(work())
    except (MooncakeError, Interrupted) as exc:
        return exc
    return None


def _finish(error: MooncakeError | Interrupted | None, screen: Screen) -> int:
    """Say what went wrong, unless it stands there already; the exit code."""
    if error is None:
        return 0
    if isinstance(error, Interrupted):
        screen.log(f"{error}, everything is closed")
        return error.exit_code
    if not isinstance(error, WarmupError):
        screen.error(str(error))
    return exit_code(error)
