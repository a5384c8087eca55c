"""An in-memory engine for one test."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final

from aiomooncake.connect import connect
from aiomooncake.engine.inmemory import Fault, InMemoryEngine
from aiomooncake.opening import Opening
from aiomooncake.store import Store
from aiomooncake.testing.fixtures import ClosingStores

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self  # for type checkers only, which bring it along

__all__ = ["FakeMooncake"]

_LOOKUPS: Final = frozenset(
    {"is_exist", "batch_is_exist", "get_size", "get_replica_desc", "batch_get_replica_desc"}
)
_FAMILIES: Final[dict[str, Callable[[str], bool]]] = {
    "writes": lambda method: "put" in method or "upsert" in method,
    "reads": lambda method: (
        method.startswith(("get", "batch_get")) and method not in {*_LOOKUPS, "get_hostname"}
    ),
    "lookups": _LOOKUPS.__contains__,
    "removes": lambda method: "remove" in method,
}
"""Native methods by what they do."""


class FakeMooncake(InMemoryEngine):
    """An in-memory engine of a test's own, and the way to it.

    ```python
    with FakeMooncake() as fake:  # or the fixture fake_mooncake
        store = await fake.connect()
        fake.fault("writes", code=-200, times=3)
    ```

    Code that connects by itself is given its `address`.

    Args:
        lease_ttl: Seconds for which a read protects a key from removal.
        rpc_timeout: Seconds until a call on a frozen engine fails with -901; None = the
            ``rpc_timeout`` of each store.
        clock: Seconds, for the leases: ``loop.time`` of a `VirtualTimeLoop`, say.
    """

    families: ClassVar[tuple[str, ...]] = tuple(_FAMILIES)

    def __init__(
        self,
        *,
        lease_ttl: float = 5.0,
        rpc_timeout: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        name = f"fake-{uuid.uuid4().hex}"
        super().__init__(name, lease_ttl=lease_ttl, rpc_timeout=rpc_timeout, clock=clock)
        self._stores: list[Store] = []
        self._holds: list[threading.Event] = []
        self._families: list[Fault] = []
        with self._named_lock:
            self._named[name] = self

    @property
    def address(self) -> str:
        """``memory://…``: what `aiomooncake.connect` takes in the place of a master's address."""
        return f"memory://{self.name}"

    def connect(self, **options: Any) -> Opening[Store]:
        """Connect as `aiomooncake.connect` does; await it, or enter it with ``async with``.

        A store that was awaited is closed behind the test.
        """

        async def opened() -> Store:
            store = await connect(self.address, **options)
            self._stores.append(store)
            return store

        return Opening("a store", opened(), Store.aclose)

    def fault(
        self,
        method: str,
        *,
        code: int | None = None,
        delay: float = 0.0,
        hold: threading.Event | None = None,
        times: int | None = None,
        hostname: str | None = None,
    ) -> Fault:
        """Make calls of the engine fail, last, or hang; see `Fault`.

        Which native method a verb of the store calls depends on sizes and on what it is merged
        with, so whole families have a name here: ``"writes"``, ``"reads"``, ``"lookups"`` (exists,
        size, replicas) and ``"removes"``. What hangs in ``hold`` is let go at the end of the test.

        Args:
            method: A family, or a native method: what ``store.engine`` and a warm-up call.
            code: Engine code to fail with, in the shape in which the method fails.
            delay: Seconds that calls take longer.
            hold: Calls hang until this event is set. They hang on threads, so an `asyncio.Event`
                is refused.
            times: Calls it strikes; None = all until it is removed.
            hostname: Only the client of this hostname is struck; None = every one.

        Raises:
            InvalidArgumentError: There is no such family or method, so nothing would be struck; or
                a value that cannot be meant.
        """
        if method in _FAMILIES:
            fault = Fault(
                method,
                code=code,
                delay=delay,
                hold=hold,
                times=times,
                hostname=hostname,
                remove=self._families.remove,
            )
            self._families.append(fault)
        else:
            fault = super().fault(
                method, code=code, delay=delay, hold=hold, times=times, hostname=hostname
            )
        if hold is not None:
            self._holds.append(hold)
        return fault

    @property
    def calm(self) -> bool:
        """Whether calls go through undisturbed."""
        return not self._families and super().calm

    def disturb(
        self, method: str, hostnames: tuple[str, ...], *, asks_master: bool, rpc_timeout: float
    ) -> int | None:
        """Do to a call what is programmed, on its thread; the code to fail with, or None."""
        for fault in tuple(self._families):
            if _FAMILIES[fault.method](method) and fault.claim(fault.method, hostnames):
                code = fault.strike()
                if code is not None:
                    return code
        return super().disturb(method, hostnames, asks_master=asks_master, rpc_timeout=rpc_timeout)

    def dispose(self) -> None:
        """Let go what hangs, forget the name, and close the stores that are open.

        Waits until they are closed, but not on a thread that runs an event loop.
        """
        for hold in self._holds:
            hold.set()
        self.thaw()
        self.reset(self.name)
        closing = ClosingStores()
        for store in self._stores:
            closing.close(store)
        if asyncio._get_running_loop() is None:  # noqa: SLF001  # a documented function
            closing.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.dispose()
