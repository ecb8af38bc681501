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

from common.config.parser import parse_arguments
from common.errors import UserError
from common.models import build_model
from common.sync import BUILT_IN, BY_HAND, STRATEGIES, build_sync
from common.sync.message_cost import GradientSize
from common.utils.paths import REPOSITORY
from lab.calibrate.calibration import default_ranks
from lab.cluster import Cluster
from lab.cluster.tools import namespaces_refused
from lab.compare import cells as cells_module
from lab.compare import runner as runner_module
from lab.compare.cells import Run, choose_buckets, node_command, part_of, plan_cells
from lab.compare.cli import strategies
from lab.compare.executors import Executors
from lab.compare.outcomes import time_to_accuracy
from lab.compare.prediction import reason_to_calibrate
from lab.compare.results import read_results
from lab.compare.runner import open_comparison, run_comparison, time_left
from lab.compare.settings import Settings
from lab.predict.calibration_file import load_calibration, reference_path
from tests.helpers import Started, start_lab, user_environment, wait_until

FAKE = REPOSITORY / "tests" / "helpers" / "fake_part.py"
needs_cluster = pytest.mark.skipif(
    namespaces_refused() is not None, reason=f"no cluster here: {namespaces_refused()}"
)
SYNCS = ("all_reduce", "ring")


@pytest.fixture
def fake_parts(monkeypatch):
    """Make cells start the fake part; return the list of started runs, in order."""
    started = []
    real = node_command

    def command(run):
        started.append((run.cell["id"], run.repeat))
        return [str(FAKE), *real(run)[1:]]

    monkeypatch.setattr(runner_module, "node_command", command)
    monkeypatch.setattr(cells_module, "part_of", lambda sync: "Part")
    return started


def test_the_time_left_is_predicted_and_then_corrected_by_the_finished_runs():
    """Ten steps of 3 s and of 1 s, with 10 s of start-up; the runs then take twice as long."""
    settings = Settings(nodes=(2,), sync=SYNCS, steps=8, warmup=1, repeats=1)
    runs = [Run(Path(), settings, cell, 0) for cell in plan_cells(settings)]
    assert settings.total_steps == 10
    cells = {
        run.cell["id"]: {"step_seconds": seconds}
        for run, seconds in zip(runs, (3.0, 1.0), strict=True)
    }
    assert time_left(runs, {"cells": cells}) == "about 1 min 00 s", "of 40 s and of 20 s"
    assert time_left(runs, {"cells": cells}, 1, 80.0) == "about 40 s"
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
        ({"machine": {"cpu": "A", "torch": "0.1", "usable_cores": 2, "gpus": []}}, "another torch"),
        ({"machine": {"cpu": "B", "torch": "2.0", "usable_cores": 2, "gpus": []}}, "another cpu"),
    ],
)
def test_a_comparison_uses_only_a_whole_calibration_of_this_machine_and_day(change, reason):
    here = {"cpu": "A", "torch": "2.0", "usable_cores": 2, "gpus": [], "threads": 1}
    fitting = {
        "made": "2026-01-03T09:00:00",
        "quick": False,
        "model": "vgg11",
        "ranks": default_ranks(),
        "ranks_here": default_ranks(),
        "others_share": 0.0,
        "machine": here | {"threads": 2},
    }
    calibration = dataclasses.replace(load_calibration(reference_path()), **fitting | change)
    found = reason_to_calibrate(
        calibration, model="vgg11", here=here, now=datetime(2026, 1, 3, 20, 0)
    )
    assert reason in found
    assert bool(reason) == bool(found)


def compare(settings, *, reports):
    """Run a comparison as ``lab compare`` does, without its report."""
    executors = Executors(max(settings.nodes), settings.rates)
    folder, results = open_comparison(settings, reports=reports)
    run_comparison(settings, folder, results, executors)
    return folder, results


def asks(**changes):
    """Return the settings of a small comparison, with these changes."""
    return Settings(
        **{"nodes": (1, 2), "sync": SYNCS, "steps": 4, "warmup": 1, "repeats": 2} | changes
    )


def test_the_unfinished_comparison_that_began_last_is_resumed(tmp_path):
    """Its recorded time counts, not the folder's name."""
    for name, created in (("z", "2026-01-01T00:00:00"), ("a", "2026-02-01T00:00:00")):
        folder, results = open_comparison(asks(), reports=tmp_path, anew=True)
        (folder / "results.json").write_text(json.dumps(results | {"created": created}))
        folder.rename(tmp_path / f"compare-{name}")
    assert open_comparison(asks(), reports=tmp_path)[0] == tmp_path / "compare-a"


# --- what is started ---


@pytest.mark.parametrize("sync", STRATEGIES)
def test_every_strategy_is_started_by_a_command_that_its_part_understands(sync, tmp_path):
    """The part's own parser accepts the command, with the part's own choices of strategies."""
    settings = Settings(
        nodes=(1 if sync == "none" else 3,), sync=(sync,), steps=7, warmup=2, batch_size=90
    )
    [cell] = plan_cells(settings)
    command = node_command(Run(tmp_path, settings, cell, 1))
    part = Path(command[0]).parent.name
    assert part == part_of(sync)
    choices = {"PartOne": ("none",), "PartTwo": BY_HAND, "PartThree": BUILT_IN}[part]
    config = parse_arguments(part, "", choices, command[1:])
    assert config.sync == sync
    assert (config.batch_size, config.untimed_steps, config.timeline, config.measure_only) == (
        90,
        2,
        True,
        True,
    )
    assert config.max_steps == 2 + 7 + (4 if sync == "local_sgd" else 1)


def test_a_strategy_with_several_sizes_of_buckets_has_a_cell_for_each(tmp_path):
    """Each has its own id and folder, the one in which its part writes, and its own --bucket-mb."""
    names = ("ddp", "ddp-auto", "ddp-9", "sharded-0.5")
    settings = Settings(nodes=(2,), sync=names, flags=("--bucket-mb", "4"), repeats=1)
    cells = plan_cells(settings)
    with pytest.raises(UserError, match=r"ddp-auto.*--no-predict"):
        choose_buckets({"prediction": None, "cells": cells})
    predicted = {"ddp-auto-n2": {"bucket_mb": 14.0}}
    [line] = choose_buckets({"prediction": {"cells": predicted}, "cells": cells})
    assert "14 MiB" in line
    runs = [Run(tmp_path, settings, cell, 0) for cell in cells]
    assert [run.cell["id"] for run in runs] == [f"{name}-n2" for name in names]
    assert all(run.cell["exact"] for run in runs)
    configs = [
        parse_arguments(
            part_of(run.cell["sync"]),
            "",
            BUILT_IN if part_of(run.cell["sync"]) == "PartThree" else BY_HAND,
            node_command(run)[1:],
        )
        for run in runs
    ]
    assert [(config.sync, config.bucket_mb) for config in configs] == [
        ("ddp", 4.0),
        ("ddp", 14.0),
        ("ddp", 9.0),
        ("sharded", 0.5),
    ]
    written = [config.reports_folder / config.experiment / config.run_name for config in configs]
    assert written == [run.path for run in runs]
    assert len(set(written)) == len(names)


def test_all_runs_of_a_comparison_have_equally_many_steps():
    """The learning rate follows the schedule, so more steps would be a different training."""
    settings = Settings(
        nodes=(2,), sync=("all_reduce", "local_sgd"), flags=("--averaging-period", "6")
    )
    steps = {
        command[command.index("--max-steps") + 1]
        for cell in plan_cells(settings)
        for command in [node_command(Run(Path("x"), settings, cell, 0))]
    }
    assert steps == {str(5 + 30 + 6)}


def test_one_node_comes_once_and_weak_scaling_gives_each_node_the_same():
    found = {
        cell["id"]: cell["batch_size"]
        for cell in plan_cells(asks(nodes=(4, 1, 2), scaling="weak", batch_size=32))
    }
    assert found == {
        "none-n1": 32,
        "all_reduce-n2": 64,
        "ring-n2": 64,
        "all_reduce-n4": 128,
        "ring-n4": 128,
    }


def test_names_for_several_strategies():
    assert strategies(["all"]) == tuple(STRATEGIES)
    assert set(STRATEGIES) - set(strategies(["exact", "topk"])) == {
        "ddp_fp16",
        "ddp_powersgd",
        "local_sgd",
    }


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
    settings = asks(rates=("200mbit", "1 Gbit"), compute="measured", nodes=(1, 4))
    assert [(cell["id"], cell["rate"]) for cell in plan_cells(settings)] == [
        ("none-n1", None),
        ("all_reduce-n4-200mbit", "200mbit"),
        ("ring-n4-200mbit", "200mbit"),
        ("all_reduce-n4-1gbit", "1 Gbit"),
        ("ring-n4-1gbit", "1 Gbit"),
    ]
    folders = {Run(Path("x"), settings, cell, 0).path for cell in plan_cells(settings)}
    assert len(folders) == 5
    command = node_command(Run(Path("here"), settings, plan_cells(settings)[1], 0))
    assert command[command.index("--compute") + 1] == "here/profile.json", (
        "the comparison's own copy"
    )
    config = parse_arguments("PartTwo", "", BY_HAND, command[1:])
    assert config.only_times
    assert "--compute" not in node_command(Run(Path("here"), asks(), plan_cells(asks())[0], 0))


def test_without_a_profile_nothing_begins(tmp_path):
    with pytest.raises(
        UserError,
        match=r"profile .*nowhere.json cannot .*: `lab calibrate --profile nowhere` measures one",
    ):
        compare(asks(compute=str(tmp_path / "nowhere.json")), reports=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_where_no_cluster_is_allowed_one_message_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("lab.cluster.tools.namespaces_refused", lambda: "this kernel has none")
    with pytest.raises(UserError, match="cannot emulate a cluster: this kernel has none"):
        compare(asks(rates=("1gbit",)), reports=tmp_path)
    assert list(tmp_path.iterdir()) == []


@needs_cluster
def test_cells_with_a_rate_run_on_one_cluster_each(fake_parts, tmp_path, monkeypatch):
    entered = []
    real = Cluster.__enter__
    monkeypatch.setattr(Cluster, "__enter__", lambda self: entered.append(self.nodes) or real(self))
    # The fake part does not need torch.
    monkeypatch.setattr("lab.compare.executors.Cluster", partial(Cluster, fresh=True))
    settings = asks(nodes=(1, 2, 3), rates=("1gbit",), repeats=1, flags=("--fail", "all_reduce"))
    folder, results = compare(settings, reports=tmp_path)
    assert entered == [1, 3], "over loopback, and once with the largest number of nodes"
    status = {cell["id"]: cell["status"] for cell in results["cells"]}
    assert status == {
        "none-n1": "done",
        "all_reduce-n2-1gbit": "failed",
        "ring-n2-1gbit": "done",
        "all_reduce-n3-1gbit": "failed",
        "ring-n3-1gbit": "done",
    }
    message = next(
        cell["message"] for cell in results["cells"] if cell["id"] == "all_reduce-n2-1gbit"
    )
    assert message.startswith(
        "rank 1 ended with status 1: ValueError: the test wants it (its output: "
    )
    assert (results["emulated"], results["settings"]["rates"]) == (True, ["1gbit"])
    assert (folder / "logs" / "ring-n3-1gbit-1" / "node2.log").exists()


def test_nothing_to_compare():
    with pytest.raises(UserError, match="add a strategy, or 1 to --nodes"):
        plan_cells(asks(nodes=(2,), sync=("none",)))


# --- turns, and what is kept ---


def test_cells_take_turns_and_medians_are_those_of_the_runs(fake_parts, tmp_path):
    folder, results = compare(asks(), reports=tmp_path)
    assert fake_parts == [
        ("none-n1", 0),
        ("all_reduce-n2", 0),
        ("ring-n2", 0),
        ("ring-n2", 1),
        ("all_reduce-n2", 1),
        ("none-n1", 1),
    ], "the second repeat goes the other way round"
    assert results == read_results(folder / "results.json")
    assert results["finished"]
    ring = next(cell for cell in results["cells"] if cell["id"] == "ring-n2")
    assert ring["status"] == "done"
    assert (ring["median"]["step"], ring["median"]["wait"]) == (0.83, 0.04)
    assert (ring["median"]["root_bytes_sent"], ring["median"]["others_bytes_sent"]) == (10.0, 11.0)
    assert ring["repeats"][0]["losses"][1] == [2, 1.0]
    assert set(results["timelines"]) == {"none-n1", "all_reduce-n2", "ring-n2"}


def test_a_failed_cell_says_why_and_stops_nothing(fake_parts, tmp_path):
    folder, results = compare(asks(flags=("--fail", "all_reduce")), reports=tmp_path)
    status = {cell["id"]: cell["status"] for cell in results["cells"]}
    assert status == {"none-n1": "done", "all_reduce-n2": "failed", "ring-n2": "done"}
    message = next(cell["message"] for cell in results["cells"] if cell["sync"] == "all_reduce")
    assert "rank 1 ended with status 1: ValueError: the test wants it" in message, (
        "the cause, not rank 0's echo"
    )
    assert not results["finished"]
    fake_parts.clear()
    again, _ = compare(asks(flags=("--fail", "all_reduce")), reports=tmp_path)
    assert again == folder
    assert {name for name, _ in fake_parts} == {"all_reduce-n2"}, (
        "what failed is tried again, what is done is not"
    )


def test_other_settings_and_foreign_results_are_left_alone(fake_parts, tmp_path, capsys):
    first, results = compare(asks(repeats=1, flags=("--fail", "ring")), reports=tmp_path)
    second, _ = compare(asks(repeats=1, batch_size=128), reports=tmp_path)
    assert second != first
    cut = tmp_path / "compare-cut"
    cut.mkdir()
    (cut / "results.json").write_text(json.dumps(results)[:200])
    newer = tmp_path / "compare-newer"
    newer.mkdir()
    (newer / "results.json").write_text(json.dumps(results | {"format": 99}))
    capsys.readouterr()
    third, _ = compare(asks(repeats=1, flags=("--fail", "ring")), reports=tmp_path)
    out = " ".join(capsys.readouterr().out.split())
    assert third == first
    assert f"{cut}/results.json is cut off or not JSON" in out
    assert "format 99, this version reads 1" in out
    assert len((cut / "results.json").read_text()) == 200
    environment = read_results(first / "results.json")["environment"]
    changed = read_results(first / "results.json") | {"environment": environment | {"torch": "1.0"}}
    (first / "results.json").write_text(json.dumps(changed))
    fourth, _ = compare(asks(repeats=1, flags=("--fail", "ring")), reports=tmp_path)
    assert fourth != first
    assert "was started with another torch" in " ".join(capsys.readouterr().out.split())


def test_time_to_accuracy_is_training_time_up_to_the_first_epoch_that_reaches_it(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"steps_per_epoch": 22, "batch_size": 64, "seed": 0, "world_size": 1, "sync": "none"}
        )
    )
    epochs = [
        {"epoch": number, "seconds": 10.0 + number, "val_accuracy": accuracy}
        for number, accuracy in enumerate([0.4, 0.62, 0.5, 0.9], start=1)
    ]
    (tmp_path / "epochs.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in epochs))
    reached = time_to_accuracy(tmp_path, 0.6)
    assert reached == {"seconds_to_accuracy": 23.0, "steps_to_accuracy": 44}
    never = time_to_accuracy(tmp_path, 0.95)
    assert never == {"seconds_to_accuracy": None, "steps_to_accuracy": None}


# --- real runs ---


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_runs_from_the_command_line_to_the_report(tmp_path):
    """One and two ranks train the digits with five strategies, up to the report.

    The exact strategies' losses agree, the bytes sent equal the formulas', and the report's
    files are written.
    """
    flags = (
        "--nodes 1 2 --sync gather_scatter ring ddp topk --steps 2 --warmup 1 --repeats 1 "
        "--dataset digits --batch-size 16 --no-predict --output-dir"
    ).split()
    done = start_lab("compare", *flags, tmp_path, cold=True).end(timeout_seconds=500)
    assert done.status == 0, done
    [folder] = tmp_path.glob("compare-*")
    results = read_results(folder / "results.json")
    cells = {cell["id"]: cell for cell in results["cells"]}
    assert {cell["status"] for cell in cells.values()} == {"done"}
    losses = {
        name: [loss for _, loss in cell["repeats"][0]["losses"]] for name, cell in cells.items()
    }
    assert len(losses["ring-n2"]) == 4
    assert losses["gather_scatter-n2"] == pytest.approx(losses["ring-n2"], rel=1e-3)
    assert losses["ddp-n2"] == pytest.approx(losses["ring-n2"], rel=1e-3)
    assert losses["none-n1"][0] == pytest.approx(losses["ring-n2"][0], rel=0.05), (
        "the same weights and images, in two shards"
    )
    sizes = GradientSize.of(build_model("vgg11", 10).parameters())
    for name in ("gather_scatter", "ring", "ddp", "topk"):
        strategy = build_sync(name)
        sent = [float(strategy.plan.bytes_sent(sizes, rank, 2)) for rank in range(2)]
        assert [
            rank["bytes_sent"] for rank in cells[f"{name}-n2"]["repeats"][0]["ranks"]
        ] == sent, name
    for name in ("report.html", "table.md", "table.csv"):
        assert (folder / name).stat().st_size > 500
    runs = sorted(folder.glob("runs/*/n2-1"))
    again = start_lab("report", *runs, "--output-dir", tmp_path, cold=True).end()
    assert again.status == 0, again
    [reported] = tmp_path.glob("report-*")
    [ring] = [
        cell for cell in read_results(reported / "results.json")["cells"] if cell["sync"] == "ring"
    ]
    assert ring["median"] == cells["ring-n2"]["median"]


# --- stopped runs ---


def _workers(marker):
    return {int(path.name.rsplit("-", 1)[1]) for path in marker.parent.glob(f"{marker.name}-*")}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGINT, id="interrupted"),
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.slow),
    ],
)
def test_stopped_in_the_middle_nothing_is_left_and_it_goes_on(how, tmp_path):
    marker = tmp_path / "go"
    asked = "--nodes 1 3 --sync ring --steps 4 --warmup 1 --repeats 1 --no-predict --output-dir"
    command = [sys.executable, str(FAKE), "lab", "compare", *asked.split(), str(tmp_path)]
    environment = user_environment(FLAGS=f"--wait-for {marker}")
    process = Started(command, cwd=tmp_path, env=environment, forked=True)
    wait_until(lambda: len(_workers(marker)) == 1, "the single node")
    marker.touch()  # the single node ends, and the three nodes start
    wait_until(lambda: list(tmp_path.glob("compare-*/runs/*/n1-1/ranks.json")), "its files")
    marker.unlink()
    wait_until(lambda: len(_workers(marker)) == 4, "the three nodes")
    process.send(how)
    ended = process.end()
    assert ended.status == (130 if how == signal.SIGINT else -9), ended.out + ended.err
    wait_until(
        lambda: not any(psutil.pid_exists(pid) for pid in _workers(marker)), "the end of all nodes"
    )
    [results] = tmp_path.glob("compare-*/results.json")
    status = {cell["id"]: cell["status"] for cell in read_results(results)["cells"]}
    assert status == {"none-n1": "done", "ring-n3": "pending"}
    if how == signal.SIGINT:
        assert (results.parent / "report.html").read_text() == "none-n1", (
            "what is finished is shown"
        )
    before = len(_workers(marker))
    marker.touch()
    again = Started(command, cwd=tmp_path, env=environment, forked=True).end()
    assert again.status == 0, again
    assert "resuming " in again.out
    assert len(_workers(marker)) == before + 3, "only the three nodes that were missing"
    assert read_results(results)["finished"]
