"""What the probe records of loaders and samples, and how it ends scripts: real ones, forked."""

import json

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from lab.audit.probe.data import contents_of, held_content, look_through
from lab.audit.records import (
    Backward,
    Batch,
    Cut,
    Error,
    Evaluation,
    Loader,
    ProcessEnd,
    RandomForward,
    Rest,
    Step,
    Trained,
)
from lab.audit.runner import start_process
from tests.helpers.audited import run_script, start_forked

STEPS = 4
START = """
import json, sys
import torch
from torch import nn
from torch.utils.data import *
from torch.utils.data.distributed import DistributedSampler

torch.manual_seed(0)
torch.set_num_threads(1)
RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])
data = TensorDataset(torch.arange(48.0).reshape(48, 1), torch.arange(48) % 5)
model = nn.Sequential(nn.Linear(1, 5), nn.Dropout(0.5), nn.BatchNorm1d(5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
given = []


def step(x, y):
    given.append(x.flatten().tolist())
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    print(json.dumps(given), flush=True)


def evaluate(loader):
    model.eval()
    with torch.no_grad():
        seen = sum(len(model(x)) for x, _ in loader)
    model.train()
    return seen
"""


def audit(script, folder, *, status=0, cold=False, **options):
    """Run a script, after ``START``, and return how it ended, each process with this status.

    cold : in new interpreters; forks of the test server start workers, and fail, in another way.
    """
    start = start_process if cold else start_forked
    end = run_script(folder, START + script, start=start, **{"steps": STEPS} | options)
    assert {*end.statuses} == {status}, end.output(0)
    return end


def indices(rank, epoch, *, loader=0):
    found = [one for one in rank.of(Batch) if (one.loader_number, one.epoch) == (loader, epoch)]
    return [one.indices for one in found]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_two_ranks_cover_an_epoch(workers, tmp_path):
    script = f"""
sampler = DistributedSampler(data, num_replicas=RANKS, rank=RANK)
loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers={workers})
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        step(x, y)
"""
    end = audit(script, tmp_path, size=2, cold=workers > 0, steps=None)
    ranks, every, hashes = end.recording.ranks, [], set()
    for rank in ranks:
        epochs = [indices(rank, epoch) for epoch in range(3)]
        given = json.loads(end.output(rank.rank).splitlines()[-1])
        assert given == [*epochs[0], *epochs[1], *epochs[2]]
        assert [len(epoch) for epoch in epochs] == [12, 12, 12]
        assert [one.epoch for one in rank.of(Trained)] == [0, 1, 2]
        assert rank.of(Cut) == rank.of(Rest) == []
        every += [index for several in epochs[0] for index in several]
        rows = [(one.indices, one.contents) for one in rank.of(Batch)]
        hashes |= {pair for row in rows for pair in zip(*row, strict=True)}
    assert sorted(every) == list(range(48))
    assert indices(ranks[0], 0)[:2] != indices(ranks[0], 1)[:2]
    assert len(hashes) == len({i for i, _ in hashes}) == len({code for _, code in hashes})
    (content,) = {one.content for rank in ranks for one in rank.of(Loader)}
    assert content


def test_a_cut_epoch_tells_what_was_left(tmp_path):
    (rank,) = audit("for x, y in DataLoader(data, 4): step(x, y)", tmp_path).recording.ranks
    drawn = [index for batch in indices(rank, 0) for index in batch]
    (rest,) = [one.indices for one in rank.of(Rest)]
    assert drawn + rest == list(range(48))
    assert len(rank.of(Step)) == STEPS


class Held:
    """A dataset with some attributes, all of which may hold its samples."""

    def __init__(self, length=48, **held):
        vars(self).update(length=length, **held)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        raise AssertionError("it may not be asked")


def partition(data, index):
    return Held(4, data=data, index=index)  # as a tutorial's class does


@pytest.mark.parametrize(
    ("dataset", "inner"),
    [
        (partition(Held(), range(24, 28)), [24, 25, 26, 27]),
        (Subset(Subset(Held(), range(8, 48)), range(16, 20)), [24, 25, 26, 27]),
        (ConcatDataset([Subset(Held(), [3]), Subset(Held(), [3])]), [3, (1 << 40) + 3]),
        (ConcatDataset([Held(), partition(Held(), None)]), None),
        (partition(Subset(Held(), range(4, 8)), None), [4, 5, 6, 7]),  # as one that transforms
        (partition(Held(), torch.arange(4, 8)), [4, 5, 6, 7]),
        (partition(Held(), [4.0, 5.0, 6.0, 7.0]), None),  # a part of 48, and nobody knows which
        (partition(Held(), [0, 1, 1, 0]), None),  # labels, or samples drawn repeatedly
        (partition([Held(), Held()], range(4)), None),
    ],
)
def test_the_innermost_index_counts(dataset, inner):
    _, found = look_through(dataset)
    assert (found and list(found)) == inner


@pytest.mark.parametrize(
    ("held", "tells"),
    [
        ({"images": torch.rand(48, 9)}, True),
        ({"images": torch.zeros(48, 9), "labels": list(range(48))}, True),
        ({"images": torch.zeros(48, 9), "labels": [0] * 48}, False),  # equal samples
        ({"labels": list(range(48))}, False),  # labels alone
        ({"names": [f"{i}.png" for i in range(48)]}, False),  # in a folder that nobody knows
        ({"names": [(__file__, i) for i in range(48)]}, True),  # files that exist
        ({"images": torch.rand(96, 9)}, False),  # the index may mean another of them
        ({"parts": [object()] * 48, "images": torch.rand(48, 9)}, False),
    ],
)
def test_what_a_dataset_holds(held, tells):
    assert (held_content(Held(**held)) is not None) == tells


def test_the_rows_of_a_batch_are_its_samples():
    x, y = torch.rand(4, 3, 8), torch.arange(4)
    codes = contents_of({"x": x, "rest": [y, "text", torch.ones(3)]}, 4)
    assert codes == contents_of((x, y), 4)
    assert codes is not None
    assert len(set(codes)) == 4
    assert contents_of((x.flip(0), y.flip(0)), 4) == codes[::-1]
    assert contents_of((x, 0 * y), 4) != codes
    assert contents_of(["a"] * 4, 4) is None


def test_evaluations_are_told_from_training(tmp_path):
    script = """
train, test = DataLoader(data, 4, shuffle=True), DataLoader(Subset(data, range(40)), 4)
print("before", evaluate(test))
for epoch in range(2):
    for x, y in train: step(x, y)
    print("after", evaluate(test), evaluate(train))
"""
    (rank,) = audit(script, tmp_path, steps=None).recording.ranks
    by_loader = {one.length: one.number for one in rank.of(Loader)}
    assert [len(indices(rank, epoch, loader=by_loader[40])) for epoch in range(3)] == [10] * 3
    assert {one.loader_number for one in rank.of(Trained)} == {by_loader[48]}
    assert [one.epoch for one in rank.of(Trained)] == [0, 2]
    assert len(rank.of(Step)) == 24
    assert [one.step for one in rank.of(Evaluation)] == [12, 24]
    assert rank.of(Evaluation)[0].batchnorm_layers == 1
    assert len(rank.of(RandomForward)) == 24


LOOPS = {
    "restarted": """
it = iter(loader)
while True:
    try:
        batch = next(it)
    except StopIteration:
        it = iter(loader)
        batch = next(it)
    step(*batch)
""",
    "one batch": "x, y = next(iter(loader))\nwhile True: step(x, y)",
    "no loader": "while True: step(*data[:8])",
    "peek": """
for _ in range(9):
    peek = next(iter(loader))
    for x, y in loader: step(x, y)
""",
    "generator": "def batches():\n    yield from loader\nfor x, y in batches(): step(x, y)",
    "zip": "for (x, y), _ in zip(loader, DataLoader(data, 1)): step(x, y)",
    "by hand": """
from torch import distributed as d
d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)
w = torch.zeros(1, 5, requires_grad=True)
del optimizer
for _ in range(9):
    for x, y in loader:
        nn.functional.cross_entropy(x @ w, y).backward()
        w.data -= 0.1 * w.grad; w.grad = None
""",
}
ERROR_AFTER_THE_CUT = "it = iter(loader)\nfor _ in range(12): step(*next(it))"


@pytest.mark.parametrize(
    ("loop", "cold"),
    [
        *(pytest.param(loop, False, id=name) for name, loop in LOOPS.items()),
        pytest.param(ERROR_AFTER_THE_CUT, True, marks=pytest.mark.long),
    ],
)
def test_every_loop_ends_in_good_order(loop, cold, tmp_path):
    script = f"loader = DataLoader(data, 4, shuffle=True)\n{loop}"
    (rank,) = audit(script, tmp_path, cold=cold).recording.ranks
    assert len(rank.of(Cut)) == 1
    assert STEPS <= len(rank.of(Backward)) <= STEPS + 1
    assert all(one.after_cut for one in (*rank.of(Error), rank.of(ProcessEnd)[-1]))


@pytest.mark.long
def test_a_process_that_stays_after_the_cut_is_ended_and_has_no_status(tmp_path):
    script = """
import threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
while True:
    for x, y in DataLoader(data, 4): step(x, y)
"""
    (rank,) = audit(script, tmp_path, status=None).recording.ranks
    assert len(rank.of(Cut)) == 1
    assert STEPS <= len(rank.of(Backward)) <= STEPS + 1


def test_errors_are_recorded_with_their_line(tmp_path):
    script = "for x, y in DataLoader(data, 4):\n    step(x, y)\n    1 / 0"
    (rank,) = audit(script, tmp_path, status=1, cold=True).recording.ranks
    (error,) = rank.of(Error)
    assert (error.type, error.after_cut) == ("ZeroDivisionError", False)
    assert (error.at.file, error.at.text) == ("main.py", "1 / 0")


@pytest.mark.long
def test_spawned_ranks_end_with_status_0(tmp_path):
    """Also where a spawned rank fails because of the cut."""
    script = """
def main(rank):
    it = iter(DataLoader(data, 4, shuffle=True))
    while True: step(*next(it))

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)  # it spawns, so mp.spawn is no fork
"""
    end = audit(script, tmp_path, size=None, command="python {script} 0 2", cold=True)
    assert sum(bool(one.of(Cut)) for one in end.recording.processes) == 2
