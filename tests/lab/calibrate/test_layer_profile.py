"""The layers' times that `lab calibrate` measures, and the profile that they make."""

import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from common.emulation.compute_profile import Layer, SectionTime, load_profile
from common.emulation.emulated_model import Emulation
from common.models import MODELS, build_model
from lab.calibrate.layer_profile import measure_profile
from lab.calibrate.layer_timer import LayerTimer


def _ready_order(model):
    order: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda _, name=name: order.append(name.rpartition(".")[0])
        )
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    return list(dict.fromkeys(order))


class Shortcut(nn.Module):
    """A small model that is not a chain."""

    def __init__(self, num_classes):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.BatchNorm2d(8)
        self.act, self.branch = nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)
        self.short, self.last = nn.Conv2d(8, 8, 1), nn.Linear(8, num_classes)

    def forward(self, images):
        x = self.act(self.norm(self.stem(images)))
        return self.last((self.branch(x) + self.short(x)).mean(dim=(2, 3)))


REAL = [
    pytest.param("vgg11", marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.long) for name in ("wide_resnet16_4", "resnet18")),
]


@pytest.mark.parametrize("name", ["shortcut", *REAL])
def test_a_measured_profile_has_every_layer_in_true_order(name, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "shortcut", f"{__name__}:Shortcut")
    profile = measure_profile("trial", model=name, samples=(2, 4), rounds=1)
    profile.save(tmp_path / "trial.json")
    assert load_profile(str(tmp_path / "trial.json"), model=name) == profile
    assert profile.update_seconds > 0
    assert all(measured > 0 for _, measured, _ in profile.steps)
    model, sleeping = build_model(name, 10), build_model(name, 10)
    nothing = SectionTime(0.0, 0.0)
    still = tuple(Layer(layer.name, nothing, nothing, layer.parameters) for layer in profile.layers)
    Emulation(sleeping, replace(profile, layers=still), rank=0, classes=10)
    assert _ready_order(sleeping) == _ready_order(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpus_profile_emulates_it_on_a_cpu(tmp_path):
    profile = measure_profile("gpu", model="vgg11", device="cuda", samples=(32, 256), rounds=2)
    assert profile.device == "cuda"
    assert profile.machine == torch.cuda.get_device_name(0)
    forward = sum(layer.forward.at(256) for layer in profile.layers)
    assert 0 < forward < sum(layer.backward.at(256) for layer in profile.layers) < 1
    Emulation(build_model("vgg11", 10), profile, rank=0, classes=10)


class Known(nn.Module):
    """A layer with a parameter that takes the given seconds forward, and twice as long backward."""

    def __init__(self, seconds):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(4)), seconds

    def forward(self, inputs):
        time.sleep(self.seconds)
        outputs = inputs + self.weight
        outputs.grad_fn.register_prehook(lambda _: time.sleep(2 * self.seconds))
        return outputs


class Residual(nn.Module):
    """Not a chain: the second layer's output is added to its input.

    The third layer runs twice, with an in-place operation in between.
    """

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Known(0.03), Known(0.06), Known(0.02)
        self.act = nn.ReLU(inplace=True)

    def forward(self, inputs):
        first = self.a(inputs)
        return self.c(self.act(self.c(first + self.b(first))))


def test_layers_are_timed_where_they_run_and_parameters_belong_to_the_call_that_ends_them():
    """Other work on the machine makes single times longer, so the shortest time counts."""
    model, criterion = Residual(), nn.CrossEntropyLoss()
    names, forward = ["a", "b", "c", "act", "c", "loss"], [0.03, 0.06, 0.02, 0.0, 0.02, 0.0]
    owned = [("a.weight",), ("b.weight",), ("c.weight",), (), (), ()]
    expected = forward + [2 * seconds for seconds in forward]
    least = [math.inf] * len(expected)
    with LayerTimer(model, criterion, device="cpu") as timer:
        for _ in range(60):
            criterion(model(torch.randn(3, 4)), torch.zeros(3, dtype=torch.int64)).backward()
            calls, *seconds = timer.take()
            assert [(call.name, call.parameters) for call in calls] == [
                *zip(names, owned, strict=True)
            ]
            least = [min(pair) for pair in zip(least, [*seconds[0], *seconds[1]], strict=True)]
            if least == pytest.approx(expected, abs=0.01):
                return
    raise AssertionError(f"{least}, not {expected}")
