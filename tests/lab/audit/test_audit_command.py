"""``lab audit`` as users call it: what starts the ranks, exit statuses and files."""

import json
import platform
from collections.abc import Callable

import pytest

from lab.audit import runner
from lab.cli import main

SCRIPT = """\
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def train(rank, size, address, divisor):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(96, 5), torch.randint(0, 3, (96,)))
    sampler = DistributedSampler(dataset)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= divisor or size
            optimizer.step()

if __name__ == "__main__":
    match sys.argv[1:]:
        case ["spawn", port]:
            mp.spawn(train, (2, f"tcp://127.0.0.1:{port}", 0), nprocs=2)
        case ["torchrun"]:
            train(-1, -1, "env://", 2)
        case [address, size, rank]:
            train(int(rank), int(size), address, 0)
"""


Audit = Callable[..., tuple[int, str, str]]
"""Runs ``lab audit`` in this process; returns the exit status, the output and the errors."""


@pytest.fixture
def audit(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_CERTAIN_SECONDS", 0.5)

    def run(*arguments):
        status = main(["audit", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_a_right_script_and_its_json(tmp_path, audit):
    words = ("python", "train.py", "tcp://{master}:{port}", "{nodes}", "{rank}")
    files = ("--json", "a.json", "--html", "a.html")
    status, out, _ = audit(*files, "--keep", "kept", "--", *words)
    assert status == 0, out
    assert out.startswith("Right: no fault was found.\n")
    flat, version = " ".join(out.split()), platform.python_version()
    assert f"Watched 14 steps on 2 and 3 ranks, with Python {version} (" in flat
    assert "averages: yes — the ranks start equal" in flat
    assert "every rank has 12 batches in an epoch (on 2 ranks)" in flat
    assert len(out.splitlines()) < 50
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["status"] == 0
    assert content["replay"] is None
    assert {finding["severity"] for finding in content["findings"]} <= {"notice"}
    assert [run["ranks"] for run in content["runs"]] == [2, 3]
    assert "<html" in (tmp_path / "a.html").read_text()
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["2-ranks", "3-ranks"]


@pytest.mark.slow
def test_torchrun_gets_the_number_of_ranks_and_a_literal_divisor_is_a_fault(audit):
    launcher = ("torchrun", "--nproc-per-node", 2)
    status, out, _ = audit("--ranks", 3, "--", *launcher, "train.py", "torchrun")
    assert status == 1, out
    assert out.startswith("Wrong: gradients are divided by a constant, not by")
    assert "averages: no.\n" in out
    assert "FAULT: Gradients are divided by a constant" in out


@pytest.mark.slow
def test_a_script_that_starts_its_own_ranks_runs_once(audit):
    status, out, _ = audit("--", "python", "train.py", "spawn", "{port}")
    assert status == 0, out
    assert "fixes its number of ranks at 2" in out
    assert "3 ranks" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no command: add it after --"),
        ("--ranks 1 -- python train.py {rank}", "--ranks: got 1"),
        ("--ranks 2 999 -- python train.py {rank}", "--ranks: got 999; this machine has"),
        ("--steps 0 -- python train.py {rank}", "--steps: got 0; give more than 0"),
        ("--global-batch -1 -- python train.py", "--global-batch: got -1; give more than 0"),
        ("--timeout nan -- python train.py", "--timeout: got nan; give more than 0"),
        ("--json no/such/file -- python train.py", "--json: no/such/file cannot be written"),
        ("--keep . -- python train.py", "--keep: . is not an empty folder: give a new one"),
        ("--rate 1gbit -- python train.py", "give {rank} in the command"),
        ("--rate 1gbit --isolate -- python x {rank}", "give one of them"),
        ("-- python train.py {ranks}", "unknown placeholder {ranks}"),
        ("-- no-such-program {rank}", "no-such-program cannot be started: there is no such"),
        *(
            pytest.param(f"-- {words}", message, marks=pytest.mark.slow)
            for words, message in (
                ("ls", "the audit could not enter any Python process"),
                ("python -I train.py {rank}", "without -I, -E or -S"),
                ("python -c input() {rank}", "The script reads stdin"),
                ("python -c 1/0 {rank}", "status 1: ZeroDivisionError: division by zero. First"),
                ("python -c pass {rank}", "before any torch.optim optimiser took a step"),
                ("python no.py {rank}", "cd to the folder"),
            )
        ),
    ],
)
def test_what_cannot_be_audited_is_told_on_one_line(audit, words, message):
    status, out, err = audit(*words.split())
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
