"""SGLang's storage backend for Mooncake, on aiomooncake."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from anyio.from_thread import start_blocking_portal

from aiomooncake import (
    InvalidArgumentError,
    MooncakeError,
    NotSupportedError,
    ReplicateConfig,
    Store,
    StoreConfig,
    WarmupPolicy,
    WrongLoopError,
    connect,
)
from aiomooncake.buffers import Buffer
from aiomooncake.errors import code_name, rank_label
from examples.sglang_hicache.interface import HiCacheStorageConfig
from examples.sglang_hicache.pages import THERE, Objects, PageStorage
from examples.sglang_hicache.turns import Turns

__all__ = ["MooncakeStore", "rank_of", "store_config"]

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_TIMEOUT = 120.0
"""Seconds for everything that the constructor waits for; the master may start later than it."""

CHECK_SERVER_TIMEOUT = 600.0
"""The same for an operator who asked for ``check_server``: SGLang waits for ten minutes then."""

CLOSE_TIMEOUT = 10.0
"""Seconds; beside calls that are stuck longer the store closes in the background."""

_FAILED = -1  # the engine's INTERNAL_ERROR, where it gave no code
_LEASE_EXPIRED = -707
_MISSES = (-704, -703)  # not there, or not complete yet

# A thread can't leave a batch while the engine writes into its pages, so the engine must end it
# soon. Of a batch of 128 objects on a frozen peer it gave up on the last one after 8 s with this
# and aiomooncake's other limits, and after 30 to 60 s with its own.
_ADMISSION_MS = "3000"


class MooncakeStore(PageStorage):
    """A storage backend for one rank.

    The constructor connects and warms up, and returns when pages can be stored. It may be called
    on any thread, whether a loop runs there or elsewhere. Pages are moved on the thread that asks,
    straight from and to host memory, a few batches at a time.

    Args:
        storage_config: Where this rank stands, and the operator's settings.
        mem_pool: Not looked at: SGLang passes it for stand-alone clients, which this example lacks.
        enable_client_http_server: Serve the client's metrics; by default if storage metrics are on.

    Raises:
        ConfigError: A setting is wrong.
        MooncakeError: The store can't be opened; a ``WarmupError`` carries every attempt and a
            diagnosis.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig | None = None,
        mem_pool: Any = None,
        enable_client_http_server: bool | None = None,
    ) -> None:
        super().__init__(storage_config)
        self.rank = rank_of(self.storage_config)
        self._label = f"[{rank_label(self.rank)}] "
        self._turns = Turns()
        self._buffers: list[Buffer] = []
        os.environ.setdefault("MC_TCP_ADMISSION_TIMEOUT_MS", _ADMISSION_MS)
        metrics = self.enable_storage_metrics
        if enable_client_http_server is not None:
            metrics = enable_client_http_server
        try:
            config = store_config(self.storage_config).replace(enable_client_http_server=metrics)
            self.store: Store = _wait_for(self._open, config)
        except MooncakeError as exc:
            log.error("%sthe Mooncake backend does not start: %s", *self._said(exc))  # noqa: TRY400  # the caller has its traceback
            raise
        log.info("%sthe Mooncake backend is ready: %r", self._label, self.store)

    async def _open(self, config: StoreConfig) -> Store:
        extra = self.storage_config.extra_config or {}
        timeout = CHECK_SERVER_TIMEOUT if extra.get("check_server") else CONNECT_TIMEOUT
        policy = WarmupPolicy(timeout=timeout)
        return await connect(config, rank=self.rank, timeout=timeout, warmup=policy)

    def _register(self, memory: Any) -> None:
        self._buffers.append(_wait_for(self._register_in_loop, memory))

    async def _register_in_loop(self, memory: Any) -> Buffer:
        if hasattr(memory, "data_ptr"):  # a torch tensor
            nbytes = memory.numel() * memory.element_size()
            return await self.store.register(address=memory.data_ptr(), nbytes=nbytes, owner=memory)
        return await self.store.register(memory)

    # ------------------------------------------------------------------ objects

    def _exist(self, keys: list[str]) -> Sequence[int]:
        return self._asked(len(keys), "asked for", self.store.blocking.batch_is_exist, keys)

    def _write(self, objects: Objects) -> Sequence[int]:
        return _by_distinct(self._write_new, objects)

    def _write_new(self, objects: Objects) -> Sequence[int]:
        codes = [THERE if code == 1 else code for code in self._exist(objects.keys)]
        new = [i for i, code in enumerate(codes) if code == 0]
        if new:
            return _replaced(codes, new, self._put(objects.some(new)))
        return codes

    def _put(self, objects: Objects) -> Sequence[int]:
        blocking = self.store.blocking
        put: Callable[..., list[int]] = blocking.batch_put_from
        if objects.in_pieces:
            put = blocking.batch_put_from_multi_buffers
        what = (objects.keys, objects.places, objects.sizes)
        with self._turns:
            if self._grouped:
                config = ReplicateConfig(group_ids=objects.groups)
                try:
                    return self._asked(len(objects.keys), "stored", put, *what, config)
                except NotSupportedError as exc:
                    self._grouped = False
                    log.warning("%spages are stored without groups: %s", *self._said(exc))
            return self._asked(len(objects.keys), "stored", put, *what)

    def _read(self, objects: Objects) -> Sequence[int]:
        return _by_distinct(self._get_in_time, objects)

    def _get_in_time(self, objects: Objects) -> Sequence[int]:
        codes = self._fetch(objects)
        if _LEASE_EXPIRED not in codes:
            return codes
        # A large batch may take longer than the master keeps the objects for it.
        late = [i for i, code in enumerate(codes) if code == _LEASE_EXPIRED]
        return _replaced(codes, late, self._fetch(objects.some(late)))

    def _fetch(self, objects: Objects) -> Sequence[int]:
        blocking = self.store.blocking
        get: Callable[..., list[int]] = blocking.batch_get_into
        if objects.in_pieces:
            get = blocking.batch_get_into_multi_buffers
        with self._turns:
            return self._asked(
                len(objects.keys), "read", get, objects.keys, objects.places, objects.sizes
            )

    def _asked(
        self, count: int, done: str, method: Callable[..., Sequence[int]], *args: Any
    ) -> Sequence[int]:
        """Call the engine; whatever goes wrong there becomes the codes of the objects.

        Raises:
            WrongLoopError, InvalidArgumentError, NotSupportedError: The call itself is wrong.
        """
        try:
            codes = method(*args)
        except (WrongLoopError, InvalidArgumentError, NotSupportedError):
            raise
        except MooncakeError as exc:
            log.warning("%s%s (%d objects could not be %s)", *self._said(exc), count, done)
            return [exc.code or _FAILED] * count
        if len(codes) != count:  # it refused the call as a whole
            codes = [codes[0] if codes and codes[0] < 0 else _FAILED] * count
        if codes and min(codes) < 0:
            self._tell(codes, done)
        return codes

    def _said(self, exc: MooncakeError) -> tuple[str, str]:
        """Begin a log line with the rank, once."""
        return self._label, str(exc).removeprefix(self._label)

    def _tell(self, codes: Sequence[int], done: str) -> None:
        failed = Counter(code for code in codes if code < 0 and code not in _MISSES)
        for code, count in failed.items():
            log.warning(
                "%s%d of %d objects could not be %s: %d %s",
                self._label, count, len(codes), done, code, code_name(code),
            )  # fmt: skip

    # ------------------------------------------------------------------ the end

    def clear(self) -> None:
        """Remove everything from the cluster, but what was read a moment ago."""
        try:
            removed = self.store.blocking.remove_all()
        except MooncakeError as exc:
            log.warning("%snothing was removed: %s", *self._said(exc))
            return
        if removed < 0:
            log.warning("%snothing was removed: %d %s", self._label, removed, code_name(removed))

    def close(self) -> None:
        """Wait for the calls under way, and close the store; idempotent.

        It takes 1 to 2 s, and up to 10 s without a master; the interpreter runs on meanwhile.
        """
        _wait_for(self.store.aclose, CLOSE_TIMEOUT)


def rank_of(config: HiCacheStorageConfig) -> int | str:
    """Name a rank for log lines: its tensor-parallel rank, and what else tells it from others."""
    more = []
    if config.dp_size > 1:
        more.append(f"DP{config.dp_rank}")
    if config.pp_size > 1:
        more.append(f"PP{config.pp_rank}")
    return "/".join([*more, f"TP{config.tp_rank}"]) if more else config.tp_rank


def store_config(config: HiCacheStorageConfig) -> StoreConfig:
    """Find what to connect to, where SGLang looks: the operator's JSON, a file, or the environment.

    Raises:
        ConfigError: Something about it is wrong.
    """
    extra = config.extra_config or {}
    read = partial(StoreConfig.from_env, dialect="sglang")
    if extra.get("master_server_address") or extra.get("client_server_address"):
        read = partial(StoreConfig.from_mapping, extra, dialect="sglang")
    stage = config.dp_rank * config.pp_size + config.pp_rank
    rank = stage * config.tp_size + config.tp_rank
    return read(rank=rank, tp_size=config.tp_size, pp_size=config.pp_size)


def _wait_for(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run a coroutine to its end on a loop of its own, in a thread of its own.

    The caller's thread may run a loop, which could not start another one; and ``asyncio.run`` would
    take away the loop that was set for that thread.
    """
    with start_blocking_portal() as portal:
        return portal.call(function, *args)


def _by_distinct(move: Callable[[Objects], Sequence[int]], objects: Objects) -> Sequence[int]:
    """Move objects so that no key is twice in a call: the engine would answer for the wrong one."""
    keys = objects.keys
    if len(set(keys)) == len(keys):
        return move(objects)
    rounds: list[list[int]] = []
    seen: Counter[str] = Counter()
    for i, key in enumerate(keys):
        if seen[key] == len(rounds):
            rounds.append([])
        rounds[seen[key]].append(i)
        seen[key] += 1
    codes: Sequence[int] = [_FAILED] * len(keys)
    for which in rounds:
        codes = _replaced(codes, which, move(objects.some(which)))
    return codes


def _replaced(codes: Sequence[int], which: Sequence[int], by: Sequence[int]) -> list[int]:
    new = list(codes)
    for i, code in zip(which, by, strict=True):
        new[i] = code
    return new
