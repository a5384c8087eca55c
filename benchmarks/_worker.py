"""The other end of :class:`benchmarks.process.Worker`: ``python -m benchmarks._worker``."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any, TextIO

from benchmarks.process import Job

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve one job until the standard input ends, and leave at once.

    Leaving skips every tidying up: the engine's own takes seconds, or minutes with a frozen
    master, and is not what is measured here.
    """
    name, loop_kind, parent = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        os._exit(1)
    # The engine may print: what it prints must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    module, _, attribute = name.partition(":")
    job_class: type[Job] = getattr(importlib.import_module(module), attribute)
    loop = _new_loop(loop_kind)
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_serve(job_class, answers))


def _new_loop(kind: str) -> asyncio.AbstractEventLoop:
    if kind == "uvloop":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


async def _serve(job_class: type[Job], answers: TextIO) -> None:
    def emit(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer, default=_plain) + "\n")

    job = job_class(emit)
    # Reading blocks the loop, which has nothing to do between two calls.
    for line in sys.stdin:
        call = json.loads(line)
        try:
            result = await getattr(job, call["method"])(**call["arguments"])
        except Exception:  # noqa: BLE001  # the other process gets it
            emit({"error": traceback.format_exc()})
        else:
            emit({"result": result})
    os._exit(0)  # here, where the job still holds its stores: freeing one would tear it down


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} is not for JSON")


if __name__ == "__main__":
    main()
