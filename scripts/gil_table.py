"""Write the table of docs/raw.md: each method of the binding, and whether it holds the GIL.

Run it from a checkout with an engine: ``.venv/bin/python scripts/gil_table.py``. What stands in
:data:`HOLD` was measured: ``scripts/gil_table.py measure`` calls every method on a cluster of its
own beside a thread that waits for the GIL, and prints those that never let it go. A test compares
both.
"""  # noqa: INP001 - a script, not part of a package

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, repeat, starmap
from pathlib import Path
from typing import Any, Final

from aiomooncake import LocalCluster
from aiomooncake.engine.binding import load_binding

PAGE: Final = Path(__file__).parent.parent / "docs" / "raw.md"
_TABLE: Final = re.compile(r"(<!-- table: methods -->\n).*?(<!-- end of table -->)", re.DOTALL)

REFUSED: Final = frozenset({"close", "init_all", "setup", "setup_dummy"})
HOLD: Final[Mapping[str, str]] = {
    "close": "all of it, 1–2 s; `aclose()` goes another way, without it",
    "get_hostname": "all of it, under 2 µs",
    "get_offload_rpc_read_count": "all of it, under 2 µs",
    "health_check": "all of it, under 2 µs",
    "init_all": "all of it, as `setup`",
    "setup": "all of it, 25–90 ms, or as long as the master is silent; `connect()` goes another "
    "way, without it",
    "setup_dummy": "all of it, up to 4.3 s; `connect()` goes another way, without it",
}
"""From method to how long it holds the GIL, of those that never let it go."""

_COPIES: Final = "while it copies out, 1 ms per MB"
COPY: Final[Mapping[str, str]] = {
    "batch_get_tensor": _COPIES,
    "batch_get_tensor_with_parallelism": _COPIES,
    "batch_get_tensor_with_tp": _COPIES,
    "get": f"{_COPIES}; `store.get` does not",
    "get_batch": f"{_COPIES}; `store.get_many` does not",
    "get_tensor": _COPIES,
    "get_tensor_with_parallelism": _COPIES,
    "get_tensor_with_tp": _COPIES,
}
"""From method to what it does under the GIL, of those that let it go while they wait."""

# Not called: what they do to a client that is set up, or how long they take, is known.
_SKIPPED: Final = frozenset({"init_all", "setup_dummy"})
_ONCE: Final = frozenset({"close", "setup"})
# Seconds until the other thread asks for the GIL, and of calls without a pause in which it is not
# let go, until a method is believed to hold it.
_ASKING: Final = 0.0001
_PATIENCE: Final = 2.0
_MB: Final = 1 << 20


def table() -> list[str]:
    """Write the table, with a line per method."""
    binding = load_binding()
    lines = ["| method | awaitable | blocking | holds the GIL |", "| --- | --- | --- | --- |"]
    for name in sorted(binding.methods):
        drained = name in binding.address_methods
        ways = (
            "refused | refused" if name in REFUSED else f"{'drained' if drained else 'yes'} | yes"
        )
        lines.append(f"| `{name}` | {ways} | {HOLD.get(name) or COPY.get(name) or 'no'} |")
    return lines


def page(text: str) -> str:
    """Return the page with a fresh table between its marks."""
    return _TABLE.sub(lambda mark: mark[1] + "\n".join(("", *table(), "", mark[2])), text)


# --- measuring ------------------------------------------------------------------------------------


class Beside:
    """A thread that takes the GIL whenever it is let go.

    It asks for the GIL after :data:`_ASKING`, and a thread that lets go of it while it is asked to
    waits until another has it (CPython's forced switching). So however short the moment, and
    however busy the machine, this thread runs in it. No byte code runs between a call and the
    counts before and after it, or the interpreter itself would do what it is asked.
    """

    def __init__(self) -> None:
        self._runs: list[None] = []
        self._over = False
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(_ASKING)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            self._runs.append(None)
            time.sleep(0.0002)

    def ran(self, method: Callable[..., object], given: tuple[Any, ...], times: int) -> bool:
        """Tell whether the thread has run beside so many calls in a row."""
        count = starmap(self._runs.__len__, repeat((), 1))
        again = starmap(self._runs.__len__, repeat((), 1))
        before, *_, after = chain(count, starmap(method, repeat(given, times)), again)
        return bool(before != after)

    def stop(self) -> None:
        """Let it end."""
        self._over = True
        self._thread.join()
        sys.setswitchinterval(self._interval)


def measure() -> list[str]:
    """Call every method, and list those that never let go of the GIL."""
    with LocalCluster() as cluster, tempfile.NamedTemporaryFile() as file:
        file.truncate(16 * _MB)
        memory = (ctypes.c_char * (_MB + 4096))()  # it lives as long as the calls
        calls = dict(_calls(cluster, file.name, ctypes.addressof(memory)))
        beside = Beside()
        try:
            return sorted(name for name, call in calls.items() if _holds(beside, name, *call))
        finally:
            beside.stop()


def _holds(
    beside: Beside, name: str, method: Callable[..., object], given: tuple[Any, ...]
) -> bool:
    times, start = 1, time.perf_counter()
    while not beside.ran(method, given, times):
        if name in _ONCE or time.perf_counter() - start > _PATIENCE:
            return True
        times *= 2
    return False


def _calls(
    cluster: LocalCluster, path: str, at: int
) -> Iterator[tuple[str, tuple[Callable[..., object], tuple[Any, ...]]]]:
    store_class = load_binding().store_class
    store, other = store_class(), store_class()

    _must(store.setup(*_set_up_arguments(cluster, 64 * _MB)))
    _must(other.setup(*_set_up_arguments(cluster, 0)))
    _must(store.register_buffer(at, _MB))
    spare, keys, sizes = at + _MB, ["a", "b"], [8, 8]
    store.put_batch(keys, [b"12345678"] * 2)
    put, upsert = (keys, [at, at], sizes), (keys, [[at], [at]], [[8], [8]])
    arguments: dict[str, tuple[Any, ...]] = {
        "alloc_from_mem_pool": (64,),
        "allocate_and_mount_segment": (1,),
        "batch_get_buffer": (keys,),
        "batch_get_into": put,
        "batch_get_into_multi_buffer_ranges": (*upsert, [[0], [0]]),
        "batch_get_into_multi_buffers": upsert,
        "batch_get_replica_desc": (keys,),
        "batch_get_session_end": (keys,),
        "batch_get_session_start": (keys,),
        "batch_is_exist": (keys,),
        "batch_put_from": put,
        "batch_put_from_multi_buffer_ranges": (*upsert, [[0], [0]]),
        "batch_put_from_multi_buffers": upsert,
        "batch_put_session_end": (keys,),
        "batch_put_session_revoke": (keys,),
        "batch_put_session_start": (["c"], [8]),
        "batch_remove": (["c"], True),
        "batch_replica_clear": (keys,),
        "batch_upsert_from": put,
        "create_copy_task": ("a", ["b"]),
        "create_move_task": ("a", "b", "c"),
        "get": ("a",),
        "get_batch": (keys,),
        "get_buffer": ("a",),
        "get_hostname": (),
        "get_into": ("a", at, 8),
        "get_into_ranges": ([at], [["a"]], [[[0]]], [[[0]]], [[[8]]]),
        "get_offload_rpc_read_count": (),
        "get_replica_desc": ("a",),
        "get_size": ("a",),
        "health_check": (),
        "is_exist": ("a",),
        "mount_segment": (path, 4096),
        "put": ("a", b"v"),
        "put_batch": (keys, [b"v", b"v"]),
        "put_from": ("a", at, 8),
        "put_from_with_metadata": ("a", at, at, 8, 8),
        "put_parts": ("a", b"v", b"w"),
        "query_task": ((1, 2),),
        "register_buffer": (spare, 4096),
        "remove": ("c", True),
        "remove_all": (),
        "remove_by_regex": ("^c",),
        "unmount_and_free_segment": (["1-2"],),
        "unmount_local_disk_segment": (),
        "unmount_segment": (["1-2"],),
        "unregister_buffer": (spare,),
        "upsert": ("a", b"12345678"),
        "upsert_batch": (keys, [b"12345678"] * 2),
        "upsert_from": ("a", at, 8),
        "upsert_parts": ("a", b"1234", b"5678"),
    }
    arguments |= _tensor_arguments(store, at)
    for name, given in arguments.items():
        yield name, (getattr(store, name), given)
    yield "setup", (store_class().setup, _set_up_arguments(cluster, 0))
    yield "close", (other.close, ())


def _set_up_arguments(cluster: LocalCluster, segment: int) -> tuple[Any, ...]:
    return "127.0.0.1", "P2PHANDSHAKE", segment, 16 * _MB, "tcp", "", cluster.address


def _tensor_arguments(store: Any, at: int) -> dict[str, tuple[Any, ...]]:
    """Make arguments for the methods that need torch, where it is installed."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    tensor, room = torch.zeros(64), 4096
    _must(store.put_tensor("t", tensor))
    shared = torch.zeros(4, 4)
    into: tuple[Any, ...] = ("t", at, room)
    many, many_into = (["t"], [tensor]), (["t"], [at], [room])
    # Metadata, then the tensor, as the calls by address want it.
    source = at + _MB // 2
    store.get_tensor_into("t", source, room)
    size = store.get_size("t")
    put: tuple[Any, ...] = ("t", tensor)
    put_from: tuple[Any, ...] = ("t", source, size)
    many_from = (["t"], [source], [size])
    _must(store.put_tensor_with_tp("s", shared, 0, 2))
    return {
        "batch_get_tensor": (["t"],),
        "batch_get_tensor_into": many_into,
        "batch_get_tensor_with_parallelism": (["t"],),
        "batch_get_tensor_with_parallelism_into": many_into,
        "batch_get_tensor_with_tp": (["s"], 0, 2),
        "batch_get_tensor_with_tp_into": (["s"], [at], [room], 0, 2),
        "batch_pub_tensor": many,
        "batch_pub_tensor_with_tp": many,
        "batch_put_tensor": many,
        "batch_put_tensor_from": many_from,
        "batch_put_tensor_with_parallelism": many,
        "batch_put_tensor_with_parallelism_from": many_from,
        "batch_put_tensor_with_tp": many,
        "batch_put_tensor_with_tp_from": many_from,
        "batch_upsert_pub_tensor": many,
        "batch_upsert_tensor": many,
        "batch_upsert_tensor_from": many_from,
        "batch_upsert_tensor_with_parallelism": many,
        "batch_upsert_tensor_with_parallelism_from": many_from,
        "get_tensor": ("t",),
        "get_tensor_into": into,
        "get_tensor_with_parallelism": ("t",),
        "get_tensor_with_parallelism_into": into,
        "get_tensor_with_tp": ("s", 0, 2),
        "get_tensor_with_tp_into": ("s", at, room, 0, 2),
        "pub_tensor": put,
        "pub_tensor_with_tp": put,
        "put_tensor": put,
        "put_tensor_from": put_from,
        "put_tensor_with_parallelism": put,
        "put_tensor_with_parallelism_from": put_from,
        "put_tensor_with_tp": put,
        "put_tensor_with_tp_from": put_from,
        "upsert_pub_tensor": put,
        "upsert_tensor": put,
        "upsert_tensor_from": put_from,
        "upsert_tensor_with_parallelism": put,
        "upsert_tensor_with_parallelism_from": put_from,
    }


def _must(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"the stage could not be set: {code}")


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        print(json.dumps(measure()), flush=True)  # noqa: T201 - what it is for
        os._exit(0)  # the clients are left as they are: a close takes a second each
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
