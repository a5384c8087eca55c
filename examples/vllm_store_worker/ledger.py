"""Which requests are being saved, how far, and which must wait for room in the store."""

from __future__ import annotations

import threading
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

__all__ = ["SaveLedger", "Saving"]


@dataclass(slots=True, eq=False)
class Saving:
    """The saves of one request.

    Attributes:
        req_id: The request.
        jobs: Saves that are queued or under way.
        saved_tokens: How far everything is saved; the next save begins there, so that what was
            skipped or failed is tried again.
        skipped: The store had no room for it.
        finished: The scheduler has no more for it.
        gone: Its blocks were taken away: what lies in them now may be another request's.
    """

    req_id: str
    jobs: int = 0
    saved_tokens: int = 0
    skipped: bool = False
    finished: bool = False
    gone: bool = False


class SaveLedger:
    """The saves of a worker; safe from any thread.

    When the store has no room (-200), the request it had none for is not saved further until any
    other save succeeds: a full store is asked no more than once per request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._savings: dict[str, Saving] = {}
        self._full = False

    def begin(self, req_id: str) -> Saving:
        """Note a save that is queued."""
        with self._lock:
            saving = self._savings.setdefault(req_id, Saving(req_id))
            saving.jobs += 1
            return saving

    def end(self, saving: Saving) -> None:
        """Note that a save is over, whatever came of it."""
        with self._lock:
            saving.jobs -= 1

    def must_wait(self, saving: Saving) -> bool:
        """Tell whether the store is full, and had no room for this request before."""
        with self._lock:
            return self._full and saving.skipped

    def note_full(self, saving: Saving) -> bool:
        """Note that there was no room for a request; True if that is news."""
        with self._lock:
            self._full = True
            news, saving.skipped = not saving.skipped, True
            return news

    def note_room(self) -> bool:
        """Note that a save succeeded; True if the store was full before."""
        with self._lock:
            was_full, self._full = self._full, False
            if was_full:
                for saving in self._savings.values():
                    saving.skipped = False
            return was_full

    def take_finished(
        self, finished_req_ids: AbstractSet[str], preempted_req_ids: AbstractSet[str]
    ) -> set[str]:
        """Tell which finished requests have no more saves, so that their blocks can be freed."""
        with self._lock:
            for req_id in preempted_req_ids:
                self._forget(req_id)
            for req_id in finished_req_ids & self._savings.keys():
                self._savings[req_id].finished = True
            done = {one.req_id for one in self._savings.values() if one.finished and not one.jobs}
            for req_id in done:
                self._forget(req_id)
            return done

    def _forget(self, req_id: str) -> None:
        saving = self._savings.pop(req_id, None)
        if saving is not None:
            saving.gone = True

    def __repr__(self) -> str:
        return f"<SaveLedger of {len(self._savings)} requests{', full' if self._full else ''}>"
