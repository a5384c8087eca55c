"""Keep calls off peers that do not answer. Blocking: for worker threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from aiomooncake.config import ReplicateConfig
from aiomooncake.errors import MooncakeError, error_from_code
from aiomooncake.replicas import first_copies

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient
    from aiomooncake.engine.peers import PeerWatch

__all__ = ["TRANSFER_FAIL", "around", "kept_off", "suspect_owners", "suspect_peers", "unreachable"]

TRANSFER_FAIL: Final = -800


def suspect_peers(client: EngineClient, verb: str, key: str) -> None:
    """Let those be knocked at to which a transfer failed."""
    peers = client.peers
    if peers is None or not peers.wants_news:
        return
    if verb.startswith("get"):
        found = first_copies(client.native_object, [key])
        peers.suspect(copy.transport_endpoint for copy in found.values())
    else:
        peers.suspect_all()  # the engine does not say where it tried to store a value


def suspect_owners(client: EngineClient, keys: Sequence[str]) -> None:
    """Let the owners of keys be knocked at whose read takes long; on the loop, never blocks.

    One question at a time: each takes seconds where the master does not answer either, and slow
    reads ask again and again.
    """
    peers = client.peers
    if peers is None or peers.asking or not peers.wants_news:
        return

    def ask(some: Sequence[str]) -> Sequence[Any]:
        found = first_copies(client.native_object, some)
        peers.suspect(copy.transport_endpoint for copy in found.values())
        return ()

    def over() -> None:
        peers.asking = False

    peers.asking = True
    try:
        client.start(
            client.hedge,
            "owners",
            ask,
            keys,
            done=lambda _: None,  # nobody waits for it
            over=over,
            keys=len(keys),
        )
    except (MooncakeError, RuntimeError):  # the store closes, its master is away, or no thread
        over()


def unreachable(client: EngineClient, keys: Sequence[str], verb: str) -> dict[str, MooncakeError]:
    """Find the keys that would be read from peers which do not answer, and why they are not."""
    stuck = client.peers.stuck if client.peers is not None else {}
    if not stuck:
        return {}
    refused: dict[str, MooncakeError] = {}
    for key, copy in first_copies(client.native_object, keys).items():
        peer = copy.transport_endpoint
        if peer in stuck:
            hint = (
                f"It was not tried: the peer {peer}, which holds it, has not answered for "
                f"{time.time() - stuck[peer]:.1f} s. It is tried again when the peer answers."
            )
            error = error_from_code(TRANSFER_FAIL, verb, key=key, rank=client.rank, hint=hint)
            client.note_error(error)
            refused[key] = error
    return refused


def around(
    keys: Sequence[str],
    refused: Mapping[str, MooncakeError],
    ask: Callable[[list[int]], Sequence[Any]],
) -> list[Any]:
    """Ask for the keys that are not refused, by their places; an answer or refusal for each key."""
    places = [place for place, key in enumerate(keys) if key not in refused]
    answers: list[Any] = [refused.get(key) for key in keys]
    if places:
        for place, answer in zip(places, ask(places), strict=True):
            answers[place] = answer
    return answers


def kept_off(config: ReplicateConfig | None, peers: PeerWatch | None) -> ReplicateConfig | None:
    """Prefer segments of peers that answer while others do not, unless the caller prefers some."""
    if peers is None or not peers.elsewhere:
        return config
    if config is None:
        return ReplicateConfig(preferred_segments=peers.elsewhere)
    if config.preferred_segments or config.preferred_segment or config.prefer_alloc_in_same_node:
        return config
    return config.replace(preferred_segments=peers.elsewhere)
