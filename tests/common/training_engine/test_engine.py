"""TrainingEngine as a library; references are plain loops in one process, never the engine."""

import copy
import functools
import io
import math
import os
import re
from collections import Counter
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common.checkpoint import load_checkpoint
from common.distributed.process_group import current_world
from common.errors import UserError
from common.models.sync_batchnorm import SyncBatchNorm
from common.profiling.comm_trace import Timeline
from common.sync import build_message_plan_from
from common.sync.message_cost import GradientSize
from common.training_engine import Callback, TrainingEngine, batchnorm, validate
from common.utils.hashing import digest
from lab.proofs.equivalence import parameter_errors
from tests.helpers import free_port, run_ranks
from tests.helpers.engines import prepared, sgd
from tests.helpers.strategies import EXACT

MOMENTUM = {"lr": 0.1, "momentum": 0.9}


def small_model(seed=100):
    """Return a float64 model with four parameter tensors and no BatchNorm."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def model_with_batchnorm(seed=100):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def random_batches(counts, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(count, 4, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (count,), generator=generator),
        )
        for count in counts
    ]


def joined(batches):
    inputs, labels = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(labels)


def loss_and_accuracy(model, inputs, labels):
    with torch.no_grad():
        outputs = model(inputs)
    right = int((outputs.argmax(dim=1) == labels).sum())
    return float(nn.functional.cross_entropy(outputs, labels)), right / len(labels)


def one_process(model, batches):
    """Train on whole batches in a plain loop; yield the model after each step."""
    optimizer = torch.optim.SGD(model.parameters(), **MOMENTUM)
    for inputs, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        yield model


# Samples of each micro-batch, by world size and rank. Five is no multiple of two or three; rank 2
# has an empty micro-batch.
MICRO_BATCHES = {
    2: [(3, 2, 1, 4, 2), (1, 4, 5, 2, 3)],
    3: [(3, 2, 1, 4, 2), (1, 4, 5, 2, 3), (2, 0, 3, 1, 6)],
}


def accumulate(rank, size, strategy, accumulation_steps):
    """Return each step's error against one process, digest, messages and samples."""
    counts = enumerate(MICRO_BATCHES[size])
    micro_batches = [random_batches(own, seed=index) for index, own in counts]
    windows = [
        joined([batch for own in micro_batches for batch in own[begin:][:accumulation_steps]])
        for begin in range(0, 5, accumulation_steps)
    ]
    references = [copy.deepcopy(model) for model in one_process(small_model(), windows)]

    model = small_model(100 + rank)
    engine = prepared(
        model, strategy, optimizer=sgd(model, **MOMENTUM), accumulation_steps=accumulation_steps
    )
    engine.timeline = Timeline(1, len(windows))
    found: dict[str, list] = {"errors": [], "digests": [], "samples": []}

    def compare(step):
        engine.sync.sync_replicas(model)
        found["errors"].append(max(parameter_errors(model, references[step - 1]).values()))
        found["digests"].append(digest(model.state_dict()))

    result = engine.train_epoch(
        micro_batches[rank],
        epoch=1,
        log_every=1,
        on_steps=lambda records: found["samples"].extend(one.local_samples for one in records),
        after_step=compare,
    )
    engine.close()
    assert result.samples == sum(MICRO_BATCHES[size][rank])
    kinds = [[message.kind for message in step.messages] for step in engine.timeline.steps.values()]
    if isinstance(engine.model, DistributedDataParallel):
        # DDP broadcasts the new bucket order in its second step.
        kinds = [[kind for kind in step if kind != "broadcast"] for step in kinds]
    else:  # the first step starts with a message in which the ranks agree on what they exchange
        del kinds[0][0]
    return found | {"messages": [len(step) for step in kinds]}


def accumulate_all(rank, size):
    return {
        (name, steps): accumulate(rank, size, name, steps) for name in EXACT for steps in (1, 2, 3)
    }


@functools.cache
def accumulated(size):
    """Return the results by rank, computed once for all tests."""
    return run_ranks(size, accumulate_all, size)


@pytest.mark.parametrize("accumulation_steps", [1, 2, 3])
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_accumulation_equals_one_process_on_the_whole_window(size, name, accumulation_steps):
    results = [one[name, accumulation_steps] for one in accumulated(size)]
    for rank, one in enumerate(results):
        assert len(one["errors"]) == math.ceil(5 / accumulation_steps)
        assert max(one["errors"]) <= 1e-9, one["errors"]
        assert one["digests"] == results[0]["digests"], "the ranks' weights differ in some bit"
        counts = MICRO_BATCHES[size][rank]
        assert one["samples"] == [
            sum(counts[k : k + accumulation_steps]) for k in range(0, 5, accumulation_steps)
        ]


@pytest.mark.parametrize("accumulation_steps", [2, 3])
def test_fsdp_sends_in_a_step_of_several_micro_batches_what_its_plan_says(accumulation_steps):
    """It reduces once, but gathers weights for every micro-batch, in both passes."""
    plan = build_message_plan_from("fsdp", {"accumulation_steps": accumulation_steps})
    planned = plan.operations(GradientSize.of(small_model().parameters()), 2)
    kinds = Counter(one.kind for one in planned for _ in range(one.count))
    assert kinds == {"all_gather": 4 * accumulation_steps, "all_reduce": 2}
    first, *_ = accumulated(2)[0]["fsdp", accumulation_steps]["messages"]
    assert first == 2 * kinds.total()  # in the first step the ranks compare before each one


# fsdp reduces once, but gathers weights for every micro-batch.
@pytest.mark.parametrize("name", [name for name in EXACT if name != "fsdp"])
def test_ranks_communicate_once_an_optimiser_step_however_many_micro_batches(name):
    one_step = accumulated(2)[0][name, 1]["messages"][0]
    assert one_step > 0
    if name in ("all_reduce", "gather_scatter"):  # one message, or two, for each of 4 parameters
        assert one_step == {"all_reduce": 4, "gather_scatter": 8}[name]
    for steps in (1, 2, 3):
        for rank in accumulated(2):
            assert rank[name, steps]["messages"] == [one_step] * math.ceil(5 / steps), (
                f"messages of a step with several micro-batches: {steps}"
            )


def averages_by_hand(states, decay):
    """Return the average of the states after each step, by the formula in a plain loop."""
    average = {name: tensor.clone() for name, tensor in states[0].items()}
    for updates, state in enumerate(states[1:], start=1):
        keep = min(decay, (1 + updates) / (10 + updates))
        for name, tensor in state.items():
            mean = keep * average[name] + (1 - keep) * tensor
            average[name] = mean if tensor.is_floating_point() else tensor.clone()
    return average


def test_the_average_is_the_formula_for_weights_and_buffers():
    model = model_with_batchnorm()
    engine = prepared(model, optimizer=sgd(model, **MOMENTUM), use_ema=True, ema_decay=0.4)
    states, averages = [], []

    def note(_step):
        states.append(copy.deepcopy(model.state_dict()))
        averages.append(copy.deepcopy(engine.ema.module.state_dict()))

    engine.train_epoch(random_batches([5] * 12, seed=1), epoch=1, after_step=note)
    assert all(torch.equal(averages[0][name], tensor) for name, tensor in states[0].items()), (
        "the first update copies"
    )
    for count in (2, 3, 6, 12):  # the bound 0.4 takes effect after 5 updates
        for name, expected in averages_by_hand(states[:count], 0.4).items():
            torch.testing.assert_close(
                averages[count - 1][name], expected, rtol=1e-13, atol=1e-15, msg=f"{name}, {count}"
            )
    assert int(averages[-1]["1.num_batches_tracked"]) == 12, "a count is copied, not averaged"
    assert not any(p.requires_grad for p in engine.ema.module.parameters())
    assert not engine.ema.module.training
    *_, plain = one_process(model_with_batchnorm(), random_batches([5] * 12, seed=1))
    assert digest(plain.state_dict()) == digest(model.state_dict()), "it takes no part in training"


VALIDATIONS = [(10, 3, False), (11, 4, False), (11, 2, True), (1, 4, False)]
"""Samples, batch size, shuffled."""


def validate_all(rank, size):
    model, criterion, results = small_model(), nn.CrossEntropyLoss(), {}
    for samples, batch_size, shuffle in VALIDATIONS:
        dataset = TensorDataset(*random_batches([samples], seed=5)[0])
        sampler = DistributedSampler(dataset, num_replicas=size, rank=rank, shuffle=shuffle, seed=3)
        loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
        results[f"shared {samples}"] = validate(model, current_world(), criterion, loader)
        results[f"whole {samples}"] = validate(
            model, current_world(), criterion, DataLoader(dataset, batch_size=batch_size)
        )
    own = random_batches([2 + 5 * rank], seed=rank)  # one batch, whose size differs by rank
    results["uneven"] = validate(model, current_world(), criterion, own)
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_validation_over_ranks_is_that_of_one_process_on_each_sample_once(size):
    model = small_model()
    expected = {
        f"{kind} {samples}": loss_and_accuracy(model, *random_batches([samples], seed=5)[0])
        for samples, *_ in VALIDATIONS
        for kind in ("shared", "whole")
    }
    uneven = [random_batches([2 + 5 * rank], seed=rank)[0] for rank in range(size)]
    expected["uneven"] = loss_and_accuracy(model, *joined(uneven))
    assert 0 < expected["shared 11"][1] < 1, "an accuracy that a wrong count would change"
    for one in run_ranks(size, validate_all, size):
        for case, (loss, accuracy) in expected.items():
            assert one[case][1] == accuracy, case
            assert one[case][0] == pytest.approx(loss, rel=1e-12), case


class Steady(nn.Module):
    """A model that predicts from its inputs alone; training changes only ``drift``."""

    def __init__(self):
        super().__init__()
        self.drift = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, inputs):
        return inputs * (3 + torch.sigmoid(self.drift))


class ScriptedLoader:
    """Ten samples; in iteration n, ``Steady`` predicts ``right[n]`` of the labels correctly."""

    def __init__(self, right, model):
        self.right, self.rounds, self.model, self.drifts = right, 0, model, []

    def __iter__(self):
        inputs = torch.eye(2, dtype=torch.float64)[[0, 1] * 5]
        labels = inputs.argmax(dim=1)
        labels[self.right[self.rounds] :] ^= 1
        self.rounds += 1
        self.drifts.append(float(self.model.drift))
        yield inputs, labels


def steady_batches(rank=0):
    """Return the two batches of an epoch, with noise so that ranks and steps differ."""
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(8, 2, generator=generator, dtype=torch.float64), torch.tensor([0, 1] * 4))
        for _ in range(2)
    ]


def train_steady(folder, right, *, epochs, rank=0, engine_kwargs=None, **train_kwargs):
    model = Steady()
    engine = TrainingEngine(
        model, "cpu", output_dir=folder, experiment_name="steady", **engine_kwargs or {}
    )
    optimizer = sgd(model, lr=0.5)
    if (schedule := train_kwargs.pop("schedule", None)) is not None:
        train_kwargs["scheduler"] = schedule(optimizer)
    loader = ScriptedLoader(right, model) if right else None
    batches, criterion = steady_batches(rank), nn.CrossEntropyLoss()
    history = engine.train(batches, loader, optimizer, criterion, num_epochs=epochs, **train_kwargs)
    return history, loader


# Correct predictions of ten samples, by rank and epoch. Over both ranks: 0.5, 0.75, 0.6, 0.75, so
# epoch 2 is the best. Rank 0 alone would choose epoch 3; epoch 4 is as good, but later.
RIGHT = [(5, 5, 9, 5), (5, 10, 3, 10)]
KEYS = {
    *("epoch", "train_loss", "train_accuracy", "val_loss", "val_accuracy", "ema_val_loss"),
    *("ema_val_accuracy", "learning_rate", "samples_per_second", "seconds"),
}


def train_with_files(rank, folder):
    def trained(name, epochs, **more):
        more |= {"rank": rank, "engine_kwargs": {"distributed": True}}
        return train_steady(Path(folder, name), RIGHT[rank], epochs=epochs, **more)

    history, loader = trained(f"rank{rank}", 4)
    trained("neither", 1, save_best=False, save_last=False)
    return {"history": history, "drifts": loader.drifts}


def test_history_and_files_are_those_of_all_ranks_together(tmp_path):
    results = run_ranks(2, train_with_files, str(tmp_path))
    history, drifts = results[0]["history"], results[0]["drifts"]
    assert set(history) == KEYS
    assert {len(values) for values in history.values()} == {4}
    assert history["epoch"] == [1, 2, 3, 4]
    assert history["val_accuracy"] == [0.5, 0.75, 0.6, 0.75]
    assert all(math.isnan(value) for value in history["ema_val_accuracy"])
    assert all(0 < value <= 1 for value in history["train_accuracy"])
    for name in ("train_loss", "train_accuracy", "val_loss", "val_accuracy"):
        assert results[1]["history"][name] == history[name], name
    assert len(set(drifts)) == 4, "the weights move in every epoch"

    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    folder = Path("rank0/steady")
    assert written == {folder / "best.pt", folder / "last.pt"}, "by rank 0 alone"
    best, last = (load_checkpoint(tmp_path / folder / name) for name in ("best.pt", "last.pt"))
    assert (best["epoch"], float(best["model_state_dict"]["drift"])) == (2, drifts[1])
    assert (last["epoch"], float(last["model_state_dict"]["drift"])) == (4, drifts[3])
    assert best["val_accuracy"] == 0.75
    raw = torch.load(tmp_path / folder / "best.pt", weights_only=True)
    assert list(raw["model_state_dict"]) == ["drift"], "load_checkpoint would remove a prefix"


def test_the_average_decides_which_epoch_is_best_where_it_is_kept(tmp_path):
    # Correct predictions of the weights and of the average, in turns: the weights are best in epoch
    # 1, the average in epoch 2.
    averages = {"use_ema": True}
    history, _ = train_steady(tmp_path, [9, 2, 5, 8, 7, 3], epochs=3, engine_kwargs=averages)
    assert history["val_accuracy"] == [0.9, 0.5, 0.7]
    assert history["ema_val_accuracy"] == [0.2, 0.8, 0.3]
    best = load_checkpoint(tmp_path / "steady" / "best.pt")
    assert best["epoch"] == 2
    assert list(best["ema_state_dict"]) == ["drift"]
    assert float(best["ema_state_dict"]["drift"]) != float(best["model_state_dict"]["drift"])


def test_without_a_val_loader_there_is_no_best_epoch(tmp_path):
    history, _ = train_steady(tmp_path, None, epochs=2)
    assert all(math.isnan(value) for value in history["val_accuracy"])
    assert [path.name for path in (tmp_path / "steady").iterdir()] == ["last.pt"]


# An epoch has two optimiser steps. Its history entry holds the learning rate after these steps,
# before a scheduler that steps by epoch changes it.
def halving(optimizer):
    return LambdaLR(optimizer, lambda n: 1 / (1 + n))


def one_cycle(optimizer):
    shape = {"pct_start": 0.5, "anneal_strategy": "linear", "div_factor": 10}
    return OneCycleLR(optimizer, max_lr=1.0, total_steps=7, final_div_factor=10, **shape)


@pytest.mark.parametrize(
    ("make", "arguments", "steps", "rates"),
    [
        (lambda o: StepLR(o, 1, gamma=0.1), {}, 3, [0.5, 0.05, 0.005]),
        (halving, {}, 3, [0.5, 0.25, 0.5 / 3]),
        (halving, {"scheduler_by_epoch": False}, 6, [0.5 / 3, 0.1, 0.5 / 7]),
        (one_cycle, {}, 6, [0.82, 1 - 0.99 * 3 / 7, 0.01]),
    ],
)
def test_a_scheduler_steps_by_epoch_or_by_step(tmp_path, make, arguments, steps, rates):
    made = []

    def schedule(optimizer):
        made.append(make(optimizer))
        return made[0]

    history, _ = train_steady(tmp_path, [5, 5, 5], epochs=3, schedule=schedule, **arguments)
    assert made[0].last_epoch == steps
    assert history["learning_rate"] == pytest.approx(rates, rel=1e-12)
    saved = load_checkpoint(tmp_path / "steady" / "last.pt")["scheduler_state_dict"]
    assert saved["last_epoch"] == steps


def test_reduce_on_plateau_gets_the_validation_loss(tmp_path):
    # The validation loss rises in epochs 2 and 3 with the wrong labels and falls in epoch 4; the
    # training loss falls in every epoch.
    schedule = functools.partial(ReduceLROnPlateau, factor=0.1, patience=0, threshold=0.0)
    history, _ = train_steady(tmp_path, [8, 6, 4, 10, 2], epochs=5, schedule=schedule)
    assert history["val_loss"][1] > history["val_loss"][0] > history["val_loss"][3]
    assert history["learning_rate"] == pytest.approx([0.5, 0.5, 0.05, 0.005, 0.005])


# Over both ranks: 0.75, 0.5, 0.5, 0.75, 0.75. Only epoch 5 is the second in a row at the target.
# Rank 0 alone would stop in epoch 2, rank 1 alone never; a count that a dip does not reset would
# stop in epoch 4.
SCRIPT = [(10, 10, 0, 10, 10, 0, 0), (5, 0, 10, 5, 5, 0, 0)]


def train_to_a_target(rank, folder):
    printed = io.StringIO()
    options = {"target_accuracy": 0.75, "patience": 2, "rank": rank}
    options |= {"engine_kwargs": {"distributed": True, "sync": "all_reduce"}}
    with redirect_stdout(printed):
        history, _ = train_steady(Path(folder), SCRIPT[rank], epochs=7, **options)
    return history["val_accuracy"], printed.getvalue()


def test_early_stop_needs_the_target_in_a_row_and_is_one_decision(tmp_path):
    (first, root_says), (second, other_says) = run_ranks(2, train_to_a_target, str(tmp_path))
    assert first == second == [0.75, 0.5, 0.5, 0.75, 0.75]
    assert root_says.count("Target accuracy reached") == 1
    assert len(re.findall(r"^Epoch \d+: ", root_says, re.MULTILINE)) == 5
    assert other_says == "", "rank 0 alone prints"


def half_frozen():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
    ).double()
    model[1].requires_grad_(False)
    return model


def train_half_frozen(rank):
    """Train two epochs with an evaluation in between."""
    model = half_frozen()
    engine = prepared(model, "ddp")
    begun = copy.deepcopy(model.state_dict())
    for epoch in (1, 2):
        engine.train_epoch(random_batches((5, 4), seed=rank), epoch=epoch)
        engine.agree_on_buffers()
        validate(engine.model, engine.world, nn.CrossEntropyLoss(), random_batches([4], seed=9))
    engine.close()
    ended = model.state_dict()
    moved = [name for name in ended if not torch.equal(ended[name], begun[name])]
    assert not [name for name in moved if name.startswith("1.")], "frozen: nothing moves"
    assert {"3.running_mean", "3.running_var", "3.weight"} <= set(moved)
    assert int(ended["3.num_batches_tracked"]) == 4, "batches of the training"
    assert type(model[1]) is nn.BatchNorm1d, "frozen: stays"
    assert type(model[3]) is SyncBatchNorm


def test_frozen_batchnorm_stays_still_and_the_rest_is_synchronised():
    run_ranks(2, train_half_frozen)


def check_what_is_replaced(_rank):
    """Compare a model's parts before and after."""
    model = nn.ModuleDict({"body": half_frozen(), "head": nn.BatchNorm2d(3, affine=False)})
    named, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    converted = batchnorm.synchronise_batchnorm(model, ours=False)
    assert type(converted["body"][1]) is nn.BatchNorm1d, "frozen: stays"
    assert type(converted["body"][3]) is nn.SyncBatchNorm
    assert type(converted["head"]) is nn.SyncBatchNorm
    assert all(converted.get_parameter(name) is parameter for name, parameter in named.items()), (
        "an optimiser holds these"
    )
    assert digest(converted.state_dict()) == digest(state)
    assert type(batchnorm.synchronise_batchnorm(nn.BatchNorm1d(3), ours=False)) is nn.SyncBatchNorm


def test_synchronise_batchnorm_replaces_what_trains_and_keeps_parameters():
    run_ranks(1, check_what_is_replaced)


def own_numbers(rank):
    """Return this rank's results; the ranks have different data, and keep the first weights."""
    batches, model = random_batches((4, 7), seed=rank), small_model()
    own, records = loss_and_accuracy(model, *joined(batches)), []
    engine = prepared(model, "all_reduce", optimizer=sgd(model, lr=0.0))
    result = engine.train_epoch(batches, epoch=1, on_steps=records.extend)
    engine.close()
    assert (result.loss, result.accuracy) == pytest.approx(own, rel=1e-12)
    assert result.samples == 11
    return own, [(one.local_loss, one.loss, one.accuracy) for one in records]


def test_an_epochs_result_is_of_this_ranks_samples_and_a_record_of_all():
    (own, records), (others, theirs) = run_ranks(2, own_numbers)
    assert abs(own[0] - others[0]) > 0.01, "the ranks' data must differ"
    assert own[1] != others[1]
    for (here, loss, accuracy), (there, *same) in zip(records, theirs, strict=True):
        assert [loss, accuracy] == same, "records are of the global batch"
        assert loss == pytest.approx((here + there) / 2, rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "arguments", "words"),
    [
        ({"distributed": True}, {}, "no process group is open"),
        ({"clip_norm": 0}, {}, "clip_norm: got 0"),
        ({"clip_norm": -1.5}, {}, r"clip_norm: got -1\.5"),
        ({"accumulation_steps": 0}, {}, "accumulation_steps: got 0"),
        ({"use_ema": True, "ema_decay": 1.5}, {}, r"ema_decay: got 1\.5"),
        ({"use_ema": True, "ema_decay": 0.0}, {}, r"ema_decay: got 0\.0"),
        ({"distributed": True, "sync": "carrier_pigeon"}, {}, "carrier_pigeon.*all_reduce"),
        ({}, {"target_accuracy": 85}, "target_accuracy: got 85, give a fraction"),
        ({}, {"target_accuracy": 0.5, "patience": 0}, "patience: got 0"),
        ({}, {"epochs": 0}, "num_epochs: got 0"),
        ({}, {"target_accuracy": 0.5, "right": None}, "target_accuracy needs a val_loader"),
    ],
)
def test_settings_and_arguments_that_cannot_be_are_told(tmp_path, settings, arguments, words):
    arguments = {"right": [5], "epochs": 1} | arguments
    with pytest.raises(UserError, match=words):
        train_steady(tmp_path, engine_kwargs=settings, **arguments)
    assert not list(tmp_path.iterdir())


def in_an_open_group(rank, port):
    def build(**settings):
        return TrainingEngine(Steady(), "cpu", distributed=True, **settings)

    for settings, words in (
        ({"world_size": 4}, "world_size: got 4.*2 ranks"),
        ({"backend": "nccl"}, "backend: got 'nccl'.*'gloo'"),
    ):
        with pytest.raises(UserError, match=words):
            build(**settings)
    engine = build(world_size=2, backend="gloo")

    metric = torch.tensor([[1.0 + 4 * rank], [10.0]], dtype=torch.float64).T  # not contiguous
    mean = engine._reduce_tensor(metric)
    assert torch.equal(mean, torch.tensor([[3.0, 10.0]], dtype=torch.float64))
    assert torch.equal(metric, torch.tensor([[1.0 + 4 * rank, 10.0]], dtype=torch.float64))
    assert engine._reduce_tensor(torch.tensor(rank)).item() == 0.5, "a count is not cut"
    alone = TrainingEngine(Steady(), "cpu")._reduce_tensor(metric)
    assert torch.equal(alone, metric)
    assert alone.data_ptr() != metric.data_ptr()

    def asking():
        """Yield sixty batches; rank 1 asks the engine to stop while it fetches the fifth."""
        for index, batch in enumerate(random_batches([2] * 60, seed=rank)):
            if index == 4 and rank == 1:
                engine.request_stop()
            yield batch

    engine, ended, epochs = prepared(small_model(), "ddp"), Callback(), []
    ended.on_epoch_end = lambda end: epochs.append((end.epoch, end.result.complete))
    engine.fit(asking(), 1, 3, callbacks=[ended], log_every=10)
    stop = (engine.step, engine.stopping, epochs, digest(engine.model.state_dict()))

    engine.cleanup_distributed()
    engine.cleanup_distributed()
    assert not dist.is_initialized()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for _ in range(2):
        world = TrainingEngine.setup_distributed(rank, 2)
        assert (world.rank, world.size, world.backend) == (rank, 2, "gloo")
    for other, size in ((1 - rank, 2), (rank, 3)):
        with pytest.raises(UserError, match=f"rank {rank} of 2 already, not {other} of {size}"):
            TrainingEngine.setup_distributed(other, size)
    assert build().sum_over_ranks(rank + 1) == 3
    return stop


def test_an_open_group_is_kept_and_one_ranks_request_stops_all_ranks():
    first, second = run_ranks(2, in_an_open_group, free_port())
    assert first == second, "step, verdict, epochs and weights"
    step, stopping, epochs, _ = first
    assert stopping
    assert 5 <= step <= 25, "within two intervals of ten steps, long before the sixtieth"
    assert epochs == [(1, False)]


@pytest.mark.parametrize(
    ("fast", "dtype", "words"),
    [(True, torch.bfloat16, ""), (False, torch.float32, "AMP is off and training runs in fp32")],
)
def test_amp_on_a_cpu_is_bf16_where_that_is_fast(monkeypatch, fast, dtype, words):
    monkeypatch.setattr("common.training_engine.amp.cpu_has_fast_bf16", lambda: fast)
    model, seen = small_model().float(), []
    model[0].register_forward_hook(lambda _layer, _inputs, output: seen.append(output.dtype))
    before = digest(model.state_dict())
    with pytest.warns(UserWarning, match=words) if words else nullcontext():
        engine = prepared(model, use_amp=True)
    batches = [(inputs.float(), labels) for inputs, labels in random_batches((4, 4), seed=0)]
    result = engine.train_epoch(batches, epoch=1)
    validate(model, engine.world, nn.CrossEntropyLoss(), batches, amp_dtype=engine.amp_dtype)
    assert seen == [dtype] * 4
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "weights stay in fp32"
    assert digest(model.state_dict()) != before
    assert math.isfinite(result.loss)
    assert not engine.scaler.is_enabled()


def test_resuming_within_an_epoch_needs_a_loader_that_can():
    engine = prepared(nn.Linear(2, 2))
    batches = [(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64))] * 2
    with pytest.raises(UserError, match=r"after step 1, needs a loader .*start_at.* list has none"):
        engine.train_epoch(batches, epoch=1, start_step=1)
