"""A prefix cache over HTTP for the ranks of a model server: ``python service.py --help``.

Each rank stores the pages of prompts that it has computed, and asks before it computes how many
pages of a prompt are there. The service listens at once; the stores of its ranks are connected and
warmed up beside that, and until they are ready a page is answered with 503: compute it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import socket
from typing import TYPE_CHECKING, Final

from aiohttp import web

import aiomooncake.aiohttp
from aiomooncake import InvalidArgumentError, MooncakeError, Store
from aiomooncake.aiohttp import RETRY_AFTER, STORE

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

__all__ = ["make_app"]

_MAX_PAGE: Final = 64 << 20  # bytes
_DRAIN: Final = 10.0  # seconds that requests under way have to end after a signal
_CLOSE: Final = 5.0  # seconds for closing the stores; beside a frozen master it takes longer
_UNAVAILABLE: Final = 503


def make_app(target: str | None, ranks: int) -> web.Application:
    """Make the service.

    Args:
        target: As for ``connect()``; None = what the ``MOONCAKE_…`` variables say.
        ranks: How many ranks there are; each has a store of its own.
    """
    app = web.Application(client_max_size=_MAX_PAGE, middlewares=[tell_failures])
    aiomooncake.aiohttp.setup(
        app, target, ranks=ranks, metrics_path="/metrics", close_timeout=_CLOSE
    )
    app.add_routes(
        [
            web.put("/ranks/{rank:[0-9]+}/pages/{page}", put_page),
            web.get("/ranks/{rank:[0-9]+}/pages/{page}", get_page),
            web.post("/ranks/{rank:[0-9]+}/prefix", count_prefix),
        ]
    )
    return app


async def put_page(request: web.Request) -> web.Response:
    """Store a page; the first one of its name stays, since the name is a hash of what is in it."""
    await _store(request).put(_key(request, request.match_info["page"]), await request.read())
    return web.Response(status=204)


async def get_page(request: web.Request) -> web.Response:
    """Read a page."""
    value = await _store(request).get(_key(request, request.match_info["page"]))
    if value is None:
        raise web.HTTPNotFound(text="no such page")
    return web.Response(body=value)


async def count_prefix(request: web.Request) -> web.Response:
    """Tell how many pages of a prompt are there, from its beginning on."""
    pages = _names(await request.read())
    there = await _store(request).exists_many([_key(request, page) for page in pages])
    return web.json_response({"cached": there.index(False) if False in there else len(there)})


def _names(body: bytes) -> list[str]:
    with contextlib.suppress(ValueError):
        names = json.loads(body)
        if isinstance(names, list) and all(isinstance(name, str) and name for name in names):
            return names
    raise web.HTTPBadRequest(text="the body must be a JSON list of names of pages")


def _store(request: web.Request) -> Store:
    """Find the store of a rank; while it is not ready this raises a 503."""
    group = request.app[STORE].group
    rank = int(request.match_info["rank"])
    if rank not in group.ranks:
        raise web.HTTPNotFound(text=f"there are ranks 0 to {len(group) - 1}")
    return group[rank]


def _key(request: web.Request, page: str) -> str:
    """Name a page in the store: a rank holds a part of each page, so the ranks' names differ."""
    return f"prefix/{request.match_info['rank']}/{page}"


@web.middleware
async def tell_failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what the store could not do with a status, instead of a 500 and a traceback."""
    try:
        return await handler(request)
    except web.HTTPException:
        raise  # NotReadyError is one
    except MooncakeError as exc:
        body = {"error": str(exc), "code_name": exc.code_name, "retryable": exc.retryable}
        if isinstance(exc, InvalidArgumentError):
            return web.json_response(body, status=400)  # an empty page
        if not exc.retryable:
            return web.json_response(body, status=500)
        headers = {"Retry-After": RETRY_AFTER}
        return web.json_response(body, status=_UNAVAILABLE, headers=headers)


def main() -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests under way and close the stores."""
    parser = argparse.ArgumentParser(description="A prefix cache over HTTP.")
    parser.add_argument("--store", help="what connect() takes (default: the MOONCAKE_… variables)")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0 = a free one")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    web.run_app(
        make_app(given.store, given.ranks),
        sock=socket.create_server((given.host, given.port)),
        access_log=None,
        handler_cancellation=True,  # a client that hangs up ends its reads
        shutdown_timeout=_DRAIN,
    )


if __name__ == "__main__":
    main()
