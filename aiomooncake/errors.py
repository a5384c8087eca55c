"""Every error of the library: one root, one class per kind of trouble.

Each class also derives from the builtin that fits, so that ``except TimeoutError`` and the like
work. :data:`CODES` maps the engine's integers to a class and to what can be done about it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from errno import EACCES, EIO, ENOSPC, ENOTCONN, ETIMEDOUT
from typing import Any, ClassVar, Final

from aiomooncake._codes import CODES, CodeInfo, code_name

__all__ = [
    "CODES",
    "BatchError",
    "BufferTooSmallError",
    "ChecksumError",
    "ClusterError",
    "CodeInfo",
    "ConfigError",
    "EngineNotInstalledError",
    "ForkedProcessError",
    "InternalError",
    "InvalidArgumentError",
    "LeaseExpiredError",
    "MetadataError",
    "MooncakeError",
    "NoSpaceError",
    "NotSupportedError",
    "ObjectExistsError",
    "ObjectLeasedError",
    "ObjectNotFoundError",
    "ObjectNotReadyError",
    "OffloadError",
    "OperationTimeoutError",
    "ReplicaError",
    "RpcError",
    "RpcTimeoutError",
    "SegmentError",
    "SerializationError",
    "SetupError",
    "SetupTimeoutError",
    "StoreClosedError",
    "TaintedStoreError",
    "TaskError",
    "TenantError",
    "TooManyAbandonedError",
    "TransferError",
    "UnavailableError",
    "WarmupError",
    "WrongLoopError",
    "code_name",
    "error_from_code",
    "rank_label",
    "shorten_key",
]

_MAX_KEY: Final = 80
"""Characters of a key that a message shows; the attribute keeps all of them."""

_UNKNOWN: Final = "This engine is newer than the library: look the code up in upstream's types.h."

_SHOWN_FAILURES: Final = 3
"""Failed keys that the message of a :class:`BatchError` names."""


class MooncakeError(Exception):
    """The root of every error this library raises.

    Args:
        message: what happened, to what, and what to do next. ``[TP3]`` is put before it when a
            rank is given.
        code: the engine's integer, if the engine answered one.
        key: the key it happened to, in full.
        rank: the rank it happened on: a number, or a text that stands as it is.
    """

    _retryable: ClassVar[bool] = False
    """What ``.retryable`` says when there is no engine code to look up."""

    code: int | None
    key: str | None
    rank: int | str | None

    def __init__(
        self,
        message: str,
        *,
        code: int | None = None,
        key: str | None = None,
        rank: int | str | None = None,
    ) -> None:
        label = rank_label(rank)
        super().__init__(f"[{label}] {message}" if label else message)
        self.code = code
        self.key = key
        self.rank = rank

    @property
    def code_name(self) -> str:
        """Upstream's name of the code, or an empty text when there is no code."""
        return "" if self.code is None else code_name(self.code)

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later although nobody changes anything."""
        info = None if self.code is None else CODES.get(self.code)
        return self._retryable if info is None else info.retryable

    def __str__(self) -> str:
        # OSError would print "[Errno 28] …"; ours is always the whole text.
        return str(self.args[0]) if self.args else ""

    def __repr__(self) -> str:
        parts = [repr(str(self))]
        if self.code is not None:
            parts.append(f"code={self.code}")
        if self.key is not None:
            parts.append(f"key={shorten_key(self.key)}")
        if self.rank is not None:
            parts.append(f"rank={self.rank!r}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call cls(*args), which fails where a class wants keyword arguments.
        # multiprocessing pickles errors, and some frameworks copy them.
        return _rebuild, (type(self), str(self), self.__dict__.copy())


def _rebuild(cls: type[MooncakeError], text: str, state: dict[str, Any]) -> MooncakeError:
    error = cls.__new__(cls)
    MooncakeError.__init__(error, text)  # the text has its rank already
    error.__dict__.update(state)
    return error


# --- before the engine is asked -------------------------------------------------------------


class EngineNotInstalledError(MooncakeError, ImportError):
    """No Mooncake wheel can be imported; the message names what is missing and the cure."""


class ConfigError(MooncakeError, ValueError):
    """A setting is wrong; the message names the field and what would be right."""


class InvalidArgumentError(MooncakeError, ValueError):
    """An argument of a call is wrong. Checked here first, else it is the engine's -400 or -600."""


# --- time, set-up, life cycle ---------------------------------------------------------------

if sys.version_info >= (3, 11):

    class OperationTimeoutError(MooncakeError, TimeoutError):
        """Something took longer than it was given. A ``TimeoutError`` (and asyncio's)."""

        errno = ETIMEDOUT
        strerror = os.strerror(ETIMEDOUT)
        _retryable = True

else:

    class OperationTimeoutError(MooncakeError, TimeoutError, asyncio.TimeoutError):
        """Something took longer than it was given. A ``TimeoutError`` (and asyncio's)."""

        errno = ETIMEDOUT
        strerror = os.strerror(ETIMEDOUT)
        _retryable = True


class SetupError(MooncakeError, ConnectionError):
    """The engine could not be connected to its master, or refused the set-up."""

    errno = ENOTCONN
    strerror = os.strerror(ENOTCONN)


class SetupTimeoutError(SetupError, OperationTimeoutError):
    """The set-up took longer than it was given."""

    errno = ETIMEDOUT
    strerror = os.strerror(ETIMEDOUT)
    _retryable = True


class WarmupError(MooncakeError, RuntimeError):
    """The warm-up gave up.

    Attributes:
        attempts: what was tried, oldest first (``WarmupAttempt``).
        diagnosis: why it is believed to have failed (``Diagnosis``), or None.
        results: for a group of ranks, a dict from rank to its report or error; else None.
    """

    attempts: Sequence[Any]
    diagnosis: Any
    results: Mapping[int | str, Any] | None

    def __init__(
        self,
        message: str,
        *,
        code: int | None = None,
        key: str | None = None,
        rank: int | str | None = None,
        attempts: Sequence[Any] = (),
        diagnosis: Any = None,
        results: Mapping[int | str, Any] | None = None,
    ) -> None:
        super().__init__(message, code=code, key=key, rank=rank)
        self.attempts = tuple(attempts)
        self.diagnosis = diagnosis
        self.results = None if results is None else dict(results)


class StoreClosedError(MooncakeError, RuntimeError):
    """The store is not open: not yet, no longer, or just closing."""


class WrongLoopError(MooncakeError, RuntimeError):
    """The store belongs to another event loop that is still alive."""


class ForkedProcessError(MooncakeError, RuntimeError):
    """The engine was used in a forked child, where it hangs or crashes."""


class TaintedStoreError(MooncakeError, RuntimeError):
    """A transfer reached the engine's own 60 s limit, so this store's reads can't be trusted."""


class TooManyAbandonedError(MooncakeError, RuntimeError):
    """Too many abandoned calls are still stuck in the engine, so no further one is started."""

    _retryable = True


class ClusterError(MooncakeError, RuntimeError):
    """A private master or a fault proxy could not be started, stopped or reached."""


# --- answers of the engine ------------------------------------------------------------------


class InternalError(MooncakeError, RuntimeError):
    """The engine failed inside itself, or answered something this library does not know."""


class BufferTooSmallError(MooncakeError, BufferError):
    """A buffer is smaller than what should go into it."""


class SegmentError(MooncakeError, LookupError):
    """A memory segment is not there, or there twice."""


class NoSpaceError(MooncakeError, OSError):
    """No segment has room for the value, or none is mounted at all."""

    errno = ENOSPC
    strerror = os.strerror(ENOSPC)
    _retryable = True


class ObjectNotFoundError(MooncakeError, LookupError):
    """There is no such key."""


class ObjectExistsError(MooncakeError, RuntimeError):
    """The key is taken."""


class ObjectNotReadyError(MooncakeError, RuntimeError):
    """The key is there, its value is still being written."""

    _retryable = True


class ObjectLeasedError(MooncakeError, RuntimeError):
    """The key was read lately and is protected until its lease ends."""

    _retryable = True


class LeaseExpiredError(MooncakeError, RuntimeError):
    """The read took longer than the key was protected for."""

    _retryable = True


class ReplicaError(MooncakeError, RuntimeError):
    """A replica of the object is not in the state that the call needs."""


class TransferError(MooncakeError, OSError):
    """Moving the bytes failed."""

    errno = EIO
    strerror = os.strerror(EIO)
    _retryable = True


class ChecksumError(TransferError):
    """The bytes that arrived are not those that were stored."""

    _retryable = False


class RpcError(MooncakeError, ConnectionError):
    """The master could not be asked."""

    errno = ENOTCONN
    strerror = os.strerror(ENOTCONN)
    _retryable = True


class RpcTimeoutError(RpcError, OperationTimeoutError):
    """The master did not answer in time."""

    errno = ETIMEDOUT
    strerror = os.strerror(ETIMEDOUT)


class MetadataError(MooncakeError, RuntimeError):
    """The cluster's metadata (etcd, Kubernetes lease, operation log) is in the way."""


class UnavailableError(MooncakeError, RuntimeError):
    """The master can't do this in the state or mode it is in."""

    _retryable = True


class NotSupportedError(MooncakeError, NotImplementedError):
    """This engine or mode does not offer the operation."""


class OffloadError(MooncakeError, OSError):
    """Offloading to files, buckets or a distributed file system failed."""

    errno = EIO
    strerror = os.strerror(EIO)


class SerializationError(MooncakeError, ValueError):
    """Something could not be turned into bytes, or back."""


class TaskError(MooncakeError, RuntimeError):
    """A background task or job of the master is unknown, or there are too many."""


class TenantError(MooncakeError, PermissionError):
    """The tenant is unknown, or over its quota."""

    errno = EACCES
    strerror = os.strerror(EACCES)


class BatchError(MooncakeError, RuntimeError):
    """Some keys of a call with many keys failed; the others did what was asked.

    Args:
        message: what failed, such as ``"put_many failed for 2 of 5 keys"``; the first failed keys
            with their errors are added to it.
        results: one per key: for a mapping verb a mapping from key to None or an error, for a
            list verb a list with results and errors, in the order of the keys.
        rank: the rank it happened on.

    Attributes:
        results: the same, as a dict or a list.
        code: the engine's code, when all failed keys share one.
    """

    results: Any

    def __init__(
        self,
        message: str,
        *,
        results: Mapping[str, object] | Sequence[object],
        rank: int | str | None = None,
    ) -> None:
        kept = dict(results) if isinstance(results, Mapping) else list(results)
        failed = _failures(kept)
        codes = {error.code for error in failed.values()}
        summary = "; ".join(
            f"{_place(place, error)}: {_cause(error)}"
            for place, error in list(failed.items())[:_SHOWN_FAILURES]
        )
        more = len(failed) - _SHOWN_FAILURES
        super().__init__(
            f"{message}: {summary}{f'; and {more} more' if more > 0 else ''}. "
            "See .errors for each of them.",
            code=codes.pop() if len(codes) == 1 else None,
            rank=rank,
        )
        self.results = kept

    @property
    def errors(self) -> dict[str | int, MooncakeError]:
        """Only what failed: from key (of a mapping) or position (of a list) to its error."""
        return _failures(self.results)

    @property
    def retryable(self) -> bool:
        """Whether every failed key may succeed when it is tried again."""
        return all(error.retryable for error in self.errors.values())


def _failures(results: Any) -> dict[str | int, MooncakeError]:
    pairs = results.items() if isinstance(results, dict) else enumerate(results)
    return {place: result for place, result in pairs if isinstance(result, MooncakeError)}


def _place(place: str | int, error: MooncakeError) -> str:
    key = place if isinstance(place, str) else error.key
    return f"#{place}" if key is None else shorten_key(key)


def _cause(error: MooncakeError) -> str:
    name = type(error).__name__
    return name if error.code is None else f"{name} {error.code} {error.code_name}"


# --- from a code to an error -----------------------------------------------------------------


def rank_label(rank: int | str | None) -> str:
    """Return how a rank is shown: ``"TP3"`` for 3, a text as it stands, ``""`` for None."""
    if rank is None:
        return ""
    return rank if isinstance(rank, str) else f"TP{rank}"


def shorten_key(key: str) -> str:
    """Return a key in quotes, for a message: its ends and its length when it is a long one."""
    if len(key) <= _MAX_KEY:
        return repr(key)
    return f"{key[:48] + '…' + key[-16:]!r} ({len(key)} characters)"


def error_from_code(
    code: int,
    action: str,
    *,
    key: str | None = None,
    rank: int | str | None = None,
    hint: str = "",
    advice: str = "",
) -> MooncakeError:
    """Build (not raise) the error that fits a code the engine answered.

    Args:
        code: the engine's code.
        action: what was done, such as ``"put"``.
        key: the key it was done to.
        rank: the rank it was done on.
        hint: a sentence of the caller's that follows the table's advice.
        advice: what the code means for this action, in place of the table's advice.

    Returns:
        An error of the table's class, :class:`InternalError` for a code the table lacks.
    """
    info = CODES.get(code)
    if info is None:
        info = CodeInfo(code, code_name(code), "InternalError", retryable=False, advice=_UNKNOWN)
    what = action if key is None else f"{action} of {shorten_key(key)}"
    text = f"{what} failed: {code} {info.name}. {advice or info.advice}"
    cls: type[MooncakeError] = globals()[info.error]
    return cls(f"{text} {hint}" if hint else text, code=code, key=key, rank=rank)
