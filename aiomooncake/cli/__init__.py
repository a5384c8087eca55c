"""The command line: ``aiomooncake doctor``, ``bench``, ``put``, ``get``, ``warmup`` and others."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line with the arguments of the process, and exit."""
    try:
        from aiomooncake.cli.commands import cli
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing not in ("click", "rich"):
            raise
        sys.exit(f"The command line needs {missing}: pip install 'aiomooncake[cli]'")
    cli(prog_name="aiomooncake")
