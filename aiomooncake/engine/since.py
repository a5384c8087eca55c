"""Which engine wheel came with what, for the words of a refusal; nothing is decided by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aiomooncake.engine.binding import installed_version
from aiomooncake.errors import NotSupportedError

__all__ = ["METHODS_SINCE", "OLDEST", "no_method"]

OLDEST: Final = "0.3.10.post2"
"""The oldest wheel that has all that the verbs call."""

# Seen in the wheels 0.3.10.post2, 0.3.11, 0.3.11.post1, 0.3.12.post1, 0.3.13 and 0.3.13.post1. What
# came with 0.3.11 is said of its .post1, with which the tests are run.
_CAME_WITH: Final[Mapping[str, str]] = {
    "0.3.11.post1": (
        "allocate_and_mount_segment batch_get_tensor_with_parallelism "
        "batch_get_tensor_with_parallelism_into batch_put_tensor_with_parallelism "
        "batch_put_tensor_with_parallelism_from batch_upsert_tensor_with_parallelism "
        "batch_upsert_tensor_with_parallelism_from get_tensor_with_parallelism "
        "get_offload_rpc_read_count get_tensor_with_parallelism_into mount_segment "
        "put_tensor_with_parallelism put_tensor_with_parallelism_from unmount_and_free_segment "
        "unmount_segment upsert_tensor_with_parallelism upsert_tensor_with_parallelism_from"
    ),
    "0.3.13": (
        "batch_get_into_multi_buffer_ranges batch_get_session_end batch_get_session_start "
        "batch_get_tensor_into_cuda batch_put_from_multi_buffer_ranges batch_put_session_end "
        "batch_put_session_revoke batch_put_session_start get_tensor_into_cuda "
        "unmount_local_disk_segment"
    ),
}

METHODS_SINCE: Final[Mapping[str, str]] = {
    name: version for version, names in _CAME_WITH.items() for name in names.split()
}
"""The methods of the binding that came later than :data:`OLDEST`, and with which wheel."""


class _NoMethodError(NotSupportedError, AttributeError):
    """A method that only newer wheels have; ``hasattr()`` knows no other error than the second."""

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, (_, *rest) = super().__reduce__()
        return rebuild, (NotSupportedError, *rest)  # by that name pickle would find another class


# What a traceback shows is the name that can be caught.
_NoMethodError.__name__ = _NoMethodError.__qualname__ = NotSupportedError.__name__
_NoMethodError.__module__ = NotSupportedError.__module__


def no_method(
    name: str, *, key: str | None = None, rank: int | str | None = None
) -> NotSupportedError:
    """Make the error of a method that the installed wheel lacks."""
    version = installed_version()
    wheel = f"engine {version}" if version else "the installed engine"
    newer = f"{METHODS_SINCE[name]} or newer" if name in METHODS_SINCE else "a newer wheel"
    return _NoMethodError(f"{wheel} has no {name}: install {newer}", key=key, rank=rank)
