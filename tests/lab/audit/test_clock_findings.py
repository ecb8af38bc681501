"""Clocks: a script's means, from real time.* calls under the probe, and what is said about them."""

import json
import os
import sys
from pathlib import Path

import pytest

import lab.audit
from lab.audit.findings.clocks import check
from lab.audit.findings.finding import Finding
from lab.audit.recording import RankRecords, Recording, read_process
from lab.audit.runner import Start, start_process
from tests.helpers.audited import start_forked

HOOK = Path(lab.audit.__file__).parent / "probe" / "hook"
SCRIPT = """
from datetime import datetime, timedelta
from time import time as now
import datetime as dates
import json, pickle, statistics, time
import numpy as np
import torch

model = torch.nn.Linear(4, 3)
weights = list(model.parameters())
optimizer = torch.optim.SGD(weights, lr=0.1)

def iteration(update=True):
    optimizer.zero_grad()
    loss = model(torch.ones(5, 4)).pow(2).mean()
    loss.backward()
    if update:
        optimizer.step()
    return loss

def interval(clock=now, early=False):
    begin = clock()
    loss = iteration(update=not early)
    end = clock()
    if early:
        optimizer.step()
    return end - begin

{body}
"""
FIRST = "first = interval()\n"
TEN = "times = [interval() for _ in range(10)]\n"
METER = """
total, count = 0.0, 0
for _ in range(10):
    total += interval() * 24
    count += 24
print(total / count)
"""
PARTS = """
parts, total = 0.0, 0.0
for _ in range(10):
    begin = time.time(); iteration(update=False); middle = time.time()
    optimizer.step(); end = time.time()
    parts += middle - begin
    total += end - middle
print(parts / 10, total / 10)
"""
SPAN = "begin = now()\nfor _ in range(10): iteration()\nprint((now() - begin) / {})\n"
DATES = """
total = timedelta()
for _ in range(10):
    begin = datetime.now(); iteration()
    total += datetime.now() - begin
print(total / {})
print(total.total_seconds() / {})
"""
DATES_SPAN = """
torch.utils.data.DataLoader([0])
begin = dates.datetime.now()
for _ in range(10): iteration()
print((dates.datetime.now() - begin).total_seconds() / 10)
"""
CASES = {
    "right dates": (FIRST + DATES.format(10, 10), set()),
    "divisor of dates": (FIRST + DATES.format(10, 11), {"clock-wrong-divisor"}),
    "divisor of a timedelta": (FIRST + DATES.format(9, 10), {"clock-wrong-divisor"}),
    "first in a span of dates": (DATES_SPAN, {"clock-first-iteration"}),
    "first by timeit": (
        "import timeit\n" + SPAN.format(10).replace("now()", "timeit.default_timer()"),
        {"clock-first-iteration"},
    ),
    "right": (FIRST + TEN + "print(sum(times) / len(times), np.mean(times))", set()),
    "right milliseconds": (FIRST + TEN + "print(sum(times) * 1000 / 10)", set()),
    "right meter": (FIRST + METER, set()),
    "right parts of a step": (FIRST + PARTS, set()),
    "right span": (FIRST + SPAN.format(10), set()),
    "right by sample": (FIRST + TEN + "print(sum(times) / 240)", set()),
    "right without the first": (
        TEN + "total = sum(times)\ntotal -= times[0]\nprint(total / 9)",
        set(),
    ),
    "first": (TEN + "print(statistics.mean(times))", {"clock-first-iteration"}),
    "first in a span": (SPAN.format(10), {"clock-first-iteration"}),
    "divisor": (FIRST + TEN + "print(sum(times) / 11)", {"clock-wrong-divisor"}),
    "divisor of a span": (FIRST + SPAN.format(8), {"clock-wrong-divisor"}),
    "early": (
        FIRST.replace("()", "(early=True)")
        + TEN.replace("()", "(time.perf_counter, early=True)")
        + "print(sum(times) / 10)",
        {"clock-before-update"},
    ),
}
PLAIN = """
begin = time.time()
assert isinstance(begin, float) and type(pickle.loads(pickle.dumps(begin))) is float
assert json.dumps(time.time() - begin)[0].isdigit() and type(begin + 1) is float
assert type(pickle.loads(pickle.dumps(time.time() - begin))) is float
total = iteration()
assert type(now()) is not float
begin = datetime.now()
assert isinstance(begin, datetime) and isinstance(dates.datetime.min, datetime)
assert type(pickle.loads(pickle.dumps(begin))) is type(pickle.loads(pickle.dumps(datetime.min)))
assert type(begin - timedelta(1) - begin) is timedelta and begin + timedelta(1) > begin
assert type(pickle.loads(pickle.dumps(datetime.now() - begin))) is timedelta
value = total.item()
assert type(pickle.loads(pickle.dumps(value))) is float and value == float(total)
print(f"{value:.3f}")
"""


def record(folder: Path, body: str, start: Start) -> Recording:
    """Return the recording of a script of one process."""
    (folder / "records").mkdir(parents=True)
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("{body}", body), encoding="utf-8")
    settings = {"folder": str(folder / "records"), "script": str(folder), "steps": 1000}
    settings |= {"rank": 0, "size": 1, "clocks": True, "replay": False}
    variables = {"LAB_AUDIT": json.dumps(settings), "PYTHONPATH": str(HOOK)}
    variables |= {"OMP_NUM_THREADS": "1", "PATH": os.path.dirname(sys.executable)}
    environment = {**os.environ, **variables}
    process = start(["python", str(script)], environment, folder, folder / "log")
    assert process.wait(timeout=120) == 0, (folder / "log").read_text(encoding="utf-8")
    one = read_process(folder / "records", process.pid)
    ranks = [RankRecords(one.pid, one.records, one._numbers, rank) for rank in (0, 1)]
    return Recording(2, ranks, clocks=True)


@pytest.mark.slow
@pytest.mark.parametrize(("body", "expected"), CASES.values(), ids=CASES)
def test_means(body: str, expected: set[str], tmp_path: Path) -> None:
    recording = record(tmp_path, body, start_forked)
    outcomes = list(check(recording))
    assert {one.name for one in outcomes if isinstance(one, Finding)} == expected
    recording.clocks = False
    assert not list(check(recording))


@pytest.mark.slow
def test_readings_are_floats_and_a_printed_loss_is_named(tmp_path: Path) -> None:
    """In a new interpreter, where the script imports the clocks before torch."""
    (observed,) = [
        one for one in check(record(tmp_path, PLAIN, start_process)) if isinstance(one, Finding)
    ]
    assert observed.name == "loss-of-one-rank"
    assert observed.at is not None
    assert observed.at.text == 'print(f"{value:.3f}")'
