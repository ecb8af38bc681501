"""Messages between real ranks: what arrives, and what is refused without running code."""

import math
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common.checkpoint import load_checkpoint, save_checkpoint
from common.distributed import collectives
from common.distributed.process_group import World, current_world
from common.errors import GroupError, UserError
from lab.proofs.ranks import run_ranks
from tests.helpers import ROOT, run_part, user_environment

ADVICE = (
    ". Start every rank with the same version of this project. If all have it, another program may "
    "have joined as rank 1"
)


class Hostile:
    """An object that creates a file when it is unpickled."""

    def __init__(self, trace):
        self._trace = trace

    def __reduce__(self):
        return Path.touch, (self._trace,)


def outcome(action):
    try:
        return action()
    except (GroupError, UserError) as error:
        return f"{type(error).__name__}: {error}"


def send_raw(content, *, announced=None):
    """Take part in ``gather_objects`` as another program would."""
    size = dist.get_world_size()
    number = torch.tensor([len(content) if announced is None else announced])
    numbers = torch.empty(size, dtype=torch.int64)
    dist.all_gather_into_tensor(numbers, number)
    if 0 < int(number) <= collectives.MOST_BYTES:
        padded = torch.zeros(int(numbers.max()), dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.all_gather_into_tensor(torch.empty(size * len(padded), dtype=torch.uint8), padded)


def send_raw_checkpoint(content):
    """Take part in ``broadcast_checkpoint`` as its source: a number of bytes, or bytes."""
    send_raw(b'""')  # no error so far
    dist.broadcast(torch.tensor([content if isinstance(content, int) else len(content)]), 1)
    if isinstance(content, bytes):
        dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), 1)


def hostile_cases(trace):
    """Return per case: the gathering function, what rank 1 sends, and the start of the message."""
    pickled = pickle.dumps(Hostile(trace))
    return {
        "pickle": ("strings", {"content": pickled}, "'s message: is cut off or not JSON ("),
        "too long": (
            "strings",
            {"content": b"", "announced": 2**40},
            f"'s message has 1,099,511,627,776 bytes; 1 to {collectives.MOST_BYTES:,} are allowed",
        ),
        "negative": ("strings", {"content": b"", "announced": -1}, "'s message has -1 bytes; 1 to"),
        "wrong schema": ("strings", {"content": b"[1]"}, "'s message: Expected str"),
        "pickled state": ("states", {"content": pickled}, "'s message: it may hold"),
    }


def gather(world, how):
    if how == "strings":
        return collectives.gather_objects(world, "mine", schema=str)
    return collectives.gather_states(world, {"residual": torch.zeros(2)})


def hostile_ranks(rank, trace):
    world, found = current_world(), {}
    for name, (how, sent, _) in hostile_cases(trace).items():
        if rank == 1:
            send_raw(**sent)
        else:
            found[name] = outcome(lambda how=how: gather(world, how))
    for name, content in {"too large": 2**60, "pickled": pickle.dumps(Hostile(trace))}.items():
        if rank == 1:
            send_raw_checkpoint(content)
        else:
            found[f"checkpoint {name}"] = outcome(
                lambda: collectives.broadcast_checkpoint(world, "Epoch_1.pt", source=1)
            )
    mine = torch.zeros(3, 2, dtype=torch.int64)
    other = torch.zeros(4, 5, dtype=torch.int64)
    found["not alike"] = outcome(
        lambda: collectives.gather_tensors(world, {"columns": other if rank else mine})
    )
    found["still works"] = collectives.gather_objects(world, rank, schema=int)
    return found


def test_a_rank_cannot_run_code_in_the_others(tmp_path):
    """Rank 1 sends raw bytes in each collective. Rank 0 names it, and nothing is unpickled."""
    trace = tmp_path / "trace"
    found, _ = run_ranks(2, hostile_ranks, trace)
    for name, (_, _, message) in hostile_cases(trace).items():
        text = str(found[name])
        assert text.startswith(f"GroupError: rank 1{message}"), (name, text)
        assert text.endswith(ADVICE)
    assert found["not alike"] == (
        "GroupError: rank 1's message: expected {'columns': 'torch.int64 (3, *)'}, got "
        "{'columns': 'torch.int64 (4, *)'}" + ADVICE
    )
    assert re.fullmatch(
        r"GroupError: rank 1 sends a checkpoint of 1,152,921,504,606,846,976 bytes, but this "
        r"machine has [\d,]+ bytes of free memory: start fewer ranks on it, or free memory",
        str(found["checkpoint too large"]),
    )
    refused = found["checkpoint pickled"]
    assert str(refused).startswith("UserError: checkpoint Epoch_1.pt is "), refused
    assert found["still works"] == [0, 1]
    assert not trace.exists()
    pickle.loads(pickle.dumps(Hostile(trace)))
    assert trace.exists()  # so the code would have worked


def ordinary_ranks(rank, folder):
    world = current_world()
    own = folder / f"rank{rank}"
    own.mkdir()
    weights = {"model_state_dict": {"weight": torch.arange(6.0)}, "optimizer_state_dict": {}}
    if rank == 1:
        save_checkpoint(own / "Epoch_3.pt", {"epoch": 3, "loss": 0.5} | weights)
    state = {
        "steps": 7 + rank,
        "gauss": math.inf,
        "random": [[1, 2**32 - 1], 3, 0, 0.1],
        "errors": {
            "weight": torch.arange(6.0).reshape(2, 3).t() + rank,
            "half": torch.tensor([1.5], dtype=torch.bfloat16),
            "flag": torch.tensor([True, False, True]),
            "scalar": torch.tensor(rank, dtype=torch.int64),
            "none": torch.zeros(0, 4),
        },
        "list": [torch.full((rank,), 2.0)],  # sizes may differ
    }

    def fail():
        raise UserError(f"rank {rank} has no disk")

    def gathered(value, schema):
        return collectives.gather_objects(world, value, schema=schema)

    def refusal(settings):
        return outcome(
            lambda: collectives.check_same_on_all_ranks(world, settings, what="settings")
        )

    assert gathered({"rank": rank}, dict[str, int]) == [{"rank": 0}, {"rank": 1}]
    assert gathered([0.1 + rank, math.nan], list[float | None]) == [[0.1, None], [1.1, None]]
    assert collectives.gather_objects(World(), rank, schema=int) == [rank]
    check_states(collectives.gather_states(world, state))
    assert collectives.gather_states(world, {}) == [{}, {}]
    loss = torch.tensor(math.nan if rank else 0.25, dtype=torch.float64)
    losses = [one["loss"].item() for one in collectives.gather_tensors(world, {"loss": loss})]
    assert losses == [0.25, pytest.approx(math.nan, nan_ok=True)]
    assert collectives.run_on_rank0(world, lambda: f"said by {rank}") == "said by 0"
    first = "" if rank == 0 else "rank 0 stopped: "
    no_disk = outcome(lambda: collectives.run_on_rank0(world, fail))
    assert no_disk == f"UserError: {first}rank 0 has no disk"

    def sent(name):
        return outcome(lambda: collectives.broadcast_checkpoint(world, own / name, source=1))

    checkpoint = sent("Epoch_3.pt")
    assert checkpoint["epoch"] == 3
    assert checkpoint["model_state_dict"]["weight"].tolist() == [0, 1, 2, 3, 4, 5]
    assert "missing.pt cannot be read (No such file or directory)" in sent("missing.pt")
    assert refusal({"lr": 0.1, "nan": math.nan}) is None
    assert refusal({"lr": "1" if rank else 1, "path": Path("x"), f"{rank}": 2}).startswith(
        "UserError: the ranks differ in settings. lr: 1 on ranks 0 and 1; 0: 2 on rank 0, absent "
        "on rank 1; 1: absent on rank 0, 2 on rank 1. Start every rank"
    )


def check_states(states):
    for sender, state in enumerate(states):
        assert state["steps"] == 7 + sender
        assert state["gauss"] == math.inf
        assert state["random"] == [[1, 2**32 - 1], 3, 0, 0.1]
        errors = state["errors"]
        assert torch.equal(errors["weight"], torch.arange(6.0).reshape(2, 3).t() + sender)
        assert errors["half"].dtype == torch.bfloat16
        assert float(errors["half"]) == 1.5
        assert errors["flag"].tolist() == [True, False, True]
        assert (errors["scalar"].shape, int(errors["scalar"])) == ((), sender)
        assert errors["none"].shape == (0, 4)
        assert state["list"][0].tolist() == [2.0] * sender


def test_what_ranks_send_each_other_arrives(tmp_path):
    run_ranks(2, ordinary_ranks, tmp_path)


# --- a whole run ---

AUDIT = """
import sys, traceback

def audit(event, arguments):
    if event == "pickle.find_class":
        with open({log!r}, "a") as file:
            print(arguments, *traceback.format_stack(), file=file)

sys.addaudithook(audit)
import tests  # registers the small models
"""


@pytest.mark.slow
def test_two_ranks_unpickle_nothing_from_start_to_end(tmp_path):
    """Python reports each name that any unpickler looks up, torch's among them; a run has none.

    The runs form a group, build DistributedDataParallel, save the residuals of PowerSGD, send the
    checkpoint, resume from it, evaluate, and write a timeline. At the end a checkpoint is loaded
    without ``weights_only``, to show that the hook works.
    """
    log = tmp_path / "unpickled.txt"
    (tmp_path / "sitecustomize.py").write_text(AUDIT.format(log=str(log)))
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    flags = ("--sync", "ddp_powersgd", "--dataset", "digits", "--model", "wide")
    flags += ("--batch-size", 16, "--max-steps", 5, "--checkpoint-every", 4)
    flags += ("--output-dir", tmp_path / "reports")
    for resume in ((), ("--resume", "Epoch_1_Step_4.pt", "--debug")):
        ended = run_part("PartThree", *flags, *resume, cwd=tmp_path, ranks=2, env=env, cold=True)
        assert [one.status for one in ended] == [0, 0], [one.err for one in ended]
        for saved in (tmp_path / "reports").glob("*/*/checkpoints/Epoch_1_Step_4.pt"):
            saved.rename(tmp_path / saved.name)
    assert not log.exists(), log.read_text()
    newest = tmp_path / "Epoch_1_Step_4.pt"
    residuals = [state["errors"] for state in load_checkpoint(newest)["sync_state_dicts"]]
    assert len(residuals) == 2
    assert all(not torch.equal(residuals[0][name], residuals[1][name]) for name in residuals[0])
    command = f"import torch; torch.load({str(newest)!r}, weights_only=False)"
    subprocess.run(
        [sys.executable, "-c", command], env=user_environment(**env), timeout=60, check=True
    )
    assert "_rebuild_tensor_v2" in log.read_text()
