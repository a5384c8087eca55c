"""Every public method of the binding, awaitable or blocking, with its own arguments and codes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from types import MethodType
from typing import TYPE_CHECKING, Any

from aiomooncake._codes import RPC_CODES
from aiomooncake._values import nearest
from aiomooncake.config import ReplicateConfig
from aiomooncake.engine import methods
from aiomooncake.engine.since import METHODS_SINCE, no_method
from aiomooncake.engine.workers import stopping
from aiomooncake.errors import (
    InvalidArgumentError,
    MooncakeError,
    NotSupportedError,
    WrongLoopError,
)

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.engine.methods import AwaitableMethods, BlockingMethods
else:
    # Their methods would be found before the mirrors are asked to make them.
    AwaitableMethods = BlockingMethods = object

__all__ = ["BlockingMirror", "EngineMirror", "is_read"]

# One native object has one life, and the store lives it.
_LIFE = {
    "setup": "connect()",
    "setup_dummy": "connect(client_server_address=…)",
    "init_all": "connect()",
    "close": "await store.aclose()",
}
# A read of a tainted store may answer another key's bytes.
_READS = ("get", "batch_get", "load_tensor")
# Answered from memory without a transfer or an RPC.
_METADATA = frozenset(
    {"get_hostname", "get_size", "get_replica_desc", "batch_get_replica_desc"}
    | {"get_offload_rpc_read_count"}
)
# What a dummy client answers only with "nothing", or a bare -600 or -1.
_NOT_FOR_DUMMIES = frozenset(
    {"get_replica_desc", "batch_get_replica_desc"}
    | {"batch_get_session_start", "batch_get_session_end", "batch_get_into_multi_buffer_ranges"}
    | {"batch_put_session_start", "batch_put_session_end", "batch_put_session_revoke"}
    | {"batch_put_from_multi_buffer_ranges", "mount_segment", "unmount_segment"}
    | {"allocate_and_mount_segment", "unmount_and_free_segment", "unmount_local_disk_segment"}
)
# What unmaps memory, at once where no grace period is given.
_UNMAPPING = frozenset({"unmount_segment", "unmount_and_free_segment"})
_GRACE = "grace_period_seconds"
# What goes through memory of the engine's own. Tensors do too, unless they name their memory.
_BY_VALUE = frozenset(
    {"get", "get_batch", "get_buffer", "batch_get_buffer"}
    | {"put", "put_batch", "put_parts", "upsert", "upsert_batch", "upsert_parts"}
)


class _Mirror:
    def __init__(
        self,
        client: EngineClient,
        methods: frozenset[str],
        address_methods: frozenset[str],
        convert: Callable[[ReplicateConfig], object],
        move_of: Callable[[str], Callable[..., Any]],
        *,
        trial: bool = False,
    ) -> None:
        self._trial = trial
        self._client = client
        self._methods = methods
        self._address_methods = address_methods
        self._convert = convert
        self._move_of = move_of

    def __dir__(self) -> list[str]:
        return sorted(self._methods)

    if not TYPE_CHECKING:  # which refuses all of it anyway

        def __setattr__(self, name: str, value: object) -> None:
            """Refuse what is no method; a test may have another callable stand in for one."""
            if not name.startswith("_"):
                self._check(name)
                if not callable(value):
                    raise AttributeError(
                        f"{name} is a method of the engine, which is called: {name}(…); only a "
                        f"callable can stand in its place, not {type(value).__name__}",
                        name=name,
                    )
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._client!r}>"

    def _check(self, name: str) -> None:
        if name not in self._methods:
            if name in METHODS_SINCE:
                raise no_method(name, rank=self._client.rank)
            raise AttributeError(f"this engine has no method {name!r}{self._hint(name)}", name=name)

    def _hint(self, name: str) -> str:
        from aiomooncake.store import Store  # which imports this module

        verb = getattr(Store, name, None)
        if callable(verb):
            awaited = "await " if inspect.iscoroutinefunction(verb) else ""
            return f": it is a verb of the store, {awaited}store.{name}(…)"
        meant = nearest(name, self._methods)
        if meant is not None:
            return f": did you mean {meant!r}?"
        return "; dir() of this object lists those it has"

    def _refusal(self, name: str) -> tuple[type[MooncakeError], str] | None:
        """Tell why a method is not to be called by hand, or can't be by this client."""
        client = self._client
        if name in _LIFE:
            why = f"{name} is not to be called by hand, the store does it: use {_LIFE[name]}"
            return InvalidArgumentError, why
        if client.dummy and name in _NOT_FOR_DUMMIES:
            return NotSupportedError, (
                f"a dummy client can't do {name}: connect to the master instead, without "
                "client_server_address"
            )
        if not client.by_value and _is_by_value(name):
            return NotSupportedError, (
                f"{name} of a dummy client moves values through memory that the engine shares "
                "of itself: connect with mem_pool_size= for it, or use the store's own verbs, "
                "which need none"
            )
        return None

    def _job(self, name: str) -> Callable[..., Any]:
        client, refusal = self._client, self._refusal(name)
        writes = "put" in name or "upsert" in name
        moves = is_read(name) or name in self._address_methods or writes
        probes = self._trial and writes
        convert, move = self._convert, self._move_of(name)

        def native(given: Any) -> Any:
            return convert(given) if type(given) is ReplicateConfig else given

        def job(*args: Any, **kwargs: Any) -> Any:
            if writes:
                args = tuple(map(native, args))
                kwargs = {option: native(given) for option, given in kwargs.items()}
            if refusal is not None:
                kind, why = refusal
                raise kind(why, rank=client.rank)
            method = getattr(client.native_object, name)
            if name in _UNMAPPING and _GRACE in (method.__doc__ or ""):
                args, kwargs = _with_grace(args, kwargs)
            try:
                answer = move(method, args, kwargs) if moves else method(*args, **kwargs)
            except TypeError as exc:
                # The binding shows what it was called with: keys, and values as long as they are.
                text, shown, _ = str(exc).partition("\n\nInvoked with:")
                if not shown:
                    raise
                raise TypeError(text) from None
            code = answer[0] if type(answer) is list and answer else answer
            if type(code) is int and code in RPC_CODES:
                client.suspect_master()
            if probes and code == 0 and stopping():
                # The warm-up has ended without this answer, and can't take the key away.
                client.native_object.remove(args[0], True)
            return answer

        return job


def _with_grace(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave reads of this client a second: unmapping memory under them ends the process."""
    if len(args) > 1:
        return (args[0], args[1] or 1, *args[2:]), kwargs
    return args, {**kwargs, _GRACE: kwargs.get(_GRACE) or 1}


def _is_by_value(name: str) -> bool:
    return name in _BY_VALUE or ("tensor" in name and not name.endswith(("_from", "_into")))


def is_read(name: str) -> bool:
    """Tell whether a method brings bytes of values in."""
    return name.startswith(_READS) and name not in _METADATA


def _describe(call: Any, name: str, declared: type[object], client: EngineClient) -> None:
    """Give a call the name, the arguments and the words that ``help()`` shows."""
    call.__name__ = call.__qualname__ = name
    method = getattr(declared, name, None)
    if method is not None:  # else the wheel is newer than our list
        call.__doc__ = method.__doc__
        call.__wrapped__ = MethodType(method, client)  # bound to anything, so without its `self`


class EngineMirror(_Mirror, AwaitableMethods):
    """The binding's methods as coroutines: raw arguments, raw results, guarded.

    ``dir(store.engine)`` lists those that this wheel has, ``help(store.engine.put)`` explains one.

    A cancelled call returns at once and goes on in the engine, counted as abandoned; a call that
    names memory of the caller by address is waited for first, because the engine still reads or
    writes that memory.
    """

    def _find(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        self._check(name)
        client, job, trial = self._client, self._job(name), self._trial
        drain = name in self._address_methods

        async def call(*args: Any, **kwargs: Any) -> Any:
            refused = client.gate.tainted is not None
            try:
                return await client.run(
                    client.small,
                    name,
                    lambda: job(*args, **kwargs),
                    reads=is_read(name),
                    drain=drain,
                    trial=trial,
                )
            finally:
                if drain and client.late_writes is not None and not refused:
                    await client.written()

        _describe(call, name, methods.AwaitableMethods, client)
        self.__dict__[name] = call  # the next look-up does not come here
        return call

    if not TYPE_CHECKING:  # to which no name but those of the list is right
        __getattr__ = _find


class BlockingMirror(_Mirror, BlockingMethods):
    """The binding's methods for threads without a loop: raw and blocking, through the same gate.

    ``dir(store.blocking)`` lists those that this wheel has, ``help(store.blocking.put)`` explains
    one. It runs on the calling thread. Not for a thread that runs an event loop.
    """

    def _find(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        self._check(name)
        client, job, reads = self._client, self._job(name), is_read(name)
        # As little as possible in a call: the native one leaves cold caches behind, and each
        # microsecond of Python costs four.
        in_loop, run = asyncio._get_running_loop, client.run_blocking
        drain = name in self._address_methods

        def call(*args: Any, **kwargs: Any) -> Any:
            if in_loop() is not None:
                raise WrongLoopError(
                    f"store.blocking.{name} would stop the event loop that runs in this thread; "
                    f"use await store.engine.{name}(…) here",
                    rank=client.rank,
                )
            if not drain:
                return run(name, job, args, kwargs, reads=reads)
            refused = client.gate.tainted is not None
            try:
                return run(name, job, args, kwargs, reads=reads)
            finally:
                late = client.late_writes
                if late is not None and not refused:
                    late.result()

        _describe(call, name, methods.BlockingMethods, client)
        self.__dict__[name] = call  # the next look-up does not come here
        return call

    if not TYPE_CHECKING:
        __getattr__ = _find
