"""The runs that ``lab report`` imports: cells, groups, warnings, and what is refused."""

import json
import os
import shutil
from datetime import datetime

import pytest

from common.errors import UserError
from lab.compare.imported_runs import collect
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
