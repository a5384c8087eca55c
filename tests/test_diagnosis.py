from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from aiomooncake import diagnosis
from aiomooncake.config import StoreConfig
from aiomooncake.diagnosis import Diagnosis, DiagnosisKind, diagnose
from aiomooncake.errors import StoreClosedError
from tests.warmup_fakes import (
    HANG,
    FakeEngine,
    FakeTarget,
    HttpMaster,
    closing_port,
    free_port,
    silent_port,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MIB = 1 << 20
SERVING = {"status": "ok", "role": "leader", "ha_state": "serving", "service_ready": True}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let silence cost 0.3 s."""
    monkeypatch.setattr(diagnosis, "_QUESTION_TIMEOUT", 0.3)


def segment(port: int, *, used: int = 0, status: str = "OK") -> dict[str, Any]:
    return {
        "segment_name": "peer:1",
        "te_endpoint": f"127.0.0.1:{port}",
        "size_bytes": 64 * MIB,
        "protocol": "tcp",
        "status": status,
        "allocator_used_bytes": used,
        "allocator_capacity_bytes": 64 * MIB,
    }


@contextlib.asynccontextmanager
async def a_master(*mounted: dict[str, Any], **health: Any) -> AsyncIterator[StoreConfig]:
    """A master that lives, with its HTTP port and these segments."""
    answers = {
        "/health": {**SERVING, **health},
        "/get_segments_detail": {"segments": list(mounted)},
    }
    async with HttpMaster({}) as rpc, HttpMaster(answers) as http:
        yield StoreConfig(f"127.0.0.1:{rpc.port}", master_metrics_port=http.port)


async def ask(
    config: StoreConfig | None,
    code: int | None = -200,
    *,
    step: str = "put",
    engine: FakeEngine | None = None,
    **more: Any,
) -> Diagnosis:
    target = FakeTarget(engine)
    target.config = config
    return await diagnose(target, step=step, code=code, value_size=4096, **more)


# -- the master ---------------------------------------------------------------------------------


async def test_a_closed_port_is_an_unreachable_master() -> None:
    port = free_port()
    found = await ask(StoreConfig(f"127.0.0.1:{port}"), -900)
    assert found.kind is DiagnosisKind.MASTER_UNREACHABLE
    assert f"127.0.0.1:{port}: Connection refused" in found.explanation
    assert found.retryable


async def test_a_frozen_master_is_silent() -> None:
    with silent_port() as rpc, silent_port() as http:
        found = await ask(StoreConfig(f"127.0.0.1:{rpc}", master_metrics_port=http), -901)
    assert found.kind is DiagnosisKind.MASTER_SILENT
    assert f"127.0.0.1:{rpc}" in found.explanation
    assert "no answer to /health" in found.evidence


async def test_without_a_metrics_port_a_hanging_is_exist_tells_a_silent_master() -> None:
    with silent_port() as rpc:
        found = await ask(StoreConfig(f"127.0.0.1:{rpc}"), -901, engine=FakeEngine(is_exist=[HANG]))
    assert found.kind is DiagnosisKind.MASTER_SILENT
    assert "is_exist gave no answer in 0.3 s" in found.evidence


async def test_a_standby_is_silent_too() -> None:
    async with a_master(service_ready=False, role="standby") as config:
        found = await ask(config, -1010)
    assert found.kind is DiagnosisKind.MASTER_SILENT
    assert "does not serve" in found.explanation
    assert "role standby" in found.evidence


async def test_a_master_behind_a_coordinator_cannot_be_probed_and_it_says_so() -> None:
    found = await ask(StoreConfig("redis://user:secret@10.0.0.1:6379", global_segment_size=0))
    assert found.kind is DiagnosisKind.NO_SEGMENT
    assert "the master behind redis:// can't be probed" in found.evidence
    assert "secret" not in str(found)


async def test_calls_that_do_not_get_through_tell_an_unreachable_master() -> None:
    found = await ask(StoreConfig("etcd://a:1"), -900, engine=FakeEngine(is_exist=[-900]))
    assert found.kind is DiagnosisKind.MASTER_UNREACHABLE


async def test_peers_of_a_metadata_server_are_not_knocked_at() -> None:
    """The master lists their names, at which nobody listens: all of them seemed to be dead."""
    async with a_master(segment(free_port())) as config:
        server = "http://user:secret@10.0.0.2:8080/metadata"
        found = await ask(config.replace(metadata_server=server), -800)
    assert found.kind is DiagnosisKind.PEER_UNREACHABLE
    assert "http://***@10.0.0.2:8080/metadata does not know it" in found.explanation
    assert "refused" not in str(found)
    assert "was not restarted" in found.cure


# -- versions -----------------------------------------------------------------------------------


async def test_two_failed_puts_between_answers_tell_another_version() -> None:
    async def put_again() -> int:
        return -900

    async with a_master() as config:
        found = await ask(config, -900, put_again=put_again)
    assert found.kind is DiagnosisKind.VERSION_MISMATCH
    assert found.permanent
    assert "a second put answered -900 RPC_FAIL" in found.evidence


async def test_a_second_put_that_goes_well_clears_the_master() -> None:
    async def put_again() -> int:
        return 0

    async with a_master() as config:
        found = await ask(config, -900, put_again=put_again)
    assert found.kind is DiagnosisKind.UNKNOWN


async def test_a_server_that_lives_and_understands_no_call_is_another_version() -> None:
    async with a_master() as config:
        found = await ask(config, -900, engine=FakeEngine(is_exist=[-900] * 99))
    assert found.kind is DiagnosisKind.VERSION_MISMATCH
    assert found.permanent


async def test_a_master_that_was_restarted_is_not_another_version() -> None:
    """The first call after a restart meets the broken connection and answers -900."""
    async with a_master() as config:
        found = await ask(config, -900, engine=FakeEngine(is_exist=[-900]))
    assert found.kind is DiagnosisKind.UNKNOWN
    assert found.retryable


async def test_a_proxy_without_a_master_is_an_unreachable_master() -> None:
    """Taken for a master of another version, it would end the wait for one that restarts."""
    async with closing_port() as port:
        found = await ask(StoreConfig(f"127.0.0.1:{port}"), -900)
    assert found.kind is DiagnosisKind.MASTER_UNREACHABLE
    assert "hangs up at once" in found.explanation


# -- room ---------------------------------------------------------------------------------------


async def test_an_empty_list_of_segments_is_no_segment() -> None:
    async with a_master() as config:
        found = await ask(config)
    assert found.kind is DiagnosisKind.NO_SEGMENT
    assert "/get_segments_detail lists 0" in found.evidence


async def test_segments_on_their_way_out_are_no_segment() -> None:
    async with a_master(segment(1, status="DRAINING")) as config:
        found = await ask(config)
    assert found.kind is DiagnosisKind.NO_SEGMENT
    assert "DRAINING" in found.explanation


async def test_full_segments_are_out_of_space() -> None:
    async with a_master(segment(1, used=64 * MIB), segment(2, used=64 * MIB)) as config:
        found = await ask(config)
    assert found.kind is DiagnosisKind.OUT_OF_SPACE
    assert "no mounted segment has room (2 looked at)" in found.explanation
    assert "128 MiB of 128 MiB in use" in found.evidence


async def test_segments_with_room_leave_it_unknown_with_what_was_seen() -> None:
    async with a_master(segment(1)) as config:
        found = await ask(config)
    assert found.kind is DiagnosisKind.UNKNOWN
    assert "0 bytes of 64 MiB in use" in found.evidence


@pytest.mark.parametrize(
    ("size", "kind"), [(0, DiagnosisKind.NO_SEGMENT), ("64MiB", DiagnosisKind.OUT_OF_SPACE)]
)
async def test_without_a_metrics_port_the_own_segment_decides(
    size: int | str, kind: DiagnosisKind
) -> None:
    async with HttpMaster({}) as rpc:
        found = await ask(StoreConfig(f"127.0.0.1:{rpc.port}", global_segment_size=size))
    assert found.kind is kind
    assert "metrics port is not known" in found.evidence


async def test_of_an_adopted_store_little_is_known() -> None:
    found = await ask(None)
    assert found.kind is DiagnosisKind.UNKNOWN
    assert "the master's address is not known" in found.evidence


# -- peers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "code"), [("put", -800), ("put", None), ("get", None)])
async def test_a_dead_peer_is_named(step: str, code: int | None) -> None:
    port = free_port()
    async with HttpMaster({}) as alive, a_master(segment(alive.port), segment(port)) as config:
        found = await ask(config, code, step=step)
    assert found.kind is DiagnosisKind.PEER_UNREACHABLE
    assert f"127.0.0.1:{port} (segment peer:1): Connection refused" in found.explanation
    assert str(alive.port) not in found.explanation


async def test_a_frozen_peer_is_named() -> None:
    with silent_port() as port:
        async with a_master(segment(port)) as config:
            found = await ask(config, None)
    assert found.kind is DiagnosisKind.PEER_UNREACHABLE
    assert f"127.0.0.1:{port} (segment peer:1): no answer in time" in found.explanation


async def test_of_many_dead_peers_a_few_are_named() -> None:
    port = free_port()
    peers = [{**segment(port), "te_endpoint": f"127.0.0.{host}:{port}"} for host in range(1, 101)]
    async with a_master(*peers) as config:
        found = await ask(config, -800)
    assert "100 of 100" in found.explanation
    assert "and 97 more" in found.explanation


async def test_peers_that_all_answer_leave_it_unknown() -> None:
    async with HttpMaster({}) as alive, a_master(segment(alive.port)) as config:
        found = await ask(config, -800)
    assert found.kind is DiagnosisKind.UNKNOWN
    assert "probed 1 of 1 transfer engine by TCP" in found.evidence


async def test_a_peer_whose_address_cannot_be_read_is_no_fault() -> None:
    peer = {**segment(1), "te_endpoint": "somewhere"}
    async with a_master(peer) as config:
        found = await ask(config, -800)
    assert found.kind is DiagnosisKind.UNKNOWN
    assert "the peer somewhere can't be probed" in found.evidence


async def test_without_a_metrics_port_the_peer_is_unknown() -> None:
    async with HttpMaster({}) as rpc:
        found = await ask(StoreConfig(f"127.0.0.1:{rpc.port}"), -800)
    assert found.kind is DiagnosisKind.PEER_UNREACHABLE
    assert "unknown" in found.explanation
    assert "master_metrics_port" in found.cure


# -- this client --------------------------------------------------------------------------------


async def test_a_value_beyond_the_local_buffer_needs_no_question() -> None:
    engine = FakeEngine()
    found = await ask(StoreConfig("127.0.0.1:1", local_buffer_size=1024), -600, engine=engine)
    assert found.kind is DiagnosisKind.LOCAL_BUFFER_TOO_SMALL
    assert found.permanent
    assert "4 KiB does not fit in the local buffer of 1 KiB" in found.explanation
    assert not engine.calls


async def test_a_local_buffer_that_is_in_use_is_told_from_one_that_is_too_small() -> None:
    async with a_master() as config:
        found = await ask(config, -600)
    assert found.kind is DiagnosisKind.LOCAL_BUFFER_TOO_SMALL
    assert not found.permanent
    assert "no room left" in found.explanation


async def test_a_refused_tenant_is_named() -> None:
    found = await ask(StoreConfig("127.0.0.1:1", tenant_id="blue"), -1701)
    assert found.kind is DiagnosisKind.TENANT_REFUSED
    assert found.permanent
    assert "blue" in found.explanation


# -- whatever happens ---------------------------------------------------------------------------


async def test_it_never_raises() -> None:
    engine = FakeEngine(is_exist=[StoreClosedError("The store is closed")])
    async with a_master() as config:
        found = await ask(config, -1, engine=engine)
    assert found.kind is DiagnosisKind.UNKNOWN
    assert "StoreClosedError" in found.evidence


async def test_it_is_bounded() -> None:
    async def put_again() -> int:
        await asyncio.Event().wait()
        return 0

    async with a_master() as config:
        found = await ask(config, -900, put_again=put_again, timeout=0.2)
    assert found.kind is DiagnosisKind.UNKNOWN
    assert "ended after 0.2 s" in found.evidence
    assert "is_exist answers" in found.evidence


async def test_it_can_be_cancelled() -> None:
    with silent_port() as rpc:
        config = StoreConfig(f"127.0.0.1:{rpc}")
        task = asyncio.ensure_future(ask(config, engine=FakeEngine(is_exist=[HANG])))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_a_diagnosis_reads_as_one_line() -> None:
    one = Diagnosis(DiagnosisKind.NO_SEGMENT, "nothing is mounted", "list is empty", "mount some")
    assert str(one) == "no-segment: nothing is mounted (list is empty). Cure: mount some"
    assert DiagnosisKind("no-segment") is one.kind
