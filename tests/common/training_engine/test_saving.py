"""When checkpoints are written, what they hold, what happens if a write fails, and ``resume=``."""

import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import common.training_engine.checkpoint_manager as saving
from common.checkpoint import checkpoints_by_age, load_checkpoint, newest_checkpoint
from common.errors import GroupError, UserError
from common.training_engine import AfterEachStep, Callback, TrainingEngine, Validator
from common.training_engine.checkpoint_manager import (
    CheckpointManager,
    SavePolicy,
    checkpoint_bytes,
)
from common.utils.hashing import digest
from tests.helpers import run_ranks
from tests.helpers.engines import prepared, sgd

STEPS = 8  # an epoch


class NaNInStep(nn.CrossEntropyLoss):
    """A loss that is NaN from the given training step on, and so are the weights after it."""

    step = math.inf

    def forward(self, outputs, labels):
        if torch.is_grad_enabled():  # not in an evaluation
            self.step -= 1
        return super().forward(outputs, labels) * (math.nan if self.step <= 0 else 1.0)


def batches(seed=0):
    inputs = torch.randn(STEPS, 4, 3, generator=torch.Generator().manual_seed(seed))
    return [(one, (one[:, 0] > 0).long()) for one in inputs]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))


def engine_for(criterion=None):
    """Return an engine whose state has momentum, averages and a schedule."""
    model = network()
    optimizer = sgd(model, momentum=0.9)
    schedule = MultiStepLR(optimizer, [5, 9])
    return prepared(
        model, optimizer=optimizer, criterion=criterion, scheduler=schedule, use_ema=True
    )


def train(manager, *callbacks, epochs=2, engine=None, **options):
    (engine or engine_for()).fit(
        batches(), 1, epochs, callbacks=[*callbacks, manager], seed=0, **options
    )


def validator():
    return Validator(batches(), nn.CrossEntropyLoss())


def names(folder):
    return [path.stem for path in checkpoints_by_age(folder)][::-1]


def assert_finite(path):
    found = [one for one in tree_leaves(load_checkpoint(path)) if isinstance(one, Tensor)]
    assert len(found) > 20
    assert all(bool(torch.isfinite(one).all()) for one in found), path


@pytest.mark.parametrize("stops", [False, True])
def test_on_a_gpu_no_checkpoint_holds_what_is_not_finite(tmp_path, stops):
    """A checkpoint of step 15, or of a request to stop, would come before a look at step 13."""
    criterion = NaNInStep()
    criterion.step = 13
    engine = engine_for(criterion)
    engine.sync.equal_gradients = False  # as on a GPU, where no norm is read before the flush
    stop = AfterEachStep(lambda: engine.request_stop() if engine.step == 12 and stops else None)
    manager = CheckpointManager(tmp_path, policy=SavePolicy(every_steps=5))
    with pytest.raises(GroupError, match="not finite in epoch 2, step 13"):
        train(manager, validator(), stop, engine=engine)
    assert names(tmp_path) == ["Epoch_1_Step_5", "Epoch_1", "Epoch_2_Step_10"]
    assert (tmp_path / "best.pt").exists()
    for path in tmp_path.glob("*.pt"):
        assert_finite(path)
    assert newest_checkpoint([tmp_path])[0] == tmp_path / "Epoch_2_Step_10.pt"


def test_an_old_checkpoint_is_deleted_only_after_the_newest_is_complete(tmp_path, monkeypatch):
    save, seen = saving.save_checkpoint, []

    def look(path, entries):
        seen.append((path.name, names(tmp_path)))
        save(path, entries)

    monkeypatch.setattr(saving, "save_checkpoint", look)
    copy = tmp_path / "copies" / "newest.pt"
    train(CheckpointManager(tmp_path, policy=SavePolicy(keep=1), copy_to=copy), epochs=3)
    writes = [found for name, found in seen if name != copy.name]
    assert writes == [[], ["Epoch_1"], ["Epoch_2"]]
    assert names(tmp_path) == ["Epoch_3"]
    assert load_checkpoint(copy)["epoch"] == 3


def fail(*_):
    raise UserError("no space left")


def failing_on_rank_1(rank, folder):
    """Save if the records of rank 1 cannot be written."""
    engine = prepared(nn.Linear(3, 2), "ddp")
    before = fail if rank == 1 else lambda: None
    said = "no space left" if rank == 1 else "rank 1 stopped: no space left"
    with pytest.raises(UserError, match=f"^{said}$"):
        train(CheckpointManager(Path(folder), before=before), engine=engine)
    assert engine.step == STEPS


def test_a_write_that_fails_on_one_rank_is_an_error_on_all(tmp_path):
    run_ranks(2, failing_on_rank_1, str(tmp_path))


class StopAfter(Callback):
    """Ends the training after an epoch, as EarlyStop does."""

    def __init__(self, epoch):
        self._epoch = epoch

    def on_epoch_end(self, end):
        if end.epoch == self._epoch:
            end.stop_reason = "enough"


def test_every_few_epochs_and_always_the_last(tmp_path):
    def saved(*callbacks, engine=None, **options):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        manager = CheckpointManager(folder, policy=SavePolicy(every_epochs=3))
        train(manager, *callbacks, engine=engine, **options)
        return names(folder)

    assert saved(epochs=7) == ["Epoch_3", "Epoch_6", "Epoch_7"]
    assert saved(StopAfter(2), epochs=7) == ["Epoch_2"]
    assert saved(epochs=7, max_steps=4 * STEPS) == ["Epoch_3", "Epoch_4"]
    assert saved(epochs=7, max_steps=4 * STEPS + 1) == ["Epoch_3", "Epoch_5"]
    engine = engine_for()
    stop = AfterEachStep(lambda: engine.request_stop() if engine.step == STEPS else None)
    assert saved(stop, engine=engine, epochs=7) == ["Epoch_1"], "a request in the epoch's last step"


def test_the_best_epoch_is_saved_even_if_no_other_checkpoint_is_due(tmp_path):
    manager = CheckpointManager(tmp_path, policy=SavePolicy(every_epochs=10))
    best: list[bool] = []
    look = AfterEachStep(lambda: best.append((tmp_path / "best.pt").exists()))
    train(manager, validator(), look, epochs=2)
    assert best == [False] * STEPS + [True] * STEPS
    assert names(tmp_path) == ["Epoch_2"]


SCHEDULES = {
    "step": lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
    "onecycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=5 * STEPS),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
}


def shuffled(*, rank=0, size=1):
    """Return a loader of this rank's share, in another order in each epoch."""
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches(), strict=True)))
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, seed=3)
    return DataLoader(data, batch_size=4 // size, sampler=sampler)


def trained(folder, schedule, epochs, *, rank=0, size=1, **more):
    """Train with dropout, momentum, averages and early stopping; return what decides all else."""
    engine = TrainingEngine(network(), "cpu", distributed=size > 1, use_ema=True, output_dir=folder)
    optimizer = sgd(engine.model, momentum=0.9)
    history = engine.train(
        shuffled(rank=rank, size=size),
        batches(seed=1),
        optimizer,
        nn.CrossEntropyLoss(),
        num_epochs=epochs,
        scheduler=SCHEDULES[schedule](optimizer),
        seed=5,
        **more,
    )
    state = engine.state(epoch=epochs, loss=0.0)
    return {"epochs": history["epoch"], "losses": history["val_loss"], "state": digest(state)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path, schedule):
    """Weights, averages, momentum, schedule and step, bit for bit; from a path or from entries."""
    whole = trained(tmp_path / "whole", schedule, 5)
    trained(tmp_path / "parts", schedule, 2)
    middle = tmp_path / "middle.pt"
    shutil.copy(tmp_path / "parts" / "experiment" / "last.pt", middle)
    for resume in (load_checkpoint(middle), str(middle)):
        rest = trained(tmp_path / "parts", schedule, 5, resume=resume)
        assert rest["epochs"] == [3, 4, 5]
        assert rest["losses"] == whole["losses"][2:]
        assert rest["state"] == whole["state"]
    best = [
        load_checkpoint(tmp_path / name / "experiment" / "best.pt") for name in ("whole", "parts")
    ]
    assert best[0]["epoch"] == best[1]["epoch"], "the best accuracy before the resume counts"


def resumed_on_two(rank, folder):
    """Train at once and in two parts; rank 1 has no file to resume from."""
    own, place = Path(folder, f"rank{rank}"), {"rank": rank, "size": 2}
    whole = trained(own / "whole", "step", 4, **place)
    trained(own / "parts", "step", 2, **place)
    last = own / "parts" / "experiment" / "last.pt"
    rest = trained(own / "parts", "step", 4, resume=last, **place)
    assert rest["state"] == whole["state"]
    assert rest["epochs"] == [3, 4]


def test_two_ranks_resume_from_rank_0s_file(tmp_path):
    run_ranks(2, resumed_on_two, str(tmp_path))
    assert not (tmp_path / "rank1").exists()


def test_what_cannot_be_resumed_is_refused(tmp_path):
    trained(tmp_path, "step", 1)
    last = tmp_path / "experiment" / "last.pt"
    model = nn.Linear(3, 2)
    arguments = (batches(), None, sgd(model), nn.CrossEntropyLoss())
    for resume, words in ((last, "another model's weights"), (tmp_path / "no.pt", "no.pt")):
        engine = TrainingEngine(model, "cpu", output_dir=tmp_path)
        with pytest.raises(UserError, match=words):
            engine.train(*arguments, num_epochs=2, resume=resume)
    assert load_checkpoint(last)["epoch"] == 1


@pytest.mark.parametrize("use_ema", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adam],
    ids=["SGD", "Adam"],
)
def test_the_room_that_a_checkpoint_needs_is_known_before_the_first_step(
    use_ema, optimizer, tmp_path
):
    model = nn.Linear(500, 400)
    engine = TrainingEngine(model, "cpu", use_ema=use_ema, output_dir=tmp_path)
    engine.prepare(optimizer(model.parameters()), nn.CrossEntropyLoss())
    foretold = checkpoint_bytes(engine)
    result = engine.train_epoch([(torch.randn(2, 500), torch.tensor([0, 1]))] * 3, epoch=1)
    assert (result.steps, result.steady_steps) == (3, 2), "the first step warms up"
    engine.close()
    engine.train(
        [(torch.randn(2, 500), torch.tensor([0, 1]))],
        None,
        optimizer(model.parameters()),
        nn.CrossEntropyLoss(),
        num_epochs=1,
        save_best=False,
    )
    [written] = tmp_path.rglob("last.pt")
    assert foretold == pytest.approx(written.stat().st_size, rel=0.05)
