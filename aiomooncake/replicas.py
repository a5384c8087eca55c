"""Where the copies of a value lie: :class:`Replica`, and the job that asks the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from aiomooncake.errors import InternalError, shorten_key

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.engine.protocol import NativeStore

__all__ = ["Replica", "ReplicaKind", "ReplicaStatus", "first_copies", "replicas_of_keys"]

ReplicaKind = Literal["memory", "disk", "local_disk", "other"]
ReplicaStatus = Literal[
    "undefined", "initialized", "processing", "complete", "removed", "failed", "unknown"
]

_STATUSES: Final = frozenset(get_args(ReplicaStatus))
_QUESTIONS: Final = 3


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of a value, as far as the engine's binding tells.

    Attributes:
        kind: ``"memory"``: in a segment. ``"disk"``: a file that the master knows by its path.
            ``"local_disk"``: on the disk of the client that offloaded it. ``"other"``: a kind that
            this wheel's binding has no name for (NVMe over Fabrics, a distributed file system; and
            ``local_disk`` before 0.3.11).
        status: The engine's word for its state. Copies that can be read are ``"complete"``.
        size: Bytes; None where the binding does not tell (``"local_disk"`` and ``"other"``; it is
            the same for all copies: ask :meth:`Store.size`).
        endpoint: ``host:port`` where the holder's transport listens; None unless it is in memory.
            Where a metadata server is used, this is the segment's name. With ``P2PHANDSHAKE`` it
            has another port than the name (:attr:`Store.hostname`), and stores that share a
            transfer engine share it; the master's ``/get_segments_detail`` has both.
        path: Path of the file of a copy of kind ``"disk"``.
    """

    kind: ReplicaKind
    status: ReplicaStatus
    size: int | None = None
    endpoint: str | None = None
    path: str | None = None


def first_copies(native: NativeStore, keys: Sequence[str]) -> dict[str, Any]:
    """Find the first copy in memory of each key, which is the one that the engine reads.

    Returns:
        The engine's buffer descriptors (``transport_endpoint``, ``size``, ``buffer_address``) by
        key; a key that is missing here may be anything.
    """
    found: dict[str, Any] = {}
    for key, replicas in native.batch_get_replica_desc(list(keys)).items():
        for replica in replicas:
            if replica.is_memory_replica():
                found[key] = replica.get_memory_descriptor().buffer_descriptor
                break
    return found


def replicas_of_keys(
    client: EngineClient, exists: Callable[[Sequence[str]], Sequence[Any]], keys: Sequence[str]
) -> list[Any]:
    """Ask where the copies of values lie; blocking, for a worker thread.

    The engine's answer lacks a key for a miss and for any failure, so what it lacks is asked for
    again in a way that is honest per key.

    Args:
        client: The native client.
        exists: Tells for each key whether it is there, or the error.
        keys: Distinct keys.

    Returns:
        A tuple of replicas per key, empty for a proved miss, or an error.
    """
    answers: dict[str, Any] = {}
    doubtful = list(keys)
    for _ in range(_QUESTIONS):
        found = client.native_object.batch_get_replica_desc(doubtful)
        answers |= {key: _replicas(copies) for key, copies in found.items() if copies}
        missing = [key for key in doubtful if key not in answers]
        there = dict(zip(missing, exists(missing) if missing else (), strict=True))
        answers |= {key: there[key] or () for key in missing if there[key] is not True}
        # Written a moment ago, or the master was away for a moment.
        doubtful = [key for key in missing if there[key] is True]
        if not doubtful:
            break
    for key in doubtful:
        answers[key] = InternalError(
            f"replicas of {shorten_key(key)} failed: the engine says {_QUESTIONS} times that the "
            "key is there, but not where; try again, and look at the engine's own log "
            "(MC_LOG_LEVEL=INFO, set before the start)",
            key=key,
            rank=client.rank,
        )
    return [answers[key] for key in keys]


def _replicas(descriptors: Iterable[Any]) -> tuple[Replica, ...]:
    return tuple(_replica(descriptor) for descriptor in descriptors)


def _replica(descriptor: Any) -> Replica:
    name = descriptor.status.name.lower()
    status: Any = name if name in _STATUSES else "unknown"
    if descriptor.is_memory_replica():
        place = descriptor.get_memory_descriptor().buffer_descriptor
        return Replica("memory", status, place.size, endpoint=place.transport_endpoint)
    if descriptor.is_disk_replica():
        file = descriptor.get_disk_descriptor()
        return Replica("disk", status, file.object_size, path=file.file_path)
    is_local = getattr(descriptor, "is_local_disk_replica", None)
    return Replica("local_disk" if is_local is not None and is_local() else "other", status)
