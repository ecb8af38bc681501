"""project_models.json has the parts of this project's models as building them gives them."""

from itertools import accumulate

import numpy as np
import pytest
import torch

from common.models import MODELS, build_model
from lab.predict.calibration_file import load_calibration, reference_path
from lab.predict.common_models import _SHARES, common_models
from lab.predict.own_model import with_own_model
from lab.predict.project_models import built_parts, parts_of


@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_the_parts_of_the_file(model):
    assert parts_of(model) == built_parts(model)


def test_a_model_that_the_file_lacks_is_built(monkeypatch):
    monkeypatch.setitem(MODELS, "mine", MODELS["resnet18"])
    assert parts_of("mine") == parts_of("resnet18")


TABLE = common_models()


def test_each_model_but_one_has_a_curve():
    own = [model for model, place in MODELS.items() if place.startswith("common.")]
    missing = [model for model in own if f"{model}_cifar10" not in TABLE]
    assert missing == ["resnet18_transfer"]  # it trains its last layer alone


def ready_by_multiplications(model):
    """Return the shares of gradients that are ready, as common_models.toml tells them."""
    with torch.device("meta"):
        network = build_model(model, 10).eval()
    layers = []  # multiplications and parameters, in the order of forward

    def record(layer, _, output):
        own = [p.numel() for p in layer.parameters(recurse=False)]
        work = 0
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            work = output.numel() * layer.weight[0].numel()
        layers.append((work, sum(own)))

    for layer in network.modules():
        if not list(layer.children()):
            layer.register_forward_hook(record)
    network(torch.empty(1, 3, 32, 32, device="meta"))
    work, entries = (list(accumulate(column)) for column in zip(*layers[::-1], strict=True))
    found = []
    for share in _SHARES[1:]:
        done = [
            made for spent, made in zip(work, entries, strict=True) if spent <= share * work[-1]
        ]
        found.append(round(max(done, default=0) / entries[-1], 3))
    return found


@pytest.mark.parametrize("model", [model for model in MODELS if f"{model}_cifar10" in TABLE])
def test_gradients_become_ready_with_the_multiplications_of_the_layers(model):
    known = TABLE[f"{model}_cifar10"]
    assert list(known.ready[1:]) == ready_by_multiplications(model)
    parts = built_parts(model).gradients
    assert known.tensors == len(parts)
    calibration = load_calibration(reference_path())
    if model == calibration.model:
        return
    own = with_own_model(calibration, model=model, parameters=None, step_seconds=1, batch=1)
    made = np.array(own.compute.ready_bytes) / own.compute.ready_bytes[-1]
    at_half = np.interp(0.5, own.compute.ready_shares, made)
    assert at_half == pytest.approx(known.ready[5], abs=0.05)  # 0.5 if all bytes took as long
