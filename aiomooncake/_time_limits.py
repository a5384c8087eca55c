"""The engine's time-outs, as the environment variables it reads: for this process and its servers.

Nothing here imports the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiomooncake.config import StoreConfig

__all__ = ["process_limits", "setup_limits"]

_QUEUED_PER_PEER: Final = "8"
_PENDING_PER_PEER: Final = "65535"  # the most that the engine takes
_ADMISSION_MS: Final = "5000"


def process_limits(config: StoreConfig) -> dict[str, str]:
    """Return what native code reads once per process: before it is loaded, or not at all.

    No transfer may reach the engine's own limit of 60 s, or it writes into memory later. A peer
    is served by four lanes, one time-out each after the other, so the time-out, the number of
    transfers queued for one peer and the time they wait to be queued are all bounded: 16 keys of 32
    pieces each end after 10 s on a frozen peer (33 s with a queue of 32 and 10 s, and 40 keys
    after 28 s with the engine's queue of 1024), and on a healthy one they take as long as with the
    engine's own values.
    """
    seconds = str(max(1, round(config.transfer_timeout)))
    return {
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": _QUEUED_PER_PEER,
        # Each piece of a value is a transfer, and one beyond these is refused at once with -800,
        # however healthy the peer is.
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": _PENDING_PER_PEER,
        # Longer than the engine's 1 s: a peer that is busy with large transfers is not a failure.
        "MC_TCP_ADMISSION_TIMEOUT_MS": _ADMISSION_MS,
        # The tries are ours, bounded by the time limit of connect or of the start.
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    }


def setup_limits(config: StoreConfig) -> dict[str, str]:
    """Return what is read at each set-up: the limits of requests to the master."""
    return {
        "MC_RPC_TIMEOUT_MS": str(round(config.rpc_timeout * 1000)),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(round(config.rpc_connect_timeout * 1000)),
    }
