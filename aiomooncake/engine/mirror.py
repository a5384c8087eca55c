"""Every public method of the binding, awaitable or blocking, with its own arguments and codes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from aiomooncake.errors import InvalidArgumentError, WrongLoopError

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient

__all__ = ["BlockingMirror", "EngineMirror"]

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


class _Mirror:
    def __init__(
        self, client: EngineClient, methods: frozenset[str], address_methods: frozenset[str]
    ) -> None:
        self._client = client
        self._methods = methods
        self._address_methods = address_methods

    def __dir__(self) -> list[str]:
        return sorted(self._methods)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._client!r}>"

    def _check(self, name: str) -> None:
        if name not in self._methods:
            raise AttributeError(
                f"this engine has no method {name!r}; dir() of this object lists those it has"
            )

    def _job(self, name: str) -> Callable[..., Any]:
        client = self._client
        moves = _reads(name) or name in self._address_methods or "put" in name or "upsert" in name

        def job(*args: Any, **kwargs: Any) -> Any:
            if name in _LIFE:
                raise InvalidArgumentError(
                    f"{name} is not to be called by hand, the store does it: use {_LIFE[name]}",
                    rank=client.rank,
                )
            method = getattr(client.native_object, name)
            if moves:
                return client.move(method, *args, **kwargs)
            return method(*args, **kwargs)

        return job


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _reads(name: str) -> bool:
    return name.startswith(_READS) and name not in _METADATA


class EngineMirror(_Mirror):
    """The binding's methods as coroutines: raw arguments, raw results, guarded.

    A cancelled call returns at once and goes on in the engine, counted as abandoned; a call that
    names memory of the caller by address is waited for first, because the engine still reads or
    writes that memory.
    """

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        self._check(name)
        client, job = self._client, self._job(name)
        drain = name in self._address_methods

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await client.run(
                client.small, name, lambda: job(*args, **kwargs), reads=_reads(name), drain=drain
            )

        call.__name__ = call.__qualname__ = name
        return call


class BlockingMirror(_Mirror):
    """The binding's methods for threads without a loop: raw and blocking, through the same gate.

    It runs on the calling thread. Not for a thread that runs an event loop.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        self._check(name)
        client, job = self._client, self._job(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if _in_loop():
                raise WrongLoopError(
                    f"store.blocking.{name} would stop the event loop that runs in this thread; "
                    f"use await store.engine.{name}(…) here",
                    rank=client.rank,
                )
            return client.run_blocking(name, lambda: job(*args, **kwargs), reads=_reads(name))

        call.__name__ = call.__qualname__ = name
        return call
