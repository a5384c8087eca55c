"""Scenes, policies, and what a run of one in the other comes to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from aiomooncake.errors import WarmupError
from aiomooncake.testing import run_in_virtual_time
from aiomooncake.warmup import Pace, WarmupPolicy, warm_up
from benchmarks.measure import percentile
from benchmarks.storm.calibration import Calibration
from benchmarks.storm.master import WINDOW, Master
from benchmarks.storm.ranks import Rank, World

__all__ = [
    "CHOICE",
    "FIXED",
    "OURS",
    "POLICIES",
    "SCENES",
    "Contender",
    "Outcome",
    "Scene",
    "simulate",
]

GROUP: Final = 8
"""Ranks of one process, which share what they learn where the policy lets them."""

_ENGINES_WITHIN: Final = 5.0  # seconds in which the late half of the Transfer Engines gets ready
_GOLDEN: Final = (math.sqrt(5) - 1) / 2
_ROLLING: Final = 0.002  # seconds from one rank's start to the next one's


@dataclass(frozen=True, slots=True)
class Scene:
    """What happens to all ranks.

    Attributes:
        name: The word for it.
        sentence: What it is.
        rolling: Seconds from one rank's start to the next one's.
        late_engines: Share of the ranks whose engine is not ready at their start.
        memory_after: Seconds until a segment is mounted, from and to.
        away: Seconds that the master is away from the start on, from and to; its clients mount
            anew then.
    """

    name: str
    sentence: str
    rolling: float = 0.0
    late_engines: float = 0.0
    memory_after: tuple[float, float] = (0.0, 0.0)
    away: tuple[float, float] = (0.0, 0.0)


SCENES: Final = (
    Scene(
        "engines",
        "All start at once; the Transfer Engines of half of the ranks are ready only after 0 to "
        "5 s, each by itself.",
        late_engines=0.5,
    ),
    Scene(
        "memory",
        "All start at once; nobody has mounted memory yet, and somebody does after 2 to 3 s.",
        memory_after=(2.0, 3.0),
    ),
    Scene(
        "restart",
        "The master dies, all ranks warm up from that moment on, it is back after 3 to 8 s and has "
        "forgotten them: each client mounts its memory again at its next ping.",
        away=(3.0, 8.0),
    ),
    Scene(
        "rolling",
        "A rank starts every 2 ms; half of the engines are late as above.",
        rolling=_ROLLING,
        late_engines=0.5,
    ),
)


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to wait.

    Attributes:
        name: What tables call it.
        policy: What each rank is told.
        pace: Makes what its ranks share.
        together: Ranks that share one.
    """

    name: str
    policy: WarmupPolicy
    pace: Callable[[random.Random], Pace] = Pace
    together: int = 1


class _FullJitter(Pace):
    """Waits anything from nothing to the delay, as is often advised for storms."""

    def reserve(self, delay: float, policy: WarmupPolicy, deadline: float) -> float | None:
        """Take a random wait."""
        return super().reserve(delay * self._rng.random(), policy, deadline)


_EXPONENTIAL: Final = WarmupPolicy(jitter=0.0, max_delay=10.0)

FIXED: Final = "fixed second"
OURS: Final = "aiomooncake"
POLICIES: Final = (
    Contender(FIXED, WarmupPolicy.sglang()),
    Contender("exponential", _EXPONENTIAL),
    Contender("full jitter", _EXPONENTIAL, _FullJitter),
    Contender(OURS, WarmupPolicy(), together=GROUP),
)
"""What is compared."""

CHOICE: Final = (
    POLICIES[-1],
    *(
        Contender(name, policy, together=GROUP)
        for name, policy in {
            "jitter=0": WarmupPolicy(jitter=0.0),
            "jitter=0.5": WarmupPolicy(jitter=0.5),
            "jitter=1": WarmupPolicy(jitter=1.0),
            "jitter=0.3, max_delay=0.9": WarmupPolicy(jitter=0.3, max_delay=0.9),
            "initial_delay=0.05": WarmupPolicy(initial_delay=0.05),
            "initial_delay=1": WarmupPolicy(initial_delay=1.0),
            "max_delay=0.5": WarmupPolicy(max_delay=0.5),
            "max_delay=2": WarmupPolicy(max_delay=2.0),
        }.items()
    ),
)
"""What the default policy was chosen from."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to. Waits are those of the ranks that were not ready at their start.

    Attributes:
        all_ready: Seconds from the start until the last rank was ready.
        wait_mean: Seconds from when a rank could have been ready until it was: the mean …
        wait_median: … the median …
        wait_p99: … the 99th percentile …
        wait_max: … and the longest.
        fairness: Jain's index of the waits: 1 when all are alike, 1/n when one has it all.
        failed: Ranks that gave up.
        peak: Requests per second in the busiest 100 ms, pings among them.
        retry_peak: The same of second and later tries alone.
        requests: What the warm-ups asked of the master in all.
        tries: Attempts of all ranks.
        idle_requests: Pings, questions for tasks, and mounts.
        timed_out: Requests that were given up.
        longest_wait: Seconds that the master took for an answer at most.
        busy: Share of its workers' time until all were ready that the master was at work.
        windows: Requests by window of 100 ms, from the start on.
    """

    scene: str
    policy: str
    ranks: int
    seed: int
    all_ready: float
    wait_mean: float
    wait_median: float
    wait_p99: float
    wait_max: float
    fairness: float
    failed: int
    peak: float
    retry_peak: float
    requests: int
    tries: int
    idle_requests: int
    came: int
    answered: int
    timed_out: int
    dropped: int
    longest_wait: float
    busy: float
    windows: Sequence[int]
    waits: Sequence[float]

    def to_json(self) -> dict[str, Any]:
        """Return all of it for JSON, the waits as 101 percentiles."""
        waits = sorted(self.waits)
        shares = [_share(waits, share / 100) for share in range(101)]
        return asdict(self) | {"waits": shares}


def simulate(
    scene: Scene,
    contender: Contender,
    ranks: int,
    calibration: Calibration,
    *,
    seed: int = 0,
    workers: int = 2,
    rpc_timeout: float = 2.5,
) -> Outcome:
    """Let ranks warm up in virtual time; the same for the same arguments.

    Args:
        scene: What happens to them.
        contender: How they wait.
        ranks: How many.
        calibration: What the master costs.
        seed: Of everything random. Late engines and pings are the same for all contenders.
        workers: Cores of the master.
        rpc_timeout: Seconds after which clients give a request up.
    """

    async def run() -> Outcome:
        away = _between(scene.away, seed)
        master = Master(calibration, workers, rpc_timeout, back_at=away)
        memory_at = math.inf if away else _between(scene.memory_after, seed)
        world = World(master, calibration, memory_at)
        return await _Run(scene, contender, world, ranks=ranks, seed=seed).run()

    with _quiet():
        return run_in_virtual_time(run())


class _Run:
    def __init__(
        self,
        scene: Scene,
        contender: Contender,
        world: World,
        *,
        ranks: int,
        seed: int,
    ) -> None:
        self._scene = scene
        self._contender = contender
        self._seed = seed
        self._master = world.master
        self._world = world
        self._tries = 0
        # Not the same stream as the contender's: all of them shall see the same world.
        self._rng = random.Random(f"{seed} {scene.name} {ranks}")
        self._ranks = [self._rank(number) for number in range(ranks)]

    async def run(self) -> Outcome:
        pings = [
            asyncio.ensure_future(rank.ping(random.Random(f"{self._seed} ping {rank.rank}")))
            for rank in self._ranks
        ]
        together = self._contender.together
        paces = [
            self._contender.pace(random.Random(f"{self._seed} pace {first}"))
            for first in range(0, len(self._ranks), together)
        ]
        await asyncio.gather(
            *(self._warm_up(rank, paces[rank.rank // together]) for rank in self._ranks)
        )
        for ping in pings:
            ping.cancel()
        await asyncio.wait(pings)
        return self._outcome()

    def _rank(self, number: int) -> Rank:
        scene, rng = self._scene, self._rng
        starts_at = number * scene.rolling
        late = rng.random() < scene.late_engines
        delay = rng.uniform(0.0, _ENGINES_WITHIN)
        return Rank(
            number,
            self._world,
            starts_at,
            engine_at=starts_at + delay if late else 0.0,
            registered_at=math.inf if self._master.back_at else 0.0,
        )

    async def _warm_up(self, rank: Rank, pace: Pace) -> None:
        await asyncio.sleep(rank.starts_at)
        try:
            report = await warm_up(rank, self._contender.policy, pace=pace)
        except WarmupError as error:
            self._tries += len(error.attempts)
        else:
            self._tries += report.tries
            rank.ready_at = rank.starts_at + report.seconds

    def _outcome(self) -> Outcome:
        master = self._master
        ready = [(rank, rank.ready_at) for rank in self._ranks if rank.ready_at is not None]
        all_ready = max((when for _, when in ready), default=math.inf)
        waits = sorted(
            when - rank.could_be_ready_at
            for rank, when in ready
            if rank.could_be_ready_at > rank.starts_at
        )
        idle = sum(master.came[kind] for kind in ("ping", "poll", "mount"))
        last = max(master.windows)
        return Outcome(
            scene=self._scene.name,
            policy=self._contender.name,
            ranks=len(self._ranks),
            seed=self._seed,
            all_ready=all_ready,
            wait_mean=statistics.fmean(waits),
            wait_median=_share(waits, 0.5),
            wait_p99=_share(waits, 0.99),
            wait_max=waits[-1],
            fairness=_jain(waits),
            failed=len(self._ranks) - len(ready),
            peak=max(master.windows.values()) / WINDOW,
            retry_peak=max(master.retry_windows.values()) / WINDOW,
            requests=master.came.total() - idle,
            tries=self._tries,
            idle_requests=idle,
            came=master.came.total(),
            answered=master.answered,
            timed_out=master.timed_out,
            dropped=master.dropped,
            longest_wait=master.longest_wait,
            busy=master.busy_share(all_ready),
            windows=[master.windows[window] for window in range(last + 1)],
            waits=waits,
        )


def _between(bounds: tuple[float, float], seed: int) -> float:
    """Return a moment between two: seeds that follow one another spread evenly over it.

    Who sleeps for whole seconds is lucky or not by where in the second it falls.
    """
    first, last = bounds
    return first + (last - first) * ((0.5 + seed * _GOLDEN) % 1.0)


def _share(waits: Sequence[float], share: float) -> float:
    found = percentile(waits, share)
    return 0.0 if found is None else found


def _jain(values: Sequence[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep thousands of ranks from writing a line per try, and the collector from counting them."""
    logger = logging.getLogger("aiomooncake")
    level, collecting = logger.level, gc.isenabled()
    logger.setLevel(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        logger.setLevel(level)
        if collecting:
            gc.enable()
