"""Configuration of other projects, read with their own keys, spellings and defaults.

``docs/configuration.md`` maps every key of every dialect; ``scripts/configuration_table.py`` makes
that table from the rules here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, get_args

from aiomooncake._dialects import lmcache, wheel
from aiomooncake._dialects.lmcache import LMCACHE
from aiomooncake._dialects.rules import (
    Dialect,
    Place,
    Rules,
    Values,
    from_keys,
    from_variables,
)
from aiomooncake._dialects.sglang import SGLANG
from aiomooncake._dialects.vllm import VLLM
from aiomooncake._dialects.wheel import WHEEL
from aiomooncake._settings import load_json
from aiomooncake._values import bad_value, nearest
from aiomooncake.errors import ConfigError

__all__ = [
    "RULES",
    "Dialect",
    "Place",
    "check_dialect",
    "read_environ",
    "read_file",
    "read_mapping",
]

RULES: Final[Mapping[Dialect, Rules]] = {
    rules.dialect: rules for rules in (SGLANG, VLLM, LMCACHE, WHEEL)
}


def check_dialect(dialect: object) -> Dialect:
    """Return the dialect, or refuse what is none.

    Raises:
        ConfigError: with the nearest name.
    """
    for known in RULES:
        if dialect == known:
            return known
    meant = nearest(dialect, RULES) if isinstance(dialect, str) else None
    names = ", ".join(map(repr, get_args(Dialect)))
    want = f"did you mean {meant!r}?" if meant else f"give one of {names}, or None for our own"
    raise bad_value("dialect", dialect, want)


def read_file(dialect: Dialect, path: Path, place: Place) -> Values:
    """Read a project's JSON file into fields of ``StoreConfig``.

    Raises:
        ConfigError: naming key, value, dialect and cure.
    """
    content = load_json(path, RULES[dialect].path_variable)
    return _read(dialect, content, place, f"In the config file {path}", file=True)


def read_mapping(dialect: Dialect, given: Mapping[str, object], place: Place) -> Values:
    """Read a project's mapping (SGLang's or LMCache's extra config, the engine's ``setup``).

    Raises:
        ConfigError: naming key, value, dialect and cure.
    """
    return _read(dialect, given, place, "In the mapping", file=False)


def read_environ(dialect: Dialect, environ: Mapping[str, str], place: Place) -> Values:
    """Read the variables that a project reads, and the file that they name.

    Raises:
        ConfigError: naming variable or key, value, dialect and cure.
    """
    rules = RULES[dialect]
    where = "In the environment"
    path = environ.get(rules.path_variable)
    content = load_json(Path(path), rules.path_variable) if path else None
    try:
        place = place.check(rules.place, rules.project)
        beside = from_variables(rules, environ, place, beside_file=True)
        if content is None:
            if dialect == "lmcache":
                return from_keys(rules, lmcache.gather(environ), place)
            if dialect == "vllm":
                raise ConfigError(f"set {rules.path_variable} to vLLM's JSON file.")
            return from_variables(rules, environ, place)
    except ConfigError as error:
        raise _told(error, where, dialect) from error.__cause__
    return _read(dialect, content, place, f"In the config file {path}", file=True, also=beside)


def _read(
    dialect: Dialect,
    given: Mapping[str, object],
    place: Place,
    where: str,
    *,
    file: bool,
    also: Values | None = None,
) -> Values:
    rules = RULES[dialect]
    try:
        place = place.check(rules.place, rules.project)
        if dialect == "lmcache":
            given = lmcache.unpack(given)
        if dialect == "wheel":
            rules = wheel.rules_for(given, file=file)
        return from_keys(rules, given, place, also=also)
    except ConfigError as error:
        raise _told(error, where, dialect) from error.__cause__


def _told(error: ConfigError, where: str, dialect: Dialect) -> ConfigError:
    return ConfigError(f"{where} (dialect {dialect!r}): {error}")
