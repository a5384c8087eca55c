"""Calls of the binding made safe and right: memory laid out, a key given twice answered twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from aiomooncake.memory import gather, holds_objects

__all__ = ["are_keys", "call_native", "has_bytes", "is_buffer", "is_key"]

# The binding's names of the first arguments of the calls below.
_VALUE: Final = ("key", "value")
_VALUES: Final = ("keys", "values")
_NAMES: Final[Mapping[str, Sequence[str]]] = {
    "put": _VALUE,
    "upsert": _VALUE,
    "put_batch": _VALUES,
    "upsert_batch": _VALUES,
    "put_parts": (),
    "upsert_parts": (),
    "batch_get_buffer": ("keys",),
    "batch_get_into": ("keys", "buffer_ptrs", "sizes"),
    "batch_get_into_multi_buffers": ("keys", "all_buffer_ptrs", "all_sizes"),
}

# Up to here a copy of strided memory is made in one step, which holds the GIL.
_ONE_STEP: Final = 64 * 1024


def is_key(key: object) -> bool:
    """Whether a key can be stored; of any other one the binding says what is wrong with it."""
    return type(key) is str and bool(key) and (key.isascii() or _is_unicode(key))


def are_keys(keys: object) -> bool:
    """Whether this is a list, not an empty one, of nothing but keys that can be stored."""
    return isinstance(keys, (list, tuple)) and bool(keys) and all(map(is_key, keys))


def is_buffer(value: Any) -> bool:
    """Whether a value is memory with bytes in it, or with none; not of Python objects."""
    try:
        return not holds_objects(memoryview(value))
    except (TypeError, ValueError, BufferError):
        return False


def has_bytes(value: Any) -> bool:
    """Whether a value can be stored; of any other one the binding says what is wrong with it."""
    if type(value) is bytes:
        return bool(value)
    return is_buffer(value) and bool(memoryview(value).nbytes)


def call_native(
    method: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Make a call of the binding; blocking, and what it answers.

    The binding ignores strides, counts items of arrays for bytes, and crashes on a part that is
    no memory. Of a key given twice to a call that reads into several places, the engine fills one
    place only.

    Args:
        method: The binding's method, or what stands before it.
        name: Its name.
        args: Its arguments.
        kwargs: Those given by name.

    Raises:
        TypeError: As the binding raises it; also for a part that is no memory.
    """
    names = _NAMES.get(name)
    if names is None:
        return method(*args, **kwargs)
    given, named = _by_position(names, args, kwargs)
    if name.startswith("batch_get"):
        return _once_per_key(method, len(names), given, named)
    if names is _VALUES:
        if len(given) > 1 and isinstance(given[1], (list, tuple)):
            given[1] = list(map(_as_bytes, given[1]))
    elif names is _VALUE:
        given[1:2] = map(_as_bytes, given[1:2])
    else:
        given[1:] = map(_as_bytes, given[1:])
    return method(*given, **named)


def _by_position(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    given, named = list(args), dict(kwargs)
    for name in names[len(given) :]:
        if name not in named:
            break
        given.append(named.pop(name))
    return given, named


def _as_bytes(value: Any) -> Any:
    """Lay memory out as the bytes that it holds."""
    if type(value) is bytes:
        return value
    if not is_buffer(value):
        raise TypeError(f"a value is bytes or has the buffer protocol, not {type(value).__name__}")
    view = memoryview(value)
    if view.c_contiguous:
        if (view.ndim, view.itemsize) == (1, 1):
            return value
        # Formats that memoryview does not know, structures say, are copied.
        with contextlib.suppress(TypeError, ValueError, NotImplementedError):
            return view.cast("B")
    return view.tobytes() if view.nbytes <= _ONE_STEP else gather(view).keep


def _once_per_key(
    method: Callable[..., Any], columns: int, given: Sequence[Any], named: Mapping[str, Any]
) -> Any:
    """Make one call, or as many as the key that is given most often.

    Args:
        method: What to call.
        columns: How many of the arguments have an entry per key, the keys among them.
        given: The arguments.
        named: Those given by name.
    """
    per_key, rest = given[:columns], given[columns:]
    keys: Any = per_key[0] if len(per_key) == columns else None
    if not _can_repeat(keys, per_key) or len(set(keys)) == len(keys):
        return method(*given, **named)
    answers: list[Any] = [None] * len(keys)
    left = list(range(len(keys)))
    while left:
        places: dict[str, int] = {}
        for place in left:
            places.setdefault(keys[place], place)
        now = [[column[place] for place in places.values()] for column in per_key]
        for place, answer in zip(places.values(), method(*now, *rest, **named), strict=True):
            answers[place] = answer
        left = [place for place in left if places[keys[place]] != place]
    return answers


def _can_repeat(keys: Any, per_key: Sequence[Any]) -> bool:
    """Whether the arguments are lists of one length, of keys; else the binding refuses them."""
    return are_keys(keys) and all(
        isinstance(column, (list, tuple)) and len(column) == len(keys) for column in per_key
    )


def _is_unicode(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True
