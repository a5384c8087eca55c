"""Lanes: the waiting calls of one verb with the same options, and how they leave in batches.

What is promised is told in :mod:`aiomooncake.batching`.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from aiomooncake._turns import Turns
from aiomooncake.avoiding import suspect_owners
from aiomooncake.engine.client import OVERDUE
from aiomooncake.errors import MooncakeError, RpcError
from aiomooncake.transfers import MERGED_BYTES

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.engine.workers import Call
    from aiomooncake.memory import Block
    from aiomooncake.use import Use

__all__ = ["Batch", "Job", "KeyedLane", "Lane", "ReadLane", "Waiting"]

# What most answers are; all others are looked at one by one.
_PLAIN: Final = frozenset({bytes, bool, int, type(None)})

Job = Callable[[Sequence["Waiting"]], Sequence[Any]]


class Waiting:
    """One key that waits, with everybody who waits for it.

    Args:
        key: The key.
        block: The bytes to store under it.
        group: Its routing group, when the call has placement options with groups.
    """

    # `spans` is unset, and costs nothing, unless the store is traced: see aiomooncake.tracing.
    __slots__ = ("batch", "begin", "block", "group", "key", "nbytes", "spans", "waiters")

    count: int = 1
    use: Use | None = None
    spans: dict[Any, None]

    def __init__(self, key: str, block: Block | None = None, group: str | None = None) -> None:
        self.key = key
        self.block = block
        self.group = group
        self.batch: Batch | None = None
        self.begin: Callable[[], object] | None = None  # set while it waits for its turn
        self.waiters: list[asyncio.Future[Any]] = []
        self.nbytes = 0 if block is None else block.nbytes

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key!r} {self.nbytes} bytes>"


@dataclass(slots=True, eq=False)
class Batch:
    """Keys that left together.

    Attributes:
        items: The keys; none any more when it is over.
        call: The job that carries them.
        since: When it left, by the loop's clock.
        overdue: Whether it no longer counts as under way.
        hedged: Whether its keys are being asked for in another way too.
        awaited: Items somebody still waits for.
    """

    items: list[Waiting]
    call: Call | None = None
    since: float = 0.0
    overdue: bool = False
    hedged: bool = False
    awaited: int = field(default=0)


class Lane:
    """The calls of one verb with the same options, on one event loop.

    Args:
        client: The native client.
        name: The verb, for messages.
        job: Does the work for the items of a batch; on a worker thread.
        width: Batches under way.
        max_keys: Keys of one batch.
    """

    def __init__(
        self, client: EngineClient, name: str, job: Job, *, width: int, max_keys: int
    ) -> None:
        self.name = name
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._job = job
        self._width = width
        self._max_keys = max_keys
        self._pending: dict[str, Waiting] = {}
        self._under_way = 0
        self._scheduled = False
        self._watching = False
        self._batches: set[Batch] = set()
        client.on_lane(self)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._pending and not self._batches

    async def ask(self, item: Waiting) -> Any:
        """Wait for the answer of one key; cancelled, it leaves the batch if that has not left.

        Memory that the item names may be in use after that; see :class:`Use`.
        """
        if item.use is not None:
            item.use.hold()
        item = self._join(item)
        waiter = self._loop.create_future()
        item.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            self._leave(item, waiter)
            raise
        finally:
            # It holds the error, whose traceback holds this frame: a cycle with the value in it.
            del waiter

    async def ask_all(
        self, items: Sequence[Waiting], answered: Callable[[Any, Any], object] | None = None
    ) -> list[Any]:
        """Wait for the answers of many keys, in order; what went wrong with a key is its answer.

        ``answered`` is called with each item that got an answer, and with that, in order.

        Raises:
            MooncakeError: What is not about one key: the store is closed, say.
        """
        places: list[tuple[Waiting, asyncio.Future[Any]]] = []
        for each in items:
            if each.use is not None:
                each.use.hold()
            item = self._join(each)
            waiter = self._loop.create_future()
            item.waiters.append(waiter)
            places.append((item, waiter))
        answers: list[Any] = []
        try:
            for item, waiter in places:
                try:
                    answers.append(await waiter)
                except MooncakeError as exc:
                    # An outage is told key by key, as it is while it begins.
                    if exc.key is None and not isinstance(exc, RpcError):
                        raise
                    answers.append(exc.with_traceback(None))  # of no use, and a cycle
                else:
                    if answered is not None:
                        answered(item, answers[-1])
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
        batch = Batch(items, awaited=len(items))
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
                keys=self._count(items),
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

    def _count(self, items: Sequence[Waiting]) -> int:
        """Count the keys of a batch."""
        return len(items)

    def _over(self, batch: Batch, call: Call) -> None:
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

    def _close(self, batch: Batch) -> None:
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

    def _late(self, batch: Batch) -> None:
        if batch.call and self._client.set_aside(self._client.small, batch.call):
            batch.overdue = True
            self._under_way -= 1
            if self._pending:
                self._wake()


class ReadLane(Lane):
    """Reads and questions: those of the same key share one answer."""

    def _join(self, item: Waiting) -> Waiting:
        joined = self._pending.setdefault(item.key, item)
        if joined is item:
            self._wake()
        return joined


class KeyedLane(Lane):
    """Writes, and reads into memory: one of each key at a time, in the order of asking.

    Args:
        turns: Whose turn each key is; shared by the lanes that write.
    """

    def __init__(self, *args: Any, turns: Turns, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = turns
        self._max_bytes = MERGED_BYTES

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
        nbytes = count = 0
        for item in self._pending.values():
            nbytes += item.nbytes
            count += item.count
            if taken and (nbytes > self._max_bytes or count > self._max_keys):
                break
            taken.append(item)
        for item in taken:
            del self._pending[item.key]
        return taken

    def _close(self, batch: Batch) -> None:
        super()._close(batch)
        for item in batch.items:
            self._end_turn(item)

    def _late(self, batch: Batch) -> None:
        super()._late(batch)
        if self.name.startswith("get"):  # of a read somebody knows who may be the cause
            suspect_owners(self._client, self._keys_of(batch))

    def _keys_of(self, batch: Batch) -> list[str]:
        return [item.key for item in batch.items]

    def _forget(self, item: Waiting) -> None:
        super()._forget(item)
        self._end_turn(item)

    def _end_turn(self, item: Waiting) -> None:
        self._turns.end(item.key)

    def _leave(self, item: Waiting, waiter: asyncio.Future[Any]) -> None:
        if item.begin is not None:
            self._turns.leave(item.key, item.begin)
            item.begin = None
            _let_go([item])
            return
        super()._leave(item, waiter)


def _let_go(items: Sequence[Waiting]) -> None:
    """Give back the callers' memory of a call that is over, or was never made."""
    for item in items:
        if item.use is not None:
            item.use.end()
