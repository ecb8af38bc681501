"""Jobs that lose workers and nodes, gain nodes, or get a stop signal: real torchrun agents.

Each test sets the pace, disturbs the run, and compares the result with an undisturbed run.
"""

import functools
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
import torch

from common.checkpoint import load_checkpoint
from common.models import build_model
from common.utils.hashing import digest
from tests.helpers import (
    LONG,
    ROOT,
    TINY,
    Started,
    free_port,
    make_image_folder,
    start_part,
    start_ranks,
    wait_until,
)
from tests.helpers.records import json_lines, json_of
from tests.helpers.stage import PACED, set_pace, start_hurt_ranks

TORCHRUN = str(Path(sys.executable).parent / "torchrun")
STEPS, EVERY = 24, 4
RATE = 1e-3  # small, to keep rounding errors small
ARGUMENTS = [
    *TINY,
    *("--sync", "all_reduce", "--batch-size", 48, "--max-steps", STEPS),
    *("--checkpoint-every", EVERY, "--learning-rate", RATE, "--schedule", "constant"),
    *("--log-every", 1, "--threads", 1, "--timeout", 20),
]
WAY = "PartTwo-all_reduce"
C10D = ("--rdzv-backend", "c10d", "--local-addr", "127.0.0.1", "--monitor-interval", "0.2")


def start_agent(folder, *flags, env, arguments, program=PACED):
    """Start one node: a torchrun agent, not forked, since its workers read its command line."""
    folder.mkdir(parents=True, exist_ok=True)
    command = (TORCHRUN, *flags, *program, *arguments, "--output-dir", folder)
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    return Started([str(word) for word in command], cwd=folder, env=os.environ | environment | env)


def processes(agent):
    """Return the processes of a node: the agent, its ranks, and theirs."""
    first = psutil.Process(agent.process.pid)
    return [first, *first.children(recursive=True)]


def all_ended(started, *, timeout_seconds=150):
    """Wait for the end of all, and return how they ended: without an error."""
    ended = [one.end(timeout_seconds=timeout_seconds) for one in started]
    assert [one.status for one in ended] == [0] * len(ended), [one.err for one in ended]
    return ended


def last_checkpoint(*folders):
    """Return the checkpoint with the most steps from all nodes."""
    paths = [path for one in folders for path in one.glob(f"{WAY}/*/checkpoints/Epoch_*.pt")]
    return max(map(load_checkpoint, paths), key=lambda entries: (entries["step"], entries["epoch"]))


def weights(entries):
    """Return all parameters as one vector."""
    state = entries["model_state_dict"]
    names = [name for name in state if "running" not in name and "tracked" not in name]
    return torch.cat([state[name].double().flatten() for name in names])


def steps_in(folder):
    """Return the steps in metrics.jsonl of the only run in ``folder``."""
    [metrics] = folder.glob(f"{WAY}/*/metrics.jsonl")
    return [line["step"] for line in json_lines(metrics)]


def going_on(text):
    """Return the steps from which the run resumed, according to its output."""
    steps = re.findall(r"resuming from \S+(?: on rank \d+'s node)?, step (\d+)", text)
    return [int(step) for step in steps]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Return flags for noisy images: those of the digits would have variances of zero."""
    folder = make_image_folder(tmp_path_factory.mktemp("images"), train_per_class=200)
    return ["--dataset", "folder", "--data-dir", folder]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, images):
    """Return a function that trains undisturbed, once for each number of ranks."""

    @functools.cache
    def trained(size):
        folder = tmp_path_factory.mktemp(f"undisturbed{size}")
        arguments = [*ARGUMENTS, *images, "--output-dir", folder]
        all_ended(start_ranks("PartTwo", size, *arguments, cwd=folder))
        return last_checkpoint(folder)

    return trained


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_loses_no_more_than_the_steps_between_checkpoints(
    tmp_path, images, undisturbed
):
    agent = start_agent(
        tmp_path,
        *C10D,
        *("--nproc-per-node", 2, "--max-restarts", 2),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
        env=set_pace(tmp_path, 0.3),
        arguments=[*ARGUMENTS, *images],
    )
    agent.wait_for(f"step 10/{STEPS}", timeout_seconds=LONG)
    [worker] = [one for one in processes(agent) if one.environ().get("LOCAL_RANK") == "1"]
    worker.kill()
    set_pace(tmp_path, 0)
    [ended] = all_ended([agent])
    [step] = going_on(ended.out)
    assert step >= 8, "a checkpoint is due every four steps"
    assert steps_in(tmp_path) == list(range(1, STEPS + 1)), "no step twice, none left out"
    state = last_checkpoint(tmp_path)["model_state_dict"]
    assert digest(state) == digest(undisturbed(2)["model_state_dict"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_node_leaves_another_joins_and_the_weights_stay_those_of_an_undisturbed_run(
    tmp_path, images, undisturbed
):
    port = free_port()
    flags = [
        *C10D,
        *("--nnodes", "1:3", "--nproc-per-node", 1, "--max-restarts", 5, "--rdzv-id", "job"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf"),
    ]
    patience = "last_call_timeout=4,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=3"
    per_rank = {"--batch-size": "--local-batch-size", 48: 16}
    arguments = [per_rank.get(word, word) for word in [*ARGUMENTS, *images]]
    pace = set_pace(tmp_path, 0.3)

    def start_node(node):
        meeting = f"is_host={int(node == 0)},{patience}"
        folder = tmp_path / str(node)
        return start_agent(folder, *flags, meeting, env=pace, arguments=arguments)

    staying, leaving = start_node(0), start_node(1)
    for text in ("3 shards on 2 ranks", f"step 6/{STEPS}"):  # one node has rank 0, which prints
        wait_until(lambda text=text: text in staying.read_out() + leaving.read_out(), text)
    for process in processes(leaving):
        process.kill()
    leaving.process.wait(timeout=10)
    staying.wait_for("3 shards on 1 rank ", timeout_seconds=LONG)
    staying.wait_for(f"step 12/{STEPS}", timeout_seconds=LONG)
    set_pace(tmp_path, 8)  # time for the other node to join
    joined = start_node(2)

    def both_train():
        later = staying.read_out().partition("3 shards on 1 rank ")[2]
        return "3 shards on 2 ranks" in later + joined.read_out()

    wait_until(both_train, "both ranks train")
    set_pace(tmp_path, 0)
    output = "".join(one.out for one in all_ended((staying, joined), timeout_seconds=200))
    assert "the job now has 1 rank (before: 2). Its 3 shards and its global batch stay" in output
    assert len(going_on(output)) >= 2
    last = last_checkpoint(tmp_path / "0", tmp_path / "2")
    assert last["step"] == STEPS
    torch.manual_seed(0)
    initial = weights({"model_state_dict": build_model("tiny", 2).state_dict()})
    mine, wanted = weights(last), weights(undisturbed(3))
    assert float((mine - wanted).norm() / wanted.norm()) < 1e-5
    # the training moved them much further
    assert float((mine - wanted).norm() / (wanted - initial).norm()) < 0.05


@pytest.mark.slow
def test_the_newest_checkpoint_counts_on_whichever_node_it_lies(tmp_path, images):
    """Each node has its own folder; the test moves rank 0's files to the other node."""

    def train(*flags):
        """Train on both nodes, with torchrun's variables; return the output of rank 0."""
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        group |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        nodes = []
        for node in range(2):
            own = group | {"RANK": str(node), "GROUP_RANK": str(node)}
            arguments = [*ARGUMENTS, *images, *flags, "--output-dir", tmp_path / str(node)]
            nodes.append(start_part("PartTwo", *arguments, cwd=tmp_path, env=own))
        return all_ended(nodes)[0].out

    train("--stop-after-epoch", 1)
    [checkpoints] = (tmp_path / "0").glob(f"{WAY}/*/checkpoints")
    assert not list((tmp_path / "1").glob(f"{WAY}/*/checkpoints/*")), "rank 0 alone writes"
    moved = tmp_path / "1" / checkpoints.relative_to(tmp_path / "0")
    moved.parent.mkdir(parents=True, exist_ok=True)
    checkpoints.rename(moved)
    told = train("--stop-after-epoch", 2, "--resume", "auto")
    [step] = going_on(told)
    assert "on rank 1's node" in told
    assert step == load_checkpoint(moved / "Epoch_1.pt")["step"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_saves_on_all_and_the_run_goes_on_later(
    tmp_path, images, undisturbed, number
):
    arguments = [*ARGUMENTS, *images, "--output-dir", tmp_path, "--run-name", "job-7"]
    pace = set_pace(tmp_path, 0.3)
    ranks = start_hurt_ranks(2, (0, "steps", "pace"), *arguments, cwd=tmp_path, **pace)
    ranks[0].wait_for(f"step 6/{STEPS}", timeout_seconds=LONG)
    ranks[1].send(number)
    ended = [rank.end(timeout_seconds=60) for rank in ranks]
    assert [one.status for one in ended] == [75, 75], ended[0].err
    stopped_at = last_checkpoint(tmp_path)["step"]
    assert 6 <= stopped_at < STEPS - 1
    assert f"stopped after step {stopped_at}, saved as" in ended[0].err
    assert number.name in ended[1].err
    all_ended(start_ranks("PartTwo", 2, *arguments, "--resume", "auto", cwd=tmp_path))
    assert steps_in(tmp_path) == list(range(1, STEPS + 1))
    assert torch.equal(weights(last_checkpoint(tmp_path)), weights(undisturbed(2)))


@pytest.mark.slow
def test_as_users_start_torchrun_and_a_setting_under_which_restarts_would_fail_is_named(tmp_path):
    agent = start_agent(
        tmp_path,
        *("--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--nproc-per-node", 2),
        *("--max-restarts", 1),
        program=[ROOT / "PartTwo" / "main.py"],
        arguments=[
            *("--sync", "all_reduce", "--dataset", "digits", "--batch-size", 8),
            *("--max-steps", 1, "--threads", 1),
        ],
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"},
    )
    [ended] = all_ended([agent])
    assert "start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" in ended.out
    [run] = (tmp_path / WAY).glob("2*")
    summary = json_of(run, "summary")
    assert (summary["nodes"], summary["ranks_hold_equal_weights"]) == (2, True)


def test_a_named_job_neither_goes_on_with_another_one_nor_replaces_it(tmp_path):
    quick = [*TINY, "--dataset", "digits", "--max-steps", 2, "--output-dir", tmp_path]
    for name in ("job-1", "job-2"):
        job = [*quick, "--threads", 1, "--run-name", name]
        [ended] = all_ended([start_part("PartOne", *job, "--resume", "auto", cwd=tmp_path)])
        assert "no checkpoint in" in ended.out
        metrics = json_lines(tmp_path / "PartOne-none" / name / "metrics.jsonl")
        assert len(metrics) == 2, "trained from the start"
    written = (tmp_path / "PartOne-none" / "job-2" / "metrics.jsonl").read_bytes()
    for name in ("job-2-2", "job-2-3"):
        [ended] = all_ended([start_part("PartOne", *job, cwd=tmp_path)])
        assert f"job-2 holds a run already: this one writes to {name}. " in ended.out
        assert "resuming" not in ended.out
        assert len(json_lines(tmp_path / "PartOne-none" / name / "metrics.jsonl")) == 2
    assert (tmp_path / "PartOne-none" / "job-2" / "metrics.jsonl").read_bytes() == written
