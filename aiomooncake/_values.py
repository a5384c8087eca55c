"""Parsing and checking of single settings: sizes, addresses, numbers, switches.

All that checks raises :class:`~aiomooncake.errors.ConfigError` with the field's name, the value
(its secrets masked) and what would be right; for what a verb was given, see :func:`as_argument`.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import operator
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Final, SupportsIndex, TypeVar

from aiomooncake.errors import ConfigError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

__all__ = [
    "as_argument",
    "bad_value",
    "check_keys",
    "check_text",
    "mask_secrets",
    "nearest",
    "parse_flag",
    "parse_integer",
    "parse_port",
    "parse_seconds",
    "parse_size",
    "size_argument",
    "split_address",
    "split_host",
]

_MAX_SIZE: Final = 2**63 - 1
"""The engine keeps sizes in 64 bits; no memory reaches the upper half of them."""

_SIZE: Final = re.compile(
    r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(?:([kmgt])(?:i?b|i)?|b)?", re.ASCII | re.IGNORECASE
)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_DIGITS: Final = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_HOST: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?", re.ASCII)
_PORT: Final = re.compile(r"[0-9]{1,5}", re.ASCII)
_SCHEMES: Final = frozenset(
    {"etcd", "redis", "k8s", "memory", "local", "mooncake", "mooncakestore"}
)
_COLONS_OF_PORTS: Final = 2  # host:port:port; an IPv6 address has more, or two in a row
_TRUE: Final = frozenset({"1", "true", "yes", "on", "enable", "enabled"})
_FALSE: Final = frozenset({"0", "false", "no", "off", "disable", "disabled"})

_USERINFO: Final = re.compile(r"^([a-z][a-z0-9+.-]*://)?.*@", re.IGNORECASE | re.DOTALL)
_SECRET_QUERY: Final = re.compile(
    r"([?&;#][^=&;]*(?:pass|pwd|token|secret|credential|auth|key|sig)[^=&;]*=)[^&;#]*",
    re.IGNORECASE,
)
_MAX_SHOWN: Final = 120

_MAX_PORT: Final = 65535
_LEAST_SECONDS: Final = 0.001


def mask_secrets(text: str) -> str:
    """Return an address or URL without its user, password and secret query values."""
    return _SECRET_QUERY.sub(r"\1***", _USERINFO.sub(r"\1***@", text))


def bad_value(field: str, value: object, want: str) -> ConfigError:
    """Build the error for a setting that is wrong: its field, its value, what would be right."""
    # A URL may stand in a list or be bytes; at its place its secrets are found all the same.
    shown = repr(mask_secrets(value)) if isinstance(value, str) else mask_secrets(repr(value))
    if len(shown) > _MAX_SHOWN:
        shown = f"{shown[:_MAX_SHOWN]}…"
    stop = "" if want.endswith("?") else "."
    return ConfigError(f"{field}={shown} is not usable: {want}{stop}")


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that a mistyped one most likely means, or None."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def check_keys(value: object, *, field: str) -> Mapping[str, object]:
    """Return a mapping whose keys are texts, refusing everything else without showing it."""
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise ConfigError(f"{field} is a {kind}; give a mapping from keys to values.")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{field} has the key {key!r}, which is no text.")
    return value


def parse_size(value: object, *, field: str) -> int:
    """Turn a size into bytes.

    Every spelling of a unit means a power of 1024, as in the engine: ``"4gb"``, ``"4 GB"``,
    ``"4GiB"`` and ``"4g"`` are the same; ``k``, ``m``, ``g`` and ``t`` exist, in either case.

    Args:
        value: an integer, a text with digits, an optional fraction and an optional unit, or a float
            without a fraction.
        field: what the size is for; it starts the error text.

    Returns:
        The size in bytes, 0 or more.

    Raises:
        ConfigError: if it is no size, is negative, or is not a whole number of bytes.
    """
    size = _exact_size(value)
    if size is None:
        raise bad_value(
            field, value, 'give bytes as an integer, or a text such as "512MiB", "4gb" or "1.5g"'
        )
    if size.denominator != 1:
        raise bad_value(field, value, f"it comes to {float(size)} bytes; give whole bytes")
    if not 0 <= size <= _MAX_SIZE:
        raise bad_value(field, value, "a size lies between 0 and 2**63 - 1 bytes")
    return int(size)


def _exact_size(value: object) -> Fraction | None:
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        return match and Fraction(match[1]) * 1024 ** _POWERS[(match[2] or "").lower()]
    return _exact_number(value)


def _exact_number(value: object) -> Fraction | None:
    if isinstance(value, str):
        return Fraction(value.strip()) if _DIGITS.fullmatch(value.strip()) else None
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return Fraction(value) if math.isfinite(value) else None
    # NumPy's integers are integers too, its arrays only look like it.
    if not isinstance(value, SupportsIndex):
        return None
    try:
        return Fraction(operator.index(value))
    except TypeError:
        return None


def parse_integer(value: object, *, field: str, least: int, most: int | None = None) -> int:
    """Turn an integer, or a text of one, into an int within its bounds (both included)."""
    bounds = f"at least {least}" if most is None else f"between {least} and {most}"
    want = f"give an integer {bounds}"
    number = _exact_number(value)
    if number is None or number.denominator != 1:
        raise bad_value(field, value, want)
    if number < least or (most is not None and number > most):
        raise bad_value(field, value, want)
    return int(number)


def parse_port(value: object, *, field: str) -> int:
    """Turn a TCP port, or a text of one, into an int between 1 and 65535."""
    return parse_integer(value, field=field, least=1, most=_MAX_PORT)


def parse_seconds(value: object, *, field: str) -> float:
    """Turn a duration, or a text of one, into seconds; at least 1 ms, the engine's resolution."""
    want = "give seconds, at least 0.001"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise bad_value(field, value, want)
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        raise bad_value(field, value, want) from None
    if not math.isfinite(seconds) or seconds < _LEAST_SECONDS:
        raise bad_value(field, value, want)
    return seconds


def parse_flag(value: object, *, field: str) -> bool:
    """Turn a switch, as environments and files spell it, into a bool."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise bad_value(field, value, "give true or false (also 1/0, yes/no, on/off)")


def as_argument(check: Callable[[], T], verb: str, rank: int | str | None) -> T:
    """Check what a verb was given, as a setting is checked.

    Raises:
        InvalidArgumentError: What the check has against it.
    """
    try:
        return check()
    except ConfigError as exc:
        raise InvalidArgumentError(f"{verb}: {exc}", rank=rank) from None


def size_argument(size: object, verb: str, what: str, rank: int | str | None) -> int:
    """Turn a size that a verb was given into bytes.

    Raises:
        InvalidArgumentError: It is none.
    """
    return as_argument(partial(parse_size, size, field=what), verb, rank)


def check_text(value: object, *, field: str, spaces: bool = False) -> str:
    """Return a text stripped at its ends, refusing control characters and, mostly, spaces."""
    if not isinstance(value, str):
        raise bad_value(field, value, "give a text")
    text = value.strip(" ")
    if text.isascii() and text.isprintable() and (spaces or " " not in text):
        return text  # most texts, and quicker than all the checks
    if any(char < " " or char == "\x7f" for char in text):
        raise bad_value(field, value, "it holds a control character, such as NUL or a newline")
    if any("\ud800" <= char <= "\udfff" for char in text):
        # Such as bytes of the environment that are no UTF-8; the binding's error shows them whole.
        raise bad_value(field, value, "it is no valid Unicode")
    if not spaces and any(char.isspace() for char in text):
        raise bad_value(field, value, "it holds a space")
    return text


def split_address(text: str, *, field: str) -> tuple[str, int]:
    """Split ``"host:port"`` or ``"[v6 address]:port"``.

    Args:
        text: the address.
        field: what the address is for; it starts the error text.

    Returns:
        The host, without brackets, and the port.

    Raises:
        ConfigError: if there is no port or no usable host, or an IPv6 address has no brackets.
    """
    host, port = split_host(text, field=field)
    if port is None:
        raise bad_value(field, text, f'the port is missing; give it as in "{text.strip()}:50051"')
    return host, port


def split_host(text: str, *, field: str) -> tuple[str, int | None]:
    """Split a host with or without a port, as :func:`split_address` does."""
    address = check_text(text, field=field)
    if address.startswith("["):
        host, bracket, rest = address[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise bad_value(field, text, 'write an IPv6 address as in "[::1]:50051"')
        if not _is_v6(host):
            raise bad_value(field, text, f"{host!r} is not an IPv6 address")
    else:
        if "@" in address:
            raise bad_value(field, text, "there is no user or password in host:port")
        if address.count(":") > 1:
            raise bad_value(field, text, _why_colons(address))
        host, colon, rest = address.partition(":")
        if not _HOST.fullmatch(host):
            raise bad_value(field, text, 'give host:port, as in "10.0.0.1:50051"')
        rest = colon + rest
    if not rest:
        return host, None
    if not _PORT.fullmatch(rest[1:]) or not 1 <= int(rest[1:]) <= _MAX_PORT:
        raise bad_value(field, text, "the port is a number between 1 and 65535")
    return host, int(rest[1:])


def _why_colons(address: str) -> str:
    scheme = address.partition(":")[0].lower()
    if scheme in _SCHEMES:
        return f'did you mean "{scheme}://"?'
    if "::" in address or address.count(":") > _COLONS_OF_PORTS:
        return 'an IPv6 address stands in brackets, as in "[::1]:50051"'
    return 'there is a colon too many: give host:port, as in "10.0.0.1:50051"'


def _is_v6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
