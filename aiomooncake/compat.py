"""A drop-in for the wheel's ``mooncake.async_store``: one changed import.

    from aiomooncake.compat import MooncakeDistributedStoreAsync

It takes the same calls (every method of the binding, and each of them as ``async_<name>``) and
gives the same results: integers, ``b""`` for a miss and for a failure. What its users get for it:
set-up and tear-down without the GIL; single keys that wait together travel together (``async_get``,
``async_put``, ``async_upsert``, ``async_put_parts``, ``async_is_exist``, ``async_get_size``,
``async_remove``); no crash before set-up, after close, in a forked child or at exit.

Like the original it loads the engine when it is imported. Import it before ``mooncake.store``, as
sorted imports do: the transport's time-outs must be set before native code reads them.

What differs is what crashes, hangs or is wrong there:

* Before set-up and after close calls raise ``StoreClosedError``, but ``health_check`` is 1 and
  ``close`` 0. An object may be set up again; while it is open, what was there is closed first.
* A set-up waits for a master that starts later, up to ``setup_timeout``. Its codes: the engine's
  own where the engine refuses; -600 for a wrong argument (also for ``protocol="rdma"`` on a host
  without RDMA, where the engine quietly takes TCP); -1 when the time is up; -1012 for what is not
  offered. The log says why.
* What no code of the engine stands for raises: another event loop that is alive too
  (``WrongLoopError``), a forked child, a store that a transfer of 60 s has tainted, too many stuck
  calls that were given up, a call that a dummy client can't do.
* Reads are right whatever the size of the local buffer (``get``, ``get_batch``) and when a key is
  given twice (``get_batch``, ``batch_get_buffer``, ``batch_get_into``,
  ``batch_get_into_multi_buffers``). ``put``, ``upsert`` and ``async_put_parts`` store values that
  are larger than the local buffer. Memory is stored as the bytes that it holds, also when it is
  strided or of wider items; memory of Python objects is a ``TypeError``, and so is a part that is
  no memory.
* A synchronous call on the thread of a running event loop blocks it, as it does there; the log
  says so once for each method.

It does not inherit from the binding's class: objects of the wheel that are made with one
(``BufferPool`` say) can't be made with this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiomooncake._native_answers import code_of, code_when_done, setup_code, value_of
from aiomooncake._native_arguments import (
    DEFAULT_MASTER,
    OnlyNativeError,
    read_placement,
    read_setup,
)
from aiomooncake._native_calls import are_keys, call_native, has_bytes, is_buffer, is_key
from aiomooncake.config import ReplicateConfig, StoreConfig
from aiomooncake.connect import connect
from aiomooncake.engine.gate import State
from aiomooncake.engine.lifecycle import prepare_environment
from aiomooncake.engine.mirror import is_read
from aiomooncake.engine.process import load_engine
from aiomooncake.errors import MooncakeError, StoreClosedError, code_name
from aiomooncake.memory import layout
from aiomooncake.transfers import LARGE, Transfers

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.store import Store

T = TypeVar("T")

__all__ = ["MooncakeDistributedStoreAsync"]

log = logging.getLogger("aiomooncake")

_INTERNAL: Final = -1
_NOT_FOUND: Final = -704
# What the engine's health check answers.
_HEALTHY, _NOT_SET_UP, _UNREACHABLE = 0, 1, 2

# Native code reads them when it is loaded; each set-up sets its own again.
prepare_environment(StoreConfig(DEFAULT_MASTER))
_binding: Final = load_engine()


class _Default(Enum):
    """Stands for placement options that were not given: None is refused by the binding."""

    CONFIG = "the engine's own"


_CONFIG: Final = _Default.CONFIG


class MooncakeDistributedStoreAsync:
    """``mooncake.store.MooncakeDistributedStore`` with an ``async_`` form of each method.

    The module's text says what differs from the original. Methods that are not written out here
    exist too, with the binding's own arguments and results.

    Attributes:
        setup_timeout: Seconds that a set-up waits for its master, as long as the original goes on
            trying; may be changed on the class or on an object.
    """

    setup_timeout: float = 90.0

    def __init__(self) -> None:
        self._store: Store | None = None
        self._unclosed: weakref.finalize[Any, Any] | None = None
        self._life = 0  # counts set-ups and closes
        self._lock = threading.Lock()
        self._told: set[str] = set()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    # ------------------------------------------------------------------ life

    async def async_setup(self, *args: Any, **kwargs: Any) -> int:
        """Set up, with the arguments of the binding's ``setup`` or with its dictionary.

        Returns:
            0 or a code; the log says what is wrong.
        """
        make, engine = read_setup(*args, **kwargs)
        return await self._set_up("setup", make, engine)

    async def async_setup_dummy(
        self,
        mem_pool_size: int,  # noqa: ARG002  # the engine makes no such pool either
        local_buffer_size: int,
        server_address: str,
    ) -> int:
        """Set up as a client of a client process on this host; 0 or a code."""
        make = partial(
            StoreConfig,
            "",
            client_server_address=server_address,
            mem_pool_size=local_buffer_size,
        )
        return await self._set_up("setup_dummy", make, None)

    async def async_close(self) -> int:
        """Close; 0, also when there is nothing to close.

        Waits for calls under way and for the tear-down, up to 10 s; after that it goes on in the
        background, and the log says so.
        """
        store, _ = self._leave()
        if store is not None:
            await store.aclose()
        return 0

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """Set up as :meth:`async_setup` does, and wait for it on this thread.

        It needs no event loop: the first one that awaits a call has the store.
        """
        return self._finish("setup", self.async_setup(*args, **kwargs))

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Set up as :meth:`async_setup_dummy` does, and wait for it on this thread."""
        coro = self.async_setup_dummy(mem_pool_size, local_buffer_size, server_address)
        return self._finish("setup_dummy", coro)

    def close(self) -> int:
        """Close as :meth:`async_close` does, and wait for it on this thread."""
        return 0 if self._store is None else self._finish("close", self.async_close())

    def health_check(self) -> int:
        """0: fine, 1: not set up, or to be set up again, 2: master unreachable. Never blocks."""
        store = self._store
        state = "closed" if store is None else store.health().state
        answers = {
            "ready": _HEALTHY,
            "degraded": _HEALTHY,
            "re-mounting": _HEALTHY,
            "master-unreachable": _UNREACHABLE,
            "client-unreachable": _UNREACHABLE,
        }
        return answers.get(state, _NOT_SET_UP)

    async def async_health_check(self) -> int:
        """Answer what :meth:`health_check` does."""
        return self.health_check()

    def get_hostname(self) -> str:
        """``host:port`` of this client. Never blocks."""
        client = _client_of(self._open("get_hostname"))
        return client.ask("get_hostname", _hostname, client)

    async def async_get_hostname(self) -> str:
        """Answer what :meth:`get_hostname` does."""
        return self.get_hostname()

    # ------------------------------------------------------------------ awaited calls

    async def async_get(self, key: str, /) -> bytes:
        """Read a value; ``b""`` for a miss and for any failure."""
        store = self._open("get")
        if not is_key(key):
            return await self._call("get", key)  # type: ignore[no-any-return]
        try:
            value = await store.get(key)
        except MooncakeError as exc:
            return value_of("get", exc)
        return b"" if value is None else value

    async def async_get_batch(self, keys: Sequence[str], /) -> list[bytes]:
        """Read many values; ``b""`` for a miss and for any failure."""
        store = self._open("get_batch")
        if not are_keys(keys):
            return await self._call("get_batch", keys)  # type: ignore[no-any-return]
        try:
            answers = await store.get_many(keys, return_exceptions=True)
        except MooncakeError as exc:
            return [value_of("get_batch", exc)] * len(keys)
        return [value_of("get_batch", answer) for answer in answers]

    async def async_put(self, key: str, value: Any, config: Any = _CONFIG) -> int:
        """Store a value unless the key is taken: 0 (also then) or a code."""
        return await self._put("put", key, value, config)

    async def async_upsert(self, key: str, value: Any, config: Any = _CONFIG) -> int:
        """Store a value or replace the one that is there: 0 or a code."""
        return await self._put("upsert", key, value, config)

    async def async_put_parts(self, key: str, *args: Any, config: Any = _CONFIG) -> int:
        """Store pieces of memory as one value; 0 and nothing stored when they are empty."""
        store = self._open("put_parts")
        options = {} if config is _CONFIG else {"config": config}
        if is_key(key) and any(map(has_bytes, args)) and all(map(is_buffer, args)):
            with contextlib.suppress(OnlyNativeError):
                placement = _placement(config)
                return await code_when_done(
                    "put_parts", store.put_parts(key, *args, config=placement)
                )
        return await self._call("put_parts", key, *args, **options)  # type: ignore[no-any-return]

    async def async_is_exist(self, key: str, /) -> int:
        """1, 0 or a negative code."""
        store = self._open("is_exist")
        if not is_key(key):
            return await self._call("is_exist", key)  # type: ignore[no-any-return]
        try:
            return int(await store.exists(key))
        except MooncakeError as exc:
            return code_of("is_exist", exc)

    async def async_get_size(self, key: str, /) -> int:
        """Size in bytes, or a negative code."""
        store = self._open("get_size")
        try:
            size = await store.size(key) if is_key(key) else None
        except MooncakeError as exc:
            return code_of("get_size", exc)
        if size is None:
            # Not there, or not ready: only the single call tells which.
            return await self._call("get_size", key)  # type: ignore[no-any-return]
        return size

    async def async_remove(self, key: str, force: bool = False) -> int:  # noqa: FBT001, FBT002  # as there
        """Remove a key: 0 or a code; -706 while a lease protects it, unless forced."""
        store = self._open("remove")
        if not is_key(key):
            return await self._call("remove", key, force)  # type: ignore[no-any-return]
        try:
            return 0 if await store.remove(key, force=force) else _NOT_FOUND
        except MooncakeError as exc:
            return code_of("remove", exc)

    # ------------------------------------------------------------------ blocking calls

    def get(self, key: str, /) -> bytes:
        """Read a value; ``b""`` for a miss and for any failure."""
        if not is_key(key):
            return self._block("get", key)  # type: ignore[no-any-return]
        return self._do("get", _read, [key])[0]

    def get_batch(self, keys: Sequence[str], /) -> list[bytes]:
        """Read many values; ``b""`` for a miss and for any failure."""
        if not are_keys(keys):
            return self._block("get_batch", keys)  # type: ignore[no-any-return]
        return self._do("get_batch", _read, keys)

    def put(self, key: str, value: Any, config: Any = _CONFIG) -> int:
        """Store a value unless the key is taken: 0 (also then) or a code."""
        return self._put_here("put", key, value, config)

    def upsert(self, key: str, value: Any, config: Any = _CONFIG) -> int:
        """Store a value or replace the one that is there: 0 or a code."""
        return self._put_here("upsert", key, value, config)

    def __repr__(self) -> str:
        store = self._store
        state = "not set up" if store is None else f"{store.hostname} {store.health().state}"
        return f"<{type(self).__name__} {state}>"

    # ------------------------------------------------------------------ ways to the store

    def _open(self, name: str) -> Store:
        store = self._store
        if store is None:
            raise StoreClosedError(
                f"{name} refused: the store is not set up, or was closed; call setup() (or await "
                "async_setup()) first, and look at the code that it answers"
            )
        return store

    async def _put(self, verb: str, key: str, value: Any, config: Any) -> int:
        store = self._open(verb)
        if is_key(key) and has_bytes(value):
            with contextlib.suppress(OnlyNativeError):
                placement = _placement(config)
                return await code_when_done(
                    verb, getattr(store, verb)(key, value, config=placement)
                )
        options = () if config is _CONFIG else (config,)
        return await self._call(verb, key, value, *options)  # type: ignore[no-any-return]

    def _put_here(self, verb: str, key: str, value: Any, config: Any) -> int:
        if is_key(key) and has_bytes(value):
            with contextlib.suppress(OnlyNativeError):
                return self._do(verb, _write, verb, key, value, _placement(config))
        options = () if config is _CONFIG else (config,)
        return self._block(verb, key, value, *options)  # type: ignore[no-any-return]

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make a call of the binding's on a thread of the store."""
        store = self._open(name)
        client = _client_of(store)
        return await client.run(
            client.small,
            name,
            _job(store, name, args, kwargs),
            reads=is_read(name),
            drain=name in _binding.address_methods,
        )

    def _block(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make a call of the binding's on this thread."""
        store = self._open(name)
        if not self._tell(name):
            return call_native(getattr(store.blocking, name), name, args, kwargs)
        job = _job(store, name, args, kwargs)
        return _client_of(store).run_blocking(name, job, reads=is_read(name))

    def _do(self, name: str, job: Callable[..., T], *args: Any) -> T:
        """Do a job of ours on this thread."""
        store = self._open(name)
        self._tell(name)
        transfers = store._transfers  # noqa: SLF001  # it is ours
        return _client_of(store).run_blocking(name, job, (transfers, *args), reads=is_read(name))

    # ------------------------------------------------------------------ ways to set-up and close

    async def _set_up(self, name: str, make: Callable[[], StoreConfig], engine: Any) -> int:
        try:
            config = make()
            before, life = self._leave()
            if before is not None:
                await before.aclose()
            store = await connect(config, timeout=self.setup_timeout, transfer_engine=engine)
        except MooncakeError as exc:
            code = setup_code(exc)
            log.error("%s answers %d %s: %s", name, code, code_name(code), exc)  # noqa: TRY400  # the text says it
            return code
        client = _client_of(store)
        with self._lock:
            kept = self._life == life
            if kept:
                self._store = store
                self._unclosed = weakref.finalize(self, _close_dropped, client, store.hostname)
                self._unclosed.atexit = False
        if kept:
            return 0
        client.begin_close()
        log.error("%s answers %d: the store was closed or set up again meanwhile", name, _INTERNAL)
        return _INTERNAL

    def _leave(self) -> tuple[Store | None, int]:
        """Begin another life; whoever is handed the store of the last one closes it."""
        with self._lock:
            self._life += 1
            store, self._store = self._store, None
            if self._unclosed is not None:
                self._unclosed.detach()
                self._unclosed = None
            return store, self._life

    def _finish(self, name: str, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end while this thread waits."""
        if not self._tell(name):
            return _run(coro)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(_run, coro).result()

    def _tell(self, name: str) -> bool:
        """Log, once, a call that blocks the event loop of this thread; whether there is one."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        if name not in self._told:
            self._told.add(name)
            log.warning(
                "%s() blocks the event loop that runs in this thread; use await async_%s()",
                name,
                name,
            )
        return True


def _run(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a loop of its own; unlike ``asyncio.run`` leave the current one alone."""
    loop = asyncio.new_event_loop()
    try:
        task = loop.create_task(coro)
        try:
            return loop.run_until_complete(task)
        finally:
            if not task.done():  # interrupted
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    loop.run_until_complete(task)
    finally:
        loop.close()


def _client_of(store: Store) -> EngineClient:
    return store._client  # noqa: SLF001  # it is ours


def _close_dropped(client: EngineClient, hostname: str) -> None:
    if client.gate.state is State.OPEN:
        client.begin_close()
        warnings.warn(
            f"unclosed {MooncakeDistributedStoreAsync.__name__} {hostname}: it closes in the "
            "background; call close() or await async_close()",
            ResourceWarning,
            stacklevel=2,
        )


def _placement(config: Any) -> ReplicateConfig | None:
    if config is _CONFIG:
        return None
    return read_placement(config, _binding.replicate_config_class)


# --- jobs -------------------------------------------------------------------------------------


def _job(store: Store, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
    method = store.engine._job(name)  # noqa: SLF001  # it is ours
    return partial(call_native, method, name, args, kwargs)


def _hostname(client: EngineClient) -> str:
    return client.native_object.get_hostname()


def _read(transfers: Transfers, keys: Sequence[str]) -> list[bytes]:
    unique = list(dict.fromkeys(keys))
    found: dict[str, Any] = {}
    try:
        found.update(zip(unique, transfers.get_keys(unique), strict=True))
    except MooncakeError as exc:
        found = dict.fromkeys(unique, exc)
    for key, answer in found.items():
        if answer is LARGE:
            try:
                found[key] = transfers.get_large(key)
            except MooncakeError as exc:
                found[key] = exc
    return [value_of("get", found[key]) for key in keys]


def _write(
    transfers: Transfers, verb: str, key: str, value: Any, placement: ReplicateConfig | None
) -> int:
    try:
        block = layout(value, verb=verb, key=key, rank=None)
        transfers.put(key, block, placement, replace=verb == "upsert")
    except MooncakeError as exc:
        return code_of(verb, exc)
    return 0


# --- the methods that are not written out -----------------------------------------------------


def _add_methods(cls: type[Any]) -> None:
    """Give the class what else the binding has: each method, and its ``async_`` form."""
    for name in _binding.methods:
        text = getattr(_binding.store_class, name).__doc__
        for method in (_blocking_method(name), _awaitable_method(name)):
            if not hasattr(cls, method.__name__):
                method.__qualname__ = f"{cls.__qualname__}.{method.__name__}"
                method.__doc__ = text
                setattr(cls, method.__name__, method)


def _blocking_method(name: str) -> Callable[..., Any]:
    def method(self: MooncakeDistributedStoreAsync, *args: Any, **kwargs: Any) -> Any:
        return self._block(name, *args, **kwargs)

    method.__name__ = name
    return method


def _awaitable_method(name: str) -> Callable[..., Any]:
    async def method(self: MooncakeDistributedStoreAsync, *args: Any, **kwargs: Any) -> Any:
        return await self._call(name, *args, **kwargs)

    method.__name__ = f"async_{name}"
    return method


_add_methods(MooncakeDistributedStoreAsync)
