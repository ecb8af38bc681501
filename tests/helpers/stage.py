"""Run a training that tests can disturb; the ``assert_`` functions check what holds after it."""

import math
import re
import sys
from dataclasses import dataclass

import torch

from common.checkpoint import checkpoints_by_age, load_checkpoint
from common.utils.hashing import digest
from tests.helpers import ROOT, TINY, Started, free_port, user_environment, wait_until
from tests.helpers.hurt import STEPS_AN_EPOCH
from tests.helpers.records import json_lines, json_of

NODES = 3
EPOCHS = 2
PATIENT, TIMEOUT = 60, 5
"""``--timeout`` in seconds: for runs that should not reach it, and for runs that must end by it."""
GRACE = 20
"""Seconds, in addition to the timeout, that a busy machine may take."""

QUICK = (*TINY, "--dataset", "digits", "--batch-size", 8, "--log-every", 1)

WAYS = {
    "gather_scatter": ("PartTwo", "--sync", "gather_scatter"),
    "all_reduce": ("PartTwo", "--sync", "all_reduce"),
    "ddp": ("PartThree",),
}
HURT = ROOT / "tests" / "helpers" / "hurt.py"
NOBODY = -1
PACED = [str(HURT), "0", "steps", "pace", str(ROOT / "PartTwo" / "main.py")]
"""PartTwo that knows ``--model tiny``, and whose rank 0 waits before each step (``set_pace``)."""
_START = 90.0


@dataclass(frozen=True)
class Ended:
    """How a rank ended: status (negative: a signal), seconds from its start, and all its output."""

    status: int
    seconds: float
    text: str


class Stage:
    """Runs of one training on a cluster, each in a folder with its name below ``folder``.

    Every run trains ``wide`` on ``images`` (flags that select a dataset), two epochs of two steps.
    """

    def __init__(self, cluster, images, folder):
        self.cluster, self.folder, self._images = cluster, folder, images
        self.port = 0
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self._seen: dict[int, int] = {}

    def command(self, way, *flags, size=NODES, hurt=None, timeout=PATIENT, name="run", root=ROOT):
        """Return the command of each rank without the interpreter; later ``flags`` win."""
        part, *sync = WAYS[way]
        words = [
            HURT,
            *(hurt or (NOBODY, "", "")),
            root / part / "main.py",
            *sync,
            *("--master-ip", "{master}", "--master-port", self.port, "--num-nodes", size),
            *("--rank", "{rank}", "--threads", 1, "--model", "wide", "--epochs", EPOCHS),
            *("--batch-size", 24 // STEPS_AN_EPOCH, "--log-every", 1),
            *("--timeout", timeout, "--meeting-timeout", timeout),
            *("--output-dir", self.folder / "out", "--run-name", name),
            *self._images,
            *flags,
        ]
        return [str(word) for word in words]

    def start(
        self, way="all_reduce", *flags, nodes=tuple(range(NODES)), port=None, shell="", **more
    ):
        """Start ranks of a group; ``more`` goes to ``command``.

        shell : a script that runs the command as ``"$@"``.
        """
        self.port = port or free_port()
        command = ["python", *self.command(way, *flags, **more)]
        if shell:
            command = ["bash", "-c", shell, "bash", "env", *command]
        for node in nodes:
            self._seen[node] = len(self.cluster.output(node))
        environment = {"TMPDIR": str(self.temporary)}
        self.cluster.start(command, ranks=nodes, cwd=self.folder, environment=environment)

    def text(self, node):
        """Return what the node's rank has written in this run."""
        return self.cluster.output(node)[self._seen.get(node, 0) :]

    def wait_for(self, words, *, node=0, limit=_START):
        """Return once a rank has written ``words``."""
        try:
            wait_until(lambda: words in self.text(node), repr(words), timeout_seconds=limit)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.text(node)}") from None

    def let_go(self):
        """Let the rank that ``hold`` stopped continue."""
        (self.folder / "go").touch()

    def end(self, limit=_START):
        """Wait for all ranks and return by rank how they ended, in the order of their ends."""
        try:
            ends = self.cluster.wait(limit_seconds=limit)
        except TimeoutError as error:
            raise AssertionError(
                f"{error}:\n" + "\n".join(self.text(node) for node in self._seen)
            ) from None
        return {end.node: Ended(end.status, end.seconds, self.text(end.node)) for end in ends}

    def kill_all(self):
        """Kill what a failed test left running."""
        for node in range(self.cluster.nodes):
            self.cluster.fault(node, "restore")
            self.cluster.fault(node, "kill")
        self.cluster.wait(limit_seconds=GRACE)

    def run(self, way="all_reduce", name="run"):
        """Return the folder of a run."""
        part = WAYS[way][0]
        return self.folder / "out" / f"{part}-{way}" / name

    def finish(self, way="all_reduce", *flags, name="run", **more):
        """Train to the end undisturbed and return the run's folder."""
        self.start(way, *flags, name=name, **more)
        for rank, ended in self.end().items():
            assert ended.status == 0, f"rank {rank}: {ended.text}"
        return self.run(way, name)


def start_hurt_ranks(size, hurt, *arguments, cwd, **environment):
    """Start ranks of PartTwo, one of which ``hurt`` (rank, moment, deed) disturbs."""
    group = ("--master-ip", "127.0.0.1", "--master-port", free_port(), "--num-nodes", size)
    command = (HURT, *hurt, ROOT / "PartTwo" / "main.py", *arguments, *group)
    return [
        Started(
            [sys.executable, *map(str, command), "--rank", str(rank)],
            cwd=cwd,
            env=user_environment(**environment),
            forked=True,
        )
        for rank in range(size)
    ]


def set_pace(folder, seconds):
    """Set the seconds of each step from now on, for runs with the returned environment."""
    new, pace = folder / "new_pace", folder / "pace"
    new.write_text(str(seconds))
    new.replace(pace)
    return {"PACE": str(pace)}


def assert_told(ended, pattern, *, status=1):
    """Assert that a rank or process ended with this status, a clear message and no traceback."""
    told = ended.text if isinstance(ended, Ended) else ended.err
    assert ended.status == status, ended
    assert re.search(pattern, told), told
    assert "Traceback" not in told, told


def assert_no_result(run):
    """Assert that a run that had begun left no result and no damaged checkpoint."""
    assert (run / "metrics.jsonl").exists()
    for name in ("summary.json", "report.json", "report.txt"):
        assert not (run / name).exists(), name
    for path in checkpoints_by_age(run / "checkpoints"):
        load_checkpoint(path)


def assert_equal_runs(run, reference, *, averaged_within_epoch=False):
    """Assert that a run equals the undisturbed one, except for times, and left no hidden file.

    averaged_within_epoch : the ranks' BatchNorm statistics were averaged for a checkpoint that the
        undisturbed run does not write. They and the test loss then differ in their last bits.
    """
    one, other = (
        load_checkpoint(checkpoints_by_age(folder / "checkpoints")[0])
        for folder in (run, reference)
    )
    one_report, other_report = json_of(run, "report"), json_of(reference, "report")
    if averaged_within_epoch:
        for name in [name for name in other["model_state_dict"] if "running" in name]:
            statistics = other["model_state_dict"].pop(name)
            torch.testing.assert_close(one["model_state_dict"].pop(name), statistics)
        loss = other_report.pop("test_loss")
        assert math.isclose(one_report.pop("test_loss"), loss, rel_tol=1e-5)
    for name in ("epoch", "step", "model_state_dict", "optimizer_state_dict"):
        assert digest({name: one[name]}) == digest({name: other[name]}), name
    for name in ("metrics.jsonl", "epochs.jsonl"):
        one, other = (json_lines(folder / name, times=False) for folder in (run, reference))
        assert one == other, name
    assert one_report | {"checkpoint": ""} == other_report | {"checkpoint": ""}
    assert json_of(run, "summary")["ranks_hold_equal_weights"] is True
    assert hidden_files(run) == []


def hidden_files(run):
    """Return the hidden files in a run's folder, such as unfinished ones."""
    return [str(path.relative_to(run)) for path in run.rglob(".*")]
