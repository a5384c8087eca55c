"""How tensors are split along axes of parallelism, and what their shards are stored as.

A shard is a value of its own, named by its axes. Beside the shards of a tensor that is split for
ranks lies a manifest, by which readers put the whole together, or split it anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from aiomooncake._tensor_format import Axis, Header, axes_of, manifest, manifest_key, shard_key
from aiomooncake._tensor_memory import Source, shard_header, split
from aiomooncake.engine.inmemory.tensors import packed
from aiomooncake.errors import InvalidArgumentError

__all__ = [
    "WRITERS_MANIFEST",
    "Request",
    "Values",
    "has",
    "name_of",
    "read_axes",
    "read_request",
    "writer_key",
]

Values = list[tuple[str, bytes]]
"""Keys, and what is to be stored under them."""

WRITERS_MANIFEST: Final = "__writer_manifest"
"""What is behind the key of the manifest of writers' parts."""

# A dimension below 0 is to the binding what one beyond them all is: nothing is split by it, and a
# reader is given what has the name.
_NO_DIM: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Request:
    """How a tensor is to be stored.

    Attributes:
        axes: Which shard, in the order in which the axes were given; of a whole tensor none.
        writer: Whether it is a writer's part, which is named otherwise.
    """

    axes: tuple[Axis, ...] = ()
    writer: bool = False

    @property
    def tp_axis(self) -> Axis | None:
        """The axis along which it is split."""
        return next((axis for axis in self.axes if axis.kind == "tp"), None)

    def values(self, key: str, source: Source) -> Values | None:
        """Make what is stored of a tensor; None if it can't be split so."""
        axis = self.tp_axis
        try:
            # The only axis of a shard stands for what is given; beside others, for a part of it.
            if axis is not None and (self.writer or len(self.axes) > 1):
                part = split(source, axis.size, axis.split_dim or 0)[axis.rank][2]
                header = Header(part.dtype, part.shape, source.shape, self.axes)
            else:
                part, header = source, shard_header(source, self.axes)
        except ValueError:
            return None
        name = writer_key(key, axis) if axis and self.writer else name_of(key, self.axes)
        found = [(name, packed(header, part))]
        if axis is not None:
            beside = key + WRITERS_MANIFEST if self.writer else manifest_key(key)
            found.append((beside, manifest(header, axis)))
        return found

    def values_of_memory(self, key: str, source: Source) -> Values | None:
        """Make what is stored of a tensor in memory: the shards of all ranks, and no manifest."""
        axis = self.tp_axis
        if axis is None or self.writer:
            return self.values(key, source)
        try:
            parts = split(source, axis.size, axis.split_dim or 0)
        except ValueError:
            return None
        found = []
        for place, header, part in parts:
            axes = tuple(replace(a, rank=place.rank) if a is axis else a for a in self.axes)
            found.append((name_of(key, axes), packed(replace(header, axes=axes), part)))
        return found


def name_of(key: str, axes: tuple[Axis, ...]) -> str:
    """Name a shard; a whole tensor is named by the key itself."""
    return shard_key(key, axes_of(axes)) if axes else key


def writer_key(key: str, axis: Axis) -> str:
    """Name a writer's part."""
    return f"{key}__writer_{axis.rank}of{axis.size}_sd{axis.split_dim}"


def has(given: Any, *names: str) -> bool:
    """Tell whether an object of the caller's looks like the binding's own."""
    return all(hasattr(given, name) for name in names)


def _is_negative(dim: Any) -> bool:
    return isinstance(dim, int) and dim < 0


def read_axes(parallelism: Any) -> tuple[Axis, ...] | None:
    """Read the axes of a ``TensorParallelism``, or of what looks like one; None if they are bad."""
    if not has(parallelism, "axes"):
        return None
    try:
        axes = tuple(
            Axis(
                given.kind.lower(),
                given.rank,
                given.size,
                _NO_DIM if _is_negative(given.split_dim) else given.split_dim,
                given.expert_id,
                given.stage_id,
            )
            for given in parallelism.axes
            if has(given, "kind", "rank", "size")
        )
        axes_of(axes)
    except InvalidArgumentError:
        return None
    return axes if len(axes) == len(parallelism.axes) else None


def read_request(parallelism: Any, writer_partition: Any) -> Request | None:
    """Read how a tensor is to be stored; None for what is refused."""
    if writer_partition is None:
        axes = () if parallelism is None else read_axes(parallelism)
        return None if axes is None else Request(axes)
    given = writer_partition
    if parallelism is not None or not has(given, "rank", "size", "split_dim"):
        return None
    try:
        return Request((Axis("tp", given.rank, given.size, given.split_dim),), writer=True)
    except InvalidArgumentError:
        return None
