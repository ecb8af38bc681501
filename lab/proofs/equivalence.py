"""Compare gradient synchronisation, step by step, with one process that trains on the whole batch.

``check_equivalence`` starts real ranks on this machine, lets each train its shards through the
``TrainingEngine``, and returns for every step where the weights differ most from those of one
process. ``errors_on_this_rank`` is the part of it that one rank of an open group computes.
"""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.sync import build_sync
from common.sync.base import GradientSync
from common.training_engine import TrainingEngine
from common.utils.hashing import digest
from lab.proofs.ranks import run_ranks

STEPS = 4
SAMPLES = (4, 3, 0, 2, 1, 5)
"""Samples of uneven micro-batches, in turn; each step begins one further. One is empty, one has a single sample."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The greatest relative difference that rounding explains."""

OPTIONS = {"ddp": {"find_unused_parameters": True}, "overlapped": {"bucket_mb": 0.0002}}
"""What the strategies need for ``ProofModel``: DistributedDataParallel must search for unused parameters;
``overlapped`` gets buckets small enough that there are several."""

Synchronise = Callable[[nn.Module], None]
MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """What the ranks train, and how; by default all that a right strategy must cope with.

    Parameters
    ----------
    uneven : shards differ in size, and in some steps a rank has no sample; else all have three.
    tied, frozen : two layers share a weight; a layer does not train.
    unused : one layer is used by no rank, another by rank 0 alone.
    momentum, weight_decay : of SGD, whose learning rate is 0.1.
    accumulation_steps : micro-batches of one optimiser step on each rank.
    clip_norm : greatest norm of all gradients together; None: no clipping.
    dtype : of parameters and images.
    channels_last : parameters lie in memory in that order.
    """

    uneven: bool = True
    tied: bool = True
    frozen: bool = True
    unused: bool = True
    momentum: float = 0.9
    weight_decay: float = 0.01
    accumulation_steps: int = 1
    clip_norm: float | None = None
    dtype: torch.dtype = torch.float64
    channels_last: bool = False

    @property
    def tolerance(self) -> float:
        """The greatest relative difference that rounding explains in this type."""
        return TOLERANCE[self.dtype]

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimiser of this case for ``model``."""
        return torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=self.momentum, weight_decay=self.weight_decay
        )

    def shard_sizes(self, size: int) -> list[tuple[int, ...]]:
        """Return the samples of every micro-batch, rank by rank, of each step's global batch."""
        count = size * self.accumulation_steps
        if not self.uneven:
            return [(3,) * count] * STEPS
        # The first one is never empty: it holds the sample that uses the layer ``sometimes``.
        return [
            tuple(
                max(int(part == 0), SAMPLES[(part + step) % len(SAMPLES)]) for part in range(count)
            )
            for step in range(STEPS)
        ]

    def global_batches(self, size: int) -> list[list[MicroBatch]]:
        """Return for each step the micro-batches of all ranks, rank 0's first: images (n, 3, 8, 8), labels (n,).

        The first sample of each step, which rank 0 has, is the one that uses the layer ``sometimes``.
        """
        generator, batches = torch.Generator().manual_seed(7), []
        for shares in self.shard_sizes(size):
            images = torch.randn(sum(shares), 3, 8, 8, generator=generator, dtype=torch.float64)
            images[0, 0, 0, 0] = 9.0
            labels = torch.randint(0, 4, (sum(shares),), generator=generator)
            batches.append(
                list(zip(images.to(self.dtype).split(shares), labels.split(shares), strict=True))
            )
        return batches


class ProofModel(nn.Module):
    """A small network without BatchNorm that has what strategies stumble over; (batch, 3, 8, 8) to (batch, 4)."""

    def __init__(self, case: Case | None = None) -> None:
        super().__init__()
        case = case or Case()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.frozen = nn.Conv2d(6, 6, 1).requires_grad_(not case.frozen)
        self.square, self.tied = nn.Linear(6, 6), nn.Linear(6, 6)
        if case.tied:
            self.tied.weight = self.square.weight
        self.unused = nn.Linear(3, 3) if case.unused else None
        self.sometimes = nn.Linear(6, 4) if case.unused else None
        self.head = nn.Linear(6, 4)
        self.to(case.dtype)
        if case.channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        hidden = torch.tanh(self.frozen(torch.tanh(self.conv(images)))).mean(dim=(2, 3))
        hidden = self.tied(torch.tanh(self.square(hidden)))
        outputs = self.head(hidden)
        marked = images[:, 0, 0, 0] > 5
        if self.sometimes is not None and bool(marked.any()):
            outputs = outputs + self.sometimes(hidden) * marked[:, None]
        return outputs


@dataclass(frozen=True)
class StepDifference:
    """Where the weights differ most from one process's after a step.

    Parameters
    ----------
    step : from 1.
    error : norm of the difference over the norm of the parameter; infinite where it is not a number.
    rank, parameter : where it stands.
    equal_bits : whether all ranks hold the same weights, bit for bit.
    """

    step: int
    error: float
    rank: int
    parameter: str
    equal_bits: bool


@dataclass(frozen=True)
class Equivalence:
    """The result for one group: a ``StepDifference`` a step."""

    size: int
    case: Case
    steps: tuple[StepDifference, ...]

    @property
    def greatest(self) -> StepDifference:
        """The step in which the weights differ most."""
        return max(self.steps, key=lambda step: step.error)

    @property
    def first_wrong(self) -> StepDifference | None:
        """The first step that rounding does not explain, or after which the ranks' weights differ in a bit."""
        return next(
            (
                step
                for step in self.steps
                if step.error > self.case.tolerance or not step.equal_bits
            ),
            None,
        )

    def __bool__(self) -> bool:
        """Whether no step is wrong, so that ``all(check_equivalence(...))`` says what it seems to say."""
        return self.first_wrong is None

    def __str__(self) -> str:
        wrong = self.first_wrong
        if wrong is None:
            return f"{self.size} ranks: equal to one process within {self.greatest.error:.1e}"
        said = []
        if wrong.error > self.case.tolerance:
            said.append(
                f"{wrong.parameter} on rank {wrong.rank} differs from one process by {wrong.error:.1e} "
                f"(allowed: {self.case.tolerance:.0e})"
            )
        if not wrong.equal_bits:
            said.append("the ranks hold different weights")
        return f"{self.size} ranks, step {wrong.step}: {'; '.join(said)}"


@dataclass
class RankErrors:
    """What one rank found: for every step each parameter's error by name, and a digest of its weights."""

    by_parameter: list[dict[str, float]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


class FunctionSync(GradientSync):
    """A strategy made of a function that leaves the mean of all ranks' gradients in every ``p.grad``."""

    def __init__(self, function: Synchronise) -> None:
        super().__init__()
        self._function = function

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        self._function(model)


def proof_sync(name: str) -> GradientSync:
    """Return the project's strategy of that name with the options that ``ProofModel`` needs."""
    return build_sync(name, **OPTIONS.get(name, {}))


def check_equivalence(
    strategy: GradientSync | Synchronise | str,
    *,
    sizes: Sequence[int] = (2, 3),
    case: Case | None = None,
    timeout_seconds: float = 120,
) -> list[Equivalence]:
    """Train on groups of these sizes, on this machine, and compare each step with one process on the whole batch.

    Parameters
    ----------
    strategy : a ``GradientSync`` that is not prepared yet; or a strategy's name; or a function ``f(model)`` that is called
        after the last backward pass of a step. Such a function sees only the gradients of its own rank: unless it copes
        with parameters that have a gradient on some ranks only, give it ``Case(unused=False)``.
    sizes : numbers of ranks. A literal 2 in place of the world size shows on 3 ranks only.

    Returns one ``Equivalence`` a size, which is true where every step passes. Raises UserError for a strategy or a size that
    cannot be, RankError where a rank fails or gives no answer within ``timeout_seconds``.

    >>> all(check_equivalence("all_reduce", sizes=[2]))
    True
    """
    if not sizes:
        raise UserError("sizes: got none, give numbers of ranks such as (2, 3)")
    return [
        check_group({"": (strategy, case or Case())}, size, timeout_seconds=timeout_seconds)[""]
        for size in sizes
    ]


def check_group(
    jobs: Mapping[str, tuple[GradientSync | Synchronise | str, Case]],
    size: int,
    *,
    timeout_seconds: float = 120,
) -> dict[str, Equivalence]:
    """Compare several strategies and cases, by name, in one group of ``size`` ranks: the start is paid once."""
    if size < 1:
        raise UserError(f"sizes: got {size}, give numbers of ranks from 1")
    ready = {name: (_as_strategy(strategy), case) for name, (strategy, case) in jobs.items()}
    by_rank = run_ranks(size, _all_on_this_rank, size, ready, timeout_seconds=timeout_seconds)
    return {
        name: _combine(size, case, [found[name] for found in by_rank])
        for name, (_, case) in jobs.items()
    }


def _as_strategy(strategy: GradientSync | Synchronise | str) -> GradientSync:
    if isinstance(strategy, str):
        return proof_sync(strategy)
    if isinstance(strategy, GradientSync):
        return strategy
    if isinstance(strategy, type) or not callable(strategy):
        name = getattr(strategy, "__name__", repr(strategy))
        raise UserError(
            f"strategy: got {name}, give a strategy's name, an instance such as {name}(), or a function f(model)"
        )
    return FunctionSync(strategy)


def _all_on_this_rank(
    rank: int, size: int, jobs: Mapping[str, tuple[GradientSync, Case]]
) -> dict[str, RankErrors]:
    return {
        name: errors_on_this_rank(rank, size, strategy, case)
        for name, (strategy, case) in jobs.items()
    }


def errors_on_this_rank(rank: int, size: int, strategy: GradientSync, case: Case) -> RankErrors:
    """Train on this rank of the open group; return the errors after each step. Collective.

    The ranks begin with different weights, so that a strategy must hand out rank 0's first. The reference is
    a plain loop in this process, not the engine.
    """
    batches, references = case.global_batches(size), _train_in_one_process(size, case)
    torch.manual_seed(100 + rank)
    model, found = ProofModel(case), RankErrors()
    engine = TrainingEngine(
        model,
        "cpu",
        distributed=True,
        sync=strategy,
        accumulation_steps=case.accumulation_steps,
        clip_norm=case.clip_norm,
    )
    engine.prepare(case.sgd(model), nn.CrossEntropyLoss())

    def compare(_records: list) -> None:
        strategy.sync_replicas(model)
        found.by_parameter.append(parameter_errors(model, references[len(found.digests)]))
        found.digests.append(digest(model.state_dict()))

    own = slice(rank * case.accumulation_steps, (rank + 1) * case.accumulation_steps)
    engine.train_epoch(
        [part for parts in batches for part in parts[own]], epoch=1, log_every=1, on_steps=compare
    )
    engine.close()
    return found


@functools.cache
def _train_in_one_process(size: int, case: Case) -> list[nn.Module]:
    """Return a copy of the model after each step on the whole batch; the weights at the start are rank 0's.

    Computed once for all strategies that this process compares.
    """
    torch.manual_seed(100)
    model, copies = ProofModel(case), []
    optimizer = case.sgd(model)
    for parts in case.global_batches(size):
        images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
        copies.append(copy.deepcopy(model))
    return copies


@torch.no_grad()
def parameter_errors(
    model: nn.Module, reference: nn.Module, *, floor: float = 1e-12
) -> dict[str, float]:
    """Return for each parameter the norm of its difference from ``reference``'s over the latter's norm.

    A norm below ``floor`` counts as ``floor``: the bias of a convolution before BatchNorm has a true gradient of zero
    and consists of rounding errors.
    """
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    return {name: float((p - q).norm() / q.norm().clamp_min(floor)) for (name, p), q in pairs}


def _combine(size: int, case: Case, by_rank: Sequence[RankErrors]) -> Equivalence:
    steps = []
    for index in range(STEPS):
        errors = [
            (error if math.isfinite(error) else math.inf, rank, name)
            for rank, found in enumerate(by_rank)
            for name, error in found.by_parameter[index].items()
        ]
        error, rank, name = max(errors, key=lambda one: one[0])
        steps.append(
            StepDifference(
                index + 1, error, rank, name, len({found.digests[index] for found in by_rank}) == 1
            )
        )
    return Equivalence(size, case, tuple(steps))
