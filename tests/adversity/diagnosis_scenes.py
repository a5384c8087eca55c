"""Scenes of :mod:`test_diagnosis_staged`: each runs in an interpreter of its own."""

from __future__ import annotations

import asyncio

import aiomooncake
from aiomooncake import DiagnosisKind, StoreConfig, WarmupError, WarmupPolicy


def adopt_without_a_segment(address: str) -> None:
    """Whoever adopts a store may tell what it was set up with, and gets a better diagnosis."""
    import mooncake.store

    native = mooncake.store.MooncakeDistributedStore()
    assert native.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address) == 0

    def warm_up(config: StoreConfig | None) -> DiagnosisKind:
        try:
            asyncio.run(aiomooncake.adopt(native, config=config).warmup(WarmupPolicy(timeout=0.5)))
        except WarmupError as error:
            kind: DiagnosisKind = error.diagnosis.kind
            return kind
        raise AssertionError("it stored without a segment")

    assert warm_up(None) is DiagnosisKind.UNKNOWN
    known = StoreConfig(address, global_segment_size=0)
    assert warm_up(known) is DiagnosisKind.NO_SEGMENT
    native.close()
