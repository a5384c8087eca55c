"""A prefix cache in FastAPI: ``uvicorn --app-dir examples/fastapi_service service:app``.

Nothing here is special to FastAPI but the lifespan, which Starlette has too. The service listens at
once; the store is connected and warmed up beside that, and until it is ready a page is answered
with 503: compute it. Which master it is, the ``MOONCAKE_…`` variables say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from aiomooncake import (
    InvalidArgumentError,
    MooncakeError,
    Store,
    WarmupError,
    WarmupPolicy,
    WarmupProgress,
    connect,
)

RETRY = {"Retry-After": "1"}
ROUND = 5.0  # seconds of a round of tries; each ends with a word on what is wrong

log = logging.getLogger("uvicorn.error")  # the one that uvicorn shows


class Cache:
    """The store of the service, as far as it has come."""

    def __init__(self) -> None:
        self.store: Store | None = None  # when it is warmed up
        self.attempts = 0
        self.error: MooncakeError | None = None

    async def run(self) -> None:
        """Hold a store open until this is cancelled."""
        while True:
            try:
                async with connect(timeout=ROUND) as store:
                    await self.warm_up(store)
                    self.store, self.error = store, None
                    await asyncio.Event().wait()
            except MooncakeError as exc:  # connecting has failed
                self.note(exc)
            finally:
                self.store = None
            await asyncio.sleep(1)

    async def warm_up(self, store: Store) -> None:
        """Try on until a value can be stored and read: what is wrong may be mended by others."""
        while True:
            try:
                await store.warmup(WarmupPolicy(timeout=ROUND), on_attempt=self.count)
            except WarmupError as exc:
                self.note(exc)
                await asyncio.sleep(1)
            else:
                return

    def note(self, error: MooncakeError) -> None:
        """Keep why a round has failed."""
        self.error = error
        log.warning("%s", error)

    def count(self, _progress: WarmupProgress) -> None:
        """Count a try."""
        self.attempts += 1

    def told(self) -> dict[str, Any]:
        """Tell what a probe should know."""
        health = None if self.store is None else self.store.health()
        found = self.error.diagnosis if isinstance(self.error, WarmupError) else None
        return {
            "ready": health is not None and health.ok,
            "store": None if health is None else health.state,
            "attempts": self.attempts,
            "error": None if self.error is None else str(self.error),
            "diagnosis": None if found is None else found.kind.value,
        }


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Have a store while the application runs, but don't wait for it: the port opens after this."""
    app.state.cache = Cache()
    running = asyncio.create_task(app.state.cache.run())
    yield
    running.cancel()  # closes the store; the requests under way have ended
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def ready_store(request: Request) -> Store:
    """Give handlers the store, and a 503 to their clients while there is none."""
    cache: Cache = request.app.state.cache
    if cache.store is None:
        raise HTTPException(503, "the store is not ready: see /readyz", RETRY)
    return cache.store


Ready = Annotated[Store, Depends(ready_store)]
app = FastAPI(lifespan=lifespan)


@app.put("/pages/{page}", status_code=204)
async def put_page(page: str, request: Request, store: Ready) -> None:
    """Store a page."""
    await store.put(f"prefix/{page}", await request.body())


@app.get("/pages/{page}")
async def get_page(page: str, store: Ready) -> Response:
    """Read a page."""
    value = await store.get(f"prefix/{page}")
    if value is None:
        raise HTTPException(404, "no such page")
    return Response(value, media_type="application/octet-stream")


@app.post("/prefix")
async def count_prefix(pages: list[str], store: Ready) -> dict[str, int]:
    """Tell how many pages of a prompt are there, from its beginning on."""
    there = await store.exists_many([f"prefix/{page}" for page in pages])
    return {"cached": there.index(False) if False in there else len(there)}


@app.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answer for as long as the process lives."""
    return {"status": "ok"}


@app.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """Answer 200 when the store stores and reads, else 503 and why."""
    told = request.app.state.cache.told()
    return JSONResponse(told) if told["ready"] else JSONResponse(told, 503, RETRY)


@app.exception_handler(MooncakeError)
async def tell_failure(_request: Request, exc: MooncakeError) -> JSONResponse:
    """Answer what the store could not do, instead of a 500 and a traceback."""
    body = {"error": str(exc), "code_name": exc.code_name, "retryable": exc.retryable}
    if isinstance(exc, InvalidArgumentError):
        return JSONResponse(body, 400)  # an empty page
    return JSONResponse(body, 503, RETRY) if exc.retryable else JSONResponse(body, 500)
