"""A loop whose clock jumps, and stands still while a thread does something for it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest

from aiomooncake import RpcTimeoutError, StoreClosedError, WarmupError, WarmupPolicy, connect
from aiomooncake.engine.client import EngineClient
from aiomooncake.engine.inmemory import Fault, InMemoryEngine
from aiomooncake.engine.workers import Lane
from aiomooncake.testing import VirtualTimeLoop, run_in_virtual_time

QUICK = 5.0  # real seconds for what takes milliseconds: ten-fold room on a busy machine

Scenario = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Fail a test that takes real time."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < QUICK


def virtually(scenario: Scenario) -> Callable[[], None]:
    """Run a scenario as a test, in virtual time."""

    @functools.wraps(scenario)
    def test() -> None:
        run_in_virtual_time(scenario())

    del test.__wrapped__  # or pytest-asyncio takes it for its own
    return test


def now() -> float:
    return asyncio.get_running_loop().time()


# --- timers -----------------------------------------------------------------------------------


@virtually
async def test_waiting_takes_no_time() -> None:
    assert now() == 0
    await asyncio.sleep(3600)
    assert now() == pytest.approx(3600)
    await anyio.sleep(86400 * 365)
    assert now() == pytest.approx(3600 + 86400 * 365)


@virtually
async def test_timers_come_in_order() -> None:
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, now()))

    await asyncio.gather(sleeper("late", 50), sleeper("early", 0.001), sleeper("mid", 1))
    assert [name for name, _ in seen] == ["early", "mid", "late"]
    assert [when for _, when in seen] == pytest.approx([0.001, 1, 50])


@virtually
async def test_time_outs_strike() -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 30)
    assert now() == pytest.approx(30)
    with pytest.raises(TimeoutError), anyio.fail_after(12):
        await anyio.sleep_forever()
    assert now() == pytest.approx(42)


def test_each_run_starts_at_zero_and_leaves_nothing() -> None:
    async def scenario() -> int:
        background = asyncio.ensure_future(asyncio.sleep(1e6))
        await asyncio.sleep(1)
        assert now() == pytest.approx(1)
        assert not background.done()
        return 7

    threads = threading.active_count()
    assert run_in_virtual_time(scenario()) == 7
    assert run_in_virtual_time(scenario()) == 7
    assert threading.active_count() == threads


def test_errors_come_out() -> None:
    async def scenario() -> None:
        await asyncio.sleep(1)
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        run_in_virtual_time(scenario())


def test_a_loop_of_its_own_keeps_its_time() -> None:
    """As runners use it, asyncio's and those of the test frameworks."""

    async def scenario() -> float:
        await asyncio.sleep(60)
        return now()

    with contextlib.closing(VirtualTimeLoop()) as loop:
        assert loop.run_until_complete(scenario()) == pytest.approx(60)
        assert loop.run_until_complete(scenario()) == pytest.approx(120)
        loop.run_until_complete(loop.shutdown_asyncgens())


def test_a_deadlock_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiomooncake.testing.virtual_time._PATIENCE", 0.05)

    async def scenario() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing will ever happen"):
        run_in_virtual_time(scenario())


# --- threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["asyncio", "anyio", "executor"])
def test_the_clock_stands_still_during_a_job(kind: str) -> None:
    async def scenario() -> None:
        timer = asyncio.ensure_future(asyncio.sleep(0.001))
        if kind == "asyncio":
            await asyncio.to_thread(time.sleep, 0.1)
        elif kind == "anyio":
            await anyio.to_thread.run_sync(time.sleep, 0.1)
        else:
            await asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.1)
        assert now() == 0
        await timer
        assert now() == pytest.approx(0.001)
        await asyncio.sleep(1000)  # the idle threads do not hold it
        assert now() == pytest.approx(1000.001)

    run_in_virtual_time(scenario())


@virtually
async def test_a_job_that_nobody_waits_for_does_not_hold_the_clock() -> None:
    go_on = threading.Event()
    job = asyncio.ensure_future(asyncio.to_thread(go_on.wait))
    await asyncio.sleep(0)
    job.cancel()
    await asyncio.sleep(100)
    assert now() == pytest.approx(100)
    go_on.set()


def test_an_unknown_thread_has_time_when_nothing_else_can_happen() -> None:
    threads: list[threading.Thread] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        told = loop.create_future()

        def tell() -> None:
            time.sleep(0.1)
            loop.call_soon_threadsafe(told.set_result, None)

        threads.append(threading.Thread(target=tell))
        threads[0].start()
        await told
        assert now() == 0

    run_in_virtual_time(scenario())
    threads[0].join()


@virtually
async def test_sockets_of_the_loop_are_served_before_time_outs() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        for _ in range(20):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"hello\n")
            assert await asyncio.wait_for(reader.readline(), 0.5) == b"hello\n"
            writer.close()
            await writer.wait_closed()
        assert now() == 0


# --- stores -----------------------------------------------------------------------------------


@virtually
async def test_calls_take_no_virtual_time() -> None:
    """A race here moves the clock by the 0.1 s after which a call is set aside, or more."""
    async with connect("memory://virtual", engine=InMemoryEngine()) as store:
        for turn in range(300):
            await store.put(f"k{turn}", b"value")
            assert await store.get(f"k{turn}") == b"value"
            assert now() == pytest.approx(turn * 5.0)
            await asyncio.sleep(5.0)
    assert now() == pytest.approx(1500)


@virtually
async def test_many_calls_side_by_side_take_no_virtual_time() -> None:
    async with connect("memory://virtual", engine=InMemoryEngine(), threads=4) as store:
        for _ in range(20):
            began = now()
            await asyncio.gather(*(store.put(f"{began}-{i}", bytes(100)) for i in range(100)))
            await asyncio.gather(*(store.engine.is_exist(f"{began}-{i}") for i in range(100)))
            assert now() == began
            await asyncio.sleep(3)


@virtually
async def test_opening_and_closing_take_no_virtual_time() -> None:
    for _ in range(20):
        began = now()
        async with connect("memory://virtual", engine=InMemoryEngine()) as store:
            await store.put("k", b"v")
        assert now() == began
        await asyncio.sleep(1)


@virtually
async def test_a_warm_up_of_a_minute() -> None:
    engine = InMemoryEngine()
    engine.fault("put", code=-200)
    async with connect("memory://virtual", engine=engine) as store:
        with pytest.raises(WarmupError) as failed:
            await store.warmup(WarmupPolicy(timeout=60, jitter=0))
    assert 50 < now() <= 60.1
    assert len(failed.value.attempts) > 50


@virtually
async def test_a_call_that_hangs_is_timed_out() -> None:
    engine = InMemoryEngine()
    hold = threading.Event()
    engine.fault("put", hold=hold, times=1)
    async with connect("memory://virtual", engine=engine) as store:
        report = await store.warmup(WarmupPolicy(timeout=60, attempt_timeout=10, jitter=0))
        assert report.tries == 2
        assert 10 <= now() < 11
        hold.set()


@virtually
async def test_a_held_call_goes_on_when_a_timer_lets_it() -> None:
    engine = InMemoryEngine()
    async with connect("memory://virtual", engine=engine) as store:
        for turn in range(50):
            hold = threading.Event()
            engine.fault("get", hold=hold, times=1)
            began = now()
            asyncio.get_running_loop().call_later(7, hold.set)
            assert await store.engine.get(f"k{turn}") == b""
            assert now() - began == pytest.approx(7)


@virtually
async def test_a_frozen_engine_is_waited_for() -> None:
    engine = InMemoryEngine()
    async with connect("memory://virtual", engine=engine) as store:
        await store.put("k", b"v")
        engine.freeze()
        asyncio.get_running_loop().call_later(8, engine.thaw)
        assert await store.get("k") == b"v"
        assert now() == pytest.approx(8)


@virtually
async def test_a_frozen_engine_is_given_up_in_real_time() -> None:
    engine = InMemoryEngine()
    async with connect("memory://virtual", engine=engine, rpc_timeout=0.05) as store:
        engine.freeze()
        with pytest.raises(RpcTimeoutError):
            await store.put("k", b"v")
        engine.thaw()


@virtually
async def test_a_delay_is_real_and_the_clock_waits_for_it() -> None:
    engine = InMemoryEngine()
    engine.fault("put", delay=0.2)
    async with connect("memory://virtual", engine=engine) as store:
        report = await store.warmup(WarmupPolicy(attempt_timeout=0.05))
        assert report.tries == 1


@virtually
async def test_leases_follow_the_loop_if_told_to() -> None:
    loop = asyncio.get_running_loop()
    engine = InMemoryEngine(lease_ttl=5, clock=loop.time)
    async with connect("memory://virtual", engine=engine) as store:
        await store.put("k", b"v")
        await store.get("k")
        assert await store.engine.remove("k", False) == -706
        await asyncio.sleep(5)
        assert await store.remove("k")


def test_a_close_that_hangs_ends_in_time(caplog: pytest.LogCaptureFixture) -> None:
    hold = threading.Event()

    async def scenario() -> None:
        engine = InMemoryEngine()
        engine.fault("get", hold=hold)
        store = await connect("memory://virtual", engine=engine)
        reading = asyncio.ensure_future(store.engine.get("k"))
        await asyncio.sleep(0.01)
        began = now()
        await store.aclose(timeout=10)
        assert now() - began == pytest.approx(10)
        reading.cancel()
        with pytest.raises(StoreClosedError):
            await store.get("k")

    with caplog.at_level(logging.WARNING):
        run_in_virtual_time(scenario())
    hold.set()
    assert "took longer than 10.0 s" in caplog.text


@virtually
async def test_a_drained_call_is_waited_for() -> None:
    """A cancelled call that names memory raises when the engine has let go, and no time passes."""
    engine = InMemoryEngine()
    loop = asyncio.get_running_loop()
    async with connect("memory://virtual", engine=engine) as store:
        buffer = await store.allocate(4096)
        for turn in range(50):
            hold = threading.Event()
            engine.fault("put_from", hold=hold, times=1)
            began = now()
            putting = asyncio.ensure_future(store.engine.put_from(f"k{turn}", buffer.address, 64))
            loop.call_later(1, putting.cancel)
            loop.call_later(3, hold.set)
            with pytest.raises(asyncio.CancelledError):
                await putting
            assert now() - began == pytest.approx(3)


@virtually
async def test_cancelled_calls_leave_the_clock_alone() -> None:
    """Whenever they are cancelled: while they wait for a thread, while they run, at their end."""
    numbers = random.Random(1)
    loop = asyncio.get_running_loop()
    async with connect("memory://virtual", engine=InMemoryEngine(), threads=2) as store:
        for _ in range(100):
            calls = [asyncio.ensure_future(store.engine.is_exist(f"k{i}")) for i in range(8)]
            for _ in range(numbers.randrange(4)):
                await asyncio.sleep(0)
            for call in numbers.sample(calls, 4):
                call.cancel()
            began = loop.time()
            await asyncio.gather(*calls, return_exceptions=True)
            assert loop.time() == began
            await asyncio.sleep(1)


def test_nothing_stays_wrapped() -> None:
    """What is watched for a loop in virtual time is as it was when no such loop runs."""
    before = (Lane.submit, EngineClient._drain, EngineClient._close_in_thread, Fault.strike)

    async def scenario() -> None:
        assert Lane.submit is not before[0]

    run_in_virtual_time(scenario())
    assert before == (
        Lane.submit,
        EngineClient._drain,
        EngineClient._close_in_thread,
        Fault.strike,
    )


def test_a_store_of_another_loop_does_not_hold_the_clock() -> None:
    """Its close goes on in the background, as those of earlier tests do."""
    engine = InMemoryEngine()
    fault = engine.fault("close", delay=1)

    async def opened() -> Any:
        return await connect("memory://virtual", engine=engine)

    store = asyncio.run(opened())
    closing = store._client.begin_close()
    while not fault.hits:
        time.sleep(0.001)

    async def scenario() -> None:
        await asyncio.sleep(60)

    run_in_virtual_time(scenario())
    assert not closing.done()
    closing.result()
