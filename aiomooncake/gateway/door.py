"""The door of the gateway: who may ask, what becomes of errors, and when all have left."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from aiomooncake.aiohttp import NotReadyError
from aiomooncake.errors import MooncakeError
from aiomooncake.gateway.answers import failure, refused
from aiomooncake.gateway.bodies import BodyTooLargeError

__all__ = ["Door", "Handler"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Door:
    """What every request of the API passes.

    One wrapper around each handler instead of aiohttp's middlewares, which cost each request more.

    Args:
        token: What ``Authorization: Bearer`` must say; None = everybody may ask.
    """

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else b"Bearer " + token.encode()
        self._inside = 0
        self._empty: asyncio.Event | None = None

    def guard(self, handler: Handler) -> Handler:
        """Wrap a handler."""

        async def answer(request: web.Request) -> web.StreamResponse:
            self._inside += 1
            try:
                response = await handler(request)
                if self._empty is not None:
                    response.force_close()  # the next request goes to another gateway
                return response
            except NotReadyError:
                raise
            except MooncakeError as exc:
                return failure(exc)
            except web.RequestPayloadError as exc:  # a broken encoding, or a client that left
                return refused(400, "BAD_REQUEST", f"the body can't be read: {exc}")
            except (BodyTooLargeError, web.HTTPRequestEntityTooLarge):
                return refused(
                    413,
                    "BODY_TOO_LARGE",
                    "the body is larger than this gateway takes; raise its --max-body",
                )
            finally:
                self._inside -= 1
                if self._empty is not None and not self._inside:
                    self._empty.set()

        if self._expected is None:
            return answer
        expected = self._expected

        async def checked(request: web.Request) -> web.StreamResponse:
            given = request.headers.get(hdrs.AUTHORIZATION, "")
            if hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected):
                return await answer(request)
            response = refused(
                401,
                "UNAUTHORIZED",
                "this gateway wants the header Authorization: Bearer <its token>",
            )
            response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
            return response

        return checked

    async def emptied(self, timeout: float) -> None:
        """Wait until nobody is inside, for ``timeout`` seconds at most.

        aiohttp's own shutdown waits too, but drops what is still to come of a body.
        """
        self._empty = asyncio.Event()
        if self._inside:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._empty.wait(), timeout)
