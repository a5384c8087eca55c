"""Fields of log records: whose they are, for programs that read logs."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

__all__ = ["StoreLog"]

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # can't be subscripted before Python 3.11


class StoreLog(_Adapter):
    """The logger ``aiomooncake``, for what concerns one store.

    Each record has the attributes ``mooncake_rank`` (as given; None without one) and
    ``mooncake_host`` (the store's own address; empty before it is set up), beside those that a
    call gives by ``extra``.
    """

    def __init__(self, rank: int | str | None, host: str) -> None:
        super().__init__(
            logging.getLogger("aiomooncake"), {"mooncake_rank": rank, "mooncake_host": host}
        )

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the fields; the base class would put them in the place of the call's own."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs
