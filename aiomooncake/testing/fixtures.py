"""Stores that tests open on a cluster that they share, and that close behind the tests."""

from __future__ import annotations

import asyncio
import http.client
import time
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final

from aiomooncake.connect import connect
from aiomooncake.errors import ClusterError, code_name
from aiomooncake.opening import Opening
from aiomooncake.store import Store

if TYPE_CHECKING:
    from aiomooncake.cluster import LocalCluster
    from aiomooncake.config import StoreConfig

__all__ = ["ClosingStores", "MooncakeConnect", "SharedCluster"]

_CONNECT_TIMEOUT: Final = 20.0
_CLOSE_TIMEOUT: Final = 60.0  # of all stores; one needs 1-2 s, 7-14 s without its master
_UNMOUNT_TIMEOUT: Final = 20.0
_LOOK_AGAIN: Final = 0.02
_HTTP_TIMEOUT: Final = 2.0


class ClosingStores:
    """Stores that close behind the tests, side by side, because each of them takes seconds."""

    def __init__(self) -> None:
        self._closing: dict[ThreadFuture[None], str] = {}

    def __repr__(self) -> str:
        closing = sum(not future.done() for future in self._closing)
        return f"<{type(self).__name__} with {closing} closing stores>"

    def close(self, store: Store) -> None:
        """Begin to close a store; needs no loop, and does not block."""
        self._closing[store._client.begin_close()] = repr(store)  # noqa: SLF001  # it is ours

    def join(self) -> None:
        """Wait until all of them are closed.

        Raises:
            ClusterError: Some are not after a minute; names them.
            MooncakeError: What went wrong with one.
        """
        done, late = wait(self._closing, timeout=_CLOSE_TIMEOUT)
        if late:
            names = ", ".join(self._closing[future] for future in late)
            raise ClusterError(
                f"{len(late)} stores did not close within {_CLOSE_TIMEOUT:g} s: {names}; look for "
                "calls that are stuck in the engine"
            )
        self._closing.clear()
        for future in done:
            future.result()


class SharedCluster(ClosingStores):
    """A running cluster that tests share one after the other, each as if it were new.

    It gets memory of its own, from a stand-alone client, unless it has one: what stores lend it is
    gone when they close, with the values in it, and until the very end of a close the master still
    places values there.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__()
        self.cluster = cluster
        self._lent: list[str] = []
        if not any(client.running for client in cluster.blocking._clients):  # noqa: SLF001  # ours
            cluster.blocking.start_client()

        async def opened() -> Store:
            return await connect(cluster.address, timeout=_CONNECT_TIMEOUT, global_segment_size=0)

        # In a thread, because asyncio.run leaves this one without the loop that it may have had.
        with ThreadPoolExecutor(1) as executor:
            self._broom = executor.submit(asyncio.run, opened()).result()

    def close(self, store: Store) -> None:
        """Begin to close a store; needs no loop, and does not block."""
        super().close(store)
        config = store.config
        if config and config.global_segment_size and config.client_server_address is None:
            self._lent.append(store.hostname)

    def clean(self) -> None:
        """Wait until the memory is gone that closing stores have lent, and remove all values.

        Raises:
            ClusterError: It is not, after 20 s; or the master does not answer.
        """
        deadline = time.monotonic() + _UNMOUNT_TIMEOUT
        while self._lent:
            mounted = _segments(self.cluster)
            self._lent = [name for name in self._lent if name in mounted]
            if self._lent and time.monotonic() > deadline:
                raise ClusterError(
                    f"memory of an earlier test's store is still mounted: {self._lent}; look for "
                    "calls that are stuck in the engine"
                )
            if self._lent:
                time.sleep(_LOOK_AGAIN)
        code = self._broom.blocking.remove_all(True)  # noqa: FBT003  # force, of the binding
        if code < 0:
            raise ClusterError(
                f"the cluster that the tests share does not answer ({code} {code_name(code)}): "
                "a test that stops, kills or freezes a master needs a LocalCluster of its own"
            )

    def join(self) -> None:
        """Wait until all stores are closed; see `ClosingStores.join`."""
        self.close(self._broom)
        super().join()


class MooncakeConnect:
    """Open stores in a test: ``store = await mooncake_connect()``. They are closed behind it.

    Args:
        shared: The cluster that stores belong to when no other target is given.
    """

    def __init__(self, shared: SharedCluster) -> None:
        self._shared = shared
        self._stores: list[Store] = []

    def __repr__(self) -> str:
        return f"<MooncakeConnect to {self._shared.cluster!r}, {len(self._stores)} stores>"

    def __call__(self, target: str | StoreConfig | None = None, **options: Any) -> Opening[Store]:
        """Connect as `aiomooncake.connect` does; await it, or enter it with ``async with``.

        Nobody waits for the close: ``async with`` begins it and goes on.

        Args:
            target: Where to connect to: the address of a `FaultProxy`, say. Without one it is the
                cluster of the fixture ``mooncake_cluster``; then the store lends it no memory
                unless ``global_segment_size`` says so, because the cluster has its own.
            **options: Those of `aiomooncake.connect`; ``timeout`` is 20 s here.
        """
        options = {"timeout": _CONNECT_TIMEOUT, **options}
        if target is None:
            cluster = self._shared.cluster
            target = cluster.address
            options = {"master_metrics_port": cluster.metrics_port, **options}
            if "client_server_address" not in options:
                options = {"global_segment_size": 0, **options}

        async def opened() -> Store:
            store = await connect(target, **options)
            self._stores.append(store)
            return store

        return Opening("a store", opened(), self._begin_close)

    def close_all(self) -> None:
        """Begin to close all that is open; needs no loop."""
        while self._stores:
            self._shared.close(self._stores.pop())

    async def _begin_close(self, store: Store) -> None:
        if store in self._stores:
            self._stores.remove(store)
            self._shared.close(store)


def _segments(cluster: LocalCluster) -> set[str]:
    """Ask a master for the names of all segments that are mounted."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", cluster.metrics_port, timeout=_HTTP_TIMEOUT
    )
    try:
        connection.request("GET", "/get_all_segments")
        response = connection.getresponse()
        body = response.read().decode()
    except (OSError, http.client.HTTPException):
        return set()  # no master, no memory
    finally:
        connection.close()
    return set(body.split()) if response.status == http.client.OK else set()
