"""What the doctor does in a child process, where a crash or a held GIL does no harm.

Run as ``python -m aiomooncake.cli.probe``: one JSON document in by stdin, one out by stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import sys
import time
import warnings
from typing import Any, Final

import anyio
import anyio.abc

from aiomooncake.cli.exits import exit_code
from aiomooncake.cli.terminal import tame_engine
from aiomooncake.config import StoreConfig
from aiomooncake.connect import connect
from aiomooncake.engine.binding import installed_distributions, load_binding
from aiomooncake.engine.entry_points import RealEntry
from aiomooncake.errors import EngineNotInstalledError, MooncakeError, WarmupError
from aiomooncake.testing import LoopStallProbe
from aiomooncake.warmup import WarmupPolicy

__all__ = ["ask"]

_SYSTEM: Final = ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4")
_LAST_WORDS: Final = 2000


async def ask(question: dict[str, Any], *, engine_log: bool) -> dict[str, Any]:
    """Have a child process answer; it is killed when this is cancelled.

    Returns:
        Its answer; of one that crashed, ``{"crash": …}`` with how it ended.
    """
    command = [sys.executable, "-m", "aiomooncake.cli.probe"]
    document = json.dumps(question | {"engine_log": engine_log}).encode()
    stderr = None if engine_log else -1
    async with await anyio.open_process(command, stderr=stderr) as process:
        assert process.stdin is not None  # noqa: S101  # it is a pipe
        assert process.stdout is not None  # noqa: S101
        parts: dict[str, bytes] = {}

        async def read(name: str, stream: anyio.abc.ByteReceiveStream) -> None:
            parts[name] = b"".join([part async for part in stream])

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(read, "out", process.stdout)
                if process.stderr is not None:
                    group.start_soon(read, "err", process.stderr)
                with contextlib.suppress(OSError, anyio.BrokenResourceError):
                    await process.stdin.send(document)
                await process.stdin.aclose()
            code = await process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
    try:
        answer: dict[str, Any] = json.loads(parts["out"])
    except ValueError:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        words = parts.get("err", b"")[-_LAST_WORDS:].decode(errors="replace").strip()
        return {"crash": f"{how}: {words.splitlines()[-1]}" if words else how}
    return answer


# --- in the child -------------------------------------------------------------------------------


def _look_at_engine() -> dict[str, Any]:
    """Import the engine and look what it can do."""
    answer: dict[str, Any] = {"distributions": installed_distributions()}
    try:
        binding = load_binding()
    except EngineNotInstalledError as error:
        return answer | {"error": str(error), "missing": [*filter(_is_missing, _SYSTEM)]}
    entry = RealEntry.find(binding)
    return answer | {
        "version": binding.version,
        "shared_object": str(binding.shared_object),
        "direct": not isinstance(entry, str),
        "reason": entry if isinstance(entry, str) else None,
    }


def _is_missing(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return True
    return False


async def _try_store(target: str | StoreConfig, timeout: float) -> dict[str, Any]:
    """Connect, store, look up, read and leave; tell how that went."""
    began = time.monotonic()
    answer: dict[str, Any] = {}
    try:
        async with LoopStallProbe() as stall:
            store = await connect(target, timeout=timeout)
            answer["connected"] = time.monotonic() - began
            try:
                left = max(1.0, timeout - answer["connected"])
                report = await store.warmup(WarmupPolicy(timeout=left))
                answer["tries"] = len(report.attempts)
                answer["seconds"] = report.attempts[-1].seconds
            finally:
                await store.aclose(timeout=2.0)
        answer["stall"] = stall.longest
    except MooncakeError as error:
        answer["error"] = str(error)
        answer["exit_code"] = exit_code(error)
        if isinstance(error, WarmupError) and error.diagnosis is not None:
            found = error.diagnosis
            answer["diagnosis"] = {
                "kind": str(found.kind),
                "text": found.explanation,
                "evidence": found.evidence,
                "cure": found.cure,
            }
    return answer


def _main() -> None:
    question = json.load(sys.stdin)
    tame_engine(shown=question["engine_log"])
    warnings.simplefilter("ignore")  # what they say is told by the answers
    if "timeout" not in question:
        answer = _look_at_engine()
    else:
        config = question["config"]
        target = StoreConfig(**config) if config is not None else question["target"]
        answer = asyncio.run(_try_store(target, question["timeout"]))
    print(json.dumps(answer), flush=True)  # noqa: T201  # this is its answer


if __name__ == "__main__":
    _main()
