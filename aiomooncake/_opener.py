"""How a store is opened: what is waited for, set up and tried again, in what order."""

from __future__ import annotations

import http.client
import importlib.util
import json
import math
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import anyio
import anyio.to_thread

from aiomooncake._addresses import P2PHANDSHAKE, hosts_of
from aiomooncake._coordinators import Found, ask_metadata_server
from aiomooncake._hosts import check_hostname, check_rdma, route_address
from aiomooncake._values import mask_secrets
from aiomooncake.cluster import LocalCluster
from aiomooncake.config import StoreConfig, Target, parse_target, split_address
from aiomooncake.engine.binding import (
    Binding,
    find_address_methods,
    find_methods,
    load_binding,
    native_replicate_config,
)
from aiomooncake.engine.client import EngineClient
from aiomooncake.engine.inmemory import InMemoryEngine, InMemoryStore
from aiomooncake.engine.lifecycle import (
    DummyLifecycle,
    Lifecycle,
    RealLifecycle,
    prepare_environment,
)
from aiomooncake.engine.options import check_dummy_options, check_installed, was_taken
from aiomooncake.engine.peers import PeerWatch
from aiomooncake.engine.process import check_can_open, load_engine
from aiomooncake.engine.reopening import Reopening
from aiomooncake.engine.shared import SharedMemory
from aiomooncake.engine.turnstile import Turnstile
from aiomooncake.engine.watch import MasterWatch
from aiomooncake.errors import (
    ConfigError,
    InvalidArgumentError,
    SetupError,
    SetupTimeoutError,
    code_name,
    rank_label,
)
from aiomooncake.master import (
    MAX_HEALTH,
    failure_reason,
    http_get,
    probe_alive,
    probe_tcp,
)
from aiomooncake.observe import Health
from aiomooncake.observe.logs import StoreLog
from aiomooncake.observe.roll import ROLL, Connecting
from aiomooncake.store import Store
from aiomooncake.transfers import Transfers
from aiomooncake.warmup import WarmupPolicy

if TYPE_CHECKING:
    from aiomooncake.config import ReplicateConfig
    from aiomooncake.engine.protocol import NativeStore

__all__ = ["Opener", "make_store", "methods_of", "policy_until"]

Methods = tuple[frozenset[str], frozenset[str]]
"""All public methods of a binding, and those that name memory of the caller."""

Keep = Callable[["NativeStore"], None]
S = TypeVar("S", bound=Store)

_set_ups: Final = Turnstile()

_FIRST_DELAY: Final = 0.05
_LONGEST_DELAY: Final = 1.0
_PROBE_TIMEOUT: Final = 1.0
_TELL_EVERY: Final = 10.0
# A set-up that fails this often while the other side answers fails for another reason.
_FAILED_SET_UPS: Final = 4
_INVALID: Final = -600
_UNABLE_OFFLOAD: Final = -1300
_RPC_FAILED: Final = -900
_MARGIN: Final = 0.05
_LEAST_SEGMENT: Final = 16 << 20
_BARE_ETCD: Final = "(A bare host:port is an etcd; an HTTP server is http://host:8080/metadata.) "


@dataclass(slots=True)
class Opener:
    """One connect while it runs; it knows what is being waited for."""

    rank: int | str | None
    timeout: float
    warmup: bool | WarmupPolicy | None
    engine: InMemoryEngine | None
    transfer_engine: object | None
    on_health: Callable[[Health], object] | None = None
    private_master: LocalCluster | None = None  # that ends with the store
    place: str = ""
    hint: str = ""  # of what may be wrong beside the master
    metadata: Found | None = None  # what the metadata server was found to be
    doing: str = "starting"
    trouble: str = ""
    seen: Connecting = field(init=False)

    async def open(self, target: str | StoreConfig | None, overrides: dict[str, Any]) -> Store:
        """Open the store; what :func:`aiomooncake.connect` awaits."""
        with ROLL.connecting(self.rank) as self.seen:
            try:
                return await self._open_in_time(target, overrides)
            finally:
                self.seen.doing = self.doing

    async def _open_in_time(
        self, target: str | StoreConfig | None, overrides: dict[str, Any]
    ) -> Store:
        if not _is_positive(self.timeout):
            raise InvalidArgumentError(
                f"timeout must be a positive number of seconds, not {self.timeout!r}",
                rank=self.rank,
            )
        if target is None:
            # It may name a file, and the file may be on a slow disk.
            target = await anyio.to_thread.run_sync(
                _config_of_environment, overrides.get("client_server_address")
            )
        parsed = parse_target(target)
        self.place = mask_secrets(parsed.address) or parsed.kind
        store: Store | None = None
        with anyio.move_on_after(self.timeout) as scope:
            store = await self._open(parsed, overrides)
            store._client.counters.began = self.seen.began  # noqa: SLF001  # it is ours
            try:
                if self.warmup:
                    await self._warm_up(store, scope)
            except BaseException:
                # In the background: the caller has waited long enough.
                store._client.begin_close()  # noqa: SLF001  # it is ours
                raise
        if scope.cancelled_caught or store is None:
            self._give_up()
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
            config = parsed.to_config(**overrides)
            await self._check_installed(dummy=config.client_server_address is not None)
            if config.client_server_address is not None:
                return await self._open_dummy(config, config.client_server_address)
            return await self._open_real(config)
        self.doing = "starting a private master"
        # A bad override is told before the start.
        config = parsed.to_config("127.0.0.1:1", **overrides)
        if config.client_server_address is not None:
            raise ConfigError(
                "local:// starts a master for this store alone, and client_server_address names a "
                "process that has a master already: give one of them",
                rank=self.rank,
            )
        await self._check_installed(dummy=False)
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
            store = await self._open_real(config)
        except BaseException:
            await cluster.stop()
            raise
        # Not before: a set-up that fails must leave the master to the next try.
        self.private_master = cluster
        return store

    async def _check_installed(self, *, dummy: bool) -> None:
        """Refuse a wheel that is too old; nobody waits for a master only to hear that."""
        if was_taken(dummy=dummy):
            return  # without a thread, of which a program may have none to spare
        self.doing = "looking at the engine's version"
        look = partial(check_installed, dummy=dummy)
        await anyio.to_thread.run_sync(look, abandon_on_cancel=True)

    # ------------------------------------------------------------------ kinds of clients

    async def _open_in_memory(self, engine: InMemoryEngine, config: StoreConfig) -> Store:
        client = EngineClient(
            rank=self.rank,
            threads=config.threads,
            max_abandoned=config.max_abandoned,
            tear_down=lambda native: native.close(),
            guarded=False,
        )

        def set_up(keep: Keep) -> int:
            native = InMemoryStore(engine, config.rpc_timeout)
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
        return make_store(
            Store,
            client,
            config,
            methods_of(InMemoryStore),
            lambda given: given,
            registered_only=config.protocol != "tcp",
            on_health=self.on_health,
        )

    async def _open_real(self, config: StoreConfig) -> Store:
        if config.protocol == "rdma":
            await anyio.to_thread.run_sync(check_rdma, self.rank)
        master: tuple[str, int] | None = None
        if "://" not in config.master_server_address:
            master = split_address(config.master_server_address, field="master_server_address")
            await self._wait_for_master(*master, config.master_metrics_port)
        if config.metadata_server.startswith("http"):  # the engine waits for etcd by itself
            (server,) = hosts_of(config.metadata_server)
            await self._wait_for("the metadata server", *server, probe=probe_tcp)
        hostname = await self._hostname(config, master)
        binding = await self._load_engine(config)
        lifecycle = RealLifecycle(binding, config, hostname, self.transfer_engine)
        if master is not None and (lifecycle.entry is None or self.transfer_engine is not None):
            # This set-up will stop the loop for as long as it takes: not against a frozen master.
            await self._wait_for_master(*master, config.master_metrics_port, probe=probe_alive)
        self.doing = f"setting up the engine against {mask_secrets(config.master_server_address)}"
        if config.metadata_server != P2PHANDSHAKE:
            self.doing += f" with metadata_server={mask_secrets(config.metadata_server)!r}"
            self.hint = "Does the metadata server run, and does it answer? "
            self.hint += "" if "://" in config.metadata_server else _BARE_ETCD
        alive: Callable[[], Awaitable[None]] | None = None
        if master is not None:
            metrics_port = config.master_metrics_port
            alive = partial(self._wait_for_master, *master, metrics_port, probe=probe_alive)
        client = await self._set_up_native(
            config,
            lifecycle,
            partial(self._refused, config, hostname),
            ask=partial(self._ask_metadata_server, config.metadata_server, hostname),
            alive=alive,
        )
        address, told = config.master_server_address, self.on_health is not None
        _watch(client, config, "the master", address, master, told=told)
        client.reopening = Reopening(client, lifecycle)
        # Peers with mere names would all be taken for dead.
        if config.fail_fast and config.metadata_server == P2PHANDSHAKE:
            metrics = config.master_metrics_port
            known = (master[0], metrics) if master is not None and metrics is not None else None
            client.peers = PeerWatch(client, known)
        return make_store(
            Store,
            client,
            config,
            (binding.methods, binding.address_methods),
            partial(native_replicate_config, binding),
            registered_only=config.protocol != "tcp",
            on_health=self.on_health,
        )

    async def _open_dummy(self, config: StoreConfig, address: str) -> Store:
        """Open a dummy client: a stand-alone client process on this host does the work."""
        if self.transfer_engine is not None:
            raise InvalidArgumentError(
                "transfer_engine= is for a client of this process; with client_server_address the "
                "engine is in the other process: leave one of them out",
                rank=self.rank,
            )
        self.place = address
        check_dummy_options(config)
        host, port = split_address(address, field="client_server_address")
        # Alive, and not only there: a set-up against a frozen process waits for 30 s.
        await self._wait_for("the stand-alone client", host, port, probe=probe_alive)
        binding = await self._load_engine(config)
        shared = await anyio.to_thread.run_sync(SharedMemory, binding, config, self.rank)
        lifecycle = DummyLifecycle(binding, config, (host, port), shared)
        self.doing = f"setting up a dummy client of {address}"
        client = await self._set_up_native(
            config, lifecycle, partial(self._refused_by_client, address, port), shared=shared
        )
        # Which of the two it is, a dummy client can't tell.
        who = f"{mask_secrets(address)} (client_server_address), or its master,"
        told = self.on_health is not None
        _watch(client, config, "the stand-alone client", who, (host, port), told=told)
        return make_store(
            Store,
            client,
            config,
            (binding.methods, binding.address_methods),
            partial(native_replicate_config, binding),
            registered_only=True,
            shared=shared,
            on_health=self.on_health,
        )

    async def _load_engine(self, config: StoreConfig) -> Binding:
        self.doing = "loading the engine"
        prepare_environment(config)
        return await anyio.to_thread.run_sync(load_engine, abandon_on_cancel=True)

    async def _set_up_native(
        self,
        config: StoreConfig,
        lifecycle: Lifecycle,
        refused: Callable[[int], NoReturn],
        *,
        shared: SharedMemory | None = None,
        ask: Callable[[int], Awaitable[None]] | None = None,
        alive: Callable[[], Awaitable[None]] | None = None,
    ) -> EngineClient:
        """Set up a client; a try that fails is made again, when ``alive`` returns.

        What may be the reason beside the master is asked for by ``ask``, after each of them.
        """

        def tear_down(native: NativeStore | None) -> None:
            try:
                if native is not None:
                    lifecycle.tear_down(native)
            finally:
                if self.private_master is not None:
                    self.private_master.blocking.stop()

        delay, failed = _FIRST_DELAY, 0
        while True:
            client = EngineClient(
                rank=self.rank,
                threads=config.threads,
                max_abandoned=config.max_abandoned,
                tear_down=tear_down,
                guarded=True,
                shared=shared,
            )
            code = await self._set_up(client, lifecycle.setup)
            if code == 0:
                return client
            self._count_try()
            failed += 1
            self.trouble = f"the engine answered {code} {code_name(code)}"
            if ask is not None:
                await ask(code)
            if code in (_INVALID, _UNABLE_OFFLOAD) or failed >= _FAILED_SET_UPS:
                refused(code)
            # In less it could not tell, and would be named for what used the time up.
            if alive is not None and _time_left() > _PROBE_TIMEOUT:
                doing = self.doing
                await alive()  # one that is frozen refuses nothing: it is waited for
                self.doing = doing
            await anyio.sleep(delay)
            delay = min(delay * 2, _LONGEST_DELAY)

    async def _set_up(self, client: EngineClient, set_up: Callable[[Keep], int]) -> int:
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

    def _count_try(self) -> None:
        self.seen.attempts += 1

    # ------------------------------------------------------------------ who is there

    async def _wait_for_master(
        self,
        host: str,
        port: int,
        metrics_port: int | None,
        *,
        probe: Callable[[str, int, float], Awaitable[None]] = probe_tcp,
    ) -> None:
        async def serves() -> bool:
            return metrics_port is None or await self._serves(host, metrics_port)

        await self._wait_for("the master", host, port, probe=probe, serves=serves)

    async def _wait_for(
        self,
        what: str,
        host: str,
        port: int,
        *,
        probe: Callable[[str, int, float], Awaitable[None]],
        serves: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        delay = _FIRST_DELAY
        self.doing = f"waiting for {what} {host}:{port}"
        began = anyio.current_time()
        told = -math.inf
        while True:
            self._count_try()
            try:
                await probe(host, port, _PROBE_TIMEOUT)
                if serves is None or await serves():
                    return
            except OSError as exc:
                self.trouble = failure_reason(exc)
            waited = anyio.current_time() - began
            if waited - told >= _TELL_EVERY:
                told = waited
                StoreLog(self.rank, "").warning(
                    "%swaiting for %s %s:%d: %s (%.0f s of %g s)",
                    f"[{rank_label(self.rank)}] " if self.rank is not None else "",
                    what,
                    host,
                    port,
                    self.trouble,
                    waited,
                    self.timeout,
                )
            await anyio.sleep(delay)
            delay = min(delay * 2, _LONGEST_DELAY)

    async def _ask_metadata_server(self, server: str, hostname: str, code: int) -> None:
        """Ask the metadata server whether it is the reason; in the time that is left."""
        if server == P2PHANDSHAKE:
            return
        left = _time_left() - _MARGIN
        # It has an entry of this name only if another client made it: the engine takes back its own
        # when a set-up fails.
        name = hostname if code == _INVALID else ""
        self.metadata = await ask_metadata_server(server, min(left, _PROBE_TIMEOUT), name=name)
        if self.metadata is not None and self.metadata.state != "well":
            self.trouble += f"; of the metadata server, {self.metadata.text}"

    async def _serves(self, host: str, metrics_port: int) -> bool:
        """Ask ``/health``; a master whose metrics port is closed gets the benefit of the doubt."""
        try:
            status, body = await http_get(
                host, metrics_port, "/health", _PROBE_TIMEOUT, most=MAX_HEALTH
            )
            answer = json.loads(body)
        except TimeoutError:
            self.trouble = f"its metrics port {metrics_port} takes connections but does not answer"
            return False
        except (OSError, ValueError, RecursionError):
            return True
        if (
            status == http.client.OK
            and isinstance(answer, dict)
            and answer.get("service_ready") is False
        ):
            self.trouble = "its /health says that it does not serve yet"
            return False
        return True

    async def _hostname(self, config: StoreConfig, master: tuple[str, int] | None) -> str:
        """Find the address by which peers reach this client."""
        if config.local_hostname is not None:
            await check_hostname(config.local_hostname, self.rank)
            return config.local_hostname
        if master is not None:
            return await route_address(*master)
        raise ConfigError(
            f"local_hostname is needed with {config.master_server_address.split('://')[0]}://: the "
            "way to the master is not known beforehand; give an address by which peers reach this "
            "host (or the master as host:port)",
            rank=self.rank,
        )

    # ------------------------------------------------------------------ ends

    async def _warm_up(self, store: Store, scope: anyio.CancelScope) -> None:
        self.doing = "warming up"
        await store.warmup(policy_until(scope.deadline, self.warmup))

    def _give_up(self) -> NoReturn:
        if self.doing.startswith("setting up the engine"):
            advice = (
                "Does the coordinator run there, and does it know a master? "
                if "://" in self.place
                else "Connections are accepted there. Is that the master's RPC port (not its HTTP "
                "port), and is the master frozen or overloaded? "
            )
            advice += f"{self.hint}`aiomooncake doctor` tells; or allow more time with timeout="
        else:
            advice = (
                "Is it running there and reachable from this host? Start it, correct the "
                "address, or allow more time with timeout="
            )
        raise SetupTimeoutError(
            f"connect to {self.place} gave up after {self.timeout:g} s while {self.doing}: "
            f"{self.trouble or 'no answer yet'}. {advice}",
            rank=self.rank,
        )

    def _refused(self, config: StoreConfig, hostname: str, code: int) -> NoReturn:
        master = mask_secrets(config.master_server_address)
        if code == _UNABLE_OFFLOAD:
            raise SetupError(
                f"the master {master} does not offload to disk ({code} "
                f"{code_name(code)}): start it with --enable_offload=true, or leave "
                "enable_ssd_offload out",
                code=code,
                rank=self.rank,
            )
        if "://" in master:
            asked = (
                f"by way of {master}. The code does not say what is wrong. Does the coordinator "
                "run there, does it know a master, and was this wheel built for it? "
            )
        else:
            asked = (
                f"although {master} takes connections. The code does not say what is wrong. Is "
                "that the master's RPC port (not its HTTP port, nor another server), and not "
                "frozen? "
            )
        first = ""
        if config.metadata_server != P2PHANDSHAKE:
            first, more = self._of_the_metadata_server(config.metadata_server, hostname)
            asked += more
        size = config.global_segment_size
        if code == _INVALID and 0 < size < _LEAST_SEGMENT:
            first = (
                f"global_segment_size={size} bytes is below 16 MiB, and this engine refuses such a "
                "segment: give 0 (to mount none), or 16 MiB and more. "
            )
        raise SetupError(
            f"{first}{'T' if first else 't'}he engine refuses the set-up: {code} "
            f"{code_name(code)}, {asked}"
            + (
                "Client and master of different versions don't talk: install the same "
                "wheel on both sides. "
                if code == _RPC_FAILED
                else ""
            )
            + f"Check local_hostname={hostname!r} (does it name this host?), "
            f"protocol={config.protocol!r}, device_name={config.device_name!r}, and that "
            f"global_segment_size={config.global_segment_size} and local_buffer_size="
            f"{config.local_buffer_size} bytes fit into memory (this engine refuses a segment "
            "below 16 MiB); MC_LOG_LEVEL=INFO shows the engine's own log",
            code=code,
            rank=self.rank,
        )

    def _of_the_metadata_server(self, address: str, hostname: str) -> tuple[str, str]:
        """Tell what is wrong with it; or what remains to be asked."""
        shown = f"metadata_server={mask_secrets(address)!r}"
        bare = "" if "://" in address else _BARE_ETCD
        found = self.metadata
        if found is None:
            return "", (
                f"Does {shown} run, is its path right, and has no other client this "
                f"local_hostname there? {bare}"
            )
        if found.state == "well":
            return "", f"The metadata server is there ({shown}): {found.text}. {bare}"
        if found.state == "taken":
            cure = (
                f"give this client a local_hostname of its own instead of {hostname!r}, or leave "
                "the port out. The engine took the other's entry away: if that client runs, nobody "
                "finds it until it is started anew; if it was killed, the name is free now"
            )
        elif found.state == "strange":
            cure = 'correct the path: Mooncake\'s servers have "/metadata"'
        else:
            cure = f'start it, or correct it ("{P2PHANDSHAKE}" needs none, if all clients say so)'
        return f"{shown}: {found.text}: {cure}. {bare}", ""

    def _refused_by_client(self, address: str, port: int, code: int) -> NoReturn:
        raise SetupError(
            f"the engine refuses to set up a dummy client: {code} {code_name(code)}, although "
            f"{address} takes connections. Is that the --port of a mooncake_client (not a master, "
            "nor another server), of the same version as this wheel? Is it on this host, and in "
            "this container's network namespace: the two share memory through the Unix socket "
            f"@mooncake_client_{port}.sock? Does mem_pool_size fit into memory? "
            "MC_LOG_LEVEL=INFO shows the engine's own log",
            code=code,
            rank=self.rank,
        )


def make_store(
    kind: type[S],
    client: EngineClient,
    config: StoreConfig | None,
    methods: Methods,
    convert: Callable[[ReplicateConfig], object],
    *,
    registered_only: bool,
    shared: SharedMemory | None = None,
    on_health: Callable[[Health], object] | None = None,
) -> S:
    """Put a store on an open client.

    Args:
        kind: The class of store.
        client: The open client.
        config: What it is connected to; None when that is not known.
        methods: What the binding offers.
        convert: Makes the binding's placement options of ours.
        registered_only: The transport moves only registered memory.
        shared: Where the memory of a dummy client comes from.
        on_health: Told of each change of the store's health.
    """
    transfers = Transfers(
        client,
        rank=client.rank,
        registered_only=registered_only,
        shared=shared,
        convert=convert,
        master=mask_secrets(config.master_server_address) if config is not None else "",
    )
    client.hostname = client.native_object.get_hostname()
    if not client.hostname and config is not None:  # a dummy client has none
        client.hostname = config.client_server_address or ""
    return kind(
        client,
        transfers,
        config=config,
        methods=methods[0],
        address_methods=methods[1],
        on_health=on_health,
    )


def _watch(
    client: EngineClient,
    config: StoreConfig,
    what: str,
    address: str,
    server: tuple[str, int] | None,
    *,
    told: bool,
) -> None:
    who = f"{what} {mask_secrets(address)}"
    client.watch = MasterWatch(client, master=server, who=who, fail_fast=config.fail_fast)
    if told:
        client.watch.patrol()


def methods_of(store_class: type[Any]) -> Methods:
    """Find the methods of a binding."""
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


def _config_of_environment(client_server_address: str | None) -> StoreConfig:
    environ = dict(os.environ)
    if client_server_address:
        StoreConfig("", client_server_address=client_server_address)  # checked by its own name
        # It says where to, so the environment need not, and may say something else.
        environ.pop("MOONCAKE_CLIENT_SERVER_ADDRESS", None)
        environ.pop("MOONCAKE_STANDALONE_STORAGE", None)
        environ["MOONCAKE_CLIENT"] = client_server_address
    return StoreConfig.from_env(environ)


def _time_left() -> float:
    """Seconds until a connect gives up."""
    return anyio.current_effective_deadline() - anyio.current_time()


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0
