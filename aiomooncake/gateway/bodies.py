"""Bodies of puts: a small one is parsed at once, a large one where it lies.

The value of ``{"key": …, "value": …}`` is a JSON text, and decoding 100 MB of it at once stops the
loop and needs several copies. So a large body comes into one piece of memory and is decoded there,
a bit at a time: no escape is shorter than the bytes it stands for.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import re
from typing import Any, Final

from aiohttp import hdrs, web

from aiomooncake.gateway.answers import BadRequestError

__all__ = ["BodyTooLargeError", "json_object", "read_item"]

SMALL: Final = 256 << 10
"""Bytes of a body up to which parsing at once is quicker than it is long: under 1 ms."""

_HEAP: Final = 4 << 20
"""Bytes of a body up to which memory of the heap is quicker than a map, whose pages are new each
time; beyond, zeroing it would stop the loop."""

_PIECE: Final = 64 << 10
_TURN: Final = 4  # pieces that are decoded in one turn of the loop: 0.3 ms, full of escapes 5 ms
_STEPS: Final = 500  # texts, brackets and other values that are found in one turn: below 1 ms
_FIRST: Final = 1 << 10  # bytes in which the end of a text is looked for first: most are short
_CHARSETS: Final = frozenset(
    {"utf-8", "utf8", "utf-16", "utf-32", "us-ascii", "ascii", "iso-8859-1", "latin-1"}
)
"""What JSON comes in. Others may take minutes to decode: punycode does for a megabyte."""
_SPACE: Final = re.compile(rb"[ \t\n\r]*")
# What a text may hold up to its final quote; a pair of surrogates is one.
_TEXT: Final = re.compile(
    rb"""(?: [^"\\]+ | \\[^u] | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
        | \\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2} )*""",
    re.DOTALL | re.VERBOSE,
)
_LAST_CHARACTER: Final = re.compile(rb"[\xc0-\xff][\x80-\xbf]{0,2}\Z")
_SHORT: Final = re.compile(rb'[^",{}\[\]]{1,100}')  # a number, true, false or null
_STRUCTURE: Final = re.compile(rb'[^"{}\[\]]*')


class BodyTooLargeError(Exception):
    """The body is larger than the gateway takes."""


async def json_object(request: web.Request) -> dict[str, Any]:
    """Read a small body that must be a JSON object.

    Raises:
        BadRequestError: It is none.
    """
    return _object(await request.read(), request.charset)


async def read_item(request: web.Request, limit: int) -> tuple[Any, bytes | memoryview | None]:
    """Read the key and the value of a put.

    Args:
        request: The request; its body has not been read.
        limit: Bytes of a body at most.

    Returns:
        The key as it was given, and the value as bytes; None where the body has none.

    Raises:
        BodyTooLargeError: It is larger than ``limit``.
        BadRequestError: It is no JSON object, or its value no text.
    """
    length = request.content_length
    if length is not None and length > limit:
        raise BodyTooLargeError
    plain = length is not None and hdrs.CONTENT_ENCODING not in request.headers
    if plain and length is not None and length <= SMALL:
        item = _object(await request.read(), request.charset)
        return item.get("key"), _encoded(item.get("value"))
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise BadRequestError(f"a body of more than {SMALL} bytes must be UTF-8")
    room = length if plain and length is not None else limit
    body = bytearray(room + 1) if room <= _HEAP else mmap.mmap(-1, room + 1)
    filled = 0
    async for chunk in request.content.iter_any():
        if filled + len(chunk) > room:
            raise BodyTooLargeError
        body[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    return await _LargeObject(body, filled).read()


def _object(body: bytes, charset: str | None) -> dict[str, Any]:
    if charset is not None and charset.lower() not in _CHARSETS:
        raise BadRequestError("the body must be UTF-8")
    try:
        parsed = json.loads(body if charset is None else body.decode(charset))
    except (ValueError, RecursionError) as exc:
        raise BadRequestError(f"the body is not usable JSON: {exc}") from None
    if not isinstance(parsed, dict):
        raise BadRequestError("the body must be a JSON object")
    return parsed


def _encoded(value: object) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadRequestError(f"value must be a JSON string, not {type(value).__name__}")
    try:
        return value.encode()
    except UnicodeEncodeError as exc:
        raise BadRequestError(f"value is no valid Unicode: {exc.reason}") from None


class _LargeObject:
    """A JSON object in memory whose long texts are decoded where they lie."""

    def __init__(self, body: bytearray | mmap.mmap, size: int) -> None:
        self._body = memoryview(body)
        self._size = size
        self._at = 0
        self._steps = 0

    async def read(self) -> tuple[Any, memoryview | None]:
        """Find the members ``key`` and ``value``; of one given twice the last counts, as ever."""
        key: Any = None
        value: memoryview | None = None
        self._take(b"{")
        if self._peek() == b"}":
            self._at += 1
        else:
            while True:
                name = bytes(await self._text())
                self._take(b":")
                if name == b"value":
                    value = await self._value()
                elif name == b"key":
                    key = await self._key()
                else:
                    await self._value(wanted=False)
                if self._peek() != b",":
                    break
                self._at += 1
            self._take(b"}")
        if self._peek():
            raise self._wrong("nothing after the object")
        return key, value

    async def _key(self) -> Any:
        return bytes(await self._text()).decode() if self._peek() == b'"' else await self._other()

    async def _value(self, *, wanted: bool = True) -> memoryview | None:
        if self._peek() == b'"':
            return await self._text()
        if await self._other() is not None and wanted:
            raise BadRequestError("value must be a JSON string")
        return None

    async def _text(self) -> memoryview:
        """Decode a text where it lies; what comes back is a part of the body."""
        self._take(b'"')
        body, begin, to, turns = self._body, self._at, self._at, 0
        length = _FIRST
        await self._step()
        while True:
            raw = bytes(body[self._at : min(self._size, self._at + length)])
            length = _PIECE
            quote = raw.find(b'"')
            if b"\\" in raw[: None if quote < 0 else quote]:
                found = _TEXT.match(raw)
                piece = found.group() if found is not None else b""
            else:
                piece = raw if quote < 0 else raw[:quote]  # most pieces, and much quicker
            closed = raw[len(piece) : len(piece) + 1] == b'"'
            if not closed:
                # The rest of the last character may be in the next piece.
                piece = piece[:-3] + _LAST_CHARACTER.sub(b"", piece[-3:])
            if piece:
                decoded = _decoded(piece)
                body[to : to + len(decoded)] = decoded
                to += len(decoded)
                self._at += len(piece)
            if closed:
                self._at += 1
                return body[begin:to]
            if not piece:
                raise self._wrong("the end of a text, or an escape")
            turns += 1
            if turns % _TURN == 0:
                await asyncio.sleep(0)

    async def _step(self) -> None:
        """Let others have their turn, now and then."""
        self._steps += 1
        if not self._steps % _STEPS:
            await asyncio.sleep(0)

    async def _other(self) -> Any:
        """Parse a value that is no text; of an object or list only find the end."""
        if self._peek() in (b"{", b"["):
            await self._skip()
            return NotImplemented
        found = _SHORT.match(self._body, self._at, self._size)
        text = found.group() if found is not None else b""
        self._at += len(text)
        try:
            return json.loads(text)
        except ValueError:
            raise self._wrong("a value") from None

    async def _skip(self) -> None:
        depth = 0
        while True:
            await self._step()
            found = _STRUCTURE.match(self._body, self._at, self._size)
            self._at = found.end() if found is not None else self._at
            mark = self._peek()
            if mark == b'"':
                await self._text()
                continue
            if not mark:
                raise self._wrong("the end of a value")
            self._at += 1
            depth += 1 if mark in (b"{", b"[") else -1
            if not depth:
                return

    def _peek(self) -> bytes:
        """Return the next byte that is no space; empty at the end."""
        space = _SPACE.match(self._body, self._at, self._size)
        if space is not None:
            self._at = space.end()
        return bytes(self._body[self._at : min(self._size, self._at + 1)])

    def _take(self, wanted: bytes) -> None:
        if self._peek() != wanted:
            raise self._wrong(wanted.decode())
        self._at += 1

    def _wrong(self, wanted: str) -> BadRequestError:
        return BadRequestError(
            f"the body is not usable JSON: {wanted} expected near byte {self._at}"
        )


def _decoded(piece: bytes) -> bytes:
    try:
        text: str = json.loads(b'"' + piece + b'"')
        return text.encode()
    except (ValueError, UnicodeEncodeError) as exc:
        raise BadRequestError(f"the body is not usable JSON: {exc}") from None
