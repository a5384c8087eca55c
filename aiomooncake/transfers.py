"""How many values at once get into the engine and out of it: the jobs of merged calls.

Every job takes distinct keys and answers one thing per key, a result or an error, so that a bad one
does not hurt its neighbours. Blocking: for worker threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from aiomooncake._buffers import new_bytes
from aiomooncake.avoiding import around, unreachable
from aiomooncake.errors import MooncakeError
from aiomooncake.load import Load
from aiomooncake.memory import SCRATCH_SIZE, Block
from aiomooncake.moves import FIRST_READ, MISSES, PIECE
from aiomooncake.parts import PartMoves
from aiomooncake.replicas import first_copies

if TYPE_CHECKING:
    from aiomooncake.config import ReplicateConfig
    from aiomooncake.engine.protocol import NativeStore

__all__ = ["LARGE", "MANY_KEYS", "MERGED_BYTES", "MERGED_VALUE", "Transfers"]

MANY_KEYS: Final = 256
"""Keys of one batch that moves values.

How long such a batch takes on a frozen peer is bounded by the transport's queue (see
:func:`aiomooncake.engine.lifecycle.prepare_environment`).
"""

MERGED_VALUE: Final = 1 << 20
"""Bytes of the largest value that travels with others: one that is copied, or read unasked.

What lies in registered memory of the caller travels with others up to :data:`PIECE`.
"""

MERGED_BYTES: Final = PIECE
"""Bytes of one batch, so that each native call is short."""

LARGE: Final = object()
"""The answer for a value that is too large to be read with others."""

# Bytes of a value that is read by the batch that it makes up alone: beyond, another thread costs
# nothing that shows, and transfers side by side spin.
_ALONE: Final = 2 << 20

_SMALLEST_SLOT: Final = SCRATCH_SIZE // MANY_KEYS
_LARGEST_SLOT: Final = FIRST_READ

_INVALID: Final = -600
_LEASE_EXPIRED: Final = -707
_NOT_FOUND: Final = -704


class Transfers(PartMoves):
    """The jobs of one store."""

    # How large a slot of scratch memory a read gets; follows what was read lately.
    _slot = _SMALLEST_SLOT

    # Of values that were too large for a slot and alone in their batches: how large the last one
    # was, and how large the next one should be; 0 unless two in a row had the same size.
    _last = _expected = 0

    # ------------------------------------------------------------------ reads

    def get_keys(self, keys: Sequence[str]) -> list[Any]:
        """Read values: bytes, None for a proved miss, LARGE, or an error."""
        refused = unreachable(self._client, keys, "get")
        if refused:
            return around(keys, refused, lambda at: self._get_keys([keys[i] for i in at]))
        return self._get_keys(keys)

    def _get_keys(self, keys: Sequence[str]) -> list[Any]:
        slot = self._slot
        if len(keys) == 1 and slot <= _LARGEST_SLOT:
            return [self._caught(self._get_one, keys[0])]
        if slot > _LARGEST_SLOT:  # what was read lately was too large for any slot
            if len(keys) == 1 and self._expected:
                return [self._caught(self._get_expected, keys[0], self._expected)]
            answers: list[Any] = [None] * len(keys)
            self._get_sized(keys, range(len(keys)), answers)
            return answers
        at_once = SCRATCH_SIZE // slot
        answers = []
        for start in range(0, len(keys), at_once):
            answers += self._get_by_slots(list(keys[start : start + at_once]), slot)
        return answers

    def _get_one(self, key: str) -> Any:
        """Read one value; a batch of one costs 7 us more."""
        fits, value = self._get_guessed(key)
        return value if fits else self._get_one_sized(key)

    def _get_expected(self, key: str, size: int) -> Any:
        """Read one value that is as large as the last ones; its size is one question less."""
        value, address = new_bytes(size)
        code = self._read_into(key, address, size, value)
        if code == size:
            self._client.counters.count_read(size)
            return value
        if code in MISSES:
            return None
        if code < 0 and code not in (_INVALID, _LEASE_EXPIRED):
            raise self._error(code, "get", key)
        self._expected = 0
        return self._get_one_sized(key)

    def _get_one_sized(self, key: str) -> Any:
        answers: list[Any] = [None]
        self._get_sized([key], [0], answers)
        return answers[0]

    def _get_by_slots(self, keys: list[str], slot: int) -> list[Any]:
        """Read into equal slots of scratch memory: one call when the guess is right."""
        native = self._client.native_object
        answers: list[Any] = []
        again: list[int] = []
        nbytes = largest = 0
        with self._scratch() as scratch:
            first = scratch.address
            codes = self._client.move(
                native.batch_get_into,
                keys,
                list(range(first, first + slot * len(keys), slot)),
                [slot] * len(keys),
            )
            self.check_length(codes, keys, "batch_get_into")
            offset = 0
            for code in codes:
                if code > 0:
                    nbytes += code
                    largest = max(largest, code)
                    answers.append(scratch.read(offset, code))
                elif code in MISSES:
                    answers.append(None)
                else:
                    i = len(answers)
                    if code in (_INVALID, _LEASE_EXPIRED):
                        again.append(i)
                        answers.append(None)
                    else:
                        answers.append(self._error(code, "get", keys[i]))
                offset += slot
        self._client.counters.count_read(nbytes)
        if again:
            self._get_sized(keys, again, answers)
        elif largest * 4 < slot > _SMALLEST_SLOT:
            self._slot = slot // 2
        return answers

    def _get_sized(self, keys: Sequence[str], places: Sequence[int], answers: list[Any]) -> None:
        """Ask for the sizes first, then read straight into the objects that are handed out."""
        native = self._client.native_object
        sizes = self.sizes([keys[i] for i in places])
        group: list[tuple[int, int]] = []
        doubtful: list[int] = []
        total = 0
        for i in places:
            size = sizes.get(keys[i])
            if size is None:
                doubtful.append(i)
            elif size > MERGED_VALUE:
                # In a batch of its own it holds up no small ones.
                alone = len(keys) == 1 and size <= _ALONE
                answers[i] = self._caught(self.get_large, keys[i], size) if alone else LARGE
            else:
                if total + size > MERGED_BYTES:
                    self._get_exactly(native, keys, group, answers)
                    group, total = [], 0
                group.append((i, size))
                total += size
        if group:
            self._get_exactly(native, keys, group, answers)
        # Absent, or on a disk, or the master is gone: a single read tells them apart.
        found = self.one_by_one("get", self.get, [keys[i] for i in doubtful])
        for i, answer in zip(doubtful, found, strict=True):
            answers[i] = answer
        if sizes:
            largest = max(sizes.values())
            if len(keys) == 1:
                self._expected = largest if largest == self._last <= _ALONE else 0
                self._last = largest
            # The next power of two; beyond the largest slot it means: ask for sizes first.
            self._slot = max(_SMALLEST_SLOT, min(1 << (largest - 1).bit_length(), MERGED_VALUE))

    def _get_exactly(
        self,
        native: NativeStore,
        keys: Sequence[str],
        group: Sequence[tuple[int, int]],
        answers: list[Any],
    ) -> None:
        if self._registered_only:
            for i, _ in group:
                answers[i] = self._caught(self.get, keys[i])
            return
        asked = [keys[i] for i, _ in group]
        values = [new_bytes(size) for _, size in group]
        codes = self._client.move(
            native.batch_get_into,
            asked,
            [address for _, address in values],
            [size for _, size in group],
        )
        self.check_length(codes, asked, "batch_get_into")
        for (i, size), (value, _), code in zip(group, values, codes, strict=True):
            if code == size:
                self._client.counters.count_read(size)
                answers[i] = value
            elif code in MISSES:
                answers[i] = None
            elif code > 0 or code in (_INVALID, _LEASE_EXPIRED):
                # Replaced by a value of another size meanwhile, or not read in time.
                answers[i] = self._caught(self.get, keys[i])
            else:
                answers[i] = self._error(code, "get", keys[i])
        if self._client.gate.tainted is not None:
            self._client.keep_until_gone(values)

    def handles(self, keys: Sequence[str]) -> list[Any]:
        """Take values into the engine's local buffer: a handle or None for each."""
        found = self._client.move(self._client.native_object.batch_get_buffer, list(keys))
        self.check_length(found, keys, "batch_get_buffer")
        return list(found)

    def owners(self, keys: Sequence[str]) -> dict[str, str]:
        """Tell which client holds each value, by its transport end point."""
        found = first_copies(self._client.native_object, keys)
        return {key: copy.transport_endpoint for key, copy in found.items()}

    def get_into_all(self, load: Load) -> list[Any]:
        """Read into the callers' memory: bytes read, None for a proved miss, or an error."""
        refused = unreachable(self._client, load.keys, "get_into")
        if refused:
            return around(load.keys, refused, lambda at: self._get_into_all(load.pick(at)))
        return self._get_into_all(load)

    def _get_into_all(self, load: Load) -> list[Any]:
        codes: list[Any] = self._read_all(load)
        if min(codes) > 0:  # as it should be
            self._client.counters.count_read(sum(codes))
            return codes
        late = [i for i, code in enumerate(codes) if code == _LEASE_EXPIRED]
        if late:  # beside a peer that hung, say: they are read again together
            for i, code in zip(late, self._read_all(load.pick(late)), strict=True):
                codes[i] = code
        self._client.counters.count_read(sum(code for code in codes if code > 0))
        for i, code in enumerate(codes):
            if code in MISSES:
                codes[i] = None
            elif code in (_INVALID, _LEASE_EXPIRED):
                # Too small, or not read in time: the single read tells, and tries again.
                codes[i] = self._caught(self.get_into, load.keys[i], load.memory[i])
            elif code < 0:
                codes[i] = self._error(code, "get_into", load.keys[i])
        return codes

    def _read_all(self, load: Load) -> list[int]:
        codes = self._client.move(
            self._client.native_object.batch_get_into,
            list(load.keys),
            [block.address for block in load.memory],
            list(load.sizes),
        )
        self.check_length(codes, load.keys, "batch_get_into")
        return list(codes)

    # ------------------------------------------------------------------ questions

    def exists_keys(self, keys: Sequence[str]) -> list[Any]:
        """Tell which keys can be read: a bool or an error."""
        native = self._client.native_object
        # A batch of one costs 10 us more than the single call.
        codes = [native.is_exist(keys[0])] if len(keys) == 1 else native.batch_is_exist(list(keys))
        self.check_length(codes, keys, "batch_is_exist")
        return [
            self._error(code, "exists", key) if code < 0 else code == 1
            for key, code in zip(keys, codes, strict=True)
        ]

    def size_keys(self, keys: Sequence[str]) -> list[Any]:
        """Tell sizes in bytes: an int, None for a proved miss, or an error."""
        native = self._client.native_object
        sizes: dict[str, int] = {}
        if len(keys) > 1:
            sizes = self.sizes(keys)

        def size(key: str) -> int | None:
            code = native.get_size(key)
            if code < 0 and code not in MISSES:
                raise self._error(code, "size", key)
            return None if code < 0 else code

        # There is no honest batch call for sizes: what is missing here is asked for singly.
        missing = [key for key in keys if key not in sizes]
        found = dict(zip(missing, self.one_by_one("size", size, missing), strict=True))
        return [sizes[key] if key in sizes else found[key] for key in keys]

    # ------------------------------------------------------------------ writes

    def put_all(self, load: Load, config: ReplicateConfig | None) -> list[MooncakeError | None]:
        """Store values unless their keys are there: None or an error."""
        return self._write(load, config, "put")

    def upsert_all(self, load: Load, config: ReplicateConfig | None) -> list[MooncakeError | None]:
        """Store values in place of those that are there: None or an error."""
        return self._write(load, config, "upsert")

    def _write(
        self, load: Load, config: ReplicateConfig | None, verb: str
    ) -> list[MooncakeError | None]:
        native = self._client.native_object
        config = self._options_of(load, config)
        own_host = config is not None and config.prefer_alloc_in_same_node and verb == "put"
        method = self._put_all_on_own_host if own_host else native.batch_put_from
        if verb == "upsert":
            method = native.batch_upsert_from
        keys, blocks, sizes = list(load.keys), load.memory, list(load.sizes)
        options = self._options(config)
        if len(keys) == 1 and not self._registered_only and not own_host:
            # A batch of one costs 10 us more than the single call.
            single = native.put_from if verb == "put" else native.upsert_from
            codes = [self._client.move(single, keys[0], blocks[0].address, sizes[0], *options)]
        elif self._registered_only and not all(block.registered for block in blocks):
            codes = self._write_staged(method, keys, blocks, options)
        else:
            addresses = [block.address for block in blocks]
            codes = self._client.move(method, keys, addresses, sizes, *options)
        return self._stored(load, codes, verb, config)

    def _put_all_on_own_host(
        self, keys: list[str], addresses: list[int], sizes: list[int], *options: object
    ) -> list[int]:
        """``batch_put_from``, by the only call that knows ``prefer_alloc_in_same_node``."""
        return self._client.native_object.batch_put_from_multi_buffers(
            keys, [[address] for address in addresses], [[size] for size in sizes], *options
        )

    def _write_staged(
        self, method: Any, keys: list[str], blocks: Sequence[Block], options: tuple[object, ...]
    ) -> list[int]:
        """Copy the values into registered memory first, as many at a time as fit."""
        codes: list[int] = []
        start = 0
        with self._scratch() as scratch:
            while start < len(keys):
                end, offset, addresses = start, 0, []
                while end < len(keys) and offset + blocks[end].nbytes <= SCRATCH_SIZE:
                    addresses.append(scratch.write(offset, blocks[end]))
                    offset += blocks[end].nbytes
                    end += 1
                sizes = [block.nbytes for block in blocks[start:end]]
                codes += self._client.move(method, keys[start:end], addresses, sizes, *options)
                start = end
        return codes

    def remove_keys(self, keys: Sequence[str], *, force: bool) -> list[Any]:
        """Remove keys: whether each was there, or an error."""
        codes = self._client.native_object.batch_remove(list(keys), force)
        self.check_length(codes, keys, "batch_remove")
        return [
            False if code == _NOT_FOUND else self._error(code, "remove", key) if code < 0 else True
            for key, code in zip(keys, codes, strict=True)
        ]
