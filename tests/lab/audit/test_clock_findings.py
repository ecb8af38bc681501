"""Clocks: a script's means, from real time.* calls under the probe, and what is said about them."""

import pytest

from lab.audit.findings.clocks import check
from lab.audit.findings.finding import Finding, Right
from lab.audit.recording import RankRecords, Recording
from lab.audit.runner import start_process
from tests.helpers.audited import run_script, start_forked

SCRIPT = """
from datetime import datetime, timedelta
from time import time as now
import datetime as dates
import json, pickle, time, timeit
import numpy as np
import torch

model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def update():
    if optimizer is not None:
        optimizer.step()

def iteration(early=False):
    model.zero_grad()
    loss = model(torch.ones(5, 4)).pow(2).mean()
    loss.backward()
    if not early:
        update()
    return loss

def interval():
    begin = time.perf_counter()
    iteration()
    return time.perf_counter() - begin

class Meter:
    total, count = 0.0, 0
    def add(self, value, n):
        self.total += value * n
        self.count += n
        self.mean = self.total / self.count

"""
FIRST = "first = interval()\n"
TEN = "times = [interval() for _ in range(10)]\n"
METERS = """
whole, loading = Meter(), Meter()
for i in range(10):
    begin = now(); middle = now(); iteration(); end = now()
    whole.add(end - begin, {n}); loading.add(middle - begin, {n})
"""
SHARED_READINGS = """
last, meter = now(), Meter()
for i in range(10):
    iteration(); new = now()
    meter.add(new - last, 24 if i < 9 else 12)
    last = new
"""
PARTS = """
parts, total = 0.0, 0.0
for _ in range(10):
    begin = time.time(); iteration(early=True); middle = time.time()
    update(); end = time.time()
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
LOOP = "times = []\nfor _ in torch.utils.data.DataLoader(range(44)): times.append(interval())\n"
DIVISOR, WITH_FIRST = "clock-wrong-divisor", "clock-first-iteration"
CASES = {
    "dates": (FIRST + DATES.format(10, 10), "right"),
    "divisor of dates": (FIRST + DATES.format(10, 11), DIVISOR),
    "divisor of a timedelta": (FIRST + DATES.format(9, 10), DIVISOR),
    "first in a span of dates": (DATES_SPAN, WITH_FIRST),
    "first by timeit": (SPAN.format(10).replace("now()", "timeit.default_timer()"), WITH_FIRST),
    "sums and means": (FIRST + TEN + "print(sum(times) / len(times), np.mean(times))", "right"),
    "numpy's sum": (FIRST + TEN + "print(np.sum(times) / 10)", "right"),
    "milliseconds": (FIRST + TEN + "print(round(sum(times) * 1000, 2) / 10)", "right"),
    "two meters": (FIRST + METERS.format(n="24 if i < 9 else 12"), "right"),
    "first in a meter": (METERS.format(n=1), WITH_FIRST),
    "two means on a line": (
        FIRST + PARTS.replace("parts /", "(parts + total) / 10, parts /"),
        "right",
    ),
    "shared readings": (FIRST + SHARED_READINGS, "right"),
    "by sample": (FIRST + TEN + "print(sum(times) / 240)", "right"),
    "a share": (FIRST + TEN + "print(sum(times) * 1000 / (sum(times) * 8))", "unknown"),
    "without the first": (TEN + "total = sum(times)\ntotal -= times[0]\nprint(total / 9)", "right"),
    # Without an optimiser nobody knows whether the update is timed.
    "no optimiser": ("optimizer = None\n" + FIRST + TEN + "print(sum(times) / 10)", "right"),
    "first in a span": (SPAN.format(10), WITH_FIRST),
    "span that ends within a step": (FIRST + SPAN.format(11), "right"),
    "divisor of a span": (FIRST + SPAN.format(8), DIVISOR),
    "in a loop over a loader": (FIRST + LOOP + "print(sum(times) / len(times))", "right"),
    "divisor of a loop over a loader": (FIRST + LOOP + "print(sum(times) / 40)", DIVISOR),
    "first of a loop over a loader": (LOOP + "print(sum(times) / len(times))", WITH_FIRST),
}
PLAIN = """
begin = time.time()
assert isinstance(begin, float) and type(pickle.loads(pickle.dumps(begin))) is float
assert json.dumps(time.time() - begin)[0].isdigit() and type(begin * torch.ones(1)) is torch.Tensor
total = iteration()
assert type(now()) is not float
begin = datetime.now()
assert isinstance(begin, datetime) and isinstance(dates.datetime.min, datetime)
assert type(pickle.loads(pickle.dumps(begin))) is type(pickle.loads(pickle.dumps(datetime.min)))
assert begin - timedelta(1) < begin < begin + timedelta(1)
assert type(pickle.loads(pickle.dumps(datetime.now() - begin))) is timedelta
value = total.item()
assert type(pickle.loads(pickle.dumps(value))) is float and value == float(total)
assert json.dumps(value) and sum([value, value]) == 2 * float(total)
print(f"{value / 2:.3f}")
"""


def record(folder, body, start=start_forked):
    """Return the recording of a script of one process."""
    end = run_script(folder, SCRIPT + body, start=start, clocks=True)
    assert end.statuses == (0,), end.output(0)
    (one,) = end.recording.processes
    ranks = [RankRecords(one.pid, one.records, one._numbers, rank) for rank in (0, 1)]
    return Recording(2, ranks, clocks=True)


def said(recording):
    """Return the names of the findings, and "right" or "unknown" for what is no finding."""
    return [
        one.name if isinstance(one, Finding) else "right" if isinstance(one, Right) else "unknown"
        for one in check(recording)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("body", "expected"), CASES.values(), ids=CASES)
def test_means(body, expected, tmp_path):
    recording = record(tmp_path, body)
    assert said(recording) == [expected]
    recording.clocks = False
    assert not said(recording)


@pytest.mark.slow
def test_readings_are_floats_and_a_printed_loss_is_named(tmp_path):
    # In a new interpreter the script imports the clocks before torch.
    _, observed = check(record(tmp_path, PLAIN, start_process))
    assert observed.name == "loss-of-one-rank"
    assert observed.at.text == 'print(f"{value / 2:.3f}")'
