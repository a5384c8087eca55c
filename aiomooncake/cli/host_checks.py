"""What the doctor looks at on this host: settings, wheel, address, devices, memory."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
import click

from aiomooncake._hosts import check_rdma, route_address
from aiomooncake._verdict import size_text
from aiomooncake._version import __version__
from aiomooncake.cli.doctor import Case, Finding, fail, ok, skip, warn
from aiomooncake.cli.options import place_of
from aiomooncake.cli.probe import ask
from aiomooncake.config import split_address
from aiomooncake.engine.options import check_version
from aiomooncake.errors import ConfigError, NotSupportedError
from aiomooncake.master import failure_reason

if TYPE_CHECKING:
    from aiomooncake.config import StoreConfig, Target

__all__ = [
    "check_address",
    "check_devices",
    "check_engine",
    "check_gil",
    "check_memory",
    "check_settings",
    "is_loopback",
    "is_own_address",
    "master_of",
    "resolve",
]

_METRICS_PORT: Final = 9003
"""The master's own default."""

_LATE: Final = 20
"""Seconds of a transport time-out beyond which several of them may reach the engine's 60 s."""

_TRANSPORT: Final = ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC")
_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_ENDLESS: Final = 1 << 60


# --- settings -----------------------------------------------------------------------------------


async def check_settings(case: Case) -> list[Finding]:
    """Read the target, the environment and the file that it names."""
    target = await anyio.to_thread.run_sync(_read, case, abandon_on_cancel=True)
    if isinstance(target, str):
        cure = "correct it"
        if case.named is None:
            cure += ", or name the master: aiomooncake doctor HOST:PORT"
        return [fail("settings", target, cure)]
    case.target = target
    if target.kind != "master":
        what = {"local": "a private master, started here", "memory": "the in-memory engine"}
        return [ok(f"{place_of(target)}: {what[target.kind]}")]
    config = case.config = target.to_config()
    master = master_of(config)
    port = config.master_metrics_port
    if master is not None:
        case.metrics = master[0], port if port is not None else _METRICS_PORT
    else:
        case.metrics = None
    return [ok(repr(config)), *_doubts(config)]


def _read(case: Case) -> Target | str:
    """Return the target, or what is wrong with it."""
    try:
        return case.read()
    except click.UsageError as error:
        return error.format_message()
    except ConfigError as error:
        return str(error)


def _doubts(config: StoreConfig) -> Iterator[Finding]:
    if config.local_buffer_size == 0 and config.client_server_address is None:
        yield warn(
            "local_buffer_size=0: the binding's own put and get by value fail with -600; the verbs "
            "of aiomooncake work, and read small values slower",
            "raise local_buffer_size, unless all calls are zero-copy",
        )
    for name in _TRANSPORT:
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > _LATE:
            yield warn(
                f"{name}={value}: transfers to a frozen peer may reach the engine's limit of 60 s, "
                "after which it writes into memory that is no longer the call's",
                f"unset it (the store sets transfer_timeout={config.transfer_timeout})",
            )


def master_of(config: StoreConfig | None) -> tuple[str, int] | None:
    """Return host and port of the master; None where a coordinator knows it, or nobody does."""
    if config is None or not config.master_server_address or "://" in config.master_server_address:
        return None
    return split_address(config.master_server_address, field="master_server_address")


# --- the wheel ----------------------------------------------------------------------------------


async def check_engine(case: Case) -> list[Finding]:
    """Import the engine in a child process."""
    case.engine = found = await ask({}, engine_log=case.engine_log)
    wheels: dict[str, str] = found.get("distributions", {})
    if "crash" in found:
        text = f"the engine crashes when it is imported ({found['crash']})"
        return [fail("engine", text, "install its wheel afresh; see --engine-log")]
    named = " and ".join(f"{name} {version}" for name, version in wheels.items())
    findings = []
    if len(wheels) > 1:
        text = f"{named} are installed on top of each other: their files are mixed"
        cure = f"pip uninstall -y {' '.join(wheels)}, then install the one you want"
        findings.append(fail("engine", text, cure, distributions=wheels))
    if "error" in found:
        text, _, cure = _split(found["error"])
        missing: list[str] = found["missing"]
        if missing:
            text += f"; missing of the system's libraries: {', '.join(missing)}"
            cure = "apt-get install libibverbs1 libnuma1 libcurl4 (Debian and Ubuntu)"
        facts = {"distributions": wheels, "missing": missing}
        return [*findings, fail("engine", text, cure, **facts)]
    if findings:
        return findings
    dummy = case.config is not None and case.config.client_server_address is not None
    try:
        check_version(found["version"], dummy=dummy)
    except NotSupportedError as error:
        text, _, cure = _split(str(error))
        return [fail("engine", text, cure, distributions=wheels, version=found["version"])]
    text = f"{named or found['shared_object']}, aiomooncake {__version__}"
    return [ok(text, distributions=wheels, version=found["version"])]


def _split(text: str) -> tuple[str, str, str]:
    """Part what is wrong from what to do, as the library writes both."""
    for mark in (". ", ": it belongs", ": this release", ": install"):
        if mark in text:
            head, _, tail = text.partition(mark)
            return head, mark, tail if mark == ". " else f"{mark[2:]}{tail}"
    return text, "", "install an engine: pip install 'aiomooncake[cpu]'"


async def check_gil(case: Case) -> list[Finding]:
    """Tell whether set-up and close leave the GIL free with this wheel."""
    if case.engine["direct"]:
        return [ok("set-up and close leave the GIL free: the loop goes on meanwhile")]
    version = case.engine["version"] or "of an unknown version"
    return [
        warn(
            f"set-up and close hold the GIL with engine {version} ({case.engine['reason']}): every "
            "thread and the event loop stand still for 25-90 ms at set-up and 1-2 s at close",
            "install 0.3.11.post1 or a newer wheel",
        )
    ]


# --- this host's address --------------------------------------------------------------------------


async def check_address(case: Case) -> list[Finding]:
    """Look whether peers that are given this host's address reach this host."""
    assert case.config is not None  # noqa: S101  # the settings were read
    master, given = master_of(case.config), case.config.local_hostname
    if given is None:
        if master is None:
            text = "local_hostname is not set, and the way to the master is not known beforehand"
            return [
                fail("settings", text, "set MOONCAKE_LOCAL_HOSTNAME to an address of this host")
            ]
        try:
            address = await route_address(*master)
        except OSError as error:
            # What is wrong with the way is what the check of the master says.
            return [skip(f"no way to {master[0]} from here: {failure_reason(error)}")]
        return [ok(f"peers are given {address}, the address on the way to the master")]
    host, port = _host_and_port(given)
    try:
        addresses = await resolve(host)
    except OSError as error:
        text = f"local_hostname={given!r} does not resolve here: {failure_reason(error)}"
        return [fail("host-unfit", text, "set it to an address of this host, or leave it out")]
    return await _judge_address(given, addresses, port, master)


async def _judge_address(
    given: str, addresses: list[str], port: int | None, master: tuple[str, int] | None
) -> list[Finding]:
    shown = f"local_hostname={given!r}"
    if addresses != [given]:
        shown += f" ({', '.join(addresses)})"
    if any(map(is_loopback, addresses)) and master is not None:
        try:
            at = await resolve(master[0])
        except OSError:
            at = []
        if at and not all(map(is_loopback, at)):
            text = (
                f"{shown} is a loopback address, and the master is at {at[0]}: peers on other "
                "hosts that are given it reach themselves, and their calls fail with -800"
            )
            if given == socket.gethostname():
                text += "; /etc/hosts names this host so, as Debian does with 127.0.1.1"
            cure = "leave local_hostname out (the address on the way to the master is taken)"
            own = all(is_own_address(address) for address in at)
            return [warn(text, cure) if own else fail("host-unfit", text, cure)]
    if not any(map(is_own_address, addresses)):
        text = f"{shown} is no address of this host: peers that are given it reach somebody else"
        cure = (
            "leave local_hostname out, unless it is the address of the machine around a container"
        )
        return [warn(text, cure)]
    if port is not None and _is_taken(addresses[0], port):
        text = f"{shown}: port {port} is taken by another process"
        return [
            fail("host-unfit", text, "end it, or leave the port out: the engine takes a free one")
        ]
    return [ok(f"peers are given {shown}, which is this host")]


def _host_and_port(text: str) -> tuple[str, int | None]:
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    else:
        host, port = text, ""
    return host, int(port) if port.isdecimal() else None


async def resolve(host: str) -> list[str]:
    """Look a name up.

    Raises:
        OSError: It is not known.
    """
    try:
        found = await anyio.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host} is no host name ({error})") from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_loopback(address: str) -> bool:
    """Whether an address is one by which everybody reaches themselves."""
    return address.startswith("127.") or address == "::1"


def is_own_address(address: str) -> bool:
    """Whether an address is one of this host's."""
    return _try_to_bind(address, 0) != errno.EADDRNOTAVAIL


def _is_taken(address: str, port: int) -> bool:
    return _try_to_bind(address, port, socket.SOCK_STREAM) == errno.EADDRINUSE


def _try_to_bind(address: str, port: int, kind: socket.SocketKind = socket.SOCK_DGRAM) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, kind) as probe:
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno or errno.EADDRNOTAVAIL
    return 0


# --- devices and memory ---------------------------------------------------------------------------


async def check_devices(case: Case) -> list[Finding]:
    """Look for what the transport needs of this host."""
    assert case.config is not None  # noqa: S101  # the settings were read
    protocol = case.config.protocol
    if protocol == "tcp":
        return []
    if protocol != "rdma":
        return [skip(f"what protocol={protocol!r} needs is not known here")]
    try:
        await anyio.to_thread.run_sync(check_rdma, None)
    except ConfigError as error:
        text, _, cure = str(error).partition(": ")
        return [fail("host-unfit", text, cure)]
    names = sorted(path.name for path in await anyio.to_thread.run_sync(_devices))
    findings = [ok(f"RDMA devices: {', '.join(names)}")]
    wanted = [name for name in re.split(r"[,\s]+", case.config.device_name) if name]
    strange = [name for name in wanted if name not in names]
    if strange:
        text = f"device_name names {', '.join(strange)}, and this host has {', '.join(names)}"
        findings = [fail("host-unfit", text, "correct device_name, or leave it out")]
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = case.config.global_segment_size + case.config.local_buffer_size
    if limit != resource.RLIM_INFINITY and limit < needed:
        text = (
            f"memory that may be locked: {size_text(limit)} (ulimit -l), and RDMA locks "
            f"{size_text(needed)} (global_segment_size + local_buffer_size)"
        )
        cure = "ulimit -l unlimited (containers: --ulimit memlock=-1, or the capability IPC_LOCK)"
        findings.append(warn(text, cure))
    return findings


def _devices() -> list[Path]:
    return list(Path("/sys/class/infiniband").iterdir())


async def check_memory(case: Case) -> list[Finding]:
    """Compare what a store of these settings takes with what there is."""
    assert case.config is not None  # noqa: S101  # the settings were read
    config = case.config
    if config.client_server_address is not None:
        needed = config.mem_pool_size
    else:
        needed = config.global_segment_size + config.local_buffer_size
    free, limit = await anyio.to_thread.run_sync(_memory)
    text = f"a store takes {size_text(needed)}"
    facts = {"needed": needed, "available": free, "limit": limit}
    if limit is not None and needed > limit:
        return [
            fail(
                "host-unfit",
                f"{text} (global_segment_size + local_buffer_size), and this host or container "
                f"has {size_text(limit)} in all",
                "lower global_segment_size, or raise the container's limit",
                **facts,
            )
        ]
    if free is not None and needed > free:
        return [
            warn(
                f"{text}, and {size_text(free)} are available",
                "lower global_segment_size, or end what holds the memory",
                **facts,
            )
        ]
    return [ok(text if free is None else f"{text} of {size_text(free)}", **facts)]


def _memory() -> tuple[int | None, int | None]:
    """Read how much memory is available, and the most that there can be."""
    words: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            words[name] = int(value.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        pass
    limits = [words["MemTotal"]] if "MemTotal" in words else []
    for path in _LIMITS:
        try:
            limit = int(Path(path).read_text(encoding="ascii"))
        except (OSError, ValueError):  # not there, or "max"
            continue
        if limit < _ENDLESS:
            limits.append(limit)
    return words.get("MemAvailable"), min(limits, default=None)
