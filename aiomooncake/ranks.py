"""Many ranks in one event loop: connect, warm up and close side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio

from aiomooncake._opener import policy_until
from aiomooncake._tasks import settle, together
from aiomooncake.cluster import LocalCluster
from aiomooncake.config import parse_target
from aiomooncake.connect import DEFAULT_TIMEOUT, connect
from aiomooncake.errors import InvalidArgumentError, WarmupError, rank_label
from aiomooncake.opening import Opening
from aiomooncake.warmup import Pace, WarmupPolicy, WarmupProgress, WarmupReport

if TYPE_CHECKING:
    from aiomooncake.config import StoreConfig
    from aiomooncake.store import Store

__all__ = ["RankGroup", "connect_ranks"]

Rank = int | str


class RankGroup:
    """Open stores by rank, in the order in which the ranks were given.

    ``group[3]`` is the store of rank 3; iteration is over the stores.
    """

    def __init__(self, stores: Mapping[Rank, Store], cluster: LocalCluster | None = None) -> None:
        self._stores = dict(stores)
        self._cluster = cluster

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks, in order."""
        return tuple(self._stores)

    def __getitem__(self, rank: Rank) -> Store:
        return self._stores[rank]

    def __len__(self) -> int:
        return len(self._stores)

    def __iter__(self) -> Iterator[Store]:
        return iter(self._stores.values())

    def __repr__(self) -> str:
        return f"<RankGroup of {len(self)} ranks>"

    async def warmup(
        self,
        policy: WarmupPolicy | None = None,
        *,
        on_attempt: Callable[[WarmupProgress], object] | None = None,
    ) -> dict[Rank, WarmupReport]:
        """Warm all ranks up side by side; it takes the time of the slowest one.

        They share what they learn: their tries are staggered, and the first success wakes those
        that wait.

        Args:
            policy: For each rank; the default is :class:`WarmupPolicy`.
            on_attempt: Called on the loop after every attempt of every rank.

        Returns:
            A report for each rank.

        Raises:
            WarmupError: At least one rank failed; ``.results`` has a report or an error for each.
        """
        pace = Pace()
        answers = await settle(
            store.warmup(policy, on_attempt=on_attempt, _pace=pace) for store in self
        )
        results = dict(zip(self.ranks, answers, strict=True))
        failed = {rank: exc for rank, exc in results.items() if isinstance(exc, BaseException)}
        for exc in failed.values():
            if not isinstance(exc, WarmupError):
                raise exc
        if failed:
            raise _group_error(results)
        return {
            rank: report for rank, report in results.items() if isinstance(report, WarmupReport)
        }

    async def aclose(self, timeout: float | None = 10.0) -> None:
        """Close all stores side by side, each as :meth:`Store.aclose` does."""
        _begin_closes(self)
        await together(store.aclose(timeout) for store in self)
        if self._cluster is not None:
            await self._cluster.stop()

    async def __aenter__(self) -> RankGroup:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.aclose()


def connect_ranks(
    target: str | StoreConfig | None,
    ranks: int | Iterable[Rank],
    *,
    per_rank: Callable[[Rank], Mapping[str, Any]] | None = None,
    warmup: bool | WarmupPolicy | None = None,
    **same: Any,
) -> Opening[RankGroup]:
    """Open one store per rank, side by side; await it, or enter it with ``async with``.

    Args:
        target: As for :func:`connect`. ``"local://"`` starts one private master for all.
        ranks: How many (0 … n-1), or the ranks themselves, ints or texts.
        per_rank: From a rank to overrides of its own, ``{"device_name": "mlx5_1"}`` say.
        warmup: True or a policy: warm up all of them before the group is handed over.
        **same: Everything else that :func:`connect` takes, for all ranks.

    Raises:
        InvalidArgumentError: No rank, or one twice.
        MooncakeError: The first failure of a rank; then none stays open.
    """
    opening = _open_group(target, ranks, per_rank, warmup, same)
    return Opening("a group of stores", opening, RankGroup.aclose)


async def _open_group(
    target: str | StoreConfig | None,
    ranks: int | Iterable[Rank],
    per_rank: Callable[[Rank], Mapping[str, Any]] | None,
    warmup: bool | WarmupPolicy | None,  # noqa: FBT001  # as connect takes it
    same: dict[str, Any],
) -> RankGroup:
    wanted = _check_ranks(ranks)
    began = anyio.current_time()
    options = {rank: same | dict(per_rank(rank) if per_rank else {}) for rank in wanted}
    cluster: LocalCluster | None = None
    parsed = parse_target(target) if isinstance(target, str) else None
    if parsed is not None and parsed.kind == "local" and same.get("engine") is None:
        cluster = LocalCluster()
        await cluster.start()
        target = parsed.to_config(
            cluster.address,
            **{"local_hostname": "127.0.0.1", "master_metrics_port": cluster.metrics_port}
            | dict(parsed.overrides),
        )
    try:
        stores = await _open_all(target, options)
        group = RankGroup(dict(zip(wanted, stores, strict=True)), cluster)
        if warmup:
            try:
                await group.warmup(
                    policy_until(began + same.get("timeout", DEFAULT_TIMEOUT), warmup)
                )
            except BaseException:
                await group.aclose()
                raise
    except BaseException:
        if cluster is not None:
            await cluster.stop()
        raise
    return group


async def _open_all(
    target: str | StoreConfig | None, options: Mapping[Rank, dict[str, Any]]
) -> list[Store]:
    """Open all stores; when one fails the others are stopped and closed again."""
    opened: list[Store] = []

    async def open_one(rank: Rank) -> Store:
        # Here, since a task that is cancelled before it begins would never await it.
        store = await connect(target, rank=rank, **options[rank])
        opened.append(store)
        return store

    try:
        return await together(open_one(rank) for rank in options)
    except BaseException:
        _begin_closes(opened)
        with anyio.CancelScope(shield=True):
            await settle(store.aclose() for store in opened)
        raise


def _begin_closes(stores: Iterable[Store]) -> None:
    """Begin to close stores; what is awaited next may be cancelled before it has begun."""
    for store in stores:
        store._client.begin_close()  # noqa: SLF001  # it is ours


def _check_ranks(ranks: int | Iterable[Rank]) -> list[Rank]:
    if isinstance(ranks, (str, bool)):
        raise InvalidArgumentError(
            f"ranks must be a count or an iterable of ranks, not {ranks!r}; for one rank that is "
            "called so give a list"
        )
    wanted: list[Rank] = list(range(ranks)) if isinstance(ranks, int) else list(ranks)
    if not wanted:
        raise InvalidArgumentError(f"connect_ranks needs at least one rank, got {ranks!r}")
    for rank in wanted:
        if type(rank) not in (int, str) or rank == "":
            raise InvalidArgumentError(f"a rank is an int or a text, not {rank!r}")
    twice = {rank_label(rank) for rank in wanted if wanted.count(rank) > 1}
    if twice:
        raise InvalidArgumentError(
            f"ranks given twice: {', '.join(sorted(twice))}; each rank has one store"
        )
    return wanted


def _group_error(results: dict[Rank, Any]) -> WarmupError:
    failed = {rank: exc for rank, exc in results.items() if isinstance(exc, WarmupError)}
    first_rank, first = next(iter(failed.items()))
    states = ", ".join(
        f"{rank_label(rank)} "
        + ("ready" if isinstance(result, WarmupReport) else f"failed ({_kind(result)})")
        for rank, result in results.items()
    )
    return WarmupError(
        f"Warmup failed on {len(failed)} of {len(results)} ranks: {states}. First: {first}",
        code=first.code,
        rank=first_rank,
        attempts=first.attempts,
        diagnosis=first.diagnosis,
        results=results,
    )


def _kind(error: WarmupError) -> str:
    return error.diagnosis.kind.value if error.diagnosis is not None else "no diagnosis"
