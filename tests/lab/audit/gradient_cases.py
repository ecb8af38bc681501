"""Training loops that compute by hand what the probe has to record of them.

Each case is called on every rank with ``rank`` and a list, to which it adds one ``Truth`` a step.
The own gradients come from a copy of the model, which no optimiser knows.
"""

import copy
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

RANKS, FEATURES, CLASSES, BATCH = 2, 60, 5, 8


class Truth(NamedTuple):
    """What one step had, in the order of the optimiser's parameters; None without a gradient."""

    weights: list[Tensor]
    own: list[Tensor | None]
    got: list[Tensor | None]


class Net(nn.Module):
    """A tied, a frozen and an unused parameter; some hold more numbers than the probe keeps."""

    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 40), nn.Linear(40, FEATURES)
        self.second.weight = nn.Parameter(torch.randn(FEATURES, 40) * 0.1)
        self.frozen, self.unused = nn.Linear(FEATURES, FEATURES), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.again, self.checkpointed = self.head, checkpointed

    def forward(self, images):
        """Return logits of shape (batch, CLASSES)."""
        if self.checkpointed:
            hidden = checkpoint(self.first, images.requires_grad_(), use_reentrant=True)
        else:
            hidden = self.first(images)
        return self.head(self.frozen(self.second(torch.relu(hidden)))) + self.again(images)


def average(model):
    """Average the gradients by hand."""
    average_all(model.parameters())


def average_all(parameters):
    """Average the gradients of parameters."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS


class AveragingSGD(torch.optim.SGD):
    """Averages in its own step, as Horovod's optimiser does."""

    def step(self, closure=None):
        """Average, then update."""
        average_all(self.param_groups[0]["params"])
        return super().step(closure)


class OwnSGD(torch.optim.Optimizer):
    """A class of the script's own, as the AdamW of transformers: it calls no step of torch's."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        """Average, then update."""
        average_all(self.param_groups[0]["params"])
        for one in self.param_groups[0]["params"]:
            if one.grad is not None:
                one.data.add_(one.grad, alpha=-self.param_groups[0]["lr"])


def train(
    rank,
    truths,
    *,
    make,
    ddp=None,
    checkpointed=False,
    micro=1,
    scaler=None,
    finish=lambda model: None,
    in_step=False,
):
    """Train three steps, and note what each step computes and gets.

    finish : called before the step. in_step : the optimiser averages in its ``step``.
    """
    model = Net(checkpointed=checkpointed)
    net = (
        model if ddp is None else DistributedDataParallel(model, find_unused_parameters=True, **ddp)
    )
    optimizer = make(model.parameters(), lr=0.1)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for step in range(3):
        optimizer.zero_grad()
        weights = [one.detach().clone() for one in parameters]
        own = [None] * len(parameters)
        for part in range(micro):
            source = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
            images = torch.randn(BATCH, FEATURES, generator=source)
            labels = torch.randint(0, CLASSES, (BATCH,), generator=source)
            twin = copy.deepcopy(model)
            twin.zero_grad()
            cross_entropy(twin(images), labels).backward()
            scale = scaler.get_scale() if scaler else 1.0
            for i, one in enumerate(twin.parameters()):
                if one.grad is not None:
                    own[i] = one.grad * scale + (0 if own[i] is None else own[i])
            last = part == micro - 1
            with nullcontext() if last or net is model else net.no_sync():  # type: ignore[operator]
                loss = cross_entropy(net(images), labels)
                (scaler.scale(loss) if scaler else loss).backward()
        finish(model)
        if scaler:
            scaler.unscale_(optimizer)
        got = [None if one.grad is None else one.grad.clone() for one in parameters]
        for one in got if in_step else ():
            if one is not None:
                dist.all_reduce(one)
                one /= RANKS
        truths.append(Truth(weights, own, got))
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def clip_then_average(model):
    """Give clip_grad_norm_ an iterator, which can be read only once."""
    nn.utils.clip_grad_norm_((one for one in model.parameters()), 0.1)
    average(model)


def zero(parameters, lr):
    """Return an optimiser that calls one of its own."""
    return ZeroRedundancyOptimizer(list(parameters), torch.optim.Adam, lr=lr)


SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
CASES = {
    "buckets": {"make": SGD, "ddp": {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}},
    "accumulation": {"make": SGD, "ddp": {}, "micro": 3},
    "checkpointed": {"make": AdamW, "checkpointed": True, "finish": average},
    "scaled": {"make": SGD, "scaler": torch.amp.GradScaler("cpu"), "finish": average},
    "clipped": {"make": SGD, "finish": clip_then_average},
    "zero": {"make": zero, "ddp": {}},
    "averaging": {"make": AveragingSGD, "in_step": True},
    "own class": {"make": OwnSGD, "in_step": True},
}
