"""Saving: from requests to blocks in the store."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from aiomooncake import InvalidArgumentError, MooncakeError
from examples.vllm_store_worker.blocks import Block, Keys, batches, told
from examples.vllm_store_worker.calls import Calls
from examples.vllm_store_worker.inbox import Inbox
from examples.vllm_store_worker.interface import ReqMeta
from examples.vllm_store_worker.ledger import SaveLedger, Saving

__all__ = ["Saver"]

log = logging.getLogger(__name__)

_NO_ROOM = -200
_EXISTS = -705
_HARMLESS = (0, _EXISTS, _NO_ROOM)  # after which the next blocks may be saved


@dataclass(slots=True, eq=False)
class _Save:
    """One save of a request.

    Attributes:
        saving: The request's saves.
        request: What is to be saved.
        blocks: What is not saved yet, as far as is known.
        codes: What came of each of them.
    """

    saving: Saving
    request: ReqMeta
    blocks: list[Block] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether some blocks could not be saved."""
        return min(self.codes, default=0) < 0


class Saver:
    """Saves blocks of requests, on a thread that calls :meth:`work`.

    Args:
        calls: The engine's calls.
        keys: The keys of blocks.
        label: Whose log lines these are.
    """

    def __init__(self, calls: Calls, keys: Keys, label: str) -> None:
        self._calls = calls
        self._keys = keys
        self._label = label
        self._inbox: Inbox[_Save] = Inbox()
        self._ledger = SaveLedger()

    def begin(self, requests: Sequence[ReqMeta]) -> None:
        """Queue requests; what comes too late is not saved."""
        saves = [_Save(self._ledger.begin(request.req_id), request) for request in requests]
        if not self._inbox.put(saves):
            self._end(saves)

    def take_finished(
        self, finished_req_ids: AbstractSet[str], preempted_req_ids: AbstractSet[str]
    ) -> set[str]:
        """Tell which finished requests have no more saves."""
        return self._ledger.take_finished(finished_req_ids, preempted_req_ids)

    def join(self, timeout: float) -> bool:
        """Wait until everything queued has ended; False after ``timeout`` seconds."""
        return self._inbox.join(timeout)

    def close(self) -> None:
        """Let the thread go; what it has not begun is not saved."""
        self._end(self._inbox.close())

    def work(self) -> None:
        """Save what is asked for, until it is closed."""
        while saves := self._inbox.take():
            try:
                for some in _once_each(saves):
                    self._save(some)
            except MooncakeError as exc:
                names = [save.saving.req_id for save in saves]
                log.warning("%s saving of %s failed: %s", self._label, names, exc)
            except Exception:
                log.exception("%s saving failed", self._label)
            finally:
                self._end(saves)
                self._inbox.done(saves)

    def _end(self, saves: Sequence[_Save]) -> None:
        for save in saves:
            self._ledger.end(save.saving)

    def _save(self, saves: Sequence[_Save]) -> None:
        tried = [save for save in saves if self._can_be_tried(save)]
        # What several requests want is saved from the blocks of the first one.
        wanted = {block.key: block for save in reversed(tried) for block in save.blocks}
        codes = self._write_missing(wanted) if wanted else {}
        for save in tried:
            save.codes = [codes[block.key] for block in save.blocks]
            if save.saving.gone:
                self._take_back(
                    [b.key for b in save.blocks if codes[b.key] == 0 and wanted[b.key] is b]
                )
        # Those that went well first: they tell that there is room, the others that there is none.
        for save in sorted(tried, key=lambda save: save.failed):
            self._settle(save)

    def _can_be_tried(self, save: _Save) -> bool:
        saving = save.saving
        if saving.gone or self._ledger.must_wait(saving):
            return False
        try:
            save.blocks = self._keys.to_save(save.request, saving.saved_tokens)
        except InvalidArgumentError as exc:
            log.warning("%s request %s is not saved: %s", self._label, saving.req_id, exc)
            return False
        return True

    def _write_missing(self, wanted: dict[str, Block]) -> dict[str, int]:
        """Save blocks unless their keys are there; a code for each key."""
        there = self._calls.exist("save_exists", list(wanted))
        codes = dict(zip(wanted, there, strict=True))
        missing = [block for key, block in wanted.items() if codes[key] == 0]
        trouble = 0
        for some in batches(missing, self._calls.at_once):
            # A peer or master that hangs would be waited for again and again.
            found = [trouble] * len(some) if trouble else self._calls.write(some)
            if any(found):
                for block, code in zip(some, found, strict=True):
                    codes[block.key] = 0 if code == _EXISTS else code
                trouble = min((code for code in found if code not in _HARMLESS), default=0)
        return codes

    def _settle(self, save: _Save) -> None:
        """Note what became of a save."""
        saving = save.saving
        if not save.failed:
            saving.saved_tokens = max(saving.saved_tokens, save.request.token_len_chunk)
            if 0 in save.codes and self._ledger.note_room():
                log.info("%s the store has room again, requests are saved further", self._label)
            return
        full = _NO_ROOM in save.codes
        if not full or self._ledger.note_full(saving):
            log.warning(
                "%s request %s: %d of %d blocks could not be saved: %s%s",
                self._label,
                saving.req_id,
                sum(code < 0 for code in save.codes),
                len(save.codes),
                told(save.codes),
                "; it is saved further when there is room" if full else "",
            )

    def _take_back(self, keys: list[str]) -> None:
        """Remove what was saved of a request whose blocks were taken away meanwhile.

        What was read from them may be another request's, and would be served for ever.
        """
        if keys:
            log.info("%s takes back %d blocks of a preempted request", self._label, len(keys))
            self._calls.remove(keys)

    def __repr__(self) -> str:
        return f"<Saver {self._label} {self._inbox!r} {self._ledger!r}>"


def _once_each(saves: Sequence[_Save]) -> Iterator[list[_Save]]:
    """Cut saves so that no request is there twice: a save begins where the last one ended."""
    part: dict[str, _Save] = {}
    for save in saves:
        if save.saving.req_id in part:
            yield list(part.values())
            part = {}
        part[save.saving.req_id] = save
    yield list(part.values())
