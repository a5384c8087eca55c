"""What "dummy" clients do, with the bare binding, in interpreters of their own."""

from __future__ import annotations

from typing import Any

from aiomooncake.cluster import LocalCluster

__all__ = ["comes_back", "meets_another", "puts_and_gets"]

MB = 1 << 20
VALUE = bytes(range(256)) * 16


def _dummy(address: str) -> Any:
    import mooncake.store

    store = mooncake.store.MooncakeDistributedStore()
    assert store.setup_dummy(64 * MB, 16 * MB, address) == 0
    return store


def puts_and_gets(address: str) -> None:
    """Use a client that somebody else has started."""
    store = _dummy(address)
    assert store.put("key", VALUE) == 0
    assert store.get("key") == VALUE
    assert store.put_batch(["a", "b"], [b"1", b"2"]) == 0
    assert store.get_batch(["a", "b", "none"]) == [b"1", b"2", b""]
    assert store.is_exist("none") == 0
    assert store.close() == 0


def meets_another(address: str) -> None:
    """Read through one client what was written through another one, of another process."""
    store = _dummy(address)
    assert store.get("key") == VALUE
    assert store.close() == 0


def comes_back() -> None:
    """Be served again by a client that was killed and came back on its port."""
    with LocalCluster() as cluster:
        cluster.blocking.start_client()  # where the values go: this one's segment lives on
        client = cluster.blocking.start_client(global_segment_size=0)
        before = _dummy(client.address)
        assert before.put("key", VALUE) == 0
        client.blocking.kill()
        client.blocking.start()
        # The first one may not notice for ever that its shared memory is mapped no more: it pings
        # once a second, and the new process answers as the old one did.
        after = _dummy(client.address)
        assert after.get("key") == VALUE
        assert after.put("other", VALUE) == 0
        assert after.close() == 0
        del before
