"""Missing, altered, differing or unreadable data: all ranks stop and name the cause."""

import re

import pytest
import torch
from torch import nn

from common.checkpoint import load_checkpoint
from common.training import prepare_model_for_training, train_model
from tests.helpers import RankError, free_port, make_image_folder, run_part, run_ranks, start_part
from tests.helpers.stage import GRACE, NODES, QUICK, TIMEOUT, assert_no_result, assert_told


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_whose_data_raises_is_named_with_the_cause_by_all(stage, victim):
    stage.start("gather_scatter", hurt=(victim, "data", "raise"), timeout=TIMEOUT)
    ends = stage.end()
    assert ends[victim].status == 1, ends[victim]
    assert "images/cat/003.png: Input/output error" in ends[victim].text
    for rank in set(range(NODES)) - {victim}:
        told = rf"error \(rank {rank}\): rank {victim} stopped: OSError: .*'images/cat/003.png'"
        assert_told(ends[rank], told)
    seconds = [ended.seconds for ended in ends.values()]
    assert max(seconds) - min(seconds) < TIMEOUT + GRACE
    assert_no_result(stage.run("gather_scatter"))


def test_images_removed_or_altered_between_runs_are_noticed(stage):
    """One changed image is enough: resuming would continue neither the old nor a new training."""

    def run(*flags):
        stage.start("all_reduce", "--data-dir", data, *flags, size=1, nodes=[0])
        return stage.end()[0]

    data = make_image_folder(stage.folder / "data")
    assert run("--stop-after-epoch", 1).status == 0
    image, other = data / "train" / "cat" / "003.png", data / "train" / "cat" / "004.png"
    whole = image.read_bytes()
    image.write_bytes(other.read_bytes())
    changed = r"the images or labels of folder have changed since checkpoint \S+Epoch_1\.pt was "
    assert_told(run("--resume", "auto"), rf"{changed}written: restore the same")
    image.unlink()
    other = r"belongs to another training: training_images is 24 in the checkpoint, 23 now\."
    assert_told(run("--resume", "auto"), other)
    image.write_bytes(whole)
    assert run("--resume", "auto").status == 0
    assert (stage.run() / "summary.json").exists()


def end_with_data_of_their_own(tmp_path, *folders):
    """Run a rank for each folder of images, and return how they ended."""
    place = f"-M 127.0.0.1 -N {len(folders)} --master-port {free_port()}".split()
    words = (*QUICK, "--dataset", "folder", *place, "--output-dir", tmp_path / "out")
    ranks = [
        start_part("PartTwo", *words, "-R", rank, "--data-dir", tmp_path / folder, cwd=tmp_path)
        for rank, folder in enumerate(folders)
    ]
    return [rank.end() for rank in ranks]


def test_a_dataset_missing_on_one_node_is_told_on_all(tmp_path):
    make_image_folder(tmp_path / "data")
    healthy, broken = end_with_data_of_their_own(tmp_path, "data", "elsewhere")
    missing = r"--dataset folder: .*elsewhere/train is missing"
    assert_told(broken, rf"error \(rank 1\): {missing}")
    assert_told(healthy, rf"error \(rank 0\): rank 1 stopped: {missing}")


def test_other_images_on_one_node_are_noticed(tmp_path):
    make_image_folder(tmp_path / "one", seed=1)
    make_image_folder(tmp_path / "two", seed=2)
    for ended in end_with_data_of_their_own(tmp_path, "one", "two"):
        assert_told(ended, r"the ranks differ in their dataset\. contents")


def test_a_diverging_run_stops_with_advice(tmp_path):
    rate = "--lr 1e30 --schedule constant --output-dir".split()
    for ended in run_part("PartThree", *QUICK, *rate, tmp_path, cwd=tmp_path, ranks=2):
        assert_told(ended, r"not finite in epoch 1, step \d+: .*Lower --learning-rate")


class Poisoned:
    """Batches for one rank; in epoch 2, rank 1's second batch contains an infinite value."""

    def __init__(self, rank):
        self.rank, self.epoch, self.sampler = rank, 1, self

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        for index in range(4):
            inputs = torch.randn(6, 4, generator=generator)
            if (self.epoch, self.rank, index) == (2, 1, 1):
                inputs[0, 0] = float("inf")
            yield inputs, torch.randint(0, 2, (6,), generator=generator)


def train_poisoned(rank, folder, flags):
    try:
        train(Poisoned(rank), rank, folder, *flags, epochs=3)
    except RuntimeError as error:
        return str(error)
    return "trained on"


def train(batches, rank, folder, *flags, epochs):
    """Train with the assignment's functions."""
    model, criterion, optimizer = prepare_model_for_training(
        nn.Linear(4, 2), "cpu", 0.1, 0.9, 0.0, False, distribute_flag=flags[0]
    )
    run = (model, "cpu", criterion, optimizer, 1, epochs, batches)
    train_model(*run, f"{folder}/log{rank}", folder, *flags)


@pytest.mark.parametrize("flags", [(False, "PartOne"), (False, "PartTwo"), (True, "")], ids=str)
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_says_where(tmp_path, flags):
    told = r"not finite in epoch 2, step 6: loss (inf|nan) on rank 1\. All ranks stop"
    for message in run_ranks(2, train_poisoned, str(tmp_path), flags):
        assert re.search(told, message), message
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["Epoch_1.pt"]
    entries = load_checkpoint(tmp_path / "Epoch_1.pt")
    assert all(bool(tensor.isfinite().all()) for tensor in entries["model_state_dict"].values())


class Uneven(Poisoned):
    def __len__(self):
        return 4 + self.rank


def train_uneven(rank, folder):
    train(Uneven(rank), rank, folder, False, "PartTwo", epochs=1)


def test_loaders_of_other_lengths_are_an_error_not_a_hang(tmp_path):
    told = r"number of batches in train_loader: 4 on rank 0, 5 on rank 1"
    with pytest.raises(RankError, match=told):
        run_ranks(2, train_uneven, str(tmp_path))
