"""The pytest plugin of aiomooncake: a real cluster, stores on it, and an engine in memory.

pytest loads it in every run, wherever aiomooncake is installed. So it imports nothing but pytest,
and lies beside the package, not in it: importing a module imports the package that it is in, and
what is imported before a run is set up is neither measured by coverage nor rewritten for asserts.

The fixtures are synchronous, so that they serve pytest-asyncio (strict and auto), anyio's plugin
and unittest alike. ``docs/testing.md`` shows each of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from aiomooncake import LocalCluster
    from aiomooncake.testing import FakeMooncake, MooncakeConnect
    from aiomooncake.testing.fixtures import SharedCluster

__all__ = ["fake_mooncake", "mooncake_cluster", "mooncake_connect"]


@contextlib.contextmanager
def _needing_the_engine() -> Iterator[None]:
    """Fail the tests when the engine is missing; skip them where there is none to be had."""
    from aiomooncake import EngineNotInstalledError

    try:
        yield
    except EngineNotInstalledError as error:
        if sys.platform == "linux":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def mooncake_cluster() -> Iterator[LocalCluster]:
    """Run a private Mooncake on loopback for the whole run, for each worker of xdist its own.

    An `aiomooncake.LocalCluster`: ``mooncake_cluster.address`` is what programs connect to. It has
    memory of its own, from a stand-alone client.
    Tests must leave it running; one that breaks a master starts a `LocalCluster` of its own.
    Override it, with the same scope, to give it other options.
    """
    from aiomooncake import LocalCluster

    with _needing_the_engine(), LocalCluster() as cluster:
        cluster.blocking.start_client()
        yield cluster


@pytest.fixture(scope="session")
def _mooncake_shared(mooncake_cluster: LocalCluster) -> Iterator[SharedCluster]:
    """Keep the cluster clean between tests, and close their stores behind them."""
    from aiomooncake.testing.fixtures import SharedCluster

    with _needing_the_engine():
        shared = SharedCluster(mooncake_cluster)
    yield shared
    shared.join()


@pytest.fixture
def mooncake_connect(_mooncake_shared: SharedCluster) -> Iterator[MooncakeConnect]:
    """Open stores on the cluster of the run, which has no values when the test begins.

    ``store = await mooncake_connect(rank=3)`` takes the arguments of `aiomooncake.connect`. The
    stores are closed behind the test, also one that failed, and nobody waits for that before the
    end of the run.
    """
    from aiomooncake.testing import MooncakeConnect

    _mooncake_shared.clean()
    connect = MooncakeConnect(_mooncake_shared)
    yield connect
    connect.close_all()


@pytest.fixture
def fake_mooncake() -> Iterator[FakeMooncake]:
    """Make an in-memory engine for one test: ``store = await fake_mooncake.connect()``.

    It fails, hangs and freezes on demand, and needs no wheel. ``fake_mooncake.address`` is for
    programs that connect by themselves.
    """
    from aiomooncake.testing import FakeMooncake

    with FakeMooncake() as fake:
        yield fake
