"""The runs that ``lab report`` imports: cells, groups, warnings, and what is refused."""

import json
import os
import shutil
import socket
from datetime import datetime

import pytest

from common.errors import UserError
from lab.cli import main
from lab.compare.imported_runs import collect
from lab.compare.outcomes import MACHINE_FACTS
from lab.compare.prediction import predict_imported
from lab.comparison.record import read_comparison
from lab.predict.calibration_file import load_calibration, reference_path
from tests.helpers.fake_part import rank_rows


def write_run(
    folder, *, sync="ring", nodes=2, step=1.0, environment=(), losses=6, steps=4, **settings
):
    """Write a run's folder as rank 0 leaves it."""
    folder.mkdir(parents=True)
    config = {
        "sync": sync,
        "world_size": nodes,
        "dataset": "digits",
        "model": "vgg11",
        "batch_size": 64,
        "seed": 0,
        "learning_rate": 0.02,
        "total_steps": 6,
        "nesterov": True,
        "amp": None,
        "amp_dtype": None,
        "untimed_steps": 1,
    }
    machine = {"cpu": "c", "gpus": [], "torch": "2", "usable_cores": 2, "git_commit": "a"}
    equal = settings.get("equal", True)
    files = {
        "config.json": config | settings,
        "environment.json": machine | dict(environment),
        "ranks.json": {"steps": steps, "ranks": rank_rows(step, ranks=nodes)},
        "summary.json": {"test_accuracy": 0.5, "ranks_hold_equal_weights": equal},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    lines = [json.dumps({"step": n, "loss": 1 / n}) + "\n" for n in range(1, losses + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def collected(folder, *runs, scaling="strong"):
    """Return the results of runs with these arguments of ``write_run``."""
    folders = [write_run(folder / str(number), **run) for number, run in enumerate(runs)]
    return collect(folders, scaling=scaling)


def test_equal_runs_become_repeats_of_a_cell(tmp_path):
    """Those with other buckets do not; a strategy without buckets ignores the size."""
    alone = {"sync": "none", "nodes": 1}
    buckets = [{"sync": "ddp", "bucket_mb": size} for size in (None, "auto", 9.0, 0.5)]
    rings = {"step": 1.0}, {"step": 3.0, "bucket_mb": "auto"}
    results = collected(tmp_path, *rings, alone, *buckets)
    assert results.differences == []
    assert {cell.group for cell in results.cells} == {0}
    assert {cell.id: len(cell.repeats) for cell in results.cells} == {
        **{"none-n1": 1, "ring-n2": 2},
        **{"ddp-n2": 1, "ddp-auto-n2": 1, "ddp-9-n2": 1, "ddp-0.5-n2": 1},
    }
    assert results.cells[1].medians.step == 2.5
    assert results.settings["nodes"] == [1, 2]


@pytest.mark.parametrize(
    "changed",
    [
        {"dataset": "cifar10"},
        {"batch_size": 32},
        {"seed": 1},
        {"learning_rate": 0.1},
        {"model": "vgg13"},
        {"environment": {"cpu": "another"}},
        {"environment": {"torch": "3"}},
        {"warmup_steps": 2},  # of the schedule: the losses agree at step 1 only
    ],
)
def test_runs_that_differ_are_told_and_kept_apart(changed, tmp_path):
    results = collected(tmp_path / "PartTwo-ring", {}, changed)
    [difference] = results.differences
    name, value = next(iter(changed.get("environment", changed).items()))
    assert difference.startswith(f"{name}: ")
    assert f"{value} in PartTwo-ring/1" in difference
    groups = [(cell.id, cell.group) for cell in results.cells]
    assert groups == [("ring-n2", 0), ("ring-n2-g1", 1)]


def test_weak_scaling_compares_batches_a_node(tmp_path):
    runs = {"sync": "none", "nodes": 1, "batch_size": 32, "total_steps": 12}, {"nodes": 2}
    assert collected(tmp_path / "weak", *runs, scaling="weak").differences == []
    assert len(collected(tmp_path / "strong", *runs).differences) == 2


def test_the_steps_that_a_report_names_are_those_that_were_timed(tmp_path):
    """Six steps have losses; the first is the warm-up, the last one recorded the timeline."""
    one = write_run(tmp_path / "a", steps=4)
    os.utime(one / "config.json", (0, 86400))
    found = collect([one], scaling="strong")
    assert found.settings["steps"] == 4
    [outcome] = found.cells[0].repeats
    assert datetime.fromisoformat(outcome.started).timestamp() == 86400
    runs = [one, write_run(tmp_path / "b", sync="tree", steps=3), write_run(tmp_path / "c")]
    settings = collect(runs, scaling="strong").settings
    assert (settings["steps"], settings["repeats"], settings["warmup"]) == ("3 to 4", "1 to 2", 1)


def test_crowded_and_unequal_runs_are_warned_of(tmp_path):
    results = collected(tmp_path, {"nodes": 3, "equal": False})
    assert results.cells[0].oversubscribed
    crowded, unequal = results.warnings
    assert "more ranks shared a machine" in crowded
    assert "different weights" in unequal


def test_a_folder_that_holds_no_ended_run_is_named(tmp_path):
    run = write_run(tmp_path / "a")
    with pytest.raises(UserError, match="given twice"):
        collect([run, run], scaling="strong")
    (run / "ranks.json").unlink()
    with pytest.raises(UserError, match=r"ranks\.json cannot be read .* has not finished"):
        collect([run], scaling="strong")
    shutil.rmtree(run)
    with pytest.raises(UserError, match="not the folder of a run"):
        collect([run], scaling="strong")


def spoil(folder):
    """Return folders that hold no finished run, each with a word of the reason."""
    killed = write_run(folder / "killed", losses=3)
    (killed / "summary.json").unlink()
    running = write_run(folder / "running", losses=2)
    (running / "summary.json").unlink()
    me = f"process {os.getpid()} on {socket.gethostname()} since 2026-11-21 15:00:00"
    (running / ".lock").write_text(f"0123456789abcdef\n{me}\n")
    cut = write_run(folder / "cut")
    (cut / "summary.json").write_text('{"test_acc')
    timeline = write_run(folder / "timeline")
    (timeline / "timeline.json").write_text("[]")
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("notes")
    compared = folder / "compare-1"
    compared.mkdir()
    (compared / "results.json").write_text("{}")
    return {
        killed: "3 of 6 steps",
        running: f"process {os.getpid()}",
        cut: "summary.json",
        timeline: "timeline.json",
        folder / "empty": "not the folder of a run",
        folder / "notes.txt": "not the folder of a run",
        compared: "is a comparison",
    }


def test_folders_without_a_run_are_skipped_with_the_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    reasons = spoil(tmp_path / "runs")
    write_run(tmp_path / "runs" / "good")
    given = sorted((tmp_path / "runs").iterdir())
    assert main(["report", *map(str, given)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    [page] = tmp_path.glob("reports/report-*/report.html")
    text = page.read_text(encoding="utf-8")
    for folder, reason in reasons.items():
        [line] = [part for part in said.split("skipped: ")[1:] if part.startswith(str(folder))]
        assert reason in line
        assert str(folder) in text
    assert "still runs" in said
    results = read_comparison(page.parent / "results.json")
    assert [repeat.folder for cell in results.cells for repeat in cell.repeats] == [
        str(tmp_path / "runs" / "good")
    ]
    assert len(results.skipped) == len(reasons)
    # nothing is left
    assert main(["report", *map(str, reasons)]) == 2
    error = capsys.readouterr().err
    assert all(str(folder) in " ".join(error.split()) for folder in reasons)
    assert len(list(tmp_path.glob("reports/report-*"))) == 1


def test_runs_are_named_with_their_strategy(tmp_path):
    """With a recipe the folder's name does not say it."""
    runs = {"sync": "ring"}, {"sync": "all_reduce", "nodes": 3, "seed": 1, "equal": False}
    results = collected(tmp_path / "cs744", *runs)
    [difference] = results.differences
    assert "cs744/0 (ring, 2 ranks)" in difference
    assert "cs744/1 (all_reduce, 3 ranks)" in difference
    assert any("cs744/1 (all_reduce, 3 ranks)" in warning for warning in results.warnings)


def test_iterations_and_test_loss_are_kept(tmp_path):
    run = write_run(tmp_path / "a")
    lines = [
        {"step": 1, "loss": 2.0, "step_seconds": 3.0},
        {"step": 2, "loss": 1.0, "forward_seconds": 0.25, "sync_seconds": 0.5},  # no whole
        {"step": 3, "loss": 1.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "summary.json").write_text(json.dumps({"test_accuracy": 0.5, "test_loss": 1.25}))
    [repeat] = collect([run], scaling="strong").cells[0].repeats
    assert repeat.step_seconds == [(1, 3.0), (2, 0.75)]
    assert repeat.test_loss == 1.25


@pytest.mark.parametrize(
    ("changed", "predicted"),
    [({}, True), ({"model": "vgg13"}, False), ({"amp": True}, False), ({"cpu": "other"}, False)],
)
def test_an_earlier_calibration_predicts_runs_of_its_machine(
    tmp_path, monkeypatch, changed, predicted
):
    monkeypatch.chdir(tmp_path)
    reference = load_calibration(reference_path())
    (tmp_path / "reports").mkdir()
    reference.save(tmp_path / "reports" / "calibration.json")
    machine = {name: reference.machine.get(name) for name in MACHINE_FACTS}
    machine |= {name: value for name, value in changed.items() if name in machine}
    settings = {"model": reference.model, "batch_size": 256} | changed
    runs = [{"sync": "none", "nodes": 1}, {"sync": "ring"}]
    results = collected(
        tmp_path / "runs", *(run | settings | {"environment": machine} for run in runs)
    )
    predict_imported(results)
    assert (results.prediction is not None) == predicted
    if results.prediction is None:
        return
    assert results.prediction.made == reference.made
    one, ring = (results.prediction.cells[cell.id] for cell in results.cells)
    assert one.in_scope
    assert one.sync_seconds == 0 < ring.sync_seconds
    assert one.compute_seconds == reference.compute.at(256, ranks_here=1).seconds
