"""launch/slurm.sbatch and launch/slurm-assignment.sbatch on a Slurm cluster of four nodes on this machine: each job ends with the
weights and metrics of a run without Slurm, also after a lost worker, a signal and a lost node."""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from common.checkpoint import checkpoints_by_age, load_checkpoint
from lab.cluster import Cluster
from tests.cluster.conftest import until, with_word
from tests.engines import slurm_cluster
from tests.engines.slurm_cluster import SlurmCluster
from tests.helpers import ROOT, make_image_folder

pytestmark = pytest.mark.skipif(slurm_cluster.refused() is not None, reason=f"no Slurm here: {slurm_cluster.refused()}")

STEPS = 8
SETTINGS = ("--dataset", "digits", "--batch-size", 16, "--max-steps", STEPS, "--threads", 1, "--log-every", 1,
            "--checkpoint-every", 3, "--keep-checkpoints", 2)
ALL_REDUCE, DDP = ("PartTwo/main.py", "--sync", "all_reduce"), ("PartThree/main.py",)
TORCHRUN, ASSIGNMENT = "launch/slurm.sbatch", "launch/slurm-assignment.sbatch"


class Jobs:
    """Jobs on one cluster, whose runs and output lie in one folder.

    Parameters
    ----------
    folder : of the ranks' output, ``--output-dir``.
    """

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder

    def submit(self, options: str, script: str, command: tuple, *more: object) -> str:
        """Submit a job of the tests' settings; return its number."""
        return self.slurm.sbatch("--output", self.folder / "%j.out", *options.split(), script, *command, *SETTINGS,
                                 "--output-dir", self.folder, *more)

    def run(self, job: str) -> Path:
        """The folder of a job's run."""
        [folder] = self.folder.glob(f"*/slurm-{job}/config.json")
        return folder.parent

    def finish(self, job: str) -> str:
        """Wait until a job has ended well; return its output."""
        state = self.slurm.wait(job)
        assert state == "COMPLETED", self.slurm.output(job)
        return self.slurm.output(job)

    def go_on(self, job: str) -> None:
        """Wait until a job is back in the queue, and let it start."""
        self.slurm.wait_until_requeued(job)
        self.slurm.start_now(job)

    def worker(self, node: int) -> int:
        """The rank on a node: the one process that torchrun has started there."""
        for pid in self.slurm.pids(node):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "torch.distributed.run" in psutil.Process(pid).parent().cmdline()[:3]:
                    return pid
        raise AssertionError(f"no rank runs on node {node}")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as slurm:
        yield Jobs(slurm, tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[tuple, int], Path]]:
    """Runs the same training without Slurm, on loopback; each once."""
    folder = tmp_path_factory.mktemp("alone")
    with Cluster(4, loopback=True, logs=folder) as cluster:
        def run(command: tuple, ranks: int) -> Path:
            name = f"{ranks}-ranks"
            found = list(folder.glob(f"{Path(command[0]).parent}*/{name}"))
            if not found:
                place = ("--master-ip", "{master}", "--master-port", "{port}", "--num-nodes", ranks, "--rank", "{rank}")
                cluster.start(["python", *map(str, (*command, *SETTINGS, *place, "--output-dir", folder, "--run-name", name))],
                              nodes=range(ranks), cwd=ROOT)
                assert [end.status for end in cluster.wait(limit_seconds=180)] == [0] * ranks, cluster.output(0)
                found = list(folder.glob(f"{Path(command[0]).parent}*/{name}"))
            return found[0]

        yield run


@pytest.fixture(scope="module")
def lost_node(jobs: Jobs) -> str:
    """A job whose first node, which holds its shell, rank 0 and the ranks' meeting, has lost its power after a checkpoint.

    Other tests take it, too: what they do hides the time until Slurm finds out.
    """
    job = jobs.submit("--nodes=2 --nodelist=node[0-1]", TORCHRUN, DDP)
    jobs.slurm.wait_for(job, f"step 4/{STEPS}")
    jobs.slurm.power_off(0)
    return job


def assert_same_training(run: Path, reference: Path) -> None:
    """Weights, momentum, every step's numbers and the evaluation are the same, bit for bit."""
    one, other = (load_checkpoint(checkpoints_by_age(folder / "checkpoints")[0]) for folder in (run, reference))
    assert one["step"] == other["step"] == STEPS
    for name, tensor in other["model_state_dict"].items():
        assert torch.equal(one["model_state_dict"][name], tensor), name
    for index, state in other["optimizer_state_dict"]["state"].items():
        assert torch.equal(one["optimizer_state_dict"]["state"][index]["momentum_buffer"], state["momentum_buffer"]), index
    assert steps(run) == steps(reference)
    assert len(steps(run)) == STEPS
    reports = [json.loads((folder / "report.json").read_text()) | {"checkpoint": ""} for folder in (run, reference)]
    assert reports[0] == reports[1]
    assert json.loads((run / "summary.json").read_text())["ranks_hold_equal_weights"] is True


def steps(run: Path) -> list[dict]:
    """The lines of a run's steps, without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "seconds" not in name} for line in lines]


@pytest.mark.usefixtures("lost_node")
def test_a_killed_worker_is_started_again_by_torchrun(jobs: Jobs, alone: Callable) -> None:
    job = jobs.submit("--nodes=2 --nodelist=node[2-3]", TORCHRUN, DDP)
    jobs.slurm.wait_for(job, f"step 4/{STEPS}")
    os.kill(jobs.worker(3), signal.SIGKILL)
    output = jobs.finish(job)
    assert "going on from" in output
    assert jobs.slurm.job(job)["Restarts"] == "0", "torchrun's restart, not Slurm's"
    assert_same_training(jobs.run(job), alone(DDP, 2))


@pytest.mark.usefixtures("lost_node")
def test_sigterm_saves_and_the_requeued_job_goes_on_in_its_folder(jobs: Jobs, alone: Callable) -> None:
    """One is told by its shell, as before the time limit, the other by its step; and what an earlier job left is not taken up."""
    shell = jobs.submit("--nodes=2 --nodelist=node[2-3]", ASSIGNMENT, ALL_REDUCE)
    step = jobs.submit("--nodes=2 --nodelist=node[2-3]", TORCHRUN, DDP)
    for job, batch in ((shell, ["--batch"]), (step, [])):
        jobs.slurm.wait_for(job, f"step 3/{STEPS}")
        jobs.slurm.run("scancel", *batch, "--signal=TERM", job)
    for job in (shell, step):
        jobs.go_on(job)
    for job, reference in ((shell, alone(ALL_REDUCE, 2)), (step, alone(DDP, 2))):
        output = jobs.finish(job)
        assert "stopped and saved; back to the queue, time 1 of at most 20" in output
        assert output.count("going on from") == 1
        assert jobs.slurm.job(job)["Restarts"] == "1"
        assert_same_training(jobs.run(job), reference)


def test_a_lost_batch_node_leads_to_a_start_on_others(jobs: Jobs, lost_node: str, alone: Callable) -> None:
    try:
        jobs.go_on(lost_node)
        output = jobs.finish(lost_node)
    finally:
        jobs.slurm.power_on(0)
    assert jobs.slurm.job(lost_node)["BatchHost"] != "node0"
    assert "going on from" in output
    assert_same_training(jobs.run(lost_node), alone(DDP, 2))


def test_both_scripts_train_on_four_nodes_and_on_two_with_two_cards_each(jobs: Jobs, alone: Callable) -> None:
    """All at once, each node shared by two or three of them, and no node knows another's name."""
    plain = jobs.submit("--nodes=4", TORCHRUN, DDP)
    assignment = jobs.submit("--nodes=4", ASSIGNMENT, ALL_REDUCE)
    cards = jobs.submit("--nodes=2 --gpus-per-node=2", TORCHRUN, DDP)
    for job, command in ((plain, DDP), (assignment, ALL_REDUCE), (cards, DDP)):
        output = jobs.finish(job)
        assert "batch: 4 a rank x 4 ranks = 16 global" in output
        assert output.count(f"step {STEPS}/{STEPS}") == 1, "rank 0's lines alone"
        assert_same_training(jobs.run(job), alone(command, 4))
    ranks = json.loads((jobs.run(assignment) / "ranks.json").read_text())
    assert "node3" in json.dumps(ranks)


def test_the_dataset_is_staged_once_a_node_and_taken_away_again(jobs: Jobs) -> None:
    images = make_image_folder(jobs.folder / "images")
    job = jobs.slurm.sbatch("--output", jobs.folder / "%j.out", "--nodes=2", ASSIGNMENT, *ALL_REDUCE, "--dataset", "folder",
                            "--data-dir", images, "--max-steps", 1, "--threads", 1, "--output-dir", jobs.folder,
                            environment={"STAGE_DATA": "1", "TMPDIR": str(jobs.slurm.own)})
    jobs.finish(job)
    staged = jobs.slurm.own / f"slurm-{job}-data"
    assert json.loads((jobs.run(job) / "config.json").read_text())["data_dir"] == str(staged)
    assert [list((jobs.slurm.folder / f"disk-node{node}").iterdir()) for node in range(4)] == [[]] * 4


def test_the_first_failure_is_shown_and_the_others_lie_in_their_files(jobs: Jobs, tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text("import sys, time\nrank = int(sys.argv[-1])\nprint('line of', rank)\ntime.sleep(0 if rank == 2 else 2)\n"
                       "sys.exit(f'error: {rank} broke')\n")
    job = jobs.slurm.sbatch("--output", tmp_path / "out", "--nodes=4", ASSIGNMENT, program,
                            environment={"LAB_OUTPUT": str(tmp_path)})
    assert jobs.slurm.wait(job) == "FAILED"
    output = jobs.slurm.output(job)
    assert "task 2, which ended first, wrote:\nline of 2\nerror: 2 broke\n" in output
    assert [output.count(f"line of {rank}\n") for rank in range(4)] == [1, 0, 1, 0]
    assert [(tmp_path / f"slurm-{job}" / f"task{rank}.log").read_text() for rank in range(4)] == [
        f"line of {rank}\nerror: {rank} broke\n" for rank in range(4)]


def test_a_job_that_has_gone_back_often_enough_stays(jobs: Jobs, tmp_path: Path) -> None:
    """The program asks for its own end as a scheduler would; REQUEUES counts the starts."""
    program = tmp_path / "stops.py"
    program.write_text("import sys\nsys.exit(75)\n")
    job = jobs.slurm.sbatch("--output", tmp_path / "out", "--nodes=1", ASSIGNMENT, program,
                            environment={"LAB_OUTPUT": str(tmp_path), "REQUEUES": "1"})
    jobs.go_on(job)
    assert jobs.slurm.wait(job) == "FAILED"
    assert jobs.slurm.job(job)["Restarts"] == "1"
    last = jobs.slurm.output(job).splitlines()[-1]
    assert last.startswith("error: stopped and saved; the job has gone back to the queue 1 times (REQUEUES)")


def test_a_cancelled_job_does_not_come_back(jobs: Jobs, tmp_path: Path) -> None:
    program = tmp_path / "waits.py"
    program.write_text("import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
                       "print('waits', flush=True)\ntime.sleep(600)\n")
    job = jobs.slurm.sbatch("--output", tmp_path / "out", "--nodes=2", ASSIGNMENT, program,
                            environment={"LAB_OUTPUT": str(tmp_path)})
    jobs.slurm.wait_for(job, "waits")
    jobs.slurm.run("scancel", job)
    assert jobs.slurm.wait(job) == "CANCELLED"
    until(lambda: "Slurm has cancelled the job" in jobs.slurm.output(job), what="the script says so")
    assert jobs.slurm.job(job)["Restarts"] == "0"


def test_bad_input_is_one_clear_message(jobs: Jobs) -> None:
    """All jobs at once; none of them starts a rank."""
    own = jobs.slurm.own
    cases = {
        ("--nodes=1", ASSIGNMENT): "no command: give it behind the script",
        ("--nodes=2", TORCHRUN, "--nnodes", "4", *DDP): "--nnodes in the command: leave it out; this job's 2 nodes are filled in",
        ("--nodes=2", ASSIGNMENT, *ALL_REDUCE, "--num-nodes=4"): "--num-nodes=4 in the command: leave it out",
        ("--ntasks-per-node=2", TORCHRUN, *DDP): "2 tasks a node, and each would take a whole node's place",
        ("--nodes=2", TORCHRUN, *DDP, "--epochs", "none"): "PartThree/main.py: argument --epochs: ",
        ("--nodes=2", TORCHRUN, *DDP, "--dataset", "digits", "--output-dir", own): f"{own} is another folder here than on the",
        ("--nodes=2", TORCHRUN, *DDP, "--data-dir", own, "--mirror", "http://127.0.0.1:9/"): f"cifar10 is not in {own} (",
    }
    submitted = {jobs.slurm.sbatch("--output", jobs.folder / "%j.out", *case): message for case, message in cases.items()}
    nowhere = jobs.slurm.sbatch("--output", jobs.folder / "%j.out", ASSIGNMENT, *ALL_REDUCE, environment={"PYTHON": "/no/python"})
    elsewhere = jobs.slurm.sbatch("--output", jobs.folder / "%j.out", ROOT / TORCHRUN, *DDP, cwd=jobs.folder)
    submitted |= {nowhere: "/no/python is not on node", elsewhere: f"no launch/slurm-common.sh in {jobs.folder}: submit from the"}
    for job, message in submitted.items():
        assert jobs.slurm.wait(job) == "FAILED"
        output = jobs.slurm.output(job)
        assert any(line.startswith("error: ") and message in line for line in output.splitlines()), f"{message!r}: {output}"
        assert "Traceback" not in output
    assert list(jobs.slurm.folder.glob("disk-node*/*.token")) == []
    assert "start it with sbatch" in jobs.slurm.run("bash", TORCHRUN, *DDP, check=False)


def test_a_folder_of_one_node_is_good_enough_where_the_job_never_goes_back(jobs: Jobs) -> None:
    job = jobs.slurm.sbatch("--output", jobs.folder / "%j.out", "--nodes=2", "--no-requeue", ASSIGNMENT, *ALL_REDUCE, "--dataset",
                            "digits", "--output-dir", jobs.slurm.own, "--max-steps", 1, "--measure-only", "--threads", 1)
    assert "nodes           2" in jobs.finish(job)


def test_nothing_is_left_when_the_cluster_ends(tmp_path: Path) -> None:
    """Daemons of Slurm, what a job has left running in a session of its own, mounts: all gone."""
    word = f"{os.getpid()}.5"
    mounts = Path("/proc/self/mounts").read_text()
    with SlurmCluster(tmp_path / "slurm", nodes=1) as slurm:
        job = slurm.sbatch("--output", tmp_path / "out", "--wrap", f"setsid sleep {word} & echo started; wait")
        slurm.wait_for(job, "started")
        until(lambda: with_word(word), what="the sleeper")
        assert with_word(str(tmp_path / "slurm" / "slurm.conf")), "the daemons have it in their environment"
        before = {path.name for path in Path("/etc/slurm").iterdir()} if Path("/etc/slurm").exists() else set()
    until(lambda: not with_word(word) and not with_word(str(tmp_path / "slurm" / "slurm.conf")), what="all end")
    assert Path("/proc/self/mounts").read_text() == mounts
    assert ({path.name for path in Path("/etc/slurm").iterdir()} if Path("/etc/slurm").exists() else set()) == before
