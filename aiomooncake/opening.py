"""One shape for everything that is opened: awaited, or entered with ``async with``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

__all__ = ["Opening"]


class Opening(Coroutine[Any, Any, T], Generic[T]):
    """A coroutine that opens something, and an async context manager that also closes it.

    ``await opening`` hands the opened object over; the caller closes it.
    ``async with opening as thing`` closes it at the end of the block. It is a
    :class:`collections.abc.Coroutine`, so that ``asyncio.create_task``, task groups and
    ``run_coroutine_threadsafe`` take it as it is.
    """

    __slots__ = ("_close", "_coro", "_opened", "_what")

    def __init__(
        self, what: str, coro: Coroutine[Any, Any, T], close: Callable[[T], Awaitable[object]]
    ) -> None:
        self._what = what
        self._coro = coro
        self._close = close
        self._opened: T

    def send(self, value: Any, /) -> Any:
        """Advance the opening, as a task does."""
        return self._coro.send(value)

    def throw(self, *args: Any) -> Any:
        """Raise inside the opening, as a task does to cancel it."""
        try:
            return self._coro.throw(*args)
        finally:
            del args  # with the error's traceback it is a cycle, which holds what was opened

    def close(self) -> None:
        """Drop an opening that was never awaited."""
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coro.__await__()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self!r} is not open yet, so it has no {name!r}: await it, or enter it with "
            "'async with'"
        )

    async def __aenter__(self) -> T:
        self._opened = await self._coro
        return self._opened

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._close(self._opened)

    def __repr__(self) -> str:
        return f"<Opening of {self._what}>"
