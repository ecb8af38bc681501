"""Two epochs in one run, and one epoch plus a resumed one, give the same bits."""

import re
import shutil

import pytest
from torch import nn

from common.checkpoint import load_checkpoint
from common.config.schema import SCHEDULES
from common.training_engine.lr_schedules import build_schedule
from common.utils.hashing import digest
from tests.helpers import TINY, free_port, make_image_folder, only_run_folder, run_part, start_part
from tests.helpers.engines import sgd
from tests.helpers.records import json_lines, json_of


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_image_folder(tmp_path_factory.mktemp("images"))


def settings(images, output, *more):
    return [
        *TINY,
        *("--dataset", "folder", "--data-dir", images, "--batch-size", 8, "--epochs", 2),
        *("--log-every", 1, "--threads", 1, "--output-dir", output),
        *more,
    ]


def second_epoch(folder):
    """Return the checkpoint, the metrics without times, and the report of epoch 2."""
    metrics = json_lines(folder / "metrics.jsonl", times=False)
    report = json_of(folder, "report") | {"checkpoint": ""}
    checkpoint = load_checkpoint(folder / "checkpoints" / "Epoch_2.pt")
    return checkpoint, [line for line in metrics if line["epoch"] == 2], report


def assert_same(straight, resumed):
    (one, metrics, report), other = second_epoch(straight), second_epoch(resumed)
    assert metrics == other[1], "metrics of the second epoch differ after a resume"
    assert len(metrics) == 3
    assert report == other[2]
    for name in ("model_state_dict", "optimizer_state_dict"):
        assert digest(one[name]) == digest(other[0][name]), name
    assert one["step"] == other[0]["step"] == 6


def test_one_rank_resumes_bit_for_bit(tmp_path, images):
    """The second epoch of alternating flips depends on the first, which a resumed run never saw."""

    def train(name, *more, status=0):
        [ended] = run_part("PartOne", *settings(images, tmp_path / name, *more), cwd=tmp_path)
        assert ended.status == status, ended.err
        return ended

    def checkpoint(name, epoch):
        run = only_run_folder(tmp_path / name, "PartOne-none")
        return run / "checkpoints" / f"Epoch_{epoch}.pt"

    more = ("--flip", "alternating", "--cutout", 8, "--tta", "flip", "--validate")
    straight = train("straight", *more)
    train("parts", "--stop-after-epoch", 1, *more)
    first = checkpoint("parts", 1)
    train("resumed", "--resume", first, *more)
    assert_same(
        *(only_run_folder(tmp_path / name, "PartOne-none") for name in ("straight", "resumed"))
    )
    folder = only_run_folder(tmp_path / "straight", "PartOne-none")
    methods = [
        "augmentation: crop, alternating flip, cutout of 8 x 8 pixels",
        "evaluation: mean of each image and its mirror image (--tta flip)",
    ]
    header, _, card = straight.out.partition("evaluating 8 test images")
    written = (folder / "report.txt").read_text().splitlines()
    for line in methods:
        assert line in header
        assert re.search(line.replace(": ", " +").replace("(", r"\(").replace(")", r"\)"), card)
    assert written[1:3] == [line.capitalize() for line in methods]
    summary = json_of(folder, "summary")
    assert (summary["flip"], summary["cutout"], summary["tta"]) == ("alternating", 8, "flip")
    last = json_lines(folder / "epochs.jsonl")[-1]
    assert last["val_accuracy"] == summary["test_accuracy"]
    assert last["val_loss"] == pytest.approx(summary["test_loss"], rel=1e-12)

    other_length = train("no", "--resume", first, "--max-steps", 5, status=1).err
    assert "belongs to another training: total_steps is 6 in the checkpoint, 5 now" in other_length
    assert "Traceback" not in other_length
    nothing_left = train("again", "--resume", checkpoint("resumed", 2))
    assert "nothing was left to train" in nothing_left.out


@pytest.mark.slow
@pytest.mark.parametrize("part", ["PartTwo", "PartThree"])
def test_two_ranks_resume_bit_for_bit_though_only_rank_0_has_the_file(tmp_path, images, part):
    """Each rank has its own disk; --resume auto finds the newest good checkpoint on rank 0's."""

    def run(name, *more):
        group = ("-M", "127.0.0.1", "-N", 2, "--master-port", free_port(), "-R")
        ranks = [
            start_part(
                part,
                *settings(images, tmp_path / f"{name}-rank{rank}", *group, rank, *more),
                cwd=tmp_path,
            )
            for rank in (0, 1)
        ]
        for rank in ranks:
            ended = rank.end()
            assert ended.status == 0, ended.err

    way = "PartTwo-gather_scatter" if part == "PartTwo" else "PartThree-ddp"
    run("straight")
    run("parts", "--stop-after-epoch", 1)
    first = only_run_folder(tmp_path / "parts-rank0", way)
    damaged = first.parent / "9999-01-01T00-00-00" / "checkpoints"
    shutil.copytree(first / "checkpoints", damaged)
    content = bytearray((damaged / "Epoch_1.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / "Epoch_1.pt").write_bytes(content)
    assert not list((tmp_path / "parts-rank1").glob("**/*.pt")), "rank 1 has no checkpoint"

    run("parts", "--resume", "auto")
    [resumed] = [
        path
        for path in first.parent.iterdir()
        if path != first and (path / "summary.json").exists()
    ]
    assert_same(only_run_folder(tmp_path / "straight-rank0", way), resumed)
    summary = json_of(resumed, "summary")
    assert summary["resumed_from"] == str(first / "checkpoints" / "Epoch_1.pt")
    assert summary["ranks_hold_equal_weights"] is True


@pytest.mark.parametrize("warmup", [None, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on_where_it_stopped(name, warmup):
    def rates(count, begun=None):
        """Return the rates of some steps, after those that led to the states ``begun``."""
        optimizer = sgd(nn.Linear(2, 2), lr=0.5, momentum=0.9)
        schedule = build_schedule(optimizer, name, total_steps=12, warmup_steps=warmup)
        if begun is not None:
            for one, state in zip((schedule, optimizer), begun, strict=True):  # optimiser last
                one.load_state_dict(state)
        found = []
        for _ in range(count):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found, (schedule.state_dict(), optimizer.state_dict())

    straight, _ = rates(12)
    first, states = rates(5)
    assert first + rates(7, states)[0] == straight
    assert max(straight) == pytest.approx(0.5)
    if warmup:
        assert straight[0] < straight[1] < straight[3]
