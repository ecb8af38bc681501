"""Every exact strategy equals one process on the whole batch, after every step; and this test can fail.

The reference is a plain loop, not the engine. Ranks start from different weights; one parameter is frozen, one tied, one
never used, one used on rank 0 only; shards are uneven, and in some steps a rank has no sample. What the others keep is in
test_sync_lossy.py.
"""

import copy
import functools
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import registry
from common.checkpoint import digest
from common.errors import UserError
from common.sync import STRATEGIES, build_sync
from common.sync.base import GradientSync
from common.sync.flat import FlatBuffers
from common.sync.halving_doubling import halving_doubling_all_reduce
from common.sync.overlapped import Overlapped
from common.sync.ring import ring_all_reduce
from common.sync.tree import tree_all_reduce
from common.training_engine import TrainingEngine
from tests.helpers import RankError, run_ranks

DISTRIBUTED = [name for name in STRATEGIES if name != "none"]
EXACT = [name for name in DISTRIBUTED if registry.load(STRATEGIES, name, kind="strategy").exact]
OPTIONS = {"ddp": {"find_unused_parameters": True}, "overlapped": {"bucket_mb": 0.0002}}  # several buckets of that small model
SHARES = {1: [(7,), (4,), (5,), (6,)], 2: [(5, 2), (1, 6), (3, 3), (4, 1)], 3: [(4, 3, 0), (2, 4, 1), (3, 3, 0), (1, 2, 4)],
          4: [(1, 3, 0, 2), (2, 1, 1, 1)], 5: [(3, 1, 0, 2, 1), (1, 1, 2, 1, 3)], 6: [(2, 1, 1, 0, 1, 3), (1, 2, 1, 1, 2, 1)]}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


class Awkward(nn.Module):
    """BatchNorm-free; takes (batch, 3, 8, 8) and returns (batch, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.frozen = nn.Conv2d(6, 6, 1)
        self.frozen.requires_grad_(False)
        self.square, self.tied = nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied.weight = self.square.weight
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Linear(6, 4)
        self.head = nn.Linear(6, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.conv(images)))).mean(dim=(2, 3))
        hidden = self.tied(torch.tanh(self.square(hidden)))
        outputs = self.head(hidden)
        marked = images[:, 0, 0, 0] > 5
        if bool(marked.any()):
            outputs = outputs + self.sometimes(hidden) * marked[:, None]
        return outputs


def awkward_batches(size: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, tuple[int, ...]]]:
    """Global batches with their split; the first sample, on rank 0, is the marked one."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for shares in SHARES[size]:
        images = torch.randn(sum(shares), 3, 8, 8, generator=generator, dtype=torch.float64)
        images[0, 0, 0, 0] = 9.0
        batches.append((images.to(dtype), torch.randint(0, 4, (sum(shares),), generator=generator), shares))
    return batches


def mine(batch: tuple[Tensor, Tensor, tuple[int, ...]], rank: int) -> tuple[Tensor, Tensor]:
    """This rank's share of a global batch."""
    images, labels, shares = batch
    begin = sum(shares[:rank])
    return images[begin:begin + shares[rank]], labels[begin:begin + shares[rank]]


def largest_error(model: nn.Module, reference: nn.Module, *, floor: float = 1e-12) -> float:
    """The largest difference over all parameters, by tensor norm, relative to the norm (or to ``floor``: a convolution's
    bias before BatchNorm has a true gradient of zero and stays at rounding errors)."""
    with torch.no_grad():
        return max(float((p - q).norm() / q.norm().clamp_min(floor))
                   for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def awkward_errors(rank: int, size: int, sync: GradientSync, dtype: torch.dtype,
                   settings: Mapping[str, float] = SGD) -> tuple[list[float], list[str]]:
    """Train through the engine, with SGD of these ``settings``; return, after each step, the error against one process and a
    digest of the weights."""
    torch.manual_seed(100)
    reference = Awkward().to(dtype)
    torch.manual_seed(100 + rank)
    model = Awkward().to(dtype)
    if dtype == torch.float32:
        model = model.to(memory_format=torch.channels_last)
    batches = awkward_batches(size, dtype)

    reference_optimizer = torch.optim.SGD(reference.parameters(), **settings)
    references = []
    for images, labels, _ in batches:
        reference_optimizer.zero_grad()
        nn.functional.cross_entropy(reference(images), labels).backward()
        reference_optimizer.step()
        references.append(copy.deepcopy(reference))

    engine = TrainingEngine(model, "cpu", distributed=True, sync=sync)
    engine.prepare(torch.optim.SGD(model.parameters(), **settings), nn.CrossEntropyLoss())
    errors, digests = [], []

    def compare(_records: list) -> None:
        errors.append(largest_error(model, references[len(errors)]))
        digests.append(digest(model.state_dict()))

    engine.train_epoch([mine(batch, rank) for batch in batches], epoch=1, log_every=1, on_steps=compare)
    engine.close()
    assert model.unused.weight.grad is None, "a parameter that no rank uses must stay without gradient"
    return errors, digests


def every_strategy_on_awkward(rank: int, size: int) -> dict:
    """Each strategy and type in turn in one group."""
    return {(name, dtype): awkward_errors(rank, size, build_sync(name, **OPTIONS.get(name, {})), dtype)
            for name in EXACT for dtype in TOLERANCE}


@functools.cache
def awkward_results(size: int) -> list[dict]:
    """By rank; computed once for all tests."""
    return run_ranks(size, every_strategy_on_awkward, size)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("size", SHARES)
def test_equals_one_process_after_every_step(size: int, name: str, dtype: torch.dtype) -> None:
    results = [one[name, dtype] for one in awkward_results(size)]
    errors = [error for errors, _ in results for error in errors]
    assert len(errors) == size * len(SHARES[size])
    assert max(errors) <= TOLERANCE[dtype], errors
    assert all(digests == results[0][1] for _, digests in results), "the ranks' weights differ in some bit"


def test_none_equals_one_process() -> None:
    errors, _ = awkward_errors(0, 1, build_sync("none"), torch.float64)
    assert max(errors) <= TOLERANCE[torch.float64]


# --- Wrong on purpose. Each is a mistake seen in published solutions, and each must be caught. ---


class ByHand(GradientSync):
    """A right all_reduce, for the mutants to spoil."""

    def synchronize(self, model: nn.Module) -> None:
        for gradient in self.gradients():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()


class SumWithoutDividing(GradientSync):
    def synchronize(self, model: nn.Module) -> None:
        for gradient in self.gradients():
            dist.all_reduce(gradient)


class SkippedParameter(GradientSync):
    def synchronize(self, model: nn.Module) -> None:
        for gradient in self.gradients()[1:]:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()


class WeightsInsteadOfGradients(GradientSync):
    def after_step(self, model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter)
                parameter /= dist.get_world_size()


class LiteralWorldSize(GradientSync):
    def synchronize(self, model: nn.Module) -> None:
        for gradient in self.gradients():
            dist.all_reduce(gradient)
            gradient /= 4


class NoInitialBroadcast(ByHand):
    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return model


class EachRankAlone(GradientSync):
    """No exchange at all: equal weights at the start, and each rank its own way from then on."""


class UnweightedEngine(ByHand):
    """The plain mean of the shards' means, as if all shards were equal: undoes the engine's weighting."""

    def synchronize(self, model: nn.Module) -> None:
        super().synchronize(model)
        shares = SHARES[dist.get_world_size()]
        self.step = getattr(self, "step", -1) + 1
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= sum(shares[self.step]) / (max(shares[self.step]) * dist.get_world_size())


class RingThatForgetsAChunk(GradientSync):
    """One round too few in the second half: one chunk is not the sum yet, another on each rank."""

    def synchronize(self, model: nn.Module) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for buffer in FlatBuffers().of(self.exchanged()):
            total = buffer.collect(divisor=size)
            before = total.clone()
            ring_all_reduce(total)
            begin, end = total.numel() * rank // size, total.numel() * (rank + 1) // size
            total[begin:end] = before[begin:end]


class HalvingDoublingForPowersOfTwo(GradientSync):
    """The ranks beyond the largest power of two get the mean, but nobody adds theirs."""

    def synchronize(self, model: nn.Module) -> None:
        for buffer in FlatBuffers().of(self.exchanged()):
            total = buffer.collect(divisor=dist.get_world_size())
            if dist.get_rank() >= 2:
                total.zero_()
            halving_doubling_all_reduce(total)


class FlatBufferNobodyReads(GradientSync):
    """Exchanges a buffer, but ``p.grad`` is still this rank's own."""

    def synchronize(self, model: nn.Module) -> None:
        parameters = self.exchanged()
        own = [None if p.grad is None else p.grad.clone() for p in parameters]
        for buffer in FlatBuffers().of(parameters):
            dist.all_reduce(buffer.collect(divisor=dist.get_world_size()))
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient


class LastBucketNeverSent(Overlapped):
    def _send(self, may_go: Callable) -> None:
        super()._send(lambda bucket: bucket is not self._buckets[-1] and may_go(bucket))

    def synchronize(self, model: nn.Module) -> None:
        try:
            super().synchronize(model)
        except ValueError:  # fewer messages than buckets
            self._works = []
            for bucket in self._buckets:
                bucket.close()
                bucket.open()


class OneChildOfTheTree(GradientSync):
    """Each parent adds its first child alone."""

    def synchronize(self, model: nn.Module) -> None:
        size = dist.get_world_size()
        for buffer in FlatBuffers().of(self.exchanged()):
            total = buffer.collect(divisor=size)
            if dist.get_rank() == 2:
                total.zero_()
            tree_all_reduce(total)


MUTANTS = [SumWithoutDividing, SkippedParameter, WeightsInsteadOfGradients, LiteralWorldSize, NoInitialBroadcast,
           EachRankAlone, UnweightedEngine, RingThatForgetsAChunk, HalvingDoublingForPowersOfTwo, FlatBufferNobodyReads,
           LastBucketNeverSent, OneChildOfTheTree]


def every_mutant(rank: int, size: int) -> dict:
    return {kind.__name__: awkward_errors(rank, size, kind(), torch.float64) for kind in [ByHand, *MUTANTS]}


def test_mutation_check() -> None:
    """The test above passes a right strategy of a user's own, and catches each wrong one."""
    results = run_ranks(3, every_mutant, 3)

    def passes(name: str) -> bool:
        errors = [error for one in results for error in one[name][0]]
        return max(errors) <= TOLERANCE[torch.float64] and all(one[name][1] == results[0][name][1] for one in results)

    assert passes("ByHand")
    survivors = [kind.__name__ for kind in MUTANTS if passes(kind.__name__)]
    assert not survivors, f"wrong strategies that the equivalence test lets pass: {survivors}"


# --- The edges of the contract ---


class Switching(nn.Module):
    """Uses ``extra`` in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.extra, self.use_extra = nn.Linear(4, 2), nn.Linear(4, 2), False

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + (self.extra(inputs) if self.use_extra else 0)


def switches_in_second_step(rank: int, name: str) -> None:
    model = Switching()
    engine = TrainingEngine(model, "cpu", distributed=True, sync=name)
    engine.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    inputs, labels = torch.randn(4, 4), torch.tensor([0, 1, 0, 1])
    engine.train_step([(inputs, labels)], global_samples=8)
    model.use_extra = True
    engine.train_step([(inputs, labels)], global_samples=8)


@pytest.mark.parametrize("name", ["gather_scatter", "all_reduce", "all_reduce_flat", "overlapped"])
def test_other_gradients_than_in_the_first_step_are_an_error_that_names_the_parameter(name: str) -> None:
    with pytest.raises(RankError, match=r"'extra\.weight' has a gradient in this step, unlike in the first one"):
        run_ranks(2, switches_in_second_step, name)


def different_models(rank: int) -> None:
    model = nn.Linear(4, 2 + rank)
    TrainingEngine(model, "cpu", distributed=True, sync="all_reduce").prepare(torch.optim.SGD(model.parameters(), lr=0.1),
                                                            nn.CrossEntropyLoss())


def test_different_models_are_refused_before_the_first_step() -> None:
    with pytest.raises(RankError, match=r"the ranks differ in the model's parameters\. weight: \(2, 4\).* on rank 0"):
        run_ranks(2, different_models)


def test_a_criterion_that_is_no_mean_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="reduction='sum'"):
        TrainingEngine(model, "cpu").prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(reduction="sum"))
