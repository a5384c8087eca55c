"""Tensors in memory: what torch, NumPy and the buffer protocol have, and what is made of values."""

from __future__ import annotations

import ctypes
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

from aiomooncake._buffers import address_of, address_of_bytes
from aiomooncake._tensor_format import MAX_DIMS, NAMED, Axis, Dtype, Header
from aiomooncake.errors import InvalidArgumentError, SerializationError
from aiomooncake.memory import Block, gather

if TYPE_CHECKING:
    import torch

__all__ = [
    "Elements",
    "Like",
    "Source",
    "block_of",
    "decode",
    "dtype_of",
    "import_of",
    "is_of_torch",
    "join",
    "memory_at",
    "owned",
    "shard_header",
    "source_of",
    "split",
]

Like = Literal["torch", "numpy"]
"""The library whose tensors are made."""

# Letters of native formats in the buffer protocol; how wide they are the buffer itself tells.
_LETTERS: Final = (
    dict.fromkeys("bhilqn", "int") | dict.fromkeys("BHILQN", "uint") | dict.fromkeys("efd", "float")
)
_FAKE: Final = (
    "torch's FakeTensorMode is active, in which tensors have no elements; call it outside of that "
    "mode"
)


# --- what is stored ---------------------------------------------------------------------------


class Source(ABC):
    """A tensor of the caller.

    Attributes:
        dtype: Type of its elements.
        shape: Its shape.
        contiguous: Whether its elements lie in memory as in a value.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    contiguous: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def narrow(self, dim: int, start: int, length: int) -> Source:
        """Take a part of it along a dimension; no copy."""

    @abstractmethod
    def block(self) -> Block:
        """Find its elements in C order; a copy (for worker threads) unless it is contiguous."""

    def header(self) -> Header:
        """Describe it as a whole tensor."""
        return Header(self.dtype, self.shape, self.shape)

    def to_bytes(self) -> bytes:
        """Copy its elements out."""
        block = self.block() if self.nbytes else None
        return b"" if block is None else ctypes.string_at(block.address, block.nbytes)


class _Tensor(Source):
    """A ``torch.Tensor``."""

    def __init__(self, tensor: torch.Tensor, dtype: Dtype) -> None:
        self._tensor = tensor
        self.dtype = dtype
        self.shape = tuple(tensor.shape)
        self.contiguous = tensor.is_contiguous() and not tensor.is_neg()

    def narrow(self, dim: int, start: int, length: int) -> Source:
        return _Tensor(self._tensor.narrow(dim, start, length), self.dtype)

    def block(self) -> Block:
        # The elements of a view that is only marked as negative are not the bytes in memory.
        tensor = self._tensor.resolve_neg().contiguous()
        return Block(tensor.data_ptr(), self.nbytes, tensor, mutable=self.contiguous)


class _Array(Source):
    """Anything with the buffer protocol: a NumPy array, mostly."""

    def __init__(self, value: Any, view: memoryview, dtype: Dtype) -> None:
        self._value = value
        self._view = view
        self.dtype = dtype
        self.shape = tuple(view.shape or ())
        self.contiguous = view.c_contiguous

    def narrow(self, dim: int, start: int, length: int) -> Source:
        np = numpy_of()
        index = (*(slice(None),) * dim, slice(start, start + length))
        part: Any = np.asarray(self._value)[index]
        return _Array(part, memoryview(part), self.dtype)

    def block(self) -> Block:
        if not self.contiguous:
            return gather(self._view)
        mutable = type(self._view.obj) is not bytes
        return Block(address_of(self._view), self.nbytes, self._view, mutable=mutable)


class Elements(Source):
    """Elements that were read from a file."""

    def __init__(self, header: Header, elements: bytes) -> None:
        self._elements = elements
        self.dtype = header.dtype
        self.shape = header.shape
        self.contiguous = True

    def narrow(self, dim: int, start: int, length: int) -> Source:
        raise NotImplementedError

    def block(self) -> Block:
        return block_of(self._elements)


def block_of(value: bytes) -> Block:
    """Find the memory of ``bytes``."""
    return Block(address_of_bytes(value), len(value), value, mutable=False)


def source_of(value: Any, *, verb: str, key: str, rank: int | str | None) -> Source:
    """Look at what a caller wants stored.

    Raises:
        InvalidArgumentError: No tensor, or one that has no place in a value as it is.
    """
    torch: Any = sys.modules.get("torch")
    of_torch: Any = getattr(torch, "Tensor", ())  # nobody has one where torch was not imported
    source: Source
    try:
        if isinstance(value, of_torch):
            dtype = _torch_dtype(value, torch)
            tensor = _detached(value)
            _check_storage(tensor)
            source = _Tensor(tensor, dtype)
        else:
            view = memoryview(value)
            source = _Array(value, view, _format_dtype(view))
        if len(source.shape) > MAX_DIMS:
            raise ValueError(
                f"it has {len(source.shape)} dimensions, and values {MAX_DIMS} at most"
            )
        return source
    except (TypeError, ValueError, BufferError, RuntimeError) as exc:  # the last is torch's
        raise InvalidArgumentError(
            f"{verb} of {key!r} can't store {_name_of(value)} as a tensor: {exc}",
            key=key,
            rank=rank,
        ) from None


def _name_of(value: object) -> str:
    kind = type(value)
    dtype = getattr(value, "dtype", None)
    return f"a value of type {kind.__name__}" if dtype is None else f"{kind.__name__} of {dtype}"


def _torch_dtype(tensor: torch.Tensor, torch: Any) -> Dtype:
    if tensor.device.type != "cpu":
        # Not copied here: a copy on a worker thread would not wait for the caller's CUDA stream.
        raise ValueError(f"it is on {tensor.device}, not in memory of the CPU; pass tensor.cpu()")
    if tensor.is_nested:
        raise ValueError("it is nested; pass its parts (tensor.unbind()), each under its own key")
    if tensor.layout != torch.strided:
        raise ValueError(f"its layout is {tensor.layout}; pass tensor.to_dense()")
    return _known(str(tensor.dtype).removeprefix("torch."))


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.detach()
    except AssertionError:  # torch's, of a tensor that has elements
        raise ValueError(_FAKE) from None


def _check_storage(tensor: torch.Tensor) -> None:
    """Refuse what says that it is on the CPU, and has no memory there that can be read.

    Such are the tensors of ``FakeTensorMode`` and of ``torch.func``'s transforms, wrappers that
    have another tensor inside, and those whose storage was freed.
    """
    cure = "pass a tensor that has its elements in memory of the CPU"
    try:
        storage = tensor.untyped_storage()
        device = storage.device.type
        address = storage.data_ptr() if device == "cpu" else 0
        room = storage.nbytes()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((size - 1) * step for size, step in steps)
    except RuntimeError as exc:
        raise ValueError(f"it has no memory of its own ({exc}); {cure}") from None
    if device != "cpu":
        raise ValueError(
            f"its storage is on {device}, not in memory of the CPU; {cure}, outside of "
            "FakeTensorMode"
        )
    if tensor.numel() and (not address or (last + 1) * tensor.element_size() > room):
        raise ValueError(f"it has no memory of its own for all its elements; {cure}")


def _format_dtype(view: memoryview) -> Dtype:
    letter = view.format
    if letter[:1] in {"@", "=", "<" if sys.byteorder == "little" else ">"}:
        letter = letter[1:]
    kind = "bool" if letter == "?" else _LETTERS.get(letter, "")
    if letter[:1] in {"<", ">", "!"} and letter[1:] in _LETTERS:
        raise ValueError(
            f"the format of its buffer is {view.format!r}, which is not this machine's byte order; "
            'pass array.astype(array.dtype.newbyteorder("="))'
        )
    if not kind:
        raise ValueError(
            f"the format of its buffer is {view.format!r}, and Mooncake has {', '.join(NAMED)}"
        )
    return _known(kind if kind == "bool" else f"{kind}{8 * view.itemsize}")


def _known(name: str) -> Dtype:
    try:
        return NAMED[name]
    except KeyError:
        raise ValueError(f"Mooncake has no {name}; it has {', '.join(NAMED)}") from None


def dtype_of(dtype: Any) -> Dtype:
    """Find the type that a ``torch.dtype``, a NumPy type or a name means.

    Raises:
        InvalidArgumentError: There is no such type, or it is torch's alone and was given by name.
    """
    name = str(dtype).removeprefix("torch.")
    try:
        if name not in NAMED and not is_of_torch(dtype):
            name = numpy_of().dtype(dtype).name
        found = _known(name)
    except (TypeError, ValueError) as exc:
        raise InvalidArgumentError(f"dtype={dtype!r} is not usable: {exc}") from None
    if not found.in_numpy and not is_of_torch(dtype):
        raise InvalidArgumentError(
            f"dtype={dtype!r} is not usable: NumPy has no {name}; pass torch.{name}"
        )
    return found


def is_of_torch(dtype: object) -> bool:
    """Tell whether a type of elements is one of torch."""
    return type(dtype).__module__.startswith("torch")


def split(source: Source, size: int, dim: int) -> list[tuple[Axis, Header, Source]]:
    """Split a tensor into shards of the same size: no copies.

    Raises:
        ValueError: It can't be split so.
    """
    ndim = len(source.shape)
    if not -ndim <= dim < ndim:
        raise ValueError(f"it has {ndim} dimensions, and split_dim={dim} is none of them")
    dim %= ndim
    length, rest = divmod(source.shape[dim], size)
    if rest:
        raise ValueError(
            f"dimension {dim} of {source.shape[dim]} elements can't be split into {size} equal "
            "shards"
        )
    shards = []
    for rank in range(size):
        axis = Axis("tp", rank, size, split_dim=dim)
        part = source.narrow(dim, rank * length, length)
        shards.append((axis, Header(part.dtype, part.shape, source.shape, (axis,)), part))
    return shards


def shard_header(source: Source, axes: tuple[Axis, ...]) -> Header:
    """Describe a tensor as the shard that it is."""
    header = source.header()
    whole = list(header.shape)
    for axis in axes:
        if axis.split_dim is not None:
            if axis.split_dim >= len(whole):
                raise ValueError(f"it has {len(whole)} dimensions, so {axis!r} does not fit it")
            whole[axis.split_dim] *= axis.size
    return replace(header, whole=tuple(whole), axes=axes)


# --- what is read -----------------------------------------------------------------------------


def torch_of() -> Any:
    """Import torch.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import torch
    except ImportError as exc:
        raise ImportError(
            "reading a tensor needs PyTorch, which can't be imported here "
            f"({exc}): pip install 'aiomooncake[torch]', or ask for like=\"numpy\""
        ) from exc
    return torch


def numpy_of() -> Any:
    """Import NumPy.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import numpy as np
    except ImportError as exc:
        raise ImportError(
            "arrays, and buffers that are split for ranks, need NumPy, which can't be imported "
            f"here ({exc}): pip install numpy"
        ) from exc
    return np


_IMPORTS: Final = {"torch": torch_of, "numpy": numpy_of}


def import_of(like: Like) -> Any:
    """Find what imports the library that makes the tensors.

    Raises:
        InvalidArgumentError: No such library.
    """
    try:
        return _IMPORTS[like]
    except (KeyError, TypeError):
        raise InvalidArgumentError(f'like= is "torch" or "numpy", not {like!r}') from None


def owned(value: bytes) -> Any:
    """Make memory that a tensor may own of a value that was read.

    Nobody else has seen this ``bytes`` object, and nobody but the tensor will.
    """
    return memory_at(address_of_bytes(value), len(value), value)


def memory_at(address: int, nbytes: int, keep: object) -> Any:
    """Make a writable buffer of memory that lives as long as what keeps it."""
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    memory.keep = keep  # type: ignore[attr-defined]  # arrays have room for it
    return memory


def decode(header: Header, memory: Any, like: Like, *, key: str) -> Any:
    """Make a tensor that lies in writable memory, behind its header; no copy.

    Raises:
        SerializationError: The library does not have its type, or can't have its shape.
        InvalidArgumentError: ``FakeTensorMode`` is active.
    """
    try:
        return _decode(header, memory, like, key=key)
    except AssertionError:  # torch's, of a tensor that has elements
        raise InvalidArgumentError(f"the tensor {key!r} can't be made: {_FAKE}", key=key) from None
    except (ValueError, RuntimeError) as exc:  # without elements, and of more than 64 bits
        raise SerializationError(
            f"the tensor {key!r} of shape {header.shape} can't be made: {exc}", key=key
        ) from None


def _decode(header: Header, memory: Any, like: Like, *, key: str) -> Any:
    dtype, count = header.dtype, math.prod(header.shape)
    if like == "numpy":
        if not dtype.in_numpy:
            raise SerializationError(
                f"the tensor {key!r} is of {dtype.name}, which NumPy has not; read it with "
                'like="torch"',
                key=key,
            )
        np = numpy_of()
        if not count:
            return np.empty(header.shape, dtype.name)
        return np.frombuffer(memory, dtype.name, count, header.offset).reshape(header.shape)
    torch = torch_of()
    kind = getattr(torch, dtype.name, None)
    if kind is None:
        raise SerializationError(
            f"the tensor {key!r} is of {dtype.name}, which torch {torch.__version__} has not; "
            "install a newer one",
            key=key,
        )
    if not count:
        return torch.empty(header.shape, dtype=kind)
    flat = torch.frombuffer(memory, dtype=kind, count=count, offset=header.offset)
    return flat.reshape(header.shape)


def join(parts: Sequence[Any], dim: int, like: Like) -> Any:
    """Put shards together; a copy (for worker threads)."""
    if like == "numpy":
        return numpy_of().concatenate(parts, axis=dim)
    return torch_of().cat(list(parts), dim)
