"""The command ``bench``, from its options to its exit code."""

from __future__ import annotations

import sys
from typing import Any

import click

from aiomooncake.cli.bench import Bench
from aiomooncake.cli.exits import CALL_FAILED, OTHER_FAILURE, epilog, exit_code_of
from aiomooncake.cli.options import (
    HELP,
    caught,
    common,
    finish,
    in_options,
    metrics_option,
    place_of,
    print_json,
    read_overrides,
    read_target,
    set_option,
    time_option,
)
from aiomooncake.cli.terminal import Interrupted, Screen, log_to, tame_engine
from aiomooncake.config import parse_size
from aiomooncake.connect import connect
from aiomooncake.errors import ConfigError, NoSpaceError, WarmupError

__all__ = ["bench"]


@click.command(
    context_settings=HELP,
    epilog=epilog(
        "aiomooncake bench 10.0.0.1:50051 --metrics-port 9003",
        "aiomooncake bench --size 64KiB --size 8MiB --tasks 1 --tasks 256 --seconds 60",
        "aiomooncake bench local://",
        codes={0, 2, 3, 4, 5, CALL_FAILED, *range(10, 20), 130, 143},
    ),
)
@click.argument("target", metavar="[TARGET]", required=False)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    default=("4KiB", "1MiB"),
    show_default=True,
    metavar="SIZE",
    help="Of the values; may be repeated.",
)
@click.option(
    "--tasks",
    type=click.IntRange(1, 4096),
    multiple=True,
    default=(1, 16, 128),
    show_default=True,
    metavar="N",
    help="How many tasks call side by side; may be repeated.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 3600),
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    help="For all of it; connecting and cleaning up come on top.",
)
@click.option(
    "--max-data",
    default="128MiB",
    show_default=True,
    metavar="SIZE",
    help="What is stored at a time, at most.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
@click.option(
    "--segment-size",
    default="0",
    show_default=True,
    metavar="SIZE",
    help="Memory that this process lends meanwhile.",
)
@time_option(30.0, "For connecting and warming up.")
@metrics_option
@set_option
@common
def bench(
    *,
    target: str | None,
    sizes: tuple[str, ...],
    tasks: tuple[int, ...],
    seconds: float,
    max_data: str,
    as_json: bool,
    segment_size: str,
    timeout: float,
    metrics_port: str | None,
    settings: tuple[str, ...],
    engine_log: bool,
    verbose: bool,
) -> None:
    """Measure your own cluster, and leave nothing behind.

    TARGET is a master's host:port, beside the settings of the environment, or any URL that
    connect() takes; without it the environment says all. What is measured are put, get and exists
    of one store, as one process with so many tasks meets them. With the master's HTTP port it
    stores no more than fits without eviction.
    """
    overrides = read_overrides(
        settings,
        master_metrics_port=("--metrics-port", metrics_port),
        global_segment_size=("--segment-size", segment_size),
    )
    opened, parsed = read_target(target, "TARGET")
    if parsed.kind != "master" and segment_size == "0":
        overrides.pop("global_segment_size")
    try:
        config = parsed.to_config("127.0.0.1:1", **overrides)
        wanted = [parse_size(size, field="--size") for size in dict.fromkeys(sizes)]
        most = parse_size(max_data, field="--max-data")
    except ConfigError as exc:
        raise click.UsageError(str(exc)) from exc
    if not all(wanted):
        raise click.UsageError("--size: the engine stores no empty values")
    place = place_of(parsed)
    tame_engine(shown=engine_log)

    async def work() -> None:
        screen.line(f"benchmark of {place}, {seconds:g} s", "bold")
        async with connect(opened, timeout=timeout, warmup=True, **overrides) as store:
            await run.run(store)
        run.sum_up(config.global_segment_size)

    with Screen(live=not engine_log, quiet=as_json) as screen, log_to(screen, verbose=verbose):
        run = Bench(wanted, list(dict.fromkeys(tasks)), seconds, most, screen)
        error = caught(work)
        code = _code(error, finish(error, screen))
        if isinstance(error, WarmupError):
            screen.error(in_options(str(error)))
    if as_json:
        document: dict[str, Any] = {
            "target": place,
            "exit_code": code,
            "error": None if error is None else str(error),
            "global_segment_size": config.global_segment_size,
        }
        print_json(document | run.document())
    sys.exit(code)


def _code(error: BaseException | None, code: int) -> int:
    if isinstance(error, NoSpaceError):
        return exit_code_of("out-of-space")
    is_call = error is not None and not isinstance(error, Interrupted)
    return CALL_FAILED if is_call and code == OTHER_FAILURE else code
