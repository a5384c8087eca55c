"""The routes of values: put, get, exist, remove."""

from __future__ import annotations

import contextlib
from typing import Final

from aiohttp import hdrs, web

from aiomooncake.aiohttp import StoreService
from aiomooncake.errors import ObjectNotFoundError
from aiomooncake.gateway.answers import failure, refused, succeeded
from aiomooncake.gateway.bodies import read_item

__all__ = ["Values"]

_WHOLE: Final = 256 << 10
"""Bytes of a value up to which it is handed over at once."""

_CHUNK: Final = 128 << 10
"""Bytes of a larger one at a time: what a socket does not take at once, aiohttp copies."""

_BINARY: Final = "application/octet-stream"


class Values:
    """The handlers of values.

    Args:
        service: Where the store is, when it is ready.
        max_body: Bytes of a put's body at most.
        allow_remove_all: Whether every key may be removed at once.
    """

    def __init__(self, service: StoreService, *, max_body: int, allow_remove_all: bool) -> None:
        self._service = service
        self._max_body = max_body
        self._allow_remove_all = allow_remove_all

    async def put(self, request: web.Request) -> web.StreamResponse:
        """Store a value when the whole body is there: a client that leaves stores nothing."""
        store = self._service.store
        key, value = await read_item(request, self._max_body)
        if not key or value is None:
            return refused(400, "INVALID_ARGUMENT", "Missing key or value")
        await store.put(key, value)
        return succeeded()

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Read a value."""
        key = request.match_info["key"]
        if request.method == hdrs.METH_HEAD:
            return await self._head(key)
        value = await self._service.store.get(key)
        if value is None:
            return _not_found(key)
        if len(value) <= _WHOLE:
            return web.Response(body=value, content_type=_BINARY)
        return await _send(request, value)

    async def exist(self, request: web.Request) -> web.StreamResponse:
        """Tell whether a key is there."""
        there = await self._service.store.exists(request.match_info["key"])
        return web.Response(
            text='{"exists": true}' if there else '{"exists": false}',
            content_type="application/json",
        )

    async def remove(self, request: web.Request) -> web.StreamResponse:
        """Remove a key."""
        key = request.match_info["key"]
        return succeeded() if await self._service.store.remove(key) else _not_found(key)

    async def remove_all(self, _request: web.Request) -> web.StreamResponse:
        """Remove every key, where that is allowed."""
        if not self._allow_remove_all:
            return refused(
                403, "REMOVE_ALL_DISABLED", "remove_all is off; start with --allow-remove-all"
            )
        count = await self._service.store.remove_all()
        return web.json_response({"status": f"success removed {count} keys"})

    async def _head(self, key: str) -> web.StreamResponse:
        size = await self._service.store.size(key)
        if size is None:
            return _not_found(key)
        return web.Response(headers={hdrs.CONTENT_LENGTH: str(size), hdrs.CONTENT_TYPE: _BINARY})


async def _send(request: web.Request, value: bytes) -> web.StreamResponse:
    """Send a large value, as fast as its client takes it."""
    response = web.StreamResponse()
    response.content_type = _BINARY
    response.content_length = len(value)
    with contextlib.suppress(ConnectionError):  # it has left, which is no error of ours
        await response.prepare(request)
        whole = memoryview(value)
        for start in range(0, len(value), _CHUNK):
            await response.write(whole[start : start + _CHUNK])
        await response.write_eof()
    return response


def _not_found(key: str) -> web.Response:
    error = ObjectNotFoundError("Key not found", code=-704, key=key)
    return failure(error)
