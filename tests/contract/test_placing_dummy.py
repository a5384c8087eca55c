"""Segments, tasks and sessions of a dummy client: what it can't do, and what it asks for."""

from __future__ import annotations

import uuid

import pytest

from aiomooncake import InvalidArgumentError, NotSupportedError, ObjectNotFoundError, Store
from tests.conftest import MB

pytestmark = pytest.mark.parametrize("store", ["dummy"], indirect=True)


@pytest.fixture
def key() -> str:
    return uuid.uuid4().hex


async def test_a_dummy_client_lends_nothing_and_has_no_sessions(store: Store, key: str) -> None:
    with pytest.raises(NotSupportedError, match="dummy client"):
        await store.mount_segment(MB)
    with pytest.raises(NotSupportedError, match="dummy client"):
        async with store.put_session({key: 10}):
            pytest.fail("it began")
    with pytest.raises(NotSupportedError, match="dummy client"):
        async with store.get_session([key]):
            pytest.fail("it began")


async def test_a_dummy_client_has_copies_made(store: Store, key: str) -> None:
    with pytest.raises(ObjectNotFoundError):
        await store.copy(key, "nowhere")
    await store.put(key, b"value")
    with pytest.raises(InvalidArgumentError, match="hostname"):
        await store.copy(key, "nowhere")
    with pytest.raises(InvalidArgumentError, match="not be the target"):
        await store.move(key, "nowhere", "nowhere else")
