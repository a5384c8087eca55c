"""Programs that release_check.py runs where only the package and one extra are installed."""  # noqa: INP001 - beside scripts

from __future__ import annotations

from typing import Final

__all__ = ["AIOHTTP", "BASE", "CPU", "OTEL", "PROMETHEUS", "SDIST", "UVLOOP"]

_USE: Final = """
import asyncio
import aiomooncake

async def use(target, **options):
    async with aiomooncake.connect(target, **options) as store:
        await store.warmup()
        await store.put("key", b"value")
        assert await store.get("key") == b"value"
        assert await store.get("nothing here") is None
        return store
"""

CPU: Final = (
    _USE
    + """
import aiomooncake.compat
asyncio.run(use("local://"))
"""
)

SDIST: Final = (
    _USE
    + """
asyncio.run(use("memory://sdist"))
"""
)

# What is true without extras: it works on the engine in memory, and what needs an extra says which.
BASE: Final = (
    _USE
    + """
import importlib
import importlib.metadata
import importlib.util

asyncio.run(use("memory://base"))
assert importlib.metadata.version("aiomooncake") == aiomooncake.__version__
unconditional = [r for r in importlib.metadata.requires("aiomooncake") if "extra ==" not in r]
assert unconditional == ["anyio>=4.4"], unconditional
others = ("aiohttp", "click", "mooncake", "opentelemetry", "prometheus_client", "pytest", "rich")
for other in others:
    assert importlib.util.find_spec(other) is None, f"{other} came along"
import aiomooncake.testing
for name, extra in {"aiohttp": "aiohttp", "prometheus": "prometheus", "tracing": "otel"}.items():
    try:
        importlib.import_module(f"aiomooncake.{name}")
    except ImportError as error:
        assert f"aiomooncake[{extra}]" in str(error), f"aiomooncake.{name}: {error}"
    else:
        raise AssertionError(f"aiomooncake.{name} was imported without its extra")
try:
    asyncio.run(use("127.0.0.1:1", timeout=1))
except aiomooncake.EngineNotInstalledError as error:
    assert "aiomooncake[cpu]" in str(error), error
else:
    raise AssertionError("there is an engine without the extra cpu")
"""
)

AIOHTTP: Final = (
    _USE
    + """
import aiohttp
from aiohttp import web
import aiomooncake.aiohttp
from aiomooncake.gateway import make_app

async def main():
    app = make_app("memory://gateway")
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        for _ in range(500):
            async with session.get("/readyz") as answer:
                if answer.status == 200:
                    break
            await asyncio.sleep(0.01)
        assert answer.status == 200, await answer.text()
        async with session.put("/api/put", json={"key": "k", "value": "v"}) as answer:
            assert answer.status == 200, await answer.text()
        async with session.get("/api/get/k") as answer:
            assert await answer.read() == b"v"
    await runner.cleanup()

asyncio.run(main())
"""
)

PROMETHEUS: Final = (
    _USE
    + """
from prometheus_client import REGISTRY, generate_latest
from aiomooncake.prometheus import StoreCollector

REGISTRY.register(StoreCollector())
asyncio.run(use("memory://prometheus"))
assert b"aiomooncake_" in generate_latest()
"""
)

OTEL: Final = (
    _USE
    + """
from aiomooncake.tracing import instrument

async def main():
    async with aiomooncake.connect("memory://otel") as store:
        instrument(store)
        await store.put("key", b"value")
        assert await store.get("key") == b"value"

asyncio.run(main())
"""
)

UVLOOP: Final = (
    _USE
    + """
import uvloop

loop = uvloop.new_event_loop()
loop.run_until_complete(use("memory://uvloop"))
loop.close()
"""
)
