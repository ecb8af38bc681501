"""``launch_distributed_training`` with real processes: start, results, failures and end."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from common.distributed import spawn
from common.errors import UserError
from common.training_engine import (
    WorkerError,
    distributed_train_worker,
    launch,
    launch_distributed_training,
)
from tests.helpers import ROOT, wait_until
from tests.helpers.processes import ForkedProgram


def gather(mine, size):
    everyones = [None] * size
    dist.all_gather_object(everyones, mine)
    return everyones


def note_pid(folder, rank):
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))


def assert_all_ended(folder, *, count):
    numbers, left = [int(path.read_text()) for path in folder.glob("pid*")], []
    for pid in numbers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                process.kill()  # the test fails, but leaves no process running
                left.append(pid)
    assert len(set(numbers) - {os.getpid()}) == count
    assert not left, "a worker is left behind"


class Forked(ForkedProgram):
    """A worker with the parts of a child that spawn.py uses."""

    def __init__(self, command, *, env, **_streams):
        assert command[:3] == [sys.executable, "-P", "-m"]
        super().__init__([sys.executable, *command[2:]], os.getcwd(), env, os.devnull, os.devnull)
        # as of ``start_child``
        wait_until(lambda: self.poll() is not None or os.getpgid(self.pid) == self.pid, "a session")

    returncode = property(ForkedProgram.poll)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


@pytest.fixture
def workers(monkeypatch):
    """Fork the workers, to save time; the tests of scripts below start new interpreters."""
    monkeypatch.setattr(spawn, "start_child", Forked)


@pytest.mark.usefixtures("workers")
def test_lambdas_and_local_classes_reach_every_rank(tmp_path, monkeypatch):
    """Also: NCCL without GPUs falls back to Gloo with a warning."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    class Point:
        x = 21

        def doubled(self):
            return 2 * self.x

    def train(rank, world_size, *, scale, point):
        note_pid(tmp_path, rank)
        return dist.get_backend(), rank, gather((rank, scale(rank), point.doubled()), world_size)

    with pytest.warns(
        UserWarning, match=r"NCCL needs a GPU for each of the 2 ranks, and this machine has 0.*Gloo"
    ):
        result = launch_distributed_training(train, 2, scale=lambda rank: 10**rank, point=Point())
    assert result == ("gloo", 0, [(0, 1, 42), (1, 10, 42)])
    assert_all_ended(tmp_path, count=2)


def test_one_rank_is_this_process():
    def train(rank, world_size, *, word):
        if word == "fail":
            raise ZeroDivisionError("here")
        return os.getpid(), rank, world_size, word

    with warnings.catch_warnings(action="error"):
        for world_size in (0, 1):
            result = launch_distributed_training(train, world_size, word="x")
            assert result == (os.getpid(), 0, 1, "x")
    assert not dist.is_initialized()
    with pytest.raises(WorkerError, match="ZeroDivisionError: here") as caught:
        launch_distributed_training(train, 1, word="fail")
    assert caught.value.rank == 0
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((2, "mpi"), "backend: got 'mpi', choose nccl or gloo"), ((-1, "gloo"), "world_size: got -1")],
)
def test_values_that_cannot_be(arguments, words):
    with pytest.raises(UserError, match=words):
        launch_distributed_training(lambda *_: pytest.fail("must not be called"), *arguments)


SAMPLES, EPOCHS = 20, 2


@pytest.mark.usefixtures("workers")
def test_the_worker_shares_out_every_sample_once_an_epoch(tmp_path):
    class Recorded(Dataset):
        """A data set that writes the index of each sample it returns to a file per process."""

        def __init__(self, name, count):
            self.name, self.count = name, count

        def __len__(self):
            return self.count

        def __getitem__(self, index):
            with (tmp_path / f"{self.name}-{os.getpid()}").open("a") as file:
                file.write(f"{index}\n")
            return torch.randn(4, generator=torch.Generator().manual_seed(index)), index % 2

    def seen(name):
        return [list(map(int, path.read_text().split())) for path in tmp_path.glob(f"{name}-*")]

    history = launch_distributed_training(
        distributed_train_worker,
        2,
        "gloo",
        model_fn=lambda: nn.Linear(4, 2),
        train_dataset=Recorded("train", SAMPLES),
        val_dataset=Recorded("val", 7),
        batch_size=3,
        optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        criterion_fn=nn.CrossEntropyLoss,
        scheduler_fn=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        engine_kwargs={"output_dir": tmp_path, "experiment_name": "run", "accumulation_steps": 2},
        train_kwargs={"num_epochs": EPOCHS},
    )
    assert history["epoch"] == [1, 2]
    assert history["learning_rate"] == [0.1, 0.05]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["best.pt", "last.pt"]
    # 10 samples per rank in batches of 3: 4 micro-batches, hence 2 steps, in each of 2 epochs
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["step"] == 4

    ranks = seen("train")
    assert [len(one) for one in ranks] == [SAMPLES // 2 * EPOCHS] * 2
    epochs = [[one[begin : begin + SAMPLES // 2] for one in ranks] for begin in (0, SAMPLES // 2)]
    for shares in epochs:
        assert sorted(chain(*shares)) == list(range(SAMPLES)), "each sample once, on one rank"
    assert epochs[0] != epochs[1], "set_epoch gives each epoch an order of its own"
    assert epochs[0][0] != sorted(epochs[0][0]), "shuffled"
    # 7 samples on 2 ranks: sample 0 comes twice for equal shares; no shuffling.
    assert Counter(chain(*seen("val"))) == {0: 2 * EPOCHS} | dict.fromkeys(range(1, 7), EPOCHS)


def test_only_this_user_can_write_what_the_workers_unpickle(monkeypatch):
    """Also if the caller lets everybody write to new files."""
    modes = []

    def look(commands, **_):
        folder = Path(commands[0][-2])
        modes.extend([folder.stat().st_mode & 0o777, (folder / "call.pkl").stat().st_uid])
        raise UserError("seen")

    monkeypatch.setattr(launch, "run_local_ranks", look)
    before = os.umask(0)
    try:
        with pytest.raises(UserError, match="seen"):
            launch_distributed_training(lambda rank, size: None, 2, "gloo")
    finally:
        os.umask(before)
    assert modes == [0o700, os.getuid()]


@pytest.mark.usefixtures("workers")
def test_a_group_that_cannot_be_set_up_is_told_and_one_device_trains(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.warns(
        UserWarning, match=r"could not be set up \(.*nosuch0.*\): training on one device"
    ):
        result = launch_distributed_training(
            lambda rank, size: (os.getpid(), rank, size), 2, "gloo"
        )
    assert result == (os.getpid(), 0, 1)


def failing(rank, world_size, *, folder, how):
    """Fail on rank 1; rank 0 waits in a collective, and only SIGKILL can end the stopped rank 2."""
    with Path(folder, "calls").open("a") as file:
        file.write(f"{rank}\n")
    note_pid(folder, rank)
    dist.barrier()
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        raise KeyError("the very reason")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


@pytest.mark.usefixtures("workers")
@pytest.mark.filterwarnings("error")  # a fallback would warn
@pytest.mark.parametrize(
    ("how", "size", "words"),
    [("raise", 3, "KeyError: 'the very reason'"), ("kill", 2, "was killed by SIGKILL")],
)
def test_a_rank_that_fails_is_named_and_nothing_is_tried_again(
    tmp_path, monkeypatch, how, size, words
):
    impatient = partial(spawn.run_local_ranks, grace_seconds=1.0)
    monkeypatch.setattr(launch, "run_local_ranks", impatient)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=words) as caught:
        launch_distributed_training(failing, size, "gloo", folder=str(tmp_path), how=how)
    assert time.monotonic() - began < 50, "not only after the group's timeout of 60 s"
    assert caught.value.rank == 1
    assert "rank 1 failed" in str(caught.value)
    if how == "raise":
        assert 'raise KeyError("the very reason")' in caught.value.worker_traceback
    assert sorted((tmp_path / "calls").read_text().split()) == [str(rank) for rank in range(size)]
    assert_all_ended(tmp_path, count=size)


class Unreadable:
    """An object that can be pickled, but not unpickled."""

    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.usefixtures("workers")
@pytest.mark.filterwarnings("error")  # a fallback would warn
@pytest.mark.parametrize(
    ("thing", "words", "blamed"),
    [
        # An argument that no worker can read: whichever ends first is named.
        (Unreadable(), "no number", (0, 1)),
        (None, "cannot pickle 'generator' object", (0,)),  # a result that cannot be sent back
    ],
)
def test_what_cannot_be_sent_is_an_error_not_a_fallback(thing, words, blamed):
    def train(rank, world_size, *, thing):
        return (number for number in range(3))

    with pytest.raises(WorkerError, match=words) as caught:
        launch_distributed_training(train, 2, "gloo", thing=thing)
    assert caught.value.rank in blamed


OWN = launch.WorkerOutcome("training", error="boom", traceback="ValueError: boom")
BROKEN = launch.WorkerOutcome("training", error="closed", traceback="closed", blame=2)


@pytest.mark.parametrize(
    ("outcomes", "failed", "rank", "words"),
    [
        # A rank that fails early can break another one that still forms the group.
        ([replace(BROKEN, stage="group"), OWN], [0, 1], 1, "boom"),
        ([BROKEN, OWN], [0, 1], 1, "boom"),
        ([BROKEN, None], [1, 0], 1, "was killed by SIGKILL"),
        ([None, BROKEN], [1], 1, "closed"),  # rank 0 was killed because rank 1 had failed
        ([OWN, None], [0], 0, "boom"),
        ([OWN, OWN], [1, 0], 1, "boom"),
    ],
)
def test_the_rank_to_blame_is_named(monkeypatch, outcomes, failed, rank, words):
    """None: the process left no message."""

    def ranks(commands, **_):
        for number, outcome in enumerate(outcomes):
            if outcome is not None:
                path = launch.outcome_file(Path(commands[0][-2]), number)
                path.write_bytes(cloudpickle.dumps(outcome))
        return spawn.RankExits((-9, -9), tuple(failed))

    monkeypatch.setattr(launch, "run_local_ranks", ranks)
    with pytest.raises(WorkerError, match=words) as caught:
        launch_distributed_training(lambda *_: None, 2, "gloo")
    assert caught.value.rank == rank


SCRIPT = """
    import sys
    import torch.distributed as dist
    from beside import triple  # a module of the script's folder; the workers must find it, too
    from common.training_engine import launch_distributed_training

    print("the script runs", flush=True)

    def train(rank, world_size, factor):
        ranks = [None] * world_size
        dist.all_gather_object(ranks, rank)
        return [triple(rank) * factor for rank in ranks]

    print("result", launch_distributed_training(train, 2, "gloo", factor=5), flush=True)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_runs_once(tmp_path):
    for name in ("scripts", "elsewhere"):
        (tmp_path / name).mkdir()
    script, cwd = tmp_path / "scripts" / "script.py", tmp_path / "elsewhere"
    script.write_text(textwrap.dedent(SCRIPT))
    script.with_name("beside.py").write_text("def triple(x):\n    return 3 * x\n")
    (cwd / "common.py").write_text("")  # a common name: `python -m` would find it before ours
    ended = subprocess.run(
        [sys.executable, script],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["the script runs", "result [0, 15]"]
