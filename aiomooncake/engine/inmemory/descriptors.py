"""Where copies of a value lie: objects with the attributes and methods of the engine's own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

__all__ = ["BufferDescriptor", "MemoryDescriptor", "ReplicaDescriptor", "ReplicaStatus"]


class ReplicaStatus(IntEnum):
    """State of one copy, numbered as upstream's."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class BufferDescriptor:
    """Where one copy lies: its size in bytes, and the endpoint of the client that holds it."""

    size: int
    buffer_address: int
    transport_endpoint: str


@dataclass(frozen=True, slots=True)
class MemoryDescriptor:
    """The part of a descriptor that copies in memory have."""

    buffer_descriptor: BufferDescriptor


@dataclass(frozen=True, slots=True)
class ReplicaDescriptor:
    """One complete copy of a value, with the methods of the engine's own descriptors."""

    status: ReplicaStatus
    memory: MemoryDescriptor

    def is_memory_replica(self) -> bool:
        """All copies are in memory here."""
        return True

    def is_disk_replica(self) -> bool:
        """No copy is on a disk here."""
        return False

    def is_local_disk_replica(self) -> bool:
        """No copy is on a disk here."""
        return False

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """Size and owner."""
        return self.memory

    def get_disk_descriptor(self) -> Any:
        """Fail as the engine does for a copy in memory."""
        raise RuntimeError("Expected DiskDescriptor")
