"""What the doctor asks of others: the master, its HTTP server, peers; and a trial of it all."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread

from aiomooncake._addresses import P2PHANDSHAKE, hosts_of
from aiomooncake._coordinators import ask_coordinator
from aiomooncake._values import mask_secrets
from aiomooncake._verdict import DiagnosisKind, address_text, count_text, size_text
from aiomooncake.cli.doctor import Case, Finding, fail, ok, skip, warn
from aiomooncake.cli.greeting import Greeting, greet, local_version
from aiomooncake.cli.host_checks import is_loopback, is_own_address, master_of, resolve
from aiomooncake.cli.options import in_options
from aiomooncake.cli.probe import ask
from aiomooncake.config import split_address
from aiomooncake.errors import MooncakeError
from aiomooncake.master import failure_reason, http_get, probe_alive, probe_tcp, segments

if TYPE_CHECKING:
    from aiomooncake.master import Segment

__all__ = [
    "TRIAL_GRACE",
    "check_client",
    "check_coordinators",
    "check_health",
    "check_master",
    "check_peers",
    "check_segments",
    "check_trial",
    "check_versions",
]

_TIME: Final = 1.5
"""Seconds for one question; a healthy master or peer answers in a few ms."""

_PEERS_AT_ONCE: Final = 64
_PEERS_NAMED: Final = 5
_FULL: Final = 0.95  # the master's own mark for eviction

TRIAL_GRACE: Final = 12.0
"""Seconds beyond its time limit after which a trial is killed; closing takes some of them."""

_TRIAL_BUFFER: Final = 16 << 20


# --- who is there ---------------------------------------------------------------------------------


async def check_client(case: Case) -> list[Finding]:
    """Knock at the stand-alone client of a dummy client."""
    assert case.config is not None  # noqa: S101  # the settings were read
    address = case.config.client_server_address
    if address is None:
        return []
    host, port = split_address(address, field="client_server_address")
    try:
        await probe_alive(host, port, _TIME)
    except TimeoutError:
        how = "accepts connections and says nothing: it is frozen, or waits for its master"
    except OSError as error:
        how = f"does not answer: {failure_reason(error)}"
    else:
        return [ok(f"the stand-alone client {address} answers")]
    cure = "start mooncake_client there (client_server_address), or look what it waits for"
    return [fail(DiagnosisKind.CLIENT_UNREACHABLE, f"the stand-alone client {address} {how}", cure)]


async def check_coordinators(case: Case) -> list[Finding]:
    """Ask the metadata server, and connect to the coordinator that knows the master."""
    assert case.config is not None  # noqa: S101  # the settings were read
    findings = []
    for field in ("metadata_server", "master_server_address"):
        address = getattr(case.config, field)
        if address == P2PHANDSHAKE or ("://" not in address and field != "metadata_server"):
            continue
        shown = mask_secrets(address)
        try:
            places = hosts_of(address)
        except MooncakeError:
            findings.append(skip(f"{field}: {shown} names no host:port that can be asked"))
            continue
        findings += [await _ask_coordinator(address, field, *place) for place in places]
    return findings


async def _ask_coordinator(address: str, field: str, host: str, port: int) -> Finding:
    found = await ask_coordinator(address, host, port, _TIME)
    text = f"{field}: {found.text}"
    if found.state == "well":
        return ok(text)
    if found.state == "strange":
        return warn(text, 'look at the path: Mooncake\'s servers have "/metadata"')
    cure = f"start it, or correct {field}"
    if field == "metadata_server":
        cure += f' ("{P2PHANDSHAKE}" needs none, if all clients say so)'
    return fail("setup", text, cure)


async def check_master(case: Case) -> list[Finding]:
    """Look for the master at its address, and ask whether it is one."""
    master = master_of(case.config)
    if master is None:
        return [skip("its address is not known beforehand")]
    host, port = master
    where = address_text(host, port)
    unreachable = DiagnosisKind.MASTER_UNREACHABLE
    try:
        addresses = await resolve(host)
    except OSError as error:
        text = f"the name {host} does not resolve here: {failure_reason(error)}"
        cure = "correct the name, or use the address (Kubernetes: service.namespace)"
        return [fail(unreachable, text, cure)]
    if addresses != [host]:
        where += f" ({', '.join(addresses)})"
    reason = ""
    try:
        await probe_tcp(host, port, _TIME)
    except OSError as error:
        reason = failure_reason(error)
    if reason and os.strerror(errno.ECONNRESET) not in reason:
        text = f"nothing accepts connections at {where}: {reason}"
        cure = (
            "start mooncake_master there, or correct the address; after a time-out look at the "
            "firewall"
        )
        return [fail(unreachable, text, cure)]
    answer = None
    try:
        await probe_alive(host, port, _TIME)
        answer = await greet(host, port, _TIME)
        if answer.kind == "other":  # it may be a proxy that was too busy to hang up in time
            await probe_alive(host, port, 2 * _TIME, proxy_time=_TIME)
    except TimeoutError:
        if answer is None:
            text = f"what accepts connections at {where} says nothing: it is frozen (or overloaded)"
            cure = "look at the process (SIGSTOP, swap, a debugger), and restart it"
            return [fail(DiagnosisKind.MASTER_SILENT, text, cure)]
    except OSError:
        text = f"what accepts connections at {where} hangs up at once, as a proxy without a master"
        cure = "start mooncake_master behind it, or correct the address and the proxy"
        return [fail(unreachable, text, cure)]
    return [_judge(answer, where, port)]


def _judge(answer: Greeting, where: str, port: int) -> Finding:
    cure = "give the master's --rpc_port (50051 unless it was changed)"
    if answer.kind == "master":
        text = f"{where} is a master, which speaks protocol {answer.detail}"
        return ok(text, protocol=answer.detail)
    if answer.kind == "engine":
        text = (
            f"{where} speaks the engine's protocol and is no master, as it seems "
            f"({answer.detail}): a mooncake_client, or a master of an old version?"
        )
        return warn(text, cure)
    if answer.kind == "metrics":
        text = f"{where} is the HTTP port of a master (--metrics_port), not its RPC port"
        return fail("not-a-master", text, f"{cure}; {port} goes with --metrics-port")
    if answer.kind == "http":
        return fail("not-a-master", f"{where} is an HTTP server, no master: {answer.detail}", cure)
    text = f"what runs at {where} does not answer as a master does: {answer.detail}"
    return fail("not-a-master", text, cure)


async def check_health(case: Case) -> list[Finding]:
    """Ask the master's HTTP server whether it serves."""
    assert case.config is not None  # noqa: S101  # the settings were read
    if case.metrics is None:
        return [skip("the master's address is not known beforehand")]
    assumed = case.config.master_metrics_port is None
    where = address_text(*case.metrics)
    try:
        status, body = await http_get(*case.metrics, "/health", _TIME)
        answer = json.loads(body)
        ready = answer["service_ready"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = failure_reason(error) if isinstance(error, OSError) else "it is no master's"
        case.metrics = None
        cure = "give the master's --metrics_port: --metrics-port, or MOONCAKE_MASTER_METRICS_PORT"
        if assumed:
            text = f"the HTTP port is not given, and at its default {where} is none ({reason})"
        else:
            text = f"no /health at {where}: {reason}"
        text += "; so nobody says what is mounted, and stuck peers can't be named or avoided"
        return [warn(text, cure)]
    role, state = answer.get("role"), answer.get("ha_state")
    facts = {"status": status, "role": role, "ha_state": state}
    if ready is not True:
        text = f"the master does not serve: role {role}, state {state}"
        cure = "wait until it has started; a standby serves when it is the leader: name that one"
        return [fail(DiagnosisKind.MASTER_SILENT, text, cure, **facts)]
    text = f"{where} says it serves, as {role}"
    if assumed:
        cure = f"set MOONCAKE_MASTER_METRICS_PORT={case.metrics[1]}, so that stores ask there too"
        return [warn(f"{text}; the port is a guess, the default", cure, **facts)]
    return [ok(text, **facts)]


async def check_versions(case: Case) -> list[Finding]:
    """Compare the wheel here with the master's, where that can be known."""
    mine = case.engine["version"]
    master = master_of(case.config)
    other = None
    if master is not None and any(map(is_own_address, await resolve(master[0]))):
        other = await anyio.to_thread.run_sync(local_version, master[1], abandon_on_cancel=True)
    facts = {"client": mine, "master": other}
    if other is None:
        return [
            ok(
                f"here {mine or 'unknown'}; a master tells its version only on its own host. The "
                "trial below tells whether the two fit",
                **facts,
            )
        ]
    if mine is not None and mine != other:
        return [
            warn(
                f"the client is {mine} and the master {other}: versions that don't fit answer "
                "`exists`, and -900 to every put",
                f"install {other} here, or {mine} for the master",
                **facts,
            )
        ]
    return [ok(f"the master on this host is {other} too", **facts)]


# --- what is mounted ------------------------------------------------------------------------------


async def check_segments(case: Case) -> list[Finding]:
    """Ask the master what memory is mounted, and how full it is."""
    assert case.config is not None  # noqa: S101  # the settings were read
    if case.metrics is None:
        return [skip("needs the master's HTTP port")]
    try:
        case.mounted = mounted = await segments(*case.metrics, _TIME)
    except OSError as error:
        return [skip(f"no list of segments: {failure_reason(error)}")]
    usable = [segment for segment in mounted if segment.status == "OK"]
    used, capacity = (sum(getattr(each, name) for each in usable) for name in ("used", "capacity"))
    facts = {
        "segments": [dataclasses.asdict(each) for each in mounted],
        "used": used,
        "capacity": capacity,
    }
    if not usable:
        states = ", ".join(sorted({segment.status for segment in mounted}))
        text = f"no memory is mounted on the master ({states or 'no segment'}): puts answer -200"
        brings = case.config.global_segment_size
        cure = "start a client with a global_segment_size above 0"
        if brings:
            cure += f"; one of these settings would bring {size_text(brings)}"
        return [fail(DiagnosisKind.NO_SEGMENT, text, cure, **facts)]
    text = (
        f"{count_text(len(usable), 'segment')}, {size_text(used)} of {size_text(capacity)} in use"
    )
    findings = [
        warn(
            f"{text}: full, so puts evict values or answer -200",
            "mount more memory, or remove, unpin and stop renewing what is stored",
            **facts,
        )
        if used >= _FULL * capacity
        else ok(text, **facts)
    ]
    leaving = [f"{each.name} ({each.status})" for each in mounted if each.status != "OK"]
    if leaving:
        findings.append(warn(f"on their way out: {', '.join(leaving)}", "look at these clients"))
    return [*findings, *await _traps(case, usable)]


async def _traps(case: Case, usable: list[Segment]) -> list[Finding]:
    """Find clients that called themselves by a loopback address towards others."""
    assert case.metrics is not None  # noqa: S101  # it has been asked
    if all(map(is_loopback, await resolve(case.metrics[0]))):
        return []  # one host: it is right
    trapped = [
        each.endpoint
        for each in usable
        if is_loopback(each.endpoint.rpartition(":")[0]) or each.endpoint.startswith("localhost:")
    ]
    if not trapped:
        return []
    text = (
        f"{count_text(len(trapped), 'client')} gave a loopback address ({trapped[0]}): only those "
        "on its own host reach it"
    )
    cure = "start them without local_hostname=localhost, or with an address that others reach"
    return [warn(text, cure, endpoints=trapped)]


async def check_peers(case: Case) -> list[Finding]:
    """Knock at every client that lends memory."""
    if case.mounted is None:
        return [skip("which peers there are is not known")]
    if case.config is not None and case.config.metadata_server != P2PHANDSHAKE:
        return [skip("the master knows peers by name only, their addresses the metadata server")]
    names = {segment.endpoint: segment.name for segment in case.mounted}
    faults: dict[str, str] = {}
    at_once = anyio.Semaphore(_PEERS_AT_ONCE)

    async def knock(endpoint: str) -> None:
        async with at_once:
            try:
                await probe_alive(*split_address(endpoint, field="te_endpoint"), _TIME)
            except TimeoutError:
                faults[endpoint] = "frozen, or behind a firewall (no answer in time)"
            except OSError as error:
                faults[endpoint] = f"dead ({failure_reason(error)})"
            except MooncakeError:
                faults[endpoint] = "an end point that can't be read"

    async with anyio.create_task_group() as group:
        for endpoint in names:
            group.start_soon(knock, endpoint)
    asked = count_text(len(names), "peer")
    if not faults:
        return [ok(f"{asked}, all of them answer" if len(names) > 1 else f"{asked}, which answers")]
    shown = [f"{each} (segment {names[each]}): {faults[each]}" for each in names if each in faults]
    more = len(shown) - _PEERS_NAMED
    text = f"{len(faults)} of {asked} can't be reached: {'; '.join(shown[:_PEERS_NAMED])}"
    if more > 0:
        text += f"; and {more} more"
    cure = (
        "look at that client's host; after its death the master drops its segment within "
        "client_ttl, and until then puts that are placed there fail with -800"
    )
    return [fail(DiagnosisKind.PEER_UNREACHABLE, text, cure, peers=faults)]


# --- the trial ------------------------------------------------------------------------------------


async def check_trial(case: Case) -> list[Finding]:
    """Connect a client that lends nothing, put a value, look it up, read it, remove it."""
    question: dict[str, Any] = {"config": None, "target": case.named, "timeout": case.timeout}
    if case.target is not None and case.target.config is not None:
        question["config"] = dataclasses.asdict(case.target.config)
    if case.config is not None:
        metrics = case.metrics
        config = case.config.replace(
            global_segment_size=0,
            local_buffer_size=min(case.config.local_buffer_size, _TRIAL_BUFFER),
            # One that was given stays, so that the trial does not say that none was.
            master_metrics_port=case.config.master_metrics_port if metrics is None else metrics[1],
        )
        question["config"] = dataclasses.asdict(config)
    answer = await ask(question, engine_log=case.engine_log)
    if "crash" in answer:
        text = f"the process that tried crashed ({answer['crash']})"
        return [fail(DiagnosisKind.UNKNOWN, text, "see --engine-log")]
    if "diagnosis" in answer:
        found = answer["diagnosis"]
        text = f"connected, but: {in_options(found['text'])}"
        if found["evidence"]:
            text += f" ({in_options(found['evidence'])})"
        return [fail(found["kind"], text, in_options(found["cure"]))]
    if "error" in answer:
        kind = {3: "engine", 4: "setup", 5: "local-master"}.get(answer["exit_code"], "unknown")
        text, _, cure = in_options(answer["error"]).partition(". ")
        return [fail(kind, text, cure or "see --engine-log")]
    took = f"connected in {answer['connected'] * 1000:.0f} ms, put, exists and get in "
    took += f"{answer['seconds'] * 1000:.1f} ms"
    facts = {name: answer[name] for name in ("connected", "seconds", "tries", "stall")}
    if answer["tries"] > 1:
        text = f"{took}, at try {answer['tries']}"
        return [warn(text, "watch it: aiomooncake warmup -v", **facts)]
    still = f"the loop never still for longer than {answer['stall'] * 1000:.0f} ms"
    return [ok(f"{took}; {still}", **facts)]
