from __future__ import annotations

import asyncio
import gc
import logging
import random
from itertools import pairwise
from statistics import mean
from typing import TYPE_CHECKING, Any

import pytest

from aiomooncake.errors import (
    InvalidArgumentError,
    StoreClosedError,
    TooManyAbandonedError,
    WarmupError,
)
from aiomooncake.testing import run_in_virtual_time
from aiomooncake.warmup import (
    DiagnosisKind,
    Pace,
    WarmupPolicy,
    WarmupProgress,
    WarmupReport,
    warm_up,
)
from tests.warmup_fakes import HANG, FakeEngine, FakeTarget

if TYPE_CHECKING:
    from collections.abc import Callable

STEADY = WarmupPolicy(jitter=0.0)
NORMAL = FakeEngine.NORMAL


def warm(
    engine: FakeEngine | None = None, policy: WarmupPolicy = STEADY, **target: Any
) -> WarmupReport:
    """Warm up a fake target in virtual time."""
    return run_in_virtual_time(warm_up(FakeTarget(engine, **target), policy))


def failing_warm(engine: FakeEngine, policy: WarmupPolicy = STEADY, **target: Any) -> WarmupError:
    with pytest.raises(WarmupError) as caught:
        warm(engine, policy, **target)
    return caught.value


# -- one store --------------------------------------------------------------------------------


def test_a_ready_store_takes_one_attempt_and_keeps_no_key() -> None:
    engine = FakeEngine()
    report = warm(engine)
    assert report.tries == 1
    assert report.attempts[0].ok
    assert (report.rank, report.hostname) == (3, "10.0.0.9:12345")
    assert engine.calls == ["put", "is_exist", "get", "remove"]
    assert not engine.values


def test_failed_puts_are_retried_with_growing_pauses() -> None:
    report = warm(FakeEngine(put=[-200] * 6))
    assert [attempt.code for attempt in report.attempts] == [-200] * 6 + [0]
    delays = [attempt.delay for attempt in report.attempts]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 0.0])
    assert report.seconds == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("script", "step", "code", "name"),
    [
        ({"is_exist": [0]}, "exists", 0, "NOT_FOUND"),
        ({"is_exist": [-901]}, "exists", -901, "RPC_TIMEOUT"),
        ({"get": [b""]}, "get", None, "NO_DATA"),
        ({"get": [b"something else"]}, "get", None, "WRONG_DATA"),
    ],
)
def test_every_step_is_retried(
    script: dict[str, Any], step: str, code: int | None, name: str
) -> None:
    engine = FakeEngine(**script)
    report = warm(engine)
    first = report.attempts[0]
    assert (first.step, first.code, first.name) == (step, code, name)
    assert report.tries == 2
    assert not engine.values or code == -901


def test_each_attempt_has_a_key_of_its_own() -> None:
    """A half-written key answers 0 to a second put, although nothing is stored."""
    engine = FakeEngine(put=[-800, -800])
    warm(engine)
    assert len(set(engine.keys)) == 3
    assert all(key.startswith("aiomooncake_warmup_") for key in engine.keys)


def test_attempts_are_bounded() -> None:
    error = failing_warm(FakeEngine(put=[-200] * 99), WarmupPolicy(max_attempts=4))
    assert len(error.attempts) == 4
    assert error.attempts[-1].delay == 0.0


def test_time_is_bounded_and_no_pause_reaches_beyond_it() -> None:
    policy = WarmupPolicy(timeout=5.0, jitter=0.0)

    async def scenario() -> float:
        with pytest.raises(WarmupError):
            await warm_up(FakeTarget(FakeEngine(put=[-200] * 99)), policy)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(scenario()) == pytest.approx(4.5)


def test_the_policy_of_sglang_is_ten_tries_one_second_apart() -> None:
    error = failing_warm(FakeEngine(put=[-200] * 99), WarmupPolicy.sglang())
    assert [attempt.delay for attempt in error.attempts] == pytest.approx([1.0] * 9 + [0.0])


def test_jitter_only_lengthens() -> None:
    async def scenario() -> WarmupReport:
        target = FakeTarget(FakeEngine(put=[-200] * 40))
        return await warm_up(target, WarmupPolicy(), pace=Pace(random.Random(7)))

    delays = [attempt.delay for attempt in run_in_virtual_time(scenario()).attempts][4:-1]
    assert all(0.999 <= delay <= 1.101 for delay in delays)
    assert len(set(delays)) > 30


def test_a_hanging_call_is_given_up_after_the_attempt_timeout() -> None:
    report = warm(FakeEngine(put=[HANG]), WarmupPolicy(attempt_timeout=2.0))
    assert (report.attempts[0].name, report.attempts[0].code) == ("TIMEOUT", None)
    assert report.attempts[0].seconds == pytest.approx(2.0)
    assert report.tries == 2


def test_a_hanging_removal_does_not_keep_a_ready_store_waiting() -> None:
    async def scenario() -> float:
        await warm_up(FakeTarget(FakeEngine(remove=[HANG])), STEADY)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(scenario()) <= 1.0


def test_an_error_of_the_store_itself_is_not_retried() -> None:
    engine = FakeEngine(put=[StoreClosedError("closed")])
    with pytest.raises(StoreClosedError):
        warm(engine)
    assert engine.calls == ["put"]


def test_stuck_attempts_that_use_up_the_cap_end_in_a_diagnosis() -> None:
    error = failing_warm(FakeEngine(put=[HANG, TooManyAbandonedError("cap")]))
    assert [attempt.name for attempt in error.attempts] == ["TIMEOUT", "TOO_MANY_ABANDONED"]
    assert error.diagnosis.kind is DiagnosisKind.PEER_UNREACHABLE


@pytest.mark.parametrize("buffer", [1 << 20, 0])
async def test_cancellation_goes_through_at_once(buffer: int) -> None:
    engine = FakeEngine(put=[HANG], put_from=[HANG])
    task = asyncio.ensure_future(warm_up(FakeTarget(engine, local_buffer_size=buffer), STEADY))
    await engine.hanging.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 1.0)
    engine.released.set()


# -- by registered memory ---------------------------------------------------------------------


def test_without_a_local_buffer_the_probe_goes_by_registered_memory() -> None:
    engine = FakeEngine()
    report = warm(engine, local_buffer_size=0)
    assert report.tries == 1
    assert engine.calls == [
        "register_buffer", "put_from", "is_exist", "get_into", "unregister_buffer", "remove",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "step"),
    [({"register_buffer": [-1]}, "register"), ({"put_from": [-200]}, "put"),
     ({"is_exist": [0]}, "exists"), ({"get_into": [-800]}, "get")],
)  # fmt: skip
def test_steps_by_memory_are_retried_too(script: dict[str, Any], step: str) -> None:
    engine = FakeEngine(**script)
    report = warm(engine, local_buffer_size=0)
    assert [attempt.step for attempt in report.attempts] == [step, "done"]
    assert engine.calls.count("unregister_buffer") == (1 if step == "register" else 2)


def test_a_hanging_call_that_names_memory_is_left_behind_and_drained() -> None:
    """A cancel scope around a drained call would wait as long as the engine likes."""

    async def scenario() -> tuple[WarmupReport, FakeEngine]:
        engine = FakeEngine(put_from=[HANG])
        report = await warm_up(
            FakeTarget(engine, local_buffer_size=0), WarmupPolicy(attempt_timeout=1.0)
        )
        assert engine.calls.count("unregister_buffer") == 1
        gc.collect()
        engine.released.set()
        await asyncio.sleep(0.1)
        return report, engine

    report, engine = run_in_virtual_time(scenario())
    assert [attempt.name for attempt in report.attempts] == ["TIMEOUT", "OK"]
    assert report.attempts[0].seconds == pytest.approx(1.0)
    assert engine.calls.count("unregister_buffer") == 2


def test_an_adopted_store_without_local_buffer_is_found_out() -> None:
    """Nobody tells us how an adopted store was set up; its put answers -600."""

    async def scenario() -> tuple[WarmupReport, FakeEngine]:
        engine = FakeEngine(put=[-600] * 9)
        target = FakeTarget(engine)
        target.config = None
        return await warm_up(target, STEADY), engine

    report, engine = run_in_virtual_time(scenario())
    assert report.tries == 2
    assert "get_into" in engine.calls


# -- what it says -----------------------------------------------------------------------------


def test_log_lines_carry_rank_code_and_structured_fields(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="aiomooncake"):
        warm(FakeEngine(put=[-200]))
    first, last = caplog.records
    assert first.levelno == logging.WARNING
    assert first.getMessage() == (
        "[TP3] Warmup put failed (attempt 1), ret=-200 NO_AVAILABLE_HANDLE, retrying in 0.1s"
    )
    fields = {name: value for name, value in vars(first).items() if name.startswith("mooncake_")}
    assert fields == {
        "mooncake_rank": 3, "mooncake_host": "10.0.0.9:12345", "mooncake_attempt": 1,
        "mooncake_code": -200,
    }  # fmt: skip
    assert last.levelno == logging.INFO
    assert last.getMessage() == "[TP3] Warmup done (attempt 2), ready after 0.1s"


@pytest.mark.parametrize(
    ("rank", "start"), [("dp1/tp3", "[dp1/tp3] Warmup put"), (None, "Warmup put"), (0, "[TP0] W")]
)
def test_a_rank_given_as_text_stands_as_it_is(
    rank: int | str | None, start: str, caplog: pytest.LogCaptureFixture
) -> None:
    warm(FakeEngine(put=[-200]), rank=rank)
    assert caplog.records[0].getMessage().startswith(start)


def test_keys_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(put=[-200, HANG], get=[b"other"])
    with caplog.at_level(logging.DEBUG, logger="aiomooncake"):
        warm(engine)
    assert not any(key in caplog.text for key in engine.keys)


def test_the_error_tells_attempts_rank_and_diagnosis() -> None:
    policy = WarmupPolicy(timeout=60.0, max_attempts=7, jitter=0.0)
    error = failing_warm(FakeEngine(put=[-200] * 99), policy, global_segment_size=0)
    assert isinstance(error, RuntimeError)
    assert str(error).startswith(
        "[TP3] Warmup failed after 7 attempts in 3.5 s: last put ret=-200 NO_AVAILABLE_HANDLE. "
        "Diagnosis: no-segment: "
    )
    assert "Cure: " in str(error)
    assert (error.rank, error.code, len(error.attempts)) == (3, -200, 7)
    assert error.diagnosis.kind is DiagnosisKind.NO_SEGMENT


def test_the_hook_sees_every_attempt_and_its_failure_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[WarmupProgress] = []

    def hook(progress: WarmupProgress) -> None:
        seen.append(progress)
        raise ValueError("hook")

    run_in_virtual_time(warm_up(FakeTarget(FakeEngine(put=[-200])), STEADY, on_attempt=hook))
    assert [(one.rank, one.attempt.number, one.attempt.ok) for one in seen] == [
        (3, 1, False),
        (3, 2, True),
    ]
    assert seen[0].attempt.delay == pytest.approx(0.1)
    assert caplog.text.count("on_attempt hook of the warm-up failed") == 2


# -- what waiting can't mend --------------------------------------------------------------------


def test_a_try_that_the_end_cuts_off_does_not_decide_the_diagnosis() -> None:
    """It was told as a peer that does not answer, after many tries that had found no room."""
    policy = WarmupPolicy(jitter=0.0, timeout=1.2)  # tries at 0.0, 0.1, 0.3 and 0.7 s
    error = failing_warm(FakeEngine(put=[-200, -200, -200, HANG]), policy)
    assert error.attempts[-1].name == "TIMEOUT"
    assert error.diagnosis.kind is failing_warm(FakeEngine(put=[-200] * 9), policy).diagnosis.kind
    assert error.diagnosis.kind is not DiagnosisKind.PEER_UNREACHABLE


def test_a_value_beyond_the_local_buffer_fails_at_once() -> None:
    error = failing_warm(FakeEngine(put=[-600] * 9), local_buffer_size=1024)
    assert len(error.attempts) == 1
    assert error.diagnosis.kind is DiagnosisKind.LOCAL_BUFFER_TOO_SMALL
    assert error.diagnosis.permanent


@pytest.mark.parametrize("code", [-1700, -1701])
def test_a_refused_tenant_fails_at_once(code: int) -> None:
    error = failing_warm(FakeEngine(put=[code] * 9))
    assert len(error.attempts) == 1
    assert error.diagnosis.kind is DiagnosisKind.TENANT_REFUSED


def test_a_master_of_another_version_fails_at_once() -> None:
    """Seen in production with no log line at all: exists answers, every put is -900."""
    error = failing_warm(FakeEngine(put=[-900] * 99))
    assert len(error.attempts) == 1
    assert error.diagnosis.kind is DiagnosisKind.VERSION_MISMATCH


def test_one_broken_connection_is_not_taken_for_another_version() -> None:
    report = warm(FakeEngine(put=[-900]))
    assert report.tries == 2


def test_a_master_that_restarts_is_waited_for_at_the_price_of_few_questions() -> None:
    engine = FakeEngine(put=[-900] * 10, is_exist=[-900] * 4)
    report = warm(engine)
    assert report.tries == 11
    assert engine.calls.count("is_exist") == 4 + 1


def test_a_full_local_buffer_is_waited_for() -> None:
    assert warm(FakeEngine(put=[-600, -600])).tries == 3


# -- the policy ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": 0}, {"timeout": float("nan")}, {"max_attempts": 0}, {"initial_delay": 0},
        {"backoff": 0.5}, {"max_delay": 0.01}, {"jitter": 1.5}, {"attempt_timeout": -1},
        {"value_size": 0}, {"value_size": 1 << 30}, {"initial_delay": None}, {"jitter": "0.1"},
        {"timeout": None},
    ],
)  # fmt: skip
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        WarmupPolicy(**wrong)


# -- a group of ranks ---------------------------------------------------------------------------


class RaceEngine(FakeEngine):
    """An engine that refuses puts until the clock shows ``ready_at``; a call takes 1 ms."""

    def __init__(self, ready_at: float, probes: list[float]) -> None:
        super().__init__()
        self.ready_at = ready_at
        self.probes = probes

    async def put(self, key: str, value: bytes) -> int:
        now = asyncio.get_running_loop().time()
        self.probes.append(now)
        await asyncio.sleep(0.001)
        return self._store(key, value) if now >= self.ready_at else -200


def race(
    policy: WarmupPolicy, pace_of: Callable[[], Callable[[], Pace]], ready_at: float, ranks: int = 8
) -> tuple[float, int, WarmupReport]:
    """Let ranks start together; return their mean delay after readiness, the probes, a report."""
    probes: list[float] = []

    async def scenario() -> list[WarmupReport]:
        pace = pace_of()
        return await asyncio.gather(
            *(
                warm_up(FakeTarget(RaceEngine(ready_at, probes), rank=rank), policy, pace=pace())
                for rank in range(ranks)
            )
        )

    reports = run_in_virtual_time(scenario())
    return mean(report.seconds for report in reports) - ready_at, len(probes), reports[0]


def shared(seed: int) -> Callable[[], Callable[[], Pace]]:
    def make() -> Callable[[], Pace]:
        pace = Pace(random.Random(seed))
        return lambda: pace

    return make


READY_TIMES = [2.0 + 0.1 * step + 0.007 for step in range(41)]


def test_eight_ranks_notice_readiness_sooner_with_no_more_probes() -> None:
    ours = [race(WarmupPolicy(), shared(seed), at) for seed, at in enumerate(READY_TIMES)]
    fixed = [race(WarmupPolicy.sglang(), lambda: Pace, at) for at in READY_TIMES]
    assert mean(delay for delay, _, _ in ours) <= 0.15
    assert 0.4 <= mean(delay for delay, _, _ in fixed) <= 0.6
    assert sum(probes for _, probes, _ in ours) <= sum(probes for _, probes, _ in fixed)


def test_a_rank_that_fails_beside_one_that_succeeds_takes_a_breath() -> None:
    """It was woken at once, for a second try in vain: it has a trouble of its own."""

    async def scenario() -> list[WarmupReport]:
        pace = Pace()
        engines = FakeEngine(put=[-200]), FakeEngine()
        return await asyncio.gather(
            *(warm_up(FakeTarget(engine), STEADY, pace=pace) for engine in engines)
        )

    late, _ = run_in_virtual_time(scenario())
    assert late.attempts[0].delay == pytest.approx(0.1)


def test_the_tries_of_a_group_are_spread() -> None:
    probes: list[float] = []

    async def scenario() -> None:
        pace = Pace()
        await asyncio.gather(
            *(warm_up(FakeTarget(RaceEngine(6.0, probes)), STEADY, pace=pace) for _ in range(8))
        )

    run_in_virtual_time(scenario())
    late = [at for at in probes if 2.0 < at < 6.0]
    gaps = [after - before for before, after in pairwise(late)]
    assert min(gaps) > 0.1
    assert min(gaps) > 0.14
    assert max(gaps) < 0.16


def test_the_first_success_sends_the_others_off_at_once() -> None:
    delay, probes, _ = race(WarmupPolicy(), shared(1), 10.0)
    assert delay < 0.15
    assert probes < 8 * 12


def test_each_rank_of_a_group_keeps_the_pauses_of_its_policy() -> None:
    """Ten tries one second apart stay that, also when eight ranks take turns."""
    _, _, report = race(WarmupPolicy.sglang(), shared(1), 5.5)
    assert all(attempt.delay >= 0.999 for attempt in report.attempts[:-2])


def test_a_rank_woken_in_vain_goes_on_by_itself_and_never_fails_early() -> None:
    """A short time-out must not let a rank give up because its turn would come too late."""
    probes: list[float] = []
    policy = WarmupPolicy(timeout=0.5)

    async def scenario() -> list[WarmupReport | BaseException]:
        pace = Pace(random.Random(3))
        ready = [0.3] * 7 + [99.0]
        return await asyncio.gather(
            *(
                warm_up(FakeTarget(RaceEngine(at, probes), rank=rank), policy, pace=pace)
                for rank, at in enumerate(ready)
            ),
            return_exceptions=True,
        )

    *ready, broken = run_in_virtual_time(scenario())
    assert all(isinstance(result, WarmupReport) for result in ready)
    assert isinstance(broken, WarmupError)
    assert len(broken.attempts) >= 3


def test_one_broken_rank_is_not_woken_by_every_other_one() -> None:
    probes: list[float] = []

    async def scenario() -> int:
        pace = Pace(random.Random(5))
        policy = WarmupPolicy(timeout=4.0)
        broken = asyncio.ensure_future(warm_up(FakeTarget(RaceEngine(99.0, [])), policy, pace=pace))
        ranks = [FakeTarget(RaceEngine(2.0 + rank / 1000, probes)) for rank in range(30)]
        await asyncio.gather(*(warm_up(rank, policy, pace=pace) for rank in ranks))
        with pytest.raises(WarmupError) as caught:
            await broken
        return len(caught.value.attempts)

    assert run_in_virtual_time(scenario()) <= 8
