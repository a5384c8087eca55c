"""Whatever a verb is given, it answers, or raises an error that is told in words; it never hangs.

Arguments are mostly right, so that the wrong one among them gets as far as it can.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiomooncake import ReplicateConfig, Store, WarmupPolicy, adopt, connect, connect_ranks
from aiomooncake.buffers import Buffer
from tests.fuzz.strategies import (
    anything,
    bounded,
    chosen,
    examples,
    extreme_numbers,
    odd_keys,
    odd_text,
    only_typed_errors,
)

MB = 1 << 20
ROOM = 4096  # bytes of the registered memory

# --- arguments --------------------------------------------------------------------------------

slices = st.slices(ROOM)
# What stands for registered memory, until there is some: :func:`placed`.
places = st.one_of(
    st.builds(lambda part: ("buffer", part), slices),
    st.lists(st.builds(lambda part: ("buffer", part), slices), max_size=3),
)
small_values = st.one_of(
    st.binary(max_size=600), st.builds(bytearray, st.binary(min_size=1, max_size=600)), anything
)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "key": odd_keys,
    "keys": st.lists(odd_keys, max_size=4),
    "value": small_values,
    "items": st.dictionaries(odd_keys, small_values, max_size=4),
    "force": st.booleans(),
    "return_exceptions": st.booleans(),
    "config": st.one_of(
        st.none(),
        st.builds(ReplicateConfig, replica_num=st.integers(1, 3)),
        st.builds(ReplicateConfig, group_ids=st.lists(st.text("ab"), max_size=3)),
        st.builds(ReplicateConfig, preferred_segments=st.lists(st.text("ab"), max_size=3)),
    ),
    "pattern": st.one_of(odd_text, st.sampled_from(["^k", "(a+)+$", "[", "k|l", "\\", "(?i)k"])),
    "memory": places,
    "offset": st.one_of(st.none(), st.integers(-2, 700), extreme_numbers),
    "on_release": st.sampled_from([None, lambda: None, lambda: 1 / 0]),
    "on_progress": st.sampled_from([None, lambda *_: None]),
    "nbytes": st.one_of(st.none(), st.integers(-1, 5000), st.just(2**50), odd_text),
    "address": st.one_of(st.none(), st.integers(-2, 0), st.integers(2**64, 2**70)),
    "owner": st.none(),
    "policy": st.one_of(
        st.none(), st.builds(WarmupPolicy, timeout=st.floats(0.05, 0.1), max_attempts=st.just(1))
    ),
    "on_attempt": st.none(),
    "verb": st.none(),
}
ZERO_COPY = ("put_from", "get_into", "put_many_from", "get_many_into")
VERBS = [
    "get", "exists", "size", "replicas", "put", "upsert", "remove", "get_many", "exists_many",
    "replicas_many", "remove_many", "put_many", "put_parts", "remove_by_regex", "remove_all",
    "view", "view_many", "allocate", "register", "warmup", *ZERO_COPY,
]  # fmt: skip


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, list[Any], dict[str, Any]]:
    """Draw a call: a verb, and arguments of which a few are anything at all."""
    verb = draw(st.sampled_from(VERBS))
    args: list[Any] = []
    options: dict[str, Any] = {}
    for name, parameter in inspect.signature(getattr(Store, verb)).parameters.items():
        if name == "self" or name.startswith("_"):
            continue
        good = GOOD.get(name, anything)
        if name == "items" and verb in ZERO_COPY:
            good = st.dictionaries(odd_keys, places, max_size=3)
        if name == "nbytes" and verb == "register":
            good = st.one_of(good, extreme_numbers)
        # An address is believed: a wrong one that looks right is a crash, as with ctypes.
        wrong = anything if name not in ("nbytes", "address") else st.sampled_from([None, "x", []])
        argument = good if draw(st.integers(0, 5)) else wrong
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            args.extend(draw(st.lists(small_values, max_size=4)))
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            if draw(st.booleans()):
                options[name] = draw(argument)
        else:
            args.append(draw(argument))
    if not draw(st.integers(0, 30)):
        args.append(draw(anything))
    if not draw(st.integers(0, 30)):
        options[draw(st.sampled_from(["frce", "timeout", "rank"]))] = 1
    return verb, args, options


def placed(given: Any, buffer: Buffer) -> Any:
    """Put registered memory where it is meant."""
    if type(given) is tuple and len(given) == 2 and given[0] == "buffer":
        return buffer[given[1]]
    if type(given) is list:
        return [placed(item, buffer) for item in given]
    if type(given) is dict:
        return {key: placed(item, buffer) for key, item in given.items()}
    return given


async def play(store: Store, buffer: Buffer, call: tuple[str, list[Any], dict[str, Any]]) -> None:
    verb, args, options = call
    with only_typed_errors():
        args = [placed(argument, buffer) for argument in args]
        options = {name: placed(argument, buffer) for name, argument in options.items()}
        opened = getattr(store, verb)(*args, **options)
        if hasattr(opened, "__aenter__"):
            async with opened:
                pass
        else:
            await bounded(opened)


async def after(store: Store) -> None:
    """The store is as good as before."""
    await store.upsert("still here", b"value")
    assert await store.get("still here") == b"value"
    stats = store.stats()
    assert (stats.in_flight, stats.abandoned, stats.tainted) == (0, 0, False)


# --- single calls -----------------------------------------------------------------------------


class Played:
    """A store with some registered memory, on a loop of its own."""

    def __init__(self, target: str) -> None:
        self.loop = asyncio.new_event_loop()
        # The callbacks that fail are told in the log.
        self.store, self.buffer = self.run(self._open(target))

    async def _open(self, target: str) -> tuple[Store, Buffer]:
        store = await connect(target, global_segment_size=32 * MB, local_buffer_size=4 * MB)
        return store, await store.allocate(ROOM)

    def run(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def group(self, some: list[tuple[str, list[Any], dict[str, Any]]]) -> None:
        await asyncio.gather(*(play(self.store, self.buffer, call) for call in some))
        await after(self.store)


@pytest.fixture(params=["memory", "real"])
def played(request: pytest.FixtureRequest, closing: Any) -> Iterator[Played]:
    memory = request.param == "memory"
    target = "memory://fuzz" if memory else request.getfixturevalue("cluster").address
    made = Played(target)
    yield made
    made.run(made.buffer.aclose())
    made.run(asyncio.sleep(0))
    made.loop.close()
    closing.add(made.store._client)


# What Python thinks of a pattern that is meant for another kind of them.
@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
def test_verbs_by_themselves_and_side_by_side(
    played: Played, request: pytest.FixtureRequest
) -> None:
    memory = "memory" in request.node.callspec.id

    @examples(500 if memory else 60)
    @given(st.lists(calls(), min_size=1, max_size=5))
    def any_calls(some: list[tuple[str, list[Any], dict[str, Any]]]) -> None:
        played.run(played.group(some))

    any_calls()


# --- what opens a store -----------------------------------------------------------------------

targets = st.one_of(anything, chosen(["memory://x", "memory://", "memory://y?threads=0", "h"]))
options = st.dictionaries(
    st.sampled_from(
        ["rank", "timeout", "warmup", "engine", "transfer_engine", "threads", "merge", "on_health"]
    ),
    st.one_of(anything, st.integers(0, 3)),
    max_size=3,
)


async def opened(opening: Callable[[], Any]) -> None:
    with only_typed_errors():
        async with opening() as thing:
            assert repr(thing)


def quick(given: dict[str, Any]) -> dict[str, Any]:
    """Where a master is asked for that is not there, don't wait for it."""
    return {"timeout": 0.05, **given} if not _is_time(given.get("timeout")) else given


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not value > 1


@examples(250)
@given(targets, options)
def test_connect(target: Any, given: dict[str, Any]) -> None:
    if target is None:
        return  # the environment of whoever runs the tests
    given = {**given, "timeout": 0.05} if not isinstance(target, str) else quick(given)
    asyncio.run(bounded(opened(lambda: connect(target, **given))))


@examples(150)
@given(anything, st.one_of(anything, st.integers(0, 3)), options)
def test_connect_ranks(target: Any, ranks: Any, given: dict[str, Any]) -> None:
    if isinstance(ranks, int) and ranks > 100:
        return  # so many stores are meant
    asyncio.run(
        bounded(opened(lambda: connect_ranks("memory://fuzz-ranks", ranks, **quick(given))))
    )
    if target is not None:
        asyncio.run(bounded(opened(lambda: connect_ranks(target, 2, timeout=0.05))))


@examples(100)
@given(anything, anything)
def test_adopt(native: Any, rank: Any) -> None:
    async def adopted() -> None:
        await opened(lambda: adopt(native, rank=rank))

    asyncio.run(bounded(adopted()))
