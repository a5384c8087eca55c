from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from aiomooncake.errors import InvalidArgumentError
from aiomooncake.testing import LoopStallProbe

Runner = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Runner:
    """Run a coroutine on each kind of loop."""
    if request.param == "uvloop":
        return uvloop.run
    return asyncio.run


def test_a_blocking_call_is_measured(run: Runner) -> None:
    async def main() -> None:
        async with LoopStallProbe() as probe:
            await asyncio.sleep(0.01)
            time.sleep(0.1)  # noqa: ASYNC251 - the stall to measure
            await asyncio.sleep(0.01)
        assert 0.097 <= probe.longest < 0.5
        worst = max(probe.stalls(0.05), key=lambda stall: stall.seconds)
        assert worst.seconds == probe.longest
        assert 0.005 <= worst.when < 0.5

    run(main())


def test_awaiting_is_no_stall(run: Runner) -> None:
    async def main() -> None:
        async with LoopStallProbe() as probe:
            await asyncio.sleep(0.2)
        assert probe.stalls(0.15) == []
        assert probe.longest < 0.15

    run(main())


def test_a_stall_that_ends_with_the_block_counts(run: Runner) -> None:
    """The timer has no turn between the blocking call and the exit."""

    async def main() -> None:
        async with LoopStallProbe() as probe:
            time.sleep(0.05)  # noqa: ASYNC251 - the stall to measure
        assert probe.longest >= 0.047
        assert len(probe.stalls(0.04)) == 1

    run(main())


async def test_a_stall_is_seen_before_the_loop_goes_on() -> None:
    async with LoopStallProbe() as probe:
        time.sleep(0.05)  # noqa: ASYNC251 - the stall to measure
        assert probe.longest >= 0.047
        assert len(probe.stalls(0.04)) == 1


async def test_another_thread_sees_the_stall_while_it_lasts() -> None:
    seen: list[float] = []
    done = threading.Event()

    def look(probe: LoopStallProbe) -> None:
        while not seen or seen[-1] < 0.02:
            seen.append(probe.longest)
        done.set()

    async with LoopStallProbe() as probe:
        watcher = threading.Thread(target=look, args=(probe,))
        watcher.start()
        assert done.wait(10)  # blocks the loop until the other thread has seen it blocked
        watcher.join()


async def test_reset_forgets_also_the_stall_under_way() -> None:
    async with LoopStallProbe() as probe:
        time.sleep(0.2)  # noqa: ASYNC251 - the stall to forget
        probe.reset()
        await asyncio.sleep(0.01)
    assert probe.longest < 0.15
    assert probe.stalls(0.15) == []


async def test_stalls_are_kept_in_bounded_number() -> None:
    async with LoopStallProbe(interval=0.0001) as probe:
        probe._stalls.extend([(0.0, 1.0)] * 2000)  # type: ignore[list-item]
    assert len(probe._stalls) <= 1000


def test_a_probe_can_be_used_again_on_another_loop() -> None:
    probe = LoopStallProbe()

    async def main(block: float) -> None:
        async with probe:
            time.sleep(block)  # noqa: ASYNC251 - the stall to measure

    asyncio.run(main(0.2))
    assert probe.longest >= 0.197
    asyncio.run(main(0.0))
    assert probe.longest < 0.15


async def test_a_probe_measures_once_at_a_time() -> None:
    async with LoopStallProbe() as probe:
        with pytest.raises(RuntimeError, match="active already"):
            await probe.__aenter__()


async def test_leaving_stops_the_timer() -> None:
    async with LoopStallProbe() as probe:
        pass
    before = repr(probe)
    time.sleep(0.05)  # noqa: ASYNC251 - would be a stall
    await asyncio.sleep(0.01)
    assert repr(probe) == before
    assert "not active" in before


@pytest.mark.parametrize("interval", [0, -1.0, float("nan"), float("inf")])
def test_a_senseless_interval_is_refused(interval: float) -> None:
    with pytest.raises(InvalidArgumentError, match="interval must be"):
        LoopStallProbe(interval=interval)
