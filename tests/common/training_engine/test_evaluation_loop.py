"""``predict``: what it computes with mirror images, and that it reads nothing before the end."""

import pytest
import torch
from torch import nn

from common.training_engine import predict

CLASSES = 3


def model_of_rows_and_columns():
    """Return a float64 model without symmetry: mirroring an image changes every logit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, CLASSES))
    return model.double()


def batches(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            10 * torch.randn(size, 3, 4, 5, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]


def test_a_flipped_prediction_is_that_of_the_mean_logits():
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
