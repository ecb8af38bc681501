"""lab/audit/probe/pace.py and stopping.py: short epochs and the cut, alike on all ranks."""

import json

import pytest

from lab.audit.records import Batch, Cut, EpochOver, Error, Loader, ProcessEnd, Rest, Step
from tests.helpers.audited import run_script, start_forked

START = """
import json, sys, time
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset
from lab.audit.probe import pace, stopping

RANK, RANKS, PORT = map(int, sys.argv[1:])
pace.WHOLE_SECONDS = 0.3
torch.set_num_threads(1)
store = distributed.TCPStore("127.0.0.1", PORT, RANKS, is_master=RANK == 0)
distributed.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS)
model = nn.Linear(1, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def loader_of(batches):
    return DataLoader(TensorDataset(torch.rand(2 * batches, 1), torch.zeros(2 * batches, 2)), 2)


def step(x, y, update=True, exchange=True):
    time.sleep(0.02)
    nn.functional.mse_loss(model(x), y).backward()
    if exchange:
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
    if update:
        optimizer.step()
        optimizer.zero_grad()


def evaluate(loader):
    with torch.no_grad():
        return [len(model(x)) for x, _ in loader]
"""


def audit(script, folder, **settings):
    """Run a script on two ranks, after ``START``; return their records."""
    command = "python {script} {rank} {nodes} {port}"
    end = run_script(
        folder, START + script, size=2, command=command, start=start_forked, **settings
    )
    assert {*end.statuses} == {0}, end.output(0) + end.output(1)
    assert not end.recording.of(Error)
    return end, end.recording.ranks


def lengths(rank, loader=0):
    """Return how many batches each epoch of a loader had."""
    overs = [over for over in rank.of(EpochOver) if over.loader_number == loader]
    return [over.batches for over in overs]


def test_a_slow_script_has_short_epochs_and_comes_to_its_end(tmp_path):
    """One more batch on rank 1 stays one more; what was left out is known; len() follows."""
    script = """
loader = loader_of(40 + RANK)
test = loader_of(30)
for epoch in range(3):
    for number, batch in enumerate(loader):
        step(*batch, exchange=number < 2)
    print(json.dumps([len(loader), len(evaluate(test))]), flush=True)
"""
    end, ranks = audit(script, tmp_path)
    zero, one = map(lengths, ranks)
    assert 6 <= zero[0] < 40
    assert zero[1:] == [2, 2]
    assert [length + 1 for length in zero] == one
    assert [json.loads(line)[1] for line in end.output(0).splitlines()] == [4, 4, 4]
    assert [json.loads(line)[0] for line in end.output(1).splitlines()] == [41, 3, 3]
    for rank in ranks:
        assert rank.of(ProcessEnd)[-1].after_cut is False
        assert not rank.of(Cut)
        (facts, _) = rank.of(Loader)
        assert facts.batches == 40 + rank.rank
        drawn = [record for kind in (Batch, Rest) for record in rank.of(kind)]
        first = [record for record in drawn if (record.loader_number, record.epoch) == (0, 0)]
        known = [index for record in first for index in record.indices]
        assert sorted(known) == list(range(2 * facts.batches))


def test_the_batches_left_over_by_accumulation_stay(tmp_path):
    script = """
loader = loader_of(51)
for epoch in range(3):
    for number, batch in enumerate(loader, 1):
        step(*batch, update=number % 4 == 0 or number == len(loader), exchange=False)
"""
    _, ranks = audit(script, tmp_path)
    for rank in ranks:
        assert lengths(rank)[1:] == [11, 11]  # two updates of four batches, and 51 % 4


def test_a_fast_script_is_left_whole_and_next_is_never_ended(tmp_path):
    script = """
batches = iter(loader_of(60))
for _ in range(50):
    step(*next(batches))
pace.WHOLE_SECONDS = 60
for _ in range(3):
    for batch in loader_of(12):
        step(*batch)
"""
    _, ranks = audit(script, tmp_path)
    for rank in ranks:
        assert len(rank.of(Step)) == 50 + 36
        assert not rank.of(Rest)


@pytest.mark.parametrize("loader", ["iter(lambda: torch.rand(2, 1), None)", "loader_of(10**4)"])
def test_a_script_without_an_end_is_cut_before_the_same_step(loader, tmp_path):
    script = f"""
stopping.MOST_SECONDS = 0.4
batches = iter({loader})
while True:
    x, *_ = next(batches)
    step(x, torch.zeros(2, 2))
"""
    _, ranks = audit(script, tmp_path)
    assert all(len(rank.of(Cut)) == 1 for rank in ranks)
    (steps,) = {len(rank.of(Step)) for rank in ranks}
    assert steps >= 8
