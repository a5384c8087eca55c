"""Programs that are told to end by a signal: in time, by the usual code, without a word too much.

The scenes run side by side, since each of them mostly waits.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import pytest

from aiomooncake import LocalCluster
from tests.adversity import shutdown_scenes as scenes
from tests.adversity.processes import Ended, run_scene

AT_ONCE = 8
WITHIN = 25.0
"""Seconds for start, close, exit and a machine that is busy with other scenes."""

PROGRAMS = {
    "asyncio": scenes.run_asyncio,
    "uvloop": scenes.run_uvloop,
    "aiohttp": scenes.serve_aiohttp,
    "uvicorn": scenes.serve_uvicorn,
}
CODES = {
    # The interpreter ends by the signal itself after an uncaught KeyboardInterrupt,
    ("asyncio", "SIGINT"): -signal.SIGINT,
    ("uvloop", "SIGINT"): -signal.SIGINT,
    # ... and uvicorn, when it has shut down, by a SIGTERM that it got.
    ("uvicorn", "SIGTERM"): -signal.SIGTERM,
}
IMPATIENT_CODES = {
    "asyncio": -signal.SIGINT,
    "uvloop": -signal.SIGINT,
    "aiohttp": 1,  # it breaks its clean-up off,
    "uvicorn": 0,  # ... and this one does not begin it
}
SLIPS = ("destroyed", "never retrieved", "never awaited", "Fatal", "terminate", "Unclosed")

Case = tuple[str, str, str, int]
CASES: list[Case] = [
    (program, name, master, 1)
    for program in PROGRAMS
    for name in ("SIGTERM", "SIGINT")
    for master in ("healthy", "frozen", "dead")
]
IMPATIENT: list[Case] = [(program, "SIGINT", "frozen", 2) for program in PROGRAMS]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], Ended]]:
    """Run the scenes of all cases that were chosen; under pytest-xdist each when it is its turn."""
    futures: dict[Case, Future[Ended]] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        if not hasattr(request.config, "workerinput"):
            for item in request.session.items:
                if isinstance(item, pytest.Function) and item.module is request.module:
                    case = cast("Case", item.callspec.params["case"])
                    futures[case] = pool.submit(run, case)
        yield lambda case: futures[case].result() if case in futures else run(case)
        pool.shutdown(cancel_futures=True)


def run(case: Case) -> Ended:
    program, name, master, times = case
    with LocalCluster(client_ttl=60) as cluster:
        assert cluster.pid is not None
        plan = scenes.Plan(cluster.address, cluster.pid, master, name, times)
        ended = run_scene(PROGRAMS[program], plan)
        cluster.blocking.kill()  # a gentle stop takes a second, or more of one that is frozen
    return ended


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_signal_ends_a_program_with_calls_in_flight(
    case: Case, ended: Callable[[Case], Ended]
) -> None:
    program, name, _, _ = case
    end = ended(case).check(within=WITHIN, code=CODES.get((program, name), 0))
    assert end.out == "closed\n"
    assert not [slip for slip in SLIPS if slip in end.err], end.err
    interrupted = CODES.get((program, name)) == -signal.SIGINT
    assert ("Traceback" in end.err) == interrupted, end.err
    if interrupted:
        assert end.err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", IMPATIENT, ids=str)
def test_a_second_interrupt_ends_it_without_a_crash(
    case: Case, ended: Callable[[Case], Ended]
) -> None:
    end = ended(case).check(within=WITHIN, code=IMPATIENT_CODES[case[0]])
    assert not [slip for slip in SLIPS if slip in end.err], end.err
