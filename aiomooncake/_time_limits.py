"""The engine's time-outs, as the environment variables it reads: for this process and its servers.

Nothing here imports the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiomooncake.config import StoreConfig

__all__ = ["process_limits", "setup_limits"]

_QUEUED_PER_PEER: Final = "32"
_ADMISSION_MS: Final = "10000"


def process_limits(config: StoreConfig) -> dict[str, str]:
    """Return what native code reads once per process: before it is loaded, or not at all.

    No transfer may reach the engine's own limit of 60 s, or it writes into memory later. A peer
    is served by four lanes, one time-out each after the other, so both the time-out and the
    number of transfers queued for one peer are bounded: on a frozen peer a batch of 200 keys
    ended after 23 s with these values (28 s for 40 keys with the engine's queue of 1024), and a
    batch of 256 keys on a healthy one took as long as with the engine's own.
    """
    seconds = str(max(1, round(config.transfer_timeout)))
    return {
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": _QUEUED_PER_PEER,
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
