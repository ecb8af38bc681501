"""The captured step against the readable one: tests/helpers/fake_graph.py stands in for a GPU's."""

import copy

import pytest
import torch
from torch import nn

from common.checkpoint import load_optimizer_state
from common.errors import UserError
from common.training_engine import TrainingEngine, predict
from common.training_engine.captured_step import CapturedStep, obstacle
from common.training_engine.lr_schedules import build_schedule
from tests.helpers.fake_graph import record_on_cpu

STEPS_PER_EPOCH, EPOCHS = 7, 2


class Data:
    """Batches of 8, and a last one of 5; each epoch has others."""

    def __init__(self) -> None:
        self.epoch = 0
        self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        for size in [8] * (STEPS_PER_EPOCH - 1) + [5]:
            inputs = torch.randn(size, 3, 8, 8, generator=generator)
            yield inputs, inputs.mean(dim=(1, 2, 3)).gt(0).long()


def network(dropout: float = 0.3) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(144, 2),
    )


def train(*, captured: bool, first_epoch: int = 1, last_epoch: int = EPOCHS, entries=None):
    """Return the engine and its steps' records, after epochs ``first_epoch`` to ``last_epoch``."""
    records = []
    model = network()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True, fused=True
    )
    scheduler = build_schedule(
        optimizer, "onecycle", total_steps=STEPS_PER_EPOCH * EPOCHS, warmup_steps=4
    )
    engine = TrainingEngine(model, "cpu", use_ema=True, clip_norm=0.5)
    engine.prepare(optimizer, nn.CrossEntropyLoss(), scheduler)
    if captured:
        engine.captured = CapturedStep(engine._compute_alone, optimizer, record=record_on_cpu)
    if entries is not None:
        model.load_state_dict(entries["model_state_dict"])
        optimizer.load_state_dict(entries["optimizer_state_dict"])
        engine.load_state(entries)
    data = Data()
    for epoch in range(first_epoch, last_epoch + 1):
        data.set_epoch(epoch)
        engine.train_epoch(data, epoch=epoch, seed=5, on_steps=records.extend)
    return engine, records


def assert_equal_training(one, other, but_for: float = 1e-6) -> None:
    for (name, value), (_, expected) in zip(
        one.model.state_dict().items(), other.model.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(value, expected, rtol=but_for, atol=but_for, msg=name)
    for name, value in one.ema.module.state_dict().items():
        expected = other.ema.module.state_dict()[name]
        torch.testing.assert_close(value, expected, rtol=but_for, atol=but_for)


def test_a_captured_training_equals_a_readable_one():
    """With dropout, a schedule, clipping, a moving average and a smaller last batch."""
    readable, expected = train(captured=False)
    captured, records = train(captured=True)
    assert_equal_training(captured, readable)
    assert [record.step for record in records] == list(range(1, 15))
    for record, one in zip(records, expected, strict=True):
        assert record.loss == pytest.approx(one.loss, rel=1e-5)
        assert record.accuracy == one.accuracy
        assert record.learning_rate == one.learning_rate
    assert len({record.loss for record in records}) == 14  # a copy of each step's numbers


def test_steps_are_recorded_after_the_warm_up_and_have_no_sections():
    engine, records = train(captured=True)
    assert engine.captured._replay is not None
    without_sections = [
        record.step
        for record in records
        if not any(record.seconds[s] for s in ("forward", "backward", "sync"))
    ]
    assert without_sections == [*range(1, 7), *range(8, 14)]  # 7 and 14 are the smaller batches
    assert all(record.step_seconds > 0 for record in records)


@pytest.mark.parametrize("captured", [True, False])
def test_a_checkpoint_resumes_with_either_step(captured: bool):
    whole, _ = train(captured=False)
    first, _ = train(captured=True, last_epoch=1)
    entries = copy.deepcopy(first.state(epoch=1, loss=0.0))
    assert isinstance(entries["optimizer_state_dict"]["param_groups"][0]["lr"], float)
    resumed, _ = train(captured=captured, first_epoch=2, entries=entries)
    assert_equal_training(resumed, whole)


def captured_alone(body=None):
    """Return an optimiser and its captured step, with no training around it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    engine = TrainingEngine(model, "cpu")
    engine.prepare(optimizer, nn.CrossEntropyLoss())
    step = CapturedStep(body or engine._compute_alone, optimizer, record=record_on_cpu)
    return optimizer, step


def test_another_momentum_is_not_trained_with_the_recorded_one():
    optimizer, captured = captured_alone()
    inputs, labels = next(iter(Data()))
    for _ in range(4):  # three to warm up, and the recorded one
        assert captured.fits(inputs, labels)
        captured(inputs, labels)
    assert captured._replay is not None
    assert not captured.fits(inputs[:5], labels[:5])
    assert not captured.fits(inputs.double(), labels)
    optimizer.param_groups[0]["lr"] = 0.2
    assert captured.fits(inputs, labels)
    optimizer.param_groups[0]["momentum"] = 0.8  # as OneCycleLR changes it
    assert not captured.fits(inputs, labels)


def test_a_run_that_resumes_at_a_smaller_batch_is_still_recorded():
    _, captured = captured_alone()
    inputs, labels = next(iter(Data()))
    assert captured.fits(inputs[:5], labels[:5])
    captured(inputs[:5], labels[:5])
    for _ in range(4):
        assert captured.fits(inputs, labels)
        captured(inputs, labels)
    assert captured._replay is not None
    assert not captured.fits(inputs[:5], labels[:5])


def test_a_step_that_cannot_be_recorded_ends_with_advice():
    """E.g. a criterion that reads a value: recording it is an error on a GPU."""
    _, captured = captured_alone()
    inputs, labels = next(iter(Data()))

    def record(body):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    captured._record = record
    for _ in range(3):
        assert captured.fits(inputs, labels)
        captured(inputs, labels)
    with pytest.raises(UserError, match=r"when stream is capturing\): give --capture off"):
        captured(inputs, labels)
    assert captured._optimizer.param_groups[0]["lr"] == 0.1, "a number again"


def test_an_obstacle_is_named():
    model = network()
    engine = TrainingEngine(model, "cpu", capture=True)
    engine.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    assert engine.not_captured == "CUDA graphs need a GPU"
    engine.device = torch.device("cuda")
    assert obstacle(engine) == "the optimiser is not SGD(fused=True)"
    engine.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    assert obstacle(engine) == ""
    engine.accumulation_steps = 2
    assert obstacle(engine) == "a step has several micro-batches"


def test_a_checkpoint_moves_between_fused_and_plain_optimisers():
    """As from a CPU to a GPU and back: each keeps its own kernels, and the learning rate comes."""
    for fused, saved in ((True, None), (None, True)):
        one, other = (
            torch.optim.SGD(network().parameters(), lr=rate, momentum=0.9, fused=kernel)
            for rate, kernel in ((0.3, saved), (0.1, fused))
        )
        for parameter in one.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        one.step()
        load_optimizer_state(other, {"optimizer_state_dict": one.state_dict()}, name="x.pt")
        assert (other.param_groups[0]["fused"], other.param_groups[0]["lr"]) == (fused, 0.3)
        assert torch.equal(
            other.state_dict()["state"][0]["momentum_buffer"],
            one.state_dict()["state"][0]["momentum_buffer"],
        )


def test_a_loaded_momentum_has_the_strides_of_its_weights():
    """As from a training with contiguous weights: fused kernels refuse other strides on a GPU."""
    weights = torch.nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9, fused=True)
    momentum = torch.randn(4, 3, 3, 3)
    state = optimizer.state_dict() | {"state": {0: {"momentum_buffer": momentum}}}
    load_optimizer_state(optimizer, {"optimizer_state_dict": state}, name="x.pt")
    loaded = optimizer.state[weights]["momentum_buffer"]
    assert torch.equal(loaded, momentum)
    assert loaded.stride() == weights.stride()


def test_a_fused_optimiser_never_begins_with_uninitialised_momentum():
    """An fp16 step that overflows is skipped; the next one would use what memory held."""
    weights = torch.nn.Parameter(torch.randn(4))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9, fused=True)
    state = optimizer.state_dict() | {"state": {}}
    load_optimizer_state(optimizer, {"optimizer_state_dict": state}, name="x.pt")
    assert torch.equal(optimizer.state[weights]["momentum_buffer"], torch.zeros(4))


def test_a_model_of_which_nothing_was_compiled_is_named(monkeypatch: pytest.MonkeyPatch):
    """torch 2.11 compiles nothing of a bare nn.Sequential, and says nothing."""
    model = network()
    monkeypatch.setattr(model, "compile", lambda dynamic: None)
    engine = TrainingEngine(model, "cpu", compile_model=True)
    engine.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    with pytest.warns(UserWarning, match="compiled nothing of this model"):
        engine.train_epoch(Data(), epoch=1)
    engine.close()


def test_a_model_that_cannot_be_compiled_ends_with_advice(monkeypatch: pytest.MonkeyPatch):
    model = network()

    def compile(dynamic):
        def forward(inputs):
            raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nmore")

        model._compiled_call_impl = forward

    monkeypatch.setattr(model, "compile", compile)
    engine = TrainingEngine(model, "cpu", compile_model=True)
    engine.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    with pytest.raises(UserError, match=r"No working C\+\+ compiler found\): leave out --compile"):
        engine.train_epoch(Data(), epoch=1)


class Network(nn.Module):
    """A module of its own: torch 2.11 compiles no bare nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network(dropout=0.0)  # compiled code draws other masks

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


@pytest.mark.slow
def test_a_compiled_training_equals_the_plain_one_and_its_time_is_apart():
    """Compiling changes no statistics and counts in no step; the last batch is not compiled."""
    from torch._dynamo.utils import counters  # slow

    weights = []
    for compiled in (True, False):
        torch.manual_seed(0)
        graphs = counters["stats"]["unique_graphs"]
        model = Network().eval()  # training compiles, and trains, in training mode
        engine = TrainingEngine(model, "cpu", compile_model=compiled)
        engine.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
        records = []
        try:
            engine.train_epoch(Data(), epoch=1, seed=5, on_steps=records.extend)
        finally:
            engine.close()
        assert (engine.compile_seconds > 0) == compiled
        assert engine.compile_seconds == 0 or records[0].step_seconds < engine.compile_seconds / 2
        predict(model, "cpu", nn.CrossEntropyLoss(), Data())
        assert counters["stats"]["unique_graphs"] == graphs + compiled, (
            "evaluation compiles nothing"
        )
        weights.append(model.state_dict())
    assert list(weights[0]) == list(weights[1])
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-4, atol=1e-5, msg=name)
