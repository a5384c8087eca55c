"""The process that owns the values: a client of the raw binding that lends its memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from typing import Any

from benchmarks.process import Job

__all__ = ["Owner"]

_BATCH = 256  # keys of one call
_HOST = "127.0.0.1"


class Owner(Job):
    """Stores values in its own memory, mounts and unmounts it, and removes keys.

    Its calls block; nothing is measured in this process.
    """

    _native: Any
    _segments: list[str]

    async def open(self, address: str, segment: int) -> None:
        """Set the client up.

        Args:
            address: The master's.
            segment: Bytes to lend to the cluster; 0 to do that later, by :meth:`mount`.
        """
        from mooncake.store import MooncakeDistributedStore

        self._native = MooncakeDistributedStore()
        code = self._native.setup(_HOST, "P2PHANDSHAKE", segment, 1 << 20, "tcp", "", address)
        _check("setup", code)

    async def store(self, prefix: str, count: int, size: int) -> None:
        """Store ``count`` values of ``size`` bytes here; the keys are ``prefix`` and a number."""
        from mooncake.store import ReplicateConfig

        config = ReplicateConfig()
        config.preferred_segment = self._native.get_hostname()
        memory = mmap.mmap(-1, size * min(count, _BATCH))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        block = os.urandom(min(len(memory), 1 << 20))
        for start in range(0, len(memory), len(block)):
            memory[start : start + len(block)] = block[: len(memory) - start]
        for first in range(0, count, _BATCH):
            keys = [f"{prefix}{i}" for i in range(first, min(first + _BATCH, count))]
            places = [address + size * i for i in range(len(keys))]
            for code in self._native.batch_put_from(keys, places, [size] * len(keys), config):
                _check("batch_put_from", code)

    async def remove(self, prefix: str) -> None:
        """Remove all keys that begin so."""
        _check("remove_by_regex", min(0, self._native.remove_by_regex(f"^{prefix}", force=True)))

    async def mount(self, segment: int) -> float:
        """Lend memory to the cluster; return when it was there (``time.monotonic``)."""
        mounted = self._native.allocate_and_mount_segment(segment)
        _check("allocate_and_mount_segment", mounted["ret"])
        self._segments = list(mounted["segment_ids"])
        return time.monotonic()

    async def unmount(self) -> None:
        """Take the memory away again, and the values in it."""
        _check("unmount_and_free_segment", self._native.unmount_and_free_segment(self._segments))


def _check(method: str, code: int) -> None:
    if code != 0:
        raise RuntimeError(f"{method} of the owner answered {code}")
