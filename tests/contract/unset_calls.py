"""Call every method of a store that is not set up, and tell what came back.

Run as a program it does so on the real engine, each call in a forked child of its own, because
most of them end in a segmentation fault.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

_memory = (ctypes.c_char * 64)()
at = ctypes.addressof(_memory)

CALLS: dict[str, tuple[Any, ...]] = {
    "alloc_from_mem_pool": (64,),
    "allocate_and_mount_segment": (16 << 20,),
    "batch_get_buffer": (["a"],),
    "batch_get_into": (["a"], [at], [3]),
    "batch_get_into_multi_buffer_ranges": (["a"], [[at]], [[3]], [[0]]),
    "batch_get_into_multi_buffers": (["a"], [[at]], [[3]]),
    "batch_get_replica_desc": (["a"],),
    "batch_get_session_end": (["a"],),
    "batch_get_session_start": (["a"],),
    "batch_is_exist": (["a", "b"],),
    "batch_put_from": (["a", "b"], [at, at], [3, 3]),
    "batch_put_from_multi_buffer_ranges": (["a"], [[at]], [[3]], [[0]]),
    "batch_put_from_multi_buffers": (["a"], [[at]], [[3]]),
    "batch_put_session_end": (["a"],),
    "batch_put_session_revoke": (["a"],),
    "batch_put_session_start": (["a"], [3]),
    "batch_remove": (["a", "b"],),
    "batch_replica_clear": (["a"],),
    "batch_upsert_from": (["a"], [at], [3]),
    "close": (),
    "create_copy_task": ("a", ["b"]),
    "create_move_task": ("a", "b", "c"),
    "get": ("a",),
    "get_batch": (["a", "b"],),
    "get_buffer": ("a",),
    "get_hostname": (),
    "get_into": ("a", at, 3),
    "get_into_ranges": ([at], [["a"]], [[[0]]], [[[0]]], [[[3]]]),
    "get_offload_rpc_read_count": (),
    "get_replica_desc": ("a",),
    "get_size": ("a",),
    "health_check": (),
    "init_all": ("tcp", "", 16 << 20),
    "is_exist": ("a",),
    "mount_segment": ("/nowhere", 1),
    "put": ("a", b"v"),
    "put_batch": (["a"], [b"v"]),
    "put_from": ("a", at, 3),
    "put_from_with_metadata": ("a", at, at, 3, 3),
    "put_parts": ("a", b"v"),
    "query_task": ((1, 2),),
    "register_buffer": (at, 64),
    "remove": ("a",),
    "remove_all": (),
    "remove_by_regex": ("a",),
    "unmount_and_free_segment": (["a"],),
    "unmount_local_disk_segment": (),
    "unmount_segment": (["a"],),
    "unregister_buffer": (at,),
    "upsert": ("a", b"v"),
    "upsert_batch": (["a"], [b"v"]),
    "upsert_from": ("a", at, 3),
    "upsert_parts": ("a", b"v"),
}


def _in_process(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as exc:
        return "CRASH" if "would crash" in str(exc) else repr(exc)


def _in_child(call: Callable[[], Any]) -> Any:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(call(), default=repr).encode())
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        return "CRASH" if os.WIFSIGNALED(status) else json.load(answer)


def answers(
    store: Any, life: str, ask: Callable[[Callable[[], Any]], Any] = _in_process
) -> dict[str, Any]:
    """Return what every method answers; bytes as text."""
    if life == "failed":
        assert store.setup("", "P2PHANDSHAKE", 0, 0, "tcp", "", "127.0.0.1:1") == -600
    found = {}
    for name, arguments in CALLS.items():
        if name != "close":  # it changes the state that the others are asked in
            found[name] = ask(lambda name=name, arguments=arguments: _call(store, name, arguments))  # type: ignore[misc]
    found["close"] = ask(lambda: _call(store, "close", ()))
    return found


def _call(store: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    answer = getattr(store, name)(*arguments)
    return repr(answer) if isinstance(answer, bytes) or answer == [b""] else answer


if __name__ == "__main__":
    from aiomooncake.engine.binding import load_binding

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core files
    print(json.dumps(answers(load_binding().store_class(), sys.argv[1], _in_child)), flush=True)
    os._exit(0)
