"""How tensors are stored: which values they make up, and each value as a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from aiomooncake._tensor_format import (
    HEADER_SIZE,
    Axis,
    Header,
    check_ranks,
    shard_key,
)
from aiomooncake._tensor_memory import Source, block_of, shard_header, source_of, split
from aiomooncake.errors import InvalidArgumentError, MooncakeError
from aiomooncake.memory import join
from aiomooncake.transfers import MERGED_VALUE, Transfers

if TYPE_CHECKING:
    from aiomooncake.config import ReplicateConfig

T = TypeVar("T")

__all__ = ["SLICE_KEYS", "Split", "Write", "shard_write", "sliced", "writes_of"]

# What one turn of the loop lays out of many tensors: about 2 ms.
SLICE_KEYS: Final = 256
_SLICE_BYTES: Final = 8 << 20
# Up to here a strided tensor is laid out on the loop.
_SNAPSHOT: Final = 64 * 1024


class Split(NamedTuple):
    """For how many ranks a tensor is split (None = not told), and along which dimension."""

    size: int | None
    dim: int


class Write:
    """One value to be written: the header of a tensor, and its elements."""

    __slots__ = ("_header", "_source", "config", "header", "key")

    def __init__(
        self, key: str, header: Header, source: Source, config: ReplicateConfig | None
    ) -> None:
        self.key = key
        self.header = header
        self.config = config
        self._header = header.pack()
        self._source = source

    @property
    def is_small(self) -> bool:
        """Whether it is copied on the loop, and travels with others."""
        most = MERGED_VALUE - HEADER_SIZE if self._source.contiguous else _SNAPSHOT
        return self._source.nbytes <= most

    @property
    def copied(self) -> int:
        """Bytes that are copied on the loop."""
        return self._source.nbytes if self.is_small else 0

    def value(self) -> bytes:
        """Make the whole value: quicker for a small one than what it would save."""
        return self._header + self._source.to_bytes()

    def job(self, transfers: Transfers, *, replace: bool) -> None:
        """Store it from where it is (for worker threads)."""
        blocks = [block_of(self._header), self._source.block()]
        if replace:
            transfers.put(self.key, join(blocks), self.config, replace=True)
        else:
            transfers.put_parts(self.key, blocks, self.config)

    def __repr__(self) -> str:
        return f"<Write of {self.key!r}>"


def writes_of(
    verb: str,
    key: str,
    tensor: Any,
    parts: Split,
    *,
    config: ReplicateConfig | None,
    rank: int | str | None,
) -> list[Write]:
    """Tell which values make up a tensor: one, or one for each rank that it is split for.

    Raises:
        InvalidArgumentError: No such tensor, or it can't be split so.
    """
    if parts.size is None and parts.dim != 0:
        raise InvalidArgumentError(
            f"{verb} of {key!r}: split_dim={parts.dim!r} needs tp_size=, the number of ranks to "
            "split it for",
            key=key,
            rank=rank,
        )
    shards = 1 if parts.size is None else check_ranks(parts.size)
    source = source_of(tensor, verb=verb, key=key, rank=rank)
    if shards == 1:
        return [Write(key, source.header(), source, config)]
    try:
        found = split(source, shards, parts.dim)
    except ValueError as exc:
        raise _unfit(verb, key, rank, exc) from None
    return [Write(shard_key(key, [axis]), header, part, config) for axis, header, part in found]


def shard_write(
    verb: str,
    key: str,
    shard: Any,
    axes: tuple[Axis, ...],
    *,
    config: ReplicateConfig | None,
    rank: int | str | None,
) -> Write:
    """Tell which value makes up a shard.

    Raises:
        InvalidArgumentError: No such tensor, or it does not have the axes' dimensions.
    """
    source = source_of(shard, verb=verb, key=key, rank=rank)
    try:
        header = shard_header(source, axes)
    except ValueError as exc:
        raise _unfit(verb, key, rank, exc) from None
    return Write(shard_key(key, axes), header, source, config)


def _unfit(verb: str, key: str, rank: int | str | None, exc: Exception) -> MooncakeError:
    return InvalidArgumentError(f"{verb} of {key!r}: {exc}", key=key, rank=rank)


def sliced(
    items: Sequence[T], nbytes_of: Callable[[T], int], most: int = _SLICE_BYTES
) -> Iterator[list[T]]:
    """Cut what one turn of the loop, or of the memory, can bear."""
    some: list[T] = []
    nbytes = 0
    for item in items:
        size = nbytes_of(item)
        if some and (nbytes + size > most or len(some) >= SLICE_KEYS):
            yield some
            some, nbytes = [], 0
        some.append(item)
        nbytes += size
    if some:
        yield some
