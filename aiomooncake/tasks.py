"""Copies and moves of values between segments, which the cluster makes in the background."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from aiomooncake._codes import CODES
from aiomooncake.engine.since import no_method
from aiomooncake.errors import (
    InvalidArgumentError,
    TaskError,
    error_from_code,
    shorten_key,
)

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.engine.protocol import NativeTask, TaskId

__all__ = ["TaskProgress", "TaskVerbs"]

# A client takes its tasks up once a second, so most of them end between 0 and 1 s after that.
_FIRST_LOOK: Final = 0.02
_LATER: Final = 1.5
_LONGEST: Final = 0.25

_INVALID: Final = -600
_INTERNAL: Final = -1
_UNAVAILABLE: Final = -1010
_LOST: Final = (
    "When one of several segments of a store is taken back, the name goes too, until that store "
    "mounts another one or is opened again."
)
_CODES: Final = {info.name: code for code, info in CODES.items()}


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """How far a copy or a move is.

    Attributes:
        verb: What is done.
        key: The key it is done to.
        status: ``"pending"`` until a client that holds the value takes it up, then
            ``"processing"``, then ``"success"`` or ``"failed"``.
        message: How it ended, in the engine's words; empty before.
        seconds: Since it was begun.
    """

    verb: Literal["copy", "move"]
    key: str
    status: str
    message: str
    seconds: float


class TaskVerbs:
    """What a store has the cluster do in the background. Part of :class:`Store`."""

    rank: int | str | None
    _client: EngineClient

    if TYPE_CHECKING:

        def _check_key(self, key: object, verb: str) -> None: ...
        def _check_text(self, text: object, verb: str, what: str) -> None: ...

    async def copy(
        self,
        key: str,
        targets: str | Iterable[str],
        *,
        on_progress: Callable[[TaskProgress], object] | None = None,
    ) -> None:
        """Copy a value to segments, and return when it is there.

        The client that holds the value does it; it asks for work once a second. A target that has
        a copy already is no error. Cancelled when the engine has taken it, it goes on all the
        same, and a warning says so.

        Args:
            key: The key.
            targets: Names of mounted segments (another store's ``hostname``), or one.
            on_progress: Called on the loop with a :class:`TaskProgress` when its status changes.

        Raises:
            ObjectNotFoundError: There is no such key.
            InvalidArgumentError: A target is not mounted.
            UnavailableError: A target's segment is being taken back.
            TaskError: It failed: no room there, say. ``code`` says why, where the engine does.
        """
        self._check_key(key, "copy")
        names = [targets] if isinstance(targets, str) else list(targets)
        if not names:
            raise InvalidArgumentError("copy needs a target: a segment's name", rank=self.rank)
        for name in names:
            self._check_text(name, "copy", "target")
        where = f"to {', '.join(map(shorten_key, names))}"
        task = _Task(self._client, "copy", key, where, on_progress)
        await task.run("create_copy_task", key, names)

    async def move(
        self,
        key: str,
        source: str,
        target: str,
        *,
        on_progress: Callable[[TaskProgress], object] | None = None,
    ) -> None:
        """Move a copy of a value from one segment to another; otherwise as :meth:`copy`.

        Args:
            key: The key.
            source: Name of the segment that has the copy.
            target: Name of a mounted segment.
            on_progress: As for :meth:`copy`.
        """
        self._check_key(key, "move")
        self._check_text(source, "move", "source")
        self._check_text(target, "move", "target")
        where = f"from {shorten_key(source)} to {shorten_key(target)}"
        task = _Task(self._client, "move", key, where, on_progress)
        await task.run("create_move_task", key, source, target)


class _Task:
    """A copy or a move under way."""

    def __init__(
        self,
        client: EngineClient,
        verb: Literal["copy", "move"],
        key: str,
        where: str,
        on_progress: Callable[[TaskProgress], object] | None,
    ) -> None:
        self._client = client
        self._verb: Literal["copy", "move"] = verb
        self._key = key
        self._where = where
        self._on_progress = on_progress
        self._began = time.monotonic()
        # Between the loop, where it may be cancelled, and the thread that begins it.
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._taken = False  # by the engine

    async def run(self, method: str, *args: Any) -> None:
        """Begin it and see it through."""
        client, verb = self._client, self._verb
        try:
            task = await client.run(client.control, verb, self._begin, method, args)
            await self._follow(task)
        except asyncio.CancelledError:
            with self._lock:
                self._cancelled.set()
                taken = self._taken
            if taken:
                self._warn()
            raise

    def _warn(self) -> None:
        self._client.log.warning(
            "a %s %s was cancelled, and goes on in the cluster", self._verb, self._where
        )

    async def _follow(self, task: TaskId) -> None:
        client, delay, status = self._client, _FIRST_LOOK, ""
        while True:
            seen = await client.run(client.control, f"{self._verb}_status", self._look, task)
            now = str(seen.status.name).lower()
            if now != status:
                status = now
                self._tell(status, seen.message)
            if status == "success":
                return
            if status == "failed":
                raise self._failure(seen.message)
            await asyncio.sleep(delay)
            delay = min(delay * _LATER, _LONGEST)

    def _tell(self, status: str, message: str) -> None:
        if self._on_progress is None:
            return
        seconds = time.monotonic() - self._began
        try:
            self._on_progress(TaskProgress(self._verb, self._key, status, message, seconds))
        except Exception:
            self._client.log.exception("an on_progress callback failed")

    def _failure(self, message: str) -> TaskError:
        # Such as: NO_AVAILABLE_HANDLE (max retries reached: 10).
        code = _CODES.get(message.partition(" ")[0])
        advice = "" if code is None else f" {CODES[code].advice}"
        error = TaskError(
            f"{self._verb} of {shorten_key(self._key)} failed: {message or 'no reason given'}."
            f"{advice}",
            code=code,
            key=self._key,
            rank=self._client.rank,
        )
        if code is not None:
            self._client.counters.count_code(error.code_name)
        return error

    # ------------------------------------------------------------------ on worker threads

    def _begin(self, method: str, args: tuple[Any, ...]) -> TaskId:
        client = self._client
        create = getattr(client.native_object, method, None)
        if create is None:
            raise no_method(method, rank=client.rank)
        if self._cancelled.is_set():
            raise asyncio.CancelledError  # which nobody waits for any more
        task: TaskId
        task, code = create(*args)
        if code != 0:
            raise self._error(code, self._verb, advice=self._advice(code))
        with self._lock:
            self._taken = True
            late = self._cancelled.is_set()
        if late:
            self._warn()
        return task

    def _advice(self, code: int) -> str:
        """Say what a refusal means here; empty where the table does."""
        cant = f"The master can't {self._verb} it {self._where}: "
        if code == _INVALID and self._verb == "copy":
            return (
                f"{cant}targets are named as their store's hostname, and must be mounted. {_LOST}"
            )
        if code == _INVALID:
            return (
                f"{cant}segments are named as their store's hostname; the source must have a copy "
                f"and not be the target, and the target must be mounted. {_LOST}"
            )
        if code == _INTERNAL:
            return f"{cant}it finds no segment of the source's name any more. {_LOST}"
        if code == _UNAVAILABLE:
            return (
                f"{cant}a segment there is being taken back, or the master is starting or not the "
                "leader. Name another segment, or try again in a moment."
            )
        return ""

    def _look(self, task: TaskId) -> NativeTask:
        seen, code = self._client.native_object.query_task(task)
        if seen is None or code != 0:
            hint = f"The {self._verb} may go on in the cluster."
            raise self._error(code, f"asking for the {self._verb}", hint=hint)
        return seen

    def _error(self, code: int, what: str, *, hint: str = "", advice: str = "") -> Exception:
        client = self._client
        error = error_from_code(
            code, what, key=self._key, rank=client.rank, hint=hint, advice=advice
        )
        client.note_error(error)
        return error
