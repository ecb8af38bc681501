"""What the probe records of real Gloo ranks: calls, contents, waits, stacks and crashes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lab.audit
from lab.audit.findings.collectives import check
from lab.audit.findings.finding import Finding
from lab.audit.recording import Recording, read_recording
from tests.helpers.waiting import wait_until

HOOK = Path(lab.audit.__file__).parent / "probe" / "hook"
JOIN = """
import inspect, sys, time
import torch, torch.distributed as dist
from torch.distributed import all_reduce

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
"""
CALLS = """
model = torch.nn.Linear(4, 3)
dist.broadcast(model.weight.data, 0)
model(torch.ones(2, 4)).sum().backward()
all_reduce(model.weight.grad)
dist.all_reduce(model.bias.grad.view(-1)[:2])
loss = torch.ones(1)
work = dist.all_reduce(loss, async_op=True)
work.wait()
assert loss.item() == 2
dist.all_gather_object([None, None], {"rank": rank})
if rank == 0:
    dist.send(torch.zeros(2), 1)
else:
    dist.recv(torch.zeros(2), src=0)
pair = dist.new_group([0, 1])
dist.reduce(loss, dst=1, op=dist.ReduceOp.MAX, group=pair)
dist.barrier()
assert "async_op" in inspect.signature(all_reduce).parameters
assert dist.all_reduce is dist.distributed_c10d.all_reduce is all_reduce
dist.destroy_process_group()
"""
ORDER = """
if rank == 0:
    all_reduce(torch.ones(3))
else:
    dist.barrier()
"""
SIZES = "all_reduce(torch.ones(3 + 1000 * rank))\n"


def start(folder: Path, body: str) -> list[subprocess.Popen[bytes]]:
    """Start two ranks of a script under the probe."""
    (folder / "records").mkdir()
    (folder / "script.py").write_text(JOIN + body, encoding="utf-8")
    started = []
    for rank in range(2):
        settings: dict[str, Any] = {"folder": str(folder / "records"), "script": str(folder)}
        settings |= {"steps": 6, "rank": rank, "size": 2, "clocks": False, "replay": False}
        settings["stall_seconds"] = 1
        variables = {"LAB_AUDIT": json.dumps(settings), "PYTHONPATH": str(HOOK)}
        environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(folder / "script.py"), str(rank), str(folder / "store")]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
    return started


def finish(folder: Path, ranks: list[subprocess.Popen[bytes]], *, seconds: float) -> Recording:
    """Return what the ranks record; end those that run for longer after they have met."""
    wait_until(lambda: _all_met(folder, ranks), "the ranks meet")
    hung, limit = False, time.monotonic() + seconds
    for one in ranks:
        try:
            one.wait(timeout=max(0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            hung = True
    for one in ranks:
        one.kill()
        one.wait()
    return read_recording(folder / "records", hung=hung)


def _all_met(folder: Path, ranks: list[subprocess.Popen[bytes]]) -> bool:
    """Return whether each rank has joined the group or has ended."""
    paths = [folder / "records" / f"{one.pid}.jsonl" for one in ranks]
    return all(
        one.poll() is not None or (path.exists() and '"k": "group"' in path.read_text())
        for one, path in zip(ranks, paths, strict=True)
    )


def faults(recording: Recording) -> list[Finding]:
    return [one for one in check(recording) if isinstance(one, Finding)]


def test_calls(tmp_path: Path) -> None:
    ranks = start(tmp_path, CALLS)
    recording = finish(tmp_path, ranks, seconds=60)
    assert [one.returncode for one in ranks] == [0, 0]
    assert not faults(recording)
    calls = recording.ranks[0].by_kind["call"]
    assert [(one["name"], one["bytes"], one["content"]) for one in calls] == [
        ("init_process_group", 0, "other"),
        ("broadcast", 48, "weights"),
        ("all_reduce", 48, "gradient"),
        ("all_reduce", 8, "gradient"),
        ("all_reduce", 4, "other"),
        ("all_gather_object", 0, "other"),
        ("send", 8, "other"),
        ("new_group", 0, "other"),
        ("reduce", 4, "other"),
        ("barrier", 0, "other"),
    ]
    assert calls[0]["world"] == 2
    assert [calls[number]["peer"] for number in (1, 2, 6, 8)] == [0, None, 1, 1]
    assert (calls[8]["op"], calls[8]["size"], calls[8]["group"][1]) == ("MAX", 2, [0, 1])
    assert calls[2]["at"] == ["script.py", 12, "all_reduce(model.weight.grad)"]
    waited = [one["c"] for one in recording.ranks[0].by_kind["done"] if "wait_seconds" in one]
    assert waited == [4]


@pytest.mark.long
def test_ranks_that_wait_for_each_other_show_where(tmp_path: Path) -> None:
    recording = finish(tmp_path, start(tmp_path, ORDER), seconds=12)
    (observed,) = faults(recording)
    assert recording.hung
    assert observed.name == "collectives-differ"
    assert "rank 0 calls all_reduce of 12 bytes (script.py:10" in observed.evidence[0]
    assert "rank 1 calls barrier (script.py:12" in observed.evidence[0]
    assert [line.split(" in ")[0] for line in observed.evidence[1:]] == [
        "rank 0 was at script.py:10",
        "rank 1 was at script.py:12",
    ]


@pytest.mark.long
def test_sizes_that_abort_gloo_leave_records_and_the_stack(tmp_path: Path) -> None:
    ranks = start(tmp_path, SIZES)
    (observed,) = faults(finish(tmp_path, ranks, seconds=30))
    assert observed.name == "collectives-differ"
    assert "of 12 bytes" in observed.evidence[0]
    assert "of 4,012 bytes" in observed.evidence[0]
    crashed = [one.pid for one in ranks if one.returncode < 0]
    assert crashed
    for pid in crashed:
        assert "script.py" in (tmp_path / "records" / f"{pid}.crash").read_text()
