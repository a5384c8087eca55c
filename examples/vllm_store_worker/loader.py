"""Loading: from requests to blocks in the cache."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

from aiomooncake import InvalidArgumentError, MooncakeError
from examples.vllm_store_worker.blocks import Block, Keys, told
from examples.vllm_store_worker.calls import Calls
from examples.vllm_store_worker.inbox import Inbox
from examples.vllm_store_worker.interface import ReqMeta

__all__ = ["Loader"]

log = logging.getLogger(__name__)

_KEPT_APART = 5.0  # seconds after a peer did not answer

_NOT_READY = -703
_NOT_FOUND = -704
_LEASE_EXPIRED = -707
_TRANSFER_FAIL = -800
_MISSES = (_NOT_FOUND, _NOT_READY)


class _Load:
    """A request that loads, and which of its blocks are not proven to be loaded."""

    def __init__(self, request: ReqMeta, keys: Keys) -> None:
        self.req_id = request.req_id
        self.codes: list[int] = []  # of blocks that failed
        self.stopped = False  # there is no use in trying the others
        self.ended = False
        self.reason = ""
        self.blocks: list[Block] = []
        try:
            self.blocks = keys.to_load(request)
        except InvalidArgumentError as exc:
            self.missing = set(request.block_ids)
            self.reason = str(exc)
        else:
            self.missing = {block.block_id for block in self.blocks}
        self.untried = len(self.blocks)

    @property
    def settled(self) -> bool:
        """Whether none of its blocks will be tried any more."""
        return self.stopped or not self.untried

    def why(self) -> str:
        """Say what went wrong."""
        untried = self.untried if self.stopped else 0
        reasons = [told(self.codes), self.reason, f"{untried} not tried" if untried else ""]
        return "; ".join(filter(None, reasons))


class Loader:
    """Loads blocks for requests, on threads that call :meth:`work`.

    Whatever happens, each request is told as finished, and each block that was not proven to be
    loaded as failed.

    Args:
        calls: The engine's calls.
        keys: The keys of blocks.
        label: Whose log lines these are.
    """

    def __init__(self, calls: Calls, keys: Keys, label: str) -> None:
        self._calls = calls
        self._keys = keys
        self._label = label
        self._inbox: Inbox[ReqMeta] = Inbox()
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed: set[int] = set()

    def begin(self, requests: Sequence[ReqMeta]) -> None:
        """Queue requests; those that come too late fail."""
        if not self._inbox.put(requests):
            self._fail(requests)

    def take_finished(self) -> set[str]:
        """Tell which requests have ended since the last time, well or not."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Tell which blocks could not be loaded since the last time."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """Let the threads go; what they have not begun fails."""
        self._fail(self._inbox.close())

    def work(self) -> None:
        """Load what is asked for, until it is closed."""
        while requests := self._inbox.take():
            try:
                self._load(requests)
            finally:
                self._inbox.done(requests)

    def _load(self, requests: Sequence[ReqMeta]) -> None:
        loads = [_Load(request, self._keys) for request in requests]
        try:
            for some in self._batches(loads):
                self._read(some)
                # The next call may be stuck, which is nothing to those that are not in it.
                for load in loads:
                    if load.settled:
                        self._end(load)
        except Exception as exc:  # whatever it is, the requests must hear of it
            for load in loads:
                load.reason = str(exc)
            if not isinstance(exc, MooncakeError):
                log.exception("%s loading failed", self._label)
        finally:
            for load in loads:
                self._end(load)

    def _batches(self, loads: Sequence[_Load]) -> Iterator[list[tuple[_Load, Block]]]:
        """Put the blocks of all loads into calls of the engine.

        A key is there once: given twice, it would be read to one place only.
        """
        batch: dict[str, tuple[_Load, Block]] = {}
        for load in loads:
            for block in load.blocks:
                if len(batch) == self._calls.at_once or block.key in batch:
                    yield list(batch.values())
                    batch = {}
                if load.stopped:
                    break
                batch[block.key] = (load, block)
        if batch:
            yield list(batch.values())

    def _read(self, batch: Sequence[tuple[_Load, Block]]) -> None:
        codes = self._calls.read([block for _, block in batch])
        late = [place for place, code in enumerate(codes) if code == _LEASE_EXPIRED]
        if late and len(late) < len(batch):
            # They are there, but others in the call took too long.
            again = self._calls.read([batch[place][1] for place in late])
            for place, code in zip(late, again, strict=True):
                codes[place] = code
        if _TRANSFER_FAIL in codes:
            self._inbox.keep_apart(_KEPT_APART)
        for (load, block), code in zip(batch, codes, strict=True):
            load.untried -= 1
            if code > 0:
                load.missing.discard(block.block_id)
            else:
                load.codes.append(code)
                load.stopped |= code not in _MISSES

    def _end(self, load: _Load) -> None:
        if load.ended:
            return
        load.ended = True
        if load.missing or load.reason:
            log.warning(
                "%s request %s: %d of %d blocks could not be loaded: %s",
                self._label,
                load.req_id,
                len(load.missing),
                len(load.blocks),
                load.why(),
            )
        with self._lock:
            self._failed |= load.missing
            self._finished.add(load.req_id)

    def _fail(self, requests: Sequence[ReqMeta]) -> None:
        for request in requests:
            load = _Load(request, self._keys)
            load.reason = load.reason or "the worker is closed"
            self._end(load)

    def __repr__(self) -> str:
        return f"<Loader {self._label} {self._inbox!r}>"
