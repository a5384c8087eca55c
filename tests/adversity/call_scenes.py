"""Scenes of :mod:`test_no_crash` and :mod:`test_leaks`: each runs in an interpreter of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiomooncake
from aiomooncake import Store, StoreClosedError, WrongLoopError
from aiomooncake.engine import process
from aiomooncake.engine.binding import load_binding
from aiomooncake.engine.entry_points import RealEntry
from aiomooncake.testing import LoopStallProbe
from tests.adversity.exit_scenes import open_store, opened, start_daemons
from tests.contract.unset_calls import CALLS

# Loop and GIL are free while the engine works: what is left is a busy machine.
NO_STALL = 0.5
# A tenth of what 20 clients hold. Freed memory lies in more or less of the heap, round by round.
ROOM = 52 << 20
MB = 1 << 20
LIFE = {"setup", "setup_dummy", "init_all", "close"}


async def settled() -> None:
    """Wait until every close in the background has ended, and its threads too."""
    deadline = time.monotonic() + 15
    while process._live or [t for t in threading.enumerate() if t.name.endswith("-close")]:
        assert time.monotonic() < deadline, list(process._live)
        await asyncio.sleep(0.005)


@contextlib.contextmanager
def refused(error: type[Exception]) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    except error:
        assert time.monotonic() - began < 1, "it was not refused at once"
    else:
        raise AssertionError(f"no {error.__name__}")


async def check_verbs(store: Store, error: type[Exception]) -> None:
    """Every way into the engine is shut by this error."""
    verbs: list[Callable[[], Awaitable[object]]] = [
        lambda: store.get("k"),
        lambda: store.exists("k"),
        lambda: store.size("k"),
        lambda: store.put("k", b"v"),
        lambda: store.upsert("k", b"v"),
        lambda: store.remove("k"),
        lambda: store.get_many(["k"]),
        lambda: store.exists_many(["k"]),
        lambda: store.remove_many(["k"]),
        lambda: store.put_many({"k": b"v", "l": bytearray(100_000)}),
        lambda: store.remove_by_regex("k"),
        store.remove_all,
        store.warmup,
    ]
    for verb in verbs:
        with refused(error):
            await verb()
    for name in dir(store.engine):
        with refused(error):
            await getattr(store.engine, name)(*CALLS.get(name, ()))
        if error is StoreClosedError:
            with refused(error):
                await asyncio.to_thread(getattr(store.blocking, name), *CALLS.get(name, ()))


def before_and_after(address: str) -> None:
    """No verb before the store is open, and none after it was closed, once or twice."""
    opening = aiomooncake.connect(address)
    assert not {"get", "engine", "blocking"} & set(dir(opening))
    opening.close()

    async def main() -> None:
        store = await open_store(address)
        for name in LIFE:
            with refused(ValueError):
                await getattr(store.engine, name)()
            with refused(ValueError):
                await asyncio.to_thread(getattr(store.blocking, name))
        await store.put("kept", b"v" * 100_000)
        handle = await store.engine.get_buffer("kept")
        await asyncio.gather(*(store.aclose() for _ in range(5)))
        assert store.closed
        assert store.health().state == "closed"
        await check_verbs(store, StoreClosedError)
        await store.aclose()
        assert handle is not None
        assert bytes(handle) == b"v" * 100_000
        del handle
        mirror = (await open_store(address)).engine
        await settled()
        with refused(StoreClosedError):
            await mirror.is_exist("k")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the store whose mirror was kept
        asyncio.run(main())


def closed_by_its_owner(address: str) -> None:
    """The owner of an adopted engine closes it, in either way, and goes on calling the store."""

    async def main() -> None:
        binding = load_binding()
        entry = RealEntry.find(binding)
        assert isinstance(entry, RealEntry)
        for directly in (False, True):
            native = binding.store_class()
            assert native.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MB, MB, "tcp", "", address) == 0
            store = aiomooncake.adopt(native)
            await store.put("k", b"v")
            buffer, segment = await store.allocate(MB), await store.mount_segment(MB)
            session = store.put_session({"l": 10})
            await session.__aenter__()
            await session.write("l", 0, buffer[:10])
            if directly:
                at = entry.address(native)
                assert at is not None
                assert entry.tear_down(at) == 0
            else:
                assert native.close() == 0
            assert store.health().state == "closed"
            assert not store.health().ok
            await check_verbs(store, StoreClosedError)
            for move in (
                store.put_from("k", buffer[:10]),
                store.get_into("k", buffer[:10]),
                store.put_many_from({"l": buffer[:10], "m": buffer[:10]}),
                store.get_many_into({"l": buffer[:10], "m": buffer[:10]}),
                store.put_parts("k", b"v", b"w"),
                store.replicas("k"),
                store.copy("k", "target"),
                session.write("l", 0, buffer[:10]),
                session.__aexit__(None, None, None),
                store.put_session({"m": 10, "n": 10}).__aenter__(),
                store.get_session(["k"]).__aenter__(),
                store.view("k"),
                store.allocate(MB),
                store.mount_segment(MB),
            ):
                with refused(StoreClosedError):
                    await move
            await buffer.aclose()
            await segment.aclose()
            await store.aclose()

    asyncio.run(main())


def close_under_calls(address: str) -> None:
    """Calls in flight end well, those that wait for a thread and later ones are refused."""

    async def main() -> None:
        store = await open_store(address)
        await store.put("k", b"v" * 4096)
        answers: list[int | None] = []
        busy = threading.Event()

        def call() -> None:
            try:
                while True:
                    answers.append(store.blocking.get_size("k"))
                    if len(answers) == 100:
                        busy.set()
            except StoreClosedError:
                answers.append(None)

        threads = start_daemons(4, call)
        await asyncio.to_thread(busy.wait)
        value = bytearray(b"w" * 20_000_000)
        calls: list[Awaitable[object]] = [
            *(store.get("k") for _ in range(60)),
            *(store.put(f"k{i}", b"v") for _ in range(20) for i in range(2)),
            store.put("large", value),
            store.get_many([f"k{i}" for i in range(500)]),
            store.warmup(),
        ]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0)
        await asyncio.gather(store.aclose(), store.aclose())
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for result in ended:
            assert not isinstance(result, BaseException) or isinstance(result, StoreClosedError)
        for thread in threads:
            thread.join()
        assert answers.count(None) == 4
        assert {answer for answer in answers if answer is not None} == {4096}

    asyncio.run(main())


def cancelled_connects(address: str) -> None:
    """Wherever a connect is cancelled, what it began is torn down behind it."""

    async def main() -> None:
        async with LoopStallProbe() as probe:
            for delay in range(0, 60, 3):
                opening = asyncio.ensure_future(open_store(address))
                await asyncio.sleep(delay / 1000)
                opening.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    store = await opening
                    store._client.begin_close()
            await settled()
            store = await open_store(address)
            await store.aclose()
        assert probe.longest < NO_STALL, probe

    asyncio.run(main())


def cancelled_close(address: str) -> None:
    """A cancelled close goes on in the background, and says nothing when its loop is closed."""

    async def main() -> Store:
        store = await open_store(address)
        closing = asyncio.ensure_future(store.aclose())
        await asyncio.sleep(0.01)
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
        assert store.closed
        assert process._live
        with refused(StoreClosedError):
            await store.get("k")
        return store

    store = asyncio.run(main())
    asyncio.run(settled())
    assert store.health().state == "closed"
    asyncio.run(store.aclose())


def dropped(address: str) -> None:
    """A dropped store warns and closes behind the loop, which does not stand still for it."""

    async def main() -> None:
        store = await open_store(address)
        await store.put("k", b"v")
        gc.collect()
        async with LoopStallProbe() as probe:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                del store
                gc.collect()
            assert [w.category for w in caught] == [ResourceWarning], caught
            assert "unclosed <Store" in str(caught[0].message)
            assert process._live
            await settled()
        assert probe.longest < NO_STALL, probe

    asyncio.run(main())


def other_loops(address: str) -> None:
    """Another loop is refused while the first one lives, and takes over when it is closed."""
    store = opened(address, max_abandoned=1000)  # in a loop that is closed

    def use_elsewhere() -> None:
        asyncio.run(check_verbs(store, WrongLoopError))

    async def main() -> None:
        await store.put("k", b"v" * 4096)
        elsewhere = asyncio.to_thread(use_elsewhere)
        _, answers = await asyncio.gather(
            elsewhere, asyncio.gather(*(store.get("k") for _ in range(200)))
        )
        assert set(answers) == {b"v" * 4096}
        with refused(WrongLoopError):  # it would stop this one
            store.blocking.is_exist("k")

    async def leave_under_calls() -> list[asyncio.Task[object]]:
        value = bytearray(b"w" * 100_000)
        tasks: list[asyncio.Task[object]] = [
            *(asyncio.ensure_future(store.get("k")) for _ in range(100)),
            *(asyncio.ensure_future(store.put(f"{i}", value)) for i in range(10)),
        ]
        await asyncio.sleep(0.001)
        return tasks

    asyncio.run(main())
    for _ in range(10):
        tasks = asyncio.run(leave_under_calls())
        assert all(task.done() for task in tasks)
    # A loop that is closed by hand does not even cancel its tasks.
    loop = asyncio.new_event_loop()
    tasks = loop.run_until_complete(leave_under_calls())
    loop.close()
    asyncio.run(main())
    asyncio.run(store.aclose())
    assert store.stats().in_flight == 0
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]


# --- leaks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """What a process holds of its machine."""

    threads: int
    descriptors: int
    resident: int

    @classmethod
    def now(cls) -> Footprint:
        own = Path("/proc/self")
        pages = int((own / "statm").read_text().split()[1])
        return cls(
            threads=len(list((own / "task").iterdir())),
            descriptors=len(list((own / "fd").iterdir())),
            resident=pages * resource.getpagesize(),
        )


def open_and_close(address: str, at_once: str, rounds: str) -> None:
    """Open, use and close stores, some at a time because each close takes 1-2 s."""

    async def cycle() -> None:
        async with await open_store(address) as store:
            key = "leak" + store.hostname
            await store.warmup()
            await store.put(key, b"v" * 1_000_000)
            assert await store.get(key) == b"v" * 1_000_000
            assert await store.get_many([key, key + "?"]) == [b"v" * 1_000_000, None]
            await store.remove(key, force=True)

    async def main() -> Footprint:
        await asyncio.gather(*(cycle() for _ in range(int(at_once))))
        await settled()
        gc.collect()
        return Footprint.now()

    before = after = asyncio.run(main())
    for _ in range(int(rounds)):
        after = asyncio.run(main())
        print(after)
    # The engine's own threads come and go for a while after a close: 17 to 20 of them.
    deadline = time.monotonic() + 10
    while after.threads > before.threads + 1 and time.monotonic() < deadline:
        time.sleep(0.05)
        after = Footprint.now()
    more = f"{before} became {after}"
    # A leak is one per cycle at least.
    assert after.threads <= before.threads + 1, more
    assert after.descriptors <= before.descriptors + 1, more
    assert after.resident <= before.resident + ROOM, more
