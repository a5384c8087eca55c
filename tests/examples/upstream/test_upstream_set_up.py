"""Upstream's examples for a client's life, for dummy clients, and the helpers beside the binding.

As in ``test_upstream_values.py``. Upstream's ``setup()`` stops every thread while it runs, and is
called here where its own behaviour is looked at; ours is ``connect``, and ``adopt`` for a client
that somebody else has set up.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from aiomooncake import InvalidArgumentError, LocalCluster, NotSupportedError, Store, adopt, connect
from tests.conftest import MB, _need_engine


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def fetched(url: str) -> Any:
    with urlopen(url, timeout=5) as answer:
        return json.load(answer)


# --- a client's life ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def metadata_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def http_cluster(metadata_port: int) -> Iterator[LocalCluster]:
    """Quick Start, "Start Master (with HTTP enabled)", with ports of our own."""
    _need_engine()
    options = [
        "--enable_http_metadata_server=true",
        "--http_metadata_server_host=127.0.0.1",
        f"--http_metadata_server_port={metadata_port}",
    ]
    with LocalCluster(extra_args=options) as master:
        yield master


async def test_hello_world(http_cluster: LocalCluster, metadata_port: int) -> None:
    """Quick Start, "Hello World Example": with a metadata server, which the master is."""
    opening = connect(
        http_cluster.address,
        local_hostname="127.0.0.1",
        metadata_server=f"http://127.0.0.1:{metadata_port}/metadata",
        global_segment_size="512MiB",
        local_buffer_size="128MiB",
        protocol="tcp",
    )
    async with opening as store:
        assert await store.engine.put("hello_key", b"Hello, Mooncake Store!") == 0
        assert await store.engine.get("hello_key") == b"Hello, Mooncake Store!"

        await store.put("ours", b"Hello, Mooncake Store!")
        assert await store.get("ours") == b"Hello, Mooncake Store!"


async def test_setup_by_a_dictionary(store: Store, http_cluster: LocalCluster) -> None:
    """Quick Start, "P2P Hello World"; the constructor, ``setup(config)`` and ``close()``.

    Both sizes default to 16 MiB, and the client answers over HTTP where it is told to. The store
    of the other tests is ours by P2P.
    """
    binding, port = importlib.import_module("mooncake.store"), free_port()
    config: dict[str, Any] = {"local_hostname": "127.0.0.1"}
    assert binding.MooncakeDistributedStore().setup(config) == -600  # no metadata server is named
    with pytest.raises(TypeError, match="incompatible function arguments"):
        binding.MooncakeDistributedStore().setup("127.0.0.1", "P2PHANDSHAKE")
    config |= {"metadata_server": "P2PHANDSHAKE", "master_server_addr": http_cluster.address}
    config |= {"enable_client_http_server": True, "client_http_port": port}
    native = binding.MooncakeDistributedStore()
    assert native.setup(config) == 0
    (segment,) = fetched(f"{http_cluster.metrics_url}/get_segments_detail")["segments"]
    assert segment["size_bytes"] == 16 * MB
    assert fetched(f"http://127.0.0.1:{port}/health")
    assert native.put("hello_key", b"Hello, Mooncake Store!") == 0

    async with adopt(native) as ours:
        assert await ours.get("hello_key") == b"Hello, Mooncake Store!"
    assert native.get("hello_key").decode() == "Hello, Mooncake Store!"  # its owner closes it
    assert await asyncio.to_thread(native.close) == 0


async def test_the_store_lives_its_own_life(store: Store, mooncake: Any) -> None:
    """Class MooncakeDistributedStore, ``init_all()``, ``setup()`` and ``close()``, by our mirrors.

    Upstream gives ``mount_segment_size`` a default of 16 MiB; the wheel's method has none.
    """
    with pytest.raises(TypeError, match="incompatible function arguments"):
        mooncake.MooncakeDistributedStore().init_all("tcp", "")
    for call, instead in (
        (store.engine.init_all("tcp", "", 16 * MB), "connect"),
        (
            store.engine.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "127.0.0.1:1"),
            "connect",
        ),
        (store.engine.setup_dummy(MB, MB, "127.0.0.1:1"), "connect"),
        (store.engine.close(), "aclose"),
    ):
        with pytest.raises(InvalidArgumentError, match=instead):
            await call
    assert not store.closed


def test_bind_to_numa_node(mooncake: Any) -> None:
    """bind_to_numa_node Function: of the thread that calls it, and of no other."""
    before, seen = os.sched_getaffinity(0), []

    def bind() -> None:
        seen.append(mooncake.bind_to_numa_node(0))

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    assert seen == [None]
    assert os.sched_getaffinity(0) == before


# --- dummy clients ------------------------------------------------------------------------------


async def test_setup_dummy(store: Store, dummy: Store) -> None:
    """Class MooncakeDistributedStore, ``setup_dummy()`` and ``alloc_from_mem_pool()``.

    Upstream doesn't say that memory of the pool must be registered before it is used.
    """
    engine = dummy.engine
    assert await engine.put("key", b"value") == 0
    assert await engine.get("key") == b"value"
    handle, nothing = await engine.batch_get_buffer(["key", "nothing"])
    assert handle is not None
    assert bytes(handle) == b"value"
    assert nothing is None
    del handle
    at = await engine.alloc_from_mem_pool(MB)
    assert at
    assert await engine.get_into("key", at, MB) == -600
    assert await engine.register_buffer(at, MB) == 0
    assert await engine.get_into("key", at, MB) == 5
    assert await engine.put_from_with_metadata("with metadata", at, at, 5, 3) == 0
    assert await engine.unregister_buffer(at) == 0

    await dummy.put("ours", b"value")
    assert await dummy.get("with metadata") == b"valvalue"
    async with dummy.allocate(4096) as buffer:
        assert await dummy.get_into("ours", buffer) == 5
    assert await store.get("ours") == b"value"


async def test_what_dummy_clients_do_not_have(dummy: Store) -> None:
    """Class MooncakeDistributedStore, ``setup_dummy()``: they "do not own Store segments"."""
    with pytest.raises(NotSupportedError):
        await dummy.engine.allocate_and_mount_segment(16 * MB)
    with pytest.raises(NotSupportedError):
        await dummy.mount_segment("16MiB")


# --- upstream's helpers -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def binding(upstream_cluster: LocalCluster, store: Store) -> Iterator[Any]:
    """A client that upstream's code has set up, for helpers that take nothing else."""
    native = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    address = upstream_cluster.address
    assert native.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MB, "tcp", "", address) == 0
    yield native
    assert native.close() == 0


async def test_buffer_pool(store: Store, binding: Any) -> None:
    """Zero-Copy API, "BufferPool Helper": leases for ``get_into()`` and ``get_into_ranges()``.

    With ours, memory is made once by ``allocate`` and named in slices. The pool goes on working
    beside a store that has adopted its client.
    """
    pools = importlib.import_module("mooncake.buffer_pool")
    await store.put("my_key", bytes(range(100)))
    pool = pools.BufferPool(binding)
    async with adopt(binding) as adopted:
        with pool.buffer(MB) as lease:
            assert lease.size == MB
            assert await adopted.engine.get_into("my_key", lease.ptr, lease.size) == 100
            view = lease.buffer[:100]
            assert bytes(view) == bytes(range(100))
            with pytest.raises(RuntimeError, match="exported views"):
                lease.release()
            view.release()
        lease = pool.acquire(1024)
        ranges = ([lease.ptr], [["my_key"]], [[[0]]], [[[3]]], [[[7]]])
        assert await adopted.engine.get_into_ranges(*ranges) == [[[7]]]
        with pytest.raises(RuntimeError, match="active leases"):
            pool.close()
        lease.release()
    pool.close()

    async with store.allocate("1MiB") as buffer:
        assert await store.get_into("my_key", buffer[:100]) == 100
        assert await store.get_into("my_key", buffer[1024:1031], offset=3) == 7


async def test_buffer_pool_has_bounds(store: Store, binding: Any) -> None:
    """Zero-Copy API, "BufferPool Helper": ``max_regions``, ``block=False`` and ``timeout=``."""
    pools = importlib.import_module("mooncake.buffer_pool")
    assert pools.RegisteredBufferPool
    pool = pools.BufferPool(binding, max_regions=1)
    lease = pool.acquire(1024)
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(1024, block=False)
    with pytest.raises(RuntimeError, match="timed out"):
        pool.acquire(1024, timeout=0.01)
    lease.release()
    pool.close()


async def test_structured_objects(store: Store, binding: Any) -> None:
    """Structured Object Store Helper: write, read, parts, and memory of the caller.

    ``metadata`` comes back with an entry of upstream's own. Ours are keys with a prefix.
    """
    helper = importlib.import_module("mooncake.structured_object_store")
    tokens = np.arange(24, dtype=np.int32).reshape(6, 4)
    payload = helper.StructuredObjectPayload(
        metadata={"step": 7, "layout": "rollout"},
        buffers={"tokens": tokens, "mask": np.ones((6, 4), np.int8), "prompt_ids": b"sample-ids"},
    )
    part = np.empty((3, 4), dtype=np.int32)

    def example() -> None:
        transfer = helper.MooncakeBundleTransfer(binding, key_prefix="demo/structured")
        ref = transfer.put_structured_object(payload)
        result = transfer.materialize(transfer.read_spec(ref))
        assert np.array_equal(result.objects["tokens"], tokens)
        assert bytes(result.objects["prompt_ids"]) == b"sample-ids"
        assert {"step": 7, "layout": "rollout"}.items() <= result.metadata.items()
        assert "__mooncake_structured_fields__" in result.metadata
        rows = transfer.read_spec(ref).select_members(["tokens"])
        rows = rows.slice_member("tokens", axis=0, start=2, end=5)
        assert np.array_equal(transfer.materialize(rows).objects["tokens"], tokens[2:5])
        assert transfer.materialize_into(rows, {"tokens": part}).objects["tokens"] is part
        policies = helper.BundleTransferPolicy
        assert transfer.put_structured_object(payload, policy=policies(copy_mode="copy"))
        with pytest.raises(RuntimeError, match="tensor-object buffers"):
            transfer.put_structured_object(payload, policy=policies(copy_mode="zero_copy"))
        bundle = transfer.put_bundle(b"meta", {"a": b"1", "b": b"22"})
        transfer.remove_bundle(bundle)

    await asyncio.to_thread(example)
    assert np.array_equal(part, tokens[2:5])

    await store.put_many({"ours/tokens": tokens, "ours/prompt_ids": b"sample-ids"})
    async with store.allocate(tokens[2:5].nbytes) as buffer:
        assert await store.get_into("ours/tokens", buffer, offset=tokens[:2].nbytes) == 48
        assert np.array_equal(np.frombuffer(buffer.view or b"", np.int32), tokens[2:5].ravel())


def test_a_structured_object_before_set_up() -> None:
    """Structured Object Store Helper, as upstream writes it: on a store that is not set up.

    That ends the process.
    """
    _need_engine()
    code = """
    import numpy
    from mooncake.store import MooncakeDistributedStore
    from mooncake.structured_object_store import MooncakeBundleTransfer, StructuredObjectPayload

    transfer = MooncakeBundleTransfer(MooncakeDistributedStore(), key_prefix="demo/structured")
    tokens = numpy.arange(24, dtype=numpy.int32)
    transfer.put_structured_object(StructuredObjectPayload(metadata={}, buffers={"tokens": tokens}))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=50)
    assert done.returncode == -signal.SIGSEGV, done.stderr
