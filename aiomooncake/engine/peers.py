"""Notice that a peer does not answer, and that it does again.

A transfer to a frozen peer costs seconds and a core. So after the first one that took long or
failed, the peer is knocked at. While it does not answer, gets of values whose first copy it holds
fail at once (the engine reads no other), and values are stored elsewhere. Calls that wait for a
first word of such a peer are told that it won't come (:mod:`aiomooncake.engine.handshakes`). A
thread knocks, and only while there is somebody to knock at.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import anyio

from aiomooncake.engine.handshakes import break_off
from aiomooncake.errors import rank_label
from aiomooncake.master import probe_alive, segments

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient

__all__ = ["PeerWatch"]

_PROBE_TIMEOUT: Final = 1.0
_PAUSE: Final = 1.0
_STEP: Final = 0.02
_SHARE: Final = 10
"""Of its time the thread spends one part in so many on looking for handshakes."""

_FORGET_AFTER: Final = 60.0
"""Seconds after which a peer is given up where nobody tells that its segment is gone."""

_QUIET: Final = 1.0
"""Seconds after a look that found nothing, in which it is not looked again."""


class PeerWatch:
    """Which peers of one store do not answer; safe from any thread.

    Args:
        client: The client.
        metrics: Host and port of the master's HTTP server, which knows all segments; None when it
            is not known: then values can't be kept off a peer.

    Attributes:
        stuck: End points that do not answer, and since when (``time.time()``).
        elsewhere: Names of the segments of peers that do answer, while others do not.
        asking: Whether the master is being asked who holds the values of a slow read.
        stopped: Set when the store closes.
    """

    def __init__(self, client: EngineClient, metrics: tuple[str, int] | None) -> None:
        self.stuck: Mapping[str, float] = {}
        self.elsewhere: tuple[str, ...] = ()
        self.asking = False
        self._client = client
        self._metrics = metrics
        self._lock = threading.Lock()
        self._suspects: set[str] = set()
        self._all = False
        self._watching = False
        self._quiet_until = 0.0
        self.stopped = threading.Event()

    def suspect(self, endpoints: Iterable[str]) -> None:
        """Knock at peers to which a transfer failed or takes long."""
        with self._lock:
            self._suspects.update(endpoints)
        self._begin()

    def suspect_all(self) -> None:
        """Knock at all peers, since a value could not be stored, and nobody says on whom."""
        with self._lock:
            self._all = self._metrics is not None
        self._begin()

    def stop(self) -> None:
        """Watch no longer: the store closes."""
        self.stopped.set()

    @property
    def wants_news(self) -> bool:
        """Whether a suspicion would be looked into."""
        quiet = not self._watching and time.monotonic() < self._quiet_until
        return not (quiet or self.stopped.is_set())

    def _begin(self) -> None:
        with self._lock:
            if self._watching or not self.wants_news or not (self._suspects or self._all):
                return
            self._watching = True
        label = rank_label(self._client.rank) or "store"
        thread = threading.Thread(
            target=self._watch, name=f"aiomooncake-{label}-peers", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # there are too many threads: the next suspicion tries again
            self._watching = False

    def _watch(self) -> None:
        try:
            while not self.stopped.is_set():
                anyio.run(self._look)
                if not self.stuck:
                    return
                self._pause()
        finally:
            self.stuck, self.elsewhere = {}, ()  # nobody would look at them any more
            with self._lock:
                self._suspects.clear()
                self._all = False
                self._quiet_until = time.monotonic() + _QUIET
                self._watching = False

    def _pause(self) -> None:
        """Wait for the next look, while no call waits for a peer that does not answer."""
        until, step = time.monotonic() + _PAUSE, _STEP
        while time.monotonic() < until and not self.stopped.wait(step):
            if self._client.gate.in_flight:  # it may wait for as many first words as it has keys
                began = time.monotonic()
                break_off(self.stuck)
                step = max(_STEP, _SHARE * (time.monotonic() - began))

    async def _look(self) -> None:
        names: dict[str, str] = {}
        if self._metrics is not None:
            with contextlib.suppress(OSError):  # the master is away: the peers may be there
                found = await segments(*self._metrics, _PROBE_TIMEOUT)
                names = {each.endpoint: each.name for each in found if each.status == "OK"}
        long_ago = time.time() - _FORGET_AFTER
        with self._lock:
            suspects, self._suspects = self._suspects, set()
            wanted = suspects | {peer for peer, at in self.stuck.items() if at > long_ago}
            if self._all:
                wanted |= set(names)
        if names:
            wanted &= set(names)  # the segments of the others are gone
            # This process may be too busy to answer itself in time; it is no peer.
            wanted -= {peer for peer, name in names.items() if name == self._client.hostname}
        silent: set[str] = set()

        async def knock(endpoint: str) -> None:
            host, _, port = endpoint.rpartition(":")
            try:
                await probe_alive(host.strip("[]"), int(port), _PROBE_TIMEOUT)
            except (OSError, ValueError):
                silent.add(endpoint)

        async with anyio.create_task_group() as group:
            for endpoint in wanted:
                group.start_soon(knock, endpoint)
        self._note(silent, names)

    def _note(self, silent: set[str], names: Mapping[str, str]) -> None:
        before, now = self.stuck, time.time()
        healthy = [name for endpoint, name in names.items() if endpoint not in silent]
        random.shuffle(healthy)
        self.elsewhere = tuple(healthy) if silent else ()
        self.stuck = {endpoint: before.get(endpoint, now) for endpoint in silent}
        prefix = f"[{rank_label(self._client.rank)}] " if self._client.rank is not None else ""
        for endpoint in silent - before.keys():
            self._client.log.warning(
                "%sthe peer %s does not answer, and is avoided until it does", prefix, endpoint
            )
        for endpoint in before.keys() - silent:
            self._client.log.warning("%sthe peer %s answers again", prefix, endpoint)
        if before.keys() != silent:
            self._client.changed()

    def __repr__(self) -> str:
        return f"<PeerWatch stuck={list(self.stuck)}>"
