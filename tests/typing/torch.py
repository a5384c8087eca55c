"""In place of torch for the type checkers: quick to read, and there where torch is not."""

from __future__ import annotations


class Tensor:
    """A tensor."""
