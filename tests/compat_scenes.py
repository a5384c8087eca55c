"""Scenes of :mod:`test_compat`: each runs in an interpreter of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from aiomooncake import ForkedProcessError, StoreClosedError

if TYPE_CHECKING:
    from aiomooncake.compat import MooncakeDistributedStoreAsync

MB = 1 << 20

KEPT: list[object] = []
"""What lives until the interpreter's end, unlike a local variable of a scene."""


def setup_arguments(address: str) -> tuple[Any, ...]:
    return ("127.0.0.1", "P2PHANDSHAKE", 32 * MB, 16 * MB, "tcp", "", address)


def new_store() -> MooncakeDistributedStoreAsync:
    # Not at the top: a scene may load the engine before.
    from aiomooncake.compat import MooncakeDistributedStoreAsync

    return MooncakeDistributedStoreAsync()


def opened(address: str) -> MooncakeDistributedStoreAsync:
    store = new_store()
    assert store.setup(*setup_arguments(address)) == 0
    KEPT.append(store)
    return store


def leave_open(address: str) -> None:
    """Leave an idle store; the engine's own exit handler takes a second or two."""
    store = opened(address)
    assert asyncio.run(store.async_put("key", b"value")) == 0


def leave_calls_in_flight(address: str) -> None:
    store = opened(address)

    def work() -> None:
        while True:
            with contextlib.suppress(StoreClosedError):
                store.put(uuid.uuid4().hex, b"value" * 100)

    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.2)


def load_the_engine_first(address: str) -> None:
    from mooncake.store import ReplicateConfig as NativeConfig

    store = opened(address)
    assert asyncio.run(store.async_put("key", b"value", NativeConfig())) == 0


def fork(address: str) -> None:
    store = opened(address)
    child = os.fork()
    if child == 0:
        for call in (store.get, lambda key: asyncio.run(store.async_get(key))):
            try:
                call("key")
            except ForkedProcessError:
                continue
            os._exit(1)
        try:
            new_store().setup(*setup_arguments(address))
        except ForkedProcessError:
            assert (store.health_check(), store.close()) == (1, 0)
            sys.exit(7)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert store.close() == 0


def close_under_calls(address: str) -> None:
    """Close while threads are in the engine: a crash of the original."""
    for _ in range(2):
        store = opened(address)

        def work(store: MooncakeDistributedStoreAsync = store) -> None:
            with contextlib.suppress(StoreClosedError):
                while True:
                    store.put(uuid.uuid4().hex, b"value" * 100)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        assert store.close() == 0
        for thread in threads:
            thread.join()
