"""Helpers for testing programs that use Mooncake, and aiomooncake itself."""

from __future__ import annotations

from aiomooncake.engine.inmemory import Fault, InMemoryEngine
from aiomooncake.testing.fake import FakeMooncake
from aiomooncake.testing.fixtures import MooncakeConnect
from aiomooncake.testing.proxy import FaultProxy, ProxyStats
from aiomooncake.testing.stall import LoopStallProbe, Stall
from aiomooncake.testing.virtual_time import VirtualTimeLoop, run_in_virtual_time

__all__ = [
    "FakeMooncake",
    "Fault",
    "FaultProxy",
    "InMemoryEngine",
    "LoopStallProbe",
    "MooncakeConnect",
    "ProxyStats",
    "Stall",
    "VirtualTimeLoop",
    "run_in_virtual_time",
]
