"""The data-parallel parts of Stanford's CS336, assignment 2, called as that course's tests do.

Ranks are seeded differently, a parameter is frozen, weights are tied, and each step is compared
with one process on the whole batch. The classes have the layer names of the course's toy models,
which some solutions print.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lab.grade.driver.checks import Check, Flaw, Message, Messages, averaged

_STEPS = 5
_LOCAL_BATCH = 4
_LEARNING_RATE = 0.1
_WIDTH = 16
_LAYERS = 12  # a multiple of 2, 3 and 4 ranks
_MB = 2**20
# Of the weights after a step, as in the course's tests.
_TOLERANCE = 1e-4


class Plain(nn.Module):
    """Three layers; all parameters are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 10, bias=False)
        self.fc2 = nn.Linear(10, 50)
        self.fc3 = nn.Linear(50, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, 5) from (batch, 10)."""
        return self.fc3(self.fc2(self.fc1(x).relu()).relu())


class Frozen(Plain):
    """The same with a frozen bias, and a frozen parameter that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.fc2.bias.requires_grad = False
        self.no_grad_fixed_param = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)


class Tied(nn.Module):
    """Five layers, two of which share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 10, bias=False)
        self.fc2 = nn.Linear(10, 50, bias=False)
        self.fc3 = nn.Linear(50, 10, bias=False)
        self.fc4 = nn.Linear(10, 50, bias=False)
        self.fc5 = nn.Linear(50, 5, bias=False)
        self.fc4.weight = self.fc2.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, 5) from (batch, 10)."""
        x = self.fc3(self.fc2(self.fc1(x).relu()).relu())
        return self.fc5(self.fc4(x.relu()).relu())


class Equal(nn.Module):
    """Twelve layers of equal size, so that buckets and shards have one right size."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(_LAYERS):
            self.add_module(f"fc{number + 1}", nn.Linear(_WIDTH, _WIDTH, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, 16) from (batch, 10)."""
        x = nn.functional.pad(x, (0, _WIDTH - x.shape[1]))
        for layer in self.children():
            x = layer(x).tanh() + x
        return x


def _seeded(model: type[nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return model()


def _batch(step: int, model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs (global batch, 10) and targets of a step, the same on all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(_LOCAL_BATCH * dist.get_world_size(), 10, generator=generator)
    with torch.no_grad():
        shape = model(x).shape
    return x, torch.randn(shape, generator=generator)


def _share(whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows."""
    first = _LOCAL_BATCH * dist.get_rank()
    return whole[first : first + _LOCAL_BATCH]


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def _gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what one process computes."""
    trained = _trained(model)
    loss = nn.functional.mse_loss(model(x), y)
    gradients = torch.autograd.grad(loss, list(trained.values()))
    return dict(zip(trained, gradients))


# --- DistributedDataParallel by hand ---


class Wrapper(NamedTuple):
    """The student's functions, by what they do."""

    build: Callable[[nn.Module], nn.Module]
    after_backward: Callable[..., object]
    at_start: Callable[..., object]


def _individual(module: Any) -> Wrapper:
    """Return the functions of the container without buckets; the course's newer name is get_ddp."""
    if hasattr(module, "get_ddp"):
        return Wrapper(module.get_ddp, module.ddp_on_after_backward, _nothing)
    after = module.ddp_individual_parameters_on_after_backward
    return Wrapper(module.get_ddp_individual_parameters, after, _nothing)


def _bucketed(module: Any, *, bucket_mb: float) -> Wrapper:
    return Wrapper(
        partial(module.get_ddp_bucketed, bucket_size_mb=bucket_mb),
        module.ddp_bucketed_on_after_backward,
        module.ddp_bucketed_on_train_batch_start,
    )


def _nothing(**_: object) -> None:
    """Stand for a function that the course does not ask for."""


class DrivenTraining:
    """Some steps through the student's wrapper, each beside the same step of one process.

    ``run`` yields what is wrong; the weights are set right after each step, so that one mistake is
    not found again as another. ``sent`` then has the messages of the last step.
    """

    def __init__(self, wrapper: Wrapper, model: type[nn.Module]) -> None:
        self.wrapper = wrapper
        self.reference = _seeded(model, 0)
        self.local = _seeded(model, dist.get_rank())
        self.sent: list[Message] = []

    def run(self) -> Iterator[Flaw]:
        """Build the wrapper and train."""
        ddp = self.wrapper.build(self.local)
        yield from self._start(ddp)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=_LEARNING_RATE)
        for step in range(_STEPS):
            yield from self._step(ddp, optimizer, step)

    def _weights(self, ddp: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield name, weights in the wrapper, and one process's weights."""
        expected = list(self.reference.named_parameters())
        actual = list(ddp.parameters())
        if len(actual) != len(expected):
            raise ValueError(
                f"the wrapper has {len(actual)} parameters, and the module in it {len(expected)}"
            )
        for (name, value), own in zip(expected, actual):
            yield name, own, value

    def _start(self, ddp: nn.Module) -> Iterator[Flaw]:
        different = [
            name
            for name, actual, expected in self._weights(ddp)
            if not torch.allclose(actual, expected)
        ]
        if different:
            rank = dist.get_rank()
            evidence = f"rank {rank} does not have rank 0's values in {_listed(different)}"
            yield Flaw("different-start", evidence)
            self._repair(ddp)

    def _repair(self, ddp: nn.Module) -> None:
        with torch.no_grad():
            for _, actual, expected in self._weights(ddp):
                actual.copy_(expected)

    def _step(self, ddp: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Iterator[Flaw]:
        x, y = _batch(step, self.reference)
        own = _gradients(self.reference, _share(x), _share(y))
        mean = _gradients(self.reference, x, y)
        messages = Messages()
        self.wrapper.at_start(ddp_model=ddp, optimizer=optimizer)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(_share(x)), _share(y))
        with messages.during("backward"):
            loss.backward()
        with messages.during("after"):
            self.wrapper.after_backward(ddp_model=ddp, optimizer=optimizer)
        self.sent = messages.sent
        got = {name: actual.grad for name, actual, _ in self._weights(ddp)}
        at = next((message.at for message in self.sent), None)
        wrong = list(averaged(own, got, f"step {step + 1}", at))
        yield from wrong
        optimizer.step()
        with torch.no_grad():
            for name, value in _trained(self.reference).items():
                value.sub_(_LEARNING_RATE * mean[name])
        different = [
            name
            for name, actual, expected in self._weights(ddp)
            if not torch.allclose(actual, expected, atol=_TOLERANCE)
        ]
        if different and not wrong:
            yield Flaw("differs-from-one-process", f"step {step + 1}: {_listed(different)}")
        if different or wrong:
            self._repair(ddp)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _train(
    model: type[nn.Module], wrapper: Callable[[Any], Wrapper], module: Any
) -> Iterator[Flaw]:
    yield from DrivenTraining(wrapper(module), model).run()


def _count_individual(module: Any) -> Iterator[Flaw]:
    """Check the messages of a step: one for each parameter, begun during backward()."""
    training = DrivenTraining(_individual(module), Equal)
    list(training.run())  # what is wrong with the values was found before
    sent = training.sent
    at = next((message.at for message in sent), None)
    if sent and len(sent) != _LAYERS:
        evidence = f"{len(sent)} in a step, and {_LAYERS} parameters"
        yield Flaw("messages-per-parameter", evidence, at)
    yield from _overlap(sent)


def _overlap(sent: list[Message]) -> Iterator[Flaw]:
    if sent and not any(message.phase == "backward" for message in sent):
        evidence = f"all {len(sent)} begin after it"
        yield Flaw("not-overlapped", evidence, sent[0].at)


def _count_buckets(bucket_layers: float, least: int, most: int, module: Any) -> Iterator[Flaw]:
    """Check the number of messages of a step for buckets of a size in layers of ``Equal``."""
    bucket_mb = bucket_layers * _WIDTH**2 * 4 / _MB
    training = DrivenTraining(_bucketed(module, bucket_mb=bucket_mb), Equal)
    yield from training.run()
    sent = training.sent
    if sent and not least <= len(sent) <= most:
        right = f"{least}" if least == most else f"{least} to {most}"
        evidence = (
            f"{len(sent)} messages in a step for {_LAYERS} gradients of 1 KiB in buckets of "
            f"{bucket_mb:.3g} MB; right is {right}"
        )
        yield Flaw("bucket-size", evidence, sent[0].at)
    yield from _overlap(sent)


# --- the sharded optimiser ---

_ADAMW: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}


def _optimize(
    module: Any, model: type[nn.Module], arrange: Callable[[nn.Module], Any], steps: int
) -> Iterator[Flaw]:
    """Compare the sharded optimiser with AdamW, which gets the same gradients.

    arrange : what the optimisers get of a model: its parameters, or groups of them.
    """
    expected = _seeded(model, 42)
    actual = copy.deepcopy(expected)
    adamw = torch.optim.AdamW(arrange(expected), **_ADAMW)
    sharded = module.get_sharded_optimizer(arrange(actual), torch.optim.AdamW, **_ADAMW)
    for step in range(steps):
        before = {name: value.detach().clone() for name, value in expected.named_parameters()}
        x, y = _batch(step, expected)
        for optimizer, network in ((adamw, expected), (sharded, actual)):
            optimizer.zero_grad()
            nn.functional.mse_loss(network(x), y, reduction="sum").backward()
            optimizer.step()
        yield from _compare(dict(actual.named_parameters()), expected, before, step)


def _compare(
    actual: dict[str, nn.Parameter],
    expected: nn.Module,
    before: dict[str, torch.Tensor],
    step: int,
) -> Iterator[Flaw]:
    """Yield what is wrong with the weights after a step, and set them right."""
    unsent: list[str] = []
    different: list[str] = []
    for name, value in expected.named_parameters():
        if torch.allclose(actual[name], value, rtol=1e-4, atol=1e-6):
            continue
        is_old = torch.equal(actual[name], before[name])
        (unsent if is_old else different).append(name)
    where = f"step {step + 1}, rank {dist.get_rank()}: "
    if unsent:
        yield Flaw("shard-not-sent", f"{where}{_listed(unsent)}")
    if different:
        yield Flaw("differs-from-one-process", f"{where}{_listed(different)}")
    if unsent or different:
        with torch.no_grad():
            for name, value in expected.named_parameters():
                actual[name].copy_(value)


def _all(model: nn.Module) -> Any:
    return model.parameters()


def _two_groups(model: nn.Module) -> Any:
    """Return the parameters in two groups, the second with settings of its own."""
    values = list(model.parameters())
    half = len(values) // 2
    return [{"params": values[:half]}, {"params": values[half:], "lr": 0.01, "weight_decay": 0.0}]


def _sharded(model: type[nn.Module], module: Any) -> Iterator[Flaw]:
    yield from _optimize(module, model, _all, steps=10)


def _groups(module: Any) -> Iterator[Flaw]:
    found = list(_optimize(module, Equal, _two_groups, steps=2))
    if found:
        yield Flaw("groups-ignored", found[0].evidence, found[0].at)


def _state_share(module: Any) -> Iterator[Flaw]:
    """Check that this rank's optimisers hold about 1/N of AdamW's state."""
    known = _optimizers()
    model = _seeded(Equal, 42)
    sharded = module.get_sharded_optimizer(model.parameters(), torch.optim.AdamW, **_ADAMW)
    x, y = _batch(0, model)
    nn.functional.mse_loss(model(x), y).backward()
    sharded.step()
    held: dict[int, int] = {}  # elements by tensor
    for optimizer in _optimizers():
        if any(optimizer is old for old in known):
            continue
        for state in list(optimizer.state.values()):
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    held[id(value)] = value.numel()
    whole = 2 * sum(value.numel() for value in model.parameters())  # AdamW's two moments
    own = sum(held.values())
    total = torch.tensor(own)
    dist.all_reduce(total)
    if total == 0:
        raise LookupError("no optimiser with a state was found")
    size = dist.get_world_size()
    if own / whole > 1 / size + 0.1:
        evidence = f"rank {dist.get_rank()} of {size} holds {own / whole:.0%} of the state"
        yield Flaw("state-not-sharded", evidence)


def _optimizers() -> list[torch.optim.Optimizer]:
    return [thing for thing in gc.get_objects() if isinstance(thing, torch.optim.Optimizer)]


def _middle_buckets(module: Any) -> Wrapper:
    """Return the wrapper with buckets that hold two of the plain model's gradients."""
    return _bucketed(module, bucket_mb=0.0016)


PATHS = ["cs336-basics"]  # where the course keeps a package of its own
PARTS = {
    "individual": [
        Check("five steps equal one process", partial(_train, Plain, _individual)),
        Check("a frozen parameter", partial(_train, Frozen, _individual)),
        Check("tied weights", partial(_train, Tied, _individual)),
        Check("a message for each parameter, during backward()", _count_individual),
    ],
    "bucketed": [
        Check("five steps equal one process", partial(_train, Plain, _middle_buckets)),
        Check("a frozen parameter", partial(_train, Frozen, _middle_buckets)),
        Check("tied weights", partial(_train, Tied, _middle_buckets)),
        Check("one bucket", partial(_count_buckets, 1000.0, 1, 1), "bucket-size"),
        # Two layers fit; some close a bucket only once it is full, after three.
        Check("buckets of some layers", partial(_count_buckets, 2.5, 4, 6), "bucket-size"),
        Check("a bucket a layer", partial(_count_buckets, 0.1, _LAYERS, _LAYERS), "bucket-size"),
    ],
    "optimizer": [
        Check("ten steps equal AdamW", partial(_sharded, Plain)),
        Check("a frozen parameter", partial(_sharded, Frozen)),
        Check("tied weights", partial(_sharded, Tied)),
        Check("each rank holds its share of the state", _state_share),
        Check("two parameter groups", _groups, "groups-ignored"),
    ],
}
