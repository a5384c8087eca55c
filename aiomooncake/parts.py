"""How values in several pieces of memory get into the engine and out of it: blocking jobs.

Each piece is a transfer of its own to the engine, so a native call is bounded in pieces too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from aiomooncake.errors import MooncakeError
from aiomooncake.load import Load
from aiomooncake.memory import SCRATCH_SIZE, Block, gather, join
from aiomooncake.moves import MISSES, PIECE, Moves

if TYPE_CHECKING:
    from aiomooncake.config import ReplicateConfig

__all__ = ["MANY_PARTS", "PartMoves"]

MANY_PARTS: Final = 1024
"""Pieces of one native call.

The TCP transport fails at once, with -800, what exceeds the number of transfers that may wait for
one peer: by the engine's default, which holds for an adopted client, as many as these.
"""

# Reads that a value changes its size under, or that are not made in time, begin again this often.
_RESTARTS: Final = 3

_INVALID: Final = -600
_EXISTS: Final = -705
_LEASE_EXPIRED: Final = -707
_TRANSFER_FAIL: Final = -800
# The engine reads a value only into as many bytes as it has: -600 when there are fewer, -800 when
# there are more, and nothing is written (validateTransferParams, the same since 0.3.7).
_DOUBTFUL: Final = (_INVALID, _LEASE_EXPIRED, _TRANSFER_FAIL)


class PartMoves(Moves):
    """Moves of values that lie in several pieces of memory."""

    def put_parts(
        self, key: str, parts: Sequence[Block | memoryview], config: ReplicateConfig | None
    ) -> None:
        """Store several pieces of memory of any kind as one value."""
        blocks = [gather(part) if isinstance(part, memoryview) else part for part in parts]
        nbytes = sum(block.nbytes for block in blocks)
        if nbytes > PIECE and self._has_sessions(self._client.native_object):
            code = self._put_in_pieces(key, blocks, self._options(config))
            if code is not None:
                if code < 0 and code != _EXISTS:
                    raise self._error(code, "put_parts", key, config)
                self._client.counters.count_written(nbytes)
                return
        if self._registered_only and not all(block.registered for block in blocks):
            # This transport can't take them from where they are.
            self.put(key, join(blocks), config, replace=False)
            return
        (error,) = self.put_parts_all(_load_of(key, blocks), config)
        if error is not None:
            raise error

    def _put_in_pieces(
        self, key: str, blocks: Sequence[Block], options: tuple[object, ...]
    ) -> int | None:
        """Store one large piece of memory, and small ones around it, by a session; the code.

        None where it can't be. Only the large one is registered for it: of several, which may
        overlap, each of two calls might wait for what the other has.
        """
        large = max(blocks, key=lambda block: block.nbytes)
        small = [block for block in blocks if block is not large and not block.registered]
        if len(blocks) > MANY_PARTS or sum(block.nbytes for block in small) > SCRATCH_SIZE:
            return None
        with (
            self._scratch() as scratch,
            self._registered(
                large.address, large.nbytes, large, needed=True, known=large.registered
            ) as ready,
            self._put_turn(key) as mine,
        ):
            if not (ready and mine):
                return None
            placed: list[Block] = []
            end = 0
            for block in blocks:
                if block is large or block.registered:
                    placed.append(block)
                    continue
                address = scratch.write(end, block)
                end += block.nbytes
                placed.append(Block(address, block.nbytes, scratch, mutable=False, registered=True))
            return self._write_pieces(key, placed, options, None)

    def put_parts_all(
        self, load: Load, config: ReplicateConfig | None
    ) -> list[MooncakeError | None]:
        """Store values unless their keys are there: None or an error."""
        answers: list[MooncakeError | None] = []
        for some in _calls(load):
            self._go_on("put_parts", some.keys[0])
            options = self._options_of(some, config)
            codes = self._client.move(
                self._client.native_object.batch_put_from_multi_buffers,
                list(some.keys),
                [[part.address for part in parts] for parts in some.memory],
                [[part.nbytes for part in parts] for parts in some.memory],
                *self._options(options),
            )
            answers += self._stored(some, codes, "put_parts", options)
        return answers

    def get_into_parts(self, key: str, parts: Sequence[Block]) -> int | None:
        """Read one value into several pieces of registered memory, one after the other."""
        answer: int | MooncakeError | None
        (answer,) = self.get_into_parts_all(_load_of(key, parts))
        if isinstance(answer, MooncakeError):
            raise answer
        return answer

    def get_into_parts_all(self, load: Load) -> list[Any]:
        """Read into the callers' memory: bytes read, None for a proved miss, or an error."""
        answers: list[Any] = [None] * len(load)
        codes: dict[int, int] = {}
        # Most memory is as large as its value, so sizes are asked for only when it is not.
        sizes = dict(enumerate(load.sizes))
        for _ in range(_RESTARTS + 1):
            codes = self._read_parts(load, sizes)
            doubtful: dict[int, int] = {}
            for i, code in codes.items():
                if code > 0:
                    answers[i] = code
                elif code in _DOUBTFUL:
                    doubtful[i] = code
                elif code not in MISSES:
                    answers[i] = self._error(code, "get_into", load.keys[i])
            self._client.counters.count_read(sum(code for code in codes.values() if code > 0))
            if doubtful:
                sizes = self._sizes_again(load, sizes, doubtful, answers)
            if not doubtful or not sizes:
                return answers
        for i in sizes:
            answers[i] = (
                self._error(codes[i], "get_into", load.keys[i])
                if codes[i] == _LEASE_EXPIRED
                else self._restless("get_into", load.keys[i])
            )
        return answers

    def _read_parts(self, load: Load, sizes: dict[int, int]) -> dict[int, int]:
        """Read the values at some places of the load, of which the sizes are told."""
        codes: dict[int, int] = {}
        for some in _calls(load if len(sizes) == len(load) else load.pick(list(sizes))):
            self._go_on("get_into", some.keys[0])
            places = list(sizes)[len(codes) : len(codes) + len(some)]
            rooms = [
                _fitted(memory, sizes[i]) if sizes[i] < load.sizes[i] else memory
                for i, memory in zip(places, some.memory, strict=True)
            ]
            found = self._client.move(
                self._client.native_object.batch_get_into_multi_buffers,
                list(some.keys),
                [[part.address for part in parts] for parts in rooms],
                [[part.nbytes for part in parts] for parts in rooms],
            )
            self.check_length(found, some.keys, "batch_get_into_multi_buffers")
            codes |= zip(places, found, strict=True)
        return codes

    def _sizes_again(
        self,
        load: Load,
        asked: dict[int, int],
        doubtful: dict[int, int],
        answers: list[Any],
    ) -> dict[int, int]:
        """Ask for sizes: answer what is certain by them, and return the others."""
        found = self.sizes([load.keys[i] for i in doubtful])
        sizes: dict[int, int] = {}
        for i, code in doubtful.items():
            key = load.keys[i]
            size = found.get(key)
            if size is None:  # absent, or on a disk, or the master is gone
                size = self._client.native_object.get_size(key)
            if size in MISSES:
                continue
            if size < 0:
                answers[i] = self._error(size, "get_into", key)
            elif size > load.sizes[i]:
                answers[i] = self._too_small(key, size, load.sizes[i])
            elif size == asked[i] and code != _LEASE_EXPIRED:
                answers[i] = self._error(code, "get_into", key)
            else:
                sizes[i] = size
        return sizes

    # ------------------------------------------------------------------ small helpers

    def _options_of(self, load: Load, config: ReplicateConfig | None) -> ReplicateConfig | None:
        """Placement options of a batch, with the groups of its keys."""
        if config is None or load.groups is None:
            return config
        return replace(config, group_ids=[group or "" for group in load.groups])

    def _stored(
        self, load: Load, codes: Sequence[int], verb: str, config: ReplicateConfig | None
    ) -> list[MooncakeError | None]:
        """Tell of each key whether it is stored."""
        self.check_length(codes, load.keys, f"the batch call of {verb}")
        if not any(codes):  # as it should be
            self._client.counters.count_written(load.nbytes)
            return [None] * len(codes)
        answers: list[MooncakeError | None] = []
        stored = 0
        for key, size, code in zip(load.keys, load.sizes, codes, strict=True):
            if code < 0 and code != _EXISTS:
                answers.append(self._error(code, verb, key, config))
            else:
                stored += size
                answers.append(None)
        self._client.counters.count_written(stored)
        return answers


def _fitted(parts: Sequence[Block], nbytes: int) -> list[Block]:
    """Take as much of the memory as a value fills."""
    fitted: list[Block] = []
    for part in parts:
        size = min(nbytes, part.nbytes)
        fitted.append(Block(part.address, size, part, mutable=True, registered=part.registered))
        nbytes -= size
        if not nbytes:
            break
    return fitted


def _load_of(key: str, parts: Sequence[Block]) -> Load:
    return Load([key], [parts], [sum(part.nbytes for part in parts)])


def _calls(load: Load) -> Iterator[Load]:
    """Cut a load into native calls by its pieces."""
    start = pieces = 0
    for end, parts in enumerate(load.memory):
        pieces += len(parts)
        if pieces > MANY_PARTS and end > start:
            yield load.cut(start, end)
            start, pieces = end, len(parts)
    yield load.cut(start, len(load)) if start else load
