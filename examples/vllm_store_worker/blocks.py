"""Keys of blocks, where their bytes lie, and what was done with them; no engine is needed here."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from aiomooncake import InvalidArgumentError
from aiomooncake.errors import code_name
from examples.vllm_store_worker.interface import ReqMeta, WorkerOptions

__all__ = ["Array", "Block", "Keys", "Places", "Region", "Stats", "batches", "hit_tokens", "told"]

T = TypeVar("T")
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a request: the key it has in the store, and its number in the cache."""

    key: str
    block_id: int


class Keys:
    """The keys of blocks, in vLLM's format.

    Ranks that hold the same bytes have the same keys.
    """

    def __init__(self, options: WorkerOptions) -> None:
        replicas = options.replicas
        prefix = f"{options.cache_prefix}@" if options.cache_prefix else ""
        model = options.model.rstrip("/").split("/")[-1]
        self._all = [
            f"{prefix}{model}@tp_rank:{shard}@pcp0@dcp0@pp_rank:0@group:0@"
            for shard in range(options.tp_size // replicas)
        ]
        self._mine = self._all[options.tp_rank // replicas]
        self._turn, self._turns = options.tp_rank % replicas, replicas
        self._rank = options.tp_rank
        self._block_size = options.block_size
        self._num_blocks = options.num_blocks

    def to_save(self, request: ReqMeta, saved_tokens: int) -> list[Block]:
        """List the blocks that this rank saves for a request, after those that are saved."""
        first, end = saved_tokens // self._block_size, request.token_len_chunk // self._block_size
        # By the block's own number, so that it is the same rank's wherever a save begins.
        first += (self._turn - first) % self._turns
        return self._blocks(request, range(first, end, self._turns))

    def to_load(self, request: ReqMeta) -> list[Block]:
        """List the blocks that a request loads.

        Each rank begins with another one, so that they do not all ask the same owner first.
        """
        spec = request.load_spec
        if spec is None:
            return []
        first = spec.vllm_cached_tokens // self._block_size
        end = spec.kvpool_cached_tokens // self._block_size
        blocks = self._blocks(request, range(first, end))
        start = self._rank % len(blocks) if blocks else 0
        return blocks[start:] + blocks[:start]

    def of_all_ranks(self, hashes: Sequence[bytes]) -> list[str]:
        """List the keys that all ranks together need, hash by hash."""
        return [prefix + name for name in map(bytes.hex, hashes) for prefix in self._all]

    def leading(self, codes: Sequence[int]) -> int:
        """Count the hashes from the first one on of which every rank's block is there.

        Args:
            codes: What the engine answered for :meth:`of_all_ranks`: 1 = it is there.
        """
        for place, code in enumerate(codes):
            if code != 1:
                return place // len(self._all)
        return len(codes) // len(self._all)

    def _blocks(self, request: ReqMeta, numbers: range) -> list[Block]:
        """Name blocks of a request.

        Raises:
            InvalidArgumentError: There is no such block; its memory would be somebody else's.
        """
        ids, hashes, prefix = request.block_ids, request.block_hashes, self._mine
        try:
            blocks = [Block(prefix + hashes[number].hex(), ids[number]) for number in numbers]
        except IndexError:
            raise InvalidArgumentError(
                f"it has {len(ids)} blocks and {len(hashes)} hashes, {numbers.stop} are needed"
            ) from None
        for block in blocks:
            if not 0 <= block.block_id < self._num_blocks:
                raise InvalidArgumentError(
                    f"its block {block.block_id} is none of the cache's {self._num_blocks}"
                )
        return blocks


def hit_tokens(leading_blocks: int, block_size: int, num_tokens: int) -> int:
    """Turn leading blocks into tokens that need not be computed.

    The last token of a request is always computed, because sampling needs it.
    """
    return min(leading_blocks, (num_tokens - 1) // block_size) * block_size


@dataclass(frozen=True, slots=True)
class Region:
    """Memory to register: a layer's, or that of several layers.

    Attributes:
        address: Address of the first byte.
        nbytes: How many bytes.
        owner: What must live as long as it is registered.
    """

    address: int
    nbytes: int
    owner: Array


class Places:
    """Where the pieces of a block lie: K and V of every layer.

    Args:
        kv_caches: The layers. A layer is ``(num_blocks, …)``, a block in one piece, or has one
            dimension before that, K and V say, and a piece for each.
        num_blocks: Blocks of each layer.

    Attributes:
        regions: The memory of the layers; layers that share theirs have one.
        sizes: Bytes of each piece of a block.
        nbytes: Bytes of a block.

    Raises:
        InvalidArgumentError: A layer that is not laid out so.
    """

    def __init__(self, kv_caches: dict[str, Array], num_blocks: int) -> None:
        self.regions: list[Region] = []
        self.sizes: list[int] = []
        first: list[int] = []
        known: set[int] = set()
        for name, layer in kv_caches.items():
            address = layer.ctypes.data
            if address in known:
                continue
            known.add(address)
            pieces = _pieces(name, layer, num_blocks)
            piece = layer.nbytes // pieces
            first += range(address, address + layer.nbytes, piece)
            self.sizes += [piece // num_blocks] * pieces
            self.regions.append(Region(address, layer.nbytes, layer))
        self.nbytes = sum(self.sizes)
        self._first = np.array(first, np.int64)
        self._steps = np.array(self.sizes, np.int64)

    def of(self, block_ids: Sequence[int]) -> list[list[int]]:
        """Tell the addresses of the pieces of each block."""
        ids = np.array(block_ids, np.int64)
        addresses: list[list[int]] = (self._first + ids[:, None] * self._steps).tolist()
        return addresses


def _pieces(name: str, layer: Array, num_blocks: int) -> int:
    """Tell in how many pieces a block of a layer lies."""
    if layer.flags.c_contiguous and layer.nbytes:
        if layer.shape[0] == num_blocks:
            return 1
        if layer.ndim > 1 and layer.shape[1] == num_blocks:
            return int(layer.shape[0])
    raise InvalidArgumentError(
        f"layer {name!r} has the shape {layer.shape}; it must be contiguous, and its first or "
        f"second dimension the {num_blocks} blocks"
    )


def batches(things: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """Cut things into runs of at most so many."""
    for start in range(0, len(things), most):
        yield things[start : start + most]


def told(codes: Sequence[int]) -> str:
    """Say in words which codes of failure came how often."""
    counts = {code: codes.count(code) for code in sorted(set(codes), reverse=True) if code < 0}
    return ", ".join(f"{count} × {code} {code_name(code)}" for code, count in counts.items())


class Stats:
    """What was done, one record per call of the engine, as vLLM's metrics want it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, list[dict[str, int | float | str]]] = {}

    def record(
        self, operation: str, seconds: float, keys: int, nbytes: int, failed: int | None
    ) -> None:
        """Note a call.

        Args:
            operation: ``save_exists``, ``save_put``, ``load_get`` or ``lookup_exists``.
            seconds: How long it took.
            keys: How many it was about.
            nbytes: Bytes that it moved, or tried to.
            failed: Keys that failed; None when the call itself did.
        """
        status = "error" if failed is None else "partial_failure" if failed else "ok"
        record: dict[str, int | float | str] = {
            "duration_seconds": seconds,
            "num_keys": keys,
            "num_bytes": nbytes,
            "status": status,
            "num_failed_keys": keys if failed is None else failed,
        }
        with self._lock:
            self._records.setdefault(operation, []).append(record)

    def take(self) -> dict[str, list[dict[str, int | float | str]]]:
        """Return the records so far, and begin anew."""
        with self._lock:
            records, self._records = self._records, {}
        return records
