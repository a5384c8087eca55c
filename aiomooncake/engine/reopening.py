"""Open a client anew whose memory can't be trusted.

A transfer that reached the engine's own limit of 60 s stays queued and writes later: into memory
that was given back, or under a read of another key. Tear-down takes it off the queue, and one
native object has one life, so the client gets a new one. What lay in its own segment is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from aiomooncake.errors import code_name, rank_label

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.engine.lifecycle import Lifecycle
    from aiomooncake.engine.protocol import NativeStore

__all__ = ["Reopening"]

_FIRST_DELAY: Final = 0.1
_LONGEST_DELAY: Final = 2.0


class Reopening:
    """Gives one client a new native object, on a thread of its own, as often as it is needed.

    Args:
        client: The client.
        lifecycle: How its native objects are made and unmade.
    """

    def __init__(self, client: EngineClient, lifecycle: Lifecycle) -> None:
        self._client = client
        self._lifecycle = lifecycle
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def begin(self) -> None:
        """Open the client anew, unless that is under way; from any thread."""
        label = rank_label(self._client.rank) or "store"
        with self._lock:
            if self._stopped.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(
                target=self._run, name=f"aiomooncake-{label}-reopen", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Begin no more, and wait until what is under way has ended; not on its own thread."""
        with self._lock:
            self._stopped.set()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        client = self._client
        if not client.gate.pause():
            return  # it is closing
        began = time.monotonic()
        client.changed()
        prefix = f"[{rank_label(client.rank)}] " if client.rank is not None else ""
        client.log.warning(
            "%s%s: the store is opened anew, and calls fail until that is done",
            prefix,
            client.gate.tainted,
        )
        try:
            client.gate.drained(None)
            if self._stopped.is_set():
                return  # it is closing, which tears the object down
            client.visit("tear-down", self._lifecycle.tear_down, client.native_object)
            client.native = None
            client.no_late_writes()
            fresh = self._set_up()
        except Exception:
            client.log.exception(
                "%sthe store can't be opened anew: close it, and connect again", prefix
            )
            return
        if fresh is not None:
            client.renew(fresh)
            client.log.warning(
                "%sthe store is open again after %.1f s", prefix, time.monotonic() - began
            )

    def _set_up(self) -> NativeStore | None:
        """Set a new object up, however often that fails; None when the client closes."""
        client, delay = self._client, _FIRST_DELAY
        while not self._stopped.is_set():
            made: list[NativeStore] = []
            keep: Callable[[NativeStore], None] = made.append
            code: int = client.visit("setup", self._lifecycle.setup, keep)
            if code == 0:
                return made[-1]
            client.log.warning("opening a store anew failed: %d %s", code, code_name(code))
            for native in made:
                client.visit("tear-down", self._lifecycle.tear_down, native)
            self._stopped.wait(delay)
            delay = min(delay * 2, _LONGEST_DELAY)
        return None
