"""When things go wrong: one clear message on every rank concerned, a non-zero end within the timeout, nothing lost.

Real processes, started as the assignment starts them. Batches of 8 keep VGG-11's steps short.
"""

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from common.checkpoint import load_checkpoint
from common.training import prepare_model_for_training, train_model
from tests.helpers import (
    ROOT,
    Ended,
    RankError,
    Started,
    free_port,
    make_image_folder,
    only_run_folder,
    run_part,
    run_ranks,
    start_part,
    start_ranks,
)

QUICK = ("--dataset", "digits", "--batch-size", 8, "--log-every", 1)
WAYS = {"gather_scatter": ("PartTwo", "--sync", "gather_scatter"), "all_reduce": ("PartTwo", "--sync", "all_reduce"),
        "ddp": ("PartThree",)}


def assert_told(ended: Ended, pattern: str, *, status: int = 1) -> None:
    """One line of error that says so, no traceback, that exit status."""
    assert ended.status == status, ended
    assert re.search(pattern, ended.err), ended.err
    assert "Traceback" not in ended.err, ended.err


def start_rank(rank: int, size: int, port: int, *arguments: object, cwd: Path, part: str = "PartTwo") -> Started:
    return start_part(part, *QUICK, "--master-ip", "127.0.0.1", "--master-port", port, "--num-nodes", size, "--rank", rank,
                      "--threads", 1, *arguments, cwd=cwd)


def test_a_rank_that_never_comes_is_named_by_all_that_came(tmp_path: Path) -> None:
    port = free_port()
    ranks = [start_rank(rank, 4, port, "--timeout", 8, "--output-dir", tmp_path, cwd=tmp_path) for rank in (0, 2)]
    for rank in ranks:
        ended = rank.end()
        assert_told(ended, r"2 of 4 ranks came to 127\.0\.0\.1:\d+ within 8 s; missing: ranks 1, 3")


def test_a_rank_started_twice_is_told_to_all(tmp_path: Path) -> None:
    port = free_port()
    ranks = [start_rank(rank, 3, port, "--timeout", 40, "--output-dir", tmp_path, cwd=tmp_path) for rank in (0, 1, 1)]
    for rank in ranks:
        ended = rank.end()
        assert_told(ended, r"rank 1 was started twice: on .* \(process \d+\) and on .* \(process \d+\)")
        assert ended.seconds < 35, "they waited for the timeout"


def test_other_number_of_nodes(tmp_path: Path) -> None:
    port = free_port()
    ranks = [start_rank(0, 2, port, "--timeout", 40, cwd=tmp_path), start_rank(1, 3, port, "--timeout", 40, cwd=tmp_path)]
    for rank in ranks:
        assert_told(rank.end(), r"with --num-nodes 3, but others with 2|with --num-nodes 2, but others with 3")


def test_settings_that_differ_are_named_with_both_values(tmp_path: Path) -> None:
    port = free_port()
    ranks = [start_rank(rank, 2, port, "--lr", rate, "--output-dir", tmp_path, cwd=tmp_path)
             for rank, rate in ((0, 0.1), (1, 0.2))]
    for rank in ranks:
        assert_told(rank.end(), r"the ranks differ in their settings\. --learning-rate: 0\.1 on rank 0, "
                    r"0\.2 on rank 1")


def test_a_taken_port_says_which_one_to_use(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        ended = start_rank(0, 2, port, cwd=tmp_path).end()
    assert_told(ended, rf"port {port} is taken on this machine.*add --master-port \d+ on every node")


def test_an_unreachable_master_says_why(tmp_path: Path) -> None:
    port = free_port()
    alone = start_rank(1, 2, port, "--timeout", 4, cwd=tmp_path)
    named = start_part("PartTwo", *QUICK, "-M", "no-such-host.invalid", "-N", 2, "-R", 1, "--timeout", 20, cwd=tmp_path)
    assert_told(alone.end(),
                rf"could not reach rank 0 at 127\.0\.0\.1:{port} within 4 s \(connection refused\)")
    assert_told(named.end(), r"--master-ip no-such-host\.invalid is not an address")


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_a_killed_rank_ends_the_others_within_the_timeout(tmp_path: Path, way: str, victim: int) -> None:
    part, *flags = WAYS[way]
    ranks = start_ranks(part, 2, *flags, *QUICK, "--timeout", 10, "--max-steps", 5000, "--output-dir", tmp_path, cwd=tmp_path)
    ranks[0].wait_for("step 3/")
    ranks[victim].send(signal.SIGKILL)
    killed = time.monotonic()
    survivor = ranks[1 - victim].end()
    assert time.monotonic() - killed < 20
    collective = {"gather_scatter": "gather|scatter|all_reduce", "all_reduce": "all_reduce",
                  "ddp": "DistributedDataParallel's all_reduce in backward|all_reduce"}[way]
    assert_told(survivor, rf"error \(rank {1 - victim}\): ({collective}) broke: another rank has ended")
    assert ranks[victim].end().status == -signal.SIGKILL
    folder = only_run_folder(tmp_path, f"{part}-{way}")
    assert (folder / "metrics.jsonl").read_text().count("\n") >= 3, "the steps that were done are recorded"


def test_interrupt_ends_all_and_keeps_what_is_done(tmp_path: Path) -> None:
    make_image_folder(tmp_path / "data")
    ranks = start_ranks("PartTwo", 2, "--dataset", "folder", "--data-dir", tmp_path / "data", "--batch-size", 8, "--epochs",
                        2000, "--log-every", 1, "--timeout", 10, "--output-dir", tmp_path / "out", cwd=tmp_path)
    ranks[0].wait_for("Epoch 3: train loss")  # the second one is saved then
    for rank in ranks:
        rank.send(signal.SIGINT)
    for rank in ranks:
        ended = rank.end(timeout_seconds=90)
        assert ended.status in (130, 1), ended
        assert "Traceback" not in ended.err
    assert any("interrupted" in rank.end().err for rank in ranks)
    folder = only_run_folder(tmp_path / "out", "PartTwo-gather_scatter")
    assert load_checkpoint(folder / "checkpoints" / "Epoch_2.pt")["epoch"] == 2


def test_interrupt_of_one_rank_that_waits_for_the_other(tmp_path: Path) -> None:
    """A rank inside a collective sees no signal; it must end all the same."""
    ranks = start_ranks("PartTwo", 2, *QUICK, "--timeout", 60, "--max-steps", 5000, "--output-dir", tmp_path, cwd=tmp_path)
    ranks[0].wait_for("step 3/")
    ranks[1].send(signal.SIGSTOP)
    time.sleep(1)
    try:
        ranks[0].send(signal.SIGINT)
        ended = ranks[0].end(timeout_seconds=90)
    finally:
        ranks[1].send(signal.SIGCONT)
    assert_told(ended, "interrupted", status=130)
    assert_told(ranks[1].end(timeout_seconds=90), r"broke: another rank has ended")


def test_a_full_disk_stops_all_ranks_and_keeps_earlier_files(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the checkpoint of 74 MB does not fit, the rest does."""
    make_image_folder(tmp_path / "data")
    arguments = ["--dataset", "folder", "--data-dir", str(tmp_path / "data"), "--batch-size", "8", "--output-dir",
                 str(tmp_path / "out"), "--master-port", str(free_port()), "-M", "127.0.0.1", "-N", "2", "--threads", "1"]
    ranks = [Started(["bash", "-c", f"ulimit -f 20000; exec {sys.executable} {ROOT}/PartThree/main.py {' '.join(arguments)} "
                      f"-R {rank}"], cwd=tmp_path, env=dict(os.environ)) for rank in (0, 1)]
    for rank in ranks:
        assert_told(rank.end(), r"Epoch_1\.pt could not be written \(File too large\)")
    folder = only_run_folder(tmp_path / "out", "PartThree-ddp")
    assert list((folder / "checkpoints").iterdir()) == [], "no half-written file"
    assert (folder / "metrics.jsonl").stat().st_size > 0


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for ended in run_part("PartTwo", *QUICK, "--output-dir", tmp_path / "file" / "reports", cwd=tmp_path, ranks=2):
        assert_told(ended, r"Not a directory \(.*file/reports")


def test_a_dataset_missing_on_one_node_is_told_on_all(tmp_path: Path) -> None:
    make_image_folder(tmp_path / "data")
    port = free_port()
    ranks = [start_part("PartTwo", "--dataset", "folder", "--data-dir", tmp_path / folder, "--batch-size", 8, "-M", "127.0.0.1",
                        "-N", 2, "-R", rank, "--master-port", port, "--output-dir", tmp_path / "out", cwd=tmp_path)
             for rank, folder in enumerate(("data", "elsewhere"))]
    healthy, broken = (rank.end() for rank in ranks)
    assert_told(broken, r"error \(rank 1\): --dataset folder: .*elsewhere/train is missing")
    assert_told(healthy, r"error \(rank 0\): rank 1 stopped: --dataset folder: .*elsewhere/train is missing")


def test_other_images_on_one_node_are_noticed(tmp_path: Path) -> None:
    make_image_folder(tmp_path / "one", seed=1)
    make_image_folder(tmp_path / "two", seed=2)
    port = free_port()
    ranks = [start_part("PartTwo", "--dataset", "folder", "--data-dir", tmp_path / folder, "--batch-size", 8, "-M", "127.0.0.1",
                        "-N", 2, "-R", rank, "--master-port", port, "--output-dir", tmp_path / "out", cwd=tmp_path)
             for rank, folder in enumerate(("one", "two"))]
    for rank in ranks:
        assert_told(rank.end(), r"the ranks differ in their dataset\. contents")


def test_a_diverging_run_stops_with_advice(tmp_path: Path) -> None:
    for ended in run_part("PartThree", *QUICK, "--lr", "1e30", "--schedule", "constant", "--output-dir", tmp_path, cwd=tmp_path,
                          ranks=2):
        assert_told(ended, r"not finite in epoch 1, step \d+: .*Lower --learning-rate")


class Poisoned:
    """Batches of one rank; in the second epoch rank 1's second batch is not finite."""

    def __init__(self, rank: int) -> None:
        self.rank, self.epoch, self.sampler = rank, 1, self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        for index in range(4):
            inputs = torch.randn(6, 4, generator=generator)
            if (self.epoch, self.rank, index) == (2, 1, 1):
                inputs[0, 0] = float("inf")
            yield inputs, torch.randint(0, 2, (6,), generator=generator)


def train_poisoned(rank: int, folder: str, flags: tuple[bool, str]) -> str:
    model, criterion, optimizer = prepare_model_for_training(nn.Linear(4, 2), "cpu", 0.1, 0.9, 0.0, False,
                                                             distribute_flag=flags[0])
    try:
        train_model(model, "cpu", criterion, optimizer, 1, 3, Poisoned(rank), f"{folder}/log{rank}", folder, *flags)
    except RuntimeError as error:
        return str(error)
    return "trained on"


@pytest.mark.parametrize("flags", [(False, "PartOne"), (False, "PartTwo"), (True, "")], ids=["gather", "all_reduce", "ddp"])
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_says_where(tmp_path: Path, flags: tuple[bool, str]) -> None:
    for message in run_ranks(2, train_poisoned, str(tmp_path), flags):
        assert re.search(r"not finite in epoch 2, step 6: loss (inf|nan) on rank 1\. All ranks stop", message), message
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["Epoch_1.pt"]
    entries = load_checkpoint(tmp_path / "Epoch_1.pt")
    assert all(bool(tensor.isfinite().all()) for tensor in entries["model_state_dict"].values())


class Uneven(Poisoned):
    def __len__(self) -> int:
        return 4 + self.rank


def train_uneven(rank: int, folder: str) -> None:
    model, criterion, optimizer = prepare_model_for_training(nn.Linear(4, 2), "cpu", 0.1, 0.9, 0.0, False)
    train_model(model, "cpu", criterion, optimizer, 1, 1, Uneven(rank), f"{folder}/log{rank}", folder, False, "PartTwo")


def test_loaders_of_other_lengths_are_an_error_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"number of batches in train_loader: 4 on rank 0, 5 on rank 1"):
        run_ranks(2, train_uneven, str(tmp_path))
