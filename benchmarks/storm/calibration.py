"""What requests cost a real ``mooncake_master``, measured here and kept as a small JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import statistics
import struct
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiomooncake
from benchmarks.report import environment
from benchmarks.storm.wire import Recorder, cpu_seconds, play, variants, whole

__all__ = ["DEFAULT", "Calibration", "calibrate"]

DEFAULT: Final = Path(__file__).with_name("calibration.json")
"""The figures that are kept with the sources."""

_KEY: Final = b"storm_" + b"x" * 26
_VALUE: Final = bytes(4096)
_CONNECTIONS: Final = 64
_CONNECT_TRIES: Final = 4  # of the engine, per call, while nobody listens
_RPC_TIMEOUT: Final = 0.5
_CONNECTING: Final = 1.0  # seconds; a call that takes longer has tried to connect


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a master and its clients cost; all in seconds.

    Attributes:
        service: CPU time of the master for a request, by kind.
        client: What a call of a client takes beyond that, by the engine's method: its thread, the
            network, and the transfer of 4 KB. The medians of calls on an idle master.
        connect_try: From one try to connect to the next, while nobody listens.
        connect_tries: After how many of them a call fails (-900).
        late_share: Share of the requests that the master still works off after their client has
            given them up (-901).
        saturation: Requests that a master on one core answered per second, by kind.
        environment: Where and with what that was measured.
    """

    service: Mapping[str, float]
    client: Mapping[str, float]
    connect_try: float
    connect_tries: int
    late_share: float
    saturation: Mapping[str, float]
    environment: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path = DEFAULT) -> Calibration:
        """Read what was measured before."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def best_with(self, other: Calibration) -> Calibration:
        """Return the less disturbed figures of two measurements of one machine."""
        return dataclasses.replace(
            self,
            service={kind: min(cost, other.service[kind]) for kind, cost in self.service.items()},
            client={kind: min(cost, other.client[kind]) for kind, cost in self.client.items()},
            connect_try=min(self.connect_try, other.connect_try),
            saturation={
                kind: max(rate, other.saturation[kind]) for kind, rate in self.saturation.items()
            },
        )

    def save(self, path: Path = DEFAULT) -> None:
        """Write it down."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def calibrate(rounds: int = 5, burst: float = 0.25, mounts: int = 1024) -> Calibration:
    """Measure a master of our own in short bursts, and keep the least disturbed of each kind.

    Args:
        rounds: Bursts of each kind of request.
        burst: Seconds of one.
        mounts: Segments that are mounted, half of them before the mounts that count.
    """
    return asyncio.run(_Measuring(rounds, burst, mounts).run())


class _Measuring:
    def __init__(self, rounds: int, burst: float, mounts: int) -> None:
        self._rounds = rounds
        self._burst = burst
        self._mounts = mounts
        self._keys = itertools.count()
        self._service: dict[str, float] = {}
        self._saturation: dict[str, float] = {}

    async def run(self) -> Calibration:
        async with aiomooncake.LocalCluster() as cluster:
            pid = cluster.blocking.pid
            assert pid is not None
            self._address, self._pid = cluster.address, pid
            with Recorder(cluster.address) as recorder:
                requests = await _recorded(recorder)
            cores = os.sched_getaffinity(self._pid)
            await asyncio.to_thread(self._play, requests)
            _pin(self._pid, cores)
            async with _store(cluster.address, rpc_timeout=_RPC_TIMEOUT) as store:
                client = await self._calls(store)
                late_share = await _late_share(store, cluster)
                dead_call = await _dead_call(store, cluster)
                await cluster.start()  # closing takes longer without a master
        return Calibration(
            service=self._service,
            client=client,
            connect_try=dead_call / _CONNECT_TRIES,
            connect_tries=_CONNECT_TRIES,
            late_share=late_share,
            saturation=self._saturation,
            environment=environment(),
        )

    def _play(self, requests: Mapping[str, bytes]) -> None:
        """Play requests to a master that has one core, so that it can be saturated."""
        _pin(self._pid, {min(os.sched_getaffinity(self._pid))})
        for _ in range(self._rounds):
            for kind in ("exists", "get", "ping", "poll"):
                self._round(kind, itertools.repeat(requests[kind]))
            # As many of each as there were puts begun: the same keys.
            first = next(self._keys)
            begun = self._round("put_start", _keyed(requests["put_start"], first))
            for kind in ("put_end", "remove"):
                same = itertools.islice(_keyed(requests[kind], first), begun)
                self._round(kind, same, seconds=60)
            self._keys = itertools.count(first + begun)
        # Nothing records a revoked put cheaply; it does what the end of one does.
        self._service["put_revoke"] = self._service["put_end"]
        segment = requests["segment"]
        new = variants(requests["mount"], segment, lambda _: uuid.uuid4().bytes)
        for _ in range(2):  # the first half is there to make the second one dear, as at scale
            self._service.pop("mount", None)
            self._round("mount", itertools.islice(new, self._mounts // 2), seconds=60)

    def _round(self, kind: str, requests: Iterator[bytes], seconds: float | None = None) -> int:
        before = cpu_seconds(self._pid)
        answered, took = play(self._address, requests, _CONNECTIONS, seconds or self._burst)
        each = (cpu_seconds(self._pid) - before) / answered
        self._service[kind] = min(each, self._service.get(kind, each))
        self._saturation[kind] = max(answered / took, self._saturation.get(kind, 0.0))
        return answered

    async def _calls(self, store: Any) -> dict[str, float]:
        """Time the calls of a warm-up, one after another, as a warm-up makes them."""
        took: dict[str, list[float]] = {}
        for _ in range(40 * self._rounds):
            key = uuid.uuid4().hex
            calls = {"put": (_VALUE,), "is_exist": (), "get": (), "remove": (True,)}
            for method, arguments in calls.items():
                began = time.perf_counter()
                await getattr(store.engine, method)(key, *arguments)
                took.setdefault(method, []).append(time.perf_counter() - began)
        masters = {
            "put": self._service["put_start"] + self._service["put_end"],
            "is_exist": self._service["exists"],
            "get": self._service["get"],
            "remove": self._service["remove"],
        }
        return {
            method: max(0.0, statistics.median(times) - masters[method])
            for method, times in took.items()
        }


async def _recorded(recorder: Recorder) -> dict[str, bytes]:
    """Let a real client make each kind of request once."""
    key, found = _KEY.decode(), dict[str, bytes]()
    async with _store(recorder.address) as store:
        engine = store.engine
        recorder.taken()
        await engine.put(key, _VALUE)
        found["put_start"], found["put_end"] = whole(recorder.taken(), _KEY)
        await engine.is_exist(key)
        (found["exists"],) = whole(recorder.taken(), _KEY)
        await engine.get(key)
        (found["get"],) = whole(recorder.taken(), _KEY)
        await engine.remove(key, True)
        (found["remove"],) = whole(recorder.taken(), _KEY)
        mounted = await engine.allocate_and_mount_segment(1 << 20)
        words = mounted["segment_ids"][0].split("-")
        found["segment"] = struct.pack("<QQ", *map(int, words))
        (found["mount"],) = whole(recorder.taken(), found["segment"])
        # What comes of itself: the ping, which is the client's id, and the question for tasks.
        idle: dict[int, bytes] = {}
        while len(idle) < 2:
            await asyncio.sleep(0.1)
            idle |= {len(one): one for one in whole(recorder.taken())}
        found["ping"], found["poll"] = (idle[length] for length in sorted(idle))
    return found


async def _late_share(store: Any, cluster: aiomooncake.LocalCluster) -> float:
    """Freeze the master until requests have timed out, and count those that it works off later."""
    count = 8
    before = await asyncio.to_thread(_looked_up, cluster.metrics_url)
    await cluster.pause()
    codes = await asyncio.gather(*(store.engine.is_exist(f"late-{i}") for i in range(count)))
    await cluster.resume()
    assert all(code == -901 for code in codes), codes
    # It works in the order of arrival, but on several connections.
    await asyncio.sleep(0.5)
    late = await asyncio.to_thread(_looked_up, cluster.metrics_url) - before
    return min(1.0, late / count)  # a question that the library asked of itself may be among them


async def _dead_call(store: Any, cluster: aiomooncake.LocalCluster) -> float:
    """Kill the master, and return how long a call tries to reach it."""
    policy = aiomooncake.WarmupPolicy(timeout=30.0, initial_delay=0.01, backoff=1.0)
    tried: asyncio.Queue[float] = asyncio.Queue()
    await store.warmup()
    await cluster.kill()
    trying = asyncio.ensure_future(
        store.warmup(policy, on_attempt=lambda done: tried.put_nowait(done.attempt.seconds))
    )
    # The first ones find connections that broke, which they notice at once.
    while (took := await asyncio.wait_for(tried.get(), 30.0)) < _CONNECTING:
        pass
    trying.cancel()
    await asyncio.wait({trying})
    return took


def _store(address: str, **options: Any) -> Any:
    return aiomooncake.connect(
        address,
        local_hostname="127.0.0.1",
        global_segment_size="16mb",
        local_buffer_size="4mb",
        **options,
    )


def _keyed(request: bytes, first: int) -> Iterator[bytes]:
    width = len(_KEY)
    return variants(request, _KEY, lambda number: b"%0*d" % (width, first + number))


def _pin(pid: int, cores: set[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def _looked_up(metrics_url: str) -> int:
    with urllib.request.urlopen(f"{metrics_url}/metrics", timeout=5) as answer:  # noqa: S310
        lines = answer.read().decode().splitlines()
    name = "master_exist_key_requests_total "
    return next(int(line.split()[-1]) for line in lines if line.startswith(name))
