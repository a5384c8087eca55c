"""Merging of waiting calls: what waits together travels together.

A thread hop and an engine call cost a few hundred microseconds, but a batch of 64 keys costs less
than three single calls. So calls of single keys are collected per verb and options, and travel in
the engine's batch calls:

* **No timers, no added latency.** The first call of an idle lane leaves at the end of the current
  turn of the loop; whatever arrives while :data:`WIDTH` batches are under way is the next batch.
* **Keys in a batch are unique**; reads of the same key share one answer.
* **A call joins only a batch that has not left**, so that a read sees every write that was finished
  before it was asked for.
* **Writes of one key go one after the other** (:mod:`aiomooncake._turns`), also those that travel
  by themselves.
* **A batch that takes unusually long holds nobody up.** It no longer counts as under way, and reads
  in it are asked for again, owner by owner (:meth:`_ReadLane._hedge`).

What is promised about concurrent calls on the same key: a call that was awaited is seen by every
call made after it. Calls that overlap happen in any order, each of them whole.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from aiomooncake._turns import Turns
from aiomooncake.engine.client import OVERDUE
from aiomooncake.errors import MooncakeError
from aiomooncake.transfers import LARGE, MANY_KEYS, MERGED_BYTES, Item, Transfers

if TYPE_CHECKING:
    from aiomooncake.buffers import Use
    from aiomooncake.config import ReplicateConfig
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.engine.workers import Call
    from aiomooncake.engine.workers import Lane as Threads
    from aiomooncake.memory import Block
    from aiomooncake.views import Views

__all__ = ["Batching", "Lane", "Waiting"]

WIDTH: Final = 2
"""Batches of one lane under way; a second one is on its way while the first is answered."""

WRITE_WIDTH: Final = 4

ASKED_KEYS: Final = 1000
"""Keys of one batch that only asks the master."""

_UNMERGED_WIDTH: Final = 1 << 30

# What most answers are; all others are looked at one by one.
_PLAIN: Final = frozenset({bytes, bool, int, type(None)})

Job = Callable[[Sequence["Waiting"]], Sequence[Any]]


class Waiting(Item):
    """One key that waits, with everybody who waits for it."""

    __slots__ = ("batch", "begin", "waiters")

    def __init__(
        self,
        key: str,
        block: Block | None = None,
        group: str | None = None,
        use: Use | None = None,
    ) -> None:
        # Not by super(): one of these is made for every call.
        self.key = key
        self.block = block
        self.group = group
        self.use = use
        self.batch: _Batch | None = None
        self.begin: Callable[[], object] | None = None  # set while it waits for its turn
        self.waiters: list[asyncio.Future[Any]] = []


@dataclass(slots=True, eq=False)
class _Batch:
    items: list[Waiting]
    call: Call | None = None
    since: float = 0.0
    overdue: bool = False
    hedged: bool = False
    awaited: int = field(default=0)
    """Items somebody still waits for."""


class Lane:
    """The calls of one verb with the same options, on one event loop."""

    def __init__(
        self, batching: Batching, name: str, job: Job, *, width: int, max_keys: int
    ) -> None:
        self.name = name
        self._batching = batching
        self._client = batching.client
        self._loop = asyncio.get_running_loop()
        self._job = job
        self._width = width
        self._max_keys = max_keys
        self._pending: dict[str, Waiting] = {}
        self._under_way = 0
        self._scheduled = False
        self._watching = False
        self._batches: set[_Batch] = set()

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._pending and not self._batches

    async def ask(self, item: Waiting, *, drain: bool = False) -> Any:
        """Wait for the answer of one key; cancelled, it leaves the batch if that has not left.

        With ``drain`` the item names memory of the caller, and a batch that has left is waited
        for before the cancellation goes on.
        """
        item = self._join(item)
        waiter = self._loop.create_future()
        item.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            self._leave(item, waiter)
            if drain and item.use is not None:
                await item.use.drained()
            raise
        finally:
            # It holds the error, whose traceback holds this frame: a cycle with the value in it.
            del waiter

    async def ask_all(self, items: Sequence[Waiting]) -> list[Any]:
        """Wait for the answers of many keys, in order; what went wrong with a key is its answer.

        Raises:
            MooncakeError: What is not about one key: the store is closed, say.
        """
        places: list[tuple[Waiting, asyncio.Future[Any]]] = []
        for each in items:
            item = self._join(each)
            waiter = self._loop.create_future()
            item.waiters.append(waiter)
            places.append((item, waiter))
        answers: list[Any] = []
        try:
            for _, waiter in places:
                try:
                    answers.append(await waiter)
                except MooncakeError as exc:
                    if exc.key is None:
                        raise
                    answers.append(exc.with_traceback(None))  # of no use, and a cycle
        except BaseException:
            for item, waiter in places[len(answers) :]:
                if waiter.done() and not waiter.cancelled():
                    waiter.exception()  # retrieved: nobody is interested any more
                else:
                    waiter.cancel()
                    self._leave(item, waiter)
            raise
        return answers

    def _join(self, item: Waiting) -> Waiting:
        raise NotImplementedError

    def _wake(self) -> None:
        if not self._scheduled and self._under_way < self._width:
            self._scheduled = True
            # At the end of this turn: tasks that were woken together ask together.
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        while self._pending and self._under_way < self._width:
            self._send(self._take())

    def _take(self) -> list[Waiting]:
        pending = self._pending
        if len(pending) <= self._max_keys:
            self._pending = {}
            return list(pending.values())
        keys = list(islice(pending, self._max_keys))
        return [pending.pop(key) for key in keys]

    def _send(self, items: list[Waiting]) -> None:
        batch = _Batch(items, awaited=len(items))
        for item in items:
            item.batch = batch
        self._batches.add(batch)
        self._under_way += 1
        try:
            batch.call = self._client.start(
                self._client.small,
                self.name,
                self._job,
                items,
                done=lambda call: self._over(batch, call),
                over=partial(_let_go, items),
                reads=self.name.startswith("get"),
            )
        except Exception as exc:  # noqa: BLE001  # those who wait for it get it
            _let_go(items)
            self._close(batch)
            for item in items:
                self._fail(item, exc)
            return
        batch.since = self._loop.time()
        if not self._watching:
            self._watching = True
            self._loop.call_later(OVERDUE, self._watch)

    def _over(self, batch: _Batch, call: Call) -> None:
        """Hand out the answers of a batch, all in one turn of the loop."""
        self._close(batch)
        self._client.note_lag(call)
        error, call.error = call.error, None  # kept there it is a cycle: see Call.outcome
        if error is not None:
            for item in batch.items:
                self._fail(item, error)
        else:
            for item, answer in zip(batch.items, call.result, strict=True):
                if type(answer) in _PLAIN:
                    for waiter in item.waiters:
                        if not waiter.done():
                            waiter.set_result(answer)
                    item.waiters.clear()
                else:
                    self._answer(item, answer)
        # Cycles, which would hold the values until somebody collects garbage.
        batch.items, batch.call = [], None
        if self._pending:
            self._wake()

    def _close(self, batch: _Batch) -> None:
        self._batches.discard(batch)
        if not batch.overdue:
            self._under_way -= 1

    def _answer(self, item: Waiting, answer: Any) -> None:
        if isinstance(answer, MooncakeError):
            if len(item.waiters) == 1 and not item.waiters[0].done():
                item.waiters.pop().set_exception(answer)
            else:
                self._fail(item, answer)
            return
        waiters, item.waiters = item.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(answer)

    def _fail(self, item: Waiting, error: BaseException) -> None:
        waiters, item.waiters = item.waiters, []
        for waiter in waiters:
            if not waiter.done():
                # One each: raising an error changes its traceback.
                waiter.set_exception(copy.copy(error))

    def _leave(self, item: Waiting, waiter: asyncio.Future[Any]) -> None:
        if waiter not in item.waiters:
            return  # answered meanwhile
        item.waiters.remove(waiter)
        if item.waiters:
            return
        if self._pending.get(item.key) is item:
            self._forget(item)
            return
        self._unawaited(item)

    def _unawaited(self, item: Waiting) -> None:
        """Note that nobody waits for an item any more; a batch of such items is given up."""
        batch = item.batch
        if batch is None or batch not in self._batches:
            return
        batch.awaited -= 1
        if batch.awaited or batch.call is None:
            return
        if self._client.give_up(self._client.small, batch.call):  # it had not left yet
            _let_go(batch.items)
            self._close(batch)
        elif not batch.overdue:  # its thread has been replaced: it holds nobody up
            batch.overdue = True
            self._under_way -= 1
        if self._pending:
            self._wake()

    def _forget(self, item: Waiting) -> None:
        del self._pending[item.key]
        _let_go([item])

    def _watch(self) -> None:
        """Look for batches that take unusually long; one timer for all of them."""
        self._watching = False
        now = self._loop.time()
        for batch in list(self._batches):
            if not batch.overdue and now - batch.since >= OVERDUE:
                self._late(batch)
        if any(not batch.overdue for batch in self._batches):
            self._watching = True
            self._loop.call_later(OVERDUE, self._watch)

    def _late(self, batch: _Batch) -> None:
        if batch.call and self._client.set_aside(self._client.small, batch.call):
            batch.overdue = True
            self._under_way -= 1
            if self._pending:
                self._wake()


class _ReadLane(Lane):
    """Reads and questions: those of the same key share one answer."""

    def _join(self, item: Waiting) -> Waiting:
        joined = self._pending.setdefault(item.key, item)
        if joined is item:
            self._wake()
        return joined


class _GetLane(_ReadLane):
    """Reads of values, with a second way around a peer that does not answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fetches: dict[Waiting, asyncio.Task[None]] = {}

    def _answer(self, item: Waiting, answer: Any) -> None:
        if answer is not LARGE:
            super()._answer(item, answer)
        elif item.waiters and item not in self._fetches:
            self._fetches[item] = self._batching.spawn(self._fetch_large(item))

    def _answer_early(self, item: Waiting, answer: Any) -> None:
        """Answer an item whose batch may still be under way."""
        if item.waiters:
            self._answer(item, answer)
            if not item.waiters:
                self._unawaited(item)

    def _leave(self, item: Waiting, waiter: asyncio.Future[Any]) -> None:
        super()._leave(item, waiter)
        if not item.waiters and item in self._fetches:
            self._fetches.pop(item).cancel()

    async def _fetch_large(self, item: Waiting) -> None:
        """Read a large value by itself, so that it holds no small ones."""
        client = self._client
        try:
            value = await client.run(
                client.bulk, "get", self._batching.transfers.get_large, item.key, reads=True
            )
        except Exception as exc:  # noqa: BLE001  # those who wait for it get it
            self._fail(item, exc)
        else:
            self._answer_early(item, value)
        finally:
            self._fetches.pop(item, None)

    def _late(self, batch: _Batch) -> None:
        super()._late(batch)
        if not batch.hedged:  # a batch that can't be set aside is late again and again
            batch.hedged = True
            self._batching.spawn(self._hedge(batch))

    async def _hedge(self, batch: _Batch) -> None:
        """Ask again for the keys of a batch that hangs, owner by owner.

        One frozen peer holds a whole batch for seconds. The master says who owns which key; the
        keys of each owner are read in a call of their own, and the first answer counts. The
        owners that answer are done in milliseconds.
        """
        client = self._client
        waiting = {item.key: item for item in batch.items if item.waiters}
        if len(waiting) < 2:  # noqa: PLR2004  # nobody to part from
            return
        try:
            owners = await client.run(
                client.control, "owners", self._batching.transfers.owners, list(waiting)
            )
        except MooncakeError:
            return  # the master does not answer either: the batch itself will tell
        groups: dict[str, list[Waiting]] = {}
        for key, item in waiting.items():
            # One without an owner is missing, or on a disk: it does not need the others' owners.
            groups.setdefault(owners.get(key, ""), []).append(item)
        if len(groups) < 2 or batch not in self._batches:  # noqa: PLR2004  # nobody to part from
            return
        stuck = self._batching.stuck_peers
        for owner, items in groups.items():
            if not stuck.suspected(owner):
                self._batching.spawn(self._read_again(owner, items))

    async def _read_again(self, owner: str, items: list[Waiting]) -> None:
        client, stuck = self._client, self._batching.stuck_peers
        timer = self._loop.call_later(OVERDUE, stuck.suspect, owner)
        try:
            answers = await client.run(client.hedge, "get", self._job, items, reads=True)
        except MooncakeError:
            return  # the batch itself will tell
        finally:
            timer.cancel()
        stuck.clear(owner)
        for item, answer in zip(items, answers, strict=True):
            if not isinstance(answer, MooncakeError):
                self._answer_early(item, answer)


class _KeyedLane(Lane):
    """Writes, and reads into memory: one of each key at a time, in the order of asking."""

    def __init__(self, *args: Any, turns: Turns, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = turns

    def _join(self, item: Waiting) -> Waiting:
        if self._turns.take(item.key):
            self._enter(item)
        else:
            item.begin = partial(self._enter, item)
            self._turns.queue(item.key, item.begin)
        return item

    def _enter(self, item: Waiting) -> None:
        item.begin = None
        self._pending[item.key] = item
        self._wake()

    def _take(self) -> list[Waiting]:
        """As many as fit into one batch by bytes, at least one."""
        taken: list[Waiting] = []
        nbytes = 0
        for item in self._pending.values():
            nbytes += item.block.nbytes if item.block is not None else 0
            if taken and (nbytes > MERGED_BYTES or len(taken) == self._max_keys):
                break
            taken.append(item)
        for item in taken:
            del self._pending[item.key]
        return taken

    def _close(self, batch: _Batch) -> None:
        super()._close(batch)
        for item in batch.items:
            self._turns.end(item.key)

    def _forget(self, item: Waiting) -> None:
        super()._forget(item)
        self._turns.end(item.key)

    def _leave(self, item: Waiting, waiter: asyncio.Future[Any]) -> None:
        if item.begin is not None:
            self._turns.leave(item.key, item.begin)
            item.begin = None
            _let_go([item])
            return
        super()._leave(item, waiter)


class _StuckPeers:
    """Owners that did not answer a moment ago; a read is not tried on them twice at once."""

    _FOR: Final = 5.0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._until: dict[str, float] = {}

    def suspect(self, owner: str) -> None:
        """Note that an owner keeps a read waiting."""
        self._until[owner] = self._loop.time() + self._FOR

    def suspected(self, owner: str) -> bool:
        """Tell whether an owner kept a read waiting in the last seconds."""
        until = self._until.get(owner)
        if until is not None and until <= self._loop.time():
            del self._until[owner]
            return False
        return until is not None

    def clear(self, owner: str) -> None:
        """Note that an owner has answered."""
        self._until.pop(owner, None)


class Batching:
    """The lanes of one store on one event loop."""

    def __init__(
        self, client: EngineClient, transfers: Transfers, views: Views, *, merge: bool
    ) -> None:
        self.client = client
        self.transfers = transfers
        self.loop = asyncio.get_running_loop()
        self.stuck_peers = _StuckPeers(self.loop)
        self._turns = Turns()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writes: dict[Hashable, _KeyedLane] = {}
        self._plain_writes: dict[str, _KeyedLane] = {}
        self._merge = merge
        width = self._width(WIDTH)
        many, asked = self._max_keys(MANY_KEYS), self._max_keys(ASKED_KEYS)
        self.gets = _GetLane(self, "get", _by_key(transfers.get_keys), width=width, max_keys=many)
        self.exists = _ReadLane(
            self, "exists", _by_key(transfers.exists_keys), width=width, max_keys=asked
        )
        self.sizes = _ReadLane(
            self, "size", _by_key(transfers.size_keys), width=width, max_keys=many
        )
        self.into = _KeyedLane(
            self,
            "get_into",
            transfers.get_into_items,
            width=width,
            max_keys=many,
            turns=Turns(),
        )
        # Each view has a life of its own, so they don't share one answer.
        self.views = _KeyedLane(
            self, "get_view", views.view_items, width=width, max_keys=many, turns=Turns()
        )

    def writes(self, verb: str, config: ReplicateConfig | None) -> _KeyedLane:
        """Find the lane of ``put`` or ``upsert`` with these placement options.

        Options that are lists with an entry per key are not looked at: the entry is the item's.
        """
        if config is None:
            lane = self._plain_writes.get(verb)
            if lane is not None:
                return lane
        grouped = config is not None and bool(config.group_ids)
        if config is not None and grouped:
            config = replace(config, group_ids=None)
        job = partial(getattr(self.transfers, f"{verb}_items"), config=config)
        lane = self._write_lane(verb, (config, grouped), job, MANY_KEYS)
        if config is None:
            self._plain_writes[verb] = lane
        return lane

    def removes(self, *, force: bool) -> _KeyedLane:
        """Find the lane of ``remove``."""
        job = _by_key(partial(self.transfers.remove_keys, force=force))
        return self._write_lane("remove", force, job, ASKED_KEYS)

    def _write_lane(self, verb: str, options: Hashable, job: Job, max_keys: int) -> _KeyedLane:
        place = (verb, options)
        lane = self._writes.get(place)
        if lane is None:
            # Options may differ from call to call without end; lanes must not.
            self._writes = {p: one for p, one in self._writes.items() if not one.idle}
            lane = self._writes[place] = _KeyedLane(
                self,
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
        """Run a write that travels by itself, when it is its turn; ``use`` ends with it."""
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

    def spawn(self, coro: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside the calls that wait, and hold on to it until it is over."""
        task = self.loop.create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _let_go(items: Sequence[Waiting]) -> None:
    """Give back the callers' memory of a call that is over, or was never made."""
    for item in items:
        if item.use is not None:
            item.use.end()


def _by_key(job: Callable[[Sequence[str]], Sequence[Any]]) -> Job:
    """Make a job for keys one for items."""

    def job_of_items(items: Sequence[Item]) -> Sequence[Any]:
        return job([item.key for item in items])

    return job_of_items
