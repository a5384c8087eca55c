"""Memory that a dummy client shares with its stand-alone client process.

A dummy client moves no bytes itself: it names places in shared memory, and the other process reads
and writes them there. Only memory of the engine's own allocator is shared so, and only whole
blocks of it; what is behind that is in :mod:`aiomooncake.engine.blocks`.

A process that was restarted within a second, and one that has not heard of us for ten, maps
nothing of ours any more, and no ping tells: moves answer -600. So that answer is looked into
(:meth:`SharedMemory.check`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiomooncake._codes import RPC_CODES
from aiomooncake.engine import blocks
from aiomooncake.engine.blocks import NOT_MAPPED
from aiomooncake.errors import (
    InvalidArgumentError,
    NotSupportedError,
    RpcError,
    RpcTimeoutError,
    code_name,
    shorten_key,
)

if TYPE_CHECKING:
    from aiomooncake.config import StoreConfig
    from aiomooncake.engine.binding import Binding
    from aiomooncake.engine.protocol import NativeStore

T = TypeVar("T")

__all__ = ["MemoryLostError", "ScratchLostError", "SharedMemory", "mended"]

_FAILED: Final = -1
_INVALID: Final = -600
_RPC_FAILED: Final = -900
_RPC_TIMEOUT: Final = -901
# How often scratch memory is lost under one job, since every restart of the other process does it.
_LOSSES: Final = 4


class MemoryLostError(RpcError):
    """The stand-alone client does not share some memory of ours any more."""


class ScratchLostError(Exception):
    """Scratch memory was lost under a job, which can be done again with other."""


class SharedMemory:
    """The engine's allocator of shared memory (``MooncakeHostMemAllocator``), for one store.

    Attributes:
        address: The stand-alone client.
        by_value: Whether the engine shares memory of its own, by which it moves values itself.

    Args:
        binding: The loaded binding.
        config: What is connected to.
        rank: Rank of the store, for messages.

    Raises:
        NotSupportedError: This wheel has none.
    """

    def __init__(self, binding: Binding, config: StoreConfig, rank: int | str | None) -> None:
        allocator_class = getattr(binding.module, "MooncakeHostMemAllocator", None)
        if allocator_class is None:
            raise NotSupportedError(
                f"engine {binding.version or '(unknown version)'} has no "
                "MooncakeHostMemAllocator, without which a dummy client can't move values: "
                "install a newer wheel",
                rank=rank,
            )
        self._allocator = allocator_class()
        self.address = config.client_server_address or ""
        self.by_value = config.mem_pool_size > 0
        self._rank = rank
        self._blocks: dict[int, int] = {}  # what we made: from address to size
        self._foreign: dict[int, int] = {}  # what others made and we share
        blocks.make_room(self._allocator)

    @contextmanager
    def detached(self, native: NativeStore) -> Iterator[None]:
        """Give back what others made, and forget the dummy client, which is torn down inside."""
        for address in list(self._foreign):
            # The engine would never share it again otherwise.
            if self.unshare(native, address) in RPC_CODES:
                break
        with blocks.detached(native):
            yield

    # ------------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> memoryview:
        """Map shared memory, with all its pages; it is freed when nothing refers to it any more.

        Blocking, without the GIL: about 1 s for a GB.

        Raises:
            MemoryError: The system has not so much.
            RpcError: So many blocks can't be shared while a stand-alone client does not answer.
        """
        memory = blocks.make_block(self._allocator, nbytes, self._blocks)
        if memory is None:
            raise self.unreachable(f"allocating {nbytes} bytes of memory")
        return memory

    # ------------------------------------------------------------------ sharing it

    def share(self, native: NativeStore, address: int, nbytes: int) -> int:
        """Let the stand-alone client map a block of memory; 0, as the binding's call answers.

        Raises:
            RpcError: It does not answer.
            InvalidArgumentError: It maps the block already.
            NotSupportedError: This memory can't be shared.
        """
        what = f"registering {nbytes} bytes of memory"
        if address in self._foreign:
            raise InvalidArgumentError(
                f"{what} failed: they are registered with this store already", rank=self._rank
            )
        if self._maps(native, address, what):
            blocks.take_off(native, address, nbytes)
            if self._maps(native, address, what):
                raise NotSupportedError(
                    f"{what} failed: the stand-alone client {self.address} takes them for other "
                    "memory, which was freed while it was registered: make new memory",
                    rank=self._rank,
                )
        code = native.register_buffer(address, nbytes)
        ours = address in self._blocks
        # Memory that another store has registered answers 0, and is not shared.
        if code == 0 and (ours or self._maps(native, address, what)):
            if not ours:
                self._foreign[address] = nbytes
            return 0
        if code and (ours or blocks.look(native, address) in RPC_CODES):
            raise self.unreachable(what)
        raise NotSupportedError(
            f"{what} failed: a dummy client takes only memory that it can share with the "
            "stand-alone client, a whole block at a time, and one that no other store of this "
            "process has registered: use await store.allocate(...), or a block of its own of "
            "mooncake.store.MooncakeHostMemAllocator",
            code=code or None,
            rank=self._rank,
        )

    def unshare(self, native: NativeStore, address: int) -> int:
        """Let the stand-alone client map a block no longer; the engine's code."""
        self._foreign.pop(address, None)
        return native.unregister_buffer(address)

    def _maps(self, native: NativeStore, address: int, what: str) -> bool:
        code = blocks.look(native, address)
        if code in RPC_CODES:
            raise self.unreachable(what, code)
        return code != NOT_MAPPED

    # ------------------------------------------------------------------ what went wrong

    def check(self, native: NativeStore, args: Sequence[Any], answer: Any) -> None:
        """Look whether a move failed because its memory is not shared any more.

        Args:
            native: The client.
            args: The arguments of the native call.
            answer: What it answered: a code, or codes in lists.

        Raises:
            MemoryLostError: Some of the memory is not.
            RpcError: The stand-alone client does not tell.
        """
        if isinstance(answer, int):
            if answer != _INVALID:
                return
        elif not answer or (isinstance(answer[0], int) and _INVALID not in answer):
            return
        starts = {self._start_of(address): None for address in _refused(args, answer)}
        for start in starts:
            if not self._maps(native, start, "the call"):
                raise MemoryLostError(
                    f"the stand-alone client {self.address} does not share this memory any more: "
                    "it was restarted, or has not heard of this process for 10 s. Allocate (or "
                    "make) the memory anew, or connect again",
                    code=_INVALID,
                    rank=self._rank,
                )

    def _start_of(self, address: int) -> int:
        """Find the block that an address is in, so that many of them need one question."""
        for known in (self._blocks, self._foreign):
            for start, nbytes in list(known.items()):
                if start <= address < start + nbytes:
                    return start
        return address

    def error(self, code: int, action: str, key: str) -> RpcError | None:
        """Make the error of a code that is about the stand-alone client."""
        if code == _FAILED and action == "exists":
            code = _RPC_FAILED  # the engine's batch call answers -1 for it
        if code in RPC_CODES:
            return self.unreachable(f"{action} of {shorten_key(key)}", code, key)
        return None

    def unreachable(self, what: str, code: int = _RPC_FAILED, key: str | None = None) -> RpcError:
        """Make the error of a stand-alone client that does not answer."""
        kind = RpcTimeoutError if code == _RPC_TIMEOUT else RpcError
        return kind(
            f"{what} failed: {code} {code_name(code)}. The stand-alone client {self.address} "
            "(client_server_address) does not answer, or its master does not: check that both "
            "run, then try again.",
            code=code,
            key=key,
            rank=self._rank,
        )

    def __repr__(self) -> str:
        return f"<SharedMemory {len(self._blocks)} blocks with {self.address}>"


def mended(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Do a job again when scratch memory is lost under it; what it stored already stays stored."""
    for _ in range(_LOSSES):
        try:
            return fn(*args, **kwargs)
        except ScratchLostError:
            continue
    raise RpcError(
        "the stand-alone client was restarted again and again under the call: let it run, then "
        "try again",
        code=_RPC_FAILED,
    )


def _refused(args: Sequence[Any], answer: Any) -> Iterator[int]:
    """List the addresses that answers of -600 are about."""
    memory = args[1]
    if args[0] and isinstance(args[0][0], int):  # get_into_ranges begins with the memory
        memory = args[0]
    if isinstance(answer, int):
        yield memory
        return
    for place, code in zip(memory, answer, strict=True):
        if _is_refused(code):
            yield from (place,) if isinstance(place, int) else place


def _is_refused(code: Any) -> bool:
    return code == _INVALID if isinstance(code, int) else any(map(_is_refused, code))
