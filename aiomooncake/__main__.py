"""Run the command line: ``python -m aiomooncake``."""

from __future__ import annotations

from aiomooncake.cli import main

if __name__ == "__main__":
    main()
