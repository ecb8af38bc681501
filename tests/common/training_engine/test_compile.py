"""``compile_model``: what is compiled, what it costs, and what happens if it fails."""

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.training_engine import predict
from tests.helpers.engines import prepared


def data():
    """Return six batches of 8, and a last one of 5."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(size, 3, 8, 8, generator=generator) for size in [8] * 6 + [5]]
    return [(inputs, inputs.mean(dim=(1, 2, 3)).gt(0).long()) for inputs in batches]


def network():
    torch.manual_seed(3)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    return nn.Sequential(*layers)


def test_a_model_of_which_nothing_was_compiled_is_named(monkeypatch):
    """torch 2.11 compiles nothing of a bare nn.Sequential, and says nothing."""
    model = network()
    monkeypatch.setattr(model, "compile", lambda dynamic: None)
    engine = prepared(model, compile_model=True)
    with pytest.warns(UserWarning, match="compiled nothing of this model"):
        engine.train_epoch(data(), epoch=1)
    engine.close()


def test_a_model_that_cannot_be_compiled_ends_with_advice(monkeypatch):
    model = network()

    def compile(dynamic):
        def forward(inputs):
            raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nmore")

        model._compiled_call_impl = forward

    monkeypatch.setattr(model, "compile", compile)
    engine = prepared(model, compile_model=True)
    with pytest.raises(UserError, match=r"No working C\+\+ compiler found\): leave out --compile"):
        engine.train_epoch(data(), epoch=1)


class Network(nn.Module):
    """A module of its own: torch 2.11 compiles no bare nn.Sequential."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, inputs):
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
        engine, records = prepared(model, compile_model=compiled), []
        try:
            engine.train_epoch(data(), epoch=1, seed=5, on_steps=records.extend)
        finally:
            engine.close()
        assert (engine.compile_seconds > 0) == compiled
        assert engine.compile_seconds == 0 or records[0].step_seconds < engine.compile_seconds / 2
        predict(model, "cpu", nn.CrossEntropyLoss(), data())
        now = counters["stats"]["unique_graphs"]
        assert now == graphs + compiled, "evaluation compiles nothing"
        weights.append(model.state_dict())
    assert list(weights[0]) == list(weights[1])
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-4, atol=1e-5, msg=name)
