"""The routes that lend memory to the cluster and take it back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from aiomooncake.aiohttp import StoreService
from aiomooncake.errors import MooncakeError, error_from_code
from aiomooncake.gateway.answers import BadRequestError, failure, refused, succeeded
from aiomooncake.gateway.bodies import json_object
from aiomooncake.store import Store

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["Mounts"]

_LONGEST_GRACE: Final = 3600
"""Seconds; the peer's bound against milliseconds given for seconds."""


class Mounts:
    """The handlers of mounts.

    They take a store that is connected: warming up may wait for just the memory that they mount.

    Args:
        service: Where the store is.
    """

    def __init__(self, service: StoreService) -> None:
        self._service = service
        self._mode = "prefill"
        self._segments: list[str] = []  # of the last switch to "decode"
        self._changing = asyncio.Lock()

    async def mount_shm(self, request: web.Request) -> web.StreamResponse:
        """Lend a named shared-memory object."""
        given = await json_object(request)
        path = _shm_path(given.get("name"))
        if path is None or given.get("size") is None:
            raise BadRequestError("Missing or invalid name or size")
        segments = await self._mount(self._service.connected, path, given)
        return succeeded(segment_ids=segments)

    async def unmount_shm(self, request: web.Request) -> web.StreamResponse:
        """Take back what was lent, one segment after the other."""
        given = await json_object(request)
        store, wanted, grace = self._service.connected, _segments_of(given), _grace_of(given)
        async with self._changing:
            failed = await self._unmount(store, wanted, grace)
            gone = set(wanted).difference(failed)
            self._segments = [each for each in self._segments if each not in gone]
            if not self._segments:
                self._mode = "prefill"
        if failed:
            return refused(
                500,
                "UNMOUNT_FAILED",
                "Unmount failed for one or more segments",
                failed_segment_ids=failed,
            )
        return succeeded()

    async def mount(self, request: web.Request) -> web.StreamResponse:
        """Allocate memory in this process and lend it."""
        given = await json_object(request)
        size = given.get("size")
        if type(size) is not int or size <= 0:
            raise BadRequestError("Invalid size, must be a positive integer")
        store = self._service.connected
        protocol, location = _texts_of(store, given)
        answer = await store.engine.allocate_and_mount_segment(size, protocol, location)
        _check(answer["ret"], "mounting a segment")
        return succeeded(
            segment_ids=list(answer["segment_ids"]), allocated_size=answer["allocated_size"]
        )

    async def unmount(self, request: web.Request) -> web.StreamResponse:
        """Take such memory back and free it."""
        given = await json_object(request)
        segments, grace = _segments_of(given), _grace_of(given)
        store = self._service.connected
        _check(await store.engine.unmount_and_free_segment(segments, grace), "unmounting a segment")
        return succeeded()

    async def unmount_local_disk(self, request: web.Request) -> web.StreamResponse:
        """Take this store's disk tier out of the cluster; holds for the grace period."""
        grace = _grace_of(await json_object(request))
        code = await self._service.connected.engine.unmount_local_disk_segment(grace)
        _check(code, "unmounting the local disk")
        return succeeded()

    async def reconfigure(self, request: web.Request) -> web.StreamResponse:
        """Switch between lending nothing ("prefill") and lending a file ("decode")."""
        given = await json_object(request)
        mode = given.get("mode", "")
        mode = mode.lower() if isinstance(mode, str) else ""
        store = self._service.connected
        if mode == "decode":
            path = given.get("path")
            if not isinstance(path, str) or not path or given.get("size") is None:
                raise BadRequestError("Missing path or size for decode mode")
            return await self._to_decode(store, path, given)
        if mode == "prefill":
            return await self._to_prefill(store)
        raise BadRequestError("Invalid mode. Use 'decode' or 'prefill'")

    async def _to_decode(
        self, store: Store, path: str, given: Mapping[str, Any]
    ) -> web.StreamResponse:
        async with self._changing:
            # The new one first: when it can't be mounted, the old ones go on serving.
            try:
                mounted = await self._mount(store, path, given)
            except MooncakeError as exc:
                self._mode = "decode" if self._segments else "prefill"
                return failure(exc, mode=self._mode)
            left = await self._unmount(store, self._segments, 0)
            self._segments = [*mounted, *left]  # those that stayed are tried again next time
            self._mode = "decode"
            return succeeded(mode=self._mode, segment_ids=list(self._segments))

    async def _to_prefill(self, store: Store) -> web.StreamResponse:
        async with self._changing:
            if self._segments:
                _check(await store.engine.unmount_segment(self._segments), "unmounting segments")
                self._segments = []
            self._mode = "prefill"
            return succeeded(mode=self._mode)

    async def _mount(self, store: Store, path: str, given: Mapping[str, Any]) -> list[str]:
        size, offset = given["size"], given.get("offset", 0)
        for name, number, least in (("size", size, 1), ("offset", offset, 0)):
            if type(number) is not int or number < least:
                raise BadRequestError(f"Invalid {name}, must be an integer of at least {least}")
        protocol, location = _texts_of(store, given)
        answer = await store.engine.mount_segment(path, size, offset, protocol, location)
        _check(answer["ret"], "mounting a segment")
        return list(answer["segment_ids"])

    async def _unmount(self, store: Store, segments: list[str], grace: int) -> list[str]:
        """Unmount one by one; of several at once the engine tells only the first failure."""
        return [each for each in segments if await store.engine.unmount_segment([each], grace) != 0]


def _shm_path(name: object) -> str | None:
    if not isinstance(name, str):
        return None
    name = name.removeprefix("/")
    if not name or "/" in name or "\0" in name or name in {".", ".."}:
        return None
    return f"/dev/shm/{name}"  # noqa: S108  # where shm_open puts them


def _texts_of(store: Store, given: Mapping[str, Any]) -> tuple[str, str]:
    protocol = given.get("protocol", store.config.protocol if store.config else "tcp")
    location = given.get("location", "")
    if not isinstance(protocol, str) or not isinstance(location, str):
        raise BadRequestError("protocol and location must be texts")
    return protocol, location


def _segments_of(given: Mapping[str, Any]) -> list[str]:
    segments = given.get("segment_ids", [])
    if isinstance(segments, str):
        segments = [segments]
    if not segments:
        raise BadRequestError("Missing segment_ids")
    if not isinstance(segments, list) or not all(isinstance(each, str) for each in segments):
        raise BadRequestError("segment_ids must be a list of texts, or one text")
    return segments


def _grace_of(given: Mapping[str, Any]) -> int:
    grace = given.get("grace_period_seconds", 0)
    if type(grace) is not int or not 0 <= grace <= _LONGEST_GRACE:
        raise BadRequestError(
            "Invalid grace_period_seconds, must be a non-negative integer no greater than "
            f"{_LONGEST_GRACE}"
        )
    return grace


def _check(code: int, action: str) -> None:
    if code != 0:
        raise error_from_code(code, action)
