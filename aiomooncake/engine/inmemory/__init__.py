"""The engine without a wheel: pure Python, with the real engine's answers and faults on demand."""

from __future__ import annotations

from aiomooncake.engine.inmemory.faults import Fault
from aiomooncake.engine.inmemory.objects import InMemoryEngine
from aiomooncake.engine.inmemory.store import InMemoryStore

__all__ = ["Fault", "InMemoryEngine", "InMemoryStore"]
