"""Moves of memory by one call: bounded turns of the loop, answers in the order of the keys."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from aiomooncake._tasks import caught, together
from aiomooncake.batching import WIDTH
from aiomooncake.errors import MooncakeError
from aiomooncake.load import Load
from aiomooncake.moves import PIECE, Progress

if TYPE_CHECKING:
    from aiomooncake.memory_lane import MemoryLane, Move
    from aiomooncake.use import Use

__all__ = ["ManyMoves"]

_AT_ONCE = 512
"""Keys that go to the lanes at once: two batches, so that what others ask comes in between."""


class ManyMoves:
    """The moves of one call.

    Args:
        use: The use of the memory.
        lane: Finds the lane of values in one piece of memory, or in ``parts=``.
        alone: Moves one value that is too large to travel with others.
        on_progress: Called with bytes that are done, and bytes in all, after each key.
    """

    def __init__(
        self,
        use: Use,
        lane: Callable[..., MemoryLane],
        alone: Callable[[Load], Coroutine[Any, Any, Any]],
        on_progress: Progress | None = None,
    ) -> None:
        self._use = use
        self._lane = lane
        self._alone = alone
        self._on_progress = on_progress
        self._done = self._all = 0

    async def run(self, load: Load) -> list[Any]:
        """Move values; what came of each key, in order.

        What went wrong with a key is its answer.

        Raises:
            MooncakeError: What is not about one key: the store is closed, say.
        """
        if self._on_progress is not None:
            self._all = load.nbytes
        if len(load) <= _AT_ONCE:
            return await self._move(load)
        answers: list[Any] = [None] * len(load)
        starts = iter(range(0, len(load), _AT_ONCE))
        await together(self._move_on(load, starts, answers) for _ in range(WIDTH))
        return answers

    async def _move_on(self, load: Load, starts: Iterator[int], answers: list[Any]) -> None:
        for start in starts:
            end = start + _AT_ONCE
            answers[start:end] = await self._move(load.cut(start, end))

    async def _move(self, load: Load) -> list[Any]:
        if not load.keys:
            return []
        if max(load.sizes) <= PIECE:
            kinds = set(map(type, load.memory))
            if len(kinds) == 1:  # as most calls are
                return await self._move_merged(load, parts=list in kinds)
        ways: dict[str, list[int]] = {"one": [], "parts": [], "alone": []}
        for i, (memory, size) in enumerate(zip(load.memory, load.sizes, strict=True)):
            way = "parts" if isinstance(memory, list) else "one"
            ways["alone" if size > PIECE else way].append(i)
        found = await together(
            [
                *(
                    self._move_merged(load.pick(places), parts=way == "parts")
                    for way in ("one", "parts")
                    if (places := ways[way])
                ),
                *(self._move_alone(load.pick([i])) for i in ways["alone"]),
            ]
        )
        places = [i for places in ways.values() for i in places]
        answers = dict(zip(places, (each for some in found for each in some), strict=True))
        return [answers[i] for i in range(len(load))]

    async def _move_merged(self, load: Load, *, parts: bool) -> list[Any]:
        told = None if self._on_progress is None else self._tell
        return await self._lane(parts=parts).move(load, self._use, told)

    async def _move_alone(self, load: Load) -> list[Any]:
        answer = await caught(self._alone, load)
        self._told(load, [answer])
        return [answer]

    def _tell(self, move: Move, answers: list[Any]) -> None:
        self._told(move.load, answers)

    def _told(self, load: Load, answers: list[Any]) -> None:
        """Tell of each key that went well."""
        if self._on_progress is None:
            return
        for size, answer in zip(load.sizes, answers, strict=True):
            if not isinstance(answer, MooncakeError):
                self._done += size
                try:
                    self._on_progress(self._done, self._all)
                except Exception:
                    self._use.log.exception("an on_progress callback failed")
