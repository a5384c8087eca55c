"""The stage of the adversity matrix: calls the verbs in a fault, and judges what they answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeVar

import aiomooncake
from aiomooncake import BatchError, MooncakeError, ReplicateConfig, Store, WarmupError
from aiomooncake.buffers import Buffer
from aiomooncake.testing.stall import LoopStallProbe
from tests.adversity.call_scenes import NO_STALL
from tests.adversity.matrix import Cell, Column, column
from tests.adversity.matrix_calls import CALLS, SIZE, Call, Subject, value_of

__all__ = ["Stage", "until"]

T = TypeVar("T")

_LAST: Final = "remove_all"
"""It takes the keys of all the others away."""


async def until(condition: Callable[[], object], within: float = 20) -> None:
    """Wait for what nobody tells."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)


async def patiently(make: Callable[[], Awaitable[T]]) -> T:
    """Make a call that may fail in the fault, and after it where connections were lost in it."""
    deadline = time.monotonic() + 15
    while True:
        try:
            return await make()
        except MooncakeError:
            assert time.monotonic() < deadline, "it never goes well"
            await asyncio.sleep(0.05)


class Stage:
    """One store, and what its verbs do in one fault after the other.

    Everything that is not as the table says is collected, so that one run tells all of it.

    Args:
        store: The store.
        spare: Opens another one, to be closed in a fault.
    """

    def __init__(self, store: Store, spare: Callable[[], Awaitable[Store]]) -> None:
        self.store = store
        self._spare = spare
        self._spares: dict[str, Store] = {}
        self._memory: Buffer | None = None
        self._results: dict[tuple[str, str], str] = {}
        self._wrong: list[str] = []

    async def prepare(self, *names: str, config: ReplicateConfig | None = None) -> None:
        """Store what the verbs of these columns will ask for."""
        if self._memory is None:
            self._memory = await self.store.allocate(2 * SIZE * len(CALLS))
        for name in names:
            self._spares[name] = await self._spare()
            for verb, call in CALLS.items():
                for key, value in call.stored(self._at(name, verb)).items():
                    await self.store.put(key, value, config=config)

    async def lease(self, name: str) -> None:
        """Read the keys of a column, so that they are protected."""
        for verb, call in CALLS.items():
            assert all(await self.store.exists_many(call.stored(self._at(name, verb))))

    async def run(
        self, name: str, *, config: ReplicateConfig | None = None, side_by_side: bool = False
    ) -> None:
        """Call every verb once in a fault, and see that the store tells of it.

        But for ``remove_all``, which takes the keys of other columns too: see :meth:`remove_all`.
        """
        verbs = [verb for verb in CALLS if verb != _LAST]
        async with LoopStallProbe() as probe:
            closing = asyncio.ensure_future(self._close(name))
            if side_by_side:
                await asyncio.gather(*(self._call(name, verb, config) for verb in verbs))
            else:
                for verb in verbs:
                    await self._call(name, verb, config)
            await closing
        self._note(probe.longest < NO_STALL, f"{name}: the loop stood still: {probe}")
        states = column(name).health
        with self._told(f"{name}: health() was never {states}"):
            await until(lambda: self.store.health().state in states)
        await self._check_stored(column(name))

    async def remove_all(self, name: str) -> None:
        """Call the verb that is left."""
        await self._call(name, _LAST, None)

    async def recover(self, *names: str) -> None:
        """See that the store is as good as new when the faults have ended."""
        store = self.store
        with self._told("health() was not 'ready' again"):
            await until(lambda: store.health().state == "ready", 30)
        report = await store.warmup()
        print(f"{'':16}ready again, tries: {report.tries}")
        self._note(await patiently(self._is_usable), "what is put is not what is read")
        for name in names:
            await self._check_failed(column(name))
        with self._told("calls are left behind"):
            await until(lambda: store.stats().in_flight == 0)
        self._note(store.stats().abandoned == 0, "calls were abandoned")

    async def finish(self) -> None:
        """Close the store, and fail if anything was not as the table says."""
        assert self._memory is not None
        await self._memory.aclose()
        self._memory = None
        kept = [each for each in self.store._client._kept.values() if isinstance(each, Buffer)]
        self._note(not kept, f"memory is still registered: {kept}")
        await self.store.aclose()
        self._note(self.store.health().state == "closed", "the store did not close")
        assert not self._wrong, "\n".join(["not as the table says:", *self._wrong])

    # ------------------------------------------------------------------ inside

    async def _is_usable(self) -> bool:
        key = f"afterwards {time.monotonic()}"
        await self.store.put(key, value_of(key))
        return await self.store.get(key) == value_of(key)

    def _at(self, name: str, verb: str, config: ReplicateConfig | None = None) -> Subject:
        assert self._memory is not None
        start = 2 * SIZE * list(CALLS).index(verb)
        return Subject(self.store, verb, name, self._memory, start, config)

    async def _call(self, name: str, verb: str, config: ReplicateConfig | None) -> None:
        call, at = CALLS[verb], self._at(name, verb, config)
        expected = column(name).cell(verb)
        began = time.monotonic()
        try:
            answer = await asyncio.wait_for(call.make(at), expected.time.seconds)
        except MooncakeError as error:
            result, right = judged_error(error, expected, verb)
        except asyncio.TimeoutError:
            result, right = "nothing in time", False
        else:
            result = judged(call, at, answer)
            right = result in expected.results
        self._take(name, verb, result, time.monotonic() - began, expected, right=right)

    async def _close(self, name: str) -> None:
        spare, expected = self._spares.pop(name), column(name).cell("aclose")
        began = time.monotonic()
        await spare.aclose()
        self._take(name, "aclose", "as usual", time.monotonic() - began, expected, right=True)

    def _take(
        self, name: str, verb: str, result: str, seconds: float, expected: Cell, *, right: bool
    ) -> None:
        print(f"{name:16}{verb:20}{result:36}{seconds:7.3f}", flush=True)
        self._results[name, verb] = result
        self._note(right, f"{name}, {verb}: {result}, not {' or '.join(expected.results)}")
        soon = seconds < expected.time.seconds
        self._note(soon, f"{name}, {verb}: {seconds:.1f} s is not {expected.time.name}")

    async def _check_stored(self, fault: Column) -> None:
        """See that what was said to be stored is there, and that what was removed is gone."""
        for verb, call in CALLS.items():
            if self._results.get((fault.name, verb)) != "as usual":
                continue
            for key, value in call.writes(self._at(fault.name, verb)).items():
                allowed = {value} if fault.keeps else {value, None}
                await self._check_value(f"{fault.name}, {verb}", key, allowed)

    async def _check_failed(self, fault: Column) -> None:
        """See that what failed was done or not done: no value is wrong."""
        for verb, call in CALLS.items():
            at = self._at(fault.name, verb)
            before: Mapping[str, bytes | None] = call.stored(at)
            for key, value in call.writes(at).items():
                allowed = {value, before.get(key), None}
                await self._check_value(f"{fault.name}, {verb}", key, allowed)

    async def _check_value(self, what: str, key: str, allowed: set[bytes | None]) -> None:
        there = await patiently(lambda: self.store.get(key))
        self._note(there in allowed, f"{what}: {key} is {there!r:.60}")

    def _note(self, right: object, what: str) -> None:
        if not right:
            print(f"WRONG: {what}", flush=True)
            self._wrong.append(what)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except AssertionError:
            self._note(False, f"{what}, but {self.store.health()}, {self.store.stats()}")


def judged(call: Call, at: Subject, answer: object) -> str:
    """Name an answer as the table does."""
    if answer == call.usual(at):
        return "as usual"
    if at.verb.endswith("is_exist"):
        return f"code {answer}"
    return "a miss" if answer == call.miss(at) else f"wrong: {answer!r:.60}"


def judged_error(error: MooncakeError, expected: Cell, verb: str) -> tuple[str, bool]:
    """Name an error as the table does, and tell whether it is expected."""
    if isinstance(error, WarmupError):
        result = f"WarmupError: {error.diagnosis.kind.value}"
        return result, bool({result, "WarmupError"} & set(expected.results))
    errors = [error]
    if "_many" in verb:
        if not isinstance(error, BatchError):
            return f"{type(error).__name__}, not BatchError", False
        errors = list(error.errors.values())
    classes = tuple(
        getattr(aiomooncake, result) for result in expected.results if result.endswith("Error")
    )
    names = "/".join(sorted({type(each).__name__ for each in errors}))
    return names, all(isinstance(each, classes) for each in errors)
