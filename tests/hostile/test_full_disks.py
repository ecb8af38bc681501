"""Commands whose results find no room: one message, and a second call goes on."""

import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT, user_environment
from tests.helpers.full_disk import on_small_disk, why_no_small_disk

pytestmark = pytest.mark.skipif(
    bool(why_no_small_disk()), reason="this user can mount no disk in a namespace"
)

RIGHT = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
"""
RUBRIC = """
title = "Week 1"

[parts.train]
title = "Train"
files = ["**/main.py"]
command = "torchrun {script}"
points = 4
"""


def run_where_out_is_full(folder, *words, free_kb, limit_seconds, again=False):
    """Run a command of lab with a disk of 4 MB as the folder out, of which little is free.

    again : remove what fills the disk and run the command a second time.
    """
    (folder / "out").mkdir()
    script = f'head -c {4096 - free_kb}k /dev/zero > out/filler && "$@"; status=$?'
    if again:
        script += '; echo "== $status"; rm out/filler; "$@"; status=$?'
    return subprocess.run(
        [
            *(*on_small_disk("4m"), "bash", "-c", f"{script}; exit $status", "bash"),
            *(sys.executable, "-P", "-m", "lab", *map(str, words)),
        ],
        stderr=subprocess.STDOUT,
        **{"cwd": folder, "stdout": subprocess.PIPE, "text": True, "timeout": limit_seconds},
        env=user_environment(PYTHONPATH=str(ROOT)),
    )


def assert_told_once(said, pattern):
    """Assert that a command ended with one error that says where room is missing."""
    errors = re.findall("^error: .*", said, re.MULTILINE)
    assert len(errors) == 1, said
    assert re.search(pattern, errors[0]), errors[0]
    assert "Traceback" not in said


def test_an_audit_needs_room_for_its_records(tmp_path):
    words = ["audit", "--keep", "out/kept", "--", "python", "main.py"]
    ended = run_where_out_is_full(tmp_path, *words, free_kb=300, limit_seconds=60)
    assert ended.returncode == 2
    assert_told_once(ended.stdout, r"out/kept has \d+ kB free, .*--keep")


@pytest.mark.long
def test_a_class_is_graded_once_there_is_room(tmp_path):
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann/main.py").write_text(RIGHT)
    (tmp_path / "week.toml").write_text(RUBRIC)
    words = ["grade", "ann", "--rubric", "week.toml", "--out", "out/grades", "--no-sandbox"]
    ended = run_where_out_is_full(tmp_path, *words, free_kb=24, limit_seconds=400, again=True)
    first, second = re.split("^== 2$", ended.stdout, flags=re.MULTILINE)
    assert_told_once(first, r"could not be written \(No space left on device\)")
    assert "error:" not in second
    assert ended.returncode == 0, second


@pytest.mark.long
def test_a_comparison_goes_on_once_there_is_room(tmp_path):
    words = "compare --sync all_reduce --nodes 1 2 --steps 2 --warmup 1 --repeats 1".split()
    words += "--dataset digits --batch-size 16 --no-predict --output-dir out".split()
    ended = run_where_out_is_full(tmp_path, *words, free_kb=30, limit_seconds=400, again=True)
    first, second = re.split("^== 2$", ended.stdout, flags=re.MULTILINE)
    assert_told_once(first, r"results.json could not be written \(No space left on device\)")
    assert "[2/2] all_reduce on 2 ranks, repeat 1:" in second
    assert "error:" not in second
    assert ended.returncode == 0, second
