"""Where and how the engine keeps a value: the placement options of a write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, Literal, get_args

from aiomooncake._values import bad_value, check_text, nearest, parse_integer
from aiomooncake.errors import ConfigError

__all__ = ["DataType", "ReplicateConfig", "SoftPinAction", "refusal_hint"]

SoftPinAction = Literal["preserve", "enable", "disable"]
DataType = Literal[
    "unknown",
    "kvcache",
    "tensor",
    "weight",
    "sample",
    "activation",
    "gradient",
    "optimizer_state",
    "metadata",
    "general",
]

# Upstream's field in wheels up to 0.3.12.post1; the nearest name of ours is another thing.
_FORMER: Final = {"with_soft_pin": "soft_pin_action"}
_MAX_COUNT: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ReplicateConfig:
    """The placement options of a write, checked by the rules of upstream's master.

    They are wishes: what can't be had is left out silently, and :meth:`Store.replicas` tells what
    became of them. Lists are kept as tuples, so that a config can be shared and hashed. The words
    of ``soft_pin_action`` and ``data_type`` are upstream's, in lower case.

    An upsert with a value of the same size writes into the copies that are there, wherever they
    are and however many, and leaves the hard pin as it is. With another size it makes all anew, and
    the master keeps the old room for ten minutes (its ``--put_start_release_timeout_sec``).

    Attributes:
        replica_num: copies in memory, each on a segment of another name. The engine makes fewer
            when segments are few or full; the write fails (-200) when there is room for none.
        nof_replica_num: copies in the NVMe-over-Fabrics pool; -600 from an engine built without it.
        dfs_replica_num: copies in the shared file system: 0, or 1 next to a copy in memory; -1601
            where it is not switched on.
        preferred_segments: segments to try first, in this order, by their names: ``host:port`` as
            in :attr:`Store.hostname`, not the transport's endpoint. One that is not mounted or has
            no room is passed over for any other.
        preferred_segment: upstream's older form for a single one; not both.
        preferred_nof_segments: the same for the NVMe-over-Fabrics pool.
        prefer_alloc_in_same_node: place the single copy on the writer's own host if it has room.
        soft_pin_action: what becomes of the object's soft pin, which delays eviction.
        soft_pin_ttl_ms: milliseconds the soft pin lasts, with ``"enable"`` only; None = the
            master's default. More than its ``--max_kv_soft_pin_ttl`` (a day) is refused (-600).
        with_hard_pin: never evict the object. It can be removed.
        data_type: what the value is, for the master's policies.
        group_ids: one routing group per key, ``""`` for none; None = no groups. A read of one
            member renews the lease of all. A key keeps its group while it is there: an upsert that
            names another one is refused (-600), one without ``group_ids`` leaves it.
    """

    replica_num: int = 1
    _: KW_ONLY
    nof_replica_num: int = 0
    dfs_replica_num: int = 0
    preferred_segments: Sequence[str] = ()
    preferred_segment: str = ""
    preferred_nof_segments: Sequence[str] = ()
    prefer_alloc_in_same_node: bool = False
    soft_pin_action: SoftPinAction = "preserve"
    soft_pin_ttl_ms: int | None = None
    with_hard_pin: bool = False
    data_type: DataType = "unknown"
    group_ids: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("replica_num", "nof_replica_num", "dfs_replica_num"):
            count = parse_integer(getattr(self, name), field=name, least=0, most=_MAX_COUNT)
            object.__setattr__(self, name, count)
        for name in ("preferred_segments", "preferred_nof_segments", "group_ids"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _texts(value, field=name))
        for name in ("prefer_alloc_in_same_node", "with_hard_pin"):
            if not isinstance(getattr(self, name), bool):
                raise bad_value(name, getattr(self, name), "give True or False")
        segment = check_text(self.preferred_segment, field="preferred_segment")
        object.__setattr__(self, "preferred_segment", segment)
        _word(self.soft_pin_action, get_args(SoftPinAction), field="soft_pin_action")
        _word(self.data_type, get_args(DataType), field="data_type")
        if self.soft_pin_ttl_ms is not None:
            parse_integer(self.soft_pin_ttl_ms, field="soft_pin_ttl_ms", least=0)
        self._check_together()

    def _check_together(self) -> None:
        # The master answers each of these with a bare -600 (upstream's master_service.cpp).
        copies = self.replica_num + self.nof_replica_num + self.dfs_replica_num
        if copies == 0:
            raise bad_value("replica_num", 0, "a value needs at least one copy")
        if self.dfs_replica_num > 1:
            raise bad_value("dfs_replica_num", self.dfs_replica_num, "the engine knows 0 and 1")
        if self.dfs_replica_num and self.replica_num == 0:
            raise bad_value("dfs_replica_num", 1, "it needs a copy in memory too: replica_num=1")
        if self.prefer_alloc_in_same_node and (self.replica_num, self.nof_replica_num) != (1, 0):
            want = "it goes with replica_num=1 and nof_replica_num=0 only"
            raise bad_value("prefer_alloc_in_same_node", value=True, want=want)
        if self.soft_pin_ttl_ms is not None and self.soft_pin_action != "enable":
            want = 'it goes with soft_pin_action="enable" only'
            raise bad_value("soft_pin_ttl_ms", self.soft_pin_ttl_ms, want)
        if self.preferred_segment and self.preferred_segments:
            want = "give preferred_segments or preferred_segment, not both"
            raise bad_value("preferred_segment", self.preferred_segment, want)

    def replace(self, **changes: Any) -> ReplicateConfig:
        """Return a copy with some fields changed."""
        for name in changes:
            if name not in self.__dataclass_fields__:
                hint = _FORMER.get(name) or nearest(name, self.__dataclass_fields__)
                raise ConfigError(
                    f"ReplicateConfig has no field {name!r}"
                    f"{f'; did you mean {hint!r}?' if hint else '.'}"
                )
        return replace(self, **changes)


def refusal_hint(config: ReplicateConfig | None, verb: str) -> str:
    """Say which of these options the engine may mean when it answers -600; empty for none.

    Args:
        config: The options of the write.
        verb: The verb that failed: ``"upsert"``, or one that puts.
    """
    if config is None:
        return ""
    causes: list[str] = []
    if verb == "upsert" and config.group_ids is not None:
        causes.append(
            "the key has another routing group, which it keeps while it is there (remove it first, "
            "or leave group_ids out)"
        )
    if verb == "upsert" and config.prefer_alloc_in_same_node:
        causes.append("prefer_alloc_in_same_node is known to put only")
    if config.nof_replica_num:
        causes.append("this engine is built without NVMe over Fabrics (nof_replica_num)")
    if config.soft_pin_ttl_ms is not None:
        causes.append("soft_pin_ttl_ms is more than the master's --max_kv_soft_pin_ttl")
    return (
        f"With these options the cause may be that {', or that '.join(causes)}." if causes else ""
    )


def _texts(value: object, *, field: str) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise bad_value(field, value, "give a list or tuple of texts")
    for item in value:
        check_text(item, field=field, spaces=True)
    return tuple(value)


def _word(value: object, words: tuple[str, ...], *, field: str) -> None:
    if value not in words:
        raise bad_value(field, value, f"give one of {', '.join(words)}")
