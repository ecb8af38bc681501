"""``launch/slurm-compare.sbatch`` runs a plan as a job array; the report merges the runs."""

import shlex

import pytest

from lab.compare.jobs import how_to_run, merge_results, plan_comparison, planned_runs
from lab.compare.settings import Settings
from lab.comparison.record import read_comparison
from tests.helpers import ROOT, slurm_cluster
from tests.helpers.slurm_cluster import SlurmCluster

SCRIPT = ROOT / "launch" / "slurm-compare.sbatch"
pytestmark = pytest.mark.skipif(
    slurm_cluster.refused() is not None, reason=f"no Slurm here: {slurm_cluster.refused()}"
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Plan two runs: no exchange on 1 node, all_reduce on 2."""
    size = {"nodes": (1, 2), "steps": 2, "warmup": 1, "repeats": 1, "batch_size": 16}
    flags = ("--threads", "1")
    settings = Settings(sync=("all_reduce",), dataset="digits", flags=flags, **size)
    how = {"anew": False, "command": "", "predicts": False}
    return plan_comparison(settings, reports=tmp_path_factory.mktemp("reports"), **how)[0]


def report(folder):
    return merge_results(folder, read_comparison(folder / "results.json"))


def submit(slurm, options, *arguments):
    """Submit the script with these sbatch options and script arguments; return the job number."""
    output = ("--output", slurm.folder / "%A_%a.out")
    return slurm.sbatch(*output, *options.split(), SCRIPT, *arguments)


def test_what_cannot_run_says_so_once_and_the_report_names_it(slurm, folder):
    small, alone = (submit(slurm, f"--nodes=1 {array}", folder) for array in ("--array=1,7", ""))
    bare, wrong = (submit(slurm, "--nodes=1 --array=0", *plan) for plan in ((), ("nowhere",)))
    for job, message in (
        (f"{small}_1", "run 1 (all_reduce on 2 ranks, repeat 1) needs 2 nodes, and there is 1"),
        (f"{small}_7", "--run: got 7, the plan in"),
        (alone, "no job array: add --array"),
        (f"{bare}_0", "got 0 arguments; give one, the folder of a lab compare --plan"),
        (f"{wrong}_0", "nowhere (in "),
    ):
        assert slurm.wait(job) == "FAILED"
        first = next(line for line in slurm.output(job).splitlines() if line.startswith("error: "))
        assert first.startswith(f"error: {message}")
    states = {cell.id: cell.status for cell in report(folder).cells}
    assert states == {"none-n1": "pending", "all_reduce-n2": "failed"}


@pytest.mark.timeout(400)
def test_an_array_does_the_plan_and_again_what_is_missing(slurm, folder):
    line = shlex.split(how_to_run(planned_runs(folder, read_comparison(folder / "results.json"))))
    assert line[1:3] == ["--nodes=2", "--array=0-1%1"]
    array = submit(slurm, " ".join(line[1:3]), folder)
    for number in range(2):
        assert slurm.wait(f"{array}_{number}") == "COMPLETED", slurm.output(f"{array}_{number}")
    assert "run 0 (none on 1 rank, repeat 1): " in slurm.output(f"{array}_0")
    results = report(folder)
    assert results.finished
    assert results.warnings == []
    cells = {cell.id: cell.repeats[0] for cell in results.cells}
    hosts = {name: [rank.host for rank in cell.ranks] for name, cell in cells.items()}
    assert hosts == {"none-n1": ["node0"], "all_reduce-n2": ["node0", "node1"]}
    first, other = (cell.losses[0][1] for cell in cells.values())
    assert first == pytest.approx(other, rel=0.05), "the same weights and images, in two shards"
    measured = {path: path.stat().st_mtime_ns for path in folder.glob("runs/**/*")}
    again = submit(slurm, "--nodes=2 --array=1", folder)
    assert slurm.wait(f"{again}_1") == "COMPLETED"
    assert "is already done; nothing to do" in slurm.output(f"{again}_1")
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/**/*")} == measured
