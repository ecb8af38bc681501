"""How long a way of the demo may take: as long as its ranks are alive."""

import itertools
import time
from types import SimpleNamespace

import pytest

from common.utils import processes
from lab import demo
from tests.helpers import ROOT
from tests.helpers.hurt import __file__ as HURT

SHORT = ("--dataset", "digits", "--batch-size", "8", "--max-steps", "4", "--threads", "1")


@pytest.fixture
def reports(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "REPORTS", tmp_path)
    return ("--output-dir", str(tmp_path))


@pytest.mark.slow
def test_a_slow_run_may_take_hours(reports, monkeypatch):
    """Between two looks at the clock it goes on by an hour."""
    hours = itertools.count(0, 3600)
    clock = SimpleNamespace(monotonic=lambda: next(hours), sleep=time.sleep)
    monkeypatch.setattr(processes, "time", clock)
    summary = demo.run_way([str(ROOT / "PartOne" / "main.py"), *SHORT, *reports], 1)
    assert summary is not None
    assert summary.part == "PartOne"


@pytest.mark.slow
def test_a_silent_rank_ends_the_run(reports, capfd):
    part = (str(ROOT / "PartTwo" / "main.py"), "--sync", "all_reduce", "--timeout", "5")
    silent = [HURT, "1", "forward", "stop", *part, *SHORT, *reports]
    assert demo.run_way(silent, 2) is None
    assert "rank 1 (127.0.0.1) has not moved since" in capfd.readouterr().err
