"""Thousands of ranks that warm up against one master, in virtual time: ``docs/scale.md``."""

from __future__ import annotations
