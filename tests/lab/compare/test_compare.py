"""What ``lab compare`` starts, in which order, what it keeps, and what a stop leaves behind."""

import dataclasses
import json
import signal
import sys
from datetime import datetime
from functools import partial
from pathlib import Path

import psutil
import pytest
from msgspec import to_builtins

from common.config.parser import parse_arguments
from common.errors import UserError
from common.models import build_model
from common.runs import read_epochs
from common.sync import BUILT_IN, BY_HAND, STRATEGIES, build_sync
from common.sync.message_cost import GradientSize
from lab.calibrate.calibration import default_ranks
from lab.cli import main
from lab.cluster import Cluster
from lab.cluster.tools import namespaces_refused
from lab.compare import cells as cells_module
from lab.compare import runner as runner_module
from lab.compare.cells import (
    Run,
    choose_buckets,
    in_turns,
    node_command,
    part_of,
    plan_cells,
)
from lab.compare.cli import strategies
from lab.compare.executors import Executors
from lab.compare.outcomes import time_to_accuracy
from lab.compare.prediction import reason_to_calibrate
from lab.compare.runner import open_comparison, prepare, run_comparison, time_left
from lab.compare.settings import Settings
from lab.comparison.record import (
    PredictedCell,
    Prediction,
    read_comparison,
    write_comparison,
)
from lab.predict.calibration_file import load_calibration, reference_path
from tests.helpers import Started, fake_part, start_lab, user_environment, wait_until

FAKE = fake_part.__file__
SMALL = Settings(nodes=(1, 2), sync=("all_reduce", "ring"), steps=4, warmup=1, repeats=2)
HERE = {"cpu": "A", "torch": "2.0", "usable_cores": 2, "gpus": [], "threads": 1}


@pytest.fixture
def fake_parts(monkeypatch):
    """Make cells start the fake part; return the list of started runs, in order."""
    started = []

    def command(run):
        started.append(run.key)
        return [FAKE, *node_command(run)[1:]]

    monkeypatch.setattr(runner_module, "node_command", command)
    monkeypatch.setattr(cells_module, "part_of", lambda sync: "Part")
    return started


def compare(settings, *, reports):
    """Run a comparison as ``lab compare`` does, without its report."""
    executors = Executors(
        max(settings.nodes), settings.rates, ranks_per_node=settings.ranks_per_node
    )
    folder, results = open_comparison(settings, reports=reports)
    with executors:
        prepare(settings, folder, results, executors, predicts=False)
        runs = in_turns(folder, settings, results.cells)
        run_comparison(results, runs, executors)
    return folder, results


def asks(**changes):
    """Return the settings of a small comparison, with these changes."""
    return Settings(**vars(SMALL) | changes)


def runs_of(settings, folder=Path("here")):
    """Return the first run of each cell."""
    return [Run(folder, settings, cell, 0) for cell in plan_cells(settings)]


def predicted(cells):
    """Return a prediction of these cells."""
    return Prediction(made="2026-01-01T00:00:00", cells=cells)


def test_the_time_left_is_predicted_and_then_corrected_by_the_finished_runs():
    """Ten steps of 3 s and of 1 s, with 10 s of start-up; the runs then take twice as long."""
    runs = runs_of(asks(nodes=(2,), steps=8))
    assert runs[0].settings.total_steps == 10
    seconds = {"all_reduce-n2": 3.0, "ring-n2": 1.0}
    prediction = predicted(
        {name: PredictedCell(step_seconds=step) for name, step in seconds.items()}
    )
    assert time_left(runs, prediction) == "about 1 min 00 s", "of 40 s and of 20 s"
    assert time_left(runs, prediction, 1, 80.0) == "about 40 s"
    assert time_left(runs, None) == "time unknown until the first run has ended"
    assert time_left(runs, None, 1, 30.0) == "about 30 s"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"made": "2026-01-01T10:00:00"}, "is older than a day"),
        ({"made": "2026-01-05T10:00:00"}, "is older than a day"),
        ({"quick": True}, "is quick"),
        ({"model": "resnet18"}, "timed resnet18, not vgg11"),
        ({"others_share": 0.3}, "was disturbed by other processes"),
        ({"ranks_here": 1}, "was measured on several nodes"),
        ({"machine": HERE | {"torch": "0.1"}}, "another torch"),
        ({"machine": HERE | {"cpu": "B"}}, "another cpu"),
    ],
)
def test_a_comparison_uses_only_a_whole_calibration_of_this_machine_and_day(change, reason):
    fitting = {
        "made": "2026-01-03T09:00:00",
        "ranks": default_ranks(),
        "ranks_here": default_ranks(),
        "others_share": 0.0,
        "machine": HERE | {"threads": 2},
    }
    calibration = dataclasses.replace(load_calibration(reference_path()), **fitting | change)
    now = datetime(2026, 1, 3, 20, 0)
    found = reason_to_calibrate(calibration, model="vgg11", here=HERE, now=now)
    assert reason in found
    assert bool(reason) == bool(found)


def test_the_unfinished_comparison_that_began_last_is_resumed(tmp_path):
    """Its recorded time counts, not the folder's name."""
    for name, created in (("z", "2026-01-01T00:00:00"), ("a", "2026-02-01T00:00:00")):
        folder, results = open_comparison(asks(), reports=tmp_path, anew=True)
        results.created = created
        write_comparison(folder / "results.json", results)
        folder.rename(tmp_path / f"compare-{name}")
    assert open_comparison(asks(), reports=tmp_path)[0] == tmp_path / "compare-a"


# --- what is started ---


def parsed(run):
    """Return the part's own Config of the command, with the part's own choices of strategies."""
    script, *flags = node_command(run)
    part = Path(script).parent.name
    assert part == part_of(run.cell.sync)
    choices = {"PartOne": ("none",), "PartTwo": BY_HAND, "PartThree": BUILT_IN}[part]
    return parse_arguments(part, "", choices, flags)


@pytest.mark.parametrize("sync", STRATEGIES)
def test_every_strategy_is_started_by_a_command_that_its_part_understands(sync):
    nodes = (1 if sync == "none" else 3,)
    [run] = runs_of(asks(nodes=nodes, sync=(sync,), steps=7, warmup=2, batch_size=90))
    config = parsed(run)
    assert (config.sync, config.batch_size, config.untimed_steps) == (sync, 90, 2)
    assert (config.timeline, config.measure_only) == (True, True)
    assert config.max_steps == 2 + 7 + (4 if sync == "local_sgd" else 1)
    assert config.amp is False, "all cells in one precision, also PartThree's on a GPU"
    [asked] = runs_of(asks(nodes=nodes, sync=(sync,), flags=("--use-amp",)))
    assert parsed(asked).amp is True


def test_a_strategy_with_several_sizes_of_buckets_has_a_cell_for_each(tmp_path):
    """Each has its own id and folder, the one in which its part writes, and its own --bucket-mb."""
    names = ("ddp", "ddp-auto", "ddp-9", "sharded-0.5")
    runs = runs_of(asks(nodes=(2,), sync=names, flags=("--bucket-mb", "4")), tmp_path)
    cells = [run.cell for run in runs]
    with pytest.raises(UserError, match=r"ddp-auto.*--no-predict"):
        choose_buckets(cells, None)
    chosen = PredictedCell(step_seconds=1.0, bucket_mb=14.0)
    [line] = choose_buckets(cells, predicted({"ddp-auto-n2": chosen}))
    assert "14 MiB" in line
    assert [(cell.id, cell.exact) for cell in cells] == [(f"{n}-n2", True) for n in names]
    configs = [parsed(run) for run in runs]
    expected = [("ddp", 4.0), ("ddp", 14.0), ("ddp", 9.0), ("sharded", 0.5)]
    assert [(config.sync, config.bucket_mb) for config in configs] == expected
    written = [
        config.reports_folder / config.experiment_name / config.run_name for config in configs
    ]
    assert written == [run.path for run in runs]
    assert len(set(written)) == len(names)


def test_one_node_comes_once_and_weak_scaling_gives_each_node_the_same():
    """All runs have equally many steps: the learning rate follows the schedule."""
    flags = ("--averaging-period", "6")
    syncs = ("ring", "local_sgd")
    runs = runs_of(asks(nodes=(4, 1, 2), sync=syncs, scaling="weak", batch_size=32, flags=flags))
    assert [(run.key[0], run.cell.batch_size) for run in runs] == [
        ("none-n1", 32),
        *(("ring-n2", 64), ("local_sgd-n2", 64)),
        *(("ring-n4", 128), ("local_sgd-n4", 128)),
    ]
    assert {parsed(run).max_steps for run in runs} == {1 + 4 + 6}


def test_names_for_several_strategies():
    assert strategies(["all"]) == tuple(STRATEGIES)
    left_out = {"ddp_fp16", "ddp_powersgd", "local_sgd"}
    assert set(STRATEGIES) - set(strategies(["exact", "topk"])) == left_out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync": ("rings",)}, "got rings: did you mean ring"),
        ({"sync": ("ring-auto",)}, "got ring-auto, but ring has no buckets: give ring"),
        ({"sync": ("ddp-fast",)}, "got ddp-fast: "),
        ({"sync": ("ddp-0",)}, "got ddp-0: "),
        ({"nodes": (0,)}, "--nodes: got 0"),
        ({"nodes": (1, 300)}, "got 300, more than the 256 samples"),
        ({"steps": 0}, "--steps: got 0"),
        ({"until_accuracy": 60.0}, "--until-accuracy: got 60.0, give a fraction"),
        ({"rates": ("200mbit", "0.2gbit")}, "--rate: got 200mbit 0.2gbit, one rate twice"),
        ({"rates": ("fast",)}, "--rate: got 'fast', give a number with a unit"),
        ({"ranks_per_node": 2}, "--ranks-per-node 2: over loopback .* add --rate"),
        ({"ranks_per_node": 0}, "--ranks-per-node: got 0, give whole numbers from 1"),
        (
            {"nodes": (1, 200), "ranks_per_node": 2, "rates": ("1gbit",)},
            "--nodes: got 200 with 2 ranks each, more than the 256 samples",
        ),
        (
            {"compute": "measured", "until_accuracy": 0.5},
            "--compute measured: an emulated model learns nothing.*Leave out --until-accuracy",
        ),
    ],
)
def test_nonsense_is_refused_before_anything_runs(changes, message):
    with pytest.raises(UserError, match=message):
        asks(**changes)


def test_each_rate_has_cells_of_its_own_and_one_node_has_none():
    runs = runs_of(asks(rates=("200mbit", "1 Gbit"), compute="measured", nodes=(1, 4)))
    assert [run.key[0] for run in runs] == [
        "none-n1",
        *("all_reduce-n4-200mbit", "ring-n4-200mbit", "all_reduce-n4-1gbit", "ring-n4-1gbit"),
    ]
    assert [run.cell.rate for run in runs] == [None, *["200mbit"] * 2, *["1 Gbit"] * 2]
    assert len({run.path for run in runs}) == 5
    assert parsed(runs[1]).compute == "here/profile.json", "the comparison's own copy"
    assert parsed(runs_of(asks())[0]).compute == "real"


def test_what_is_missing_is_found_before_anything_is_written(tmp_path, monkeypatch):
    profile = str(tmp_path / "nowhere.json")
    make = r"profile .*nowhere.json cannot .*: `lab calibrate --profile nowhere` measures one"
    with pytest.raises(UserError, match=make):
        compare(asks(compute=profile), reports=tmp_path)
    monkeypatch.setattr("lab.cluster.tools.namespaces_refused", lambda: "this kernel has none")
    with pytest.raises(UserError, match="cannot emulate a cluster: this kernel has none"):
        compare(asks(rates=("1gbit",)), reports=tmp_path)
    with pytest.raises(UserError, match="add a strategy, or 1 to --nodes"):
        compare(asks(nodes=(2,), sync=("none",)), reports=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(namespaces_refused() is not None, reason=str(namespaces_refused()))
def test_cells_with_a_rate_run_on_one_cluster_each(fake_parts, tmp_path, monkeypatch):
    entered = []
    real = Cluster.__enter__
    monkeypatch.setattr(Cluster, "__enter__", lambda self: entered.append(self.nodes) or real(self))
    # The fake part does not need torch.
    monkeypatch.setattr("lab.compare.executors.Cluster", partial(Cluster, fresh=True))
    settings = asks(nodes=(1, 2, 3), rates=("1gbit",), repeats=1, flags=("--fail", "all_reduce"))
    folder, results = compare(settings, reports=tmp_path)
    assert entered == [1, 3], "over loopback, and once with the largest number of nodes"
    cells = {cell.id: cell for cell in results.cells}
    assert {name: cell.status for name, cell in cells.items()} == {
        "none-n1": "done",
        **{"all_reduce-n2-1gbit": "failed", "ring-n2-1gbit": "done"},
        **{"all_reduce-n3-1gbit": "failed", "ring-n3-1gbit": "done"},
    }
    cause = "rank 1 ended with status 1: ValueError: the test wants it (its output: "
    assert cells["all_reduce-n2-1gbit"].message.startswith(cause)
    assert (results.emulated, results.settings["rates"]) == (True, ["1gbit"])
    assert (folder / "logs" / "ring-n3-1gbit-1" / "node2.log").exists()


@pytest.mark.skipif(namespaces_refused() is not None, reason=str(namespaces_refused()))
def test_each_node_runs_its_ranks_and_one_node_still_one(fake_parts, tmp_path, monkeypatch):
    monkeypatch.setattr("lab.compare.executors.Cluster", partial(Cluster, fresh=True))
    settings = asks(
        nodes=(1, 2), sync=("hierarchical",), rates=("1gbit",), repeats=1, ranks_per_node=2
    )
    folder, results = compare(settings, reports=tmp_path)
    [alone, shared] = results.cells
    assert (alone.id, alone.status, len(alone.repeats[0].ranks)) == ("none-n1", "done", 1)
    assert (shared.id, shared.status) == ("hierarchical-n2x2-1gbit", "done")
    assert (shared.nodes, shared.ranks_per_node, len(shared.repeats[0].ranks)) == (2, 2, 4)
    logs = folder / "logs" / "hierarchical-n2x2-1gbit-1"
    assert {path.name for path in logs.iterdir()} == {
        f"node{rank // 2}-rank{rank}.log" for rank in range(4)
    }
    again = read_comparison(folder / "results.json")
    assert [cell.ranks_per_node for cell in again.cells] == [1, 2]


def test_a_rank_of_several_has_its_share_of_a_weak_batch_and_the_strategy_its_option(capsys):
    settings = asks(
        nodes=(1, 4),
        sync=("hierarchical", "ring"),
        scaling="weak",
        batch_size=10,
        rates=("1gbit",),
        ranks_per_node=2,
    )
    alone, hierarchical, ring = runs_of(settings)
    assert [run.cell.batch_size for run in (alone, hierarchical, ring)] == [10, 80, 80]
    assert hierarchical.title == "hierarchical on 4 nodes with 2 ranks each at 1gbit, repeat 1"
    assert parsed(hierarchical).ranks_per_node == 2
    assert "--ranks-per-node" not in node_command(ring)
    assert settings.strategy_options == {"ranks_per_node": 2}
    for rate in ([], ["--rate", "1gbit"]):
        assert main(["compare", "--plan", "--ranks-per-node", "2", *rate]) == 2
        assert "--plan starts one rank on each node" in capsys.readouterr().err


# --- turns, and what is kept ---


def test_cells_take_turns_and_medians_are_those_of_the_runs(fake_parts, tmp_path):
    folder, results = compare(asks(), reports=tmp_path)
    names = ["none-n1", "all_reduce-n2", "ring-n2"]
    first, second = [(name, 0) for name in names], [(name, 1) for name in names]
    assert fake_parts == first + second[::-1], "the second repeat goes the other way round"
    assert results == read_comparison(folder / "results.json")
    assert results.finished
    ring = next(cell for cell in results.cells if cell.id == "ring-n2")
    assert (ring.medians.step, ring.medians.wait) == (0.83, 0.04)
    assert (ring.medians.root_bytes_sent, ring.medians.others_bytes_sent) == (10.0, 11.0)
    assert ring.repeats[0].losses[1] == (2, 1.0)
    assert set(results.timelines) == set(names)


def test_a_failed_cell_says_why_stops_nothing_and_is_tried_again(fake_parts, tmp_path, capsys):
    """Other settings, foreign results and those of another machine are left alone."""
    failing = asks(flags=("--fail", "all_reduce"))
    folder, results = compare(failing, reports=tmp_path)
    cells = {cell.id: cell for cell in results.cells}
    states = {"none-n1": "done", "all_reduce-n2": "failed", "ring-n2": "done"}
    assert {name: cell.status for name, cell in cells.items()} == states
    cause = "rank 1 ended with status 1: ValueError: the test wants it"
    assert cause in cells["all_reduce-n2"].message, "not rank 0's echo"
    assert not results.finished
    other, _ = compare(asks(nodes=(1,), repeats=1), reports=tmp_path)
    assert other != folder
    newer = json.dumps(to_builtins(results) | {"format": 99})
    for name, wrong in (("cut", newer[:200]), ("newer", newer)):
        (tmp_path / f"compare-{name}").mkdir()
        (tmp_path / f"compare-{name}" / "results.json").write_text(wrong)
    capsys.readouterr()
    fake_parts.clear()
    assert compare(failing, reports=tmp_path)[0] == folder
    assert fake_parts == [("all_reduce-n2", 0), ("all_reduce-n2", 1)], "and nothing that is done"
    out = " ".join(capsys.readouterr().out.split())
    assert f"{tmp_path}/compare-cut/results.json is cut off or not JSON" in out
    assert "format 99, this version reads 1" in out
    assert len((tmp_path / "compare-cut" / "results.json").read_text()) == 200
    results.environment |= {"torch": "1.0"}
    write_comparison(folder / "results.json", results)
    assert open_comparison(failing, reports=tmp_path)[0] != folder
    assert "was started with another torch" in " ".join(capsys.readouterr().out.split())


def test_time_to_accuracy_is_training_time_up_to_the_first_epoch_that_reaches_it(tmp_path):
    epochs = [
        {"epoch": number, "seconds": 10.0 + number, "val_accuracy": accuracy}
        for number, accuracy in enumerate([0.4, 0.62, 0.5, 0.9], start=1)
    ]
    (tmp_path / "epochs.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in epochs))
    read = read_epochs(tmp_path)
    assert time_to_accuracy(read, 0.6, steps_per_epoch=22) == (23.0, 44)
    assert time_to_accuracy(read, 0.95, steps_per_epoch=22) is None


# --- real runs ---


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_runs_from_the_command_line_to_the_report(tmp_path):
    """The exact strategies' losses agree, and the bytes sent equal the formulas'."""
    flags = (
        "--nodes 1 2 --sync ring ddp --steps 2 --warmup 1 --repeats 1 "
        "--dataset digits --batch-size 16 --no-predict --output-dir"
    ).split()
    done = start_lab("compare", *flags, tmp_path, cold=True).end(timeout_seconds=500)
    assert done.status == 0, done
    [folder] = tmp_path.glob("compare-*")
    cells = {cell.sync: cell for cell in read_comparison(folder / "results.json").cells}
    runs = {sync: cell.repeats[0] for sync, cell in cells.items()}
    losses = {sync: [loss for _, loss in run.losses] for sync, run in runs.items()}
    assert len(losses["ring"]) == 4
    assert losses["ddp"] == pytest.approx(losses["ring"], rel=1e-3)
    assert losses["none"][0] == pytest.approx(losses["ring"][0], rel=0.05), "in two shards"
    sizes = GradientSize.of(build_model("vgg11", 10).parameters())
    for name in ("ring", "ddp"):
        plan, sent = build_sync(name).plan, [rank.bytes_sent for rank in runs[name].ranks]
        assert sent == [float(plan.bytes_sent(sizes, rank, 2)) for rank in range(2)], name
    for name in ("report.html", "table.md", "table.csv", "whatif.html"):
        assert (folder / name).stat().st_size > 500
    folders = sorted(folder.glob("runs/*/n2-1"))
    again = start_lab("report", *folders, "--output-dir", tmp_path).end()
    assert again.status == 0, again
    [path] = tmp_path.glob("report-*/results.json")
    medians = {cell.sync: cell.medians for cell in read_comparison(path).cells}
    assert medians["ring"] == cells["ring"].medians


# --- stopped runs ---


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGINT, id="interrupted"),
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.slow),
    ],
)
def test_stopped_in_the_middle_nothing_is_left_and_it_goes_on(how, tmp_path):
    marker = tmp_path / "go"
    workers = partial(fake_part.waiting, marker)
    asked = "--nodes 1 3 --sync ring --steps 4 --warmup 1 --repeats 1 --no-predict --output-dir"
    command = [sys.executable, FAKE, "lab", "compare", *asked.split(), str(tmp_path)]
    environment = user_environment(FLAGS=f"--wait-for {marker}")
    process = Started(command, cwd=tmp_path, env=environment, forked=True)
    wait_until(lambda: len(workers()) == 1, "the single node")
    marker.touch()  # the single node ends, and the three nodes start
    wait_until(lambda: list(tmp_path.glob("compare-*/runs/*/n1-1/ranks.json")), "its files")
    marker.unlink()
    wait_until(lambda: len(workers()) == 4, "the three nodes")
    process.send(how)
    ended = process.end()
    assert ended.status == (130 if how == signal.SIGINT else -9), ended.out + ended.err
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in workers()), "the end of all nodes")
    [results] = tmp_path.glob("compare-*/results.json")
    status = {cell.id: cell.status for cell in read_comparison(results).cells}
    assert status == {"none-n1": "done", "ring-n3": "pending"}
    if how == signal.SIGINT:  # what is finished is shown
        assert (results.parent / "report.html").read_text() == "none-n1"
    before = len(workers())
    marker.touch()
    again = Started(command, cwd=tmp_path, env=environment, forked=True).end()
    assert again.status == 0, again
    assert "resuming " in again.out
    assert len(workers()) == before + 3, "only the three nodes that were missing"
    assert read_comparison(results).finished
