"""What callers see of each fault: the table that the tests assert and the documentation shows.

A column is a fault, a row a verb. What a cell does not say is as usual and at once. The staging is
in :mod:`tests.adversity.matrix_scenes`, the calls are in :mod:`tests.adversity.matrix_calls`;
``scripts/adversity_table.py`` writes the tables of ``docs/faults.md`` from this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = ["FAMILIES", "GROUPS", "TIMES", "USUAL", "Cell", "Column", "Family", "Time", "column"]

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "reads": (
        "get",
        "get (9 MB)",
        "get_into",
        "get_many",
        "get_many_into",
        "view",
        "view_many",
        "get_session",
    ),
    "lookups": ("exists", "size", "replicas", "exists_many", "replicas_many"),
    "writes": (
        "put",
        "put (9 MB)",
        "put_parts",
        "put_from",
        "put_many",
        "put_many_from",
        "put_session",
        "upsert",
    ),
    "removes": ("remove", "remove_many", "remove_by_regex", "remove_all"),
    "memory": ("allocate", "register"),
    "raw": ("engine.is_exist", "blocking.is_exist"),
    "warm-up": ("warmup",),
    "state": ("health", "stats"),
    "close": ("aclose",),
}
"""The verbs; ``put (9 MB)`` and ``get (9 MB)`` are those of values that travel in pieces."""


@dataclass(frozen=True)
class Time:
    """How long a call takes.

    Attributes:
        name: What it is called in the tables.
        seconds: What the tests allow, with the short time-outs that they set: far more than it
            takes on a quiet machine, and less than the engine's own limit of 60 s.
    """

    name: str
    seconds: float


AT_ONCE: Final = Time("at once", 1.0)
ROUND_TRIPS: Final = Time("its round trips", 10.0)
RPC: Final = Time("RPC time-out", 15.0)
CONNECTING: Final = Time("connect time-out", 45.0)
TRANSFER: Final = Time("transfer time-out", 40.0)
OWN: Final = Time("its own time-out", 12.0)
CLOSING: Final = Time("closing", 20.0)
TIMES: Final = (AT_ONCE, ROUND_TRIPS, RPC, CONNECTING, TRANSFER, OWN, CLOSING)


@dataclass(frozen=True)
class Cell:
    """What a call answers, and in what time.

    Attributes:
        results: The answers that are right: ``"as usual"``, ``"a miss"``, ``"code -901"`` of the
            raw calls, or an error class. A verb with many keys raises ``BatchError`` with an error
            of that class for each key that failed.
        time: In what time.
    """

    results: tuple[str, ...]
    time: Time = AT_ONCE


USUAL: Final = Cell(("as usual",))
MISS: Final = Cell(("a miss",))


def cell(*results: str, time: Time = AT_ONCE) -> Cell:
    """Return a cell."""
    return Cell(results, time)


@dataclass(frozen=True)
class Column:
    """One fault.

    Attributes:
        name: A short name, also of its keys.
        title: The head of its column.
        cells: By verb, by group of verbs, or ``"*"`` for all others: the cells that are not as
            usual. The first of these that is there counts.
        health: What :meth:`Store.health` says meanwhile.
        keeps: Whether what a write has stored is there when the fault has ended.
    """

    name: str
    title: str
    cells: Mapping[str, Cell]
    health: tuple[str, ...] = ("ready",)
    keeps: bool = True

    def cell(self, verb: str) -> Cell:
        """Return what is expected of a verb."""
        (group,) = (group for group, verbs in GROUPS.items() if verb in verbs)
        for place in (verb, group, "*"):
            if place in self.cells:
                return self.cells[place]
        return USUAL


@dataclass(frozen=True)
class Family:
    """Faults of one part, which make one table.

    Attributes:
        name: Its name, and that of its table.
        columns: The faults.
    """

    name: str
    columns: tuple[Column, ...] = field(default=())


# What is so everywhere: health and stats ask nobody, and closing takes its time.
_ALWAYS: Final = {"state": USUAL, "close": cell("as usual", time=CLOSING)}
_AWAY: Final = ("master-unreachable",)

_AFTER_A_RESTART: Final = {
    "reads": MISS,
    "lookups": MISS,
    "removes": MISS,
    "raw": cell("code 0"),
    "remove_all": cell("as usual", "a miss"),
}

MASTER: Final = Family(
    "master",
    (
        Column(
            "frozen",
            "frozen, not noticed yet",
            {
                **_ALWAYS,
                "memory": cell("as usual", "RpcError", time=RPC),
                "raw": cell("code -901", "RpcError", time=RPC),
                "warm-up": cell("WarmupError: master-silent", time=OWN),
                "*": cell("RpcError", time=RPC),
            },
            health=_AWAY,
            keeps=False,
        ),
        Column(
            "killed",
            "killed, not noticed yet",
            {
                **_ALWAYS,
                "memory": cell("as usual", "RpcError", time=CONNECTING),
                "raw": cell("code -900", "RpcError", time=CONNECTING),
                "warm-up": cell("WarmupError: master-unreachable", time=OWN),
                "*": cell("RpcError", time=CONNECTING),
            },
            health=_AWAY,
            keeps=False,
        ),
        Column(
            "away",
            "away, and noticed",
            {
                **_ALWAYS,
                "warm-up": cell(
                    "WarmupError: master-silent", "WarmupError: master-unreachable", time=OWN
                ),
                "*": cell("RpcError"),
            },
            health=_AWAY,
            keeps=False,
        ),
        Column(
            "restarted",
            "restarted a moment ago",
            {
                **_ALWAYS,
                "reads": cell("RpcError", "a miss"),
                "lookups": cell("RpcError", "a miss"),
                "removes": cell("RpcError", "a miss"),
                "remove_all": cell("RpcError", "a miss", "as usual"),
                "writes": cell("RpcError", "NoSpaceError", "as usual"),
                "memory": cell("RpcError", "as usual"),
                "raw": cell("RpcError", "code -900", "code 0"),
                "warm-up": cell("as usual", time=OWN),
            },
            health=("master-unreachable", "re-mounting", "ready"),
            keeps=False,
        ),
        Column("settled", "restarted, and warmed up", {**_ALWAYS, **_AFTER_A_RESTART}),
    ),
)

LINE: Final = Family(
    "line",
    (
        Column(
            "slow",
            "slow (0.1 s for each request)",
            {**_ALWAYS, "*": cell("as usual", time=ROUND_TRIPS)},
        ),
        Column(
            "cut",
            "cut again and again",
            {
                **_ALWAYS,
                "memory": cell("as usual", "RpcError", time=ROUND_TRIPS),
                "raw": cell("as usual", "code -900", "RpcError", time=ROUND_TRIPS),
                "warm-up": cell("as usual", time=OWN),
                "*": cell("as usual", "RpcError", time=ROUND_TRIPS),
            },
            health=("ready", "master-unreachable"),
        ),
        Column(
            "corrupt",
            "breaks the head of each request",
            {
                **_ALWAYS,
                "memory": cell("as usual", "RpcError"),
                "raw": cell("code -900", "RpcError"),
                "warm-up": cell("WarmupError", time=OWN),
                "*": cell("RpcError"),
            },
            health=_AWAY,
        ),
    ),
)

_NO_TRANSFER: Final = cell("TransferError", time=TRANSFER)
# Its value is placed like any other: on the peer, or elsewhere.
_LUCK: Final = {"warm-up": cell("as usual", "WarmupError", time=OWN)}

OWNER: Final = Family(
    "owner",
    (
        Column(
            "owner-frozen",
            "frozen, not noticed yet",
            {**_ALWAYS, **_LUCK, "reads": _NO_TRANSFER, "writes": _NO_TRANSFER},
            health=("degraded",),
        ),
        Column(
            "owner-killed",
            "killed, not noticed yet",
            {**_ALWAYS, **_LUCK, "reads": _NO_TRANSFER, "writes": _NO_TRANSFER},
            health=("degraded",),
            keeps=False,
        ),
        Column(
            "owner-avoided",
            "away, and avoided",
            {
                **_ALWAYS,
                **_LUCK,
                "reads": cell("TransferError"),
                # A value of the same size takes the place of the old one, which is on the peer.
                "upsert": _NO_TRANSFER,
            },
            health=("degraded",),
        ),
        Column(
            "owner-expired",
            "dead for longer than client_ttl",
            {**_ALWAYS, **_AFTER_A_RESTART},
            health=("degraded", "ready"),
        ),
    ),
)

_FULL: Final = cell("NoSpaceError")
_EVICTED: Final = cell("as usual", "a miss")

ROOM: Final = Family(
    "room",
    (
        Column(
            "buffer",
            "local buffer held by views",
            {**_ALWAYS, "warm-up": cell("WarmupError: local-buffer-too-small", time=OWN)},
        ),
        Column(
            "full",
            "segments full, nothing to evict",
            {
                **_ALWAYS,
                "writes": _FULL,
                "upsert": USUAL,  # in the place of the old value, which has the same size
                "warm-up": cell("WarmupError: out-of-space", time=OWN),
            },
        ),
        Column(
            "evicting",
            "segments full, evicting",
            {
                **_ALWAYS,
                "reads": _EVICTED,
                "lookups": _EVICTED,
                "removes": _EVICTED,
                "raw": cell("as usual", "code 0"),
                "writes": cell("as usual", "NoSpaceError"),
                "warm-up": cell("as usual", time=OWN),
            },
            keeps=False,
        ),
        Column(
            "leased",
            "lease held",
            {
                **_ALWAYS,
                "remove": cell("ObjectLeasedError"),
                "remove_many": cell("ObjectLeasedError"),
                "remove_by_regex": MISS,
                "remove_all": cell("as usual", "a miss"),
            },
        ),
    ),
)

CLIENT: Final = Family(
    "client",
    (
        Column(
            "thawed",
            "its values in its own memory",
            {**_ALWAYS, **_AFTER_A_RESTART},
        ),
        Column("thawed-peer", "its values on a peer", {**_ALWAYS}),
    ),
)

FAMILIES: Final = (MASTER, LINE, OWNER, ROOM, CLIENT)


def column(name: str) -> Column:
    """Return a column by its name."""
    (found,) = (each for family in FAMILIES for each in family.columns if each.name == name)
    return found
