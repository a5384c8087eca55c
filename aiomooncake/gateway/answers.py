"""What the gateway answers: the peer's JSON when all went well, else a status and why."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from aiohttp import web

from aiomooncake.aiohttp import RETRY_AFTER
from aiomooncake.errors import (
    BufferTooSmallError,
    InvalidArgumentError,
    MooncakeError,
    NoSpaceError,
    NotSupportedError,
    ObjectExistsError,
    ObjectLeasedError,
    ObjectNotFoundError,
    OperationTimeoutError,
    RpcError,
    SegmentError,
    TenantError,
    TransferError,
    UnavailableError,
)

__all__ = ["STATUSES", "BadRequestError", "failure", "refused", "succeeded"]

STATUSES: Final[tuple[tuple[type[MooncakeError], int], ...]] = (
    (InvalidArgumentError, 400),
    (TenantError, 403),
    (ObjectNotFoundError, 404),
    (ObjectLeasedError, 409),
    (ObjectExistsError, 409),
    (SegmentError, 409),
    (BufferTooSmallError, 413),
    (NotSupportedError, 501),
    (TransferError, 502),
    (RpcError, 503),
    (UnavailableError, 503),
    (OperationTimeoutError, 504),
    (NoSpaceError, 507),
)
"""The first class that fits decides; of the others 503 if trying again can help, else 500."""

_SUCCESS: Final = json.dumps({"status": "success"})
_UNAVAILABLE: Final = 503
_BY_CODE: Final = {-101: 404, -1700: 507}  # no such segment; over quota
_WORD_START: Final = re.compile(r"(?<!^)(?=[A-Z])")


class BadRequestError(InvalidArgumentError):
    """A request that is wrong by itself, before the store is asked."""


def succeeded(**more: Any) -> web.Response:
    """Answer as the peer does when all went well."""
    text = json.dumps({"status": "success", **more}) if more else _SUCCESS
    return web.Response(text=text, content_type="application/json")


def refused(status: int, name: str, text: str, **more: Any) -> web.Response:
    """Answer what the gateway itself refuses.

    Args:
        status: The HTTP status.
        name: A word for programs, in the place of an engine's code.
        text: What happened, and what to do.
        **more: Further fields.
    """
    return web.Response(
        status=status,
        text=json.dumps({"error": text, "code": None, "code_name": name, **more}),
        content_type="application/json",
    )


def failure(error: MooncakeError, **more: Any) -> web.Response:
    """Answer what the store could not do, with further fields."""
    status = _status_of(error)
    response = web.Response(
        status=status,
        text=json.dumps(
            {
                "error": str(error),
                "code": error.code,
                "code_name": error.code_name or _name_of(error),
                "retryable": error.retryable,
                "key": error.key,
                **more,
            }
        ),
        content_type="application/json",
    )
    if status == _UNAVAILABLE:
        response.headers["Retry-After"] = RETRY_AFTER
    return response


def _status_of(error: MooncakeError) -> int:
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    for kind, status in STATUSES:
        if isinstance(error, kind):
            return status
    return _UNAVAILABLE if error.retryable else 500


def _name_of(error: MooncakeError) -> str:
    """Make a word of an error without a code: ``STORE_CLOSED``."""
    return _WORD_START.sub("_", type(error).__name__.removesuffix("Error")).upper()
