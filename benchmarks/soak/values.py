"""Values that tell what they are: of which key, which one of it, and whether all of it is there."""

from __future__ import annotations

import random
import struct
import zlib

__all__ = ["Ledger", "WrongValueError"]

# Length of the whole value, check sums of key and body, and which value of the key it is.
_HEADER = struct.Struct("<QIII")
_NOISE = 1 << 20


class WrongValueError(Exception):
    """A value was read that nobody has written under this key."""


class Ledger:
    """Makes values, and knows again those that it has made.

    Args:
        seed: What the bytes are made of.
    """

    def __init__(self, seed: int) -> None:
        self._noise = random.Random(seed).randbytes(_NOISE)
        self._made: dict[str, int] = {}

    def new(self, key: str, nbytes: int) -> bytes:
        """Make the next value of a key; it may be read from now on, whatever becomes of the call.

        Args:
            key: The key.
            nbytes: About how long it should be.
        """
        version = self._made.get(key, 0) + 1
        self._made[key] = version
        length = max(nbytes - _HEADER.size, 1)
        start = random.Random(f"{key} {version}").randrange(_NOISE)
        body = (self._noise[start:] + self._noise * (length // _NOISE + 1))[:length]
        name = zlib.crc32(key.encode())
        return _HEADER.pack(_HEADER.size + length, name, zlib.crc32(body), version) + body

    def check(self, key: str, value: bytes | memoryview) -> None:
        """Fail unless a value was made for the key.

        Raises:
            WrongValueError: It is cut short, of another key, has wrong bytes, or was never made.
        """
        if len(value) < _HEADER.size:
            raise WrongValueError(f"{key}: {len(value)} bytes, which is no value: {bytes(value)!r}")
        nbytes, name, body, version = _HEADER.unpack_from(value)
        if name != zlib.crc32(key.encode()):
            raise WrongValueError(f"{key}: the value of another key, or none: {self._guess(name)}")
        if nbytes != len(value):
            raise WrongValueError(f"{key}: {len(value)} bytes of a value of {nbytes}")
        if body != zlib.crc32(memoryview(value)[_HEADER.size :]):
            raise WrongValueError(f"{key}: some of the {nbytes} bytes are not those of the value")
        if not 0 < version <= self._made.get(key, 0):
            raise WrongValueError(f"{key}: value {version}, which was never made")

    def _guess(self, name: int) -> str:
        return next((key for key in self._made if zlib.crc32(key.encode()) == name), "unknown")
