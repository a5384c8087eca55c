"""Values as other projects spell them: parsers for sizes, switches and names."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from aiomooncake._settings import SETTINGS
from aiomooncake._values import bad_value, parse_flag, parse_size

if TYPE_CHECKING:
    from aiomooncake._settings import Parse

__all__ = ["flag", "is_unset", "json_flag", "loose_text", "size"]

_NUMBER: Final = re.compile(r"(\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})\s*([a-z]*)", re.ASCII)
_POWERS: Final = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def is_unset(value: object) -> bool:
    """Say whether a value counts as not given: null, or a text with nothing in it."""
    return value is None or (isinstance(value, str) and not value.strip())


def size(field: str, units: str, *, fractions: bool = True) -> Parse:
    """Return the parser of a size field in one project's grammar.

    A fraction of a byte is cut off, as all these projects do.

    Args:
        field: the field of ``StoreConfig``, whose bounds hold too.
        units: what may follow the number, in lower case and separated by spaces; every unit is a
            power of 1024. Empty = bytes only.
        fractions: whether the number may have a fraction.
    """
    known = frozenset(units.split())
    number = "a number" if fractions else "a whole number"
    want = "give bytes"
    if known:
        want += f", or {number} with {', '.join(units.upper().split())}"

    def parse(value: object, name: str) -> int:
        exact: object = value
        if isinstance(value, str):
            match = _NUMBER.fullmatch(value.strip().lower())
            if match is None or (match[2] and match[2] not in known):
                raise bad_value(name, value, want)
            if "." in match[1] and not fractions:
                raise bad_value(name, value, want)
            exact = int(Fraction(match[1]) * 1024 ** _POWERS[(match[2] or "b")[0]])
        result: int = SETTINGS[field].parse(parse_size(exact, field=name), name)
        return result

    return parse


def flag(yes: str, no: str) -> Parse:
    """Return the parser of a switch that may be one of a few words, in either case."""
    words = dict.fromkeys(yes.split(), True) | dict.fromkeys(no.split(), False)

    def parse(value: object, name: str) -> bool:
        if not isinstance(value, str):
            return parse_flag(value, field=name)
        word = value.strip().lower()
        if word not in words:
            raise bad_value(name, value, f"give one of {', '.join(words)}")
        return words[word]

    return parse


def json_flag(value: object, name: str) -> bool:
    """Read a switch that the project takes by Python's truth, so that any text means true."""
    if isinstance(value, str):
        want = "give true or false without quotes; the project itself takes any text for true"
        raise bad_value(name, value, want)
    return parse_flag(value, field=name)


def loose_text(field: str) -> Parse:
    """Return the parser of a text field for which the project takes a number too."""

    def parse(value: object, name: str) -> Any:
        number = isinstance(value, int) and not isinstance(value, bool)
        return SETTINGS[field].parse(str(value) if number else value, name)

    return parse
