"""Scenes of :mod:`test_versions`: each runs in an interpreter of its own, with staged packages."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import logging
import sys
import time
from typing import Any
from unittest import mock

import aiomooncake
from aiomooncake import LocalCluster, NotSupportedError
from aiomooncake.engine import entry_points
from aiomooncake.engine.binding import Binding, load_binding
from aiomooncake.engine.entry_points import DummyEntry, RealEntry

__all__ = [
    "a_package_as_in_0_3_14",
    "old_wheels_are_refused",
    "too_new_a_wheel",
    "wheels_refused_before_the_wait",
]

SMALL: dict[str, Any] = {"global_segment_size": 16 << 20, "local_buffer_size": 4 << 20}


def a_package_as_in_0_3_14(shared_object: str) -> None:
    """Load an engine whose ``mooncake.store`` is a package, and store a value the direct way."""
    binding = load_binding()
    assert binding.module.__file__ is not None
    assert binding.module.__file__.endswith("/store/__init__.py")
    assert str(binding.shared_object) == shared_object
    assert isinstance(RealEntry.find(binding), RealEntry)
    assert isinstance(DummyEntry.find(binding), DummyEntry)

    async def main() -> None:
        async with (
            LocalCluster() as master,
            aiomooncake.connect(master.address, **SMALL) as store,
        ):
            await store.put("key", b"value")
            assert await store.get("key") == b"value"

    asyncio.run(main())


def too_new_a_wheel() -> None:
    """Set up with an engine whose functions have other argument lists, twice: one warning."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("aiomooncake").addHandler(handler)

    class Newer:
        """The engine's symbols, without the set-up as we know it."""

        def __init__(self, name: str) -> None:
            self._lib = ctypes.CDLL(name)

        def __getattr__(self, name: str) -> Any:
            if "10setup_real" in name or "11setup_dummy" in name:
                raise AttributeError(name)
            return getattr(self._lib, name)

    newer = mock.patch.object(
        entry_points, "_library", lambda binding: Newer(str(binding.shared_object))
    )
    parts = mock.patch.object(entry_points, "_class_parts", return_value=(print, 0))

    async def main() -> None:
        async with LocalCluster() as master:
            for number in range(2):
                async with aiomooncake.connect(master.address, **SMALL) as store:
                    await store.put(f"key{number}", b"value")
                    assert await store.get(f"key{number}") == b"value"

    with newer, parts:
        asyncio.run(main())
    slow = [text for text in said if "hold the GIL" in text]
    assert len(slow) == 1, said
    assert "setup_real is not exported with a known argument list" in slow[0]


def old_wheels_are_refused() -> None:
    """Connect with engines that lack methods; no set-up is begun."""
    binding = load_binding()

    def without(*names: str) -> Binding:
        methods = binding.methods - {*names}
        return dataclasses.replace(binding, version="0.3.0", methods=methods)

    async def refusal(old: Binding, target: str | None, **options: Any) -> str:
        with mock.patch("aiomooncake._opener.load_engine", return_value=old):
            try:
                await aiomooncake.connect(target, **options)
            except NotSupportedError as error:
                return str(error)
        raise AssertionError("it was taken")

    async def main() -> None:
        async with LocalCluster() as master:
            client = master.blocking.start_client(global_segment_size=16 << 20)
            old = without("health_check", "upsert_from")
            text = await refusal(old, master.address, **SMALL)
            assert "engine 0.3.0 is too old" in text, text
            assert "health_check, upsert_from: install 0.3.10.post2 or newer" in text, text
            old = without("batch_get_session_start")
            text = await refusal(old, None, client_server_address=client.address)
            assert "too old for dummy clients" in text, text
            assert "install 0.3.13 or newer" in text, text

    asyncio.run(main())


def wheels_refused_before_the_wait(version: str, refused: str) -> None:
    """Connect where nobody listens; the engine is not even imported."""
    nobody = "127.0.0.1:1"

    async def main() -> None:
        told = []
        ways: list[tuple[str | None, dict[str, Any]]] = [
            (None, {"client_server_address": nobody}),
            (nobody, {}),
            ("local://", {}),
        ]
        for target, options in ways[: int(refused)]:
            began = time.monotonic()
            try:
                await aiomooncake.connect(target, timeout=25, **options)
            except NotSupportedError as error:
                told.append(str(error))
            assert time.monotonic() - began < 2
        assert len(told) == int(refused), told
        assert all(text.startswith(f"engine {version} is too old for ") for text in told), told

    asyncio.run(main())
    assert not [name for name in sys.modules if name.split(".")[0] == "mooncake"]
