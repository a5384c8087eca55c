"""Reads of values that find a second way around a peer that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiomooncake.avoiding import suspect_owners
from aiomooncake.engine.client import OVERDUE
from aiomooncake.errors import MooncakeError
from aiomooncake.lanes import Batch, ReadLane, Waiting
from aiomooncake.transfers import LARGE, Transfers

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient

__all__ = ["GetLane", "StuckPeers"]


class GetLane(ReadLane):
    """Reads of values.

    Reads into the callers' memory have no such lane: memory that a call may still write into can't
    be read into by another one.
    """

    def __init__(
        self, client: EngineClient, transfers: Transfers, name: str, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(client, name, *args, **kwargs)
        self.stuck_peers = StuckPeers(self._loop)
        self._transfers = transfers
        self._fetches: dict[Waiting, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def _answer(self, item: Waiting, answer: Any) -> None:
        if answer is not LARGE:
            super()._answer(item, answer)
        elif item.waiters and item not in self._fetches:
            self._fetches[item] = self._spawn(self._fetch_large(item))

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
                client.bulk,
                "get",
                self._transfers.get_large,
                item.key,
                reads=True,
                knock=partial(suspect_owners, client, [item.key]),
            )
        except Exception as exc:  # noqa: BLE001  # those who wait for it get it
            self._fail(item, exc)
        else:
            self._answer_early(item, value)
        finally:
            self._fetches.pop(item, None)

    def _late(self, batch: Batch) -> None:
        super()._late(batch)
        if not batch.hedged:  # a batch that can't be set aside is late again and again
            batch.hedged = True
            self._spawn(self._hedge(batch))

    async def _hedge(self, batch: Batch) -> None:
        """Ask again for the keys of a batch that hangs, owner by owner.

        One frozen peer holds a whole batch for seconds. The master says who owns which key; the
        keys of each owner are read in a call of their own, and the first answer counts. The
        owners that answer are done in milliseconds.
        """
        client = self._client
        waiting = {item.key: item for item in batch.items if item.waiters}
        # With one there is nobody to part from; its owner may be knocked at all the same.
        if len(waiting) < (2 if client.peers is None else 1):
            return
        try:
            owners = await client.run(client.hedge, "owners", self._transfers.owners, list(waiting))
        except MooncakeError:
            return  # the master does not answer either: the batch itself will tell
        groups: dict[str, list[Waiting]] = {}
        for key, item in waiting.items():
            # One without an owner is missing, or on a disk: it does not need the others' owners.
            groups.setdefault(owners.get(key, ""), []).append(item)
        if client.peers is not None:
            client.peers.suspect(owner for owner in groups if owner)
        if len(groups) < 2 or batch not in self._batches:  # noqa: PLR2004  # nobody to part from
            return
        for owner, items in groups.items():
            if not self.stuck_peers.suspected(owner):
                self._spawn(self._read_again(owner, items))

    async def _read_again(self, owner: str, items: list[Waiting]) -> None:
        client, stuck = self._client, self.stuck_peers
        timer = self._loop.call_later(OVERDUE, self._suspect, owner)
        client.counters.count_hedge()
        try:
            answers = await client.run(client.hedge, "get", self._job, items, reads=True)
        except MooncakeError:
            return  # the batch itself will tell
        finally:
            timer.cancel()
        stuck.clear(owner)
        awaited = sum(bool(item.waiters) for item in items)
        for item, answer in zip(items, answers, strict=True):
            if not isinstance(answer, MooncakeError):
                self._answer_early(item, answer)
        client.counters.count_hedge(awaited - sum(bool(item.waiters) for item in items))

    def _suspect(self, owner: str) -> None:
        self.stuck_peers.suspect(owner)
        if owner and self._client.peers is not None:
            self._client.peers.suspect([owner])

    def _spawn(self, coro: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside the calls that wait, and hold on to it until it is over."""
        task = self._loop.create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class StuckPeers:
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

    def __repr__(self) -> str:
        return f"<StuckPeers {list(self._until)}>"
