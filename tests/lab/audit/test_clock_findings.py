"""Clocks: a script's means, from real time.* calls under the probe, and what is said about them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lab.audit
from lab.audit.findings.clocks import check
from lab.audit.findings.finding import Finding
from lab.audit.recording import RankRecords, Recording, read_process

HOOK = Path(lab.audit.__file__).parent / "probe" / "hook"
SCRIPT = """
from time import time as now
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
CASES = {
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
value = total.item()
assert type(pickle.loads(pickle.dumps(value))) is float and value == float(total)
print(f"{value:.3f}")
"""


def record(folder: Path, *bodies: str) -> list[Recording]:
    """Return the recordings of scripts, each of one process, that run at the same time."""
    started = []
    for number, body in enumerate(bodies):
        home = folder / str(number)
        (home / "records").mkdir(parents=True)
        (home / "script.py").write_text(SCRIPT.replace("{body}", body), encoding="utf-8")
        settings = {"folder": str(home / "records"), "script": str(home), "steps": 1000}
        settings |= {"rank": 0, "size": 1, "clocks": True, "replay": False}
        variables = {"LAB_AUDIT": json.dumps(settings), "PYTHONPATH": str(HOOK)}
        environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(home / "script.py")]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    recordings = []
    for number, process in enumerate(started):
        assert process.wait(timeout=120) == 0
        one = read_process(folder / str(number) / "records", process.pid)
        ranks = [RankRecords(one.pid, one.records, one._numbers, rank) for rank in (0, 1)]
        recordings.append(Recording(2, ranks, clocks=True))
    return recordings


@pytest.mark.long
def test_means(tmp_path: Path) -> None:
    recordings = record(tmp_path, *(body for body, _ in CASES.values()))
    for (name, (_, expected)), recording in zip(CASES.items(), recordings, strict=True):
        outcomes = list(check(recording))
        found = {one.name for one in outcomes if isinstance(one, Finding)}
        assert found == expected, name
        recording.clocks = False
        assert not list(check(recording)), name


@pytest.mark.long
def test_readings_are_floats_and_a_printed_loss_is_named(tmp_path: Path) -> None:
    (recording,) = record(tmp_path, PLAIN)
    (observed,) = [one for one in check(recording) if isinstance(one, Finding)]
    assert observed.name == "loss-of-one-rank"
    assert observed.at is not None
    assert observed.at.text == 'print(f"{value:.3f}")'
