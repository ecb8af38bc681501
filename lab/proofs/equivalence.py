"""Compare gradient synchronisation, step by step, with one process on the whole batch.

``check_equivalence`` starts real ranks on this machine, and each trains its shards through the
``TrainingEngine``. For every step it returns where the weights differ most from those of one
process. ``errors_on_this_rank`` computes one rank's part in an open process group.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.sync import build_sync
from common.sync.base import GradientSync
from common.training_engine import TrainingEngine
from common.utils.hashing import digest
from lab.proofs.proof_model import STEPS, Case, ProofModel
from lab.proofs.ranks import run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {"find_unused_parameters": True},
    "ddp_zero1": {"find_unused_parameters": True},
    "overlapped": {"bucket_mb": 0.0002},
    "sharded": {"bucket_mb": 0.0002},
    "hierarchical": {"ranks_per_node": 2},
}
"""Options that the strategies need for ``ProofModel``.

DistributedDataParallel must search for unused parameters; ``overlapped`` gets buckets small enough
that there are several; ``hierarchical`` gets nodes, the last of which has fewer ranks if N is odd.
"""

Synchronise = Callable[[nn.Module], None]


@dataclass(frozen=True)
class StepDifference:
    """The largest difference from one process's weights after a step.

    Parameters
    ----------
    step : from 1.
    error : norm of the difference over the norm of the parameter; infinite if it is not a number.
    rank, parameter : where this difference is.
    equal_bits : whether all ranks hold the same weights, bit for bit.
    """

    step: int
    error: float
    rank: int
    parameter: str
    equal_bits: bool


@dataclass(frozen=True)
class Equivalence:
    """The result for one group: one ``StepDifference`` per step."""

    size: int
    case: Case
    steps: tuple[StepDifference, ...]

    @property
    def greatest(self) -> StepDifference:
        """The step in which the weights differ most."""
        return max(self.steps, key=lambda step: step.error)

    @property
    def first_wrong(self) -> StepDifference | None:
        """The first step with an error beyond rounding or ranks that differ in a bit; or None."""
        return next(
            (
                step
                for step in self.steps
                if step.error > self.case.tolerance or not step.equal_bits
            ),
            None,
        )

    def __bool__(self) -> bool:
        """Whether every step is right, so that ``all(check_equivalence(...))`` is a full check."""
        return self.first_wrong is None

    def __str__(self) -> str:
        wrong = self.first_wrong
        if wrong is None:
            return f"{self.size} ranks: equal to one process within {self.greatest.error:.1e}"
        reasons = []
        if wrong.error > self.case.tolerance:
            reasons.append(
                f"{wrong.parameter} on rank {wrong.rank} differs from one process by "
                f"{wrong.error:.1e} (allowed: {self.case.tolerance:.0e})"
            )
        if not wrong.equal_bits:
            reasons.append("the ranks hold different weights")
        if wrong.error <= self.case.tolerance:
            reasons.append(
                f"all are within {wrong.error:.1e} of one process, so perhaps the ranks add in "
                "different orders"
            )
        return f"{self.size} ranks, step {wrong.step}: {'; '.join(reasons)}"


@dataclass
class RankErrors:
    """What one rank found: per step, each parameter's error by name and a digest of its weights."""

    by_parameter: list[dict[str, float]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


class FunctionSync(GradientSync):
    """A strategy that calls a function to leave the ranks' mean gradient in every ``p.grad``."""

    def __init__(self, function: Synchronise) -> None:
        super().__init__()
        self._function = function

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        self._function(model)


def proof_sync(name: str) -> GradientSync:
    """Return the project's strategy ``name`` with the options that ``ProofModel`` needs."""
    return build_sync(name, **OPTIONS.get(name, {}))


def check_equivalence(
    strategy: GradientSync | Synchronise | str,
    *,
    sizes: Sequence[int] = (2, 3),
    case: Case | None = None,
    timeout_seconds: float = 120,
) -> list[Equivalence]:
    """Train on groups of these sizes and compare each step with one process on the whole batch.

    All ranks run on this machine.

    Parameters
    ----------
    strategy : an unprepared ``GradientSync``, a strategy's name, or a function ``f(model)``, which
        is called after the last backward pass of a step. The function sees only the gradients of
        its own rank. Unless it handles parameters that have a gradient on some ranks only, pass
        ``Case(unused=False)``.
    sizes : world sizes. A literal 2 in place of the world size is only detected on 3 ranks.

    Returns one ``Equivalence`` per size, which is true if every step passes. Raises UserError for
    an invalid strategy or size, and RankError if a rank fails or gives no answer within
    ``timeout_seconds``.

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
    """Compare several strategies and cases, by name, in one group of ``size`` ranks.

    The ranks start only once.
    """
    if size < 1:
        raise UserError(f"sizes: got {size}, give numbers of ranks from 1")
    ready = {name: (_as_strategy(strategy), case) for name, (strategy, case) in jobs.items()}
    by_rank = run_ranks(size, _all_on_this_rank, size, ready, timeout_seconds=timeout_seconds)
    return {
        name: combine(size, case, [found[name] for found in by_rank])
        for name, (_, case) in jobs.items()
    }


def _as_strategy(strategy: GradientSync | Synchronise | str) -> GradientSync:
    """Return the strategy that a name or a function stands for. UserError for anything else."""
    if isinstance(strategy, str):
        return proof_sync(strategy)
    if isinstance(strategy, GradientSync):
        return strategy
    if isinstance(strategy, type) or not callable(strategy):
        name = getattr(strategy, "__name__", repr(strategy))
        raise UserError(
            f"strategy: got {name}, give a strategy's name, an instance such as {name}(), or a "
            "function f(model)"
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

    The ranks begin with different weights, so a strategy must first distribute rank 0's. The
    reference is a plain loop in this process, not the engine.
    """
    batches = case.global_batches(size)
    references = _train_in_one_process(size, case)
    torch.manual_seed(100 + rank)
    model = ProofModel(case)
    found = RankErrors()
    engine = TrainingEngine(
        model,
        case.device,
        distributed=True,
        sync=strategy,
        accumulation_steps=case.accumulation_steps,
        clip_norm=case.clip_norm,
    )
    engine.prepare(case.sgd(model), nn.CrossEntropyLoss())

    def compare(_step: int) -> None:
        strategy.sync_replicas(model)
        found.by_parameter.append(parameter_errors(model, references[len(found.digests)]))
        found.digests.append(digest(model.state_dict()))

    # A global batch has ``accumulation_steps`` parts for each rank, in the order of the ranks.
    own = slice(rank * case.accumulation_steps, (rank + 1) * case.accumulation_steps)
    engine.train_epoch(
        [part for parts in batches for part in parts[own]], epoch=1, after_step=compare
    )
    engine.close()
    return found


@functools.cache
def _train_in_one_process(size: int, case: Case) -> list[nn.Module]:
    """Return a copy of the model after each step on the whole batch, from rank 0's weights.

    Computed once for all strategies that this process compares.
    """
    torch.manual_seed(100)
    model = ProofModel(case)
    copies: list[nn.Module] = []
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
    """Return each parameter's difference from ``reference``: its norm over the reference's norm.

    So too for the running means and variances of BatchNorm. A norm below ``floor`` counts as
    ``floor``. This matters for the bias of a convolution before BatchNorm: its true gradient is
    zero, so it consists of rounding errors.
    """
    mine = dict(_trained(model))
    return {
        name: float((mine[name] - right).norm() / right.norm().clamp_min(floor))
        for name, right in _trained(reference)
    }


def _trained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what training changes, by name: parameters, and running means and variances."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            yield name, buffer


def combine(size: int, case: Case, by_rank: Sequence[RankErrors]) -> Equivalence:
    """Return the result for a group from what ``errors_on_this_rank`` found on each rank."""
    steps = []
    for index in range(STEPS):
        errors = [
            (error if math.isfinite(error) else math.inf, rank, name)
            for rank, found in enumerate(by_rank)
            for name, error in found.by_parameter[index].items()
        ]
        error, rank, name = max(errors, key=lambda found: found[0])
        digests = {found.digests[index] for found in by_rank}
        steps.append(StepDifference(index + 1, error, rank, name, equal_bits=len(digests) == 1))
    return Equivalence(size, case, tuple(steps))
