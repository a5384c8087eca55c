"""The errors: one per engine code, copies that keep everything, texts that help."""

from __future__ import annotations

import asyncio
import copy
import errno
import inspect
import pickle
import re

import pytest

from aiomooncake import errors
from aiomooncake.errors import (
    CODES,
    BatchError,
    InternalError,
    MooncakeError,
    NoSpaceError,
    ObjectNotFoundError,
    OperationTimeoutError,
    RpcTimeoutError,
    SetupError,
    SetupTimeoutError,
    TransferError,
    WarmupError,
    code_name,
    error_from_code,
    rank_label,
    shorten_key,
)

# Upstream's `enum class ErrorCode`, and the class that stands for each.
UPSTREAM = {
    0: ("OK", errors.InternalError),
    -1: ("INTERNAL_ERROR", errors.InternalError),
    -10: ("BUFFER_OVERFLOW", errors.BufferTooSmallError),
    -100: ("SHARD_INDEX_OUT_OF_RANGE", errors.InternalError),
    -101: ("SEGMENT_NOT_FOUND", errors.SegmentError),
    -102: ("SEGMENT_ALREADY_EXISTS", errors.SegmentError),
    -103: ("CLIENT_NOT_FOUND", errors.UnavailableError),
    -200: ("NO_AVAILABLE_HANDLE", errors.NoSpaceError),
    -300: ("INVALID_VERSION", errors.ReplicaError),
    -400: ("INVALID_KEY", errors.InvalidArgumentError),
    -500: ("WRITE_FAIL", errors.TransferError),
    -600: ("INVALID_PARAMS", errors.InvalidArgumentError),
    -601: ("ILLEGAL_CLIENT", errors.ReplicaError),
    -700: ("INVALID_WRITE", errors.ReplicaError),
    -701: ("INVALID_READ", errors.ReplicaError),
    -702: ("INVALID_REPLICA", errors.ReplicaError),
    -703: ("REPLICA_IS_NOT_READY", errors.ObjectNotReadyError),
    -704: ("OBJECT_NOT_FOUND", errors.ObjectNotFoundError),
    -705: ("OBJECT_ALREADY_EXISTS", errors.ObjectExistsError),
    -706: ("OBJECT_HAS_LEASE", errors.ObjectLeasedError),
    -707: ("LEASE_EXPIRED", errors.LeaseExpiredError),
    -708: ("OBJECT_HAS_REPLICATION_TASK", errors.ReplicaError),
    -709: ("OBJECT_NO_REPLICATION_TASK", errors.ReplicaError),
    -710: ("REPLICA_NOT_FOUND", errors.ReplicaError),
    -711: ("REPLICA_ALREADY_EXISTS", errors.ReplicaError),
    -712: ("REPLICA_IS_GONE", errors.ReplicaError),
    -713: ("REPLICA_NOT_IN_LOCAL_MEMORY", errors.ReplicaError),
    -714: ("OBJECT_REPLICA_BUSY", errors.ReplicaError),
    -800: ("TRANSFER_FAIL", errors.TransferError),
    -801: ("CHECKSUM_MISMATCH", errors.ChecksumError),
    -900: ("RPC_FAIL", errors.RpcError),
    -901: ("RPC_TIMEOUT", errors.RpcTimeoutError),
    -1000: ("ETCD_OPERATION_ERROR", errors.MetadataError),
    -1001: ("ETCD_KEY_NOT_EXIST", errors.MetadataError),
    -1002: ("ETCD_TRANSACTION_FAIL", errors.MetadataError),
    -1003: ("ETCD_CTX_CANCELLED", errors.MetadataError),
    -1004: ("OPLOG_ENTRY_NOT_FOUND", errors.MetadataError),
    -1005: ("K8S_LEASE_OPERATION_ERROR", errors.MetadataError),
    -1006: ("K8S_LEASE_NOT_FOUND", errors.MetadataError),
    -1007: ("INCOMPLETE_OPLOG_CATCH_UP", errors.MetadataError),
    -1010: ("UNAVAILABLE_IN_CURRENT_STATUS", errors.UnavailableError),
    -1011: ("UNAVAILABLE_IN_CURRENT_MODE", errors.UnavailableError),
    -1012: ("NOT_SUPPORTED", errors.NotSupportedError),
    -1100: ("FILE_NOT_FOUND", errors.OffloadError),
    -1101: ("FILE_OPEN_FAIL", errors.OffloadError),
    -1102: ("FILE_READ_FAIL", errors.OffloadError),
    -1103: ("FILE_WRITE_FAIL", errors.OffloadError),
    -1104: ("FILE_INVALID_BUFFER", errors.OffloadError),
    -1105: ("FILE_LOCK_FAIL", errors.OffloadError),
    -1106: ("FILE_INVALID_HANDLE", errors.OffloadError),
    -1200: ("BUCKET_NOT_FOUND", errors.OffloadError),
    -1201: ("BUCKET_ALREADY_EXISTS", errors.OffloadError),
    -1202: ("KEYS_EXCEED_BUCKET_LIMIT", errors.OffloadError),
    -1203: ("KEYS_ULTRA_LIMIT", errors.OffloadError),
    -1300: ("UNABLE_OFFLOAD", errors.OffloadError),
    -1301: ("UNABLE_OFFLOADING", errors.OffloadError),
    -1500: ("SERIALIZE_UNSUPPORTED", errors.SerializationError),
    -1501: ("SERIALIZE_FAIL", errors.SerializationError),
    -1502: ("DESERIALIZE_FAIL", errors.SerializationError),
    -1503: ("PERSISTENT_FAIL", errors.OffloadError),
    -1400: ("TASK_NOT_FOUND", errors.TaskError),
    -1401: ("TASK_PENDING_LIMIT_EXCEEDED", errors.TaskError),
    -1402: ("JOB_NOT_FOUND", errors.TaskError),
    -1600: ("DFS_NETWORK_TIMEOUT", errors.OffloadError),
    -1601: ("DFS_SERVICE_UNAVAILABLE", errors.OffloadError),
    -1602: ("DFS_QUOTA_EXCEEDED", errors.OffloadError),
    -1603: ("DFS_PERMISSION_DENIED", errors.OffloadError),
    -1604: ("DFS_STALE_HANDLE", errors.OffloadError),
    -1605: ("DFS_PARTIAL_WRITE", errors.OffloadError),
    -1700: ("TENANT_QUOTA_EXCEEDED", errors.TenantError),
    -1701: ("TENANT_NOT_REGISTERED", errors.TenantError),
    -1702: ("TENANT_NOT_EMPTY", errors.TenantError),
}

BUILTINS = {
    "BatchError": RuntimeError,
    "BufferTooSmallError": BufferError,
    "ChecksumError": TransferError,
    "ClusterError": RuntimeError,
    "ConfigError": ValueError,
    "EngineNotInstalledError": ImportError,
    "ForkedProcessError": RuntimeError,
    "InternalError": RuntimeError,
    "InvalidArgumentError": ValueError,
    "LeaseExpiredError": RuntimeError,
    "MetadataError": RuntimeError,
    "NoSpaceError": OSError,
    "NotSupportedError": NotImplementedError,
    "ObjectExistsError": RuntimeError,
    "ObjectLeasedError": RuntimeError,
    "ObjectNotFoundError": LookupError,
    "ObjectNotReadyError": RuntimeError,
    "OffloadError": OSError,
    "OperationTimeoutError": TimeoutError,
    "ReplicaError": RuntimeError,
    "RpcError": ConnectionError,
    "RpcTimeoutError": TimeoutError,
    "SegmentError": LookupError,
    "SerializationError": ValueError,
    "SetupError": ConnectionError,
    "SetupTimeoutError": TimeoutError,
    "StoreClosedError": RuntimeError,
    "TaintedStoreError": RuntimeError,
    "TaskError": RuntimeError,
    "TenantError": PermissionError,
    "TooManyAbandonedError": RuntimeError,
    "TransferError": OSError,
    "UnavailableError": RuntimeError,
    "WarmupError": RuntimeError,
    "WrongLoopError": RuntimeError,
}

ERRORS = sorted(
    (
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, MooncakeError)
    ),
    key=lambda cls: cls.__name__,
)


def make(cls: type[MooncakeError]) -> MooncakeError:
    if issubclass(cls, BatchError):
        return cls("put_many", results={"k": error_from_code(-200, "put", key="k"), "l": None})
    return cls("it failed. Mend it.", code=-200, key="k", rank=3)


def test_the_table_holds_every_code_of_upstream_and_no_other() -> None:
    assert {code: info.name for code, info in CODES.items()} == {
        code: name for code, (name, _) in UPSTREAM.items()
    }


@pytest.mark.parametrize("code", UPSTREAM)
def test_every_code_gives_its_error(code: int) -> None:
    name, cls = UPSTREAM[code]
    error = error_from_code(code, "put", key="k", rank=3)
    assert type(error) is cls
    assert (error.code, error.code_name, error.key, error.rank) == (code, name, "k", 3)
    assert error.retryable is CODES[code].retryable
    advice = CODES[code].advice
    assert str(error) == f"[TP3] put of 'k' failed: {code} {name}. {advice}"
    assert re.fullmatch(r"[A-Zae].+\.", advice)
    assert code_name(code) == name


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        CODES[-200] = CODES[-800]  # type: ignore[index]
    with pytest.raises(AttributeError):
        CODES[-200].retryable = False  # type: ignore[misc]


def test_an_unknown_code_is_an_internal_error_that_says_so() -> None:
    error = error_from_code(-4711, "get")
    assert type(error) is InternalError
    assert (error.code, error.code_name, error.retryable) == (-4711, "UNKNOWN_CODE", False)
    assert str(error).startswith("get failed: -4711 UNKNOWN_CODE. This engine is newer")


def test_a_hint_follows_the_advice() -> None:
    assert str(error_from_code(-704, "get", key="k", hint="Ask the owner.")).endswith(
        "store it first. Ask the owner."
    )


@pytest.mark.parametrize("cls", ERRORS)
def test_every_error_is_a_mooncake_error_and_a_builtin(cls: type[MooncakeError]) -> None:
    if cls is MooncakeError:
        return
    assert issubclass(cls, BUILTINS[cls.__name__])
    assert cls.__mro__.index(MooncakeError) < cls.__mro__.index(Exception)
    assert cls.__name__ in errors.__all__


def test_timeouts_are_also_what_asyncio_raises() -> None:
    """Until Python 3.10 asyncio.TimeoutError is a class of its own."""
    for cls in (OperationTimeoutError, SetupTimeoutError, RpcTimeoutError):
        assert issubclass(cls, asyncio.TimeoutError)
    assert issubclass(SetupTimeoutError, SetupError)


@pytest.mark.parametrize("cls", ERRORS)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_error_keeps_everything(cls: type[MooncakeError], protocol: int) -> None:
    error = make(cls)
    error.note = "mine"  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(error, protocol))
    assert_same(again, error)
    assert again.note == "mine"


@pytest.mark.parametrize("cls", ERRORS)
def test_a_copied_error_keeps_everything(cls: type[MooncakeError]) -> None:
    error = make(cls)
    assert_same(copy.copy(error), error)
    assert_same(copy.deepcopy(error), error)


def assert_same(again: MooncakeError, error: MooncakeError) -> None:
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert repr(again) == repr(error)
    assert again.args == error.args
    assert again.retryable == error.retryable
    for name in ("code", "code_name", "key", "rank", "errno", "strerror", "msg"):
        assert getattr(again, name, None) == getattr(error, name, None)


def test_repr_shows_code_key_and_rank() -> None:
    assert repr(NoSpaceError("full.", code=-200, key="k", rank=3)) == (
        "NoSpaceError('[TP3] full.', code=-200, key='k', rank=3)"
    )
    assert repr(SetupError("no.")) == "SetupError('no.')"


def test_system_errors_have_a_number_and_our_text() -> None:
    error = error_from_code(-200, "put", key="k")
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert str(error).startswith("put of 'k' failed")
    for cls in ERRORS:
        if issubclass(cls, OSError):
            assert make(cls).errno is not None  # type: ignore[attr-defined]
            assert str(make(cls)) == "[TP3] it failed. Mend it."


def test_ranks_are_shown_as_tensor_parallel_numbers_or_as_they_stand() -> None:
    assert (rank_label(3), rank_label("dp1/tp3"), rank_label(None)) == ("TP3", "dp1/tp3", "")
    assert str(SetupError("no.", rank="dp1/tp3")) == "[dp1/tp3] no."
    assert str(SetupError("no.", rank=0)) == "[TP0] no."


def test_without_a_code_the_class_knows_whether_to_retry() -> None:
    assert OperationTimeoutError("late.").retryable
    assert not SetupError("bad.").retryable
    assert SetupError("bad.").code_name == ""
    assert not errors.ChecksumError("bad.").retryable


def test_long_keys_are_shortened_in_the_text_only() -> None:
    key = "a" * 50 + "b" * 500 + "c" * 16
    error = error_from_code(-704, "get", key=key)
    assert error.key == key
    assert shorten_key(key) == f"'{'a' * 48}…{'c' * 16}' (566 characters)"
    assert shorten_key(key) in str(error)
    assert key not in repr(error)
    assert shorten_key("k" * 80) == f"'{'k' * 80}'"


def test_a_batch_error_of_a_mapping_names_the_first_keys() -> None:
    failed = {f"k{i}": error_from_code(-200, "put", key=f"k{i}") for i in range(5)}
    error = BatchError("put_many failed for 5 of 6 keys", results={"good": None, **failed}, rank=1)
    assert str(error) == (
        "[TP1] put_many failed for 5 of 6 keys: 'k0': NoSpaceError -200 NO_AVAILABLE_HANDLE; "
        "'k1': NoSpaceError -200 NO_AVAILABLE_HANDLE; 'k2': NoSpaceError -200 NO_AVAILABLE_HANDLE; "
        "and 2 more. See .errors for each of them."
    )
    assert error.errors == failed
    assert error.results["good"] is None
    assert (error.code, error.retryable) == (-200, True)


def test_a_batch_error_of_a_list_keeps_the_order() -> None:
    lost = error_from_code(-800, "get", key="b")
    odd = ObjectNotFoundError("gone.")
    error = BatchError("get_many failed for 2 of 4 keys", results=[b"1", lost, None, odd])
    assert error.results == [b"1", lost, None, odd]
    assert error.errors == {1: lost, 3: odd}
    assert "2 of 4 keys: 'b': TransferError -800 TRANSFER_FAIL; #3: Obj" in str(error)
    assert (error.code, error.retryable) == (None, False)


def test_a_copied_batch_error_keeps_its_results() -> None:
    error = BatchError("get_many", results=[b"1", error_from_code(-800, "get", key="b")])
    again = pickle.loads(pickle.dumps(error))
    assert again.results[0] == b"1"
    assert_same(again.errors[1], error.errors[1])


def test_a_warmup_error_carries_its_history() -> None:
    error = WarmupError(
        "gave up.", rank=2, code=-200, attempts=["a", "b"], diagnosis="d", results={0: "r"}
    )
    again = pickle.loads(pickle.dumps(error))
    assert (again.attempts, again.diagnosis, again.results) == (("a", "b"), "d", {0: "r"})
    assert (again.rank, again.code, str(again)) == (2, -200, "[TP2] gave up.")
    assert WarmupError("gave up.").results is None


async def test_an_error_survives_a_task() -> None:
    async def fail() -> None:
        raise error_from_code(-901, "put", key="k")

    with pytest.raises(TimeoutError) as caught:
        await asyncio.create_task(fail())
    assert isinstance(caught.value, RpcTimeoutError)
