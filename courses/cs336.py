"""The data-parallel parts of Stanford's CS336, assignment 2, called as that course's tests do.

Ranks are seeded differently, a parameter is frozen, weights are tied, and each step is compared
with one process on the whole batch. A step is judged by the weights from which it began, so one
mistake is not found again as another. The classes have the layer names of the course's toy models,
which some solutions print.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lab.grade.driver.checks import Check, Flaw, Message, Messages, Rank, Returned, averaged

_STEPS = 5
_LOCAL_BATCH = 4
_LEARNING_RATE = 0.1
_WIDTH = 16
_LAYERS = 12  # a multiple of 2, 3 and 4 ranks
_MB = 2**20
# Of the weights after a step, as in the course's tests.
_TOLERANCE = 1e-4


class Net(nn.Module):
    """A model of this course, from (batch, 10)."""

    outputs = 5


class Plain(Net):
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


class Tied(Net):
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


class Equal(Net):
    """Twelve layers of equal size, so that buckets and shards have one right size."""

    outputs = _WIDTH

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


def _seeded(model: type[Net], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return model()


def _with(model: type[Net], weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a model with these weights. Raises KeyError or RuntimeError if they do not fit."""
    made = model()
    with torch.no_grad():
        for name, value in made.named_parameters():
            value.copy_(weights[name])
    return made


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def _share(rank: Rank, step: int, model: type[Net]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's inputs (batch, 10) and targets of a step."""
    generator = rank.generator(step)
    x = torch.randn(_LOCAL_BATCH, 10, generator=generator)
    return x, torch.randn(_LOCAL_BATCH, model.outputs, generator=generator)


def _gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what one process computes."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    loss = nn.functional.mse_loss(model(x), y)
    gradients = torch.autograd.grad(loss, list(trained.values()))
    return dict(zip(trained, gradients))


def _different(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-8,
) -> list[str]:
    """Return the names of the tensors that differ, if only in their shapes."""
    return [
        name
        for name, value in expected.items()
        # Forged tensors without elements would be close to all.
        if actual[name].shape != value.shape
        or not torch.allclose(actual[name], value, rtol=rtol, atol=atol)
    ]


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


def _train(
    model: type[Net], wrapper: Callable[[Any], Wrapper], module: Any, rank: Rank
) -> dict[str, Any]:
    """Train some steps through the student's wrapper; return the weights before, and all steps."""
    functions = wrapper(module)
    ddp = functions.build(_seeded(model, rank.seed))
    start = _detached(_in_wrapper(ddp, model))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=_LEARNING_RATE)
    steps: list[dict[str, Any]] = []
    for step in range(_STEPS):
        x, y = _share(rank, step, model)
        messages = Messages()
        functions.at_start(ddp_model=ddp, optimizer=optimizer)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        with messages.during("backward"):
            loss.backward()
        with messages.during("after"):
            functions.after_backward(ddp_model=ddp, optimizer=optimizer)
        got = {name: value.grad for name, value in _in_wrapper(ddp, model).items()}
        got = {name: None if value is None else value.clone() for name, value in got.items()}
        optimizer.step()
        after = _detached(_in_wrapper(ddp, model))
        steps.append({"got": got, "after": after, "sent": messages.sent})
    torchs = any(isinstance(part, nn.parallel.DistributedDataParallel) for part in ddp.modules())
    return {"start": start, "steps": steps, "torchs": torchs}


def _in_wrapper(ddp: nn.Module, model: type[Net]) -> dict[str, nn.Parameter]:
    """Return the wrapper's parameters by the model's names."""
    names = list(_weights(model()))
    actual = list(ddp.parameters())
    if len(actual) != len(names):
        raise ValueError(
            f"the wrapper has {len(actual)} parameters, and the module in it {len(names)}"
        )
    return dict(zip(names, actual))


def _detached(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in parameters.items()}


def _judge_training(model: type[Net], ranks: Sequence[Returned]) -> Iterator[Flaw]:
    """Yield what is wrong with a training.

    Raises ValueError, so that a person looks, if nothing is, and the student's code sends nothing.
    """
    flaws = list(_flaws_of_training(model, ranks))
    yield from flaws
    if flaws:
        return
    if any(returned["torchs"] for returned in ranks):
        raise ValueError("torch's own DistributedDataParallel does the work")
    if not all(step["sent"] for returned in ranks for step in returned["steps"]):
        raise ValueError("all gradients are right, and no message was seen")


def _flaws_of_training(model: type[Net], ranks: Sequence[Returned]) -> Iterator[Flaw]:
    """Compare the start with rank 0's weights, and each step with one process."""
    first = _weights(_seeded(model, ranks[0].rank.seed))
    for returned in ranks:
        if different := _different(returned["start"], first):
            who = f"rank {returned.rank.number} does not have rank 0's values"
            yield Flaw("different-start", f"{who} in {_listed(different)}")
    before = [returned["start"] for returned in ranks]
    for step in range(_STEPS):
        flaws = list(_judge_step(model, ranks, before, step))
        yield from flaws
        if flaws:
            return  # the next ones follow from it
        before = [returned["steps"][step]["after"] for returned in ranks]


def _judge_step(
    model: type[Net],
    ranks: Sequence[Returned],
    before: Sequence[Mapping[str, torch.Tensor]],
    step: int,
) -> Iterator[Flaw]:
    """Compare a step with one process that has all shares of the batch.

    before : by rank, the weights from which it began.
    """
    models = [_with(model, weights) for weights in before]
    shares = [_share(returned.rank, step, model) for returned in ranks]
    own = [_gradients(made, *share) for made, share in zip(models, shares)]
    got = [returned["steps"][step]["got"] for returned in ranks]
    sent = [message for returned in ranks for message in returned["steps"][step]["sent"]]
    at = next((message.at for message in sent), None)
    wrong = list(averaged(own, got, f"step {step + 1}", at))
    yield from wrong
    if wrong:
        return
    for weights, returned in zip(before, ranks):
        expected = _updated(weights, own)
        after = returned["steps"][step]["after"]
        if different := _different(after, expected, atol=_TOLERANCE):
            yield Flaw("differs-from-one-process", f"step {step + 1}: {_listed(different)}")


def _updated(
    weights: Mapping[str, torch.Tensor], gradients: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return weights after a step of SGD with the mean of all ranks' gradients."""
    updated = dict(weights)
    for name in gradients[0]:
        mean = torch.stack([of_rank[name] for of_rank in gradients]).mean(0)
        updated[name] = weights[name] - _LEARNING_RATE * mean
    return updated


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _judge_individual(ranks: Sequence[Returned]) -> Iterator[Flaw]:
    """Check the messages of a step: one for each parameter, begun during backward()."""
    sent: list[Message] = ranks[0]["steps"][-1]["sent"]
    at = next((message.at for message in sent), None)
    if sent and len(sent) != _LAYERS:
        evidence = f"{len(sent)} in a step, and {_LAYERS} parameters"
        yield Flaw("messages-per-parameter", evidence, at)
    yield from _overlap(sent)


def _overlap(sent: list[Message]) -> Iterator[Flaw]:
    if sent and not any(message.phase == "backward" for message in sent):
        evidence = f"all {len(sent)} begin after it"
        yield Flaw("not-overlapped", evidence, sent[0].at)


def _buckets(title: str, bucket_layers: float, least: int, most: int) -> Check:
    """Return a check of the number of messages of a step, from ``least`` to ``most``.

    bucket_layers : the size of a bucket in layers of ``Equal``.
    """
    bucket_mb = bucket_layers * _WIDTH**2 * 4 / _MB
    wrapper = partial(_bucketed, bucket_mb=bucket_mb)

    def judge(ranks: Sequence[Returned]) -> Iterator[Flaw]:
        yield from _judge_training(Equal, ranks)
        sent: list[Message] = ranks[0]["steps"][-1]["sent"]
        if sent and not least <= len(sent) <= most:
            right = f"{least}" if least == most else f"{least} to {most}"
            evidence = (
                f"{len(sent)} messages in a step for {_LAYERS} gradients of 1 KiB in buckets of "
                f"{bucket_mb:.3g} MB; right is {right}"
            )
            yield Flaw("bucket-size", evidence, sent[0].at)
        yield from _overlap(sent)

    return Check(title, partial(_train, Equal, wrapper), judge, "bucket-size")


def _training(title: str, model: type[Net], wrapper: Callable[[Any], Wrapper]) -> Check:
    return Check(title, partial(_train, model, wrapper), partial(_judge_training, model))


def _middle_buckets(module: Any) -> Wrapper:
    """Return the wrapper with buckets that hold two of the plain model's gradients."""
    return _bucketed(module, bucket_mb=0.0016)


# --- the sharded optimiser ---

_ADAMW: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}


def _optimize(
    model: type[Net], arrange: Callable[[nn.Module], Any], steps: int, module: Any, rank: Rank
) -> dict[str, Any]:
    """Take some steps with the sharded optimiser; all ranks have the same gradients.

    arrange : what the optimiser gets of a model: its parameters, or groups of them.
    """
    network = _seeded(model, rank.common)
    sharded = module.get_sharded_optimizer(arrange(network), torch.optim.AdamW, **_ADAMW)
    after: list[dict[str, torch.Tensor]] = []
    for step in range(steps):
        _take_step(sharded, network, model, rank, step)
        after.append(_weights(network))
    return {"after": after}


def _take_step(optimizer: Any, network: nn.Module, model: type[Net], rank: Rank, step: int) -> None:
    generator = rank.shared_generator(step)
    batch = _LOCAL_BATCH * rank.size
    x = torch.randn(batch, 10, generator=generator)
    y = torch.randn(batch, model.outputs, generator=generator)
    optimizer.zero_grad()
    nn.functional.mse_loss(network(x), y, reduction="sum").backward()
    optimizer.step()


def _judge_optimizer(
    model: type[Net],
    arrange: Callable[[nn.Module], Any],
    steps: int,
    name: str | None,
    ranks: Sequence[Returned],
) -> Iterator[Flaw]:
    """Compare the weights with AdamW's, up to the first step that differs.

    name : of what is found, in place of the names here.
    """
    expected = _seeded(model, ranks[0].rank.common)
    adamw = torch.optim.AdamW(arrange(expected), **_ADAMW)
    for step in range(steps):
        before = _weights(expected)
        _take_step(adamw, expected, model, ranks[0].rank, step)
        flaws: list[Flaw] = []
        for returned in ranks:
            flaws += _compare(returned["after"][step], _weights(expected), before, step, returned)
        for flaw in flaws:
            yield flaw if name is None else Flaw(name, flaw.evidence, flaw.at)
        if flaws:
            return


def _compare(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor],
    step: int,
    returned: Returned,
) -> Iterator[Flaw]:
    """Yield what is wrong with the weights after a step."""
    different = _different(actual, expected, rtol=1e-4, atol=1e-6)
    # What nobody has changed; AdamW, which is deterministic, may differ in the last bit.
    unsent = [one for one in different if torch.allclose(actual[one], before[one], rtol=1e-5)]
    wrong = [one for one in different if one not in unsent]
    where = f"step {step + 1}, rank {returned.rank.number}: "
    if unsent:
        yield Flaw("shard-not-sent", f"{where}{_listed(unsent)}")
    if wrong:
        yield Flaw("differs-from-one-process", f"{where}{_listed(wrong)}")


def _all(model: nn.Module) -> Any:
    return model.parameters()


def _two_groups(model: nn.Module) -> Any:
    """Return the parameters in two groups with settings of their own."""
    values = list(model.parameters())
    half = len(values) // 2
    return [
        {"params": values[:half], "lr": 0.05, "weight_decay": 0.02},
        {"params": values[half:], "lr": 0.01, "weight_decay": 0.0},
    ]


def _sharded(
    title: str,
    model: type[Net],
    arrange: Callable[[nn.Module], Any] = _all,
    *,
    steps: int = 10,
    found: str | None = None,
) -> Check:
    judge = partial(_judge_optimizer, model, arrange, steps, found)
    return Check(title, partial(_optimize, model, arrange, steps), judge, found or "raises")


def _state(module: Any, rank: Rank) -> dict[str, Any]:
    """Return how many elements of AdamW's state this rank's new optimisers hold."""
    known = _optimizers()
    network = _seeded(Equal, rank.common)
    sharded = module.get_sharded_optimizer(network.parameters(), torch.optim.AdamW, **_ADAMW)
    _take_step(sharded, network, Equal, rank, 0)
    held: dict[int, int] = {}  # elements by tensor
    torchs = False
    for optimizer in _optimizers():
        if any(optimizer is old for old in known):
            continue
        torchs |= type(optimizer).__module__.startswith("torch.distributed.")
        for state in list(optimizer.state.values()):
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    held[id(value)] = value.numel()
    return {"held": sum(held.values()), "torchs": torchs}


def _judge_state(ranks: Sequence[Returned]) -> Iterator[Flaw]:
    """Check that each rank holds about 1/N of AdamW's state.

    Raises ValueError, so that a person looks, if it is torch's own optimiser that does.
    """
    if any(returned["torchs"] for returned in ranks):
        raise ValueError("torch's own sharded optimiser does the work")
    if not any(returned["held"] for returned in ranks):
        yield Flaw("raises", "no optimiser with a state was found")
    whole = 2 * sum(value.numel() for value in Equal().parameters())  # AdamW's two moments
    for returned in ranks:
        share = returned["held"] / whole
        if share > 1 / returned.rank.size + 0.1:
            who = f"rank {returned.rank.number} of {returned.rank.size}"
            yield Flaw("state-not-sharded", f"{who} holds {share:.0%} of the state")


def _optimizers() -> list[torch.optim.Optimizer]:
    return [thing for thing in gc.get_objects() if isinstance(thing, torch.optim.Optimizer)]


PATHS = ["cs336-basics"]  # where the course keeps a package of its own
PARTS = {
    "individual": [
        _training("five steps equal one process", Plain, _individual),
        _training("a frozen parameter", Frozen, _individual),
        _training("tied weights", Tied, _individual),
        Check(
            "a message for each parameter, during backward()",
            partial(_train, Equal, _individual),
            _judge_individual,
        ),
    ],
    "bucketed": [
        _training("five steps equal one process", Plain, _middle_buckets),
        _training("a frozen parameter", Frozen, _middle_buckets),
        _training("tied weights", Tied, _middle_buckets),
        _buckets("one bucket", 1000.0, 1, 1),
        # Two layers fit; some close a bucket only once it is full, after three.
        _buckets("buckets of some layers", 2.5, 4, 6),
        _buckets("a bucket a layer", 0.1, _LAYERS, _LAYERS),
    ],
    "optimizer": [
        _sharded("ten steps equal AdamW", Plain),
        _sharded("a frozen parameter", Frozen),
        _sharded("tied weights", Tied),
        Check("each rank holds its share of the state", _state, _judge_state),
        _sharded("two parameter groups", Equal, _two_groups, steps=2, found="groups-ignored"),
    ],
}
