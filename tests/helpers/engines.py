"""An engine that is ready to train, and the optimiser of most tests."""

import torch
from torch import nn

from common.training_engine import TrainingEngine


def sgd(model, lr=0.1, **options):
    """Return plain SGD for the parameters that train."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, **options)


def prepared(
    model, sync=None, *, device="cpu", optimizer=None, criterion=None, scheduler=None, **options
):
    """Return an engine; with ``sync``, a strategy or its name, in the open group."""
    if sync is not None:
        options |= {"distributed": True, "sync": sync}
    engine = TrainingEngine(model, device, **options)
    engine.prepare(optimizer or sgd(engine.model), criterion or nn.CrossEntropyLoss(), scheduler)
    return engine
