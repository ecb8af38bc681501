"""What the probe records of real Gloo ranks: calls, contents, waits, and who left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lab.audit
from lab.audit.findings.collectives import check
from lab.audit.findings.finding import Finding
from lab.audit.recording import read_recording
from tests.helpers.waiting import wait_until

HOOK = Path(lab.audit.__file__).parent / "probe" / "hook"
JOIN = """
import inspect, os, sys, time
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
other = torch.zeros(2)
for one in dist.batch_isend_irecv([dist.P2POp([dist.irecv, dist.isend][rank], other, 1 - rank)]):
    one.wait()
pair = dist.new_group([0, 1])
dist.reduce(loss, dst=1, op=dist.ReduceOp.MAX, group=pair)
dist.barrier()
assert "async_op" in inspect.signature(all_reduce).parameters
assert dist.all_reduce is dist.distributed_c10d.all_reduce is all_reduce
dist.destroy_process_group()
"""
DDP_AND_BARRIER = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
loss = model(torch.ones(2, 4)).sum()
if rank == 0:
    loss.backward()
else:
    dist.barrier()
"""
LEAVES = """
if rank == 1:
    os._exit(0)
all_reduce(torch.ones(3))
"""


def record(folder, body, *, until):
    """Return what two ranks of a script record until each has written a record of a kind."""
    (folder / "records").mkdir()
    (folder / "script.py").write_text(JOIN + body, encoding="utf-8")
    settings = {"folder": str(folder / "records"), "script": str(folder), "steps": 6}
    variables = {"LAB_AUDIT": json.dumps(settings), "PYTHONPATH": str(HOOK)}
    words = [sys.executable, str(folder / "script.py")]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(folder / "store")],
            env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    paths = [folder / "records" / f"{one.pid}.jsonl" for one in ranks]
    kind = f'"k": "{until}"'
    try:
        wait_until(lambda: all(one.exists() and kind in one.read_text() for one in paths), kind)
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    return read_recording(folder / "records", hung=until == "stands")


def test_calls(tmp_path):
    recording = record(tmp_path, CALLS, until="end")
    assert not [one for one in check(recording) if isinstance(one, Finding)]
    calls = recording.ranks[0].by_kind["call"]
    assert [(one["name"], one["bytes"], one["content"]) for one in calls] == [
        ("init_process_group", 0, "other"),
        ("broadcast", 48, "weights"),
        ("all_reduce", 48, "gradient"),
        ("all_reduce", 8, "gradient"),
        ("all_reduce", 4, "other"),
        ("all_gather_object", 0, "other"),
        ("irecv", 8, "other"),
        ("new_group", 0, "other"),
        ("reduce", 4, "other"),
        ("barrier", 0, "other"),
    ]
    assert calls[0]["world"] == 2
    assert [calls[number]["peer"] for number in (1, 2, 6, 8)] == [0, None, 1, 1]
    assert (calls[8]["op"], calls[8]["size"], calls[8]["group"][1]) == ("MAX", 2, [0, 1])
    assert calls[2]["at"] == ["script.py", 12, "all_reduce(model.weight.grad)"]
    waited = [one["c"] for one in recording.ranks[0].by_kind["done"] if "wait_seconds" in one]
    assert waited == [4, 6]


@pytest.mark.parametrize(
    ("body", "until", "kind"),
    [(DDP_AND_BARRIER, "stands", "rank 0 waits elsewhere"), (LEAVES, "end", "rank 1 ends")],
)
def test_ranks_that_wait_in_vain(tmp_path, body, until, kind):
    recording = record(tmp_path, body, until=until)
    (observed,) = (one for one in check(recording) if isinstance(one, Finding))
    assert observed.name == "collectives-differ"
    assert kind in observed.evidence[0]
    if until == "stands":
        assert [rank.by_kind["stands"][0]["at"][1] for rank in recording.ranks] == [12, 14]
        assert [len(rank.by_kind["stands"]) for rank in recording.ranks] == [1, 1]
