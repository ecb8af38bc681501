"""Whatever bytes a checkpoint has: reading it raises UserError at most, soon, in little memory."""

import io
import os
import pickle
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

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
from common.distributed.failures import FailureReport
from common.errors import UserError
from common.experiment.training_plan import TrainingPlan, refuse_other_training
from common.reporting.console import say
from common.training_engine.lr_schedules import build_schedule
from common.utils.hashing import digest
from tests.helpers.hostile import CASES, VALUES, altered, damaged, run_cases
from tests.helpers.paths import ROOT

ESCAPES = "\x1b[2J\x1b]0;owned\x07"


def _model_and_optimizer(kind: type = SGD) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    settings = {"momentum": 0.9} if kind is SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _entries() -> dict:
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
        "auto_buckets": {
            "sync": "ddp",
            "bucket_mb": 9.0,
            "expected_step_seconds": 0.5,
            "default_step_seconds": 0.6,
        },
    }


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "Epoch_1.pt"
    save_checkpoint(path, _entries())
    return path.read_bytes()


def _content(entries: object, *, sign: bool = True) -> bytes:
    """Return a checkpoint as an attacker writes it: with a digest that is right."""
    if sign and isinstance(entries, dict):
        entries = {**entries, "sha256": digest(entries)}
    buffer = io.BytesIO()
    torch.save(entries, buffer)
    return buffer.getvalue()


@CASES
def test_damaged_bytes(good: bytes, cases: int) -> None:
    """Cut, flipped and inserted bytes: refused, or exactly the entries that were saved."""
    entries = digest(load_checkpoint(good))

    def check(content: bytes) -> None:
        assert digest(load_checkpoint(content)) == entries

    run_cases(cases, damaged(good), check)


@CASES
def test_damaged_pickle_with_right_checksums(good: bytes, cases: int) -> None:
    """The archive is rebuilt around a damaged pickle, so that its CRC-32 is right."""
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    [pickled] = [name for name in files if name.endswith("data.pkl")]

    def check(content: bytes) -> None:
        load_checkpoint(_zip(files | {pickled: content}))

    run_cases(cases, damaged(files[pickled]), check)


def _zip(files: dict[str, bytes], **options: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **options) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@CASES
def test_well_formed_checkpoints_of_another_kind(cases: int, tmp_path: Path) -> None:
    """Entries of other types and values: refused when read, or when loaded into the training.

    What loads trains: the next step works.
    """
    path = tmp_path / "Epoch_1.pt"

    def check(entries: object) -> None:
        path.write_bytes(_content(entries, sign=False))
        loaded = load_checkpoint(path)
        model, optimizer = _model_and_optimizer()
        load_model_state(model, loaded, name="x")
        load_optimizer_state(optimizer, loaded, name="x")
        scheduler = build_schedule(optimizer, "step", total_steps=9, warmup_steps=2)
        load_plain_state(scheduler, loaded.get("scheduler_state_dict") or {}, name="x")
        load_optimizer_state(optimizer, loaded, name="x")
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()

    run_cases(cases, altered(_entries()), check)
    run_cases(cases, altered(_entries()), lambda entries: time_of_saving(_written(path, entries)))


def _written(path: Path, entries: object) -> Path:
    path.write_bytes(_content(entries, sign=False))
    return path


@CASES
def test_any_values_as_weights(cases: int) -> None:
    """Any plain values in place of a model's or an optimiser's state."""

    def check(values: tuple) -> None:
        _, optimizer = _model_and_optimizer(AdamW)
        entries = {"model_state_dict": values[0], "optimizer_state_dict": values[1]}
        load_checkpoint(_content({"epoch": 1, "loss": 0.0} | entries))
        load_optimizer_state(optimizer, entries, name="x")

    run_cases(cases, st.tuples(VALUES, VALUES), check)


class _Call:
    """Unpickled as a call of any function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


def _deep(levels: int) -> list:
    """Return nested lists; torch.save cannot write deeper ones than the recursion limit."""
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def _doubled(levels: int) -> list:
    """Return 2**levels values in a file of a few hundred bytes."""
    value: list = []
    for _ in range(levels):
        value = [value, value]
    return value


def _cyclic() -> list:
    value: list = []
    value.append(value)
    return value


def _changed_pickle(old: bytes, new: bytes, tensor: torch.Tensor, *, data: bytes = b"") -> bytes:
    """Return a checkpoint in whose pickle ``old`` is replaced, and perhaps its tensor's data."""
    content = _content({**_plain(), "model_state_dict": {"w": tensor}}, sign=False)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    pickled, record = (
        next(name for name in files if name.endswith(end)) for end in ("data.pkl", "data/0")
    )
    assert files[pickled].count(old) == 1
    return _zip(files | {pickled: files[pickled].replace(old, new), record: data or files[record]})


def _plain() -> dict:
    return {"epoch": 1, "loss": 0.0, "model_state_dict": {}, "optimizer_state_dict": {}}


def _hostile() -> dict[str, bytes]:
    one, plain = torch.ones(4), _plain()
    files = {"x/data.pkl": pickle.dumps(plain, 2)}
    (module, numel) = (b"ctorch\nFloatStorage\n", b"K\x04tq")
    extra = {
        "stride 0": torch.zeros(1).expand(2**31),
        "stride 0 in two dimensions": torch.zeros(1).expand(2**16, 2**16),
        "a call that takes 100 GB": _Call(bytearray, 10**11),
        "a tensor of 400 GB": _Call(torch.FloatTensor, 10**11),
        "sparse": torch.sparse_coo_tensor([[0]], [1.0], (2**40,)),
        "quantised": torch.quantize_per_tensor(one, 0.1, 0, torch.qint8),
        "meta": torch.empty(2**40, device="meta"),
        "a storage": one.untyped_storage(),
        "a type": torch.float32,
        "a set": {1, 2},
        "bytes": b"x",
        "deep": _deep(300),
        "cyclic": _cyclic(),
        "doubled lists": _doubled(60),
        "one text many times": ["x" * 100_000] * 100_000,
        "one tensor many times": [torch.zeros(250_000)] * 10_000,
        "another entry's name is a number": {10**30: 1},
    }
    signed = {
        "epoch NaN": {"epoch": float("nan")},
        "epoch true": {"epoch": True},
        "epoch of 600 digits": {"epoch": 10**600},
        "negative step": {"step": -1},
        "step in the epoch is a text": {"step_in_epoch": "1"},
        "loss none": {"loss": None},
        "plan a list": {"plan": [1]},
        "plan without shards": {"plan": {"batch_size": 8}},
        "optimizer a list": {"optimizer_state_dict": [1]},
        "scheduler a text": {"scheduler_state_dict": "x"},
        "sync states a dict": {"sync_state_dicts": {"a": {}}},
        "progress a number": {"progress": 1},
        "saved at NaN": {"saved_at": float("nan")},
        "saved at infinity": {"saved_at": float("inf")},
    }
    # {(t, t): 1} where t is a tuple of twice the same tuple, and so on: hours to hash.
    doubled_name = b"\x80\x02})" + 60 * b"q\x01h\x01\x86" + b"K\x01s."
    return (
        {name: _content(plain | {"extra": value}, sign=False) for name, value in extra.items()}
        | {name: _content(plain | changed) for name, changed in signed.items()}
        | {
            "compressed": _zip(files | {"x/zeros": bytes(10**8)}, compression=zipfile.ZIP_DEFLATED),
            "doubled name": _zip({"x/data.pkl": doubled_name}),
            "another protocol": _zip({"x/data.pkl": pickle.dumps(plain, 4)}),
            "more entries than data": _changed_pickle(numel, b"J\x00\x00\x00\x01tq", one),
            "fewer bytes than entries": _changed_pickle(module, module, one, data=b"x"),
            "unknown storage": _changed_pickle(b"FloatStorage", b"FloaxStorage", one),
            "shape beyond the data": _changed_pickle(b"K\x04\x85", b"K\x05\x85", one),
            "offset beyond the data": _changed_pickle(b"QK\x00", b"QK\x01", one),
            "negative stride": _changed_pickle(b"K\x01\x85", b"J\xff\xff\xff\xff\x85", one),
            "twice the same name": _twice(files),
        }
    )


@pytest.mark.filterwarnings("ignore:Duplicate name")
def _twice(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in [*files.items(), *files.items()]:
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_crafted_checkpoints_are_refused(tmp_path: Path) -> None:
    """Each is refused within 2 s, and reading all of them takes less than 400 MB more memory.

    torch.load took 8.7 GB and 53 s for the tensor of stride 0. The order of the folder passes each
    of them over, and names it.
    """
    inside = tmp_path / "inside"
    inside.mkdir()
    hostile = _hostile()
    for index, (name, content) in enumerate(hostile.items()):
        (tmp_path / f"{index}-{name}.pt").write_bytes(content)
        (inside / f"Epoch_{index + 2}.pt").write_bytes(content)
        os.utime(inside / f"Epoch_{index + 2}.pt", (4e9, 4e9))
    save_checkpoint(inside / "Epoch_1.pt", _plain())
    program = (
        "import resource, sys, time, warnings\n"
        "from pathlib import Path\n"
        "from common.checkpoint import load_checkpoint\n"
        "from common.errors import UserError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for path in sorted(Path(sys.argv[1]).glob('*.pt')):\n"
        "    began = time.process_time()\n"
        "    try:\n"
        "        load_checkpoint(path)\n"
        "        print('accepted', path.name)\n"
        "    except UserError as error:\n"
        "        if str(path) not in str(error) or chr(10) in str(error):\n"
        "            print('not named:', error)\n"
        "    if time.process_time() - began > 2:\n"
        "        print('slow', path.name, time.process_time() - began)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    *complaints, kilobytes = ended.stdout.splitlines()
    assert not complaints
    assert ended.stderr == ""
    assert int(kilobytes) < 400_000
    found, skipped = newest_checkpoint([inside])
    assert found == inside / "Epoch_1.pt"
    assert len(skipped) == len(hostile)


@pytest.mark.slow
def test_memory_of_a_good_checkpoint(tmp_path: Path) -> None:
    """Reading 80 MB in one tensor takes at most twice that, in either order of its axes."""
    for index, weight in enumerate((torch.zeros(20_000_000), torch.zeros(10, 2_000_000).t())):
        save_checkpoint(tmp_path / f"{index}.pt", _plain() | {"model_state_dict": {"w": weight}})
    program = (
        "import resource, sys\n"
        "from common.checkpoint import load_checkpoint\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "load_checkpoint(sys.argv[1])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    for index in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / f"{index}.pt")],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=True,
        )
        assert int(ended.stdout) * 1024 < 2.25 * 80_000_000


def test_special_files(tmp_path: Path) -> None:
    """A FIFO does not block, and a device is not read; a link is followed."""
    os.mkfifo(tmp_path / "Epoch_9.pt")
    (tmp_path / "Epoch_8.pt").symlink_to("/dev/zero")
    save_checkpoint(tmp_path / "elsewhere", _plain())
    (tmp_path / "Epoch_1.pt").symlink_to("elsewhere")
    for name in ("Epoch_9.pt", "Epoch_8.pt"):
        with pytest.raises(UserError, match=f"{name} is a .*not a regular file"):
            load_checkpoint(tmp_path / name)
    assert newest_checkpoint([tmp_path])[0] == tmp_path / "Epoch_1.pt"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("state", 0, "momentum_buffer"), torch.zeros(7)),
        (("state", 0, "momentum_buffer"), "x"),
        (("state", 0, "other"), 1.0),
        (("state", 99), {"momentum_buffer": None}),
        (("state", 0), None),
        (("param_groups", 0, "lr"), "x"),
        (("param_groups", 0, "lr"), float("nan")),
        (("param_groups", 0, "lr"), 1e300),  # torch: RuntimeError in the first step
        (("param_groups", 0, "lr"), -0.1),
        (("param_groups", 0, "lr"), None),
        (("param_groups", 0, "params"), [0]),
        (("param_groups", 0), 5),
        (("param_groups",), []),
    ],
)
def test_another_optimizers_state(place: tuple, value: object) -> None:
    """Refused when it is loaded; torch accepts some of these and fails in the first step."""
    _, optimizer = _model_and_optimizer()
    state = optimizer.state_dict()
    *path, last = place
    target = state
    for key in path:
        target = target[key]
    target[last] = value
    with pytest.raises(UserError, match="Epoch_1 holds another optimizer's state"):
        load_optimizer_state(optimizer, {"optimizer_state_dict": state}, name="Epoch_1")


def test_another_schedulers_state() -> None:
    """A state that would replace the scheduler's own methods or settings is refused."""
    _, optimizer = _model_and_optimizer()
    scheduler = build_schedule(optimizer, "onecycle", total_steps=9)
    for state in (
        {"step": 5},
        {"last_epoch": "x"},
        {"base_lrs": [1, 2]},
        {"total_steps": None, 3: 1},
        {"total_steps": None},
        {"total_steps": 0},  # torch: ValueError in a later step
        {"last_epoch": 10**6},
        {"last_epoch": -1},
        {"base_lrs": [1e300]},
        {"_last_lr": [-0.1]},
    ):
        with pytest.raises(UserError, match="another OneCycleLR"):
            load_plain_state(scheduler, state, name="Epoch_1")
    optimizer.step()
    scheduler.step()


@pytest.mark.parametrize("name", ["onecycle", "cosine", "step", "constant"])
def test_the_same_schedulers_state_fits(name: str) -> None:
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


def test_what_a_checkpoint_says_reaches_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Its plan, its state and its pickle may hold escapes, and so may another rank's message."""
    plan = TrainingPlan("digits", 9, "tiny", "sgd", 3, 1, 1, 0, "step", 9, None, 3, "")
    saved = asdict(plan) | {"model": ESCAPES}
    _, optimizer = _model_and_optimizer()
    scheduler = build_schedule(optimizer, "step", total_steps=9)
    store = dist.HashStore()
    store.set("message", f"rank 1 stopped: {ESCAPES}")
    report = FailureReport(store, 0, 2, patience_seconds=0.0, other_sockets=())
    broken = _zip({"x/data.pkl": f"cos\n{ESCAPES}\n)R.".encode()})
    for refuse in (
        lambda: refuse_other_training("x", {"plan": saved}, plan),
        lambda: load_plain_state(scheduler, {"last_epoch": ESCAPES}, name="x"),
        lambda: load_checkpoint(broken, name="x"),
    ):
        with pytest.raises(UserError, match="\x1b") as refused:
            refuse()
        _say(f"error: {refused.value}", 1)
        say(f"warning: {refused.value}")
    _say(report.fetch() or "", 1)
    written = capsys.readouterr()
    assert written.err.count("owned") == 4
    assert written.out.count("owned") == 3
    assert "\x1b" not in written.out + written.err
