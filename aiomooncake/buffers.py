"""Registered memory that callers move values through without a copy."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from aiomooncake._buffers import address_of
from aiomooncake._tasks import finished, once
from aiomooncake.errors import InvalidArgumentError
from aiomooncake.memory import Block, holds_objects
from aiomooncake.observe.logs import StoreLog

if TYPE_CHECKING:
    from aiomooncake.engine.protocol import NativeStore

__all__ = [
    "Buffer",
    "Owner",
    "Place",
    "Slice",
    "memory_of",
]

# The end of memory: the engine adds in 64 bits, and no memory reaches the upper half of them.
_ADDRESSES = 1 << 63


class Owner(Protocol):
    """The store that memory is registered with."""

    rank: int | str | None

    @property
    def hostname(self) -> str:
        """The store's own address."""
        ...


class Buffer:
    """Memory that is registered with the engine of one store.

    Made by :meth:`Store.allocate` or :meth:`Store.register`. Slice it (``buffer[0:4096]``) to name
    a part; the slices are not copies. It stays registered until it is closed, and the engine is
    waited for before that.

    Attributes:
        address: Address of the first byte.
        nbytes: How many bytes.
        readonly: Whether values can only be stored from it.
        registered: Whether the engine knows the memory.
        view: The memory as a ``memoryview``, for NumPy (``numpy.frombuffer(buffer.view, …)``) and
            torch (``torch.frombuffer``); None for memory that was given by its address. It ends
            when the buffer is closed; arrays made of it stay good.
    """

    def __init__(
        self,
        store: Owner,
        *,
        address: int,
        nbytes: int,
        view: memoryview | None,
        owner: object,
        unregister: Callable[[Buffer], Coroutine[Any, Any, None]],
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.view = view
        self.readonly = view.readonly if view is not None else False
        self.registered = False
        self._store = store
        # A view of our own keeps the memory in place when the caller releases `view`.
        self._owner: object = (owner, None if view is None else memoryview(view))
        self._unregister = unregister
        self._lock = threading.Lock()
        # The engine is told of the memory, or that it is over, on one thread at a time.
        self._telling = threading.Lock()
        self._users = 0
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._on_idle: Callable[[], None] | None = None

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> Slice:
        return Slice(self, 0, self.nbytes)[part]

    def __buffer__(self, flags: int, /) -> memoryview:
        if self.view is None:
            raise TypeError("memory that was registered by its address has no Python buffer")
        return self.view

    @property
    def closed(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._closed

    async def aclose(self) -> None:
        """Unregister the memory when no call uses it any more; idempotent.

        Cancelled, it still waits for that, so that the memory is the caller's again afterwards.
        """
        self._closing = once(self._closing, self._unregister, self)
        await finished(self._closing)

    async def __aenter__(self) -> Buffer:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.aclose()

    def check(self, store: Owner, verb: str) -> None:
        """Check that a call of this store may use the memory.

        Raises:
            InvalidArgumentError: The buffer is closed, or registered with another store.
        """
        if store is not self._store:
            raise InvalidArgumentError(
                f"{verb} got memory that is registered with {self._store!r}; register it with "
                "this store",
                rank=store.rank,
            )
        if self._closed:
            raise InvalidArgumentError(
                f"{verb} got a buffer that is closed; allocate or register a new one",
                rank=store.rank,
            )

    def take(self) -> None:
        """Note a call that uses the memory; it was checked on this loop turn."""
        with self._lock:
            self._users += 1

    def give_back(self) -> Callable[[], None] | None:
        """Note that a call has let go of the memory; from any thread.

        Returns:
            What to call when it was the last one, and somebody waits for that.
        """
        with self._lock:
            self._users -= 1
            return None if self._users else self._on_idle

    async def shut(self) -> None:
        """Refuse new calls and wait for those that use the memory."""
        loop = asyncio.get_running_loop()
        idle: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            # The loop may be closed under the wait.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, idle)

        with self._lock:
            self._closed = True
            if not self._users:
                return
            self._on_idle = tell
        await idle

    def forget(
        self, native: NativeStore, unregister: Callable[[NativeStore, int], object] | None = None
    ) -> None:
        """Unregister the memory from a client that lives on."""
        with self._telling:
            if self.registered:
                if unregister is None:
                    native.unregister_buffer(self.address)
                else:
                    unregister(native, self.address)
                self.registered = False

    def renew(self, native: NativeStore) -> bool:
        """Register the memory with a new native object, which was given to the store."""
        with self._telling:
            if self._closed:  # it is being unregistered, or was refused that a moment ago
                return False
            if self.registered:
                code = native.register_buffer(self.address, self.nbytes)
                self.registered = code >= 0
                if code < 0:
                    log = StoreLog(self._store.rank, self._store.hostname)
                    log.warning("%r could not be registered anew: %d", self, code)
            return self.registered

    @property
    def held(self) -> object:
        """What keeps the memory in place."""
        return self._owner

    def let_go(self) -> None:
        """Hold on to the memory no longer; what others made of ``view`` stays good."""
        self._owner = None
        if self.view is not None:
            with contextlib.suppress(BufferError):  # somebody holds an export of it
                self.view.release()

    def __repr__(self) -> str:
        return f"<Buffer {self.nbytes} bytes{' closed' if self._closed else ''}>"


class Slice(Block):
    """A part of a :class:`Buffer`; not a copy. What reaches beyond the memory is cut, as in Python.

    Attributes:
        buffer: The whole.
        offset: Where the part begins in it, in bytes.
        nbytes: How many bytes.
        address: Address of the first byte.
    """

    __slots__ = ("buffer", "offset")

    def __init__(self, buffer: Buffer, offset: int, nbytes: int) -> None:
        # Not by super(): a value in pieces has many of them.
        self.buffer = self.keep = buffer
        self.offset = offset
        self.address = buffer.address + offset
        self.nbytes = nbytes
        self.mutable = self.registered = True

    @property
    def view(self) -> memoryview | None:
        """The part as a ``memoryview``; None for memory that was given by its address."""
        whole = self.buffer.view
        return None if whole is None else whole[self.offset : self.offset + self.nbytes]

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> Slice:
        if not isinstance(part, slice):
            raise TypeError(f"registered memory is cut by slices, not by {type(part).__name__}")
        start, stop, step = part.indices(self.nbytes)
        if step != 1:
            raise InvalidArgumentError("registered memory is cut into contiguous slices: no steps")
        return Slice(self.buffer, self.offset + start, max(0, stop - start))

    def __buffer__(self, flags: int, /) -> memoryview:
        view = self.view
        if view is None:
            raise TypeError("memory that was registered by its address has no Python buffer")
        return view

    def __repr__(self) -> str:
        return f"<Slice [{self.offset}:{self.offset + self.nbytes}] of {self.buffer!r}>"


Place = Buffer | Slice
"""What names registered memory in a call."""


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def memory_of(
    thing: object | None, address: int | None, nbytes: int | None, rank: int | str | None
) -> tuple[int, int, memoryview | None]:
    """Find the memory that is to be registered: address, size, and the view if there is one.

    Raises:
        InvalidArgumentError: Neither a contiguous buffer nor a plausible address.
    """
    if thing is not None:
        if address is not None or nbytes is not None:
            raise InvalidArgumentError(
                "register takes an object or an address, not both", rank=rank
            )
        try:
            view = memoryview(thing)  # type: ignore[arg-type]
        except (TypeError, ValueError, BufferError) as exc:
            raise InvalidArgumentError(
                f"register needs an object with the buffer protocol, not {type(thing).__name__} "
                f"({exc}); for a tensor pass address=tensor.data_ptr(), nbytes=, owner=tensor",
                rank=rank,
            ) from None
        if not view.c_contiguous or not view.nbytes:
            raise InvalidArgumentError(
                "register needs contiguous memory of at least one byte", rank=rank
            )
        if holds_objects(view):
            raise InvalidArgumentError(
                "register got an array of Python objects: reading values into it would overwrite "
                "their addresses and crash the process; use a numeric type",
                rank=rank,
            )
        return address_of(view), view.nbytes, _bytes_of(view)
    if (
        not isinstance(address, int)
        or not isinstance(nbytes, int)
        or address <= 0
        or nbytes <= 0
        or address + nbytes > _ADDRESSES
    ):
        raise InvalidArgumentError(
            "register needs an object, or address= and nbytes= above 0 that end below 2**63, not "
            f"{address!r} and {nbytes!r}",
            rank=rank,
        )
    return address, nbytes, None


def _bytes_of(view: memoryview) -> memoryview:
    try:
        return view.cast("B")
    except TypeError:  # a format that memoryview can't cast, such as complex numbers
        raise InvalidArgumentError(
            "register can't lay this type out as bytes; pass array.view('u1')"
        ) from None
