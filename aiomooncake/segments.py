"""Memory that a store lends to its cluster while it runs."""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import threading
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from aiomooncake._tasks import finished, once
from aiomooncake._values import as_argument, check_text, size_argument
from aiomooncake.engine.since import no_method
from aiomooncake.errors import (
    InvalidArgumentError,
    MooncakeError,
    NotSupportedError,
    StoreClosedError,
    TaintedStoreError,
    error_from_code,
)
from aiomooncake.opening import Opening

if TYPE_CHECKING:
    from aiomooncake.config import StoreConfig
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.engine.protocol import NativeStore

__all__ = ["Segment", "SegmentVerbs"]

# What the engine answers for segments that are not mounted (any more): by its own list of them, by
# the client's, by the master's.
_UNKNOWN: Final = (-1, -600, -101)
# User space ends there; near the end of 64 bits the engine's rounding up wraps around to nothing.
_LARGEST: Final = 1 << 47
_LONGEST: Final = 10**9  # seconds: the engine counts them in nanoseconds, with 64 bits


class Segment:
    """Memory that a store lends to its cluster. Made by :meth:`Store.mount_segment`.

    It lasts until it is closed, or the store is. When the store is opened anew, so is the segment,
    without the values that were in it.

    Attributes:
        name: By which placement options and copies name it: the store's ``hostname``. All
            segments of a store have the same one.
        ids: The master's identifiers of it; several where the transport takes less at once.
        nbytes: How many bytes; of fresh memory as many as the engine made of those asked for.
        path: The file whose memory it is, or None.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        nbytes: int | None,
        path: str | None,
        offset: int,
        protocol: str,
        location: str,
    ) -> None:
        self.name = ""
        self.ids: tuple[str, ...] = ()
        self.nbytes = nbytes or 0
        self.path = path
        self._asked = nbytes
        self._client = client
        self._offset = offset
        self._where = (protocol, location)
        self._lock = threading.Lock()
        self._gone = False
        self._closing: asyncio.Task[None] | None = None

    async def aclose(self, *, grace_period: float = 1.0) -> None:
        """Take the memory back; idempotent.

        From now on the master places nothing in it. The values in it that have no copy elsewhere
        can be read until the grace period ends, and are gone then. The engine keeps the memory for
        ten seconds more, because reads that have begun go on: a file must not be made shorter
        before that.

        Args:
            grace_period: Seconds; whole ones, rounded up. At least one: without it the engine
                unmaps the memory under this store's own reads, which ends the process.

        Raises:
            RpcError: The master could not be asked; the memory is still lent.
        """
        seconds = _whole_seconds(grace_period, self._client.rank)
        self._closing = once(self._closing, self._take_back, seconds)
        await finished(self._closing)

    async def __aenter__(self) -> Segment:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _take_back(self, grace_period: int) -> None:
        client = self._client
        try:
            await client.run(
                client.control,
                "unmount_segment",
                self._unmount,
                grace_period,
                drain=True,
                giving_back=True,
            )
        except (StoreClosedError, TaintedStoreError):
            # It went with the native object, or goes with it.
            with self._lock:
                self._gone = True
        client.keep_no_longer(self, never_known=True)

    # ------------------------------------------------------------------ on worker threads

    def mount(self, native: NativeStore) -> None:
        """Lend the memory.

        Raises:
            MooncakeError: The engine refuses it.
        """
        client = self._client
        if self.path is None:
            what = f"mounting a segment of {self.nbytes} bytes"
            allocated = native.allocate_and_mount_segment(self.nbytes, *self._where)
            code, ids, nbytes = allocated["ret"], allocated["segment_ids"], self.nbytes
            if code == 0:
                nbytes = allocated["allocated_size"]
            hint = "This machine may have less memory; take less."
        else:
            nbytes = _measure(self.path, self._offset, self._asked, client.rank)
            what = f"mounting {nbytes} bytes of {self.path}"
            mounted = native.mount_segment(self.path, nbytes, self._offset, *self._where)
            code, ids = mounted["ret"], mounted["segment_ids"]
            hint = "Its file system may not have the room that the file promises."
        if code != 0:
            error = error_from_code(code, what, rank=client.rank, hint=hint)
            client.note_error(error)
            raise error
        self.ids, self.nbytes, self.name = tuple(ids), nbytes, native.get_hostname()

    def _unmount(self, grace_period: int) -> None:
        with self._lock:
            if self._gone:
                return
            client = self._client
            native, ids = client.native_object, list(self.ids)
            free = native.unmount_and_free_segment if self.path is None else native.unmount_segment
            code = free(ids, grace_period)
            if code != 0 and code not in _UNKNOWN:
                error = error_from_code(
                    code, f"unmounting {self!r}", rank=client.rank, hint="It is still lent."
                )
                client.note_error(error)
                raise error
            self._gone = True

    def forget(self, native: NativeStore) -> None:
        """Take the memory back from a native object that lives on, when the store is closed."""
        with self._lock:
            if self._gone:
                return
            self._gone = True
            free = native.unmount_and_free_segment if self.path is None else native.unmount_segment
            free(list(self.ids), 1)

    def drop(self) -> None:
        """Note that it went with the native object, which was torn down."""
        with self._lock:
            self._gone = True

    def renew(self, native: NativeStore) -> bool:
        """Lend the memory by a new native object, which was given to the store."""
        with self._lock:
            # A close that has begun may have been refused already, and a mount is just being.
            closing = self._closing is not None and not self._closing.done()
            if self._gone or closing or not self.ids:
                return False
            try:
                self.mount(native)
            except MooncakeError as exc:
                self._client.log.warning("%r could not be mounted anew: %s", self, exc)
                self._gone = True
            return not self._gone

    def __repr__(self) -> str:
        where = f" of {self.path}" if self.path is not None else ""
        return f"<Segment {self.nbytes} bytes{where}{' closed' if self._gone else ''}>"


class SegmentVerbs:
    """What a store lends to its cluster. Part of :class:`Store`."""

    rank: int | str | None
    config: StoreConfig | None
    _client: EngineClient

    def mount_segment(
        self,
        nbytes: int | str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        offset: int | str = 0,
        protocol: str | None = None,
        location: str = "",
    ) -> Opening[Segment]:
        """Lend memory to the cluster: fresh memory, or a file's; await it or enter it.

        Values are placed in it from then on. It is taken back by :meth:`Segment.aclose`, at the
        end of the ``async with`` block, or when the store is closed.

        Args:
            nbytes: Size in bytes, or text such as ``"512MiB"``. Fresh memory is rounded up to
                16 MB by the engine. Of a file all that follows ``offset`` where it is left out.
            path: A file to lend, on ``/dev/shm`` or a huge-page file system: it is mapped and
                written to.
            offset: Where to begin in the file; a multiple of the page size.
            protocol: The transport's; the store's own if left out.
            location: A NUMA node's name, such as ``"cpu:0"``.

        Raises:
            InvalidArgumentError: Sizes that can't be, or a file that can't be opened or is shorter.
            NotSupportedError: A dummy client lends no memory; or the wheel can't.
            MooncakeError: The engine refused it: there is no such memory, or no master.
        """
        rank = self.rank
        size = None if nbytes is None else size_argument(nbytes, "mount_segment", "nbytes", rank)
        start = size_argument(offset, "mount_segment", "offset", rank)
        self._check_sizes(size, start, has_path=path is not None)
        if protocol is None:
            protocol = "tcp" if self.config is None else self.config.protocol
        file = None if path is None else os.fspath(path)
        for what, text in (("path", file or ""), ("protocol", protocol), ("location", location)):
            as_argument(partial(check_text, text, field=what, spaces=True), "mount_segment", rank)
        segment = Segment(
            self._client,
            nbytes=size,
            path=file,
            offset=start,
            protocol=protocol,
            location=location,
        )
        return Opening("a segment", self._mounted(segment), Segment.aclose)

    def _check_sizes(self, size: int | None, offset: int, *, has_path: bool) -> None:
        wrong = ""
        if size is None and not has_path:
            wrong = "a size, or path= of a file to lend"
        elif size is not None and not 0 < size <= _LARGEST:
            wrong = f"at least one byte and less than 2**47, not {size}"
        elif offset and not has_path:
            wrong = "path= with offset=: fresh memory has none"
        elif offset % mmap.PAGESIZE or offset > _LARGEST:
            wrong = f"an offset that is a multiple of the page size ({mmap.PAGESIZE})"
        if wrong:
            raise InvalidArgumentError(f"mount_segment needs {wrong}", rank=self.rank)

    async def _mounted(self, segment: Segment) -> Segment:
        client = self._client
        # The store lets go of it at the latest; and mounts it anew when it is opened anew.
        client.keep_until_gone(segment)
        try:
            await client.run(client.control, "mount_segment", self._mount, segment, drain=True)
        except BaseException:
            if segment.ids:  # cancelled too late
                await segment.aclose()
            else:
                segment.drop()
                client.keep_no_longer(segment, never_known=True)
            raise
        return segment

    def _mount(self, segment: Segment) -> None:
        client = self._client
        native: Any = client.native_object
        if client.dummy:
            raise NotSupportedError(
                "a dummy client lends no memory: its stand-alone client does, or connect to the "
                "master instead, without client_server_address",
                rank=self.rank,
            )
        if not hasattr(native, "mount_segment"):
            raise no_method("mount_segment", rank=self.rank)
        segment.mount(native)


def _whole_seconds(grace_period: float, rank: int | str | None) -> int:
    is_number = isinstance(grace_period, (int, float))
    if not is_number or not 1 <= grace_period <= _LONGEST:
        raise InvalidArgumentError(
            f"a segment's grace_period is 1 to {_LONGEST} seconds, not {grace_period!r}: without "
            "one the memory would be unmapped under reads of this store, which ends the process",
            rank=rank,
        )
    return math.ceil(grace_period)


def _measure(path: str, offset: int, nbytes: int | None, rank: int | str | None) -> int:
    """Tell how many bytes of a file are lent; the engine would only say that it can't be."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            there = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as exc:
        raise InvalidArgumentError(
            f"mount_segment can't open {path!r} for reading and writing: {exc}", rank=rank
        ) from exc
    wanted = there - offset if nbytes is None else nbytes
    if wanted <= 0 or offset + wanted > there:
        raise InvalidArgumentError(
            f"mount_segment can't lend {max(wanted, 1)} bytes from {offset} on: {path!r} has "
            f"{there}",
            rank=rank,
        )
    return wanted
