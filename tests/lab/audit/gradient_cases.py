"""Training loops that compute by hand what the probe has to record of them.

Each case is called on every rank with ``rank`` and a list, to which it adds one ``Truth`` a step.
The own gradients come from a copy of the model, which no optimiser knows.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

RANKS, FEATURES, CLASSES, BATCH = 2, 60, 5, 8
Truths = list["Truth"]


@dataclass
class Truth:
    """What one step had, in the order of the optimiser's parameters; None without a gradient."""

    weights: list[Tensor]
    own: list[Tensor | None]
    got: list[Tensor | None]


class Net(nn.Module):
    """Two layers, one of them larger than the number of coordinates that the probe keeps."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 40), nn.Linear(40, CLASSES)
        self.checkpointed = checkpointed

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, CLASSES)."""
        if self.checkpointed:
            hidden = checkpoint(self.first, images.requires_grad_(), use_reentrant=True)
        else:
            hidden = self.first(images)
        return self.second(torch.relu(hidden))


class TiedNet(nn.Module):
    """A tied, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(FEATURES, 40, bias=False), nn.Linear(40, FEATURES)
        self.decode.weight = nn.Parameter(torch.randn(FEATURES, 40) * 0.1)
        self.frozen, self.unused = nn.Linear(FEATURES, FEATURES), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.again = self.head

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, CLASSES)."""
        rebuilt = self.frozen(self.decode(self.encode(images)))
        return self.head(rebuilt) + self.again(images)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Return images of shape (BATCH, FEATURES) and labels of shape (BATCH,)."""
    source = torch.Generator().manual_seed(seed)
    images = torch.randn(BATCH, FEATURES, generator=source)
    return images, torch.randint(0, CLASSES, (BATCH,), generator=source)


def average(model: nn.Module) -> None:
    """Average the gradients by hand."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS


def train(
    model: nn.Module,
    net: nn.Module,
    optimizer: Any,
    truths: Truths,
    *,
    rank: int,
    micro: int = 1,
    before_step: Callable[[], object] = lambda: None,
    amp: bool = False,
    scaler: Any = None,
    steps: int = 3,
) -> None:
    """Train, and note what each step computes and gets."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for step in range(steps):
        optimizer.zero_grad()
        weights = [one.detach().clone() for one in parameters]
        own: list[Tensor | None] = [None] * len(parameters)
        scale = scaler.get_scale() if scaler else 1.0
        for part in range(micro):
            images, labels = batch(1000 * step + 10 * part + rank)
            own = add(own, gradients_of_copy(model, parameters, images, labels, amp=amp))
            last = part == micro - 1
            quiet = nullcontext() if last or net is model else net.no_sync()  # type: ignore[operator]
            with quiet:
                with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                    loss = cross_entropy(net(images), labels)
                (scaler.scale(loss) if scaler else loss).backward()
        own = [None if one is None else one * scale for one in own]
        before_step()
        if scaler:
            scaler.unscale_(optimizer)
        got = [None if one.grad is None else one.grad.clone() for one in parameters]
        truths.append(Truth(weights, own, got))
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def gradients_of_copy(
    model: nn.Module, parameters: list[Tensor], images: Tensor, labels: Tensor, *, amp: bool
) -> list[Tensor | None]:
    """Return the gradients of a step in one process, None where none arrives."""
    twin = copy.deepcopy(model)
    names = {id(one): name for name, one in model.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = cross_entropy(twin(images), labels)
    loss.backward()
    of = dict(twin.named_parameters())
    return [of[names[id(one)]].grad for one in parameters]


def add(one: list[Tensor | None], two: list[Tensor | None]) -> list[Tensor | None]:
    """Return the sums; None is nothing."""
    return [b if a is None else a if b is None else a + b for a, b in zip(one, two, strict=True)]


def by_hand(rank: int, truths: Truths) -> None:
    """A loop over the parameters."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, model, optimizer, truths, rank=rank, before_step=lambda: average(model))


def ddp(rank: int, truths: Truths) -> None:
    """DDP with several buckets and views of them."""
    model = Net()
    net = DistributedDataParallel(model, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    train(model, net, torch.optim.SGD(model.parameters(), lr=0.1), truths, rank=rank)


def accumulation(rank: int, truths: Truths) -> None:
    """DDP with three micro-batches, of which the last one is exchanged."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, DistributedDataParallel(model), optimizer, truths, rank=rank, micro=3)


def autocast(rank: int, truths: Truths) -> None:
    """DDP with bfloat16 activations and a reentrant checkpoint."""
    model = Net(checkpointed=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    net = DistributedDataParallel(model, static_graph=True)
    train(model, net, optimizer, truths, rank=rank, amp=True)


def scaled(rank: int, truths: Truths) -> None:
    """GradScaler, averaged by hand before unscaling."""
    model = Net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    finish = lambda: average(model)  # noqa: E731
    train(model, model, optimizer, truths, rank=rank, scaler=scaler, before_step=finish)


def clipped(rank: int, truths: Truths) -> None:
    """Clipped before averaging: what is sent is not what was computed."""
    model = Net()

    def finish() -> None:
        nn.utils.clip_grad_norm_((one for one in model.parameters()), 0.1)
        average(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, model, optimizer, truths, rank=rank, before_step=finish)


def zero(rank: int, truths: Truths) -> None:
    """ZeroRedundancyOptimizer, which calls an optimiser of its own."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Net()
    net = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, net, optimizer, truths, rank=rank)


def tied(rank: int, truths: Truths) -> None:
    """Tied, frozen and unused parameters, with AdamW."""
    model = TiedNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, model, optimizer, truths, rank=rank, before_step=lambda: average(model))


class AveragingSGD(torch.optim.SGD):
    """Averages in its own step, as Horovod's optimiser does."""

    def step(self, closure: Any = None) -> Any:
        """Average, then update."""
        for group in self.param_groups:
            for one in group["params"]:
                dist.all_reduce(one.grad)
                one.grad /= RANKS
        return super().step(closure)


def own_class(rank: int, truths: Truths) -> None:
    """An optimiser that averages within step(); the truth of ``got`` is seen by a step hook."""
    model = Net()
    optimizer = AveragingSGD(model.parameters(), lr=0.1)
    train(model, model, optimizer, truths, rank=rank)
    for truth in truths:
        truth.got = [mean_over_ranks(one) for one in truth.got]


def mean_over_ranks(tensor: Tensor | None) -> Tensor:
    """Return the mean of a copy."""
    assert tensor is not None
    result = tensor.clone()
    dist.all_reduce(result)
    return result / RANKS


CASES = (
    by_hand, ddp, accumulation, autocast, scaled, clipped, zero, tied, own_class,
)  # fmt: skip
