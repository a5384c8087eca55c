"""The commands and their options."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import click

from aiomooncake._verdict import count_text
from aiomooncake._version import __version__
from aiomooncake.cli.bench_command import bench
from aiomooncake.cli.board import Board
from aiomooncake.cli.checks import checks
from aiomooncake.cli.demo import Demo
from aiomooncake.cli.doctor import Case, Doctor
from aiomooncake.cli.exits import epilog
from aiomooncake.cli.options import (
    HELP,
    caught,
    check_named,
    common,
    finish,
    in_options,
    master_option,
    metrics_option,
    place_of,
    print_json,
    read_overrides,
    read_target,
    set_option,
    time_option,
)
from aiomooncake.cli.terminal import Interrupted, Screen, log_to, tame_engine
from aiomooncake.cli.verbs import VERBS
from aiomooncake.config import Target, parse_size
from aiomooncake.errors import ConfigError, EngineNotInstalledError, InvalidArgumentError
from aiomooncake.ranks import connect_ranks
from aiomooncake.warmup import WarmupPolicy

__all__ = ["cli"]

_DEMO_RANKS = 64  # each of them mounts 32 MiB
_MOST_RANKS = 256
_LEAST = 0.05  # seconds for a warm-up after a connect that took all the time there was


@click.group(context_settings=HELP, epilog=epilog())
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Mooncake Store from asyncio, without a blocked event loop."""


@cli.command(context_settings=HELP, epilog=epilog())
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
@common
def demo(*, ranks: int, mount_after: float, memory: bool, engine_log: bool, verbose: bool) -> None:
    """Show the start-up race, and how it is survived.

    Starts a private master and many ranks, whose memory is mounted late: until then each put
    answers -200, which kills a server that asserts on its first one. Then stores and reads values
    through every rank, and leaves.
    """
    tame_engine(shown=engine_log)
    with Screen(live=not engine_log) as screen, log_to(screen, verbose=verbose):
        error = caught(Demo(ranks, mount_after, memory, screen).run)
        code = finish(error, screen)
        if isinstance(error, EngineNotInstalledError):
            screen.log("Without an engine: aiomooncake demo --memory")
    sys.exit(code)


@cli.command(context_settings=HELP, epilog=epilog())
@master_option
@click.option(
    "--ranks",
    type=click.IntRange(1, _MOST_RANKS),
    default=1,
    show_default=True,
    metavar="N",
    help="How many ranks, side by side.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
@time_option(60.0, "For connecting and warming up together.")
@click.option("--max-attempts", type=click.IntRange(1), metavar="N", help="Tries of each rank.")
@metrics_option
@click.option(
    "--segment-size",
    metavar="SIZE",
    help="Memory that each rank lends meanwhile, such as 64MiB; 0 to test only what is there. "
    "By default as the environment says, else 512MiB.",
)
@set_option
@common
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
    overrides = read_overrides(
        settings,
        master_metrics_port=("--metrics-port", metrics_port),
        global_segment_size=("--segment-size", segment_size),
    )
    target, parsed = read_target(master, "--master")
    try:
        parsed.to_config("127.0.0.1:1", **overrides)
        policy = WarmupPolicy(timeout=timeout, max_attempts=max_attempts)
    except (ConfigError, InvalidArgumentError) as exc:
        raise click.UsageError(in_options(str(exc))) from exc
    place = place_of(parsed)
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
        error = caught(work)
        board.explain(screen)
        code = finish(error, screen)
    if as_json:
        print_json(board.document(place, error, exit_code=code))
    sys.exit(code)


@cli.command(
    context_settings=HELP,
    epilog=epilog(
        "aiomooncake doctor 10.0.0.1:50051 --metrics-port 9003",
        "MOONCAKE_CONFIG_PATH=mooncake.json aiomooncake doctor --json",
        codes={0, 2, 3, 4, 5, *range(10, 22), 130, 143},
    ),
)
@click.argument("target", metavar="[TARGET]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
@time_option(10.0, "For the trial, which connects, puts and gets; other checks take 5 s at most.")
@metrics_option
@set_option
@common
def doctor(
    *,
    target: str | None,
    as_json: bool,
    timeout: float,
    metrics_port: str | None,
    settings: tuple[str, ...],
    engine_log: bool,
    verbose: bool,
) -> None:
    """Find out what is wrong, and what to do about it.

    Looks at this host, the master and the cluster, and tries to store and read a value. TARGET is a
    master's host:port, beside the settings of the environment, or any URL that connect() takes;
    without it the environment says all. Lends no memory, and leaves no key behind. The exit code
    is that of the first failure.
    """

    def read() -> Target:
        overrides = read_overrides(settings, master_metrics_port=("--metrics-port", metrics_port))
        _, parsed = read_target(target, "TARGET")
        return parsed if not overrides else replace(parsed, config=parsed.to_config(**overrides))

    tame_engine(shown=engine_log)
    case = Case(target, read, timeout, engine_log)
    with Screen(live=False, quiet=as_json) as screen, log_to(screen, verbose=verbose):
        examination = Doctor(case, checks(timeout), screen)
        error = caught(examination.run)
        if error is None:
            examination.sum_up()
        code = finish(error, screen) or examination.exit_code
    if as_json:
        place = "" if case.target is None else place_of(case.target)
        print_json(examination.document(place, exit_code=code))
    sys.exit(code)


@cli.command(context_settings=HELP, epilog=epilog())
@click.option("--config", metavar="FILE", help="The JSON file of the wheel's store service.")
@click.option(
    "-D",
    "--define",
    "defines",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any field of StoreConfig.",
)
@click.option(
    "--master",
    metavar="HOST:PORT",
    help="The master, or any URL that connect() takes. By default the file or the environment "
    "says it: MOONCAKE_CONFIG_PATH, or MOONCAKE_MASTER, MOONCAKE_PROTOCOL, ...",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 = any."
)
@click.option(
    "--max-wait-time",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Leave when connecting, or warming up, takes longer. By default it is tried on for ever.",
)
@click.option("--max-body", default="100MiB", show_default=True, metavar="SIZE", help="Of a put.")
@click.option("--allow-remove-all", is_flag=True, help="Let clients remove every key at once.")
@click.option(
    "--token-file",
    metavar="FILE",
    help="Holds the token that clients must send; or set AIOMOONCAKE_TOKEN.",
)
@common
def serve(
    *,
    config: str | None,
    defines: tuple[str, ...],
    master: str | None,
    host: str,
    port: int,
    max_wait_time: float | None,
    max_body: str,
    allow_remove_all: bool,
    token_file: str | None,
    engine_log: bool,
    verbose: bool,
) -> None:
    """Serve the store over HTTP, in the place of the wheel's mc_store_rest_server.

    Listens at once and connects beside that: /healthz answers always, /readyz when the store
    stores and reads. SIGTERM ends it when the requests under way have been answered.
    """
    try:
        from aiomooncake.cli import serve as serving
    except ModuleNotFoundError as exc:
        if exc.name != "aiohttp":
            raise
        raise click.ClickException(
            "serve needs aiohttp: pip install 'aiomooncake[aiohttp]'"
        ) from exc
    if master is not None:
        check_named(master, "--master")
    try:
        target, overrides = serving.target_of(master, config, defines)
        token = serving.read_token(token_file)
        app = serving.make_app(
            target,
            token=token,
            max_body=parse_size(max_body, field="--max-body"),
            allow_remove_all=allow_remove_all,
            timeout=max_wait_time,
            **overrides,
        )
    except (ConfigError, InvalidArgumentError) as exc:
        raise click.UsageError(str(exc)) from exc
    tame_engine(shown=engine_log)
    serving.use_uvloop()
    with Screen(live=False) as screen, log_to(screen, verbose=verbose):
        try:
            error = caught(serving.Serve(app, host, port, token is not None, screen).run)
        except OSError as exc:
            screen.error(f"can't listen on {host}:{port}: {exc.strerror}")
            sys.exit(1)
        # A server that was told to end and did so has done nothing wrong.
        ended = isinstance(error, Interrupted)
        code = 0 if ended else finish(error, screen, time_limit="--max-wait-time")
    sys.exit(code)


for _command in (bench, *VERBS):
    cli.add_command(_command)
