"""What engines older than the newest do otherwise, for the tests that ``scripts/test-matrix`` runs.

A plugin of pytest's, with ``-p tests.older_engines``. A test that is named here must fail on those
engines, and in this way; if it passes, that is a failure too. Where the library itself says that
this engine lacks something, and which newer one has it, no name is needed.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

import pytest
from packaging.version import Version

from aiomooncake import NotSupportedError
from aiomooncake.engine.binding import installed_distributions

__all__ = ["DIFFERENCES", "LEFT_OUT", "NEWEST", "VERSION", "needs_a_newer_engine", "older"]


NEWEST: Final = "0.3.13.post1"
(VERSION,) = installed_distributions().values()


@dataclass(frozen=True)
class Difference:
    """Tests that fail on older engines.

    Attributes:
        since: The engine with which they pass for the first time.
        tests: Their names without the folder, with or without the first parameters.
        raises: How they fail.
        why: What the older engines lack.
    """

    since: str
    tests: tuple[str, ...]
    raises: type[BaseException] | tuple[type[BaseException], ...]
    why: str


_SESSIONS: Final = "it calls the binding's sessions, by which large values travel in pieces"

DIFFERENCES: Final = (
    Difference(
        "0.3.13",
        (
            "test_placement.py::test_groups_of_native_calls[real",
            "test_placement.py::test_groups_must_be_as_many_as_keys[real",
            "test_placement.py::test_options_that_the_engine_refuses[real",
            "test_placement.py::test_only_the_calls_of_several_buffers_place_on_the_own_host[real",
            "test_placement.py::test_a_value_that_is_not_finished_is_not_there_yet[real",
        ),
        AttributeError,
        _SESSIONS,
    ),
    Difference(
        "0.3.13",
        ("test_zero_copy.py::test_large_moves_go_in_pieces_and_tell_of_it[real",),
        AssertionError,
        "there are no sessions: large values travel whole, and nothing is told on the way",
    ),
    Difference(
        "0.3.13",
        ("test_cluster.py::test_listens_on_loopback_only",),
        AssertionError,
        "the master's metrics port is open to other hosts",
    ),
    Difference(
        "0.3.11",
        (
            "test_connect.py::test_connect_and_close_leave_the_loop_free",
            "test_connect.py::test_the_slow_ways_work_and_warn_once",
            "test_placing.py::test_reads_beside_the_end_of_a_segment_do_no_harm",
        ),
        AssertionError,
        "set-up and close hold the GIL",
    ),
)

LEFT_OUT: Final = (
    (
        "0.3.13",
        ("[dummy",),
        "dummy clients are refused (tests/test_versions.py)",
    ),
    (
        "0.3.13",
        ("test_native_contract.py::", "test_native_tasks.py::"),
        "what the newest engine answers, some of it where older ones crash",
    ),
    (
        "0.3.12",
        ("test_placement.py::",),
        "the master does not tell where segments lie, by which these tests check",
    ),
    (
        "0.3.11",
        ("test_ranks.py::test_eight_ranks_wait_for_the_first_segment_side_by_side",),
        "memory can't be mounted later",
    ),
    (
        "0.3.12",
        ("test_zero_copy.py::test_no_end_takes_the_process_down[real-views_outlive_the_store",),
        "a value that was just stored in another process may be read before all of it is there",
    ),
    (
        "0.3.11",
        (
            "test_connect.py::test_a_set_up_that_timed_out_does_not_hold_up_others",
            "test_connect.py::test_a_cancelled_connect_leaves_nothing",
        ),
        "a set-up that is stuck holds the GIL, for as long as the master is",
    ),
)
"""Since when tests are asked for; which ones, as above, by file or by mode; why not before."""


def older(version: str, since: str) -> bool:
    """Tell whether an engine is older than another."""
    return Version(version) < Version(since)


def needs_a_newer_engine(error: BaseException | None) -> bool:
    """Tell whether this engine was refused, for one that is newer and exists.

    What names no version is no such refusal: of a method that no engine has, say.
    """
    if not isinstance(error, NotSupportedError):
        return False
    said = re.search(rf"engine {re.escape(VERSION)}[ ,:].*install (\d[\w.]*) or newer", str(error))
    return said is not None and older(VERSION, said[1]) and not older(NEWEST, said[1])


def _is_one_of(item: pytest.Item, names: tuple[str, ...]) -> bool:
    name = item.nodeid.rpartition("/")[2]
    return any(
        each in name
        if each.startswith("[")
        else name.startswith(each) and (each.endswith("::") or name[len(each) :][:1] in "[]-")
        for each in names
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Take a refusal that names a newer engine for a difference of this one."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if needs_a_newer_engine(error):
        report.outcome = "skipped"
        report.wasxfail = f"reason: {error}"
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what fails on this engine, and leave out what is not asked for."""
    left_out = [
        item
        for item in items
        for since, names, _ in LEFT_OUT
        if older(VERSION, since) and _is_one_of(item, names)
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        for difference in DIFFERENCES:
            if older(VERSION, difference.since) and _is_one_of(item, difference.tests):
                mark = pytest.mark.xfail(raises=difference.raises, reason=difference.why)
                item.add_marker(mark)
