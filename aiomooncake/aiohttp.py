"""A store inside an aiohttp application: connected in the background, closed behind it.

aiohttp binds its port only when every ``cleanup_ctx`` has come to its first ``yield``. So the store
is connected and warmed up beside that, and until it is ready the application says so: ``/readyz``
answers 503 and why, ``/healthz`` answers, and a handler that needs the store raises a 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from aiomooncake._extras import missing_extra
from aiomooncake.config import StoreConfig, parse_target
from aiomooncake.connect import connect
from aiomooncake.errors import (
    InvalidArgumentError,
    MooncakeError,
    SetupError,
    UnavailableError,
    WarmupError,
    rank_label,
)
from aiomooncake.ranks import RankGroup, connect_ranks
from aiomooncake.store import Store
from aiomooncake.warmup import Diagnosis, WarmupAttempt, WarmupPolicy, WarmupProgress

try:
    from aiohttp import web
except ModuleNotFoundError as exc:
    raise missing_extra(exc, __name__, "aiohttp") from exc

with contextlib.suppress(ModuleNotFoundError):  # `setup` says so, when metrics are wanted
    # Here, and not when they are: that may be on the loop, where no files should be read.
    import aiomooncake.prometheus  # noqa: F401

if TYPE_CHECKING:
    from aiomooncake.opening import Opening

__all__ = ["STORE", "NotReadyError", "StoreService", "setup"]

log = logging.getLogger("aiomooncake")

Rank = int | str
ServiceState = Literal["connecting", "warming-up", "ready", "unavailable", "failed", "closed"]

RETRY_AFTER: Final = "1"
"""Seconds after which a client may try again: stores look for their master about that often."""

_PATIENCE: Final = (5.0, 10.0, 20.0, 40.0, 60.0)
"""Seconds of the first rounds of connecting or warming up; each ends with a word on what is wrong,
and all that follow are as long as the last."""
_PAUSE: Final = 1.0  # seconds between two rounds
_CLOSE_TIMEOUT: Final = 10.0
# Arguments of connect() and connect_ranks() that are no fields of StoreConfig.
_OTHER_ARGUMENTS: Final = frozenset({"rank", "engine", "transfer_engine", "on_health", "per_rank"})


class NotReadyError(UnavailableError, web.HTTPServiceUnavailable):
    """The store is not ready (yet). A handler may let it pass: it is a 503 with a JSON body."""

    def __init__(self, state: str, why: str) -> None:
        text = f"the store is not ready, {state}: {why}"
        web.HTTPServiceUnavailable.__init__(
            self,
            headers={"Retry-After": RETRY_AFTER},
            text=json.dumps(
                {"error": text, "code": None, "code_name": "NOT_READY", "retryable": True}
            ),
            content_type="application/json",
        )
        MooncakeError.__init__(self, text)


@dataclass(slots=True)
class _Row:
    """What is known about the warm-up of one rank."""

    rank: Rank | None
    attempts: int = 0
    last: WarmupAttempt | None = None
    diagnosis: Diagnosis | None = None

    def document(self, store: Store | None) -> dict[str, Any]:
        last, found = self.last, self.diagnosis
        health = None if store is None else store.health()
        return {
            "rank": None if self.rank is None else rank_label(self.rank),
            "store": None if health is None else {"state": health.state, "detail": health.detail},
            "attempts": self.attempts,
            "last_attempt": None
            if last is None
            else {"step": last.step, "code": last.code, "code_name": last.name},
            "diagnosis": None
            if found is None
            else {
                "kind": found.kind.value,
                "explanation": found.explanation,
                "evidence": found.evidence,
                "cure": found.cure,
            },
        }


class StoreService:
    """The store of an application, or one per rank, and how far it has come.

    Made by :func:`setup`; handlers take ``request.app[key].store``.

    Attributes:
        tries: Rounds of connecting so far.
        error: Why the last round of connecting or warming up failed; None when it is ready.
    """

    def __init__(
        self,
        opening: Callable[[float], Opening[Store] | Opening[RankGroup]],
        ranks: Sequence[Rank | None],
        policy: WarmupPolicy | None,
        timeout: float | None,
        *,
        grouped: bool,
    ) -> None:
        self.tries = 0
        self.error: MooncakeError | None = None
        self._opening = opening
        self._policy = policy
        self._timeout = timeout
        self._grouped = grouped
        self._rows = {rank: _Row(rank) for rank in ranks}
        self._opened: Store | RankGroup | None = None
        self._ready: Store | None = None  # the first or only one
        self._state: ServiceState = "connecting"
        self._task: asyncio.Task[None] | None = None
        self._given_up = asyncio.Event()

    @property
    def store(self) -> Store:
        """The store; with ranks, that of the first one.

        Raises:
            NotReadyError: It is not connected and warmed up; as a response, a 503.
        """
        store = self._ready
        if store is None:
            raise self._refusal()
        return store

    @property
    def group(self) -> RankGroup:
        """The stores of all ranks.

        Raises:
            NotReadyError: They are not connected and warmed up.
            InvalidArgumentError: It was set up without ranks.
        """
        if not self._grouped:
            raise InvalidArgumentError("there is one store and no group: give setup() ranks=")
        if self._ready is None or not isinstance(self._opened, RankGroup):
            raise self._refusal()
        return self._opened

    @property
    def connected(self) -> Store:
        """The first or only store as soon as it is connected, warmed up or not.

        Raises:
            NotReadyError: It is not even connected.
        """
        stores = self._stores()
        if not stores:
            raise self._refusal()
        return stores[0]

    @property
    def state(self) -> ServiceState:
        """How far it has come; ``"unavailable"`` is a store that was ready and lost its master."""
        if self._state == "ready" and not all(each.health().ok for each in self._stores()):
            return "unavailable"
        return self._state

    def document(self) -> dict[str, Any]:
        """Tell all that is known, as JSON."""
        stores: list[Store | None] = list(self._stores())
        state = self.state
        return {
            "ready": state == "ready",
            "state": state,
            "error": None if self.error is None else str(self.error),
            "connect_attempts": self.tries,
            "ranks": [
                row.document(store)
                for row, store in zip(
                    self._rows.values(), stores or [None] * len(self._rows), strict=True
                )
            ],
        }

    async def given_up(self) -> MooncakeError:
        """Wait until connecting or warming up has failed for good, and tell why."""
        await self._given_up.wait()
        assert self.error is not None  # noqa: S101  # set before
        return self.error

    def start(self) -> None:
        """Begin to connect, beside whatever the loop does."""
        self._task = asyncio.ensure_future(self._run())

    async def aclose(self, timeout: float | None = _CLOSE_TIMEOUT) -> None:
        """End the connecting, or close what is connected."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._state, self._ready = "closed", None
        if self._opened is not None:
            await self._opened.aclose(timeout)

    def __repr__(self) -> str:
        return f"<StoreService {self.state}>"

    async def _run(self) -> None:
        try:
            self._opened = await self._connect()
            self.error = None
            if self._policy is not None:
                self._state = "warming-up"
                await self._warm_up(self._policy)
        except MooncakeError as exc:
            self._give_up(exc)
        except Exception as exc:  # noqa: BLE001  # of a caller's per_rank; nobody awaits this
            self._give_up(SetupError(repr(exc)), exc)
        else:
            self.error = None
            self._ready = self._stores()[0]
            self._state = "ready"

    def _give_up(self, error: MooncakeError, unforeseen: Exception | None = None) -> None:
        self.error = error
        self._state = "failed"
        self._given_up.set()
        text = "the store of this application is given up: %s"
        log.log(logging.ERROR, text, error, exc_info=unforeseen)

    async def _connect(self) -> Store | RankGroup:
        """Connect, round after round; a fault that no waiting mends ends it."""
        error: MooncakeError | None = None
        for bound in self._rounds():
            self.tries += 1
            try:
                return await self._opening(bound)
            except SetupError as exc:
                error = self.error = exc.with_traceback(None)
                log.warning("%s", exc)
            await asyncio.sleep(_PAUSE)
        assert error is not None  # noqa: S101  # there was a round
        raise error

    async def _warm_up(self, policy: WarmupPolicy) -> None:
        """Warm up, round after round: what is wrong may be mended by others."""
        error: WarmupError | None = None
        for bound in self._rounds():
            longest = bound if policy.timeout is None else min(bound, policy.timeout)
            try:
                await self._opened_warmup(replace(policy, timeout=longest))
                return
            except WarmupError as exc:
                error = self.error = exc
                self._note_diagnoses(exc)
            await asyncio.sleep(_PAUSE)
        assert error is not None  # noqa: S101  # there was a round
        raise error

    async def _opened_warmup(self, policy: WarmupPolicy) -> None:
        if self._opened is not None:
            await self._opened.warmup(policy, on_attempt=self._note_attempt)

    def _rounds(self) -> Iterator[float]:
        """Give the seconds of one round after the other, until the time is up."""
        now = asyncio.get_running_loop().time
        deadline = math.inf if self._timeout is None else now() + self._timeout
        for bound in itertools.chain(_PATIENCE, itertools.repeat(_PATIENCE[-1])):
            left = round(deadline - now(), 2)  # texts tell it
            if left <= 0:
                return
            yield min(bound, left)

    def _note_attempt(self, progress: WarmupProgress) -> None:
        row = self._rows[progress.rank if progress.rank in self._rows else next(iter(self._rows))]
        row.attempts += 1
        row.last = progress.attempt
        if progress.attempt.ok:
            row.diagnosis = None

    def _note_diagnoses(self, error: WarmupError) -> None:
        results = error.results
        for rank, row in self._rows.items():
            failed = error if results is None or rank is None else results.get(rank)
            row.diagnosis = failed.diagnosis if isinstance(failed, WarmupError) else None

    def _stores(self) -> list[Store]:
        opened = self._opened
        if opened is None:
            return []
        return list(opened) if isinstance(opened, RankGroup) else [opened]

    def _refusal(self) -> NotReadyError:
        why = str(self.error) if self.error is not None else "see /readyz"
        return NotReadyError(self._state, why)


STORE: Final[web.AppKey[StoreService]] = web.AppKey("aiomooncake", StoreService)
"""Where :func:`setup` keeps the service, unless it is given another key."""


def setup(
    app: web.Application,
    target: str | StoreConfig | None = None,
    *,
    ranks: int | Iterable[Rank] | None = None,
    warmup: bool | WarmupPolicy = True,
    timeout: float | None = None,
    key: web.AppKey[StoreService] = STORE,
    health_path: str | None = "/healthz",
    ready_path: str | None = "/readyz",
    metrics_path: str | None = None,
    close_timeout: float = _CLOSE_TIMEOUT,
    **connecting: Any,
) -> web.AppKey[StoreService]:
    """Give an application a store, or one per rank, while it runs.

    The store is connected and warmed up in the background when the application starts, and closed
    when it ends. A master that is not there yet is waited for; handlers answer 503 meanwhile.

    Args:
        app: The application; not started yet.
        target: As for :func:`aiomooncake.connect`.
        ranks: A count or ranks, as for :func:`aiomooncake.connect_ranks`; None = one store.
        warmup: Warm up before the store is handed to handlers: True, False or a policy.
        timeout: Seconds for connecting, and for warming up, after which it is given up; None = try
            on for ever.
        key: Where to keep the service; a key of its own for each further store.
        health_path: Answers 200 for as long as the process lives; None = no such route.
        ready_path: Answers 200 when the store is ready, otherwise 503, with JSON on each rank; None
            = no such route.
        metrics_path: Answers what Prometheus scrapes of all stores of this process, by the extra
            ``prometheus``; None = no such route.
        close_timeout: Seconds that closing may hold the end of the application up; it then goes on
            in the background.
        **connecting: Everything else that ``connect`` or ``connect_ranks`` takes.

    Returns:
        The key: ``request.app[key].store`` is the store.

    Raises:
        ConfigError: Something about the target or an option is wrong.
    """
    target = _checked(target, connecting)
    if ranks is None:
        names: list[Rank | None] = [connecting.get("rank")]
    else:
        names = list(range(ranks)) if isinstance(ranks, int) else list(ranks)

    def opening(bound: float) -> Opening[Store] | Opening[RankGroup]:
        if ranks is None:
            return connect(target, timeout=bound, **connecting)
        wanted = [rank for rank in names if rank is not None]
        return connect_ranks(target, wanted, timeout=bound, **connecting)

    policy = warmup if isinstance(warmup, WarmupPolicy) else WarmupPolicy() if warmup else None
    service = StoreService(opening, names, policy, timeout, grouped=ranks is not None)

    async def run(_app: web.Application) -> AsyncIterator[None]:
        service.start()
        yield
        await service.aclose(close_timeout)

    async def healthz(_request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_request: web.Request) -> web.Response:
        document = service.document()
        if document["ready"]:
            return web.json_response(document)
        return web.json_response(document, status=503, headers={"Retry-After": RETRY_AFTER})

    app[key] = service
    app.cleanup_ctx.append(run)
    for path, handler in ((health_path, healthz), (ready_path, readyz)):
        if path is not None:
            app.router.add_get(path, handler)
    if metrics_path is not None:
        app.router.add_get(metrics_path, _metrics())
    return key


def _metrics() -> Callable[[web.Request], Awaitable[web.Response]]:
    """Make a handler that tells the metrics of the stores, and of nothing else."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    from aiomooncake.prometheus import StoreCollector

    registry = CollectorRegistry()
    registry.register(StoreCollector())

    async def metrics(_request: web.Request) -> web.Response:
        # It takes a millisecond or two per rank.
        body = await asyncio.to_thread(generate_latest, registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return metrics


def _checked(
    target: str | StoreConfig | None, connecting: Mapping[str, Any]
) -> str | StoreConfig | None:
    """Refuse now what would only show when the application runs."""
    fields = {name: given for name, given in connecting.items() if name not in _OTHER_ARGUMENTS}
    if target is None and "client_server_address" in fields:
        return None  # it says where to, beside what the environment says
    parsed = parse_target(target)
    parsed.to_config("127.0.0.1:1" if parsed.kind == "local" else None, **fields)
    return parsed.config if target is None else target
