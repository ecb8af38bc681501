"""What the probe records of real Gloo ranks: calls, contents, waits, and who left."""

import re

from lab.audit import runner
from lab.audit.findings.collectives import check
from lab.audit.findings.finding import Finding
from lab.audit.records import CodeLine, CollectiveCall, DdpBuilt, Done, Loaded, Saved, Stands
from tests.helpers.audited import run_script

JOIN = """
import inspect, io, os, sys, time
import torch, torch.distributed as dist
from torch.distributed import all_reduce

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"tcp://{sys.argv[2]}", rank=rank, world_size=2)
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
METRICS_AND_FILES = """
kept = torch.zeros(2)
for number in range(3):
    dist.all_reduce(kept.add_(rank + number))
    dist.all_reduce(torch.tensor([number + 0.5]))
dist.all_reduce(torch.zeros(17))
dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)
torch.save(kept, f"{rank}.pt")
torch.save(kept, io.BytesIO())
torch.save(kept, os.devnull)
with open(f"{rank}.pt", "rb") as file:
    torch.load(file)
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


def run(folder, body, **settings):
    command = "python {script} {rank} {master}:{port}"
    return run_script(folder, JOIN + body, command=command, size=2, **settings)


def test_calls(tmp_path):
    recording = run(tmp_path, CALLS).recording
    assert not [one for one in check(recording) if isinstance(one, Finding)]
    calls = recording.ranks[0].of(CollectiveCall)
    assert [(one.name, one.nbytes, one.content) for one in calls] == [
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
    assert calls[0].wanted_world_size == 2
    assert [calls[number].peer for number in (1, 2, 6, 8)] == [0, None, 1, 1]
    assert (calls[8].op, calls[8].size, calls[8].group.ranks) == ("MAX", 2, [0, 1])
    assert (calls[7].size, calls[7].group.ranks) == (2, [0, 1])
    assert calls[2].at == CodeLine("main.py", 12, "all_reduce(model.weight.grad)")
    waits = [one for one in recording.ranks[0].of(Done) if one.wait_seconds is not None]
    assert [one.call_number for one in waits] == [4, 6]


def test_metrics_and_files(tmp_path):
    for rank in run(tmp_path, METRICS_AND_FILES).recording.ranks:
        calls = rank.of(CollectiveCall)[1:]
        kept, others, (many, maximum) = calls[0:6:2], calls[1:6:2], calls[6:]
        by_rank = [[0.0, 2.0, 7.0], [1.0, 3.0, 8.0]][rank.rank]
        assert [call.values for call in kept] == [[value] * 2 for value in by_rank]
        assert [call.values for call in others] == [[0.5], [1.5], [2.5]]
        assert len({call.tensor for call in kept}) == 1
        assert len({call.tensor for call in calls[:6]}) == 4  # an address may be used again
        assert many.values is maximum.values is None
        (saved,), (loaded,) = rank.of(Saved), rank.of(Loaded)
        assert saved.path == loaded.path == str((tmp_path / f"{rank.rank}.pt").resolve())


def test_ranks_that_wait_in_vain(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_CERTAIN_SECONDS", 4.0)
    end = run(tmp_path, DDP_AND_BARRIER, idle_seconds=40)
    (waited,) = re.fullmatch(r"no rank made progress for (\d+) s", end.hung).groups()
    assert int(waited) < 40  # it is certain that they wait for ever
    (observed,) = (one for one in check(end.recording) if isinstance(one, Finding))
    assert observed.name == "collectives-differ"
    assert "rank 0 waits elsewhere" in observed.evidence[0]
    assert [stands.at.line for stands in end.recording.of(Stands)] == [12, 14]
    assert [ddp.ranks for ddp in end.recording.of(DdpBuilt)] == [[0, 1], [0, 1]]
