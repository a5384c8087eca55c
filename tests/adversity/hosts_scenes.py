"""Several hosts on one machine, each a network namespace, and what runs on them.

The namespaces hang on a switch in a namespace of its own, so that nothing of them is seen in the
network of the machine, and all of it is gone with the namespaces. Needs root and ``ip`` (iproute2).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import random
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import aiomooncake
from aiomooncake import MooncakeError, ReplicateConfig, Store
from aiomooncake._programs import find_program
from aiomooncake.testing import LoopStallProbe

__all__ = ["Client", "Failed", "Host", "Hosts", "NoNamespacesError", "remove_stale"]

_ROOT = Path(__file__).resolve().parents[2]
_PREFIX = "aiomooncake"
_NETWORK = "10.203.7"
_RPC_PORT, _HTTP_PORT = 50051, 9003
# In a namespace nobody else takes ports, so that they need not be looked for.
_MASTER_FLAGS = (
    f"--rpc_port={_RPC_PORT}",
    f"--metrics_port={_HTTP_PORT}",
    "--undefok=metrics_host",  # masters up to 0.3.12
    "--client_ttl=30",  # segments outlive a link that was cut
    "--default_kv_lease_ttl=2000",
    "--eviction_ratio=0",
)


# What a kernel or a container says that has no such thing or does not let us have it.
_REFUSED = re.compile("not permitted|not supported|denied|Read-only|Unknown device type")


class NoNamespacesError(Exception):
    """This machine does not let us make network namespaces."""


# --- the machine's side -----------------------------------------------------------------------


def _ip(*words: str) -> str:
    ended = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if ended.returncode:
        what = f"ip {' '.join(words)}: {ended.stderr.strip()}"
        raise (NoNamespacesError if _REFUSED.search(ended.stderr) else RuntimeError)(what)
    return ended.stdout


class Hosts:
    """Hosts on one switch: ``master``, and one for each further name. Use it with ``with``.

    Namespaces of runs that were killed are removed first; their names hold the run's process id.
    """

    def __init__(self, *names: str) -> None:
        self._own = f"{_PREFIX}-{os.getpid()}-"
        self._switch = f"{self._own}switch"
        self._names = ("master", *names)
        self._stack = contextlib.ExitStack()
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Hosts:
        remove_stale()
        try:
            self._add(self._switch)
            _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "switch", "up")
            for number, name in enumerate(self._names, 1):
                self._add(self._own + name)
                host = Host(self._own + name, f"{_NETWORK}.{number}", self._stack)
                self._plug(host, name)
                self.hosts[name] = host
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stack.close()

    def cut(self, name: str) -> None:
        """Cut the link of a host, as a cable that is pulled: nothing comes, nothing goes."""
        _ip("-n", self._switch, "link", "set", "dev", name, "down")

    def restore(self, name: str) -> None:
        """Plug the link in again."""
        _ip("-n", self._switch, "link", "set", "dev", name, "up")

    def start_master(self) -> str:
        """Start the master on its host; returns its address."""
        host = self.hosts["master"]
        host.start_server(
            str(find_program("mooncake_master")),
            f"--rpc_address={host.address}",
            f"--metrics_host={host.address}",
            *_MASTER_FLAGS,
        )
        return f"{host.address}:{_RPC_PORT}"

    def _add(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._stack.callback(_ip, "netns", "delete", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")

    def _plug(self, host: Host, name: str) -> None:
        switch, inside = ("-n", self._switch), ("-n", host.namespace)
        peer = ("type", "veth", "peer", "eth0", "netns", host.namespace)
        _ip(*switch, "link", "add", "name", name, *peer)
        _ip(*switch, "link", "set", "dev", name, "master", "switch", "up")
        _ip(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")


def remove_stale() -> None:
    """Remove the namespaces of runs that were killed."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        prefix, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == _PREFIX and pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(RuntimeError):  # another run was quicker
                _ip("netns", "delete", name)


class Host:
    """One host; what is started on it ends with the hosts, or with this process."""

    def __init__(self, namespace: str, address: str, stack: contextlib.ExitStack) -> None:
        self.address = address
        self.namespace = namespace
        self._stack = stack

    def start_client(self, master: str) -> Client:
        """Start a process with a store; it is opened by :meth:`Client.call`."""
        command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning"]
        program = f"from {__name__} import serve; serve({master!r})"
        return self._stack.enter_context(Client(self._start([*command, "-c", program])))

    def start_server(self, *command: str) -> None:
        """Start a program that knows nothing of us: it ends when our end of a pipe is closed."""
        script = '"$@" >/dev/null 2>&1 & read -r _; kill -9 $!; wait'
        process = self._start(["sh", "-c", script, "sh", *command])
        self._stack.callback(_end, process)

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "MOONCAKE_"))}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environ, "PYTHONPATH": str(_ROOT), "MC_LOG_LEVEL": "ERROR"},
            text=True,
        )


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


@dataclass(frozen=True)
class Failed:
    """What a call raised in the other process.

    Attributes:
        kind: Name of the exception's class.
        text: What it says.
        seconds: How long the call took.
    """

    kind: str
    text: str
    seconds: float


class Client:
    """A process on a host; :meth:`call` runs a coroutine function of :class:`_Remote` there."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, verb: str, *arguments: object, within: float = 30.0) -> Any:
        """Call it, and return what it returns; a `MooncakeError` comes as :class:`Failed`."""
        assert self._process.stdin is not None
        print(json.dumps([verb, *arguments]), file=self._process.stdin, flush=True)
        answer = json.loads(self._answers.get(timeout=within))
        return Failed(**answer["failed"]) if "failed" in answer else answer["answer"]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put('{"failed": {"kind": "the process ended", "text": "", "seconds": 0}}')

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        _end(self._process)
        self._reader.join()


# --- the host's side --------------------------------------------------------------------------


def value(key: str, nbytes: int) -> bytes:
    """Make the value of a key: other hosts can tell whether it came right."""
    return random.Random(key).randbytes(nbytes)


class _Remote:
    """What a client does when it is told to. Arguments and results are JSON."""

    def __init__(self, master: str) -> None:
        self._master = master
        self._store: Store | None = None
        self._probe = LoopStallProbe()

    @property
    def store(self) -> Store:
        assert self._store is not None
        return self._store

    async def open(self) -> str:
        """Connect without ``local_hostname``; returns the name that the store has found."""
        self._store = await aiomooncake.connect(
            self._master,
            global_segment_size="64MiB",
            local_buffer_size="16MiB",
            master_metrics_port=_HTTP_PORT,
            rpc_timeout=1,
            rpc_connect_timeout=0.5,
            timeout=20,
        )
        await self.store.warmup()
        await self._probe.__aenter__()
        return self.store.hostname

    async def put(self, key: str, nbytes: int) -> None:
        await self.put_at(key, nbytes, self.store.hostname)

    async def put_at(self, key: str, nbytes: int, segment: str) -> None:
        config = ReplicateConfig(preferred_segments=(segment,))
        await self.store.put(key, value(key, nbytes), config=config)

    async def put_anywhere(self, key: str, nbytes: int) -> None:
        await self.store.put(key, value(key, nbytes))

    async def get(self, key: str) -> bool | None:
        """Tell whether a value is right; None when it is not there."""
        found = await self.store.get(key)
        return None if found is None else found == value(key, len(found))

    async def exists(self, key: str) -> bool:
        return await self.store.exists(key)

    async def replicas(self, key: str) -> list[str | None]:
        return [replica.endpoint for replica in await self.store.replicas(key)]

    async def health(self) -> str:
        return self.store.health().state

    async def until(self, state: str) -> None:
        while self.store.health().state != state:  # noqa: ASYNC110  # on_health is for one waiter
            await asyncio.sleep(0.01)

    async def longest_stall(self) -> float:
        return self._probe.longest


def serve(master: str) -> None:
    """Do what the standard input says until it ends, and leave without tidying up."""

    async def main() -> None:
        remote, loop = _Remote(master), asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            verb, *arguments = json.loads(line)
            began = time.monotonic()
            try:
                answer = {"answer": await getattr(remote, verb)(*arguments)}
            except MooncakeError as error:
                seconds = time.monotonic() - began
                failed = Failed(type(error).__name__, str(error), seconds)
                answer = {"failed": asdict(failed)}
            print(json.dumps(answer), flush=True)
        os._exit(0)

    asyncio.run(main())
