"""From a target to an open store: :func:`connect` and :func:`adopt`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Final

from aiomooncake._opener import Opener, make_store, methods_of
from aiomooncake.config import StoreConfig
from aiomooncake.engine.binding import load_binding, native_replicate_config
from aiomooncake.engine.client import EngineClient
from aiomooncake.engine.inmemory import InMemoryEngine, InMemoryStore
from aiomooncake.engine.options import check_methods
from aiomooncake.errors import InvalidArgumentError
from aiomooncake.opening import Opening
from aiomooncake.store import Store
from aiomooncake.warmup import WarmupPolicy

if TYPE_CHECKING:
    from aiomooncake.config import ReplicateConfig
    from aiomooncake.observe import Health

__all__ = ["DEFAULT_TIMEOUT", "adopt", "connect"]

DEFAULT_TIMEOUT: Final = 120.0
_NOT_SET_UP: Final = 1


def connect(
    target: str | StoreConfig | None = None,
    *,
    rank: int | str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    warmup: bool | WarmupPolicy | None = None,
    engine: InMemoryEngine | None = None,
    transfer_engine: object | None = None,
    on_health: Callable[[Health], object] | None = None,
    **overrides: Any,
) -> Opening[Store]:
    """Open a store; await it, or enter it with ``async with``.

    A master that starts later than its clients is normal: it is waited for, in short asynchronous
    probes, before the engine is touched or even imported.

    Args:
        target: ``"host:port"`` of a master; ``"mooncake://host:port?protocol=tcp&…"``; a
            :class:`StoreConfig`; ``"local://"`` for a private master of its own (for tests and
            demos); ``"memory://name"`` for the in-memory engine; None for the environment
            (:meth:`StoreConfig.from_env`).
        rank: Rank, for log lines and errors: an int (``3`` is shown as ``TP3``) or text.
        timeout: Seconds for everything, the warm-up included.
        warmup: True or a policy: warm up before the store is handed over.
        engine: An in-memory engine to use instead of the wheel's.
        transfer_engine: A ``mooncake.engine.TransferEngine`` to share; its set-up holds the GIL.
        on_health: Told of each change of the store's health (an outage of the master begins or
            ends, the store closes), a second or a few after it; a plain function, called on the
            store's loop, or where that is not running on a thread of the store.
        **overrides: Fields of :class:`StoreConfig`, on top of the target. With
            ``client_server_address`` the stand-alone client is what counts, and the master that it
            knows.

    Raises:
        ConfigError: Something about the target or an override is wrong.
        EngineNotInstalledError: The engine can't be imported; says what is missing.
        SetupTimeoutError: The time is up; says what was waited for.
        SetupError: The engine refuses the set-up.
        WarmupError: The warm-up failed.
        ForkedProcessError: The process was forked from one that had opened a store.
    """
    _check(engine, on_health)
    opener = Opener(rank, timeout, warmup, engine, transfer_engine, on_health)
    return Opening("a store", opener.open(target, overrides), Store.aclose)


def _check(engine: object, on_health: object) -> None:
    if engine is not None and not isinstance(engine, InMemoryEngine):
        raise InvalidArgumentError(
            f"engine takes an in-memory engine, not {type(engine).__name__}; leave it out for the "
            "wheel's"
        )
    if on_health is not None and (
        not callable(on_health) or inspect.iscoroutinefunction(on_health)
    ):
        raise InvalidArgumentError("on_health is called, not awaited: give a plain function")


class _AdoptedStore(Store, Coroutine[Any, Any, Store]):
    """A store over somebody else's engine; it is open at once, awaiting it gives itself."""

    def __await__(self) -> Generator[Any, Any, Store]:
        return self._itself().__await__()

    async def _itself(self) -> Store:
        return self

    def send(self, _value: Any, /) -> Any:
        """Answer a task's first step: there is nothing to wait for."""
        raise StopIteration(self)

    def throw(self, *args: Any) -> Any:
        """Answer a task that is cancelled before its first step."""
        raise args[0]

    def close(self) -> None:
        """Nothing is pending: there is nothing to drop."""


def adopt(
    native_store: Any, *, rank: int | str | None = None, config: StoreConfig | None = None
) -> _AdoptedStore:
    """Put the same face on a ``MooncakeDistributedStore`` that somebody else has set up.

    The store is open at once, so that ``asyncio.run(adopt(native, rank=3).warmup())`` works; it
    can be awaited and entered too. Closing it waits for its calls and leaves the engine alone.
    Its owner must not close the engine under its calls; later ones raise ``StoreClosedError``.

    The engine's time-outs are its owner's: unless the transport's were set before it was imported,
    a frozen peer costs a call up to 60 s, and a transfer that reaches 60 s may write later. Set
    ``MC_TCP_STATUS_TIMEOUT_SEC``, ``MC_TCP_PROGRESS_TIMEOUT_SEC`` (2) and
    ``MC_RPC_TIMEOUT_MS`` (2500) in the environment of the process to avoid both.

    Args:
        native_store: The object; already set up.
        rank: Rank, for log lines and errors.
        config: What it was set up with, if you know; it makes a warm-up's diagnosis better.

    Raises:
        InvalidArgumentError: It is not such an object, or it is not set up.
        NotSupportedError: It is of a wheel that is too old; names what is missing.
    """
    store_class = type(native_store)
    methods = methods_of(store_class)
    if not {"put", "get_into", "put_from", "get_hostname"} <= methods[0]:
        raise InvalidArgumentError(
            f"adopt needs a mooncake.store.MooncakeDistributedStore, not {store_class.__name__}",
            rank=rank,
        )
    check_methods(methods[0], rank=rank)
    in_memory = isinstance(native_store, InMemoryStore)
    if native_store.health_check() == _NOT_SET_UP:
        raise InvalidArgumentError(
            "adopt needs a store that is set up: call its setup() first, or let connect() do it "
            "without stopping the loop",
            rank=rank,
        )
    client = EngineClient(
        rank=rank, threads=4, max_abandoned=8, tear_down=None, guarded=not in_memory
    )
    client.take(native_store)

    def convert(given: ReplicateConfig) -> object:
        return given if in_memory else native_replicate_config(load_binding(), given)

    protocol = config.protocol if config is not None else "tcp"
    return make_store(
        _AdoptedStore, client, config, methods, convert, registered_only=protocol != "tcp"
    )
