"""A minute of the soak, and that it would see what it looks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak.values import Ledger, WrongValueError

ROOT = Path(__file__).parent.parent
SECONDS = 60


@pytest.mark.skipif(sys.platform != "linux", reason="the engine has Linux wheels only")
@pytest.mark.timeout(SECONDS + 120)
def test_a_minute_of_faults_leaves_no_wrong_value_and_nothing_behind() -> None:
    """The seed is another one each time, and what it prints tells how to repeat it."""
    pytest.importorskip("mooncake.store")
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--seconds", str(SECONDS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS + 100,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-6000:]


def test_a_wrong_value_is_known() -> None:
    ledger = Ledger(seed=1)
    value, other = ledger.new("key", 4096), ledger.new("other", 4096)
    assert len(value) == 4096
    for good in (value, memoryview(ledger.new("key", 4096)), value):
        ledger.check("key", good)
    for bad, what in (
        (value[:100], "100 bytes of a value of 4096"),
        (value[:10], "10 bytes, which is no value"),
        (other, "the value of another key, or none: other"),
        (value[:2000] + other[2000:], "some of the 4096 bytes"),
        (value[:-1] + b"?", "some of the 4096 bytes"),
        (bytes(4096), "the value of another key"),
    ):
        with pytest.raises(WrongValueError, match=what):
            ledger.check("key", bad)


def test_a_value_that_was_never_made_is_known() -> None:
    made = Ledger(seed=1)
    made.new("key", 100)
    second = made.new("key", 100)
    ledger = Ledger(seed=1)
    ledger.new("key", 100)
    with pytest.raises(WrongValueError, match="value 2, which was never made"):
        ledger.check("key", second)
