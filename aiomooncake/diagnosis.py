"""Find out why a probe of the store failed, and say what to do about it.

A code alone does not tell: -200 is "no segment mounted anywhere" as well as "full", -900 is a
master that went away as well as one of another version, -800 names no peer. So the examination
asks: the master over TCP, the engine by one ``is_exist``, the master's list of segments, the peers
on that list. It is bounded and never raises; what it can't find out it calls unknown.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio

from aiomooncake._addresses import P2PHANDSHAKE
from aiomooncake._values import mask_secrets
from aiomooncake._verdict import (
    Diagnosis,
    DiagnosisKind,
    address_text,
    answer_text,
    count_text,
    size_text,
)
from aiomooncake.config import split_address
from aiomooncake.errors import MooncakeError
from aiomooncake.master import (
    Segment,
    failure_reason,
    master_health,
    probe_alive,
    probe_tcp,
    segments,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiomooncake.config import StoreConfig

__all__ = ["Diagnosis", "DiagnosisKind", "DiagnosisTarget", "diagnose"]

DIAGNOSIS_TIMEOUT: Final = 2.0
"""Seconds that a whole examination takes at most."""

_QUESTION_TIMEOUT: Final = 0.5
"""Seconds for one question; a healthy master or peer on the same network answers in a few ms."""

_PEERS_TIMEOUT: Final = 0.9
"""Seconds for all peers together, so that one round of silent ones still fits in the whole."""

_CONFIRMATIONS: Final = 64
_CONFIRMATION_GAP: Final = 0.005
"""How often, and after how many seconds each, a call is made again before its -900 is believed."""

_PEERS_AT_ONCE: Final = 64
_PEERS_NAMED: Final = 3

_FULL: Final = 0.95
"""Share of a segment in use from which it counts as full: the master's own mark for eviction."""

_INVALID_PARAMS: Final = -600
_RPC_FAIL: Final = -900
_RPC_TIMEOUT: Final = -901
_STEPS_THAT_MOVE_DATA: Final = frozenset({"put", "get"})
_NO_SPACE_CODES: Final = frozenset({-10, -101, -200})
_TENANT_CODES: Final = frozenset({-1700, -1701})
_NOT_SERVING_CODES: Final = frozenset({-1010, -1011})
_TRANSFER_CODES: Final = frozenset({None, -500, -703, -707, -800, -801})
"""Codes of a value that did not travel; None is a call that hung or brought no data."""


class DiagnosisTarget(Protocol):
    """What an examination needs of a store."""

    @property
    def config(self) -> StoreConfig | None:
        """What the store was set up with; None if nobody told us (an adopted one)."""
        ...

    @property
    def engine(self) -> Any:
        """The awaitable mirror of the binding: its own arguments, its own codes."""
        ...


async def diagnose(
    target: DiagnosisTarget,
    *,
    step: str,
    code: int | None,
    value_size: int,
    put_again: Callable[[], Awaitable[int | None]] | None = None,
    timeout: float = DIAGNOSIS_TIMEOUT,
) -> Diagnosis:
    """Find out why a step of a probe failed.

    Args:
        target: The store that was probed.
        step: The step that failed: ``put``, ``exists``, ``get``, or the engine's own name for it.
        code: The engine's answer; None when the call hung or brought no data.
        value_size: Bytes of the value that was tried.
        put_again: Tries one more put and returns its code. Versions that don't fit are only found
            with it, because one failed put may as well have been a connection that broke.
        timeout: Seconds for everything.

    Returns:
        The diagnosis; of the kind ``unknown``, with what was seen, when no cause was found.
    """
    examination = _Examination(target, step, code, value_size, put_again)
    found: Diagnosis | None = None
    with anyio.move_on_after(timeout) as scope:
        try:
            found = await examination.run()
        except Exception as error:  # noqa: BLE001  # a diagnosis must not hide the fault it explains
            examination.note(f"the examination itself failed: {type(error).__name__}: {error}")
    if scope.cancelled_caught:
        examination.note(f"the examination was ended after {timeout:g} s")
    return found or examination.unknown()


class _Examination:
    """The questions of one diagnosis, cheapest first, and what they brought to light."""

    def __init__(
        self,
        target: DiagnosisTarget,
        step: str,
        code: int | None,
        value_size: int,
        put_again: Callable[[], Awaitable[int | None]] | None,
    ) -> None:
        self._config = target.config
        self._engine = target.engine
        self._step = step
        self._code = code
        self._value_size = value_size
        self._put_again = put_again
        self._notes: list[str] = []
        self._master = self._master_address()
        self._metrics_port = self._config.master_metrics_port if self._config else None

    def note(self, text: str) -> None:
        """Keep something that was seen, for the evidence."""
        self._notes.append(text)

    def unknown(self) -> Diagnosis:
        """Return what is left to say when no cause was found."""
        return self._found(
            DiagnosisKind.UNKNOWN,
            f"{self._step} failed ({answer_text(self._code)}) for a reason that could not be found",
            "read the master's log and the engine's own (MC_LOG_LEVEL=INFO, set before the "
            "process starts)",
        )

    async def run(self) -> Diagnosis | None:
        """Ask one question after the other until one explains the failure."""
        found = self._by_the_code()
        if found is None:
            found = await self._of_the_client()
        if found is None:
            found = await self._of_the_master()
        if found is None:
            found = await self._of_the_calls()
        if found is not None:
            return found
        if self._code in _NO_SPACE_CODES:
            return self._of_the_space(await self._segments())
        if self._code in _TRANSFER_CODES and self._step in _STEPS_THAT_MOVE_DATA:
            return await self._of_the_peers(await self._segments())
        return None

    # -- the questions ---------------------------------------------------------------------------

    def _by_the_code(self) -> Diagnosis | None:
        """Return what needs no question."""
        if self._code in _TENANT_CODES:
            return self._found(
                DiagnosisKind.TENANT_REFUSED,
                f"the master refuses the tenant {self._tenant()} ({answer_text(self._code)})",
                "register the tenant with the master, raise its quota there, or correct tenant_id",
                evidence=f"{self._step} answered so",
                permanent=True,
            )
        room = self._config.local_buffer_size if self._config else 0
        if self._code == _INVALID_PARAMS and 0 < room < self._value_size:
            return self._found(
                DiagnosisKind.LOCAL_BUFFER_TOO_SMALL,
                f"a value of {size_text(self._value_size)} does not fit in the local buffer of "
                f"{size_text(room)}",
                f"set local_buffer_size above {size_text(self._value_size)}, or to 0 for zero-copy",
                evidence=f"{self._step} answered {answer_text(self._code)}",
                permanent=True,
            )
        return None

    async def _of_the_client(self) -> Diagnosis | None:
        """Ask a dummy client's stand-alone client whether it is there and runs."""
        address = self._config.client_server_address if self._config else None
        if address is None:
            return None
        host, port = split_address(address, field="client_server_address")
        where = address_text(host, port)
        try:
            await probe_alive(host, port, _QUESTION_TIMEOUT)
        except TimeoutError:
            # It may be busy, too: with one request at a time, which waits for its master.
            self.note(f"the stand-alone client {where} accepts connections but says nothing")
            return await self._of_the_clients_master() or self._found(
                DiagnosisKind.CLIENT_UNREACHABLE,
                f"the stand-alone client {where} does not answer: it is frozen, or waits for its "
                "master",
                "look whether both run; mooncake_client serves one request at a time unless it "
                "was started with --threads",
            )
        except OSError as error:
            return self._found(
                DiagnosisKind.CLIENT_UNREACHABLE,
                f"the stand-alone client {where} does not answer: {failure_reason(error)}",
                "start mooncake_client there",
                evidence="TCP probe",
            )
        self.note(f"the stand-alone client {where} runs")
        return None

    async def _of_the_clients_master(self) -> Diagnosis | None:
        """Ask the master of a stand-alone client that does not answer, if it is known."""
        found = await self._of_the_master()
        if found is None and self._master is not None:
            try:
                await probe_alive(*self._master, _QUESTION_TIMEOUT)
            except TimeoutError:
                return self._silent()
            except OSError:
                return None
        return found

    async def _of_the_master(self) -> Diagnosis | None:
        """Ask over TCP whether the master is there, and over HTTP whether it serves."""
        if self._master is None:
            return None
        host, port = self._master
        where = address_text(host, port)
        hangs_up = False
        try:
            await probe_tcp(host, port, _QUESTION_TIMEOUT)
        except ConnectionResetError:
            hangs_up = True
        except OSError as error:
            return self._found(
                DiagnosisKind.MASTER_UNREACHABLE,
                f"nothing accepts connections at the master's address {where}: "
                f"{failure_reason(error)}",
                "start mooncake_master there, or correct the address and what is between "
                "(firewall, service)",
                evidence="TCP probe",
            )
        silent = False
        try:
            if not hangs_up:
                await probe_alive(host, port, _QUESTION_TIMEOUT)
        except TimeoutError:
            silent = True
        except OSError:
            hangs_up = True
        if hangs_up:
            return self._found(
                DiagnosisKind.MASTER_UNREACHABLE,
                f"what accepts connections at the master's address {where} hangs up at once, as a "
                "proxy does that has no master behind it",
                "start mooncake_master, or correct the address and the proxy",
                evidence="TCP probe",
            )
        self.note(f"{where} accepts connections" + (" but says nothing" if silent else ""))
        if self._metrics_port is None:
            return None
        health = await master_health(host, self._metrics_port, _QUESTION_TIMEOUT)
        if health is None:
            self.note(f"no answer to /health at {address_text(host, self._metrics_port)}")
            return self._silent() if silent else None
        if health.get("service_ready") is False:
            self.note(f"/health: role {health.get('role')}, state {health.get('ha_state')}")
            return self._silent(f"the master at {where} is up but does not serve")
        return None

    async def _of_the_calls(self) -> Diagnosis | None:
        """Ask the engine for a key that isn't there, and what a second put answers."""
        answer = await self._is_exist()
        if answer is None or answer == _RPC_TIMEOUT or answer in _NOT_SERVING_CODES:
            return self._silent()
        if answer == _RPC_FAIL:
            if self._master is None:
                return self._found(
                    DiagnosisKind.MASTER_UNREACHABLE,
                    "no call gets through to the master",
                    "look whether mooncake_master runs and can be reached from here",
                )
            answer = await _confirmed(self._is_exist)
            return self._versions() if answer == _RPC_FAIL else None
        if answer < 0:
            return None
        if self._code == _RPC_FAIL and self._put_again is not None:
            again = await _confirmed(self._put_again)
            self.note(f"a second put answered {answer_text(again)}")
            if again == _RPC_FAIL:
                answer = await self._is_exist()
                if answer is not None and answer >= 0:
                    return self._versions()
        if self._code == _INVALID_PARAMS and self._config and self._config.local_buffer_size:
            return self._found(
                DiagnosisKind.LOCAL_BUFFER_TOO_SMALL,
                f"the local buffer of {size_text(self._config.local_buffer_size)} has no room left "
                f"for {size_text(self._value_size)}",
                "raise local_buffer_size, or release the views and wait for the values in flight "
                "that hold it",
            )
        return None

    async def _segments(self) -> tuple[Segment, ...] | None:
        """Ask the master what is mounted; None when that can't be known."""
        if self._master is None or self._metrics_port is None:
            self.note("the master's metrics port is not known (master_metrics_port)")
            return None
        host = self._master[0]
        try:
            return await segments(host, self._metrics_port, _QUESTION_TIMEOUT)
        except OSError as error:
            where = address_text(host, self._metrics_port)
            self.note(f"no list of segments from {where}: {failure_reason(error)}")
            return None

    def _of_the_space(self, mounted: tuple[Segment, ...] | None) -> Diagnosis | None:
        """Tell "nothing mounted" from "full"."""
        if mounted is None:
            own = self._config.global_segment_size if self._config else None
            if own == 0:
                self.note("this client has global_segment_size=0")
                return self._no_segment(
                    "no segment is mounted anywhere, or none has room for "
                    f"{size_text(self._value_size)} (without the metrics port nobody tells)"
                )
            if own is not None and own >= self._value_size:
                self.note(f"this client alone brings {size_text(own)}")
                return self._full("the segments seem to be full")
            return None
        usable = [segment for segment in mounted if segment.status == "OK"]
        self.note(f"/get_segments_detail lists {len(mounted)}")
        if not usable:
            states = ", ".join(sorted({segment.status for segment in mounted}))
            return self._no_segment(
                f"all segments are on their way out ({states})"
                if mounted
                else "no segment is mounted anywhere"
            )
        used = sum(segment.used for segment in usable)
        capacity = sum(segment.capacity for segment in usable)
        self.note(f"{size_text(used)} of {size_text(capacity)} in use")
        if max(segment.free for segment in usable) < self._value_size or used >= _FULL * capacity:
            return self._full(f"no mounted segment has room ({len(usable)} looked at)")
        return None

    async def _of_the_peers(self, mounted: tuple[Segment, ...] | None) -> Diagnosis | None:
        """Look for the peer that does not answer; the failed call itself names nobody."""
        cure = (
            "look at that client's host (frozen, dead, firewall, an address that only its own host "
            "knows, another metadata_server than here); after its death the master drops its "
            "segment within client_ttl"
        )
        if mounted is None:
            return self._found(
                DiagnosisKind.PEER_UNREACHABLE,
                "the master answers but the value does not travel: a peer does not answer "
                "(which one: unknown)",
                f"{cure}; set master_metrics_port to have it named",
            )
        if not mounted:
            return self._no_segment("no segment is mounted anywhere")
        if self._config is not None and self._config.metadata_server != P2PHANDSHAKE:
            # The master's list has names then, at which nobody listens.
            server = mask_secrets(self._config.metadata_server)
            return self._found(
                DiagnosisKind.PEER_UNREACHABLE,
                "the master answers but the value does not travel: a peer does not answer, or "
                f"the metadata server {server} does not know it (which one: unknown)",
                "look whether the metadata server runs, is the one of all clients, and was not "
                f"restarted (then it has forgotten those that were not started anew); or {cure}",
            )
        faults, asked = await self._probe_peers(mounted)
        if not faults:
            return None
        named = "; ".join(faults[:_PEERS_NAMED])
        more = f" and {len(faults) - _PEERS_NAMED} more" if len(faults) > _PEERS_NAMED else ""
        return self._found(
            DiagnosisKind.PEER_UNREACHABLE,
            f"peers that do not answer, {len(faults)} of {asked}: {named}{more}",
            cure,
        )

    async def _probe_peers(self, mounted: tuple[Segment, ...]) -> tuple[list[str], int]:
        """Probe the transfer engines; describe the faulty ones and count those that were asked.

        The probe says at once that nothing follows: that listener serves one connection at a time
        and would wait 5 s for a greeting.
        """
        faults: dict[str, str] = {}
        names = {segment.endpoint: segment.name for segment in mounted}
        at_once = anyio.Semaphore(_PEERS_AT_ONCE)
        asked = 0

        async def probe(endpoint: str, host: str, port: int) -> None:
            nonlocal asked
            async with at_once:
                asked += 1
                try:
                    await probe_alive(host, port, _QUESTION_TIMEOUT)
                except OSError as error:
                    reason = failure_reason(error)
                    faults[endpoint] = f"{endpoint} (segment {names[endpoint]}): {reason}"

        with anyio.move_on_after(_PEERS_TIMEOUT):
            async with anyio.create_task_group() as group:
                for endpoint in names:
                    try:
                        host, port = split_address(endpoint, field="te_endpoint")
                    except MooncakeError:
                        self.note(f"the peer {endpoint} can't be probed")
                        continue
                    group.start_soon(probe, endpoint, host, port)
        self.note(f"probed {asked} of {count_text(len(names), 'transfer engine')} by TCP")
        return [faults[endpoint] for endpoint in names if endpoint in faults], asked

    async def _is_exist(self) -> int | None:
        """Ask for a key that nobody has; return the engine's answer, None when there is none."""
        answer: int | None = None
        with anyio.move_on_after(_QUESTION_TIMEOUT):
            answer = int(await self._engine.is_exist(f"aiomooncake_diagnosis_{uuid.uuid4().hex}"))
        if answer is None:
            self.note(f"is_exist gave no answer in {_QUESTION_TIMEOUT:g} s")
        elif answer < 0:
            self.note(f"is_exist answered {answer_text(answer)}")
        else:
            self.note("is_exist answers")
        return answer

    # -- the verdicts ----------------------------------------------------------------------------

    def _found(
        self,
        kind: DiagnosisKind,
        explanation: str,
        cure: str,
        *,
        evidence: str | None = None,
        permanent: bool = False,
    ) -> Diagnosis:
        if evidence is None:
            evidence = "; ".join(dict.fromkeys(self._notes))
        return Diagnosis(kind, explanation, evidence, cure, permanent)

    def _silent(self, explanation: str = "") -> Diagnosis:
        where = f" at {address_text(*self._master)}" if self._master else ""
        return self._found(
            DiagnosisKind.MASTER_SILENT,
            explanation or f"the master{where} does not answer calls",
            "look whether mooncake_master is frozen, overloaded or a standby, and restart it",
        )

    def _versions(self) -> Diagnosis:
        where = f" at {address_text(*self._master)}" if self._master else ""
        return self._found(
            DiagnosisKind.VERSION_MISMATCH,
            f"the master{where} does not understand this client's calls: another version of "
            "Mooncake, or no master",
            "install the same version of Mooncake for the clients and the master",
            permanent=True,
        )

    def _no_segment(self, explanation: str) -> Diagnosis:
        return self._found(
            DiagnosisKind.NO_SEGMENT,
            explanation,
            "start a client with a global_segment_size above 0, or give this one memory to share",
        )

    def _full(self, explanation: str) -> Diagnosis:
        return self._found(
            DiagnosisKind.OUT_OF_SPACE,
            explanation,
            "mount more memory (global_segment_size, more clients), or remove, unpin and stop "
            "renewing what is stored",
        )

    # -- what the configuration tells ------------------------------------------------------------

    def _master_address(self) -> tuple[str, int] | None:
        text = self._config.master_server_address if self._config else ""
        if not text or "://" in text:
            self.note(
                f"the master behind {text.partition('://')[0]}:// can't be probed"
                if text
                else "the master's address is not known"
            )
            return None
        try:
            return split_address(text, field="master_server_address")
        except MooncakeError:
            self.note("the master's address can't be read")
            return None

    def _tenant(self) -> str:
        return self._config.tenant_id if self._config else "of this client"


async def _confirmed(call: Callable[[], Awaitable[int | None]]) -> int | None:
    """Call until the answer is not -900, or has been so often enough.

    Each of the engine's connections that a restart or a bad line has broken fails one call; another
    version fails them all.
    """
    answer = await call()
    for _ in range(_CONFIRMATIONS):
        if answer != _RPC_FAIL:
            break
        await anyio.sleep(_CONFIRMATION_GAP)
        answer = await call()
    return answer
