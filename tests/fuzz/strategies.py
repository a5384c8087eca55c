"""What the fuzz tests give to everything, and what may come back: a result, or a typed error.

``FUZZ=20`` in the environment makes twenty times as many examples, new ones each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import decimal
import fractions
import itertools
import os
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from aiomooncake import MooncakeError

__all__ = [
    "anything",
    "bounded",
    "chosen",
    "examples",
    "extreme_numbers",
    "odd_keys",
    "odd_text",
    "only_typed_errors",
]

FACTOR = int(os.environ.get("FUZZ", "1"))
HANG = 20.0  # seconds


def examples(count: int) -> settings:
    """Run so many examples, the same ones each time."""
    return settings(
        max_examples=count * FACTOR,
        deadline=None,
        derandomize=FACTOR == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# --- what is given ----------------------------------------------------------------------------


def chosen(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Choose one of these, which may be large: hypothesis does not show them."""
    return st.integers(0, len(values) - 1).map(lambda number: values[number])


_TEXTS = [
    "None", "nan", "1e400", "-1", "٣", "%00%ff", "../..", "{}", "[]", '"k"', "${HOME}", "*.*", "([",
    "é", "ﬀ", "1_0", "0x10", "+1", "1e3", "true", "", " ", "\0", "a\nb", "\ud800", "é\udfff",
    "x" * 5000, "[" * 3000, '{"0":' * 3000, "a" * 70_000,
]  # fmt: skip
_NUMBERS: list[Any] = [
    -1, 0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**400,
    -0.0, 5e-324, 1e308, float("nan"), float("inf"), float("-inf"), 1j,
    fractions.Fraction(1, 3), decimal.Decimal("NaN"), decimal.Decimal("1e400"),
    np.int64(-1), np.float32("nan"), np.uint64(2**64 - 1), np.bool_(1),
]  # fmt: skip

# Lone surrogates too.
odd_text = st.one_of(st.text(st.characters(exclude_categories=()), max_size=12), chosen(_TEXTS))
odd_keys = st.one_of(odd_text, st.sampled_from("klm"))
extreme_numbers: st.SearchStrategy[Any] = st.one_of(st.integers(), st.floats(), chosen(_NUMBERS))


class _Text(str):
    """A text that is not of the very type ``str``."""

    __slots__ = ()


class _BadIndex:
    def __index__(self) -> int:
        raise TypeError("no number")


class _BadArray:
    def __array__(self) -> None:
        raise TypeError("no array")


def _released() -> memoryview:
    view = memoryview(b"gone")
    view.release()
    return view


# Made anew for each example: some can't even be hashed.
_MAKERS: list[Callable[[], Any]] = [
    object,
    lambda: object,
    lambda: len,
    lambda: Ellipsis,
    lambda: NotImplemented,
    lambda: Path("/"),
    lambda: _Text("k"),
    lambda: _Text(""),
    _BadIndex,
    _BadArray,
    _released,
    lambda: memoryview(b"abcdef")[::2],
    lambda: memoryview(b""),
    lambda: array("d", [1.5]),
    lambda: np.zeros((2, 3)),
    lambda: np.zeros(0),
    lambda: np.array([None]),
    lambda: np.ma.masked,
    lambda: range(3),
    lambda: {1, 2},
    lambda: ValueError("x"),
    lambda: slice(None),
    lambda: itertools.repeat("k", 3),
    lambda: bytearray(b"mutable"),
]
_simple: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    extreme_numbers,
    odd_text,
    st.binary(max_size=8),
    chosen(_MAKERS).map(lambda make: make()),
)
anything: st.SearchStrategy[Any] = st.one_of(
    _simple,
    st.lists(_simple, max_size=3),
    st.lists(_simple, max_size=3).map(tuple),
    st.lists(_simple, max_size=3).map(iter),
    st.dictionaries(st.one_of(odd_keys, st.integers(), st.none()), _simple, max_size=3),
)


# --- what may come back -----------------------------------------------------------------------


@contextlib.contextmanager
def only_typed_errors() -> Iterator[None]:
    """Let pass what a caller may be told; everything else fails the test."""
    try:
        yield
    except (MooncakeError, TypeError, ValueError) as exc:
        # A UnicodeError is a ValueError, but one that nobody meant.
        if (isinstance(exc, UnicodeError) and not isinstance(exc, MooncakeError)) or not str(exc):
            raise AssertionError("not an error for a caller") from exc
        repr(exc)


async def bounded(work: Awaitable[Any]) -> Any:
    """Await it; a hang fails the test."""
    try:
        return await asyncio.wait_for(work, HANG)
    except asyncio.TimeoutError as exc:
        if isinstance(exc, MooncakeError):
            raise
        raise AssertionError(f"it still ran after {HANG:g} s") from exc
