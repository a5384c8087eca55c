"""What our errors are in the binding's answers: its codes, and ``b""`` for a value."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Final

from aiomooncake.errors import (
    ConfigError,
    InternalError,
    InvalidArgumentError,
    MooncakeError,
    NotSupportedError,
    SetupError,
)

__all__ = ["code_of", "code_when_done", "setup_code", "value_of"]

log = logging.getLogger("aiomooncake")

_INTERNAL: Final = -1
_INVALID: Final = -600
_NOT_SUPPORTED: Final = -1012


async def code_when_done(name: str, call: Awaitable[None]) -> int:
    """Await a call that answers nothing: 0, or the code of what went wrong."""
    try:
        await call
    except MooncakeError as exc:
        return code_of(name, exc)
    return 0


def code_of(name: str, error: MooncakeError) -> int:
    """Tell the engine's code of what went wrong with a call; raise what has none."""
    code = _engine_code(error)
    log.debug("%s answers %d: %s", name, code, error)
    return code


def value_of(name: str, answer: bytes | MooncakeError | None) -> bytes:
    """Tell a value as the binding does; raise what the engine has no code for."""
    if isinstance(answer, MooncakeError):
        code_of(name, answer)
        return b""
    return b"" if answer is None else answer


def setup_code(error: MooncakeError) -> int:
    """Tell the code of a set-up that failed; raise what has none."""
    if error.code is None and isinstance(error, SetupError):
        return _INTERNAL  # the time is up: what the engine answers after its last try
    if error.code is None and isinstance(error, NotSupportedError):
        return _NOT_SUPPORTED
    return _engine_code(error)


def _engine_code(error: MooncakeError) -> int:
    if error.code is not None:
        return error.code
    if isinstance(error, InternalError):
        return _INTERNAL
    if isinstance(error, (ConfigError, InvalidArgumentError)):
        return _INVALID
    raise error
