"""How a project's configuration becomes fields of ``StoreConfig``: keys, rules, and their reading.

A dialect is a table of :class:`Key` and a little code for what a table can't say (:class:`Rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from aiomooncake._dialects.values import is_unset
from aiomooncake._foreign import FOREIGN_KEYS
from aiomooncake._settings import KEYS, SETTINGS, Parse, check_variables
from aiomooncake._values import bad_value, nearest, parse_integer
from aiomooncake.errors import ConfigError

__all__ = ["Dialect", "Key", "Place", "Rules", "from_keys", "from_variables"]

Dialect = Literal["sglang", "vllm", "lmcache", "wheel"]
"""Whose configuration it is: SGLang's, vLLM's, LMCache's, or the engine wheel's own."""

_ALIKE: Final = 0.6
_NEAR: Final = 0.8
"""How alike (difflib's ratio) an unknown key must be to a known one to count as mistyped: where
every unknown key is an error anyway, and where keys of others may stand."""

_OWN: Final = frozenset(
    {
        "mem_pool_size", "rpc_timeout", "rpc_connect_timeout", "direct", "merge", "fail_fast",
        "max_abandoned", "threads",
    }
)  # fmt: skip
"""Fields that no project's configuration has, so that one there was meant for us."""


@dataclass(frozen=True, slots=True)
class Key:
    """One thing that a project's configuration says.

    Attributes:
        names: its keys in files and mappings; the first one that is given wins.
        into: the field of ``StoreConfig``, or a name that the rules' ``finish`` knows; empty = read
            and checked, then ignored.
        variables: the environment variables for it; the first one that is set wins.
        default: what the project takes when it is not said; None = nothing.
        variable_default: the same where it reads variables instead of a file, if that differs.
        parse: turns what was given into what is kept; by default as the field does.
        parse_variable: the same for a variable, where that differs.
        required: whether the project can't do without it.
        note: what a reader of the documentation should know.
        shown: the default for the documentation, where the value itself does not tell.
    """

    names: tuple[str, ...]
    into: str = ""
    variables: tuple[str, ...] = ()
    default: Any = None
    variable_default: Any = None
    parse: Parse | None = None
    parse_variable: Parse | None = None
    required: bool = False
    note: str = ""
    shown: str = ""

    def read(self, value: object, name: str, *, variable: bool = False) -> Any:
        """Return what is kept of a value that was given under a name."""
        parse = self.parse_variable if variable and self.parse_variable else self.parse
        if parse is None:
            parse = SETTINGS[self.into].parse
        return parse(value, name)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the process stands among the others, as far as a dialect asks.

    Attributes:
        rank: the global rank (``torch.distributed``'s), from 0.
        tp_size: tensor-parallel ranks.
        pp_size: pipeline stages.
        gpu: the physical number of the GPU, from 0.
    """

    rank: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    gpu: int | None = None

    def check(self, used: Iterable[str], whose: str) -> Place:
        """Return itself with integers, or refuse what is wrong or not ``used``."""
        given: dict[str, int] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is None:
                continue
            if spec.name not in used:
                raise bad_value(spec.name, value, f"{whose} does not use it; leave it out")
            least = 1 if spec.name.endswith("size") else 0
            given[spec.name] = parse_integer(value, field=spec.name, least=least)
        return Place(**given)


Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rules:
    """One dialect.

    Attributes:
        dialect: its name.
        project: the project's name, for texts.
        keys: what it knows.
        place: the fields of :class:`Place` that it asks for.
        path_variable: the variable that names its file.
        strict: whether the file holds nothing but these keys; else others may stand there too.
        foreign: keys of others that it allows, beside those that every dialect allows.
        finish: does what the table can't say; takes the values (by ``into``) and the place, and
            changes the values.
        no_master: what to do when no master is named, for the error.
    """

    dialect: Dialect
    project: str
    keys: tuple[Key, ...]
    place: frozenset[str] = frozenset()
    path_variable: str = "MOONCAKE_CONFIG_PATH"
    strict: bool = True
    foreign: frozenset[str] = frozenset()
    finish: Callable[[Values, Place], None] | None = None
    no_master: str = ""

    def names(self) -> dict[str, Key]:
        """Return the keys by their names in files."""
        return {name: key for key in self.keys for name in key.names}

    def variables(self) -> dict[str, Key]:
        """Return the keys by their environment variables."""
        return {name: key for key in self.keys for name in key.variables}


def from_keys(
    rules: Rules, given: Mapping[str, object], place: Place, *, also: Values | None = None
) -> Values:
    """Collect what a file or mapping says, by field.

    Args:
        rules: the dialect.
        given: the file's or mapping's content; null and empty texts count as not given.
        place: where the process stands.
        also: what the environment says beside it, by ``into``.

    Raises:
        ConfigError: for an unknown key, a bad value, or something missing.
    """
    known = rules.names()
    for name in given:
        if name not in known:
            _check_unknown(rules, name, given)
    found = dict(also or {})
    for key in rules.keys:
        for name in reversed(key.names):
            if not is_unset(given.get(name)):
                value = key.read(given[name], name)
                if key.into:
                    found[key.into] = value
    return _finish(rules, found, place, variables=False)


def from_variables(
    rules: Rules, environ: Mapping[str, str], place: Place, *, beside_file: bool = False
) -> Values:
    """Collect what environment variables say.

    Args:
        rules: the dialect.
        environ: the variables; empty ones count as not set.
        place: where the process stands.
        beside_file: only those that no key of a file can say, by ``into``, for ``from_keys``.

    Raises:
        ConfigError: for a bad value, a name that looks mistyped, or something missing.
    """
    known = rules.variables()
    check_variables(environ, (*known, rules.path_variable))
    found: Values = {}
    for key in rules.keys:
        if beside_file and key.names:
            continue
        for name in reversed(key.variables):
            if not is_unset(environ.get(name)):
                value = key.read(environ[name], name, variable=True)
                if key.into:
                    found[key.into] = value
    return found if beside_file else _finish(rules, found, place, variables=True)


def _finish(rules: Rules, found: Values, place: Place, *, variables: bool) -> Values:
    for key in rules.keys:
        if not key.into or key.into in found:
            continue
        default = key.default
        if variables and key.variable_default is not None:
            default = key.variable_default
        if default is not None:
            found[key.into] = default
        elif key.required:
            name = key.variables[0] if variables else key.names[-1]
            raise ConfigError(f"{name} is missing, and {rules.project} has no default for it.")
    if rules.finish is not None:
        rules.finish(found, place)
    if not found.get("master_server_address") and not found.get("client_server_address"):
        raise ConfigError(f"it names no master: {rules.no_master}.")
    return {name: value for name, value in found.items() if name in SETTINGS}


def _check_unknown(rules: Rules, name: str, given: Mapping[str, object]) -> None:
    """Refuse a key that the project does not know, unless it is somebody else's for sure."""
    known = rules.names()
    if name in rules.foreign:
        return
    setting = KEYS.get(name)
    if setting is not None:
        # Another project's spelling of a thing: it does nothing here, which is a trap if the right
        # spelling is not there as well.
        ours = [key for key in rules.keys if key.into == setting.field and key.names]
        if ours:
            if any(not is_unset(given.get(each)) for each in ours[0].names):
                return
            raise ConfigError(
                f"key {name!r} is not one of {rules.project}'s; did you mean {ours[0].names[0]!r}?"
            )
    if name in FOREIGN_KEYS or (setting is not None and setting.field not in _OWN):
        return
    if setting is not None:
        raise ConfigError(
            f"key {name!r} is aiomooncake's own, not {rules.project}'s; "
            f"leave it out and set it by .replace({setting.field}=…)."
        )
    meant = nearest(name, known, cutoff=_ALIKE if rules.strict else _NEAR)
    if meant is not None:
        raise ConfigError(f"key {name!r} is unknown; did you mean {meant!r}?")
    if rules.strict:
        raise ConfigError(f"key {name!r} is unknown. Known are: {', '.join(known)}.")
