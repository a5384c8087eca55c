"""What vLLM's scheduler hands to a store worker; names and fields are its own.

Of ``VllmConfig`` and ``KVCacheConfig`` only what a worker needs: :class:`WorkerOptions`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from aiomooncake import ConfigError

__all__ = ["KVRole", "LoadSpec", "MooncakeStoreConnectorMetadata", "ReqMeta", "WorkerOptions"]

KVRole = Literal["kv_both", "kv_producer", "kv_consumer"]


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Where a worker stands among the others, and how its cache is laid out.

    Attributes:
        model: Name of the model; its last part goes into every key.
        num_blocks: Blocks of each layer's cache.
        block_size: Tokens of a block.
        tp_rank: Tensor-parallel rank, of ``tp_size``.
        num_kv_heads: Heads with keys and values. With fewer of them than ranks, some ranks hold
            the same bytes: they share keys, and each saves every so many-th block.
        kv_role: ``"kv_consumer"`` saves nothing.
        cache_prefix: Keeps deployments on one master apart.
        preferred_segment: Where saved blocks go if there is room (``host:port``).
        load_recv_threads: Threads that load (vLLM: ``VLLM_MOONCAKE_LOAD_RECV_THREADS``).

    Raises:
        ConfigError: A value that can't be meant.
    """

    model: str
    num_blocks: int
    block_size: int = 16
    tp_rank: int = 0
    tp_size: int = 1
    num_kv_heads: int = 8
    kv_role: KVRole = "kv_both"
    cache_prefix: str = ""
    preferred_segment: str | None = None
    load_recv_threads: int = 1

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "tp_size", "num_kv_heads", "load_recv_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} can't be: give 1 or more")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(f"tp_rank={self.tp_rank} is none of {self.tp_size} ranks")
        if self.kv_role not in get_args(KVRole):
            raise ConfigError(f"kv_role={self.kv_role!r}: give one of {get_args(KVRole)}")
        if self.preferred_segment is not None and not self.preferred_segment.strip():
            raise ConfigError("preferred_segment is blank: give host:port, or leave it out")

    @property
    def replicas(self) -> int:
        """How many ranks hold the same bytes."""
        return max(1, self.tp_size // self.num_kv_heads)

    @property
    def saves(self) -> bool:
        """Whether this worker saves blocks."""
        return self.kv_role != "kv_consumer"


@dataclass(slots=True)
class LoadSpec:
    """What a request is to load.

    Attributes:
        vllm_cached_tokens: Tokens that the engine has already; not loaded.
        kvpool_cached_tokens: Tokens up to which the store has them, as ``lookup`` told.
        can_load: Whether blocks were allocated for it.
    """

    vllm_cached_tokens: int
    kvpool_cached_tokens: int
    can_load: bool


@dataclass(slots=True)
class ReqMeta:
    """What one step of the scheduler wants for a request.

    Attributes:
        req_id: The request.
        token_len_chunk: Tokens to save, from the first one on; whole blocks of them are.
        block_ids: The request's blocks, in order.
        block_hashes: Hash of each block, which stands for all blocks before it too.
        can_save: Whether to save.
        load_spec: What to load; a request never has both.
    """

    req_id: str
    token_len_chunk: int
    block_ids: list[int]
    block_hashes: list[bytes]
    can_save: bool = False
    load_spec: LoadSpec | None = None


@dataclass(slots=True)
class MooncakeStoreConnectorMetadata:
    """What one step of the scheduler wants.

    Attributes:
        requests: Loads and saves to begin.
        preempted_req_ids: Requests whose blocks were taken away.
    """

    requests: list[ReqMeta] = field(default_factory=list)
    preempted_req_ids: set[str] = field(default_factory=set)
