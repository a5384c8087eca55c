"""The package's version: the only place it is written down."""

from __future__ import annotations

__version__ = "0.1.0"
