"""Clients on hosts of their own, and links between them that are cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.adversity.hosts_scenes import Client, Failed, Hosts, NoNamespacesError, remove_stale

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20
SOON = 0.5  # seconds of a call that is not tried


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts with clients, and the master's; skips where there can't be any."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("several hosts need network namespaces: run as root, on Linux")
    if shutil.which("ip") is None:
        what = "several hosts need the program `ip`: apt-get install iproute2"
        if os.environ.get("CI"):
            pytest.fail(what)
        pytest.skip(what)
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts("one", "two"))
        except NoNamespacesError as error:
            pytest.skip(f"several hosts need network namespaces, which are refused here: {error}")
        yield made


def failed(answer: object, kind: str, within: float) -> Failed:
    assert isinstance(answer, Failed), answer
    assert answer.kind == kind, answer
    assert answer.seconds < within, answer
    return answer


@pytest.mark.timeout(120)
def test_values_move_between_hosts_and_links_may_be_cut(hosts: Hosts) -> None:
    master = hosts.start_master()  # the stores wait until it serves
    one = hosts.hosts["one"].start_client(master)
    two = hosts.hosts["two"].start_client(master)
    at = {client: client.call("open") for client in (one, two)}
    address = {client: name.rpartition(":")[0] for client, name in at.items()}
    # Nobody said so: it is the address on the way to the master.
    assert [address[one], address[two]] == [hosts.hosts[n].address for n in ("one", "two")]
    values_move(one, two, address[one], at[two])
    values_move(two, one, address[two], at[one])
    a_peer_is_avoided(hosts, one, two)
    the_master_is_away(hosts, one, two)
    for client in (one, two):
        assert client.call("longest_stall") < 0.5


def test_what_a_killed_run_has_left_is_removed(hosts: Hosts) -> None:
    """Nobody tidies up after a kill; the next run does."""
    program = f"""if True:
        import os
        from {Hosts.__module__} import Hosts
        Hosts("one").__enter__()
        print(os.getpid(), flush=True)
        os.kill(os.getpid(), 9)
    """
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == -9, ended.stderr
    left = f"aiomooncake-{int(ended.stdout)}-one"
    assert left in namespaces()
    own = namespaces() - {left}
    remove_stale()
    assert left not in namespaces()
    assert {host.namespace for host in hosts.hosts.values()} <= own & namespaces()


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


def values_move(writer: Client, reader: Client, address: str, other: str) -> None:
    """Store values here and there, and read them from the other side."""
    for nbytes in (4096, 9 * MB):
        key = f"{address} {nbytes}"
        assert writer.call("put", key, nbytes) is None
        assert writer.call("put_at", f"to {key}", nbytes, other) is None
        assert reader.call("get", key) is True
        assert writer.call("get", f"to {key}") is True
        for client in (writer, reader):
            assert hosts_of(client, key) == [address]
            assert hosts_of(client, f"to {key}") == [other.rpartition(":")[0]]


def hosts_of(client: Client, key: str) -> list[str]:
    return [endpoint.rpartition(":")[0] for endpoint in client.call("replicas", key)]


def a_peer_is_avoided(hosts: Hosts, one: Client, two: Client) -> None:
    """Cut one host off: the other one goes on without it."""
    key_of_one, key_of_two = (f"{hosts.hosts[name].address} 4096" for name in ("one", "two"))
    hosts.cut("two")
    failed(one.call("get", key_of_two), "TransferError", within=10)
    one.call("until", "degraded")
    error = failed(one.call("get", key_of_two), "TransferError", within=SOON)
    assert f"the peer {hosts.hosts['two'].address}:" in error.text
    assert one.call("get", key_of_one) is True
    for number in range(10):  # half of them would be placed on the peer
        key = f"beside it {number}"
        assert one.call("put_anywhere", key, 4096) is None
        assert hosts_of(one, key) == [hosts.hosts["one"].address]
    # What is cut off has no master either, not even for its own values.
    without_master(two, key_of_two)
    hosts.restore("two")
    for client in (one, two):
        client.call("until", "ready")
        for key in (key_of_one, key_of_two):
            comes(client, key)


def the_master_is_away(hosts: Hosts, one: Client, two: Client) -> None:
    """Cut the master off: calls fail at once until it is back, and values are still there."""
    key = f"{hosts.hosts['one'].address} 4096"
    hosts.cut("master")
    with ThreadPoolExecutor() as pool:
        list(pool.map(without_master, (one, two), (key, key)))
    hosts.restore("master")
    for client in (one, two):
        client.call("until", "ready")
        comes(client, key)
        assert client.call("put", "new", 4096) is None


def without_master(client: Client, key: str) -> None:
    """Wait until the outage is certain; from then on calls fail at once."""
    client.call("until", "master-unreachable")
    deadline = time.monotonic() + 20
    # The engine tries for 4 s to reach a master that is cut off, before the store is certain.
    while not isinstance(answer := client.call("exists", key), Failed) or answer.seconds > SOON:
        assert time.monotonic() < deadline, answer
    for verb in ("get", key), ("put", "new", 4096), ("replicas", key):
        error = failed(client.call(*verb), "RpcError", within=SOON)
        assert "has not answered for" in error.text


def comes(client: Client, key: str) -> None:
    """Read until connections that were lost are replaced."""
    deadline = time.monotonic() + 15
    while isinstance(answer := client.call("get", key), Failed):
        assert time.monotonic() < deadline, answer
    assert answer is True
