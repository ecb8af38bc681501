"""A comparison as jobs: what a plan fixes, what a run may write, what ``lab report`` shows."""

import json
import os
import re
import shlex
import signal
import sys
from functools import partial
from operator import attrgetter
from pathlib import Path

import psutil
import pytest

from common.utils.paths import REPOSITORY
from common.utils.source_hash import code_facts
from lab.cli import main
from lab.compare import cells as cells_module
from lab.compare import jobs, prediction, reporting
from lab.compare.jobs import merge_results, plan_comparison, planned_runs
from lab.compare.runner import open_comparison
from lab.compare.settings import Settings
from lab.comparison.record import read_comparison, write_comparison
from lab.predict.calibration_file import load_calibration, reference_path
from tests.helpers import Started, fake_part, user_environment, wait_until
from tests.helpers.hostile import untouched

SMALL = Settings(nodes=(1, 2), sync=("all_reduce", "ring"), steps=4, warmup=1, repeats=2)


@pytest.fixture(autouse=True)
def _fake_parts(monkeypatch):
    monkeypatch.setattr(cells_module, "part_of", lambda sync: "Part")


def asks(**changes):
    """Return the settings of a small comparison; without changes it has runs 0 to 5."""
    return Settings(**vars(SMALL) | changes)


def plan(reports, *, predicts=False, **changes):
    """Make a plan; return its folder."""
    how = {"anew": False, "command": "lab compare --plan", "predicts": predicts}
    return plan_comparison(asks(**changes), reports=reports, **how)[0]


def start(folder, number, *, nodes=2, rank=0, flags=""):
    """Start one node of a run as a launcher does, using the fake part with ``flags``."""
    place = f"--run {number} -M 127.0.0.1 -N {nodes} -R {rank}".split()
    command = [sys.executable, fake_part.__file__, "lab", "run-cell", str(folder), *place]
    return Started(command, cwd=folder, env=user_environment(FLAGS=flags), forked=True)


def run(folder, number, *, nodes=2, flags=""):
    """Do one run on all of its nodes; return exit statuses and outputs by rank."""
    ranks = [start(folder, number, nodes=nodes, rank=rank, flags=flags) for rank in range(nodes)]
    ended = [one.end() for one in ranks]
    return [one.status for one in ended], [one.out + one.err for one in ended]


def results_of(folder):
    return read_comparison(folder / "results.json")


def merged(folder):
    """Merge the runs as ``lab report`` does; return the results."""
    return merge_results(folder, results_of(folder))


def states(results):
    return {cell.id: cell.status for cell in results.cells}


# --- the plan ---


def test_a_plan_has_the_runs_in_turns_and_goes_on(tmp_path, monkeypatch, capsys):
    asked = "--nodes 1 2 --sync all_reduce ring --repeats 2 --no-predict --output-dir"
    command = ["compare", "--plan", *asked.split(), str(tmp_path)]
    assert main(command) == 0
    [folder] = tmp_path.glob("compare-*")
    results = results_of(folder)
    first = [("none-n1", 0), ("all_reduce-n2", 0), ("ring-n2", 0)]
    second = [("ring-n2", 1), ("all_reduce-n2", 1), ("none-n1", 1)]
    keys = [run.key for run in planned_runs(folder, results)]
    assert keys == first + second, "as lab compare takes turns"
    assert set(states(results).values()) == {"pending"}
    assert [path.name for path in folder.iterdir()] == ["results.json"], "nothing was run"
    out = capsys.readouterr().out
    assert "6 of 6 runs to do" in out
    assert "on 1 node: 0,5; on 2 nodes: 1-4" in out
    sbatch = f"sbatch --nodes=2 --array=0-5%1 launch/slurm-compare.sbatch {folder}"
    assert sbatch in out or Path.cwd() != REPOSITORY
    monkeypatch.setattr(jobs, "IN_CHECKOUT", False)
    assert main(command) == 0
    assert list(tmp_path.glob("compare-*")) == [folder], "the same command finds the same plan"
    out = capsys.readouterr().out
    assert "an installed copy has no job script. Plan in a checkout" in out
    assert "sbatch --nodes" not in out
    assert f"lab run-cell {folder} --run K --master-ip IP --num-nodes N --rank R" in out
    assert merged(folder).warnings[-1].endswith("--rank R with K = 0-5")


def test_what_a_plan_prints_can_be_copied_from_a_folder_with_a_blank(tmp_path):
    folder = plan(tmp_path / "my reports")
    printed = jobs.describe_plan(folder, merged(folder))
    slurm, by_hand, report = (shlex.split(line, comments=True) for line in printed[-3:])
    assert (slurm[-1], by_hand[4:6]) == (str(folder), [str(folder), "--run"])
    assert report[-3:] == ["lab", "report", str(folder)]


def test_plans_of_other_code_and_comparisons_of_this_machine_are_left_alone(tmp_path, monkeypatch):
    first = plan(tmp_path)
    alone, _ = open_comparison(asks(), reports=tmp_path)
    assert alone != first, "lab compare runs no plan's runs"
    assert plan(tmp_path) == first, "nor does a plan go on with what lab compare began"
    changed = {"lab/compare/cells.py": "another"}
    monkeypatch.setattr(jobs, "code_facts", lambda *files: code_facts(*files) | changed)
    assert plan(tmp_path) not in (first, alone)


@pytest.mark.parametrize("over_loopback", [True, False])
def test_the_prediction_is_fixed_before_the_first_run(over_loopback, tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    calibration = load_calibration(reference_path())
    content = calibration.as_json() | ({} if over_loopback else {"ranks_here": 1})
    path.write_text(json.dumps(content))
    for module in (jobs, prediction):
        monkeypatch.setattr(module, "calibration_path", lambda: path)
    cells = results_of(plan(tmp_path, predicts=True, repeats=1)).prediction.cells
    alone, half = (calibration.compute.at(samples, ranks_here=1).seconds for samples in (256, 128))
    assert cells["none-n1"].step_seconds == pytest.approx(alone)
    assert cells["ring-n2"].compute_seconds == pytest.approx(half), "each is its own machine"
    assert cells["none-n1"].in_scope
    assert cells["ring-n2"].in_scope != over_loopback, "memory is no network"
    (plan(tmp_path) / "logs").mkdir()
    later = results_of(plan(tmp_path, predicts=True))
    assert later.prediction is None, "a run has begun: too late"


# --- what cannot run ---


def test_each_mistake_has_one_message(tmp_path, capsys):
    folder = plan(tmp_path)
    alone, _ = open_comparison(asks(), reports=tmp_path)
    (empty := tmp_path / "empty").mkdir()
    for command, message in (
        (f"{folder} --run 6", "--run: got 6, the plan in .* has runs 0 to 5"),
        (f"{folder} --run -1", "--run: got -1"),
        (f"{folder} --run 1 -N 2 -R 2", "--rank: got 2 of --num-nodes 2"),
        (f"{empty}/nowhere --run 0", "nowhere is no plan on .*: .* all nodes share"),
        (f"{empty} --run 0", "empty is no plan .*make one with lab compare --plan"),
        (f"{alone} --run 0", "is a comparison that lab compare runs itself, not a plan"),
    ):
        with untouched(tmp_path):
            assert main(["run-cell", *command.split()]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert re.search(message, error), error
    by_rank = f"--plan --ranks 3 --sync ring --output-dir {tmp_path}/ranks".split()
    assert main(["compare", *by_rank]) == 0
    [results] = (tmp_path / "ranks").glob("compare-*/results.json")
    assert json.loads(results.read_text())["settings"]["nodes"] == [3]
    with untouched(tmp_path):
        assert main(["compare", *by_rank, "--ranks-per-node", "2"]) == 2
    capsys.readouterr()
    emulated = f"--plan --nodes 2 --rate 1gbit --output-dir {tmp_path}"
    with untouched(tmp_path):
        assert main(["compare", *emulated.split()]) == 2
    assert "--plan runs on real nodes, whose links cannot be set" in capsys.readouterr().err


def test_a_run_that_its_job_cannot_do_is_named_in_the_report(tmp_path, capsys):
    folder = plan(tmp_path)
    results = results_of(folder)
    results.plan.code["common/sync/ring.py"] = "another"
    for place, message in (
        ("--run 1 -M 127.0.0.1", "needs 2 nodes, and there is 1: .*sbatch --nodes=2"),
        ("--run 1 -N 2", "give --master-ip, --num-nodes and --rank on each"),
        ("--run 0", r"has other code than the plan \(common/sync/ring.py\)"),
    ):
        assert main(["run-cell", str(folder), *place.split()]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert re.search(message, error), error
        [failed] = [cell for cell in merged(folder).cells if cell.status == "failed"]
        assert re.search(message, failed.message)
        (folder / "logs").rename(tmp_path / f"logs of {place}")
        write_comparison(folder / "results.json", results)


# --- runs ---


def test_a_run_writes_its_own_folders_alone_and_is_not_done_twice(tmp_path):
    folder = plan(tmp_path)
    before = (folder / "results.json").stat().st_mtime_ns
    statuses, outputs = run(folder, 2, nodes=3)
    assert statuses == [0, 0, 0]
    times = "0.830 s per step, exposed communication 0.100 s"
    assert outputs == [f"run 2 (ring on 2 ranks, repeat 1): {times}\n", "", ""]
    assert (folder / "results.json").stat().st_mtime_ns == before, "lab report writes it"
    files = [path.relative_to(folder) for path in folder.glob("*/**/*") if path.is_file()]
    assert {str(path.parent) for path in files} == {"runs/Part-ring/n2-1", "logs/ring-n2-1"}
    assert Path("logs/ring-n2-1/rank2.txt") not in files, "a node too many has nothing to do"
    results = merged(folder)
    pending = {"none-n1": "pending", "all_reduce-n2": "pending"}
    assert states(results) == pending | {"ring-n2": "partial"}
    assert results.cells[2].medians.step == 0.83
    assert results.warnings[0] == (
        "1 of 6 runs are done; missing: none-n1 (runs 0 and 5), all_reduce-n2 (runs 1 and 4), "
        "ring-n2 (run 3)"
    )
    assert "--array=0-1,3-5%1" in results.warnings[1]
    done = "run 2 (ring on 2 ranks, repeat 1) is already done; nothing to do\n"
    with untouched(folder / "runs"):
        assert run(folder, 2) == ([0, 0], [done, ""])


def test_a_failed_run_says_why_and_is_tried_again(tmp_path):
    folder = plan(tmp_path, nodes=(2,), sync=("ring",), repeats=1)
    statuses, outputs = run(folder, 0, flags="--fail ring")
    assert statuses == [1, 1]
    error = "ValueError: the test wants it"
    cause = f"run 0 (ring on 2 ranks, repeat 1): rank 1 ended with status 1: {error}"
    assert cause in outputs[0], "rank 0 tells the cause, not its echo"
    assert outputs[1] == "", "what many ranks say goes to their files"
    assert error in (folder / "logs" / "ring-n2-1" / "rank1.txt").read_text()
    results = merged(folder)
    assert [warning for warning in results.warnings if cause in warning]
    assert "--array=0%1" in results.warnings[-1]
    assert (states(results), results.finished) == ({"ring-n2": "failed"}, False)
    assert run(folder, 0)[0] == [0, 0]
    results = merged(folder)
    assert (states(results), results.finished) == ({"ring-n2": "done"}, True)
    assert results.warnings == []


def test_under_way_stopped_and_killed(tmp_path):
    """A run refuses a second job, passes SIGTERM to its part, and leaves no process when killed."""
    folder, marker = plan(tmp_path, nodes=(1,), sync=("none",), repeats=1), tmp_path / "go"
    workers = partial(fake_part.waiting, marker)
    first = start(folder, 0, nodes=1, flags=f"--wait-for {marker}")
    wait_until(lambda: len(workers()) == 1, "the part")
    assert merged(folder).warnings == ["0 of 1 runs are done; running: none-n1 (run 0)"]
    ended = start(folder, 0, nodes=1).end()
    assert "this run is already running: another job holds" in ended.out + ended.err
    assert ended.status == 2
    first.send(signal.SIGTERM)
    ended = first.end()
    assert "stopped by SIGTERM, as at a time limit" in ended.out + ended.err
    assert ended.status == 1
    assert "stopped by SIGTERM" in merged(folder).cells[0].message
    second = start(folder, 0, nodes=1, flags=f"--wait-for {marker}")
    wait_until(lambda: len(workers()) == 2, "the part")
    second.send(signal.SIGKILL)
    second.end()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in workers()), "the end of the part")
    killed = "the run did not report its end: it was killed"
    assert killed in merged(folder).cells[0].message
    earlier = workers()
    third = start(folder, 0, nodes=1, flags=f"--wait-for {marker}")
    wait_until(lambda: workers() > earlier, "the part")
    [part] = workers() - earlier
    os.kill(part, signal.SIGKILL)
    assert third.end().status == 1
    assert "rank 0 was killed by SIGKILL" in merged(folder).cells[0].message
    assert run(folder, 0, nodes=1)[0] == [0]
    assert states(merged(folder)) == {"none-n1": "done"}


# --- merged results ---


def fill(folder, numbers, **environment):
    """Do these runs with the fake part, on a machine with this environment."""
    machine = {"cpu": "A", "gpus": [], "torch": "2", "usable_cores": 8} | environment
    for number in numbers:
        one = planned_runs(folder, results_of(folder))[number]
        flags = f"--sync {one.cell.sync} --num-nodes {one.nodes} --run-name {one.path.name}"
        fake_part.main([*flags.split(), "--output-dir", str(folder / "runs")])
        (one.path / "environment.json").write_text(json.dumps(machine))


def test_other_machines_are_groups_of_their_own(tmp_path, capsys, monkeypatch):
    """The report also lists the missing runs, and shows what there is."""
    drawn = []

    def record(folder, results, **options):
        drawn.append(results)

    monkeypatch.setattr(reporting, "write_report", record)
    folder = plan(tmp_path, sync=("ring",))
    fill(folder, [0, 1, 3])
    fill(folder, [2], cpu="B", usable_cores=1)
    results = merged(folder)
    columns = attrgetter("id", "group", "status", "oversubscribed")
    assert [columns(cell) for cell in results.cells] == [
        ("none-n1", 0, "done", False),
        ("ring-n2", 0, "partial", False),
        ("ring-n2-g1", 1, "done", True),  # two ranks of one host, which has one core
    ]
    cpus, cores = (
        "cpu: A in runs 0-1 and 3; B in runs 2",
        "usable_cores: 8 in runs 0-1 and 3; 1 in runs 2",
    )
    assert results.differences == [cpus, cores]
    assert (results.groups["1"]["cpu"], results.environment["cpu"]) == ("B", "A")
    assert "different kinds of machines" in results.warnings[0]
    (folder / "runs" / "Part-ring" / "n2-2").rename(tmp_path / "removed")
    assert reporting.report_on([folder], reports=tmp_path, scaling="strong") == 0
    out = capsys.readouterr().out
    assert "3 of 4 runs are done; missing: ring-n2 (run 2)" in out
    assert "--array=2%1" in out
    assert drawn == [results_of(folder)]
    assert states(drawn[0]) == {"none-n1": "done", "ring-n2": "partial"}
    (folder / "runs").rename(tmp_path / "elsewhere")
    assert merged(folder) == drawn[0], "the runs were cleaned up after the report"
    (folder / "runs").mkdir()
    assert set(states(merged(folder)).values()) == {"pending"}, "removed alone: measured again"
