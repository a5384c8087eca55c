"""vLLM's worker for a Mooncake store, on aiomooncake."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

from aiomooncake import (
    MooncakeError,
    StoreConfig,
    WrongLoopError,
    connect,
)
from aiomooncake.errors import code_name, rank_label
from examples.vllm_store_worker.blocks import Array, Keys, Places, Stats, hit_tokens, told
from examples.vllm_store_worker.calls import Calls
from examples.vllm_store_worker.interface import (
    MooncakeStoreConnectorMetadata,
    ReqMeta,
    WorkerOptions,
)
from examples.vllm_store_worker.loader import Loader
from examples.vllm_store_worker.saver import Saver

__all__ = ["MooncakeStoreWorker"]

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_TIMEOUT = 30.0
"""Seconds; the master may start later than its workers."""

CLOSE_TIMEOUT = 10.0
"""Seconds; beside calls that are stuck longer the store closes in the background."""

RESET_TIMEOUT = 30.0


class MooncakeStoreWorker:
    """Saves blocks of a KV cache, loads them, and tells which are there.

    Every call of the engine is made on the thread that wants it (``store.blocking``): on those that
    save and load, and on the caller's for :meth:`lookup`. An event loop of the same process never
    waits for any of them.

    Args:
        options: Where the worker stands, and how its cache is laid out.
        config: What to connect to; None = the file that ``MOONCAKE_CONFIG_PATH`` names, as vLLM
            reads it.

    Attributes:
        store: The store.

    Raises:
        MooncakeError: The store can't be opened; says why.
    """

    def __init__(self, options: WorkerOptions, config: StoreConfig | None = None) -> None:
        if config is None:
            config = StoreConfig.from_env(dialect="vllm")
        self.options = options
        self.store = _run(
            "the worker", lambda: connect(config, rank=options.tp_rank, timeout=CONNECT_TIMEOUT)
        )
        segment = options.preferred_segment or os.environ.get("MOONCAKE_PREFERRED_SEGMENT", "")
        label = self._label = f"[{rank_label(options.tp_rank)}]"
        keys = self._keys = Keys(options)
        self._stats = Stats()
        self._calls = Calls(self.store, segment, self._stats)
        self._loader = Loader(self._calls, keys, label)
        self._saver = Saver(self._calls, keys, label) if options.saves else None
        self._threads: list[threading.Thread] = []
        log.info(
            "%s connected as %s, preferred segment: %s",
            label,
            self.store.hostname,
            segment or "none",
        )

    # ------------------------------------------------------------------ the cache

    def register_kv_caches(self, kv_caches: dict[str, Array]) -> None:
        """Register the layers of the cache, and start the threads.

        Args:
            kv_caches: The layers, by name; see :class:`Places`.

        Raises:
            MooncakeError: A layer that is not laid out as it must be, or that the engine refuses.
            RuntimeError: It was done before.
        """
        if self._threads:
            raise RuntimeError("the caches of a worker are registered once")
        places = Places(kv_caches, self.options.num_blocks)
        _run("register_kv_caches", lambda: self._register(places))
        self._calls.lay_out(places)
        jobs = [(f"load-{i}", self._loader.work) for i in range(self.options.load_recv_threads)]
        if self._saver is not None:
            jobs.append(("save", self._saver.work))
        for name, job in jobs:
            name_of_all = f"mooncake-{rank_label(self.options.tp_rank)}-{name}"
            # Daemons: a call that is stuck must not hold the interpreter's exit.
            thread = threading.Thread(target=job, name=name_of_all, daemon=True)
            thread.start()
            self._threads.append(thread)

    def register_cross_layers_kv_caches(self, kv_cache: Array) -> None:
        """Register a cache in which a block has all its layers in one piece."""
        self.register_kv_caches({"__cross_layer__": kv_cache})

    async def _register(self, places: Places) -> None:
        for region in places.regions:
            # The store holds on to the memory until the engine has let go of it.
            await self.store.register(
                address=region.address, nbytes=region.nbytes, owner=region.owner
            )

    # ------------------------------------------------------------------ one step of the engine

    def start_load_kv(self, metadata: MooncakeStoreConnectorMetadata) -> None:
        """Do nothing: loads begin in :meth:`get_finished`, beside the computation."""

    def wait_for_save(self, metadata: MooncakeStoreConnectorMetadata) -> None:
        """Do nothing: saves begin in :meth:`get_finished`, beside the computation."""

    def get_finished(
        self, finished_req_ids: AbstractSet[str], meta: MooncakeStoreConnectorMetadata
    ) -> tuple[set[str], set[str]]:
        """Begin what a step wants, and tell what has ended since the last one; never blocks.

        Args:
            finished_req_ids: Requests that the scheduler is done with.
            meta: What the step wants.

        Returns:
            Finished requests with no more saves, whose blocks can be freed; and requests whose
            loads have ended, well or not: see :meth:`get_block_ids_with_load_errors`.
        """
        loads: list[ReqMeta] = []
        saves: list[ReqMeta] = []
        for request in meta.requests:
            if request.load_spec is not None and request.load_spec.can_load:
                loads.append(request)
            if request.can_save:
                saves.append(request)
        if not self._threads and (loads or saves):
            raise RuntimeError("register_kv_caches must come before the first request")
        if loads:
            self._loader.begin(loads)
        saved: set[str] = set()
        if self._saver is not None:
            if saves:
                self._saver.begin(saves)
            saved = self._saver.take_finished(finished_req_ids, meta.preempted_req_ids)
        return saved, self._loader.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Tell which blocks could not be loaded since the last time; they must be computed."""
        return self._loader.take_failed_blocks()

    def get_kv_connector_stats(self) -> dict[str, list[dict[str, int | float | str]]] | None:
        """Return what was done since the last time: a record for each call of the engine."""
        return self._stats.take() or None

    # ------------------------------------------------------------------ the scheduler's questions

    def lookup(self, num_tokens: int, block_hashes: Sequence[bytes]) -> int:
        """Tell how many tokens of a request need not be computed.

        From any thread without an event loop.

        Args:
            num_tokens: Tokens of the request; the last one is always computed.
            block_hashes: Hash of each of its blocks.

        Returns:
            A multiple of the block size; 0 also when the master does not answer.
        """
        size = self.options.block_size
        keys = self._keys.of_all_ranks(block_hashes[: num_tokens // size])
        if not keys:
            return 0
        try:
            codes = self._calls.exist("lookup_exists", keys)
        except WrongLoopError:
            raise
        except MooncakeError as exc:
            log.warning("%s look-up of %d keys failed: %s", self._label, len(keys), exc)
            return 0
        if min(codes) < 0:
            log.warning("%s look-up of %d keys failed: %s", self._label, len(keys), told(codes))
        return hit_tokens(self._keys.leading(codes), size, num_tokens)

    def reset(self, timeout: float = RESET_TIMEOUT) -> bool:
        """Remove everything from the store, when the saves that are queued have ended.

        Returns:
            Whether that was done.
        """
        if self._saver is not None and not self._saver.join(timeout):
            log.warning("%s reset gave up: saves still run after %g s", self._label, timeout)
            return False
        try:
            code = self.store.blocking.remove_all(True)  # noqa: FBT003  # the binding's: force
        except MooncakeError as exc:
            log.warning("%s reset failed: %s", self._label, exc)
            return False
        if code < 0:
            log.warning("%s reset failed: %d %s", self._label, code, code_name(code))
            return False
        log.info("%s reset: %d keys are gone", self._label, code)
        return True

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Close the store; idempotent, and not for a thread that runs an event loop.

        What is queued fails, and :meth:`get_finished` tells it. What is under way gets ``timeout``
        seconds; beside calls that are stuck longer the store closes in the background, and the
        cache's memory is kept until then.
        """
        _check_thread("close")
        deadline = time.monotonic() + timeout
        self._loader.close()
        if self._saver is not None:
            self._saver.close()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        _run("close", lambda: self.store.aclose(max(0.1, deadline - time.monotonic())))

    def __repr__(self) -> str:
        return f"<MooncakeStoreWorker {self._label} {self.store!r}>"


def _run(what: str, make: Callable[[], Awaitable[T]]) -> T:
    """Run something in a loop of its own; when a loop ends, the store takes the next one."""
    _check_thread(what)

    async def main() -> T:
        return await make()

    return asyncio.run(main())


def _check_thread(what: str) -> None:
    """Refuse a thread that runs an event loop, which would be stopped.

    Raises:
        WrongLoopError: It does.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise WrongLoopError(
        f"{what} would stop the event loop that runs in this thread: use asyncio.to_thread"
    )
