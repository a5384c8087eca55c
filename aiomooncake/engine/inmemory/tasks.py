"""Copies of values: tasks that make and move them, and the call that clears them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final

from aiomooncake.engine.inmemory.arguments import as_key, as_keys
from aiomooncake.engine.inmemory.calls import Client, empty_list, native
from aiomooncake.engine.inmemory.objects import OK
from aiomooncake.engine.protocol import TaskId

__all__ = ["TaskCalls"]

_NO_TASK: Final = (0, 0)
_TASK_NOT_FOUND: Final = -1400
_RETRIES: Final = "(max retries reached: 10)"


class TaskType(IntEnum):
    """What a task does, numbered as upstream's."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class TaskStatus(IntEnum):
    """How far a task is, numbered as upstream's."""

    PENDING = 0
    PROCESSING = 1
    SUCCESS = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class QueryTaskResponse:
    """A task, with the attributes of the engine's own answer."""

    id: TaskId
    type: TaskType
    status: TaskStatus
    created_at_ms_epoch: int
    last_updated_at_ms_epoch: int
    assigned_client: TaskId
    message: str


def _no_task(answer: int, *_args: Any, **_kwargs: Any) -> tuple[TaskId, int]:
    return _NO_TASK, answer


def _no_answer(answer: int, *_args: Any, **_kwargs: Any) -> tuple[None, int]:
    return None, answer


class TaskCalls(Client):
    """Copy and move tasks of one client. A task is done at once, and pending when first asked."""

    @native(_no_task, fragile=True)
    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[TaskId, int]:
        """Copy a value to segments; the task and 0, or (0, 0) and a code."""
        name, places = as_key(key), as_keys(targets)
        code = self._engine.check_copies(name, places)
        if code != OK:
            return _NO_TASK, code
        return self._done(TaskType.REPLICA_COPY, self._engine.copy(name, places))

    @native(_no_task, fragile=True)
    def create_move_task(self, key: str, source: str, target: str) -> tuple[TaskId, int]:
        """Move a copy between segments; the task and 0, or (0, 0) and a code."""
        name = as_key(key)
        code = self._engine.check_copies(name, [target], source=source)
        if code != OK:
            return _NO_TASK, code
        return self._done(TaskType.REPLICA_MOVE, self._engine.copy(name, [target], source=source))

    def _done(self, kind: TaskType, failure: str) -> tuple[TaskId, int]:
        now = time.time_ns() // 1_000_000
        task = self._engine.next_number(), id(self)
        ended = QueryTaskResponse(
            id=task,
            type=kind,
            status=TaskStatus.FAILED if failure else TaskStatus.SUCCESS,
            created_at_ms_epoch=now,
            last_updated_at_ms_epoch=now,
            assigned_client=(id(self), 1),
            message=f"{failure} {_RETRIES}" if failure else "Task completed successfully",
        )
        begun = replace(ended, status=TaskStatus.PENDING, message="")
        self._engine.tasks[task] = [ended, begun]
        return task, OK

    @native(_no_answer, fragile=True)
    def query_task(self, task_id: Any) -> tuple[QueryTaskResponse | None, int]:
        """Tell how far a task is; None and -1400 for an unknown one."""
        if not isinstance(task_id, (tuple, list)) or len(task_id) != len(_NO_TASK):
            raise TypeError("incompatible function arguments: a task is a tuple[int, int]")
        states = self._engine.tasks.get(tuple(task_id))
        if states is None:
            return None, _TASK_NOT_FOUND
        return states.pop() if len(states) > 1 else states[0], OK

    @native(empty_list, unset=empty_list)
    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Drop the copies on a segment, or all; the keys that were cleared."""
        names = dict.fromkeys(as_keys(keys))
        return [key for key in names if self._engine.clear(self, key, segment_name)]
