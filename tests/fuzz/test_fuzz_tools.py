"""Whatever the command line, a cluster or a proxy is told: it works, or says what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from aiomooncake import LocalCluster, errors
from aiomooncake._settings import SETTINGS
from aiomooncake.cli.commands import cli
from aiomooncake.errors import BatchError, MooncakeError, error_from_code
from aiomooncake.testing import FakeMooncake, FaultProxy
from tests.fuzz.strategies import (
    anything,
    bounded,
    chosen,
    examples,
    extreme_numbers,
    odd_text,
    only_typed_errors,
)

# --- the command line -------------------------------------------------------------------------

settings = st.one_of(
    odd_text,
    st.builds(lambda key, value: f"{key}={value}", st.sampled_from(sorted(SETTINGS)), odd_text),
)
words = st.one_of(
    st.sampled_from(
        ["warmup", "demo", "--help", "--version", "--json", "-v", "--engine-log", "--memory", "--"]
    ),
    st.builds(
        lambda option, value: f"{option}={value}",
        st.sampled_from(["--ranks", "--max-attempts", "--metrics-port", "--segment-size"]),
        st.one_of(odd_text, st.sampled_from(["1", "0", "2", "8mb"])),
    ),
    settings.map(lambda text: f"--set={text}"),
    odd_text,
)


@examples(80)
@given(
    st.lists(words, max_size=5),
    st.one_of(st.sampled_from(["memory://cli", "memory://c?threads=x", "h"]), odd_text),
    st.one_of(st.sampled_from(["0.05", "-1", "nan", "x"]), odd_text),
)
def test_the_command_line(args: list[str], master: str, timeout: str) -> None:
    """No traceback: a usage error, or an exit code that the help explains."""
    if "demo" in args:
        args = [*args, "--mount-after", "-1"]  # told before it starts
    else:
        # A master that is nowhere is not waited for.
        args = ["warmup", *args, f"--master={master}", f"--timeout={timeout}"]
    if args[0] == "warmup" and "://" in master and not master.startswith("memory:"):
        args.append("--timeout=0.05")
    done = CliRunner().invoke(cli, args)
    assert done.exception is None or isinstance(done.exception, SystemExit), args
    assert 0 <= done.exit_code <= 32


# --- the private cluster ----------------------------------------------------------------------

cluster_options = st.fixed_dictionaries(
    {},
    optional={
        "lease_ttl": st.one_of(extreme_numbers, anything),
        "client_ttl": st.one_of(extreme_numbers, anything),
        "start_timeout": st.one_of(extreme_numbers, anything),
        "extra_args": anything,
        "binary": st.one_of(odd_text, anything),
    },
)


@examples(250)
@given(cluster_options)
def test_a_cluster_is_made_or_refused(options: dict[str, Any]) -> None:
    with only_typed_errors():
        cluster = LocalCluster(**options)
        assert repr(cluster)
        assert not cluster.running
        cluster.blocking.stop()


@examples(12)
@given(
    chosen([{"binary": "/nowhere"}, {"binary": "/"}, {"binary": "a\0b"}, {"extra_args": ["\0"]}])
)
def test_a_cluster_that_cannot_start_says_so(options: dict[str, Any]) -> None:
    with only_typed_errors(), LocalCluster(**options):
        raise AssertionError("it started")


@pytest.fixture(scope="module")
def running() -> Iterator[LocalCluster]:
    with LocalCluster() as cluster:
        yield cluster


def test_start_client(running: LocalCluster) -> None:
    @examples(40)
    @given(
        st.fixed_dictionaries(
            {"extra_args": st.one_of(st.just("--flag"), st.just(["--nonsense=1"]))},
            optional={"global_segment_size": odd_text, "local_buffer_size": extreme_numbers},
        )
    )
    def any_client(options: dict[str, Any]) -> None:
        if options["extra_args"] != "--flag":
            options["global_segment_size"] = "never"
        with only_typed_errors():
            running.blocking.start_client(**options)
            raise AssertionError("it started")

    any_client()
    assert running.running


# --- the proxy --------------------------------------------------------------------------------

faults = st.tuples(
    st.sampled_from(["delay", "throttle", "corrupt", "freeze", "drop", "cut", "hang_up", "heal"]),
    st.lists(st.one_of(extreme_numbers, anything), max_size=1),
    st.dictionaries(
        st.sampled_from(["jitter", "towards", "at", "rate", "seed"]),
        st.one_of(extreme_numbers, anything, st.sampled_from(["server", "client", "both"])),
        max_size=2,
    ),
)


@examples(150)
@given(anything)
def test_a_proxy_to_anything(target: Any) -> None:
    with only_typed_errors():
        assert repr(FaultProxy(target))


def test_faults_of_a_proxy(running: LocalCluster) -> None:
    """Bytes pass all the same once it is healed."""
    host, port = running.metrics_url.removeprefix("http://").split(":")
    with FaultProxy(f"{host}:{port}") as proxy:

        @examples(100)
        @given(st.lists(faults, max_size=4))
        def any_faults(some: list[tuple[str, list[Any], dict[str, Any]]]) -> None:
            asyncio.run(bounded(through(proxy, some)))

        any_faults()


async def through(proxy: FaultProxy, some: list[tuple[str, list[Any], dict[str, Any]]]) -> None:
    host, port = proxy.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for fault, args, options in some:
        with only_typed_errors():
            getattr(proxy, fault)(*args, **options)
    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
    proxy.heal()
    writer.close()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /role HTTP/1.0\r\n\r\n")
    assert (await reader.read(9)).startswith(b"HTTP/1.")
    writer.close()


# --- the engine in memory ---------------------------------------------------------------------


@examples(120)
@given(
    st.one_of(st.sampled_from(["reads", "writes", "lookups", "removes", "put", "get"]), odd_text),
    st.one_of(st.none(), st.integers(-2000, -1)),
    st.one_of(st.none(), st.integers(0, 3)),
)
def test_faults_of_the_engine_in_memory(method: str, code: int | None, times: int | None) -> None:
    """Any code of the engine, also one that nobody knows, is told by a typed error."""

    async def use(fake: FakeMooncake) -> None:
        async with fake.connect(global_segment_size="1mb") as store:
            for call in (store.put("k", b"v"), store.get("k"), store.exists("k"), store.size("k")):
                with only_typed_errors():
                    await bounded(call)

    with FakeMooncake() as fake:
        with only_typed_errors():
            fake.fault(method, code=code, times=times)
        asyncio.run(use(fake))


# --- errors -----------------------------------------------------------------------------------


@examples(150)
@given(st.integers(-2000, 10), odd_text, st.one_of(st.none(), odd_text), odd_text)
def test_errors_can_be_shown(code: int, action: str, key: str | None, rank: str) -> None:
    error = error_from_code(code, action, key=key, rank=rank)
    assert isinstance(error, MooncakeError)
    assert isinstance(error.retryable, bool)
    batch = BatchError("x", results={key or "": error}, rank=rank)
    for each in (error, batch):
        text = repr(each) + str(each)
        assert len(text) < 2 * (2000 + len(action) + 2 * len(rank))
    assert errors.code_name(code)
