"""The lane of moves from and into the callers' memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from aiomooncake.errors import MooncakeError, RpcError
from aiomooncake.lanes import Batch, KeyedLane, Waiting
from aiomooncake.load import Load

if TYPE_CHECKING:
    from aiomooncake.engine.workers import Call
    from aiomooncake.use import Use

__all__ = ["LEAST_BYTES", "MOST_BYTES", "MemoryLane", "Move"]

MOST_BYTES: Final = 32 << 20
"""Bytes of one batch while moves are quick.

Cutting what fits into one call costs up to a third of the speed: each call that waits for the
transport burns a core.
"""

LEAST_BYTES: Final = 1 << 20
"""Bytes of one batch when they are slow."""


class Move(Waiting):
    """Keys of one call that move together; the answer is a list.

    Args:
        load: The keys and their memory.
        use: The use of memory that they are part of, to be ended afterwards.
    """

    __slots__ = ("count", "load", "use")

    def __init__(self, load: Load, use: Use) -> None:
        super().__init__(load.keys[0])  # which no other move has meanwhile
        self.load = load
        self.use = use
        self.count = len(load)
        self.nbytes = load.nbytes


class MemoryLane(KeyedLane):
    """Moves from and into the callers' memory, in batches as large as are quick.

    A batch that is overdue halves what the next ones may carry, so that calls stay short over a
    slow link too; a full one that is not doubles it again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_bytes = MOST_BYTES

    async def move(
        self, load: Load, use: Use, answered: Callable[[Move, Any], object] | None = None
    ) -> list[Any]:
        """Move values, in as few batches as they fit into; what came of each key, in order.

        ``answered`` is called with each move and its answers, in order.

        Raises:
            MooncakeError: What is not about one key: the store is closed, say.
        """
        moves = [Move(part, use) for part in self._cut(load)]
        answers: list[Any] = []
        for move, some in zip(moves, await self.ask_all(moves, answered), strict=True):
            if isinstance(some, RpcError):  # an outage is told key by key
                answers += [some] * move.count
            elif isinstance(some, MooncakeError):
                raise some
            else:
                answers += some
        return answers

    def _cut(self, load: Load) -> Iterator[Load]:
        """Cut what is too much for one batch, or must wait for the turns of its keys."""
        if len(load) <= self._max_keys and load.nbytes <= self._max_bytes:
            yield from self._ready(load)  # as most calls are
            return
        start = nbytes = 0
        for end, size in enumerate(load.sizes):
            nbytes += size
            if end > start and (nbytes > self._max_bytes or end - start == self._max_keys):
                yield from self._ready(load.cut(start, end))
                start, nbytes = end, size
        yield from self._ready(load.cut(start, len(load)))

    def _ready(self, load: Load) -> Iterator[Load]:
        if self._turns.free(load.keys):
            yield load
        else:
            yield from (load.cut(i, i + 1) for i in range(len(load)))

    def _join(self, item: Waiting) -> Waiting:
        if not isinstance(item, Move) or item.count == 1:
            return super()._join(item)
        self._turns.take_all(item.load.keys)
        self._enter(item)
        return item

    def _end_turn(self, item: Waiting) -> None:
        if isinstance(item, Move):
            self._turns.end_all(item.load.keys)

    def _keys_of(self, batch: Batch) -> list[str]:
        return [key for item in batch.items if isinstance(item, Move) for key in item.load.keys]

    def _count(self, items: Sequence[Waiting]) -> int:
        return sum(item.count for item in items)

    def _over(self, batch: Batch, call: Call) -> None:
        if not batch.overdue and self._max_bytes < MOST_BYTES:
            nbytes = sum(item.nbytes for item in batch.items)
            if nbytes > self._max_bytes // 2:
                self._max_bytes *= 2
        super()._over(batch, call)

    def _late(self, batch: Batch) -> None:
        self._max_bytes = max(self._max_bytes // 2, LEAST_BYTES)
        super()._late(batch)
