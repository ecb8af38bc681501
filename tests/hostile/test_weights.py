"""--pretrained-weights: whatever the file is, one error at most."""

import io
import os

import pytest
import torch

from common.errors import UserError
from common.models.transfer import load_pretrained, resnet18_transfer
from tests.helpers.hostile import CASES, damaged, run_cases


@CASES
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_damaged_weights(tmp_path, cases, zipped):
    """Files of today's format and of that before torch 1.6, which torchvision's own still have."""
    buffer = io.BytesIO()
    weights = {"conv1.weight": torch.ones(2, 2), "bn1.bias": torch.ones(3)}
    torch.save(weights, buffer, _use_new_zipfile_serialization=zipped)
    model, path = resnet18_transfer(), tmp_path / "weights.pth"

    def check(content):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"weights\.pth"):
            load_pretrained(model, str(path))

    run_cases(cases, damaged(buffer.getvalue()), check)


@pytest.mark.filterwarnings("ignore")
def test_crafted_weights(tmp_path):
    """Every name and shape is right, but the tensors have no data of their own."""
    model, path = resnet18_transfer(), tmp_path / "weights.pth"
    own = model.network.state_dict()
    for make in (
        lambda value: torch.empty(value.shape, device="meta"),
        lambda value: torch.zeros(value.shape).to_sparse(),
    ):
        torch.save({name: make(value) for name, value in own.items()}, path)
        with pytest.raises(UserError, match=r"weights\.pth"):
            load_pretrained(model, str(path))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"weights\.pth is a FIFO"):
        load_pretrained(model, str(path))
