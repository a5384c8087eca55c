"""What the contract tests need of both engines: stores, options, and memory with an address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from aiomooncake import Store
from aiomooncake.engine.binding import NativeStore, load_binding

LEASE = 1.0  # seconds
MB = 1 << 20

NewStore = Callable[[], NativeStore]


class Memory:
    """Some memory of the caller, with an address."""

    def __init__(self, content: bytes, size: int = 0) -> None:
        self.buffer = (ctypes.c_char * max(size, len(content)))()
        ctypes.memmove(self.buffer, content, len(content))
        self.ptr = ctypes.addressof(self.buffer)

    def __getitem__(self, place: slice) -> bytes:
        return self.buffer.raw[place]


class Engine:
    """One of the two engines: new stores of it, and how to set them up."""

    def __init__(self, name: str, new: NewStore, address: str) -> None:
        self.name = name
        self.new = new
        self.address = address

    def open(self, segment: int, local_buffer: int) -> NativeStore:
        store = self.new()
        code = store.setup(
            "127.0.0.1", "P2PHANDSHAKE", segment, local_buffer, "tcp", "", self.address
        )
        assert code == 0
        return store

    def config(self, **options: Any) -> Any:
        config = load_binding().replicate_config_class() if self.name == "real" else _Options()
        for name, value in options.items():
            setattr(config, name, value)
        return config


class _Options:
    replica_num = 1


def target_of(store: Store) -> str:
    """Return what connects another store to the same cluster in the same way."""
    assert store.config is not None
    if store.config.client_server_address is not None:
        return f"mooncake://?client_server_address={store.config.client_server_address}"
    return store.config.master_server_address


# A dummy client moves values only through memory that it shares with another process: none of the
# caller's own, and views are copies.
IN_OUR_MEMORY = pytest.mark.parametrize("store", ["memory", "real"], indirect=True)
