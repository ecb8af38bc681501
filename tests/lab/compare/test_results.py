"""``results.json`` and the runs that ``lab report`` imports: numbers, and what is refused."""

import json
import math
import os
import shutil
from datetime import datetime

import pytest

from common.errors import UserError
from lab.compare.imported_runs import collect
from lab.compare.results import interval, read_results, summarise
from tests.helpers.fake_part import SECTIONS


def repeat(step, *, seed=0, ranks=2, sent=(5.0, 1.0, 3.0)):
    """Return a repeat in which a step of rank r takes ``step`` + r seconds."""
    rows = [
        {
            "rank": rank,
            "host": "h",
            "threads": 1,
            "seconds": SECTIONS | {"step": step + rank},
            "peak_memory_bytes": 100 + rank,
            "bytes_sent": sent[rank],
            "messages": 1.0,
        }
        for rank in range(ranks)
    ]
    return {
        "folder": "f",
        "seed": seed,
        "status": "done",
        "ranks": rows,
        "losses": [],
        "test_accuracy": None,
        "repeat": 0,
    }


def test_median_over_repeats_of_the_mean_over_ranks():
    cell = {"repeats": [repeat(step, ranks=3) for step in (1.0, 2.0, 9.0)]}
    summarise(cell, repeats=3)
    assert cell["status"] == "done"
    assert cell["median"]["step"] == 3.0  # the middle repeat's mean over 2, 3 and 4
    assert cell["median"]["root_bytes_sent"] == 5.0
    assert cell["median"]["others_bytes_sent"] == 2.0
    assert cell["median"]["peak_memory_bytes"] == 101.0


def test_interval_is_students_t():
    """By hand: mean 2, standard deviation 1, t(0.975, 2) = 4.3027."""
    low, high = interval([1.0, 2.0, 3.0])
    assert high == pytest.approx(2 + 4.302653 / math.sqrt(3), rel=1e-6)
    assert low == 0.0, "no time is negative"
    assert interval([1.0]) == [None, None]
    assert interval([4.0, 4.0]) == [4.0, 4.0]


def test_status_tells_how_much_is_there():
    failed = {"status": "failed", "message": "why", "ranks": [], "repeat": 1}
    for repeats, expected in (
        ([], "pending"),
        ([failed], "failed"),
        ([repeat(1.0), failed], "partial"),
        ([repeat(1.0)], "partial"),
        ([repeat(1.0), repeat(2.0)], "done"),
    ):
        cell = {"repeats": repeats}
        summarise(cell, repeats=2)
        assert cell["status"] == expected
        assert (cell["median"] is None) == (expected in ("pending", "failed"))
    assert cell["message"] is None


def test_bytes_that_no_timeline_counted_are_unknown_not_zero():
    cell = {"repeats": [repeat(1.0, sent=(None, None))]}
    summarise(cell, repeats=1)
    assert cell["median"]["root_bytes_sent"] is None
    assert cell["median"]["others_bytes_sent"] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": 1, "kind"', "is cut off or not JSON"),
        ("[1, 2]", r"Expected object"),
        ("{}", "has format None, this version reads 1"),
        ('{"format": 2}', "has format 2, this version reads 1"),
        ('{"format": 1}', "Object missing required field kind"),
        ("[" * 100_000, "Expected object"),
    ],
)
def test_foreign_results_are_named(content, message, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        read_results(path)
    assert str(path) in str(caught.value)
    assert "the file is unchanged" in str(caught.value)


def test_every_cell_is_checked(tmp_path):
    cell = {"id": "a", "sync": "ring", "nodes": "2", "status": "done", "repeats": [], "group": 0}
    whole = {
        "format": 1,
        "kind": "compare",
        "created": "2026-01-01T00:00:00",
        "finished": True,
        "settings": {},
        "environment": {},
        "warnings": [],
        "timelines": {},
        "cells": [cell],
    }
    path = tmp_path / "results.json"
    path.write_text(json.dumps(whole))
    with pytest.raises(UserError, match=r"cells\[0\]\.nodes: Expected int"):
        read_results(path)


# --- lab report ---


def write_run(
    folder, *, sync="ring", nodes=2, step=1.0, environment=(), losses=6, steps=4, **settings
):
    """Write a run's folder as rank 0 leaves it."""
    folder.mkdir(parents=True)
    config = {
        "sync": sync,
        "world_size": nodes,
        "dataset": "digits",
        "training_images": 1437,
        "model": "vgg11",
        "batch_size": 64,
        "seed": 0,
        "learning_rate": 0.02,
        "schedule": "onecycle",
        "total_steps": 6,
        "opt": "sgd",
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 5e-4,
        "label_smoothing": 0.0,
        "clip_norm": None,
        "accumulation_steps": 1,
        "amp": None,
        "amp_dtype": None,
        "untimed_steps": 1,
    } | settings
    machine = {"cpu": "c", "gpus": [], "torch": "2", "usable_cores": 2, "git_commit": "a"} | dict(
        environment
    )
    files = {
        "config.json": config,
        "environment.json": machine,
        "ranks.json": {"steps": steps, "ranks": repeat(step, ranks=nodes)["ranks"]},
        "summary.json": {
            "test_accuracy": 0.5,
            "ranks_hold_equal_weights": settings.get("equal", True),
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "loss": 1 / n}) + "\n" for n in range(1, losses + 1))
    )
    return folder


def test_equal_runs_become_repeats_of_a_cell(tmp_path):
    folders = [write_run(tmp_path / str(step), step=step) for step in (1.0, 3.0)]
    folders.append(write_run(tmp_path / "one", sync="none", nodes=1))
    results = collect(folders, scaling="strong")
    assert results["differences"] == []
    cells = [(cell["id"], len(cell["repeats"]), cell["group"]) for cell in results["cells"]]
    assert cells == [("none-n1", 1, 0), ("ring-n2", 2, 0)]
    assert results["cells"][1]["median"]["step"] == 2.5
    assert results["settings"]["nodes"] == [1, 2]


def test_runs_with_other_buckets_are_no_repeats_of_each_other(tmp_path):
    """A strategy without buckets ignores the size."""
    cases = [("ddp", None), ("ddp", "auto"), ("ddp", 9.0), ("ddp", 0.5), ("ring", "auto")]
    folders = [
        write_run(tmp_path / f"{sync}-{size}", sync=sync, bucket_mb=size) for sync, size in cases
    ]
    results = collect(folders, scaling="strong")
    assert [cell["id"] for cell in results["cells"]] == [
        *("ddp-n2", "ddp-auto-n2", "ddp-9-n2", "ddp-0.5-n2", "ring-n2")
    ]
    assert all(len(cell["repeats"]) == 1 for cell in results["cells"])


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
    ],
)
def test_runs_that_differ_are_told_and_kept_apart(changed, tmp_path):
    folders = [
        write_run(tmp_path / "PartTwo-ring" / "a"),
        write_run(tmp_path / "PartTwo-ring" / "b", **changed),
    ]
    results = collect(folders, scaling="strong")
    [difference] = results["differences"]
    name, value = next(iter(changed.get("environment", changed).items()))
    assert difference.startswith(f"{name}: ")
    assert f"{value} in PartTwo-ring/b" in difference
    assert [(cell["id"], cell["group"]) for cell in results["cells"]] == [
        ("ring-n2", 0),
        ("ring-n2-g1", 1),
    ]


def test_weak_scaling_compares_batches_a_node(tmp_path):
    folders = [
        write_run(tmp_path / "a", sync="none", nodes=1, batch_size=32, total_steps=12),
        write_run(tmp_path / "b", nodes=2, batch_size=64, total_steps=6),
    ]
    assert collect(folders, scaling="weak")["differences"] == []
    assert len(collect(folders, scaling="strong")["differences"]) == 2


def test_the_steps_that_a_report_names_are_those_that_were_timed(tmp_path):
    """Six steps have losses; the first is the warm-up, the last one recorded the timeline."""
    one = write_run(tmp_path / "a", steps=4)
    assert collect([one], scaling="strong")["settings"]["steps"] == 4
    other = write_run(tmp_path / "b", sync="tree", steps=3)
    settings = collect([one, other, write_run(tmp_path / "c", steps=4)], scaling="strong")[
        "settings"
    ]
    assert (settings["steps"], settings["repeats"], settings["warmup"]) == ("3 to 4", "1 to 2", 1)


def test_each_run_has_the_time_at_which_it_started(tmp_path):
    run = write_run(tmp_path / "a")
    os.utime(run / "config.json", (0, 86400))
    [outcome] = collect([run], scaling="strong")["cells"][0]["repeats"]
    assert datetime.fromisoformat(outcome["started"]).timestamp() == 86400


def test_schedules_that_differ_are_not_compared(tmp_path):
    """Their losses agree at step 1 only, so the report would take one of them to be wrong."""
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", sync="tree", warmup_steps=2)]
    assert collect(runs, scaling="strong")["differences"][0].startswith("warmup_steps: ")


def test_crowded_and_unequal_runs_are_warned_of(tmp_path):
    results = collect([write_run(tmp_path / "a", nodes=3, equal=False)], scaling="strong")
    assert results["cells"][0]["oversubscribed"]
    assert any("more ranks shared a machine" in text for text in results["warnings"])
    assert any("different weights" in text for text in results["warnings"])


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
