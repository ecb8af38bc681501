"""Whatever bytes a checkpoint has: reading it raises UserError at most, soon, in little memory."""

import contextlib
import functools
import io
import operator
import os
import zipfile
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW

from common.checkpoint import (
    load_checkpoint,
    load_model_state,
    load_optimizer_state,
    load_plain_state,
    newest_checkpoint,
    save_checkpoint,
    time_of_saving,
)
from common.cli import _say
from common.distributed.failures import Activity, FailureWatch
from common.distributed.launch_env import LaunchSpec
from common.errors import UserError
from common.reporting.console import say
from common.training_engine.lr_schedules import build_schedule
from common.training_plan import TrainingPlan, refuse_other_training
from common.utils.hashing import digest
from tests.helpers.hostile import CASES, VALUES, altered, damaged, run_cases

ESCAPES = "\x1b[2J\x1b]0;owned\x07"


def _model_and_optimizer(kind=SGD):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    settings = {"momentum": 0.9} if kind is SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _entries():
    model, optimizer = _model_and_optimizer()
    scheduler = build_schedule(optimizer, "step", total_steps=9, warmup_steps=2)
    return {
        "epoch": 1,
        "loss": 0.5,
        "step": 3,
        "step_in_epoch": 1,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": scheduler.state_dict(),
        "scaler_state_dict": {},
        "sync_state_dicts": [{"residuals": [torch.ones(3)]}, {}],
        "plan": {"batch_size": 6, "shards": 2, "model": "tiny"},
        "progress": {"best_accuracy": 0.5, "in_a_row": 0},
    }


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "Epoch_1.pt"
    save_checkpoint(path, _entries())
    return path.read_bytes()


def _content(entries, *, sign=True):
    """Return a checkpoint as an attacker writes it: with a digest that is right."""
    if sign and isinstance(entries, dict):
        entries = {**entries, "sha256": digest(entries)}
    buffer = io.BytesIO()
    torch.save(entries, buffer)
    return buffer.getvalue()


@CASES
def test_damaged_bytes(good, cases):
    """Cut, flipped and inserted bytes: refused, or exactly the entries that were saved."""
    entries = digest(load_checkpoint(good))

    def check(content):
        assert digest(load_checkpoint(content)) == entries

    run_cases(cases, damaged(good), check)


@CASES
def test_damaged_pickle_with_right_checksums(good, cases):
    """The archive is rebuilt around a damaged pickle, so that its CRC-32 is right."""
    files = _unzip(good)
    [pickled] = [name for name in files if name.endswith("data.pkl")]

    def check(content):
        load_checkpoint(_zip(files | {pickled: content}))

    run_cases(cases, damaged(files[pickled]), check)


def _unzip(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _zip(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@CASES
def test_well_formed_checkpoints_of_another_kind(cases, tmp_path):
    """Entries of other types and values: loaded, or refused with the one error."""
    path = tmp_path / "Epoch_1.pt"

    def check(entries):
        path.write_bytes(_content(entries, sign=False))
        with contextlib.suppress(UserError):
            time_of_saving(path)
        loaded = load_checkpoint(path)
        model, optimizer = _model_and_optimizer()
        scheduler = build_schedule(optimizer, "step", total_steps=9, warmup_steps=2)
        load_model_state(model, loaded, name="x")
        load_optimizer_state(optimizer, loaded, name="x")
        load_plain_state(scheduler, loaded.get("scheduler_state_dict") or {}, name="x")

    run_cases(cases, altered(_entries()), check)


@CASES
def test_any_values_as_weights(cases):
    """Any plain values in place of a model's or an optimiser's state."""

    def check(values):
        _, optimizer = _model_and_optimizer(AdamW)
        entries = {"model_state_dict": values[0], "optimizer_state_dict": values[1]}
        load_checkpoint(_content({"epoch": 1, "loss": 0.0} | entries))
        load_optimizer_state(optimizer, entries, name="x")

    run_cases(cases, st.tuples(VALUES, VALUES), check)


def _changed_pickle(old, new, tensor, *, data=b""):
    """Return a checkpoint in whose pickle ``old`` is replaced, and perhaps its tensor's data."""
    files = _unzip(_content({**PLAIN, "model_state_dict": {"w": tensor}}, sign=False))
    pickled, record = (
        next(name for name in files if name.endswith(end)) for end in ("data.pkl", "data/0")
    )
    assert files[pickled].count(old) == 1
    return _zip(files | {pickled: files[pickled].replace(old, new), record: data or files[record]})


PLAIN = {"epoch": 1, "loss": 0.0, "model_state_dict": {}, "optimizer_state_dict": {}}


def _hostile():
    module, one = b"ctorch\nFloatStorage\n", torch.ones(4)
    extra = {
        "sparse": torch.sparse_coo_tensor([[0]], [1.0], (2**40,)),
        "meta": torch.empty(2**40, device="meta"),
        "cyclic": [],
    }
    extra["cyclic"].append(extra["cyclic"])
    signed = [
        {"epoch": float("nan")},
        {"epoch": True},
        {"epoch": 10**600},
        {"step": -1},
        {"step_in_epoch": "1"},
        {"loss": None},
        {"plan": [1]},
        {"plan": {"batch_size": 8}},  # without shards
        {"optimizer_state_dict": [1]},
        {"scheduler_state_dict": "x"},
        {"sync_state_dicts": {"a": {}}},
        {"progress": 1},
        {"saved_at": float("inf")},
    ]
    return [
        *(_content(PLAIN | {"extra": value}, sign=False) for value in extra.values()),
        *(_content(PLAIN | changed) for changed in signed),
        _changed_pickle(b"K\x04tq", b"J\x00\x00\x00\x01tq", one),  # more entries than data
        _changed_pickle(module, module, one, data=b"x"),  # fewer bytes than entries
        _changed_pickle(b"FloatStorage", b"FloaxStorage", one),
        _changed_pickle(b"K\x04\x85", b"K\x05\x85", one),  # a shape beyond the data
        _changed_pickle(b"QK\x00", b"QK\x01", one),  # an offset beyond the data
        _changed_pickle(b"K\x01\x85", b"J\xff\xff\xff\xff\x85", one),  # a negative stride
    ]


@pytest.mark.filterwarnings("ignore")
def test_crafted_checkpoints_are_refused(tmp_path):
    """Each is refused in one line with its name; the search for the newest passes them over."""
    for epoch, content in enumerate(_hostile(), start=2):
        path = tmp_path / f"Epoch_{epoch}.pt"
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{path.name} is damaged[^\n]*$"):
            load_checkpoint(path)
    save_checkpoint(tmp_path / "Epoch_1.pt", PLAIN)
    assert newest_checkpoint([tmp_path])[0] == tmp_path / "Epoch_1.pt"


def test_special_files(tmp_path):
    """A FIFO does not block, and a device is not read; a link is followed."""
    os.mkfifo(tmp_path / "Epoch_9.pt")
    (tmp_path / "Epoch_8.pt").symlink_to("/dev/zero")
    save_checkpoint(tmp_path / "elsewhere", PLAIN)
    (tmp_path / "Epoch_1.pt").symlink_to("elsewhere")
    for name in ("Epoch_9.pt", "Epoch_8.pt"):
        with pytest.raises(UserError, match=f"{name} is a .*not a regular file"):
            load_checkpoint(tmp_path / name)
    assert newest_checkpoint([tmp_path])[0] == tmp_path / "Epoch_1.pt"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("state", 0, "momentum_buffer"), torch.zeros(7)),
        (("param_groups", 0), {"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1, 2, 3]}),
        (("state", 0, "momentum_buffer"), "x"),
        (("state", 99), {"momentum_buffer": None}),
        (("state", 0), None),
        (("param_groups", 0, "params"), [0]),
        (("param_groups", 0), 5),
        (("param_groups",), []),
    ],
)
def test_another_optimizers_state(place, value):
    """Refused when it is loaded; torch accepts some of these."""
    _, optimizer = _model_and_optimizer()
    state = optimizer.state_dict()
    *above, last = place
    functools.reduce(operator.getitem, above, state)[last] = value
    with pytest.raises(UserError, match="Epoch_1 holds another optimizer's state"):
        load_optimizer_state(optimizer, {"optimizer_state_dict": state}, name="Epoch_1")


def test_another_schedulers_state():
    _, optimizer = _model_and_optimizer()
    scheduler = build_schedule(optimizer, "onecycle", total_steps=9)
    for state in ({"last_epoch": 3}, {"total_steps": None}, {"total_steps": 0}, {"_schedulers": 5}):
        with pytest.raises(UserError, match="another OneCycleLR"):
            load_plain_state(scheduler, state, name="Epoch_1")
    optimizer.step()
    scheduler.step()


@pytest.mark.parametrize("name", ["onecycle", "cosine", "step", "constant"])
def test_the_same_schedulers_state_fits(name):
    """Also where the schedule is built at the rate of the checkpoint's step, as when resuming."""
    _, optimizer = _model_and_optimizer()
    saved = build_schedule(optimizer, name, total_steps=9, warmup_steps=2)
    for _ in range(9):
        optimizer.step()
        saved.step()
    state = saved.state_dict()
    load_plain_state(build_schedule(optimizer, name, total_steps=9, warmup_steps=2), state, name="")
    other = build_schedule(optimizer, name, total_steps=9, warmup_steps=3)
    with pytest.raises(UserError, match="holds the state of another"):
        load_plain_state(other, state, name="")


def test_what_a_checkpoint_says_reaches_no_terminal(capsys):
    """Its plan, its state and its pickle may hold escapes, and so may another rank's message."""
    plan = TrainingPlan("digits", 9, "tiny", "sgd", 3, 1, 1, 0, "step", 9, None, 3, "")
    saved = asdict(plan) | {"model": ESCAPES}
    weights = {"model_state_dict": {ESCAPES: torch.ones(1)}}
    store = dist.HashStore()
    store.set("message", f"rank 1 stopped: {ESCAPES}")
    launch = LaunchSpec(0, 2, "127.0.0.1")
    watch = FailureWatch(store, launch, activity=Activity(), timeout_seconds=0.0)
    for refuse in (
        lambda: refuse_other_training("x", {"plan": saved}, plan),
        lambda: load_model_state(nn.Linear(2, 2), weights, name="x"),
    ):
        with pytest.raises(UserError, match="\x1b") as refused:
            refuse()
        _say(f"error: {refused.value}", 1)
        say(f"warning: {refused.value}")
    _say(watch.message() or "", 1)
    written = capsys.readouterr()
    assert written.err.count("owned") == 3
    assert written.out.count("owned") == 2
    assert "\x1b" not in written.out + written.err
