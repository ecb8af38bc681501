"""launch/slurm.sbatch and launch/slurm-assignment.sbatch on a local Slurm cluster of four nodes.

Each job ends with the weights and metrics of a run without Slurm, even after a killed worker, a
signal or a lost node.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import psutil
import pytest

from common.checkpoint import checkpoints_by_age, load_checkpoint
from lab.cluster import Cluster
from lab.explain.diagnosis import diagnose
from lab.explain.streams import read_logs
from tests.helpers import ROOT, make_image_folder, slurm_cluster, wait_until
from tests.helpers.cluster import with_word
from tests.helpers.records import json_lines
from tests.helpers.slurm_cluster import SlurmCluster
from tests.helpers.stage import assert_equal_runs

pytestmark = pytest.mark.skipif(
    slurm_cluster.refused() is not None, reason=f"no Slurm here: {slurm_cluster.refused()}"
)

STEPS = 8
# Checkpoint at every step: a run can resume wherever it stops, and is slow enough to be stopped.
SETTINGS = (
    f"--dataset digits --batch-size 16 --max-steps {STEPS} --threads 1 --log-every 1 "
    "--checkpoint-every 1 --keep-checkpoints 2"
).split()
SHORT = ("--max-steps", 3)
ALL_REDUCE, DDP = ("PartTwo/main.py", "--sync", "all_reduce"), ("PartThree/main.py",)
TORCHRUN, ASSIGNMENT = "launch/slurm.sbatch", "launch/slurm-assignment.sbatch"


class Jobs:
    """Jobs on one cluster that share one folder: the ranks' ``--output-dir``."""

    def __init__(self, slurm, folder):
        self.slurm, self.folder = slurm, folder

    def submit(self, options, script, command, *more, environment=None):
        """Submit a job with the tests' settings; return its number."""
        job = ("--output", self.folder / "%j.out", *options.split(), script, *command)
        settings = (*SETTINGS, "--output-dir", self.folder, *more)
        return self.slurm.sbatch(*job, *settings, environment=environment)

    def submit_program(self, folder, options, script, text, **environment):
        """Submit a job of a small Python program; its output and its tasks' go to ``folder``."""
        program = folder / "program.py"
        program.write_text(text)
        environment = {"LAB_OUTPUT": str(folder)} | environment
        job = ("--output", folder / "out", *options.split(), script, program)
        return self.slurm.sbatch(*job, environment=environment)

    def run(self, job):
        """Return the folder of a job's run."""
        [folder] = self.folder.glob(f"*/slurm-{job}/config.json")
        return folder.parent

    def finish(self, job):
        """Wait until a job has completed; return its output."""
        state = self.slurm.wait(job)
        assert state == "COMPLETED", self.slurm.output(job)
        return self.slurm.output(job)

    def go_on(self, job):
        """Wait until a job is back in the queue, and start it at once."""
        self.slurm.wait_until_requeued(job)
        self.slurm.start_now(job)

    def worker(self, node):
        """Return the process id of a node's rank, the one process that torchrun started there."""
        for pid in self.slurm.pids(node):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "torch.distributed.run" in psutil.Process(pid).parent().cmdline()[:3]:
                    return pid
        raise AssertionError(f"no rank runs on node {node}")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as slurm:
        yield Jobs(slurm, tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Train without Slurm on loopback; each part trains once with each number of ranks."""
    folder = tmp_path_factory.mktemp("alone")
    with Cluster(4, loopback=True, logs=folder) as cluster:

        def run(command, ranks, *more):
            name = f"{ranks}-ranks"
            found = list(folder.glob(f"{Path(command[0]).parent}*/{name}"))
            if not found:
                place = "--master-ip {master} --master-port {port} --rank {rank} --num-nodes"
                words = ("python", *command, *SETTINGS, *more, *place.split(), ranks)
                words += ("--output-dir", folder, "--run-name", name)
                cluster.start([*map(str, words)], ranks=range(ranks), cwd=ROOT)
                statuses = [end.status for end in cluster.wait(limit_seconds=180)]
                assert statuses == [0] * ranks, cluster.output(0)
                found = list(folder.glob(f"{Path(command[0]).parent}*/{name}"))
            return found[0]

        yield run


@pytest.fixture(scope="module")
def lost_node(jobs):
    """Submit a job whose first node loses power after a checkpoint.

    That node runs the job's shell and rank 0. Another test also uses this fixture: its work fills
    the time until Slurm notices the loss.
    """
    job = jobs.submit("--nodes=2", ASSIGNMENT, ALL_REDUCE)
    jobs.slurm.wait_for(job, f"step 2/{STEPS}")
    node = int(jobs.slurm.job(job)["BatchHost"].removeprefix("node"))
    jobs.slurm.power_off(node)
    return job, node


@pytest.fixture(scope="module")
def on_four_nodes(jobs):
    """Run two jobs at once on all four nodes: by torchrun, and as in the assignment.

    The second job stages its images. Tests with little computation also use this fixture: they run
    while these two jobs train.
    """
    for node in range(4):
        jobs.slurm.power_on(node)
    images = ("--dataset", "folder", "--data-dir", make_image_folder(jobs.folder / "images"))
    stage = {"STAGE_DATA": "1", "TMPDIR": str(jobs.slurm.own)}
    return (
        jobs.submit("--nodes=4", TORCHRUN, DDP, *SHORT),
        jobs.submit("--nodes=4", ASSIGNMENT, ALL_REDUCE, *SHORT, *images, environment=stage),
    )


def assert_same_training(run, reference):
    """Check that weights, momentum, step metrics and evaluation are equal, bit for bit."""
    assert_equal_runs(run, reference)
    steps = [line["step"] for line in json_lines(run / "metrics.jsonl")]
    [last, *_] = checkpoints_by_age(run / "checkpoints")
    assert steps == list(range(1, load_checkpoint(last)["step"] + 1))


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("lost_node")
def test_torchrun_restarts_a_killed_worker_and_sigterm_saves_for_the_next_start(jobs, alone):
    """One job survives both faults. SIGTERM reaches the job's shell, as before a time limit."""
    job = jobs.submit("--nodes=2 --nodelist=node[2-3]", TORCHRUN, DDP)
    jobs.slurm.wait_for(job, f"step 2/{STEPS}")
    os.kill(jobs.worker(3), signal.SIGKILL)
    jobs.slurm.wait_for(job, "resuming from")
    assert jobs.slurm.job(job)["Restarts"] == "0", "torchrun's restart, not Slurm's"
    jobs.slurm.wait_for(job, f"step 5/{STEPS}")
    jobs.slurm.run("scancel", "--batch", "--signal=TERM", job)
    jobs.go_on(job)
    output = jobs.finish(job)
    assert "stopped after saving; requeued, 1 of at most 20 times" in output
    assert output.count("resuming from") == 2
    assert jobs.slurm.job(job)["Restarts"] == "1"
    assert_same_training(jobs.run(job), alone(DDP, 2))


def test_a_lost_batch_node_leads_to_a_start_on_others(jobs, lost_node, alone):
    job, node = lost_node
    try:
        jobs.go_on(job)
        output = jobs.finish(job)
    finally:
        jobs.slurm.power_on(node)
    assert jobs.slurm.job(job)["BatchHost"] != f"node{node}"
    assert output.count("resuming from") == 1
    assert_same_training(jobs.run(job), alone(ALL_REDUCE, 2))


@pytest.mark.usefixtures("on_four_nodes")
def test_torchrun_starts_a_rank_a_card_and_counts_them_by_node(jobs, tmp_path):
    # One write per line: the ranks of a node share a file, and Python's output is unbuffered here.
    says = (
        "import os\nnames = 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'GROUP_RANK'\n"
        "os.write(1, f'{\" \".join(os.environ[name] for name in names)}\\n'.encode())\n"
    )
    job = jobs.submit_program(tmp_path, "--nodes=2 --gpus-per-node=2", TORCHRUN, says)
    jobs.finish(job)
    said = [
        [
            line
            for line in (tmp_path / f"slurm-{job}" / f"task{task}.log").read_text().splitlines()
            if line[:1].isdigit()
        ]
        for task in range(2)
    ]
    assert [sorted(lines) for lines in said] == [["0 4 0 0", "1 4 1 0"], ["2 4 0 1", "3 4 1 1"]]


@pytest.mark.usefixtures("on_four_nodes")
def test_two_ranks_a_node_train_as_four_do_and_know_their_nodes(jobs, alone):
    job = jobs.submit("--nodes=2", TORCHRUN, ("--nproc-per-node", "2", *DDP), *SHORT)
    assert "4 on 2 nodes: ranks 0-1 on node" in jobs.finish(job)
    ranks = json.loads((jobs.run(job) / "ranks.json").read_text())["ranks"]
    assert [rank["node"] for rank in ranks] == [0, 0, 1, 1]
    assert_same_training(jobs.run(job), alone(DDP, 4, *SHORT))


def test_the_doctor_names_ranks_that_srun_has_dealt_out_in_turn(jobs, tmp_path):
    doctor = (
        f"{shlex.quote(sys.executable)} -m lab doctor --dataset digits --json --master-ip $MASTER "
        "--num-nodes $SLURM_NTASKS --rank $SLURM_PROCID"
    )
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/sh\nname=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\n"
        "export MASTER=$(scontrol show node -o $name | sed 's/.* NodeAddr=\\([^ ]*\\).*/\\1/')\n"
        f"srun --distribution=cyclic --output {tmp_path}/%t.json sh -c {shlex.quote(doctor)}\n"
    )
    options = ("--nodes=2", "--ntasks-per-node=2", "--output", tmp_path / "out")
    job = jobs.slurm.sbatch(*options, script)
    jobs.finish(job)
    findings = json.loads((tmp_path / "0.json").read_text())["findings"]
    [found] = [finding for finding in findings if finding["name"] == "shared nodes"]
    assert found["status"] == "warning"
    assert found["text"].startswith("2 nodes: ranks 0 and 2 on node")
    assert "4 times instead of 2" in found["text"]
    assert "ranks 0-1 on node" in found["remedy"]


@pytest.mark.usefixtures("on_four_nodes")
def test_the_first_failure_is_shown_and_the_others_lie_in_their_files(jobs, tmp_path):
    fails = (
        "import sys, time\nrank = int(sys.argv[-1])\nprint('line of', rank)\ntime.sleep(0 if "
        "rank == 2 else 2)\nsys.exit(f'error: {rank} broke')\n"
    )
    job = jobs.submit_program(tmp_path, "--nodes=4", ASSIGNMENT, fails)
    assert jobs.slurm.wait(job) == "FAILED"
    output = jobs.slurm.output(job)
    assert "task 2 failed first; the end of its output:\nline of 2\nerror: 2 broke\n" in output
    assert [output.count(f"line of {rank}\n") for rank in range(4)] == [1, 0, 1, 0]
    assert [(tmp_path / f"slurm-{job}" / f"task{rank}.log").read_text() for rank in range(4)] == [
        f"line of {rank}\nerror: {rank} broke\n" for rank in range(4)
    ]


@pytest.mark.usefixtures("on_four_nodes")
def test_the_tasks_of_a_job_share_a_token_that_is_in_no_file(jobs, tmp_path):
    """A rank without it is refused, and the next job has another."""
    tokens, program = [], ROOT / "tests" / "helpers" / "tokens.py"
    own = {"environment": {"LAB_OUTPUT": str(tmp_path)}}
    options = ("--output", tmp_path / "%j.out", "--nodes=2", ASSIGNMENT, program, "--drop")
    submitted = {drop: jobs.slurm.sbatch(*options, drop, **own) for drop in ("-1", "1")}
    for drop, job in submitted.items():
        assert jobs.slurm.wait(job) == "COMPLETED", jobs.slurm.output(job)
        logs = [(tmp_path / f"slurm-{job}" / f"task{task}.log").read_text() for task in range(2)]
        [token] = set(re.findall(r"token (\w{64})", "".join(logs)))
        tokens.append(token)
        if drop == "-1":
            assert [log.count("met") for log in logs] == [1, 1], logs
        else:
            assert "refused rank 1: rank 0 has a run token and this rank has none" in logs[1]
    assert tokens[0] != tokens[1]


@pytest.mark.usefixtures("on_four_nodes")
def test_a_killed_rank_ends_the_job_with_its_status(jobs, tmp_path):
    """The kernel does the same when memory runs out; nobody has asked the job to stop."""
    dies = "import os\nos.kill(os.getpid(), 9)\n"
    job = jobs.submit_program(tmp_path, "--nodes=1", ASSIGNMENT, dies)
    assert jobs.slurm.wait(job, limit_seconds=60) == "FAILED"
    logs = tmp_path / f"slurm-{job}"
    told = (
        f"error: the job failed with status 137; output of all tasks: {logs}; for the likely "
        f"cause, run lab explain {logs}/*.log"
    )
    assert told in jobs.slurm.output(job).splitlines()
    for log in logs.glob("*.log"):
        assert [one.status for one in diagnose(read_logs([str(log)]))] == [-9], log.read_text()


@pytest.mark.usefixtures("on_four_nodes")
def test_a_job_that_has_gone_back_often_enough_stays(jobs, tmp_path):
    """The program exits as if a scheduler had stopped it; REQUEUES limits the restarts."""
    stops = "import sys\nsys.exit(75)\n"
    job = jobs.submit_program(tmp_path, "--nodes=1", ASSIGNMENT, stops, REQUEUES="1")
    jobs.go_on(job)
    assert jobs.slurm.wait(job) == "FAILED"
    assert jobs.slurm.job(job)["Restarts"] == "1"
    last = jobs.slurm.output(job).splitlines()[-1]
    assert last.startswith(
        "error: stopped after saving; the job has used all its requeues (REQUEUES=1)"
    )


@pytest.mark.usefixtures("on_four_nodes")
def test_a_cancelled_job_does_not_come_back(jobs, tmp_path):
    waits = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('waits', flush=True)\ntime.sleep(600)\n"
    )
    job = jobs.submit_program(tmp_path, "--nodes=2", ASSIGNMENT, waits)
    jobs.slurm.wait_for(job, "waits")
    jobs.slurm.run("scancel", job)
    assert jobs.slurm.wait(job) == "CANCELLED"
    jobs.slurm.wait_until_gone(job)
    assert "Slurm has cancelled the job" in jobs.slurm.output(job), jobs.slurm.output(job)
    assert jobs.slurm.job(job)["Restarts"] == "0"


@pytest.mark.usefixtures("on_four_nodes")
def test_bad_input_is_one_clear_message(jobs):
    """All jobs are submitted at once; none starts a rank."""
    own, out = jobs.slurm.own, ("--output", jobs.folder / "%j.out")
    ddp, nobody = f"--nodes=2 {TORCHRUN} {DDP[0]}", "http://127.0.0.1:9/"
    fills_in = "--nnodes in the command: remove it; this script fills in the job's 2 nodes"
    cases = [
        (f"--nodes=1 {ASSIGNMENT}", "no command: add it after the script's name"),
        (f"--nodes=2 {TORCHRUN} --nnodes 4 {DDP[0]}", fills_in),
        (f"--nodes=2 {ASSIGNMENT} a.py --num-nodes=4", "--num-nodes=4 in the command: remove it"),
        (f"--ntasks-per-node=2 {TORCHRUN} {DDP[0]}", "2 tasks per node, but this script needs one"),
        (f"{ddp} --epochs none", "PartThree/main.py: --epochs: "),
        (f"{ddp} --dataset digits --output-dir {own}", f"{own} is another folder here than on the"),
        (
            f"{ddp} --data-dir {own} --mirror {nobody} --output-dir {jobs.folder}",
            f"cifar10 is not in {own} (",
        ),
    ]
    submitted = {jobs.slurm.sbatch(*out, *words.split()): message for words, message in cases}
    no_python = {"PYTHON": "/no/python"}
    job = jobs.slurm.sbatch(*out, ASSIGNMENT, *ALL_REDUCE, environment=no_python)
    submitted[job] = "/no/python is not on node"
    job = jobs.slurm.sbatch(*out, ROOT / TORCHRUN, *DDP, cwd=jobs.folder)
    submitted[job] = f"no launch/slurm-common.sh in {jobs.folder}: submit from the"
    for job, message in submitted.items():
        assert jobs.slurm.wait(job) == "FAILED"
        output = jobs.slurm.output(job)
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        assert any(message in line for line in errors), f"{message!r}: {output}"
        assert "Traceback" not in output
    assert list(jobs.slurm.folder.glob("disk-node*/*.token")) == []
    assert "start it with sbatch" in jobs.slurm.run("bash", TORCHRUN, *DDP, check=False)


def test_values_with_quotes_and_what_a_shell_or_slurm_replaces(jobs, tmp_path):
    """Every file is in the folder as it was given, and a second job finds the run and resumes."""
    folder = tmp_path / 'it\'s "a" $(touch mark)`touch mark`; * [x] 100%t & $HOME'
    command = (*ALL_REDUCE, *SETTINGS, "--output-dir", folder, "--run-name", "my-run")
    outputs = []
    for steps in (("--stop-after-epoch", 1), ()):
        outputs.append(tmp_path / f"out{len(outputs)}")
        options = ("--output", outputs[-1], "--nodes=2", ASSIGNMENT)
        job = jobs.slurm.sbatch(*options, *command, *SHORT, *steps)
        jobs.finish(job)
        logs = {path.name for path in (folder / f"slurm-{job}").iterdir()}
        assert {"task0.log", "task1.log"} <= logs
    assert (folder / "PartTwo-all_reduce" / "my-run" / "summary.json").exists()
    assert "resuming from" in outputs[1].read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, "out0", "out1"]
    assert not (ROOT / "mark").exists()


@pytest.mark.usefixtures("on_four_nodes")
def test_a_folder_of_each_node_is_good_enough_where_the_job_never_goes_back(jobs, tmp_path):
    options, says = "--nodes=2 --no-requeue", "print('said')\n"
    own = {"LAB_OUTPUT": str(jobs.slurm.own)}
    job = jobs.submit_program(tmp_path, options, ASSIGNMENT, says, **own)
    assert jobs.finish(job) == "said\n"
    assert len(list(jobs.slurm.folder.glob(f"disk-node*/slurm-{job}/task*.log"))) == 2


def test_both_scripts_train_on_four_nodes(jobs, on_four_nodes, alone):
    """No node resolves another's name. Each node stages the dataset once, then deletes it."""
    torchrun, assignment = on_four_nodes
    images = ("--dataset", "folder", "--data-dir", jobs.folder / "images")
    for job, reference in (
        (torchrun, alone(DDP, 4, *SHORT)),
        (assignment, alone(ALL_REDUCE, 4, *SHORT, *images)),
    ):
        output = jobs.finish(job)
        assert "batch: 4 per rank x 4 ranks = 16 global" in output
        assert output.count("step 3/3") == 1, "rank 0's lines alone"
        assert_same_training(jobs.run(job), reference)
    staged = jobs.slurm.own / f"slurm-{assignment}-data"
    assert json.loads((jobs.run(assignment) / "config.json").read_text())["data_dir"] == str(staged)
    assert list(jobs.slurm.folder.glob("disk-node*/slurm-*-data*")) == []


def test_nothing_is_left_when_the_cluster_ends(tmp_path):
    """Slurm's daemons, mounts, and a process that a job started in its own session are all gone."""
    word, conf = f"{os.getpid()}.5", str(tmp_path / "slurm" / "slurm.conf")

    def on_this_machine():
        names = sorted(path.name for path in Path("/etc").glob("slurm/*"))
        return Path("/proc/self/mounts").read_text(), names

    before = on_this_machine()
    with SlurmCluster(tmp_path / "slurm", nodes=1) as slurm:
        sleeper = f"setsid sleep {word} & echo started; wait"
        job = slurm.sbatch("--output", tmp_path / "out", "--wrap", sleeper)
        slurm.wait_for(job, "started")
        wait_until(lambda: with_word(word), "the sleeper")
        assert with_word(conf), "the daemons have it in their environment"
    wait_until(lambda: not with_word(word) and not with_word(conf), "all end")
    assert on_this_machine() == before
