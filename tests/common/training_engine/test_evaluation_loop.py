"""``predict``: what it computes with mirror images, and that it reads nothing before the end."""

import pytest
import torch
from torch import nn

from common.training_engine import predict


def batches(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            10 * torch.randn(size, 3, 4, 5, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for size in sizes
    ]


def test_a_flipped_prediction_is_that_of_the_mean_logits():
    """Not the mean of the two probabilities or losses, nor of an image upside down."""
    torch.manual_seed(0)
    # without symmetry: mirroring an image changes every logit
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)).double()
    loader = batches(40, 40, 7)
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    with torch.no_grad():
        plain, mirrored = model(images), model(images.flip(dims=[-1]))
    predictions = []
    for flip, logits in ((False, plain), (True, (plain + mirrored) / 2)):
        found = predict(model, "cpu", nn.CrossEntropyLoss(), loader, flip=flip)
        loss = float(nn.functional.cross_entropy(logits, labels))
        assert found.mean_loss == pytest.approx(loss, rel=1e-12)
        assert found.labels.tolist() == labels.tolist()
        predictions.append(found.predicted.tolist())
        assert predictions[-1] == logits.argmax(dim=1).tolist()
    assert predictions[0] != predictions[1]
