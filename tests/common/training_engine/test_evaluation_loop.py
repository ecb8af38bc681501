"""``predict``: what it computes with mirror images, and that it reads nothing before the end."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.data.dataset import ImageSet
from common.data.loaders import EvaluationLoader
from common.training_engine import predict

CLASSES = 3


def model_of_rows_and_columns() -> nn.Module:
    """Return a float64 model without symmetry: mirroring an image changes every logit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, CLASSES))
    return model.double()


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            10 * torch.randn(size, 3, 4, 5, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]


def test_a_flipped_prediction_is_that_of_the_mean_logits() -> None:
    """Loss and class come from the mean of the logits of the image and its mirror image.

    The mean of the two probabilities or losses, or an image upside down, would give other numbers.
    """
    model, loader = model_of_rows_and_columns(), batches(40, 40, 7)
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    with torch.no_grad():
        logits = (model(images) + model(images.flip(dims=[-1]))) / 2
        plain = model(images)
    flipped = predict(model, "cpu", nn.CrossEntropyLoss(), loader, flip=True)
    assert flipped.predicted.tolist() == logits.argmax(dim=1).tolist()
    assert flipped.labels.tolist() == labels.tolist()
    assert flipped.mean_loss == pytest.approx(
        float(nn.functional.cross_entropy(logits, labels)), rel=1e-12
    )
    unflipped = predict(model, "cpu", nn.CrossEntropyLoss(), loader)
    assert unflipped.predicted.tolist() == plain.argmax(dim=1).tolist()
    assert unflipped.mean_loss == pytest.approx(
        float(nn.functional.cross_entropy(plain, labels)), rel=1e-12
    )
    assert unflipped.predicted.tolist() != flipped.predicted.tolist()


class _Reads(TorchDispatchMode):
    """Notes each operation that brings a value from a GPU to the host."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        devices = {x.device.type for x in tree_leaves(args) if isinstance(x, Tensor)}
        to_host = torch.device("cpu") == (kwargs or {}).get("device") and "cuda" in devices
        if to_host or "_local_scalar_dense" in str(operation):
            self._seen.append("read")
        return operation(*args, **kwargs or {})


@pytest.mark.parametrize("flip", [False, True])
def test_nothing_is_read_from_a_gpu_before_the_last_batch(flip: bool) -> None:
    """On a fake GPU all forward passes come first, then the reads."""
    images = ImageSet(torch.zeros(40, 32, 32, 3, dtype=torch.uint8), torch.zeros(40).long())
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, CLASSES, device="cuda"))
        loader = EvaluationLoader(
            images, mean=(0.5,) * 3, std=(0.2,) * 3, batch_size=16, device="cuda"
        )
        seen: list[str] = []
        model.register_forward_hook(lambda *_: seen.append("forward"))
        # A fake tensor has no values, so reading one ends the function.
        with _Reads(seen), pytest.raises((RuntimeError, DataDependentOutputException)):
            predict(model, "cuda", nn.CrossEntropyLoss(), loader, flip=flip)
    assert seen[-1] == "read"
    assert seen[: seen.index("read")] == ["forward"] * (6 if flip else 3)
