"""Notice that the master is away, and that it is back.

A request to a master that is frozen or gone fails after seconds, so after the first such failure
was confirmed, calls of the store fail at once, until the master answers again. A thread watches for
that, and only while there is something to watch for.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from aiomooncake._codes import RPC_CODES
from aiomooncake.engine.knock import answers
from aiomooncake.errors import MooncakeError, RpcError, rank_label

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.engine.protocol import NativeStore

__all__ = ["MasterWatch"]

_NO_HANDLE: Final = -200
_FIRST_DELAY: Final = 0.05
_LONGEST_DELAY: Final = 1.0
_PING_TIME: Final = 3.0
_PATROL: Final = 1.0
_MOUNTING: Final = 10.0
"""Seconds after which a master without room is full, and not new: clients mount again in one."""
_QUIET: Final = 1.0
"""Seconds after a look that found nothing, in which further failures are not looked into."""
_STALE: Final = 64
_QUICK: Final = 0.1
"""Requests that may fail so quickly, one after the other, before a master that listens is away."""
_PROBE: Final = b"aiomooncake"

Presence = Literal["there", "away", "mounting"]


class MasterWatch:
    """Whether the master of one store is there; safe from any thread.

    Args:
        client: The client, for trial calls.
        master: Host and port to knock at first; None when they are not known.
        who: What to call it in messages, such as "the master 10.0.0.1:50051".
        fail_fast: Refuse calls while it is away.

    Attributes:
        presence: ``"there"``, ``"away"``, or ``"mounting"``: back, but there is no segment yet.
        since: When that began, as ``time.time()``.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        master: tuple[str, int] | None,
        who: str,
        fail_fast: bool,
    ) -> None:
        self.presence: Presence = "there"
        self.since = time.time()
        self._client = client
        self._master = master
        self.who = who
        self._fail_fast = fail_fast
        self._lock = threading.Lock()
        self._seen = 0.0
        self._watching = False
        self._quiet_until = 0.0
        self._stopped = threading.Event()

    def suspect(self) -> None:
        """Look whether the master is there, since a request to it failed."""
        if self._busy() or time.monotonic() < self._quiet_until:
            return
        with self._lock:
            if self._busy():
                return
            self._watching = True
        label = rank_label(self._client.rank) or "store"
        threading.Thread(target=self._watch, name=f"aiomooncake-{label}-watch", daemon=True).start()

    def _busy(self) -> bool:
        return self._watching or self._stopped.is_set()

    def patrol(self) -> None:
        """Look at the engine's pings once a second, so that an idle store notices an outage too."""
        label = rank_label(self._client.rank) or "store"
        threading.Thread(
            target=self._patrol, name=f"aiomooncake-{label}-patrol", daemon=True
        ).start()

    def _patrol(self) -> None:
        while not self._stopped.wait(_PATROL):
            if self._try(lambda native: native.health_check()) != 0 and not self.just_seen:
                self.suspect()

    def refusal(self, name: str) -> RpcError:
        """Make the error of a call that need not be tried."""
        return RpcError(
            f"{name} refused: {self.who} has not answered for {time.time() - self.since:.1f} s, "
            "and calls fail at once until it does. Start it, or look whether it is frozen; "
            "await store.warmup() to know when it serves again",
            code=RPC_CODES[0],
            rank=self._client.rank,
        )

    @property
    def just_seen(self) -> bool:
        """Whether it answered within the last seconds; the engine's pings are not so quick."""
        return time.monotonic() - self._seen < _PING_TIME

    def stop(self) -> None:
        """Watch no longer: the store closes."""
        self._stopped.set()

    # ------------------------------------------------------------------ the watching thread

    def _watch(self) -> None:
        try:
            while not self._stopped.is_set():
                if not self._answers():
                    self._turn("away")
                    self._wait_until(self._answers)
                if self._settles():
                    return
        finally:
            if not self._stopped.is_set():
                self._turn("there")
            with self._lock:
                self._quiet_until = time.monotonic() + _QUIET
                self._watching = False

    def _wait_until(self, come: Callable[[], bool]) -> None:
        delay = _FIRST_DELAY
        while not self._stopped.wait(delay) and not come():
            delay = min(delay * 2, _LONGEST_DELAY)

    def _turn(self, presence: Presence) -> None:
        if presence == self.presence:
            return
        waited = time.time() - self.since
        was, self.presence, self.since = self.presence, presence, time.time()
        self._client.gate.away = self.refusal if presence == "away" and self._fail_fast else None
        prefix = f"[{rank_label(self._client.rank)}] " if self._client.rank is not None else ""
        if presence == "away":
            self._client.log.warning(
                "%s%s does not answer: calls fail until it does", prefix, self.who
            )
        elif was == "away":
            self._client.log.warning("%s%s answers again after %.1f s", prefix, self.who, waited)
        self._client.changed()

    def _answers(self) -> bool:
        """Knock at its port, which is quick, and then make a request."""
        if self._master is not None and not answers(self._master):
            return False
        # Each request finds another one of the engine's connections, and those that a restart or a
        # broken line has reset fail at once, one after the other: that is no news of the master.
        for _ in range(_STALE if self._master is not None else 1):
            began = time.monotonic()
            if self._try(lambda native: native.is_exist(_probe_key())) not in RPC_CODES:
                self._seen = time.monotonic()
                return True
            if time.monotonic() - began > _QUICK:
                break
        return False

    def _settles(self) -> bool:
        """Wait until there is room for a value again; False when the master is away again.

        A restarted master has none until its clients have mounted their segments. A full one has
        none either, with the same code, so that the wait is bounded.
        """
        deadline = time.monotonic() + _MOUNTING
        delay = _FIRST_DELAY
        while not self._stopped.is_set():
            key = _probe_key()
            code = self._try(partial(_put, key))
            if code == 0:
                self._try(partial(_remove, key))
            if code in RPC_CODES:
                return False
            if code != _NO_HANDLE or time.monotonic() > deadline:
                break
            self._turn("mounting")
            self._stopped.wait(delay)
            delay = min(delay * 2, _LONGEST_DELAY)
        return True

    def _try(self, call: Callable[[NativeStore], int]) -> int:
        client = self._client
        try:
            return client.ask("probe", lambda: call(client.native_object))
        except MooncakeError:
            return 0  # the store closes, or is tainted: it is not the master's fault


def _put(key: str, native: NativeStore) -> int:
    return native.put(key, _PROBE)


def _remove(key: str, native: NativeStore) -> int:
    return native.remove(key, True)  # its name differs from wheel to wheel


def _probe_key() -> str:
    return f"aiomooncake-probe-{uuid.uuid4().hex}"
