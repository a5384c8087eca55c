"""What the commands share: their options, what these are read into, and how a failure is told."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from aiomooncake._settings import SETTINGS, from_keys
from aiomooncake._values import mask_secrets
from aiomooncake.cli.exits import exit_code
from aiomooncake.cli.terminal import Interrupted, Screen, run
from aiomooncake.config import StoreConfig, Target, parse_target
from aiomooncake.errors import ConfigError, MooncakeError, WarmupError

__all__ = [
    "HELP",
    "caught",
    "check_named",
    "common",
    "finish",
    "in_options",
    "master_option",
    "metrics_option",
    "place_of",
    "print_json",
    "read_overrides",
    "read_target",
    "set_option",
    "time_option",
]

F = TypeVar("F", bound=Callable[..., Any])

HELP: Final = {"help_option_names": ["-h", "--help"]}
"""Context settings of every command."""

# Errors are written for programs; on the command line these have other names.
_TIMEOUT: Final = re.compile(r"\btimeout=(?!\S)")
_SPOKEN: Final = (
    (re.compile(r"\bforce=True\b"), "--force"),
    (re.compile(r"\bset master_metrics_port\b"), "give --metrics-port"),
    (re.compile(r"\(master_metrics_port\)"), "(--metrics-port)"),
)


def common(command: F) -> F:
    """Add the options that every command has."""
    for option in (
        click.option("-v", "--verbose", is_flag=True, help="Write the library's log to stderr."),
        click.option("--engine-log", is_flag=True, help="Write the engine's own log to stderr."),
    ):
        command = option(command)
    return command


master_option: Final = click.option(
    "--master",
    metavar="HOST:PORT",
    help="The master, or any URL that connect() takes. By default the environment names it, and "
    "says everything else: MOONCAKE_MASTER, MOONCAKE_PROTOCOL, ... or MOONCAKE_CONFIG_PATH.",
)
metrics_option: Final = click.option(
    "--metrics-port", metavar="PORT", help="The master's HTTP port, to ask for causes."
)
set_option: Final = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any field of StoreConfig."
)


def time_option(default: float, meaning: str) -> Callable[[F], F]:
    """Add ``--timeout``."""
    return click.option(
        "--timeout",
        type=click.FloatRange(0, min_open=True),
        default=default,
        show_default=True,
        metavar="SECONDS",
        help=meaning,
    )


def read_target(named: str | None, option: str) -> tuple[str | StoreConfig, Target]:
    """Find what to connect to: a URL says everything by itself, an address joins the environment.

    Args:
        named: What was given, if anything.
        option: By which option or argument, for the error.

    Raises:
        UsageError: It can't be meant, or nothing names a master.
    """
    if named is None:
        try:
            config = StoreConfig.from_env()
        except ConfigError as exc:
            raise click.UsageError(str(exc)) from exc
        return config, parse_target(config)
    parsed = check_named(named, option)
    if "://" in named:
        return named, parsed
    environ = dict(os.environ)
    for name in SETTINGS["master_server_address"].env:
        environ.pop(name, None)
    try:
        config = StoreConfig.from_env({**environ, "MOONCAKE_MASTER": named})
    except ConfigError as exc:
        raise click.UsageError(str(exc)) from exc
    return config, parse_target(config)


def check_named(named: str, option: str) -> Target:
    """Understand a target, or refuse it by the name of the option that it came by.

    Raises:
        UsageError: It can't be meant.
    """
    try:
        return parse_target(named)
    except ConfigError as exc:
        raise _refused(exc, option) from exc


def read_overrides(settings: tuple[str, ...], **options: tuple[str, str | None]) -> dict[str, Any]:
    """Read ``--set`` and the options that stand for one field.

    Args:
        settings: What ``--set`` was given.
        **options: By field, the option and what it was given.

    Raises:
        UsageError: A field is not known, or a value can't be meant; names the option.
    """
    overrides: dict[str, Any] = {}
    pairs = {}
    for text in settings:
        key, mark, value = text.partition("=")
        if not mark:
            wanted = f"{text!r}: give KEY=VALUE, such as protocol=rdma"
            raise click.BadParameter(wanted, param_hint="'--set'")
        pairs[key] = value
    sources: list[tuple[str, dict[str, str | None]]] = [("--set", {**pairs})]
    sources += [(option, {field: value}) for field, (option, value) in options.items()]
    for option, given in sources:
        try:
            overrides |= from_keys(given, what="Field")
        except ConfigError as exc:
            raise _refused(exc, option) from exc
    return overrides


def _refused(error: ConfigError, option: str) -> click.BadParameter:
    return click.BadParameter(str(error).removeprefix("target="), param_hint=f"'{option}'")


def place_of(target: Target) -> str:
    """Write a target for people, without secrets."""
    place = mask_secrets(target.address)
    return place if target.kind == "master" else f"{target.kind}://{place}"


def in_options(text: str, *, time_limit: str = "--timeout") -> str:
    """Put the names of options for those of arguments.

    Args:
        text: An error's.
        time_limit: The option that bounds a connect.
    """
    text = _TIMEOUT.sub(time_limit, text)
    for argument, option in _SPOKEN:
        text = argument.sub(option, text)
    return text


def caught(work: Callable[[], Any]) -> MooncakeError | Interrupted | None:
    """Run a command's work and return how it failed."""
    try:
        run(work())
    except (MooncakeError, Interrupted) as exc:
        return exc
    return None


def finish(
    error: MooncakeError | Interrupted | None, screen: Screen, *, time_limit: str = "--timeout"
) -> int:
    """Say what went wrong, unless it stands there already; the exit code."""
    if error is None:
        return 0
    if isinstance(error, Interrupted):
        screen.log(f"{error}, everything is closed")
        return error.exit_code
    if not isinstance(error, WarmupError):
        screen.error(in_options(str(error), time_limit=time_limit))
    return exit_code(error)


def print_json(document: Mapping[str, Any]) -> None:
    """Print what ``--json`` promises: one document."""
    click.echo(json.dumps(document, indent=2))
