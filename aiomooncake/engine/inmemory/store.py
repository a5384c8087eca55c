"""The engine without a wheel: one client, in pure Python, with the real engine's answers.

Every answer here, also the misleading ones, was measured on the real engine
(0.3.13.post1, TCP); ``tests/contract`` runs the same checks on both. What differs on purpose: a
crash is a ``RuntimeError``, nothing is evicted, no value is torn, and the stale bytes that the
real engine answers for a key given twice are zeros here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from aiomooncake.engine.inmemory.arguments import as_key, as_keys
from aiomooncake.engine.inmemory.calls import (
    Life,
    code,
    crash,
    empty_dict,
    empty_list,
    internal,
    native,
    no_hostname,
    segments,
)
from aiomooncake.engine.inmemory.descriptors import ReplicaDescriptor
from aiomooncake.engine.inmemory.files import FileCalls
from aiomooncake.engine.inmemory.memory import LocalBuffer
from aiomooncake.engine.inmemory.objects import INTERNAL, INVALID_PARAMS, OK, InMemoryEngine
from aiomooncake.engine.inmemory.sessions import SessionCalls
from aiomooncake.engine.inmemory.shard_calls import ShardCalls
from aiomooncake.engine.inmemory.tasks import TaskCalls
from aiomooncake.engine.inmemory.zero_copy import ZeroCopyCalls
from aiomooncake.engine.protocol import Allocated, Mounted

__all__ = ["InMemoryStore"]

Keys = Sequence[str]

_HEALTHY, _NOT_SET_UP, _UNREACHABLE = 0, 1, 2
_SEGMENT_UNIT: Final = 16 << 20  # allocate_and_mount_segment rounds up to it
_FIRST_PORT: Final = 12300  # the engine's clients pick from 12300-17000


def _nothing(_answer: int, *_args: Any) -> int:
    return 0


def _no_segment(_answer: int, *_args: Any, **_kwargs: Any) -> Mounted:
    return {"ret": INTERNAL, "segment_ids": []}


class InMemoryStore(ShardCalls, FileCalls, ZeroCopyCalls, SessionCalls, TaskCalls):
    """One client of an :class:`InMemoryEngine`, with the methods of ``NativeStore``.

    Thread-safe as the real one is: any number of calls side by side, but ``close`` only when none
    is under way. One object has one life: it can't be set up again after it was open.

    Args:
        engine: The cluster it belongs to.
        rpc_timeout: Seconds until a call on a frozen master fails with -901, unless the engine
            says how many. Upstream's default.
    """

    def __init__(self, engine: InMemoryEngine, rpc_timeout: float = 30.0) -> None:
        super().__init__(engine, rpc_timeout)
        self._hostname = ""
        self._endpoint = ""
        self._mounted: dict[str, set[str]] = {"setup": set(), "allocated": set(), "file": set()}
        self._leaving: set[str] = set()

    def __repr__(self) -> str:
        return f"<InMemoryStore {self._hostname or 'without a name'} {self._life.value}>"

    # ------------------------------------------------------------------ life

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        engine: Any = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> int:
        """Join the engine; only the hostname and the two sizes matter here."""
        return self._join("setup", local_hostname, global_segment_size, local_buffer_size)

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Join the engine without a segment; there is no other process here."""
        return self._join("setup_dummy", "127.0.0.1", 0, local_buffer_size)

    @native(code, asks_master=False)
    def init_all(self, protocol: str, device_name: str, mount_segment_size: int, /) -> int:
        """Answer -600: it is set up already, or the metadata server of its choice is not there."""
        return INVALID_PARAMS

    def _join(self, method: str, local_hostname: str, segment_size: int, local_size: int) -> int:
        if self._life not in (Life.NEW, Life.FAILED):
            raise RuntimeError(
                f"{method}() {self._life.value}: the engine would never tear this object down; "
                f"make a new one"
            )
        self._life = Life.FAILED
        if not local_hostname:
            return INVALID_PARAMS
        host, colon, port = local_hostname.rpartition(":")
        named = bool(colon) and port.isdigit() and (":" not in host or host.endswith("]"))
        number = 2 * self._engine.next_number()
        self._hostname = local_hostname if named else f"{local_hostname}:{_FIRST_PORT + number}"
        # As on the real engine the transport listens on another port than the client is named by.
        self._endpoint = f"{host if named else local_hostname}:{_FIRST_PORT + number + 1}"
        self._hostnames = (local_hostname, self._hostname)
        if not self._engine.calm:
            wrong = self._disturb(method, asks_master=True)
            if wrong is not None:
                return wrong if self._engine.reachable else INTERNAL
        self._local = LocalBuffer(local_size)
        if segment_size:
            self._mount("setup", segment_size)
        self._life = Life.OPEN
        return OK

    def close(self) -> int:
        """Leave; the values on this client's segments are gone."""
        if self._blocked:
            raise crash("close", f"while {', '.join(self._blocked.values())} is in the engine")
        if self._life is not Life.OPEN:
            if self._life is Life.FAILED:
                self._life = Life.CLOSED
            return OK
        if not self._engine.calm:
            self._disturb("close", asks_master=True)
        self._life = Life.CLOSED
        self._engine.unmount([name for names in self._mounted.values() for name in names])
        self._engine.unmount(list(self._leaving))
        return OK

    def health_check(self) -> int:
        """0 fine, 1 not set up or closed, 2 master unreachable."""
        if self._life is not Life.OPEN:
            return _NOT_SET_UP
        if not self._engine.calm:
            wrong = self._disturb("health_check", asks_master=False)
            if wrong is not None:
                return wrong
        return _HEALTHY if self._engine.reachable else _UNREACHABLE

    @native(no_hostname, asks_master=False)
    def get_hostname(self) -> str:
        """``host:port`` of this client."""
        return self._hostname

    # ------------------------------------------------------------------ placement

    @native(empty_list, fragile=True)
    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Descriptors of a value's copies; renews the lease."""
        stored = self._engine.query(as_key(key))
        return [] if isinstance(stored, int) else self._engine.describe(stored)

    @native(empty_dict, fragile=True)
    def batch_get_replica_desc(self, keys: Keys) -> Mapping[str, list[ReplicaDescriptor]]:
        """Descriptors by key; missing keys are absent."""
        found = ((key, self._engine.query(key)) for key in as_keys(keys))
        return {
            key: self._engine.describe(stored)
            for key, stored in found
            if not isinstance(stored, int)
        }

    @native(segments, unset=segments)
    def allocate_and_mount_segment(
        self, size: int, protocol: str = "tcp", location: str = ""
    ) -> Allocated:
        """Add a segment; its size is rounded up to 16 MB."""
        if size <= 0:
            return segments(INTERNAL)
        size = -(-size // _SEGMENT_UNIT) * _SEGMENT_UNIT
        name = self._mount("allocated", size)
        return {"ret": OK, "segment_ids": [name], "allocated_size": size}

    @native(internal, unset=internal)
    def unmount_and_free_segment(
        self, segment_ids: Sequence[str], grace_period_seconds: int = 0
    ) -> int:
        """Take allocated segments away; -1 when one is not known."""
        return self._unmount("allocated", segment_ids, grace_period_seconds)

    @native(_no_segment, unset=_no_segment)
    def mount_segment(
        self,
        path: str,
        size: int,
        offset: int = 0,
        protocol: str = "tcp",
        location: str = "",
    ) -> Mounted:
        """Add a segment for a file that is large enough; the file is not touched."""
        file = Path(path)
        if not file.is_file() or file.stat().st_size < offset + size:
            return _no_segment(INTERNAL)
        return {"ret": OK, "segment_ids": [self._mount("file", size)]}

    @native(internal, unset=internal)
    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Take a file's segments away; -1 when one is not known."""
        return self._unmount("file", segment_ids, grace_period_seconds)

    def _mount(self, kind: str, size: int) -> str:
        name = self._engine.mount(self, self._hostname, self._endpoint, size)
        self._mounted[kind].add(name)
        return name

    def _unmount(self, kind: str, segment_ids: Sequence[str], grace_period: int) -> int:
        known = self._mounted[kind].intersection(segment_ids)
        leaving = self._leaving.intersection(segment_ids)
        self._mounted[kind] -= known
        self._engine.unmount(list(known), grace_period)
        if grace_period:
            self._leaving |= known
        if len(known) == len(segment_ids):
            return OK
        return INVALID_PARAMS if leaving else INTERNAL

    # ------------------------------------------------------------------ the rest

    @native(_nothing, asks_master=False)
    def alloc_from_mem_pool(self, size: int, /) -> int:
        """Answer 0: only dummy clients have a pool."""
        return 0

    @native(_nothing, unset=_nothing, asks_master=False)
    def get_offload_rpc_read_count(self) -> int:
        """Answer 0: there are no disks here."""
        return 0

    @native(code, unset=internal)
    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Answer 0: there is no disk to take away."""
        return OK
