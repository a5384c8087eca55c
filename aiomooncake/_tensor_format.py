"""Tensors as values: the binding's own format.

A value is a header of 304 bytes and the elements in C order (``TensorMetadata`` of upstream's
``mooncake-integration/integration_utils.h``, version 1), so that what the binding's own
``put_tensor`` writes is read here, and the other way round.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from aiomooncake.errors import InvalidArgumentError, SerializationError

__all__ = [
    "DTYPES",
    "HEADER_SIZE",
    "MAX_DIMS",
    "MAX_RANKS",
    "NAMED",
    "Axis",
    "Dtype",
    "Header",
    "Manifest",
    "axes_of",
    "check_index",
    "check_ranks",
    "check_shard",
    "has_room",
    "manifest",
    "manifest_key",
    "no_tensor",
    "ordered",
    "shard_key",
]

HEADER_SIZE: Final = 304
"""Bytes before the elements: a multiple of 16, so that they are aligned as the value is."""

_MAGIC: Final = 0x4D4F4F4E
_MANIFEST_MAGIC: Final = 0x574D414E
_VERSION: Final = 1
MAX_DIMS: Final = 8
MAX_RANKS: Final = 4096
_MAX_AXES: Final = 4
_FULL, _SHARD = 0, 1
_NO_DIMS: Final = (-1,) * MAX_DIMS

_HEADER: Final = struct.Struct("<IHHiiIIQQ8q8qII")
_AXIS: Final = struct.Struct("<6iq")
_MANIFEST: Final = struct.Struct("<IHHiiiii4x8q")

_KINDS: Final = ("dp", "tp", "ep", "pp")  # their numbers, and the order in keys


class Dtype(NamedTuple):
    """A type of elements; its place in :data:`DTYPES` is its number in headers."""

    name: str
    itemsize: int
    safetensors: str

    @property
    def in_numpy(self) -> bool:
        """Whether NumPy has it."""
        return not self.name.startswith(("bfloat", "float8"))


DTYPES: Final = (
    Dtype("float32", 4, "F32"),
    Dtype("float64", 8, "F64"),
    Dtype("int8", 1, "I8"),
    Dtype("uint8", 1, "U8"),
    Dtype("int16", 2, "I16"),
    Dtype("uint16", 2, "U16"),
    Dtype("int32", 4, "I32"),
    Dtype("uint32", 4, "U32"),
    Dtype("int64", 8, "I64"),
    Dtype("uint64", 8, "U64"),
    Dtype("bool", 1, "BOOL"),
    Dtype("float16", 2, "F16"),
    Dtype("bfloat16", 2, "BF16"),
    Dtype("float8_e4m3fn", 1, "F8_E4M3"),
    Dtype("float8_e5m2", 1, "F8_E5M2"),
)

NAMED: Final = {dtype.name: dtype for dtype in DTYPES}


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis along which a tensor is distributed, and the place of a shard on it.

    Attributes:
        kind: ``"tp"`` (tensor), ``"dp"`` (data), ``"ep"`` (expert) or ``"pp"`` (pipeline).
        rank: Which part, from 0.
        size: How many parts.
        split_dim: The dimension that is split; of ``"tp"`` only, and needed there.
        expert_id: Of ``"ep"`` only, and needed there.
        stage_id: Of ``"pp"`` only, and needed there.
    """

    kind: Literal["tp", "dp", "ep", "pp"]
    rank: int
    size: int
    split_dim: int | None = None
    expert_id: int | None = None
    stage_id: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InvalidArgumentError(
                f"an axis is of kind 'tp', 'dp', 'ep' or 'pp', not {self.kind!r}"
            )
        numbers = (self.rank, self.size, self.split_dim, self.expert_id, self.stage_id)
        if not all(number is None or _is_index(number) for number in numbers):
            raise InvalidArgumentError(f"{self!r}: all numbers of an axis are integers from 0")
        if not self.size:
            raise InvalidArgumentError(f"{self!r}: the size of an axis is at least 1")
        if not 0 <= self.rank < self.size:
            raise InvalidArgumentError(f"{self!r}: there are ranks 0 to {self.size - 1} on it")
        has = {"tp": self.split_dim, "ep": self.expert_id, "pp": self.stage_id}
        names = {"tp": "split_dim", "ep": "expert_id", "pp": "stage_id"}
        for kind, value in has.items():
            if (value is not None) != (kind == self.kind):
                what = "needs" if kind == self.kind else "takes no"
                raise InvalidArgumentError(f"an axis of kind {self.kind!r} {what} {names[kind]}=")


def _is_index(number: object) -> bool:
    return isinstance(number, int) and 0 <= number < 1 << 31  # as wide as a header has room


# --- keys -------------------------------------------------------------------------------------


def axes_of(axes: Any) -> tuple[Axis, ...]:
    """Check the axes of a shard, and put them into the order in which they stand in its key."""
    if (
        not isinstance(axes, Sequence)
        or not axes
        or not all(isinstance(axis, Axis) for axis in axes)
    ):
        raise InvalidArgumentError(
            f"a shard needs axes: a list of aiomooncake.tensors.Axis, not {axes!r:.200}"
        )
    if len({axis.kind for axis in axes}) < len(axes):
        raise InvalidArgumentError("a shard has one axis of each kind at most")
    return ordered(axes)


def ordered(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Put axes into the order in which they stand in keys."""
    return tuple(sorted(axes, key=lambda axis: _KINDS.index(axis.kind)))


def shard_key(key: str, axes: Sequence[Axis]) -> str:
    """Name the value in which the binding keeps a shard."""
    if len(axes) == 1 and axes[0].kind == "tp":
        return f"{key}_tp_{axes[0].rank}"
    for axis in axes:
        key += f"__{axis.kind}_{axis.rank}of{axis.size}"
        for mark, number in (
            ("sd", axis.split_dim),
            ("eid", axis.expert_id),
            ("sid", axis.stage_id),
        ):
            if number is not None:
                key += f"_{mark}{number}"
    return key


def manifest_key(key: str) -> str:
    """Name the value that tells the binding's readers how a tensor was split."""
    return f"{key}__parallelism_manifest"


# --- headers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says.

    Attributes:
        dtype: Type of the elements.
        shape: Shape of what is in the value.
        whole: Shape of the tensor of which it is a shard; the same for a whole one.
        axes: Where the shard belongs; empty for a whole one.
        offset: Where the elements begin.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    axes: tuple[Axis, ...] = ()
    offset: int = HEADER_SIZE

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Bytes of the value."""
        return self.offset + self.nbytes

    @property
    def tp_axis(self) -> Axis | None:
        """The axis along which it is split."""
        return next((axis for axis in self.axes if axis.kind == "tp"), None)

    def pack(self) -> bytes:
        """Write the header."""
        packed = _HEADER.pack(
            _MAGIC,
            _VERSION,
            HEADER_SIZE,
            DTYPES.index(self.dtype),
            len(self.shape),
            _SHARD if self.axes else _FULL,
            0,
            HEADER_SIZE,
            self.nbytes,
            *_dims(self.whole),
            *_dims(self.shape),
            len(self.axes),
            0,
        )
        for place, axis in enumerate(self.axes):
            extent = 0 if axis.split_dim is None else self.shape[axis.split_dim]
            dim = -1 if axis.split_dim is None else axis.split_dim
            identity = axis.expert_id or axis.stage_id or 0
            kind = _KINDS.index(axis.kind)
            packed += _AXIS.pack(kind, place, axis.rank, axis.size, dim, identity, extent)
        return packed.ljust(HEADER_SIZE, b"\0")

    @classmethod
    def parse(
        cls, value: Any, key: str, *, nbytes: int | None = None, exact: bool = True
    ) -> Header:
        """Read the header of a value.

        Args:
            value: The bytes of the value, or the first of them.
            key: Its key, for messages.
            nbytes: Bytes of the value; None = all that ``value`` has.
            exact: Whether the elements end where the value does, as the binding has it.

        Raises:
            SerializationError: It is no tensor.
        """
        head = memoryview(value)[:HEADER_SIZE]
        size = memoryview(value).nbytes if nbytes is None else nbytes
        if len(head) < HEADER_SIZE:
            raise no_tensor(key, f"it has {size} bytes, a header alone has {HEADER_SIZE}")
        magic, version, header_size, code, ndim, kind, _, offset, data_bytes, *more = (
            _HEADER.unpack_from(head)
        )
        if magic != _MAGIC:
            raise no_tensor(key, "it does not begin with a tensor's header")
        if version != _VERSION or header_size != HEADER_SIZE:
            raise no_tensor(key, f"its header is of version {version}, known is {_VERSION}")
        whole, shape = more[:MAX_DIMS], more[MAX_DIMS : 2 * MAX_DIMS]
        axis_count = more[2 * MAX_DIMS]
        if (
            not 0 <= code < len(DTYPES)
            or not 0 <= ndim <= MAX_DIMS
            or kind not in (_FULL, _SHARD)
            or axis_count > _MAX_AXES
            or min((*whole[:ndim], *shape[:ndim]), default=0) < 0
        ):
            raise no_tensor(key, "its header makes no sense")
        try:
            axes = tuple(_parse_axis(head, i) for i in range(axis_count))
        except (InvalidArgumentError, LookupError):
            raise no_tensor(key, "its header has an axis that makes no sense") from None
        for axis in axes:
            if axis.split_dim is not None and axis.split_dim >= ndim:
                raise no_tensor(key, f"its header splits dimension {axis.split_dim} of {ndim}")
        header = cls(DTYPES[code], tuple(shape[:ndim]), tuple(whole[:ndim]), axes, offset)
        fits = header.end == size if exact else header.end <= size
        if header.nbytes != data_bytes or offset < HEADER_SIZE or not fits:
            raise no_tensor(key, f"its header speaks of {offset} + {data_bytes} bytes of {size}")
        return header


def _dims(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape, *_NO_DIMS[len(shape) :])


def _parse_axis(head: memoryview, place: int) -> Axis:
    kind, _, rank, size, dim, identity, _ = _AXIS.unpack_from(
        head, _HEADER.size + place * _AXIS.size
    )
    name = _KINDS[kind]
    return Axis(
        name,  # type: ignore[arg-type]  # one of them
        rank,
        size,
        split_dim=dim if name == "tp" else None,
        expert_id=identity if name == "ep" else None,
        stage_id=identity if name == "pp" else None,
    )


def manifest(header: Header, axis: Axis) -> bytes:
    """Write what tells the binding's readers how a tensor was split."""
    return _MANIFEST.pack(
        _MANIFEST_MAGIC,
        _VERSION,
        _MANIFEST.size,
        DTYPES.index(header.dtype),
        len(header.whole),
        axis.split_dim,
        axis.size,
        0,
        *_dims(header.whole),
    )


class Manifest(NamedTuple):
    """How a tensor was split, as the first of its shards was when it was stored.

    Attributes:
        axis: The axis of the first shard.
        dtype: Type of the elements.
        whole: Shape of the tensor.
    """

    axis: Axis
    dtype: Dtype
    whole: tuple[int, ...]

    @classmethod
    def parse(cls, value: bytes) -> Manifest | None:
        """Read what :func:`manifest` wrote; None if it does not say."""
        if len(value) < _MANIFEST.size:
            return None
        magic, version, size, code, ndim, dim, count, _, *whole = _MANIFEST.unpack_from(value)
        if (magic, version, size) != (_MANIFEST_MAGIC, _VERSION, _MANIFEST.size):
            return None
        if not 0 <= dim < ndim <= MAX_DIMS or not 0 <= code < len(DTYPES) or count < 1:
            return None
        return cls(Axis("tp", 0, count, split_dim=dim), DTYPES[code], tuple(whole[:ndim]))


def no_tensor(key: str, why: str) -> SerializationError:
    return SerializationError(
        f"the value of {key!r} is no tensor: {why}; read it with get()", key=key
    )


def check_shard(header: Header, axes: Sequence[Axis], *, key: str, verb: str, by_dim: bool) -> None:
    """Refuse a value that is another shard than the one that was asked for.

    Args:
        header: Its header.
        axes: Which shard was asked for.
        key: Its key, for messages.
        verb: The verb that was called, for messages.
        by_dim: Whether it was also asked for by the dimension that is split.
    """
    # The binding's headers have them in the order in which they were given.
    asked = _shard_name(axes, by_dim=by_dim)
    found = _shard_name(ordered(header.axes), by_dim=by_dim)
    if found != asked:
        what = "ranks, sizes and split_dim" if by_dim else "sizes"
        raise InvalidArgumentError(
            f"{verb} of {key!r}: it is {found}, not {asked}; ask for the {what} that it was stored "
            "with",
            key=key,
        )


def _shard_name(axes: Sequence[Axis], *, by_dim: bool) -> str:
    parts = []
    for axis in axes:
        dim = f" by dimension {axis.split_dim}" if by_dim and axis.split_dim is not None else ""
        parts.append(f"{axis.kind} rank {axis.rank} of {axis.size}{dim}")
    return f"the shard of {', '.join(parts)}" if parts else "a whole tensor"


def has_room(shape: Sequence[int]) -> bool:
    """Tell whether a header has room for a shape."""
    return len(shape) <= MAX_DIMS and max(shape, default=0) < 1 << 63


def check_ranks(value: object) -> int:
    """Take the number of ranks that a tensor is split for."""
    number = check_index(value, "tp_size", least=1)
    if number > MAX_RANKS:  # each is a key, and the loop makes them all
        raise InvalidArgumentError(f"tp_size={number} is not usable: {MAX_RANKS} ranks at most")
    return number


def check_index(value: object, name: str, *, least: int) -> int:
    """Take a number of a rank, or of ranks."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise InvalidArgumentError(f"{name}={value!r} is not usable: give an integer from {least}")
    return number
