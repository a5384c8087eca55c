"""What is told when an extra is not installed."""

from __future__ import annotations

__all__ = ["missing_extra"]


def missing_extra(exc: ModuleNotFoundError, module: str, extra: str) -> ModuleNotFoundError:
    """Say what a module needs, and the command that installs it.

    Args:
        exc: What an import in this module raised.
        module: The module.
        extra: The extra of aiomooncake that brings what it needs.

    Returns:
        An error to be raised in its place, with the same ``name``.
    """
    text = f"{module} needs {exc.name}: pip install 'aiomooncake[{extra}]'"
    return ModuleNotFoundError(text, name=exc.name, path=exc.path)
