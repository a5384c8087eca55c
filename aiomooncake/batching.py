"""Merging of waiting calls: what waits together travels together.

A thread hop and an engine call cost a few hundred microseconds, but a batch of 64 keys costs less
than three single calls. So calls of single keys are collected per verb and options, in lanes
(:mod:`aiomooncake.lanes`), and travel in the engine's batch calls:

* **No timers, no added latency.** The first call of an idle lane leaves at the end of the current
  turn of the loop; whatever arrives while :data:`WIDTH` batches are under way is the next batch.
* **Keys in a batch are unique**; reads of the same key share one answer.
* **A call joins only a batch that has not left**, so that a read sees every write that was finished
  before it was asked for.
* **Writes of one key go one after the other** (:mod:`aiomooncake._turns`), also those that travel
  by themselves.
* **A batch that takes unusually long holds nobody up.** It no longer counts as under way, and reads
  in it are asked for again, owner by owner (:mod:`aiomooncake.hedging`). Reads into the callers'
  memory are not: those of a batch with a stuck peer wait for it, since the engine may still write
  into their memory, and are right all the same.

What is promised about concurrent calls on the same key: a call that was awaited is seen by every
call made after it. Calls that overlap happen in any order, each of them whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast

from aiomooncake._turns import Turns
from aiomooncake.engine.shared import MemoryLostError
from aiomooncake.hedging import GetLane
from aiomooncake.lanes import Job, KeyedLane, ReadLane, Waiting
from aiomooncake.load import Load
from aiomooncake.memory_lane import MemoryLane, Move
from aiomooncake.transfers import MANY_KEYS, Transfers

if TYPE_CHECKING:
    from aiomooncake.config import ReplicateConfig
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.engine.workers import Lane as Threads
    from aiomooncake.use import Use
    from aiomooncake.views import Views

__all__ = ["ASKED_KEYS", "WIDTH", "WRITE_WIDTH", "Batching", "Waiting"]

WIDTH: Final = 2
"""Batches of one lane under way; a second one is on its way while the first is answered."""

WRITE_WIDTH: Final = 4

ASKED_KEYS: Final = 1000
"""Keys of one batch that only asks the master."""

_UNMERGED_WIDTH: Final = 1 << 30

_LoadJob = Callable[[Load], Sequence[Any]]


class Batching:
    """The lanes of one store on one event loop.

    Attributes:
        gets: Reads of values.
        exists: Questions whether a key is there.
        sizes: Questions for sizes.
        into: Reads into one piece of the caller's memory.
        into_parts: Reads into several pieces.
        views: Values that are brought into view.
    """

    def __init__(
        self, client: EngineClient, transfers: Transfers, views: Views, *, merge: bool
    ) -> None:
        self.client = client
        self.transfers = transfers
        self.loop = asyncio.get_running_loop()
        self._turns = Turns()
        self._writes: dict[Hashable, KeyedLane] = {}
        self._plain_writes: dict[str, KeyedLane] = {}
        self._merge = merge
        many = {"width": self._width(WIDTH), "max_keys": self._max_keys(MANY_KEYS)}
        asked = many | {"max_keys": self._max_keys(ASKED_KEYS)}
        self.gets = GetLane(client, transfers, "get", _by_key(transfers.get_keys), **many)
        self.exists = ReadLane(client, "exists", _by_key(transfers.exists_keys), **asked)
        self.sizes = ReadLane(client, "size", _by_key(transfers.size_keys), **many)
        into, parts = _by_move(transfers.get_into_all), _by_move(transfers.get_into_parts_all)
        self.into = MemoryLane(client, "get_into", into, turns=Turns(), **many)
        self.into_parts = MemoryLane(client, "get_into", parts, turns=Turns(), **many)
        # Each view has a life of its own, so they don't share one answer.
        self.views = KeyedLane(client, "get_view", _by_key(views.view_keys), turns=Turns(), **many)

    def writes(self, verb: str, config: ReplicateConfig | None) -> KeyedLane:
        """Find the lane of ``put`` or ``upsert`` with these placement options.

        Options that are lists with an entry per key are not looked at: the entry is the item's.
        """
        if config is None:
            lane = self._plain_writes.get(verb)
            if lane is not None:
                return lane
        write = self.transfers.put_all if verb == "put" else self.transfers.upsert_all
        return self._lane_with(config, KeyedLane, verb, _by_value, write)

    def gets_into(self, *, parts: bool) -> MemoryLane:
        """Find the lane that reads into the callers' memory, in one piece or in parts."""
        return self.into_parts if parts else self.into

    def puts_from(self, config: ReplicateConfig | None, *, parts: bool) -> MemoryLane:
        """Find the lane that stores the callers' memory, in one piece or in parts."""
        verb = "put_parts" if parts else "put_from"
        lane = self._plain_writes.get(verb) if config is None else None
        if lane is None:
            write = self.transfers.put_parts_all if parts else self.transfers.put_all
            lane = self._lane_with(config, MemoryLane, verb, _by_move, write)
        return cast("MemoryLane", lane)

    def removes(self, *, force: bool) -> KeyedLane:
        """Find the lane of ``remove``."""
        job = _by_key(partial(self.transfers.remove_keys, force=force))
        return self._write_lane(KeyedLane, "remove", force, job, ASKED_KEYS)

    def _lane_with(
        self,
        config: ReplicateConfig | None,
        kind: type[KeyedLane],
        verb: str,
        cut: Callable[[_LoadJob], Job],
        write: Callable[..., Sequence[Any]],
    ) -> KeyedLane:
        grouped = config is not None and bool(config.group_ids)
        if config is not None and grouped:
            config = replace(config, group_ids=None)
        job = cut(partial(write, config=config))
        lane = self._write_lane(kind, verb, (config, grouped), job, MANY_KEYS)
        if config is None:
            self._plain_writes[verb] = lane
        return lane

    def _write_lane(
        self, kind: type[KeyedLane], verb: str, options: Hashable, job: Job, max_keys: int
    ) -> KeyedLane:
        place = (verb, options)
        lane = self._writes.get(place)
        if lane is None:
            # Options may differ from call to call without end; lanes must not.
            self._writes = {p: one for p, one in self._writes.items() if not one.idle}
            lane = self._writes[place] = kind(
                self.client,
                verb,
                job,
                width=self._width(WRITE_WIDTH),
                max_keys=self._max_keys(max_keys),
                turns=self._turns,
            )
        return lane

    async def write_alone(
        self,
        lane: Threads,
        verb: str,
        key: str,
        job: Callable[[], None],
        *,
        drain: bool,
        use: Use | None = None,
    ) -> None:
        """Run a write that travels by itself, when it is its turn; it holds ``use``."""
        if use is not None:
            use.hold()
        try:
            await self._turns.mine(key)
        except BaseException:
            if use is not None:
                use.end()
            raise

        def over() -> None:
            if use is not None:
                use.end()
            self._turns.end_from_thread(key, self.loop)

        await self.client.run(lane, verb, job, drain=drain, over=over)

    def _width(self, width: int) -> int:
        return width if self._merge else _UNMERGED_WIDTH

    def _max_keys(self, keys: int) -> int:
        return keys if self._merge else 1


def _by_key(job: Callable[[Sequence[str]], Sequence[Any]]) -> Job:
    """Make a job for keys one for waiting calls."""

    def job_of_calls(calls: Sequence[Waiting]) -> Sequence[Any]:
        return job([call.key for call in calls])

    return job_of_calls


def _by_value(job: _LoadJob) -> Job:
    """Make a job for a load one for waiting calls with a value each."""

    def job_of_calls(calls: Sequence[Waiting]) -> Sequence[Any]:
        grouped = calls[0].group is not None
        load = Load(
            [call.key for call in calls],
            [call.block for call in calls],
            [call.nbytes for call in calls],
            [call.group for call in calls] if grouped else None,
        )
        return job(load)

    return job_of_calls


def _each_if_lost(job: _LoadJob, load: Load) -> Sequence[Any]:
    """Do a job for each key alone when some memory was lost, so that the others are not hurt."""
    try:
        return job(load)
    except MemoryLostError as exc:
        if len(load) == 1:
            exc.key = load.keys[0]
            return [exc.with_traceback(None)]
    return [answer for i in range(len(load)) for answer in _each_if_lost(job, load.cut(i, i + 1))]


def _by_move(job: _LoadJob) -> Job:
    """Make a job for a load one for moves of several keys each."""

    def job_of_moves(moves: Sequence[Move]) -> Sequence[Any]:
        answers = iter(_each_if_lost(job, Load.join([move.load for move in moves])))
        return [list(islice(answers, move.count)) for move in moves]

    return cast("Job", job_of_moves)
