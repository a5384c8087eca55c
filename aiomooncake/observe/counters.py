"""Counting from many threads at once."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["Counters"]


class Counters:
    """What one store has done so far; read as a whole by :meth:`Store.stats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = 0
        self.bytes_read = 0
        self.bytes_written = 0
        self.codes: Counter[str] = Counter()

    def count_call(self) -> None:
        """Count a job that ended."""
        with self._lock:
            self.calls += 1

    def count_code(self, name: str) -> None:
        """Count a failed job or key by the name of the engine's code."""
        with self._lock:
            self.codes[name] += 1

    def count_read(self, nbytes: int) -> None:
        """Count bytes of values that a read brought in."""
        with self._lock:
            self.bytes_read += nbytes

    def count_written(self, nbytes: int) -> None:
        """Count bytes of values that a write stored."""
        with self._lock:
            self.bytes_written += nbytes
