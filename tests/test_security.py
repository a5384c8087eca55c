"""Nothing secret is shown, nothing listens or lies about that should not, and memory is named.

Keys and values of a serving system are its users' prompts: they stay out of logs and ``repr``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import stat
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiomooncake import (
    BatchError,
    BufferTooSmallError,
    ConfigError,
    InvalidArgumentError,
    LocalCluster,
    MooncakeError,
    NoSpaceError,
    Store,
    StoreConfig,
    WarmupError,
    WarmupPolicy,
    connect,
    connect_ranks,
)
from aiomooncake.buffers import Buffer
from aiomooncake.config import parse_target
from aiomooncake.engine.inmemory import InMemoryEngine
from aiomooncake.testing import FaultProxy
from tests.conftest import Hold, OpenStore

KB, MB = 1 << 10, 1 << 20
KEY, VALUE = "sekret-key", b"sekret-value" * 100
HIDDEN = "sekret"


# --- keys and values --------------------------------------------------------------------------


class Everything(logging.Handler):
    """All that is logged, as it would be written; but not what asyncio says in debug mode."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "asyncio":
            self.lines.append(self.format(record))


@pytest.fixture
def written() -> Iterator[list[str]]:
    """Write down everything that is logged, down to DEBUG."""
    handler, root = Everything(), logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler.lines
    root.setLevel(before)
    root.removeHandler(handler)


async def use_every_verb(store: Store) -> list[object]:
    """Use keys and values that must not be shown; what was made on the way."""
    async with store.allocate(4096) as buffer:
        assert buffer.view is not None
        buffer.view[: len(VALUE)] = VALUE
        part = buffer[: len(VALUE)]
        await asyncio.gather(store.put(KEY, VALUE), store.put(KEY + "2", bytearray(VALUE)))
        await store.upsert(KEY, VALUE)
        await store.put_many({f"{KEY}{i}": VALUE for i in range(20)})
        await store.put_parts(KEY + "parts", VALUE, VALUE)
        await store.put_from(KEY + "from", part)
        await store.put_many_from({KEY + "m": part, KEY + "n": [buffer[:6], buffer[6:12]]})
        await asyncio.gather(*(store.get(f"{KEY}{i}") for i in range(20)))
        await store.get_many([KEY, KEY + "none"])
        await store.get_into(KEY, buffer)
        await store.get_many_into({KEY: buffer})
        await asyncio.gather(store.exists(KEY), store.size(KEY))
        replicas = await store.replicas(KEY)
        async with store.view(KEY) as view, store.view_many([KEY]) as views:
            assert view is not None
            assert [bytes(view), *map(bytes, filter(None, views))] == [VALUE, VALUE]
        report = await store.warmup()
        made = [buffer, part, *replicas, report, store.get(KEY), store.view(KEY)]
        reprs: list[object] = [repr(each) for each in made]
        for each in made[-2:]:
            each.close()  # type: ignore[attr-defined]
    await store.remove_many([KEY + "m", KEY + "none"], force=True)
    await store.remove(KEY, force=True)
    await store.remove_by_regex(f"^{KEY}", force=True)
    return reprs


async def shown_of(store: Store) -> list[str]:
    """What a debugger or a log line would show of a store and what it is made of."""
    calls = [asyncio.ensure_future(store.get(KEY)), asyncio.ensure_future(store.put(KEY, VALUE))]
    await asyncio.sleep(0)
    things: list[object] = [
        store,
        store.engine,
        store.blocking,
        store.config,
        store.stats(),
        store.health(),
        store._client,
        store._client.gate,
        store._batching,
        store._transfers,
        store._views,
        *calls,
    ]
    assert store._batching is not None
    things += [store._batching.gets, store._batching.exists, *store._batching._writes.values()]
    shown = [repr(thing) for thing in things]
    await asyncio.gather(*calls)
    return shown


@pytest.mark.parametrize("target", ["memory", "real"])
async def test_no_key_and_no_value_is_logged_or_shown(
    target: str, written: list[str], cluster: LocalCluster, open_store: OpenStore
) -> None:
    """Not at DEBUG either."""
    address = "memory://security" if target == "memory" else cluster.address
    store = await open_store(address, global_segment_size=32 * MB, local_buffer_size=4 * MB, rank=1)
    shown = [*await use_every_verb(store), *await shown_of(store)]
    await store.remove(KEY, force=True)
    assert written  # the warm-up, at least
    for text in (*map(str, shown), *written):
        assert HIDDEN not in text


@pytest.mark.usefixtures("recwarn")
async def test_trouble_is_told_without_keys_and_values(
    written: list[str], hold: Hold, loop_errors: list[str]
) -> None:
    """Outage, taint and re-opening, hung and abandoned calls, a failed hook, a dropped store."""
    engine = InMemoryEngine("trouble", rpc_timeout=0.2)
    options: dict[str, Any] = {"engine": engine, "rank": 1, "global_segment_size": 32 * MB}
    errors: list[BaseException] = []
    async with connect("memory://trouble", max_abandoned=2, **options) as store:
        await store.put(KEY, VALUE)
        engine.down()
        for call in (store.get(KEY), store.put(KEY, VALUE), store.get_many([KEY])):
            with pytest.raises(MooncakeError) as failed:
                await call
            errors.append(failed.value)
        engine.up()
        fault = engine.fault("batch_get_into", hold=hold)
        fault2 = engine.fault("get_size", hold=hold)
        stuck = [asyncio.ensure_future(store.get(KEY)), asyncio.ensure_future(store.size(KEY))]
        await asyncio.sleep(0.05)
        for task in stuck:
            task.cancel()
        await asyncio.wait(stuck)
        fault.remove()
        fault2.remove()
        hold.set()
        refused = engine.fault("put", code=-800)
        with pytest.raises(WarmupError) as unready:
            await store.warmup(WarmupPolicy(max_attempts=2, initial_delay=0.01))
        refused.remove()
        errors.append(unready.value)
        with pytest.raises(BufferTooSmallError) as small:
            async with store.allocate(4) as buffer:
                await store.get_into(KEY, buffer)
        errors.append(small.value)

        def broken() -> None:
            raise RuntimeError("the caller's own")

        async with store.allocate(4096) as buffer:
            await store.put_from(KEY, buffer, on_release=broken)
    dropped = await connect("memory://trouble", **options)
    await dropped.put(KEY, VALUE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del dropped
        gc.collect()
    assert [each.category for each in caught] == [ResourceWarning]
    told = [*written, *(str(each.message) for each in caught)]
    assert len([line for line in told if " aiomooncake " in line]) >= 3
    for line in told:
        assert HIDDEN not in line
    for error in errors:  # an error names its key, and never a value
        assert VALUE[:12].decode() not in "".join(traceback.format_exception(error)) + repr(error)


async def test_an_error_carries_its_key() -> None:
    async with connect("memory://keys", global_segment_size=8 * MB) as store:
        await store.put("the key", b"value")
        async with store.allocate(2) as buffer:
            with pytest.raises(BufferTooSmallError) as small:
                await store.get_into("the key", buffer)
        assert small.value.key == "the key"
        fault = InMemoryEngine.named("keys").fault("batch_put_from", code=-800)
        with pytest.raises(BatchError) as batch:
            await store.put_many({"a": b"1", "b": b"2"})
        fault.remove()
        assert set(batch.value.errors) == {"a", "b"}


# --- addresses and configuration --------------------------------------------------------------

SECRETS = [
    "redis://user:sekret@10.0.0.1:6379",
    "redis://:sekret@10.0.0.1:6379",
    "redis://user:sek%40ret:sekret@10.0.0.1:6379",
    "http://10.0.0.1:8080/metadata?token=sekret",
    "http://user:p@sekret@10.0.0.1:8080/metadata?x=1&api_key=sekret&y=2",
    "https://10.0.0.1/metadata?Password=sekret#part",
    "https://10.0.0.1/metadata?X-Amz-Signature=sekret&sig=sekret;signature=sekret",
    "https://10.0.0.1/metadata#token=sekret&sig=sekret",
]


def everything_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


@pytest.mark.parametrize("url", SECRETS)
def test_addresses_are_shown_without_their_secrets(url: str) -> None:
    config = StoreConfig("h:1", metadata_server=url)
    assert config.metadata_server == url  # it is kept, and only not shown
    things: list[object] = [config, config.replace(threads=2), [config]]
    if not url.startswith("http"):  # which is no address of a master
        things += [StoreConfig(url), parse_target(url)]
    for thing in things:
        assert "sekret" not in repr(thing)
        assert "sekret" not in f"{thing}"
    assert "10.0.0.1" in repr(config)  # what is no secret is


@pytest.mark.parametrize("url", SECRETS)
def test_errors_show_addresses_without_their_secrets(url: str, tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(f'{{"master_server_address": "h:1", "metadata_server": "{url} x"}}')
    bad: list[Any] = [
        lambda: StoreConfig("h:1", metadata_server=f"{url}\n"),
        lambda: StoreConfig("h:1", local_hostname=url),
        lambda: StoreConfig("h:1", threads=url),  # type: ignore[arg-type]
        lambda: StoreConfig("h:1", threads=[url]),  # type: ignore[arg-type]
        lambda: StoreConfig("h:1", metadata_server=url.encode()),  # type: ignore[arg-type]
        lambda: StoreConfig.from_url(f"mooncake://h:1?threads={url}"),
        lambda: StoreConfig.from_env({"MOONCAKE_MASTER": url + " "}, dialect="vllm"),
        lambda: StoreConfig.from_env({"MOONCAKE_CLIENT": url}),
        lambda: StoreConfig.from_file(path),
        lambda: StoreConfig.from_file(path, dialect="lmcache"),
        lambda: StoreConfig.from_mapping({"master_server_address": url, "threads": 0}),
        lambda: StoreConfig.from_env(
            {"MOONCAKE_METADATA_SERVER": url, "MOONCAKE_TE_META_DATA_SERVER": "h:1"}
        ),
        lambda: FaultProxy(url),
    ]
    for make in bad:
        with pytest.raises(ConfigError) as refused:
            make()
        assert "sekret" not in everything_of(refused.value)


@pytest.mark.parametrize("url", ["ftp://h:1", "P2P://h", "redis://", "etcd:// ", "://h"])
def test_a_metadata_server_of_no_known_kind_is_refused(url: str) -> None:
    """The engine ends the process for it, and writes the whole address on its way out."""
    with pytest.raises(ConfigError, match="metadata_server"):
        StoreConfig("h:1", metadata_server=url)
    assert StoreConfig("h:1", metadata_server="HTTP://h/x").metadata_server == "http://h/x"


async def test_connecting_shows_addresses_without_their_secrets(written: list[str]) -> None:
    for url in ("memory://x?token=sekret", "mooncake://user:sekret@h:1", "local://sekret@h"):
        with pytest.raises(ConfigError) as refused:
            await connect(url)
        if "token" not in url:
            assert "sekret" not in everything_of(refused.value)
    async with connect_ranks(
        "memory://ranks", 2, metadata_server=SECRETS[0], global_segment_size="1mb"
    ) as group:
        assert "sekret" not in repr(group) + repr(group[0].config) + repr(group[0])
    assert not [line for line in written if "sekret" in line]


# --- memory -----------------------------------------------------------------------------------

# What lies about the memory that a call names.
GUARD = 64


@pytest.fixture(params=["memory", "real"])
async def playground(
    request: pytest.FixtureRequest, values_cluster: LocalCluster, open_store: OpenStore
) -> Store:
    target = "memory://playground" if request.param == "memory" else values_cluster.address
    return await open_store(target, global_segment_size=16 * MB, local_buffer_size=4 * MB)


async def test_a_read_stays_within_what_was_named(playground: Store) -> None:
    value = bytes(range(256)) * 16
    await playground.put("bounds", value)
    for size in (1, 96, 4096, 5000):
        memory = bytearray(b"\xee" * (GUARD + size + GUARD))
        async with playground.register(memory) as buffer:
            place = buffer[GUARD : GUARD + size]
            for offset in (None, 0, 1, 3000, 4095):
                memory[:] = b"\xee" * len(memory)
                if offset is None and size < len(value):
                    with pytest.raises(BufferTooSmallError):
                        await playground.get_into("bounds", place)
                    expected = b""
                else:
                    # With an offset, as much as there is room for.
                    expected = value[offset or 0 :][:size]
                    read = await playground.get_into("bounds", place, offset=offset)
                    assert read == len(expected)
                rest = b"\xee" * (GUARD + size - len(expected))
                assert memory == b"\xee" * GUARD + expected + rest


async def test_what_can_not_be_meant_is_refused(playground: Store) -> None:
    value = bytes(4096)
    await playground.put("there", value)
    async with playground.allocate(8192) as buffer:
        for offset in (-1, 4096, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70, 1.0, "0"):
            with pytest.raises(InvalidArgumentError):
                await playground.get_into("there", buffer[:10], offset=offset)  # type: ignore[arg-type]
        for part in (buffer[10:10], buffer[10:5], buffer[9000:]):
            with pytest.raises(InvalidArgumentError, match="empty"):
                await playground.put_from("x", part)
        assert buffer[-10 : 2**70].nbytes == 10  # cut, as in Python
        with pytest.raises(InvalidArgumentError, match="steps"):
            buffer[::2]
        for wrong in ([], None, 3, b"bytes", bytearray(9), buffer.view, [buffer, None], ()):
            with pytest.raises(InvalidArgumentError):
                await playground.put_from("x", wrong)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError):
                await playground.get_many_into({"there": wrong})  # type: ignore[dict-item]
    for used in (buffer, buffer[:10]):  # closed
        with pytest.raises(InvalidArgumentError, match="closed"):
            await playground.get_into("there", used)
    for address, nbytes in ADDRESSES:
        with pytest.raises(InvalidArgumentError):
            await playground.register(address=address, nbytes=nbytes)
    async with playground.register(b"read-only" * 1000) as constant:
        for call in (
            playground.get_into("there", constant),
            playground.get_into("there", [constant[:10], constant[10:]]),
            playground.get_many_into({"there": constant}),
            playground.get_into("there", constant, offset=0),
        ):
            with pytest.raises(InvalidArgumentError, match="read-only"):
                await call
    assert await playground.get("there") == value


ADDRESSES: list[tuple[Any, Any]] = [
    (0, 10), (-1, 10), (1, 0), (1, -1), (2**64 - 1, 2), (2**64, 1), (2**63, 2**64), (1.0, 1),
    (None, 5), (5, None), ("1", "1"), (2**70, 2**70), (1, 2**64 - 1), (2**63, 2**63),
]  # fmt: skip


async def test_released_memory_stays_in_place(playground: Store) -> None:
    """Who releases the view, or would move the memory, does not pull it away from the engine."""
    memory = bytearray(4096)
    async with playground.register(memory) as buffer:
        assert buffer.view is not None
        buffer.view.release()
        with pytest.raises(BufferError):
            memory.extend(b"x" * 100_000)
        await playground.put("released", b"v" * 4096)
        assert await playground.get_into("released", buffer) == 4096
    assert memory == b"v" * 4096
    memory.extend(b"and now it may grow")
    released = memoryview(memory)
    released.release()
    for call in (playground.put("x", released), playground.put_parts("x", b"y", released)):
        with pytest.raises(InvalidArgumentError):
            await call
    with pytest.raises(InvalidArgumentError):
        await playground.register(released)


async def test_memory_that_can_not_be_had(playground: Store) -> None:
    for nbytes in ("1000tb", 2**62, 2**63 - 1):
        with pytest.raises(NoSpaceError, match="this machine"):
            await playground.allocate(nbytes)


async def test_a_raw_call_that_is_refused_does_not_show_its_values(playground: Store) -> None:
    """The binding's own text shows each argument as it is."""
    for key in (1, "a\ud800"):
        with pytest.raises(TypeError, match="incompatible function arguments") as refused:
            await playground.engine.put(key, VALUE)  # type: ignore[arg-type]
        assert HIDDEN not in everything_of(refused.value).partition("TypeError:")[2]


async def test_memory_of_another_store_is_refused(playground: Store) -> None:
    async with (
        connect("memory://stranger", global_segment_size="1mb") as other,
        other.allocate(64) as buffer,
    ):
        for call in (playground.put_from("x", buffer), playground.get_into("x", buffer)):
            with pytest.raises(InvalidArgumentError, match="registered with"):
                await call


# --- keys are passed as they are, or refused --------------------------------------------------

ODD_KEYS = [
    "\0", "a\0b", "a\0", "a", "\n", "a\nb\r\t\x7f", " ", " a ", "x" * 5000, "é", "e\u0301",
    "日本語", "😀", "\u200b", "\ufeff", "\ud7ff\ue000", "../..", "%00", "'\"\\;--", "{}[]*?",
    "k=v&w#z",
]  # fmt: skip
BAD_KEYS: list[Any] = ["", "\ud800", "a\udfffb", "é\udc80", None, 1, b"key", ["key"], ("key",)]


async def test_odd_keys_are_passed_as_they_are(playground: Store) -> None:
    """By each verb; one that was cut at a NUL, or normalised, would meet another one here."""
    values = {key: b"%d:" % place + key.encode()[:99] for place, key in enumerate(ODD_KEYS)}
    some = dict(list(values.items())[:7])
    async with playground.allocate(64 * KB) as buffer:
        assert buffer.view is not None
        parts = {}
        for place, (key, value) in enumerate(values.items()):
            buffer.view[place * 256 : place * 256 + len(value)] = value
            parts[key] = buffer[place * 256 : place * 256 + len(value)]
        for put in (
            lambda: playground.put_many(values),
            lambda: asyncio.gather(*(playground.put(k, v) for k, v in values.items())),
            lambda: asyncio.gather(*(playground.upsert(k, v) for k, v in values.items())),
            lambda: asyncio.gather(*(playground.put_parts(k, v) for k, v in values.items())),
            lambda: asyncio.gather(*(playground.put_from(k, v) for k, v in parts.items())),
            lambda: playground.put_many_from(parts),
        ):
            await put()
            assert await playground.get_many(ODD_KEYS) == list(values.values())
            assert await asyncio.gather(*map(playground.get, ODD_KEYS)) == list(values.values())
            assert await playground.exists_many(ODD_KEYS) == [True] * len(ODD_KEYS)
            assert await playground.remove_many(ODD_KEYS, force=True) == [True] * len(ODD_KEYS)
            assert not any(await playground.exists_many(ODD_KEYS))
        await playground.put_many(values)
        sizes = [len(value) for value in values.values()]
        assert await asyncio.gather(*map(playground.size, ODD_KEYS)) == sizes
        assert all(await asyncio.gather(*map(playground.exists, ODD_KEYS)))
        assert all(await playground.replicas_many(ODD_KEYS))
        async with playground.view_many(ODD_KEYS) as views:
            assert [view and bytes(view) for view in views] == list(values.values())
        buffer.view[:] = bytes(buffer.nbytes)
        assert await playground.get_many_into(parts) == sizes
        assert [bytes(part.view or b"") for part in parts.values()] == list(values.values())
        for key, value in some.items():
            assert await playground.replicas(key)
            assert await playground.get_into(key, parts[key]) == len(value)
            assert await playground.remove(key, force=True)
            assert await playground.get(key) is None
        assert await playground.get_many(ODD_KEYS) == [
            None if key in some else value for key, value in values.items()
        ]


def calls_with(store: Store, buffer: Buffer, bad: Any) -> list[Callable[[], Any]]:
    """Make a call of each verb, with a bad key and, where there may be several, a good one."""
    calls: list[Callable[[], Any]] = [
        lambda: store.get(bad),
        lambda: store.exists(bad),
        lambda: store.size(bad),
        lambda: store.replicas(bad),
        lambda: store.put(bad, b"v"),
        lambda: store.upsert(bad, b"v"),
        lambda: store.put_parts(bad, b"v"),
        lambda: store.remove(bad),
        lambda: store.view(bad),
        lambda: store.put_from(bad, buffer),
        lambda: store.get_into(bad, buffer),
        lambda: store.get_many(["good", bad]),
        lambda: store.exists_many(["good", bad]),
        lambda: store.replicas_many(["good", bad]),
        lambda: store.remove_many(["good", bad]),
        lambda: store.view_many(["good", bad]),
        lambda: store.remove_by_regex(bad),
    ]
    if not isinstance(bad, list):
        calls += [
            lambda: store.put_many({"good": b"v", bad: b"v"}),
            lambda: store.put_many_from({"good": buffer, bad: buffer}),
            lambda: store.get_many_into({"good": buffer, bad: buffer}),
        ]
    return calls


async def test_bad_keys_are_refused(playground: Store) -> None:
    """By each verb, and before anything is stored."""
    async with playground.allocate(64) as buffer:
        for bad in BAD_KEYS:
            for call in calls_with(playground, buffer, bad):
                with pytest.raises(InvalidArgumentError):
                    await call()
    assert not await playground.exists("good")


# --- files and processes ----------------------------------------------------------------------


def test_the_output_of_a_cluster_is_nobody_elses_to_read() -> None:
    """It has no name in the file system, and its mode does not depend on the umask."""
    before = os.umask(0)
    try:
        with LocalCluster() as cluster:
            assert cluster.pid is not None
            found = []
            for process in ("self", str(cluster.pid)):
                for entry in Path(f"/proc/{process}/fd").iterdir():
                    with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                        name = str(entry.readlink())
                        if name.startswith(tempfile.gettempdir()) and name.endswith("(deleted)"):
                            found.append(entry.stat())
            assert found
            for each in found:
                assert stat.S_IMODE(each.st_mode) == 0o600
                assert each.st_uid == os.getuid()
                assert each.st_nlink == 0
    finally:
        os.umask(before)
