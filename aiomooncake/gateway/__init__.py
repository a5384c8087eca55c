"""The REST gateway: the routes of the engine's own store service, on an event loop that is free."""

from __future__ import annotations

from aiomooncake.gateway.app import DOOR, MAX_BODY, make_app

__all__ = ["DOOR", "MAX_BODY", "make_app"]
