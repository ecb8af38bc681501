"""``lab audit`` as users call it: what starts the ranks, exit statuses and files."""

import json
from pathlib import Path

import pytest

from tests.helpers.processes import Ended, start_lab

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


def audit(folder: Path, *arguments: object) -> Ended:
    (folder / "train.py").write_text(SCRIPT)
    return start_lab("audit", *arguments, cwd=folder, cold=True).end(timeout_seconds=120)


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.slow
def test_a_right_script_its_replay_and_its_json(tmp_path: Path) -> None:
    words = ("python", "train.py", "tcp://{master}:{port}", "{nodes}", "{rank}")
    files = ("--json", tmp_path / "a.json", "--html", tmp_path / "a.html")
    ended = audit(tmp_path, "--replay", *files, "--keep", tmp_path / "kept", "--", *words)
    assert ended.status == 0, ended
    assert "2 ranks: 8 steps in " in ended.out
    assert "3 ranks: 8 steps in " in ended.out
    assert "averages: yes — the ranks start equal" in ended.out
    assert "every rank has 12 and 8 batches in an epoch (on 2 and 3 ranks)" in flat(ended.out)
    assert len(ended.out.splitlines()) < 50
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["status"] == 0
    assert content["replay"]["ranks"] == 3
    assert len(content["replay"]["steps"]) == 4
    assert max(difference for _, difference, _ in content["replay"]["steps"]) < 1e-6
    assert "step 3: the weights of 3 ranks differ by at most" in flat(ended.out)
    assert {finding["severity"] for finding in content["findings"]} <= {"notice"}
    assert [run["ranks"] for run in content["runs"]] == [2, 3]
    assert "<html" in (tmp_path / "a.html").read_text()
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["2-ranks", "3-ranks"]


@pytest.mark.slow
def test_torchrun_gets_the_number_of_ranks_and_a_literal_divisor_is_a_fault(tmp_path: Path) -> None:
    ended = audit(
        tmp_path, "--ranks", 3, "--", "torchrun", "--nproc-per-node", 2, "train.py", "torchrun"
    )
    assert ended.status == 1, ended
    assert "no — gradients are divided" in ended.out
    assert "\n1 fault on 3 ranks with torch " in ended.out
    assert "FAULT: Gradients are divided by a constant" in ended.out


@pytest.mark.slow
def test_a_script_that_starts_its_own_ranks_runs_once(tmp_path: Path) -> None:
    ended = audit(tmp_path, "--", "python", "train.py", "spawn", "{port}")
    assert ended.status == 0, ended
    assert "fixes its number of ranks at 2" in ended.out
    assert "3 ranks" not in ended.out


def refused(folder: Path, words: str) -> str:
    ended = audit(folder, *words.split())
    assert ended.status == 2, ended
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    return ended.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no command: add it after --"),
        ("--ranks 1 -- python train.py {rank}", "--ranks: got 1"),
        ("--ranks 2 999 -- python train.py {rank}", "--ranks: got 999; this machine has"),
        ("--steps 0 -- python train.py {rank}", "--steps: got 0; give more than 0"),
        ("--json no/such/file -- python train.py", "--json: no/such/file cannot be written"),
        ("--rate 1gbit -- python train.py", "give {rank} in the command"),
        ("--rate 1gbit --isolate -- python x {rank}", "give one of them"),
        ("-- python train.py {ranks}", "unknown placeholder {ranks}"),
        ("-- no-such-program {rank}", "no-such-program cannot be started: No such file"),
    ],
)
def test_wrong_flags_are_refused_on_one_line(tmp_path: Path, words: str, message: str) -> None:
    assert message in refused(tmp_path, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-- ls", "the audit could not enter any Python process"),
        ("-- python -I train.py {rank}", "without -I, -E or -S"),
        ("-- python -c input() {rank}", "The script reads stdin"),
        ("-- python -c 1/0 {rank}", "status 1: ZeroDivisionError: division by zero. First run"),
        ("-- python -c pass {rank}", "before any torch.optim optimiser took a step"),
        ("-- python no.py {rank}", "cd to the folder"),
    ],
)
def test_what_cannot_be_audited_is_told_on_one_line(
    tmp_path: Path, words: str, message: str
) -> None:
    assert message in refused(tmp_path, words)
