"""What the probe records of loaders and samples, and how it ends scripts: real ones, forked."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.audit.command import AuditCommand
from lab.audit.recording import RankRecords, read_recording
from lab.audit.runner import RunEnd, RunSettings, run_audit_size
from tests.helpers.audited import start_forked

STEPS = 4
START = """
import argparse, json, sys
from itertools import islice
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
given, losses = [], []


def step(x, y):
    given.append(x.flatten().tolist())
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    print(json.dumps([given, losses, torch.get_rng_state().sum().item()]), flush=True)


def evaluate(loader):
    model.eval()
    with torch.no_grad():
        seen = sum(len(model(x)) for x, _ in loader)
    model.train()
    return seen


class Partition:
    def __init__(self, data, index):
        self.data, self.index = data, index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, index):
        return self.data[self.index[index]]
"""


def audit(
    script: str, folder: Path, *, ranks: int = 1, cold: bool = False
) -> tuple[list[RankRecords], RunEnd]:
    """Run a script, after ``START``, on some ranks; return their records and how they ended.

    cold : in new interpreters; forks of the test server start workers, and fail, in another way.
    """
    path, records, cwd = folder / "script.py", folder / "records", folder / "cwd"
    path.write_text(START + script)
    records.mkdir()
    cwd.mkdir()
    command = AuditCommand(("python", str(path), "{rank}", "{nodes}"))
    settings = RunSettings(steps=STEPS, limit_seconds=60, cwd=cwd)
    end = run_audit_size(command, ranks, records, settings, start=None if cold else start_forked)
    return read_recording(records, asked_size=ranks).ranks, end


def audit_one(script: str, folder: Path, *, cold: bool = False) -> RankRecords:
    """Run a script on one rank; return its records. It has to end with status 0."""
    ranks, end = audit(script, folder, cold=cold)
    assert end.statuses == (0,), end.output(0)
    assert not ranks[0].of("trouble")
    return ranks[0]


def indices(rank: RankRecords, epoch: int, *, loader: int = 0) -> list[list[int]]:
    """Return the indices of the batches of an epoch."""
    found = [one for one in rank.by_kind["batch"] if (one["l"], one["epoch"]) == (loader, epoch)]
    return [one["indices"] for one in found]


def rest(rank: RankRecords, epoch: int = 0) -> dict[str, Any]:
    """Return the only record ``rest`` of an epoch."""
    (found,) = (one for one in rank.by_kind["rest"] if one["epoch"] == epoch)
    return found


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_two_ranks_cover_an_epoch(workers: int, tmp_path: Path) -> None:
    """Batches and rest of both ranks are all samples once; two steps show the second epoch."""
    script = f"""
sampler = DistributedSampler(data, num_replicas=RANKS, rank=RANK)
loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers={workers})
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        step(x, y)
"""
    ranks, end = audit(script, tmp_path, ranks=2, cold=workers > 0)
    assert end.statuses == (0, 0), end.output(0)
    every = []
    for rank in ranks:
        batches = indices(rank, 0)
        given = json.loads(end.output(rank.rank).splitlines()[-1])[0]
        assert given == [*batches, *indices(rank, 1)]
        assert (len(batches), len(indices(rank, 1))) == (STEPS, 2)
        assert [one["epoch"] for one in rank.by_kind["trained"]] == [0, 1]
        every += [index for batch in batches for index in batch] + rest(rank)["indices"]
        rows = {row[0]: row for one in rank.of("items") for row in one["rows"]}
        assert all(rows[i][1:3] == [i, i % 5] for batch in batches for i in batch)
    assert sorted(every) == list(range(48))
    assert indices(ranks[0], 0)[:2] != indices(ranks[0], 1)
    hashes = [{row[0]: row[3] for one in r.of("items") for row in one["rows"]} for r in ranks]
    assert len({code for one in hashes for code in one.values()}) == len(hashes[0] | hashes[1])


@pytest.mark.parametrize(
    "wrapped",
    [
        "Partition(data, list(range(24, 48)))",
        "Subset(Subset(data, range(8, 48)), range(16, 40))",
        "ConcatDataset([Subset(data, range(24, 36)), Subset(data, range(36, 48))])",
    ],
)
def test_the_innermost_index_counts(wrapped: str, tmp_path: Path) -> None:
    """However the dataset is wrapped; the rest is known where lists of indices tell."""
    rank = audit_one(
        f"loader = DataLoader({wrapped}, batch_size=3, shuffle=True)\n"
        "for x, y in loader: step(x, y)",
        tmp_path,
    )
    rows = [row for one in rank.of("items") for row in one["rows"]]
    assert rows
    assert all(row[1] == row[0] + 24 for row in rows)
    left = rest(rank)
    if wrapped.startswith("Concat"):
        assert left["inner"] is None
    else:
        assert left["inner"] == [index + 24 for index in left["indices"]]


def test_parts_of_a_concatenation_have_indices_of_their_own(tmp_path: Path) -> None:
    """The first sample of one part is another than the first of the next."""
    script = """
other = TensorDataset(*data.tensors)
for x, y in DataLoader(ConcatDataset([data, other]), batch_size=24): step(x, y)
"""
    rank = audit_one(script, tmp_path)
    inner = [row[1] for one in rank.of("items") for row in one["rows"]]
    assert len(inner) == len(set(inner)) == 96
    assert inner[:48] == list(range(48))


@pytest.mark.long
def test_the_run_is_the_same_without_the_probe(tmp_path: Path) -> None:
    """Samples, losses and random state, with workers, augmentation and dropout."""
    script = """
class Noisy(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.rand(()), y

data = Noisy(*data.tensors)
for _ in range(2):
    for x, y in DataLoader(data, batch_size=8, shuffle=True, num_workers=1): step(x, y)
    print(evaluate(DataLoader(data, batch_size=8)), flush=True)
"""
    _, end = audit(script, tmp_path, cold=True)
    probed = end.output(0).splitlines()[STEPS - 1]
    alone = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), "0", "1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert probed == alone.stdout.splitlines()[STEPS - 1]


def test_evaluation_gives_two_batches_after_the_cut(tmp_path: Path) -> None:
    """It is no training, neither on a loader of its own nor on the training loader."""
    script = """
train, test = DataLoader(data, 4, shuffle=True), DataLoader(Subset(data, range(40)), 4)
print("before", evaluate(test))
for epoch in range(2):
    for x, y in train: step(x, y)
    print("after", evaluate(test), evaluate(train))
"""
    rank = audit_one(script, tmp_path)
    by_loader = {one["length"]: one["l"] for one in rank.by_kind["loader"]}
    assert len(indices(rank, 0, loader=by_loader[40])) == 10
    assert len(indices(rank, 1, loader=by_loader[40])) == 2
    assert {one["l"] for one in rank.by_kind["trained"]} == {by_loader[48]}
    assert [one["epoch"] for one in rank.by_kind["trained"]] == [0, 2]
    assert len(rank.by_kind["step"]) == STEPS + 2
    assert [one["step"] for one in rank.by_kind["eval"]] == [STEPS]
    assert rank.by_kind["eval"][0]["batchnorm"] == 1
    assert len(rank.by_kind["random"]) == STEPS + 2


@pytest.mark.parametrize(
    "loop",
    [
        "it = iter(loader)\nwhile True:\n"
        "    try: batch = next(it)\n"
        "    except StopIteration:\n        it = iter(loader); batch = next(it)\n"
        "    step(*batch)",
        "x, y = next(iter(loader))\nwhile True: step(x, y)",
        "while True: step(*data[:8])",
        "for _ in range(9):\n    peek = next(iter(loader))\n    for x, y in loader: step(x, y)",
        "def batches():\n    yield from loader\nfor x, y in batches(): step(x, y)",
        "for (x, y), _ in zip(loader, DataLoader(data, 1)): step(x, y)",
        "from torch import distributed as d\n"
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
        "w = torch.zeros(1, 5, requires_grad=True)\ndel optimizer\nfor _ in range(9):\n"
        "    for x, y in loader:\n        nn.functional.cross_entropy(x @ w, y).backward()\n"
        "        w.data -= 0.1 * w.grad; w.grad = None; given.append(0)\n"
        "        print([given], flush=True)",
    ],
    ids=["restarted", "one batch", "no loader", "peek", "generator", "zip", "by hand"],
)
def test_every_loop_ends_in_good_order(loop: str, tmp_path: Path) -> None:
    """Soon after the last step that is wanted, with status 0."""
    rank = audit_one(f"loader = DataLoader(data, 4, shuffle=True)\n{loop}", tmp_path)
    assert len(rank.by_kind["cut"]) == 1
    assert STEPS <= len(rank.by_kind["backward"]) <= STEPS + 4
    assert all(one["after_cut"] for one in rank.by_kind["error"])


@pytest.mark.long
def test_an_error_after_the_cut_is_no_failure(tmp_path: Path) -> None:
    """The script asks for more batches than it is given: the status is 0."""
    loop = "it = iter(DataLoader(data, 4))\nfor _ in range(12): step(*next(it))"
    (error,) = audit_one(loop, tmp_path, cold=True).by_kind["error"]
    assert (error["type"], error["after_cut"]) == ("StopIteration", True)


def test_errors_are_recorded_with_their_line(tmp_path: Path) -> None:
    """Before the cut they are the script's: the status stays 1."""
    script = "for x, y in DataLoader(data, 4):\n    step(x, y)\n    1 / 0"
    ranks, end = audit(script, tmp_path, cold=True)
    (error,) = ranks[0].by_kind["error"]
    assert end.statuses == (1,)
    assert (error["type"], error["after_cut"]) == ("ZeroDivisionError", False)
    assert error["at"][0] == "script.py"
    assert error["at"][2] == "1 / 0"


@pytest.mark.long
def test_spawned_ranks_end_with_status_0(tmp_path: Path) -> None:
    """Also where a spawned rank fails because of the cut."""
    script = """
def main(rank):
    it = iter(DataLoader(data, 4, shuffle=True))
    while True: step(*next(it))

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)  # it spawns, so mp.spawn is no fork
"""
    path = tmp_path / "script.py"
    path.write_text(START + script)
    (tmp_path / "records").mkdir()
    command = AuditCommand(("python", str(path), "0", "2"))
    settings = RunSettings(steps=STEPS, limit_seconds=60, cwd=tmp_path)
    end = run_audit_size(command, None, tmp_path / "records", settings)
    assert end.statuses == (0,), end.output(0)
    lines = [path.read_text() for path in (tmp_path / "records").glob("*.jsonl")]
    assert sum('"k": "cut"' in text for text in lines) == 2


@pytest.mark.long
def test_a_script_that_hangs_after_the_cut_is_ended(tmp_path: Path) -> None:
    """A thread that never ends keeps it alive: the probe ends it after some seconds."""
    script = """
import threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
while True:
    for x, y in DataLoader(data, 4): step(x, y)
"""
    rank = audit_one(script, tmp_path)
    assert rank.by_kind["end"][-1]["after_cut"]
