"""Try a store until it really stores and reads, or say why it never will.

A Transfer Engine that was set up a moment ago may refuse its first put: no segment is mounted yet,
a peer is not reachable yet. So one value is written, looked up and read back, again and again with
pauses, until all three steps go well. What waiting can't mend is diagnosed and raised at once.
"""

from __future__ import annotations

import asyncio
import math
import os
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio

from aiomooncake._codes import RPC_CODES
from aiomooncake._pace import Pace
from aiomooncake._policy import (
    Step,
    WarmupAttempt,
    WarmupPolicy,
    WarmupProgress,
    WarmupReport,
)
from aiomooncake._verdict import Diagnosis, DiagnosisKind
from aiomooncake.diagnosis import diagnose
from aiomooncake.errors import (
    InvalidArgumentError,
    MooncakeError,
    TooManyAbandonedError,
    WarmupError,
    code_name,
    rank_label,
)
from aiomooncake.observe.logs import StoreLog

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractAsyncContextManager

    from aiomooncake.buffers import Buffer
    from aiomooncake.config import StoreConfig

__all__ = [
    "Diagnosis",
    "DiagnosisKind",
    "Pace",
    "WarmupAttempt",
    "WarmupPolicy",
    "WarmupProgress",
    "WarmupReport",
    "WarmupTarget",
    "warm_up",
]

_REMOVE_TIMEOUT: Final = 1.0
"""Seconds that taking a probe's key away may cost; its lease would end it anyway."""

_INVALID_PARAMS: Final = -600
_RPC_FAIL: Final = -900
_TRANSFER_FAIL: Final = -800
_HOPELESS_CODES: Final = frozenset({_INVALID_PARAMS, -1700, -1701})
"""Codes that may be permanent and are told so without asking anybody."""

# The loop keeps only weak references to tasks, and a probe that hangs in the engine outlives the
# warm-up that gave up on it, with the memory that it names. Each one leaves when it has ended.
_probes_by_memory: set[asyncio.Task[None]] = set()


class WarmupTarget(Protocol):
    """What a warm-up needs of a store."""

    @property
    def rank(self) -> int | str | None:
        """The rank that log lines and errors name."""
        ...

    @property
    def hostname(self) -> str:
        """The store's own address."""
        ...

    @property
    def config(self) -> StoreConfig | None:
        """What the store was set up with; None if nobody told us (an adopted one)."""
        ...

    @property
    def engine(self) -> Any:
        """The awaitable mirror of the binding: its own arguments, its own codes."""
        ...

    def allocate(self, nbytes: int) -> AbstractAsyncContextManager[Buffer]:
        """Make registered memory."""
        ...

    def discard(self, key: str) -> None:
        """Take a key away in the background, by force; nobody hears how that ends."""
        ...


async def warm_up(
    target: WarmupTarget,
    policy: WarmupPolicy,
    *,
    on_attempt: Callable[[WarmupProgress], object] | None = None,
    pace: Pace | None = None,
) -> WarmupReport:
    """Try the store until a put, a look-up and a read of one value all go well.

    Args:
        target: The store.
        policy: How long and how often.
        on_attempt: Called after each attempt, also the successful one; what it raises is logged.
        pace: Shared by ranks that warm up together.

    Returns:
        The history of a warm-up that went well.

    Raises:
        WarmupError: The bounds are used up, or waiting can't help; it carries the attempts and a
            diagnosis.
        MooncakeError: The store itself refused a call (closed, forked, another loop …).
    """
    if not isinstance(policy, WarmupPolicy):
        raise InvalidArgumentError(
            f"warmup takes a WarmupPolicy, not {type(policy).__name__}", rank=target.rank
        )
    pace = pace or Pace()
    with pace.joined():
        return await _WarmUp(target, policy, on_attempt, pace).run()


@dataclass(slots=True)
class _Probe:
    """One attempt while it runs; the step is what a time-out is blamed on."""

    key: str
    value: bytes
    step: Step = "put"
    code: int | None = None
    name: str = "TIMEOUT"

    def end(self, code: int | None, name: str = "") -> None:
        """Note why this step failed."""
        self.code = code
        self.name = name or code_name(code or 0)

    def check_exists(self, answer: int) -> bool:
        if answer != 1:
            self.end(answer, "" if answer else "NOT_FOUND")
        return answer == 1

    def check_value(self, value: bytes) -> None:
        if value == self.value:
            self.step, self.code, self.name = "done", 0, "OK"
        else:
            self.end(None, "WRONG_DATA" if value else "NO_DATA")


class _WarmUp:
    """The warm-up of one store."""

    def __init__(
        self,
        target: WarmupTarget,
        policy: WarmupPolicy,
        on_attempt: Callable[[WarmupProgress], object] | None,
        pace: Pace,
    ) -> None:
        self._target = target
        self._policy = policy
        self._on_attempt = on_attempt
        self._pace = pace
        self._attempts: list[WarmupAttempt] = []
        self._time = asyncio.get_running_loop().time
        self._started = self._time()
        self._deadline = math.inf if policy.timeout is None else self._started + policy.timeout
        config = target.config
        self._by_memory = config is not None and (
            config.local_buffer_size == 0 or config.client_server_address is not None
        )
        self._suspicions = 0
        self.log = StoreLog(target.rank, target.hostname)
        label = rank_label(target.rank)
        self._prefix = f"[{label}] " if label else ""

    async def run(self) -> WarmupReport:
        """Try, wait and try again."""
        delay = self._policy.initial_delay
        while True:
            news = self._pace.news
            attempt, key = await self._try(
                min(self._policy.attempt_timeout, self._deadline - self._time())
            )
            if attempt.ok:
                seconds = self._time() - self._started
                self._pace.succeeded(self._policy)
                self._record(attempt, f"ready after {seconds:.1f}s")
                self._warn_of_luck()
                await self._remove(key)
                target = self._target
                return WarmupReport(target.rank, target.hostname, tuple(self._attempts), seconds)
            if attempt.step in {"exists", "get"} and not _master_is_lost(attempt):
                await self._remove(key)
            diagnosis = await self._permanent(attempt)
            wait = None if diagnosis or self._is_last(attempt) else self._reserve(delay)
            if wait is None:
                self._record(attempt, "giving up")
                raise await self._failed(attempt, diagnosis)
            self._record(replace(attempt, delay=wait), f"retrying in {wait:.1f}s")
            waiting_since = self._time()
            await self._pace.wait(news, wait)
            self._attempts[-1] = replace(attempt, delay=self._time() - waiting_since)
            delay = min(delay * self._policy.backoff, self._policy.max_delay)

    def _warn_of_luck(self) -> None:
        """Say that a success after failed transfers was a matter of where the value was placed."""
        failed = sum(attempt.code == _TRANSFER_FAIL for attempt in self._attempts)
        if failed:
            self.log.warning(
                "%sready, but %d of %d tries failed with TRANSFER_FAIL: a peer is listed that "
                "can't be reached, and puts that are placed on it will fail; look for a client "
                "that died a moment ago, is frozen, or has a wrong local_hostname",
                self._prefix,
                failed,
                len(self._attempts),
            )

    def _reserve(self, delay: float) -> float | None:
        return self._pace.reserve(delay, self._policy, self._deadline)

    def _is_last(self, attempt: WarmupAttempt) -> bool:
        return attempt.number == self._policy.max_attempts or attempt.name == "TOO_MANY_ABANDONED"

    # -- one attempt -----------------------------------------------------------------------------

    async def _try(self, bound: float) -> tuple[WarmupAttempt, str]:
        """Make one attempt with a new key: a half-written one would answer 0 for ever."""
        began = self._time()
        probe = _Probe(
            self._policy.key_prefix + uuid.uuid4().hex, _distinct_bytes(self._policy.value_size)
        )
        try:
            if self._by_memory:
                await _bounded(self._probe_by_memory(probe), bound)
            else:
                with anyio.move_on_after(bound):
                    await self._probe_by_value(probe)
        except TooManyAbandonedError:
            # Our own attempts hang in the engine: the diagnosis tells more than this error does.
            probe.end(None, "TOO_MANY_ABANDONED")
        except asyncio.CancelledError:
            self._target.discard(probe.key)
            raise
        number = len(self._attempts) + 1
        seconds = self._time() - began
        return WarmupAttempt(number, probe.step, probe.code, probe.name, seconds), probe.key

    async def _probe_by_value(self, probe: _Probe) -> None:
        engine = self._target.engine
        code = int(await engine.put(probe.key, probe.value))
        if code != 0:
            # An adopted store may be set up without a local buffer, and nobody told us.
            self._by_memory = code == _INVALID_PARAMS and self._target.config is None
            return probe.end(code)
        probe.step = "exists"
        if probe.check_exists(int(await engine.is_exist(probe.key))):
            probe.step = "get"
            probe.check_value(await engine.get(probe.key))
        return None

    async def _probe_by_memory(self, probe: _Probe) -> None:
        """Do the same by registered memory, which needs no local buffer."""
        engine, size = self._target.engine, len(probe.value)
        probe.step = "register"
        try:
            async with self._target.allocate(2 * size) as memory:
                address, view = memory.address, memory.view
                assert view is not None  # noqa: S101  # it is memory of our own
                view[:size] = probe.value
                probe.step = "put"
                code = int(await engine.put_from(probe.key, address, size))
                if code != 0:
                    return probe.end(code)
                probe.step = "exists"
                if probe.check_exists(int(await engine.is_exist(probe.key))):
                    probe.step = "get"
                    got = int(await engine.get_into(probe.key, address + size, size))
                    if got < 0:
                        return probe.end(got)
                    probe.check_value(bytes(view[size : size + got]))
        except MooncakeError as error:
            if error.code is None:
                raise
            return probe.end(error.code)
        except asyncio.CancelledError:  # left behind, and the engine has let go of the memory
            self._target.discard(probe.key)
            raise
        return None

    async def _remove(self, key: str) -> None:
        """Take a probe's key away, by force since reading has leased it; not worth a failure."""
        bound = min(_REMOVE_TIMEOUT, self._policy.attempt_timeout)
        try:
            with anyio.move_on_after(bound):
                code = int(await self._target.engine.remove(key, True))
                self.log.debug("%sWarmup key removed, ret=%d", self._prefix, code)
        except MooncakeError as error:
            self.log.debug("%sWarmup key not removed: %s", self._prefix, type(error).__name__)
        except asyncio.CancelledError:
            self._target.discard(key)
            raise

    # -- why -------------------------------------------------------------------------------------

    async def _permanent(self, attempt: WarmupAttempt) -> Diagnosis | None:
        """Return the diagnosis of a fault that no waiting mends, or None."""
        if not self._looks_permanent(attempt):
            return None
        diagnosis = await self._diagnose(attempt)
        return diagnosis if diagnosis.permanent else None

    def _looks_permanent(self, attempt: WarmupAttempt) -> bool:
        if attempt.code in _HOPELESS_CODES:
            config = self._target.config
            if attempt.code != _INVALID_PARAMS:
                return True
            return config is not None and 0 < config.local_buffer_size < self._policy.value_size
        if attempt.code == _RPC_FAIL and attempt.step == "put":
            # Asking costs calls, so not after each attempt: after the 1st, 2nd, 4th, 8th … such.
            self._suspicions += 1
            return self._suspicions & (self._suspicions - 1) == 0
        return False

    async def _diagnose(self, attempt: WarmupAttempt) -> Diagnosis:
        return await diagnose(
            self._target,
            step=attempt.step,
            code=attempt.code,
            value_size=self._policy.value_size,
            put_again=self._put_again,
        )

    async def _put_again(self) -> int | None:
        """Make one more attempt for the diagnosis, and return what its put answered."""
        attempt, key = await self._try(self._policy.attempt_timeout)
        if attempt.step != "put":
            await self._remove(key)
            return 0
        return attempt.code

    async def _failed(self, attempt: WarmupAttempt, diagnosis: Diagnosis | None) -> WarmupError:
        seconds = self._time() - self._started
        diagnosis = diagnosis or await self._diagnose(self._telling(attempt))
        number = attempt.number
        return WarmupError(
            f"Warmup failed after {number} attempt{'' if number == 1 else 's'} in {seconds:.1f} s: "
            f"last {attempt}. Diagnosis: {diagnosis}.",
            code=attempt.code,
            rank=self._target.rank,
            attempts=self._attempts,
            diagnosis=diagnosis,
        )

    def _telling(self, last: WarmupAttempt) -> WarmupAttempt:
        """Find the attempt to diagnose: one that the end of the time cut off tells nothing."""
        if last.name != "TIMEOUT" or last.seconds >= min(1.0, self._policy.attempt_timeout):
            return last
        whole = (each for each in reversed(self._attempts) if each.name != "TIMEOUT")
        return next(whole, last)

    # -- who is told -----------------------------------------------------------------------------

    def _record(self, attempt: WarmupAttempt, then: str) -> None:
        """Keep an attempt, log it and show it to the hook."""
        self._attempts.append(attempt)
        target = self._target
        fields = {
            "mooncake_attempt": attempt.number,
            "mooncake_code": attempt.code,
        }
        if attempt.ok:
            self.log.info(
                "%sWarmup done (attempt %d), %s", self._prefix, attempt.number, then, extra=fields
            )
        else:
            ret = attempt.name if attempt.code is None else f"{attempt.code} {attempt.name}"
            self.log.warning(
                "%sWarmup %s failed (attempt %d), ret=%s, %s",
                self._prefix, attempt.step, attempt.number, ret, then,
                extra=fields,
            )  # fmt: skip
        if self._on_attempt is not None:
            try:
                self._on_attempt(WarmupProgress(target.rank, target.hostname, attempt))
            except Exception:
                self.log.exception("%sThe on_attempt hook of the warm-up failed", self._prefix)


async def _bounded(probe: Coroutine[Any, Any, None], seconds: float) -> None:
    """Run a probe that names memory, and leave it behind when its time is up.

    A call that names memory is drained before a cancellation goes on, which may take as long as the
    engine likes; a cancel scope around it would wait for that.
    """
    task = asyncio.ensure_future(probe)
    _probes_by_memory.add(task)
    task.add_done_callback(_forget)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
    if task.done():
        task.result()


def _forget(task: asyncio.Task[None]) -> None:
    """Let a probe go; of one that was left behind, nobody is there to be told how it ended."""
    _probes_by_memory.discard(task)
    if not task.cancelled():
        task.exception()


def _master_is_lost(attempt: WarmupAttempt) -> bool:
    """Whether a further call to the master would only hang or fail as this attempt did."""
    return attempt.code in RPC_CODES or (attempt.step == "exists" and attempt.code is None)


def _distinct_bytes(size: int) -> bytes:
    """Return bytes that no other attempt has, at the price of one small random block."""
    block = os.urandom(min(size, 4096))
    return (block * -(-size // len(block)))[:size]
