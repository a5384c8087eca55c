"""Values seen where the engine put them, without a copy, for a bounded time."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiomooncake.avoiding import around, unreachable
from aiomooncake.transfers import Transfers

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient

__all__ = ["Sight", "Views"]


class Sight:
    """One value in view.

    The memory belongs to the engine's handle, which is tied to the memory object that every view
    of it refers to. So a view that was derived from it and outlives it never sees freed memory,
    and the handle is let go, and its room given back, when the last of them is: also that of a
    view which nobody took, because the task was cancelled meanwhile.
    """

    __slots__ = ("view",)

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def release(self) -> None:
        """End the view: using it raises ValueError from now on."""
        # Who holds an export of it (pickle.PickleBuffer, pyarrow) keeps it from being released.
        with contextlib.suppress(BufferError):
            self.view.release()


class Room:
    """Bytes of the engine's local buffer that views may hold.

    Nothing waits for it: what finds no room is read into memory of its own. Half of the buffer is
    left to the calls that go through ``store.engine``.
    """

    def __init__(self, nbytes: int) -> None:
        self._free = nbytes // 2
        self._lock = threading.Lock()
        # It is given back from the garbage collector too, which may run while the lock is held.
        self._returned: deque[int] = deque()

    @property
    def free(self) -> int:
        """Bytes that are left."""
        with self._lock:
            return self._free + sum(self._returned)

    def take(self, nbytes: int) -> bool:
        """Take room if there is."""
        with self._lock:
            while self._returned:
                self._free += self._returned.popleft()
            if nbytes > self._free:
                return False
            self._free -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Give room back; from anywhere."""
        self._returned.append(nbytes)


class Views:
    """The jobs of :meth:`Store.view`; blocking, for worker threads."""

    def __init__(self, client: EngineClient, transfers: Transfers, local_buffer_size: int) -> None:
        self._client = client
        self._transfers = transfers
        self._room = Room(local_buffer_size)

    @property
    def room(self) -> int:
        """Bytes that views may still take without a copy."""
        return self._room.free

    def view_keys(self, keys: Sequence[str]) -> list[Any]:
        """Bring values into view: a Sight, None for a proved miss, or an error."""
        refused = unreachable(self._client, keys, "view")
        if refused:
            return around(keys, refused, lambda at: self._view_keys([keys[i] for i in at]))
        return self._view_keys(keys)

    def _view_keys(self, keys: Sequence[str]) -> list[Any]:
        sizes = self._transfers.sizes(keys)
        roomy = {key: sizes[key] for key in keys if key in sizes and self._room.take(sizes[key])}
        handles: dict[str, Any] = {}
        if len(roomy) < len(sizes):
            self._client.counters.count_copied(len(sizes) - len(roomy))
        try:
            if roomy:
                found = self._transfers.handles(list(roomy))
                handles = dict(zip(roomy, found, strict=True))
            sights: dict[str, Any] = {}
            for key in keys:
                handle = handles.pop(key, None)
                if handle is not None and handle.size() == roomy[key]:
                    sights[key] = Sight(_view_of(handle, self._room))
                    del roomy[key]  # the view has it now
                del handle  # its room in the engine's buffer, before the next one needs it
            # A peer that has kept all of them waiting must not keep each of them waiting again.
            sights |= unreachable(self._client, [key for key in keys if key not in sights], "view")
            alone = [key for key in keys if key not in sights]
            found = self._transfers.one_by_one("view", self._view_of_its_own, alone)
            sights |= zip(alone, found, strict=True)
            return [sights[key] for key in keys]
        finally:
            for nbytes in roomy.values():
                self._room.give_back(nbytes)

    def _view_of_its_own(self, key: str) -> Sight | None:
        """Read a value into memory of its own; also what tells a miss from a failure."""
        value = self._transfers.get(key)
        return None if value is None else Sight(memoryview(value))


def _view_of(handle: Any, room: Room) -> memoryview:
    nbytes = handle.size()
    memory = (ctypes.c_ubyte * nbytes).from_address(handle.ptr())
    memory.handle = handle  # lives as long as any view of the memory
    weakref.finalize(memory, room.give_back, nbytes).atexit = False
    return memoryview(memory).cast("B").toreadonly()
