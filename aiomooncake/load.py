"""What one call of the engine carries: keys, and the memory of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Load"]


@dataclass(frozen=True, slots=True)
class Load:
    """Distinct keys and their memory, column by column: many of them cost little so.

    Attributes:
        keys: The keys.
        memory: For each key its block, or a list of blocks.
        sizes: Bytes of each key's memory.
        groups: The routing group of each key, where the placement options have groups.
    """

    keys: Sequence[str]
    memory: Sequence[Any]
    sizes: Sequence[int]
    groups: Sequence[str | None] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of memory in all."""
        return sum(self.sizes)

    def cut(self, start: int, end: int) -> Load:
        """Take the keys from ``start`` up to ``end``."""
        return Load(
            self.keys[start:end],
            self.memory[start:end],
            self.sizes[start:end],
            None if self.groups is None else self.groups[start:end],
        )

    def pick(self, places: Sequence[int]) -> Load:
        """Take the keys at these places."""
        return Load(
            [self.keys[i] for i in places],
            [self.memory[i] for i in places],
            [self.sizes[i] for i in places],
            None if self.groups is None else [self.groups[i] for i in places],
        )

    @classmethod
    def join(cls, loads: Sequence[Load]) -> Load:
        """Put loads of distinct keys together; all of them have groups, or none."""
        if len(loads) == 1:
            return loads[0]
        grouped = loads[0].groups is not None
        return cls(
            [key for load in loads for key in load.keys],
            [memory for load in loads for memory in load.memory],
            [size for load in loads for size in load.sizes],
            [group for load in loads for group in load.groups or ()] if grouped else None,
        )
