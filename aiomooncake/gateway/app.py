"""The gateway's application: which handler answers which route."""

from __future__ import annotations

import importlib.util
from typing import Any, Final

from aiohttp import web

from aiomooncake.aiohttp import STORE, setup
from aiomooncake.config import StoreConfig
from aiomooncake.gateway.door import Door
from aiomooncake.gateway.mounts import Mounts
from aiomooncake.gateway.values import Values

__all__ = ["DOOR", "MAX_BODY", "make_app"]

DOOR: Final[web.AppKey[Door]] = web.AppKey("door", Door)

MAX_BODY: Final = 100 << 20
"""Bytes of a body; the peer's limit."""

_JSON_BODY: Final = 1 << 20  # of the routes that take a few fields

# The peer's {key} ends at a slash; nothing else can stand there, so ours is all of the rest.
_KEY: Final = r"{key:[\s\S]*}"


def make_app(
    target: str | StoreConfig | None = None,
    *,
    token: str | None = None,
    max_body: int = MAX_BODY,
    allow_remove_all: bool = False,
    **serving: Any,
) -> web.Application:
    """Make the gateway.

    Args:
        target: As for :func:`aiomooncake.connect`.
        token: What ``Authorization: Bearer`` must say; None = everybody may ask.
        max_body: Bytes of a put's body at most.
        allow_remove_all: Whether ``/api/remove_all`` does it.
        **serving: Everything else that :func:`aiomooncake.aiohttp.setup` takes.

    Returns:
        An application to be run with ``handler_cancellation``, so that a client that hangs up
        ends its reads.
    """
    app = web.Application(client_max_size=_JSON_BODY)
    if importlib.util.find_spec("prometheus_client") is not None:
        serving = {"metrics_path": "/metrics", **serving}
    setup(app, target, **serving)
    values = Values(app[STORE], max_body=max_body, allow_remove_all=allow_remove_all)
    mounts = Mounts(app[STORE])
    door = app[DOOR] = Door(token)
    app.add_routes(
        route(path, door.guard(handler))
        for route, path, handler in (
            (web.put, "/api/put", values.put),
            (web.get, f"/api/get/{_KEY}", values.get),
            (web.get, f"/api/exist/{_KEY}", values.exist),
            (web.delete, f"/api/remove/{_KEY}", values.remove),
            (web.delete, "/api/remove_all", values.remove_all),
            (web.post, "/api/mount_shm", mounts.mount_shm),
            (web.post, "/api/unmount_shm", mounts.unmount_shm),
            (web.post, "/api/mount", mounts.mount),
            (web.post, "/api/unmount", mounts.unmount),
            (web.post, "/api/unmount_local_disk", mounts.unmount_local_disk),
            (web.post, "/api/reconfigure", mounts.reconfigure),
        )
    )
    return app
