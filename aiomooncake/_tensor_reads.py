"""How tensors are read: which values are asked for, and what is made of them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import anyio.to_thread

from aiomooncake._buffers import new_bytes
from aiomooncake._tensor_format import (
    Axis,
    Header,
    check_index,
    check_ranks,
    check_shard,
    shard_key,
)
from aiomooncake._tensor_memory import Like, decode, import_of, join, owned
from aiomooncake.batching import Waiting
from aiomooncake.errors import (
    InvalidArgumentError,
    MooncakeError,
    ObjectNotFoundError,
    SerializationError,
)
from aiomooncake.hedging import GetLane
from aiomooncake.lanes import ReadLane

__all__ = ["OwnGets", "OwnRead", "Shards", "answered", "copied", "imported", "joined", "tensor_of"]


# Bytes that are copied on the loop itself, in 10 us; hundreds of 1 MB in a turn held it for 0.2 s.
_COPIED_HERE: Final = 64 << 10


class OwnRead(Waiting):
    """A read of a value that becomes a tensor.

    Attributes:
        shared: Whether somebody else gets the same object.
    """

    __slots__ = ("shared",)

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.shared = False


class OwnGets(GetLane):
    """Reads of values that become tensors: of a large one every caller gets its own."""

    def _join(self, item: Waiting) -> Waiting:
        joined = super()._join(item)
        if joined is not item and isinstance(item, OwnRead) and isinstance(joined, OwnRead):
            joined.shared = item.shared = True
        return joined

    def _answer(self, item: Waiting, answer: Any) -> None:
        ReadLane._answer(self, item, answer)  # noqa: SLF001  # without the shared read of large ones


class Shards(NamedTuple):
    """Which shards of a tensor are read: the ``axis`` of each; none of a tensor that is whole."""

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, tp_rank: int | None, tp_size: int | None) -> Shards:
        """Take what a caller asks for.

        Raises:
            InvalidArgumentError: No such rank.
        """
        size = 1 if tp_size is None else check_ranks(tp_size)
        ranks = range(size)
        if tp_rank is not None:
            rank = check_index(tp_rank, "tp_rank", least=0)
            if tp_size is None:
                raise InvalidArgumentError(
                    f"tp_rank={rank} needs tp_size=: for how many ranks the tensor was split"
                )
            if rank >= size:
                raise InvalidArgumentError(
                    f"tp_rank={rank} is not usable: there are ranks 0 to {size - 1} of "
                    f"tp_size={size}"
                )
            ranks = range(rank, rank + 1)
        return cls(tuple(Axis("tp", r, size, split_dim=0) for r in ranks) if size > 1 else ())

    def names(self, key: str) -> list[str]:
        """Name the values."""
        return [shard_key(key, [axis]) for axis in self.axes] or [key]

    def where(self, place: int) -> tuple[Axis, ...]:
        """Tell where the shard at a place belongs."""
        return self.axes[place : place + 1]


async def imported(like: Like) -> None:
    """Import what makes the tensors; on a thread, since torch takes seconds.

    Raises:
        ImportError: It is not installed.
    """
    load = import_of(like)
    module = sys.modules.get(like)
    if module is None or getattr(module.__spec__, "_initializing", False):
        await anyio.to_thread.run_sync(load)


def tensor_of(
    key: str,
    value: bytes | None,
    like: Like,
    *,
    verb: str,
    axes: Sequence[Axis] = (),
) -> Any:
    """Make a tensor of a value that was read; None for a miss.

    Args:
        key: Its key.
        value: The value, which nobody else has.
        like: Whose tensor.
        verb: The verb that was called.
        axes: Which shard it should be.

    Raises:
        MooncakeError: It is no such tensor.
    """
    if value is None:
        return None
    header = Header.parse(value, key)
    if axes:
        # Of shards by their ranks the caller does not say how the tensor was split.
        check_shard(header, axes, key=key, verb=verb, by_dim=verb == "get_tensor_shard")
    return decode(header, owned(value), like, key=key)


async def copied(value: Any) -> Any:
    """Copy a value that somebody else has too; what is no value is left as it is."""
    if type(value) is not bytes:
        return value
    if len(value) <= _COPIED_HERE:
        return _copy(value)
    # Both its memory and its copying take their time, and let go of the GIL.
    return await anyio.to_thread.run_sync(_copy, value)


def _copy(value: bytes) -> bytes:
    """Copy a value; whoever waits may be cancelled meanwhile, so this holds the memory of both."""
    copy, address = new_bytes(len(value))
    ctypes.memmove(address, value, len(value))
    return copy


def answered(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do the work on one key; what went wrong with it is the answer."""
    try:
        return make(*args, **kwargs)
    except MooncakeError as exc:
        return exc.with_traceback(None)  # its frames hold the values


async def joined(
    names: Sequence[str],
    values: Sequence[bytes | None],
    shards: Sequence[Any],
    like: Like,
    *,
    verb: str,
) -> Any:
    """Put the shards of a tensor together; None when none of them is there, or an error."""
    error = next((shard for shard in shards if isinstance(shard, MooncakeError)), None)
    if error is not None:
        return error
    headers = [
        Header.parse(value, name)
        for name, value in zip(names, values, strict=True)
        if value is not None
    ]
    if not headers:
        return None
    missing = [name for name, value in zip(names, values, strict=True) if value is None]
    if missing:
        return ObjectNotFoundError(
            f"{verb}: {len(missing)} of {len(names)} shards are not there, {missing[0]!r} the "
            "first of them; store all of them, or wait until they are",
            key=missing[0],
        )
    dims = {axis.split_dim for header in headers if (axis := header.tp_axis) is not None}
    if len(dims) > 1 or len({(header.dtype, header.whole) for header in headers}) > 1:
        return SerializationError(
            f"the shards {names[0]!r} to {names[-1]!r} are not of one tensor: they differ in type, "
            "in shape, or in how they were split; remove them and store it again",
            key=names[0],
        )
    (dim,) = dims
    try:
        return await anyio.to_thread.run_sync(join, list(shards), dim or 0, like)
    except (ValueError, RuntimeError, IndexError) as exc:  # NumPy's, torch's
        return SerializationError(
            f"the shards {names[0]!r} to {names[-1]!r} can't be put together: {exc}", key=names[0]
        )
