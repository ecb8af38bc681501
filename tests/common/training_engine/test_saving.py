"""When checkpoints are written, what they hold, and what happens if a write fails.

The small trainings here have steps of microseconds, and the thread that writes is held back where a
test needs the training to be ahead of it.
"""

import math
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import common.training_engine.checkpoint_manager as saving
from common.checkpoint import checkpoints_by_age, load_checkpoint, newest_checkpoint
from common.distributed.process_group import World
from common.errors import GroupError, UserError
from common.training_engine import AfterEachStep, Callback, EarlyStop, TrainingEngine, Validator
from common.training_engine.callbacks import EpochEnd
from common.training_engine.checkpoint_manager import (
    CheckpointManager,
    CheckpointWriter,
    SavePolicy,
)
from common.utils.hashing import digest
from tests.helpers import run_ranks

STEPS = 8  # an epoch
LONGEST_WAIT = 30.0  # seconds; never reached if the code is right

both_ways = pytest.mark.parametrize("in_background", [False, True])


class NaNInStep(nn.CrossEntropyLoss):
    """A loss that is NaN from the given training step on, and so are the weights after it."""

    step = math.inf

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # not in an evaluation
            self.step -= 1
        return super().forward(outputs, labels) * (math.nan if self.step <= 0 else 1.0)


def batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(STEPS, 4, 3, generator=random)
    return [(one, (one[:, 0] > 0).long()) for one in inputs]


def engine_for(criterion: nn.Module | None = None, **options: Any) -> TrainingEngine:
    """Return a prepared engine whose state has momentum, averages and a schedule."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = TrainingEngine(model, "cpu", use_ema=True, **options)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9])
    engine.prepare(optimizer, criterion or nn.CrossEntropyLoss(), schedule)
    return engine


def train(
    manager: CheckpointManager,
    *callbacks: Callback,
    epochs: int = 2,
    engine: TrainingEngine | None = None,
    **options: Any,
) -> None:
    (engine or engine_for()).fit(
        batches(), 1, epochs, callbacks=[*callbacks, manager], seed=0, **options
    )


def names(folder: Path) -> list[str]:
    return [path.stem for path in checkpoints_by_age(folder)][::-1]


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors in nested dicts and lists."""
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value
    return [t for one in inside for t in tensors(one)] if isinstance(value, dict | list) else []


# --- what is not finite is not saved ---


@both_ways
@pytest.mark.parametrize("stops", [False, True])
def test_on_a_gpu_no_checkpoint_holds_what_is_not_finite(
    tmp_path: Path, in_background: bool, stops: bool
) -> None:
    """Step 13 is not finite, and steps are looked at in groups of ten, as on a GPU.

    The checkpoint of step 15 would come before that look, and so would that of a request to stop.
    """
    criterion = NaNInStep()
    criterion.step = 13
    engine = engine_for(criterion)
    engine.sync.equal_gradients = False  # as on a GPU, where no norm is read before the flush
    stop = AfterEachStep(lambda: engine.request_stop() if engine.step == 12 and stops else None)
    validator = Validator(batches(), nn.CrossEntropyLoss(), EarlyStop(None, 1))
    manager = CheckpointManager(
        tmp_path, policy=SavePolicy(every_steps=5), in_background=in_background
    )
    with pytest.raises(GroupError, match="not finite in epoch 2, step 13"):
        train(manager, validator, stop, engine=engine)
    assert names(tmp_path) == ["Epoch_1_Step_5", "Epoch_1", "Epoch_2_Step_10"]
    assert (tmp_path / "best.pt").exists()
    for path in tmp_path.glob("*.pt"):
        found = tensors(load_checkpoint(path))
        assert len(found) > 20
        assert all(bool(torch.isfinite(one).all()) for one in found), path
    assert newest_checkpoint([tmp_path])[0] == tmp_path / "Epoch_2_Step_10.pt"


def test_train_does_not_save_what_is_not_finite(tmp_path: Path) -> None:
    """``best.pt`` and ``last.pt`` of ``TrainingEngine.train`` stay those of the first epoch."""
    criterion = NaNInStep()
    criterion.step = STEPS + 1
    model = nn.Linear(3, 2)
    engine = TrainingEngine(model, "cpu", use_ema=True, output_dir=tmp_path)
    engine.sync.equal_gradients = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GroupError, match="step 9"):
        engine.train(batches(), batches(), optimizer, criterion, num_epochs=2)
    for name in ("best.pt", "last.pt"):
        entries = load_checkpoint(tmp_path / "experiment" / name)
        assert entries["epoch"] == 1
        assert all(bool(torch.isfinite(one).all()) for one in tensors(entries))


# --- a thread writes ---


class HeldWrites:
    """Replaces ``save_checkpoint``: each write waits until ``go`` is set, then takes its turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.written, self._lock = threading.Event(), [], threading.Lock()
        self._save = saving.save_checkpoint
        self.threads: set[int] = set()
        monkeypatch.setattr(saving, "save_checkpoint", self.save)

    def save(self, path: Path, entries: Any) -> None:
        assert self._lock.acquire(blocking=False), "two writes at a time"
        assert self.go.wait(LONGEST_WAIT), "the training did not go on while a checkpoint was due"
        self._save(path, entries)
        self.written.append(path.name)
        self.threads.add(threading.get_ident())
        self._lock.release()


def test_the_thread_writes_the_state_at_the_time_of_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write begins after step 3 and ends after step 5; the files are those without it."""
    at_once, in_thread = tmp_path / "at_once", tmp_path / "in_thread"
    progress = {"best_accuracy": 0.0}
    train(
        CheckpointManager(
            at_once,
            policy=SavePolicy(every_steps=3),
            extra={"progress": progress},
            in_background=False,
        )
    )

    held, engine = HeldWrites(monkeypatch), engine_for()

    def change_and_let_go() -> None:
        progress["best_accuracy"] = 0.5 if 3 < engine.step < 6 else 0.0
        if engine.step == 5:
            held.go.set()

    manager = CheckpointManager(
        in_thread,
        policy=SavePolicy(every_steps=3),
        extra={"progress": progress},
        in_background=True,
    )
    train(manager, AfterEachStep(change_and_let_go), engine=engine)
    assert threading.get_ident() not in held.threads
    assert names(in_thread) == names(at_once)
    assert [name.removesuffix(".pt") for name in held.written] == names(in_thread), "in order"
    for path in at_once.iterdir():
        one, other = (load_checkpoint(folder / path.name) for folder in (at_once, in_thread))
        for entries in (one, other):
            for sums in entries.get("epoch_sums", ()):
                sums.clear()  # these are times
        assert digest(one) == digest(other), path.name


def test_an_old_checkpoint_is_deleted_only_after_the_newest_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, seen = HeldWrites(monkeypatch), []
    held.go.set()
    save = saving.save_checkpoint

    def look(path: Path, entries: Any) -> None:
        seen.append((path.name, names(tmp_path)))
        save(path, entries)

    monkeypatch.setattr(saving, "save_checkpoint", look)
    copy = tmp_path / "copies" / "newest.pt"
    manager = CheckpointManager(
        tmp_path, policy=SavePolicy(keep=1), copy_to=copy, in_background=True
    )
    train(manager, epochs=3)
    writes = [found for name, found in seen if name != copy.name]
    assert writes == [[], ["Epoch_1"], ["Epoch_2"]]
    assert names(tmp_path) == ["Epoch_3"]
    assert load_checkpoint(copy)["epoch"] == 3


class Interrupt(BaseException):
    """Ends a training as Ctrl-C does."""


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_in_training_waits_for_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """If that write fails, a warning says so, and the training's own error is the one raised."""
    held, engine = HeldWrites(monkeypatch), engine_for()
    if fails:
        monkeypatch.setattr(held, "_save", fail)

    def interrupt() -> None:
        if engine.step == 4:
            threading.Timer(0.2, held.go.set).start()
            raise Interrupt

    manager = CheckpointManager(tmp_path, policy=SavePolicy(every_steps=3), in_background=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(Interrupt):
            train(manager, AfterEachStep(interrupt), engine=engine)
    expected = ["the newest checkpoint was not written: no space left"] if fails else []
    assert [str(one.message) for one in warned] == expected
    assert names(tmp_path) == ([] if fails else ["Epoch_1_Step_3"])


def fail(*_: object) -> None:
    raise UserError("no space left")


def test_a_failed_write_ends_the_training_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "save_checkpoint", fail)
    engine = engine_for()
    with pytest.raises(UserError, match="no space left"):
        train(
            CheckpointManager(tmp_path, policy=SavePolicy(every_steps=3), in_background=True),
            engine=engine,
        )
    assert engine.step == 6
    engine = engine_for()
    with pytest.raises(UserError, match="no space left"):
        train(CheckpointManager(tmp_path, in_background=True), epochs=1, engine=engine)
    assert engine.step == STEPS, "the write of the last epoch fails before the training ends"
    exhausted = iter(batches())
    with pytest.raises(UserError, match="no space left"):
        engine_for().fit(
            exhausted, 1, 2, callbacks=[CheckpointManager(tmp_path, in_background=True)]
        )


class AtTheEnd(Callback):
    """Calls ``look`` when the training ends, before the callbacks that follow."""

    def __init__(self, look: Callable[[], None]) -> None:
        self.on_train_end = look  # type: ignore[method-assign]


def test_the_training_ends_after_the_last_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its time, which an earlier callback measures, includes the write."""
    held, seen = HeldWrites(monkeypatch), []
    look = AtTheEnd(lambda: seen.extend(names(tmp_path)))
    threading.Timer(0.5, held.go.set).start()
    train(CheckpointManager(tmp_path, in_background=True), look, epochs=1)
    assert seen == ["Epoch_1"]


def failing_on_rank_1(rank: int) -> list[str]:
    """Return what ``start`` and ``finish`` raise on this rank; rank 1's first write fails."""
    writer = CheckpointWriter(World(rank=rank, size=2), in_background=True)
    done: list[str] = []
    writer.start(fail if rank == 1 else lambda _: None, {})
    try:
        writer.start(lambda _: done.append("written too early"), {})
    except UserError as error:
        done.append(str(error))
    writer.start(lambda entries: done.append(f"wrote {entries}"), {"number": 2})
    writer.finish()
    return done


def test_a_write_that_fails_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(2, failing_on_rank_1)
    assert first == ["rank 1 stopped: no space left", "wrote {'number': 2}"]
    assert second == ["no space left", "wrote {'number': 2}"]


# --- every few epochs ---


class StopAfter(Callback):
    """Ends the training after an epoch, as EarlyStop does."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_epoch_end(self, end: EpochEnd) -> None:
        if end.epoch == self._epoch:
            end.stop_reason = "enough"


def test_every_few_epochs_and_always_the_last(tmp_path: Path) -> None:
    def saved(*callbacks: Callback, engine: TrainingEngine | None = None, **options: Any) -> list:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        train(
            CheckpointManager(folder, policy=SavePolicy(every_epochs=3)),
            *callbacks,
            engine=engine,
            **options,
        )
        return names(folder)

    assert saved(epochs=7) == ["Epoch_3", "Epoch_6", "Epoch_7"]
    assert saved(StopAfter(2), epochs=7) == ["Epoch_2"]
    assert saved(epochs=7, max_steps=4 * STEPS) == ["Epoch_3", "Epoch_4"]
    assert saved(epochs=7, max_steps=4 * STEPS + 1) == ["Epoch_3", "Epoch_5"]
    engine = engine_for()
    stop = AfterEachStep(lambda: engine.request_stop() if engine.step == STEPS else None)
    assert saved(stop, engine=engine, epochs=7) == ["Epoch_1"], "a request in the epoch's last step"


def test_the_best_epoch_is_saved_even_if_no_other_checkpoint_is_due(tmp_path: Path) -> None:
    validator = Validator(batches(), nn.CrossEntropyLoss(), EarlyStop(None, 1))
    manager = CheckpointManager(tmp_path, policy=SavePolicy(every_epochs=10))
    best = []
    train(
        manager,
        validator,
        AfterEachStep(lambda: best.append((tmp_path / "best.pt").exists())),
        epochs=2,
    )
    assert best == [False] * STEPS + [True] * STEPS
    assert names(tmp_path) == ["Epoch_2"]
