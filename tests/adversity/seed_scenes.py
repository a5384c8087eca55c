"""Scenes of :mod:`test_seed_race`: each runs in an interpreter of its own."""

from __future__ import annotations

import asyncio
import threading
import uuid
from typing import Any

import aiomooncake

SEGMENT = 64 << 20
NOT_READY = -200


def set_up(address: str) -> Any:
    """Set up a client as the backend does, before any memory is mounted anywhere."""
    import mooncake.store

    native = mooncake.store.MooncakeDistributedStore()
    assert native.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address) == 0
    return native


def original(address: str) -> None:
    native = set_up(address)
    key = "warmup" + uuid.uuid4().hex
    assert native.put(key, bytes(4096)) == 0, "the engine was not ready"
    assert native.is_exist(key) == 1
    assert native.get(key) == bytes(4096)


def ours(address: str) -> None:
    """One line in place of the probe; the segment is mounted when the first try has failed."""
    native = set_up(address)
    mounting = threading.Timer(0.5, native.allocate_and_mount_segment, [SEGMENT])
    mounting.start()
    report = asyncio.run(aiomooncake.adopt(native, rank=3).warmup())
    assert report.rank == 3
    assert report.attempts[0].code == NOT_READY
    assert [attempt.ok for attempt in report.attempts[-2:]] == [False, True]
    assert 0.5 < report.seconds < 3
    mounting.join()
    original_probe = native.put("warmup" + uuid.uuid4().hex, bytes(4096))
    assert original_probe == 0
    native.close()
