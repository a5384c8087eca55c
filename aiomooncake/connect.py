"""From a target to an open store: :func:`connect` and :func:`adopt`."""

from __future__ import annotations

import http.client
import importlib.util
import json
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast

import anyio
import anyio.to_thread

from aiomooncake._values import mask_secrets
from aiomooncake.cluster import LocalCluster
from aiomooncake.config import StoreConfig, Target, parse_target, split_address
from aiomooncake.engine.binding import (
    find_address_methods,
    find_methods,
    load_binding,
    native_replicate_config,
)
from aiomooncake.engine.client import EngineClient
from aiomooncake.engine.inmemory import InMemoryEngine, InMemoryStore
from aiomooncake.engine.lifecycle import Lifecycle, prepare_environment
from aiomooncake.engine.process import check_can_open, load_engine
from aiomooncake.engine.turnstile import Turnstile
from aiomooncake.errors import (
    ConfigError,
    InvalidArgumentError,
    NotSupportedError,
    SetupError,
    SetupTimeoutError,
    code_name,
    rank_label,
)
from aiomooncake.master import failure_reason, http_get, probe_alive, probe_tcp
from aiomooncake.opening import Opening
from aiomooncake.store import Store
from aiomooncake.transfers import Transfers
from aiomooncake.warmup import WarmupPolicy

if TYPE_CHECKING:
    from aiomooncake.config import ReplicateConfig
    from aiomooncake.engine.protocol import NativeStore

__all__ = ["adopt", "connect"]

log = logging.getLogger("aiomooncake")

Methods = tuple[frozenset[str], frozenset[str]]
"""All public methods of a binding, and those that name memory of the caller."""

S = TypeVar("S", bound=Store)

_set_ups: Final = Turnstile()

DEFAULT_TIMEOUT: Final = 120.0
_FIRST_DELAY: Final = 0.05
_LONGEST_DELAY: Final = 1.0
_PROBE_TIMEOUT: Final = 1.0
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")
_TELL_EVERY: Final = 10.0
# A set-up that fails this often while the master answers fails for another reason.
_FAILED_SET_UPS: Final = 4
_INVALID: Final = -600
_RPC_FAILED: Final = -900
_NOT_SET_UP: Final = 1
_MARGIN: Final = 0.05


def connect(
    target: str | StoreConfig | None = None,
    *,
    rank: int | str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    warmup: bool | WarmupPolicy | None = None,
    engine: InMemoryEngine | None = None,
    transfer_engine: object | None = None,
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
        **overrides: Fields of :class:`StoreConfig`, on top of the target.

    Raises:
        ConfigError: Something about the target or an override is wrong.
        EngineNotInstalledError: The engine can't be imported; says what is missing.
        SetupTimeoutError: The time is up; says what was waited for.
        SetupError: The engine refuses the set-up.
        WarmupError: The warm-up failed.
        ForkedProcessError: The process was forked from one that had opened a store.
    """
    opener = _Opener(rank, timeout, warmup, engine, transfer_engine)
    return Opening("a store", opener.open(target, overrides), Store.aclose)


@dataclass(slots=True)
class _Opener:
    """One connect while it runs; it knows what is being waited for."""

    rank: int | str | None
    timeout: float
    warmup: bool | WarmupPolicy | None
    engine: InMemoryEngine | None
    transfer_engine: object | None
    private_master: LocalCluster | None = None  # that ends with the store
    doing: str = "starting"
    trouble: str = ""
    tries: int = 0

    async def open(self, target: str | StoreConfig | None, overrides: dict[str, Any]) -> Store:
        if not _is_positive(self.timeout):
            raise InvalidArgumentError(
                f"timeout must be a positive number of seconds, not {self.timeout!r}",
                rank=self.rank,
            )
        if target is None:
            # It may name a file, and the file may be on a slow disk.
            target = await anyio.to_thread.run_sync(StoreConfig.from_env)
        parsed = parse_target(target)
        place = parsed.address or parsed.kind
        store: Store | None = None
        with anyio.move_on_after(self.timeout) as scope:
            store = await self._open(parsed, overrides)
            try:
                if self.warmup:
                    await self._warm_up(store, scope)
            except BaseException:
                # In the background: the caller has waited long enough.
                store._client.begin_close()  # noqa: SLF001  # it is ours
                raise
        if scope.cancelled_caught or store is None:
            self._give_up(place)
        return store

    async def _open(self, parsed: Target, overrides: dict[str, Any]) -> Store:
        if self.engine is not None or parsed.kind == "memory":
            engine = self.engine or InMemoryEngine.named(parsed.address)
            return await self._open_in_memory(engine, parsed.to_config(**overrides))
        check_can_open(self.rank)
        if importlib.util.find_spec("mooncake") is None:
            # Not worth waiting for a master; it tells what is missing.
            load_binding()
        if parsed.kind == "master":
            return await self._open_native(parsed.to_config(**overrides))
        self.doing = "starting a private master"
        parsed.to_config("127.0.0.1:1", **overrides)  # a bad override is told before the start
        cluster = LocalCluster()
        await cluster.start()
        try:
            config = parsed.to_config(
                cluster.address,
                **{
                    "local_hostname": "127.0.0.1",
                    "master_metrics_port": cluster.metrics_port,
                    **overrides,
                },
            )
            store = await self._open_native(config)
        except BaseException:
            await cluster.stop()
            raise
        # Not before: a set-up that fails must leave the master to the next try.
        self.private_master = cluster
        return store

    async def _open_in_memory(self, engine: InMemoryEngine, config: StoreConfig) -> Store:
        client = EngineClient(
            rank=self.rank,
            threads=config.threads,
            max_abandoned=config.max_abandoned,
            tear_down=lambda native: native.close(),
            guarded=False,
        )

        def set_up(keep: Callable[[NativeStore], None]) -> int:
            native = InMemoryStore(engine)
            keep(native)
            return native.setup(
                config.local_hostname or "127.0.0.1",
                config.metadata_server,
                config.global_segment_size,
                config.local_buffer_size,
                config.protocol,
                config.device_name,
                config.master_server_address,
            )

        self.doing = "setting up the in-memory engine"
        code = await self._set_up(client, set_up)
        if code != 0:
            self._refused(config, config.local_hostname or "", code)
        return self._store(client, config, _methods_of(InMemoryStore), lambda given: given)

    async def _open_native(self, config: StoreConfig) -> Store:
        if config.client_server_address is not None:
            raise NotSupportedError(
                "client_server_address asks for a dummy client, which this version does not open; "
                "leave it (and MOONCAKE_CLIENT) out to connect with a client of this process",
                rank=self.rank,
            )
        master: tuple[str, int] | None = None
        if "://" not in config.master_server_address:
            master = split_address(config.master_server_address, field="master_server_address")
            await self._wait_for_master(*master, config.master_metrics_port)
        hostname = await self._hostname(config, master)
        if config.protocol == "rdma":
            await anyio.to_thread.run_sync(_check_rdma, self.rank)
        self.doing = "loading the engine"
        prepare_environment(config)
        binding = await anyio.to_thread.run_sync(load_engine, abandon_on_cancel=True)
        lifecycle = Lifecycle(binding, direct=config.direct)
        if master is not None and (lifecycle.direct is None or self.transfer_engine is not None):
            # This set-up will stop the loop for as long as it takes: not against a frozen master.
            await self._wait_for_master(*master, config.master_metrics_port, probe=probe_alive)

        def tear_down(native: NativeStore) -> None:
            try:
                lifecycle.tear_down(native)
            finally:
                if self.private_master is not None:
                    self.private_master.blocking.stop()

        delay = _FIRST_DELAY
        self.tries = 0
        while True:
            client = EngineClient(
                rank=self.rank,
                threads=config.threads,
                max_abandoned=config.max_abandoned,
                tear_down=tear_down,
                guarded=True,
            )

            def set_up(keep: Callable[[NativeStore], None]) -> int:
                return lifecycle.setup(config, hostname, self.transfer_engine, keep)

            self.doing = f"setting up the engine against {config.master_server_address}"
            code = await self._set_up(client, set_up)
            if code == 0:
                break
            self.tries += 1
            self.trouble = f"the engine answered {code} {code_name(code)}"
            if code == _INVALID or self.tries >= _FAILED_SET_UPS:
                self._refused(config, hostname, code)
            await anyio.sleep(delay)
            delay = min(delay * 2, _LONGEST_DELAY)

        def convert(given: ReplicateConfig) -> object:
            return native_replicate_config(binding, given)

        return self._store(client, config, (binding.methods, binding.address_methods), convert)

    async def _set_up(
        self, client: EngineClient, set_up: Callable[[Callable[[NativeStore], None]], int]
    ) -> int:
        """Run one set-up; whatever does not become an open client is torn down behind us."""
        try:
            async with _set_ups:
                code = await client.set_up(set_up)
        except BaseException:
            client.begin_close()
            raise
        if code != 0:
            client.begin_close()
        return code

    async def _wait_for_master(
        self,
        host: str,
        port: int,
        metrics_port: int | None,
        *,
        probe: Callable[[str, int, float], Awaitable[None]] = probe_tcp,
    ) -> None:
        delay = _FIRST_DELAY
        self.doing = f"waiting for the master {host}:{port}"
        began = anyio.current_time()
        told = -math.inf
        while True:
            self.tries += 1
            try:
                await probe(host, port, _PROBE_TIMEOUT)
                if metrics_port is None or await self._serves(host, metrics_port):
                    return
            except OSError as exc:
                self.trouble = failure_reason(exc)
            waited = anyio.current_time() - began
            if waited - told >= _TELL_EVERY:
                told = waited
                log.warning(
                    "%swaiting for the master %s:%d: %s (%.0f s of %g s)",
                    f"[{rank_label(self.rank)}] " if self.rank is not None else "",
                    host,
                    port,
                    self.trouble,
                    waited,
                    self.timeout,
                )
            await anyio.sleep(delay)
            delay = min(delay * 2, _LONGEST_DELAY)

    async def _hostname(self, config: StoreConfig, master: tuple[str, int] | None) -> str:
        """Find the address by which peers reach this client."""
        if config.local_hostname is not None:
            await self._check_hostname(config.local_hostname)
            return config.local_hostname
        if master is not None:
            return await _route_address(*master)
        raise ConfigError(
            f"local_hostname is needed with {config.master_server_address.split('://')[0]}://: the "
            "way to the master is not known beforehand; give an address by which peers reach this "
            "host (or the master as host:port)",
            rank=self.rank,
        )

    async def _check_hostname(self, hostname: str) -> None:
        """Warn of an address by which peers would reach somebody else, or nobody.

        Only warn: in a container the address of the machine around it may be right.
        """
        if hostname.startswith("["):
            host = hostname[1:].partition("]")[0]
        else:
            host = hostname if hostname.count(":") > 1 else hostname.partition(":")[0]
        try:
            found = await anyio.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
            family, _, _, _, address = found[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(address)
        except OSError as exc:
            log.warning(
                "%slocal_hostname=%r is not an address of this host (%s): peers that are given it "
                "can't reach the memory here, and their calls fail with TRANSFER_FAIL",
                f"[{rank_label(self.rank)}] " if self.rank is not None else "",
                hostname,
                failure_reason(exc),
            )

    async def _serves(self, host: str, metrics_port: int) -> bool:
        """Ask ``/health``; a master whose metrics port is closed gets the benefit of the doubt."""
        try:
            status, body = await http_get(host, metrics_port, "/health", _PROBE_TIMEOUT)
            answer = json.loads(body)
        except TimeoutError:
            self.trouble = f"its metrics port {metrics_port} takes connections but does not answer"
            return False
        except (OSError, ValueError):
            return True
        if (
            status == http.client.OK
            and isinstance(answer, dict)
            and answer.get("service_ready") is False
        ):
            self.trouble = "its /health says that it does not serve yet"
            return False
        return True

    async def _warm_up(self, store: Store, scope: anyio.CancelScope) -> None:
        self.doing = "warming up"
        await store.warmup(policy_until(scope.deadline, self.warmup))

    def _store(
        self,
        client: EngineClient,
        config: StoreConfig,
        methods: Methods,
        convert: Callable[[ReplicateConfig], object],
    ) -> Store:
        return _make_store(
            Store, client, config, methods, convert, registered_only=config.protocol != "tcp"
        )

    def _give_up(self, place: str) -> NoReturn:
        raise SetupTimeoutError(
            f"connect to {place} gave up after {self.timeout:g} s while {self.doing}: "
            f"{self.trouble or 'no answer yet'}. Is the master running there and reachable from "
            "this host? Start it, correct the address, or allow more time with timeout=",
            rank=self.rank,
        )

    def _refused(self, config: StoreConfig, hostname: str, code: int) -> NoReturn:
        raise SetupError(
            f"the engine refuses the set-up: {code} {code_name(code)}, although "
            f"{config.master_server_address} takes connections. The code does not say what is "
            "wrong. Is that the master's RPC port (not its HTTP port, nor another server)? "
            + (
                "Client and master of different versions don't talk: install the same "
                "wheel on both sides. "
                if code == _RPC_FAILED
                else ""
            )
            + f"Check local_hostname={hostname!r} (does it name this host?), "
            f"protocol={config.protocol!r}, device_name={config.device_name!r}, "
            f"metadata_server={config.metadata_server!r} (does it run?), and that "
            f"global_segment_size={config.global_segment_size} and local_buffer_size="
            f"{config.local_buffer_size} bytes fit into memory; MC_LOG_LEVEL=INFO shows the "
            "engine's own log",
            code=code,
            rank=self.rank,
        )


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
    Its owner must not close the engine under its calls.

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
    """
    store_class = type(native_store)
    methods = _methods_of(store_class)
    if not {"put", "get_into", "put_from", "health_check", "get_hostname"} <= methods[0]:
        raise InvalidArgumentError(
            f"adopt needs a mooncake.store.MooncakeDistributedStore, not {store_class.__name__}",
            rank=rank,
        )
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
    return _make_store(
        _AdoptedStore, client, config, methods, convert, registered_only=protocol != "tcp"
    )


def _make_store(
    kind: type[S],
    client: EngineClient,
    config: StoreConfig | None,
    methods: Methods,
    convert: Callable[[ReplicateConfig], object],
    *,
    registered_only: bool,
) -> S:
    transfers = Transfers(
        client,
        rank=client.rank,
        registered_only=registered_only,
        convert=convert,
        master=mask_secrets(config.master_server_address) if config is not None else "",
    )
    return kind(
        client,
        transfers,
        config=config,
        hostname=client.native_object.get_hostname(),
        methods=methods[0],
        address_methods=methods[1],
    )


def _methods_of(store_class: type[Any]) -> Methods:
    return find_methods(store_class), find_address_methods(store_class)


def policy_until(
    deadline: float,
    warmup: bool | WarmupPolicy | None,  # noqa: FBT001  # as connect takes it
) -> WarmupPolicy:
    """Bound a warm-up by a point of the loop's time.

    A little before it, so that what ends is the warm-up, with its history and its diagnosis.
    """
    policy = warmup if isinstance(warmup, WarmupPolicy) else WarmupPolicy()
    left = deadline - anyio.current_time() - _MARGIN
    if policy.timeout is None or policy.timeout > left:
        policy = replace(policy, timeout=max(left, _MARGIN))
    return policy


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _check_rdma(rank: int | str | None) -> None:
    """Refuse a transport that the engine would quietly replace by another one."""
    if not (_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())):
        raise ConfigError(
            "protocol='rdma', but this host has no RDMA device (/sys/class/infiniband is empty), "
            "and the engine would quietly use TCP: load the driver, or say protocol='tcp'",
            rank=rank,
        )


async def _route_address(host: str, port: int) -> str:
    """Find the address of this host on the way to the master; peers can reach it."""
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, _, _, _, address = found[0]
    # Connecting a datagram socket sends nothing; it only picks the route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)  # noqa: FBT003  # its only argument
        probe.connect(address)
        return cast("str", probe.getsockname()[0])
