"""Each entry point as a user starts it: from another folder, to the report; also with torchrun."""

import re
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from common.checkpoint import load_checkpoint
from common.data import load_dataset
from common.data.loaders import EvaluationLoader
from common.models import build_model
from common.profiling.records import SECTIONS
from common.training_engine import predict
from lab import demo
from tests.helpers import (
    ROOT,
    TINY,
    Started,
    free_port,
    make_image_folder,
    needs_cifar10,
    only_run_folder,
    run_part,
    start_part,
    user_environment,
)
from tests.helpers.full_disk import on_small_disk, why_no_small_disk
from tests.helpers.records import json_lines, json_of

QUICK = ("--dataset", "digits", "--batch-size", 32, "--log-every", 1, "--max-steps", 3)
FILES = {
    *("config.json", "environment.json", "metrics.jsonl", "ranks.json", "epochs.jsonl"),
    *("summary.json", "logs_rank0.txt", "report.txt", "report.json", "confusion_matrix.png"),
    *("loss.png", "checkpoints"),
}


def started_in(place, folder):
    flags = ("--dataset", "digits", "--batch-size", 32, "--max-steps", 2, "--output-dir", "out")
    (folder / "out").mkdir()
    command = [*place, sys.executable, str(ROOT / "PartOne/main.py"), *map(str, flags)]
    return Started(command, cwd=folder, env=user_environment(), forked=False).end(
        timeout_seconds=120
    )


def test_a_checkpoint_that_cannot_be_written_leaves_the_summary(tmp_path):
    """VGG-11's has 74 MB; here no file may have more than 1 MB."""
    ended = started_in(("bash", "-c", 'ulimit -f 1024 && exec "$@"', "bash"), tmp_path)
    assert ended.status == 1, ended.err
    assert "Epoch_1.pt" in ended.err
    folder = only_run_folder(tmp_path / "out", "PartOne-none")
    assert list((folder / "checkpoints").iterdir()) == []
    summary = json_of(folder, "summary")
    assert summary["steps"] == 2
    assert 0 <= summary["test_accuracy"] <= 1


def test_a_folder_without_room_for_a_checkpoint_is_told_before_the_first_step(tmp_path):
    if reason := why_no_small_disk():
        pytest.skip(f"no small disk can be mounted here: {reason}")
    ended = started_in(on_small_disk("20m"), tmp_path)
    assert ended.status == 1, ended.err
    assert re.search(r"checkpoint has about 73\.9 MB, and .* has room for \d\d MB", ended.err)
    assert "step 1" not in ended.out


def test_part_one_without_a_flag_for_the_group(tmp_path):
    [ended] = run_part("PartOne", *QUICK, *TINY, "--output-dir", "out", cwd=tmp_path)
    assert ended.status == 0, ended.err
    assert "batch: 32 per rank x 1 rank = 32 global" in ended.out
    folder = only_run_folder(tmp_path / "out", "PartOne-none")
    assert {path.name for path in folder.iterdir()} == FILES
    steps = json_lines(folder / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert {"loss", "accuracy", *(f"{name}_seconds" for name in SECTIONS)} <= set(step)
        assert step["forward_seconds"] > 0
        assert step["backward_seconds"] > 0
        assert step["step_seconds"] > sum(step[f"{name}_seconds"] for name in SECTIONS)
    report = json_of(folder, "report")
    assert np.asarray(report["confusion_matrix"]).sum() == report["samples"] == 360
    assert "Confusion matrix" in (folder / "report.txt").read_text()
    environment = json_of(folder, "environment")
    assert torch.__version__.startswith(environment["torch"])
    assert environment["git_commit"]
    summary = json_of(folder, "summary")
    assert summary["test_accuracy"] == report["accuracy"]
    later = [step["step_seconds"] for step in steps[1:]]
    assert summary["step_seconds"] == statistics.median(later)
    assert summary["samples_per_second"] == pytest.approx(32 / statistics.fmean(later))
    assert summary["compile_seconds"] == 0.0
    assert f"{statistics.fmean(later):.3f} s: mean of 2 steps, without the first" in ended.out
    assert "compile time" not in ended.out
    assert re.match(r"^Epoch: 1, Train Loss: ", (folder / "logs_rank0.txt").read_text())


# For several ranks, emulation, --ema, --timeline and strategies that use buffers.
NOT_FOR_ONE_PROCESS = {
    "common.emulation",
    "common.distributed.gpus",
    "common.distributed.meeting",
    "common.models.resnet",
    "common.profiling.comm_trace",
    "common.sync.all_reduce",
    "common.sync.backward_buckets",
    "common.sync.flat_buffer",
    "common.sync.optimizer_shards",
    "common.training_engine.claim",
    "common.training_engine.ema",
}


SHOW_IMPORTS = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
from common import cli

def show(status):
    print("imported:", *sys.modules)
    return status

cli.end_process = show  # in place of the exit at the end of a run
runpy.run_path({str(ROOT / "PartOne/main.py")!r}, run_name="__main__")
"""


def test_one_process_imports_only_what_it_uses(tmp_path):
    """From the first line to the report, in an interpreter of its own."""
    flags = ["--dataset", "digits", "--batch-size", "8", "--max-steps", "1", "--threads", "1"]
    command = [sys.executable, "-c", SHOW_IMPORTS, *flags]
    ended = Started(command, cwd=tmp_path, env=user_environment()).end()
    assert ended.status == 0, ended.err[-3000:]
    imported = set(re.search("^imported: (.*)$", ended.out, re.MULTILINE)[1].split())
    assert {"common.models.vgg", "common.sync.none", "common.reporting.plots"} <= imported
    assert imported & NOT_FOR_ONE_PROCESS == set()


def test_the_end_of_a_run_has_the_numbers_of_its_report(tmp_path):
    """Times are means over the ranks, and the mean iteration leaves out the first step alone."""
    flags = (*QUICK, *TINY, "--sync", "gather_scatter", "--timeline")
    flags += ("--max-steps", 6, "--log-every", 2, "--run-name", "mine")
    first, _ = run_part("PartTwo", *flags, cwd=tmp_path, ranks=2)
    again = run_part("PartTwo", *flags, "--measure-only", cwd=tmp_path, ranks=2)
    assert (first.status, [one.status for one in again]) == (0, [0, 0]), first.err
    runs = tmp_path / "reports" / "PartTwo-gather_scatter"  # without --output-dir: the folder here
    assert {path.name for path in runs.iterdir()} == {"mine", "mine-2"}
    assert f"{runs.name}/mine-2/logs_rank1.txt" in again[1].out

    rows = [row["seconds"] for row in json_of(runs / "mine", "ranks")["ranks"]]
    mean = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    assert mean["sync"] != rows[0]["sync"]
    summary = json_of(runs / "mine", "summary")
    assert summary["step_seconds"] == pytest.approx(mean["step"])
    assert summary["section_seconds"]["sync"] == pytest.approx(mean["sync"])
    assert summary["wait_seconds"] == pytest.approx(mean["wait"])
    assert f"exposed communication  {mean['sync']:.3f} s (" in first.out
    assert "every rank got the mean over all ranks, seen in step 1" in first.out

    steps = json_lines(runs / "mine" / "metrics.jsonl")
    iteration = statistics.fmean(step["step_seconds"] for step in steps[1:])
    assert summary["mean_iteration_seconds"] == pytest.approx(iteration)
    assert f"{iteration:.3f} s: mean of 5 steps on rank 0, without the first" in first.out
    assert f"{32 / iteration:,.0f} samples/s: global batch / step time" in first.out
    assert re.search(r"^recorded +step 6, for --timeline: ", first.out, re.M)

    lines = re.findall(r"step (\d)/6  loss (\S+)", first.out)
    assert lines == [(str(n), f"{steps[n - 1]['loss']:.3f}") for n in (2, 4, 6)]
    assert re.search(
        r"^evaluating 360 test images on 2 ranks takes about .*--measure-only", first.out, re.M
    )
    assert "evaluating" not in again[0].out


def test_digits_are_never_mirrored(tmp_path):
    flags = ("--flip", "alternating", "--tta", "flip")
    [ended] = run_part("PartOne", *QUICK, *TINY, *flags, "--output-dir", "out", cwd=tmp_path)
    assert (ended.status, ended.out) == (1, "")
    assert ended.err == (
        "error: --flip alternating and --tta flip: a mirrored image of digits may belong to no "
        "class. Leave --flip alternating and --tta flip out\n"
    )


@pytest.mark.parametrize(
    ("part", "flags", "way"),
    [
        ("PartTwo", (), "PartTwo-gather_scatter"),
        ("PartThree", (), "PartThree-ddp"),
        pytest.param(
            "PartTwo", ("--sync", "all_reduce"), "PartTwo-all_reduce", marks=pytest.mark.slow
        ),
    ],
)
def test_three_ranks_share_batch_and_test_set(tmp_path, part, flags, way):
    """A batch of 31 does not divide by three ranks; the report has each test image once."""
    more = (*flags, *QUICK, *TINY, "--batch-size", 31, "--output-dir", tmp_path)
    ended = run_part(part, *more, cwd=tmp_path, ranks=3)
    assert [one.status for one in ended] == [0, 0, 0], ended
    folder = only_run_folder(tmp_path, way)
    assert {path.name for path in folder.iterdir()} == FILES | {"logs_rank1.txt", "logs_rank2.txt"}
    summary = json_of(folder, "summary")
    assert summary["ranks_hold_equal_weights"] is True
    assert summary["nodes"] == 3
    assert "batch: 10 or 11 per rank x 3 ranks = 31 global; 3 steps, " in ended[0].out
    assert "evaluating 360 test images on 3 ranks" in ended[0].out
    assert summary["wall_seconds"] > summary["total_seconds"] > 0
    for row in json_of(folder, "ranks")["ranks"]:
        memory = row["memory"]
        assert memory == row["predicted_memory"]
        assert memory["parameters"] == memory["gradients"] == memory["optimizer_state"] > 0
    assert " MB on rank 0: parameters " in ended[0].out
    for rank in (1, 2):  # rank 0 speaks; the others report their end
        log = folder / f"logs_rank{rank}.txt"
        end = rf"rank {rank} of 3: finished after 3 steps in [\d.]+ s\. Rank 0 writes the report; "
        assert re.fullmatch(rf"{end}this rank's log: {re.escape(str(log))}\n", ended[rank].out)
    report = json_of(folder, "report")
    assert report["samples"] == 360

    # The reported accuracy is that of the checkpoint on the whole test set, in one process.
    digits, model = load_dataset("digits", tmp_path), build_model("tiny", 10)
    saved = load_checkpoint(folder / "checkpoints" / "Epoch_1.pt")
    model.load_state_dict(saved["model_state_dict"])
    loader = EvaluationLoader(digits.test, mean=digits.mean, std=digits.std)
    alone = predict(model, "cpu", torch.nn.CrossEntropyLoss(), loader)
    assert alone.accuracy == pytest.approx(report["accuracy"], abs=1 / 360)
    assert alone.mean_loss == pytest.approx(report["test_loss"], rel=1e-3)


def test_each_part_starts_cold_and_the_ways_agree(tmp_path):
    """VGG-11 starts in a new interpreter, as for users; of two ranks only rank 0, to save time.

    PartOne does in the test above.
    """
    make_image_folder(tmp_path / "data")
    words = [
        *("--dataset", "folder", "--data-dir", "data", "--batch-size", 8, "--epochs", 1),
        *("--log-every", 1, "--threads", 1, "--output-dir", tmp_path),
    ]
    started = [start_part("PartOne", *words, cwd=tmp_path)]
    for part in ("PartTwo", "PartThree"):
        place = ["-M", "127.0.0.1", "-N", 2, "--master-port", free_port()]
        started += [
            start_part(part, *words, *place, "-R", rank, cwd=tmp_path, cold=rank == 0)
            for rank in range(2)
        ]
    ended = [one.end() for one in started]
    assert [one.status for one in ended] == [0] * 5, ended
    losses = {}
    for way in ("PartOne-none", "PartTwo-gather_scatter", "PartThree-ddp"):
        folder = only_run_folder(tmp_path, way)
        assert "vgg11" in (folder / "config.json").read_text()
        report = json_of(folder, "report")
        assert report["class_names"] == ["cat", "dog"]
        losses[way] = [line["loss"] for line in json_lines(folder / "metrics.jsonl")]
    assert len(losses["PartThree-ddp"]) == 3
    assert losses["PartTwo-gather_scatter"] == pytest.approx(losses["PartThree-ddp"], rel=1e-3)
    assert losses["PartOne-none"][0] == pytest.approx(losses["PartThree-ddp"][0], rel=0.5), (
        "BatchNorm of 8 or of 4 samples"
    )


@pytest.mark.slow
@pytest.mark.cifar
@needs_cifar10
@pytest.mark.timeout(400)
def test_the_assignments_own_setting_runs_on_real_data(tmp_path):
    """Two steps at the assignment's constant rate of 0.1; a rank needs less than 2.5 GB.

    The test below evaluates the 10,000 test images.
    """
    ended = run_part(
        "PartTwo",
        *("--sync", "all_reduce", "--lr", 0.1, "--schedule", "constant", "--max-steps", 2),
        *("--batch-size", 256, "--measure-only", "--output-dir", tmp_path),
        cwd=tmp_path,
        ranks=2,
        timeout_seconds=200,
        cold=True,
    )
    assert [one.status for one in ended] == [0, 0], ended
    folder = only_run_folder(tmp_path, "PartTwo-all_reduce")
    assert [line["learning_rate"] for line in json_lines(folder / "metrics.jsonl")] == [0.1, 0.1]
    summary = json_of(folder, "summary")
    assert summary["peak_memory_bytes"] < 2.5e9
    assert summary["peak_gpu_memory_bytes"] is None


@pytest.mark.long
@pytest.mark.cifar
@needs_cifar10
@pytest.mark.timeout(900)
def test_41_steps_of_cifar10_with_the_defaults_learn(tmp_path):
    [ended] = run_part(
        "PartOne", "--max-steps", 41, "--output-dir", tmp_path, cwd=tmp_path, timeout_seconds=800
    )
    assert ended.status == 0, ended.err
    folder = only_run_folder(tmp_path, "PartOne-none")
    assert json_of(folder, "report")["samples"] == 10_000
    assert json_of(folder, "summary")["test_accuracy"] >= 0.33


@pytest.mark.parametrize(
    ("change", "least"),
    [
        # Two steps of one process and of two ranks instead of two epochs in all four ways.
        pytest.param(
            "demo.SETTINGS += ('--max-steps', '2'); demo.WAYS = demo.WAYS[::2]",
            0,
            marks=pytest.mark.slow,
        ),
        pytest.param("pass", 0.85, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_the_demo_compares_its_ways(change, least):
    program = f"import sys; from lab import demo; {change}; sys.exit(demo.main())"
    done = Started([sys.executable, "-c", program], cwd=ROOT, env=user_environment()).end(
        timeout_seconds=800
    )
    assert done.status == 0, done
    every = ("PartOne: none", "PartTwo: gather_scatter", "PartTwo: all_reduce", "PartThree: ddp")
    ways = [f"{part}: {sync}" for part, sync, _ in demo.WAYS]
    assert tuple(ways) == every
    run = every if least else every[::2]
    assert [way for way in every if way in done.out] == [*run]
    reports = re.findall(r"^(\S*report\.txt)$", done.out, re.MULTILINE)
    summaries = [json_of(ROOT / Path(path).parent, "summary") for path in reports]
    assert [f"{summary['part']}: {summary['sync']}" for summary in summaries] == [*run]
    assert min(summary["test_accuracy"] for summary in summaries) > least
