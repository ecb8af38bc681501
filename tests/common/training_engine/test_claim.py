"""What the engine sees of its strategy's claim: weights and residue of the first step."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from common.sync import STRATEGIES, build_sync
from common.training_engine import TrainingEngine
from common.utils.gradient_fit import EXACT, ROUNDED, as_matrix, is_mean
from lab.proofs.ranks import run_ranks
from tests.helpers import wrong_strategies

LOSSY = ("topk", "local_sgd", "ddp_fp16", "ddp_powersgd")
EXACT_ONES = [name for name in STRATEGIES if name not in ("none", "fsdp", *LOSSY)]
SAMPLES = 5  # on rank 0; one fewer on each rank after it


def model_of(seed=0):
    """Return a small network with BatchNorm, so that a bias has a true gradient of zero."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(288, 10),
    )


def batches(rank, samples):
    """Return a loader of two micro-batches a step, for two steps."""
    if not samples:
        return [(torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.long))] * 4
    numbers = torch.Generator().manual_seed(rank + 1)
    images = torch.randn(4 * samples, 3, 8, 8, generator=numbers)
    labels = torch.randint(0, 10, (4 * samples,), generator=numbers)
    return DataLoader(TensorDataset(images, labels), batch_size=samples)


class Half(nn.Module):
    """A network of 16-bit parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(192, 10, dtype=torch.bfloat16)

    def forward(self, images):
        return self.head(images.flatten(1).bfloat16())


class UnusedOnRank0(nn.Module):
    """A network of which rank 0 does not use the bias, and no rank the last layer."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(192, 10, bias=False)
        self.bias = nn.Parameter(torch.zeros(10))
        self.last = nn.Linear(3, 3)
        self._rank = rank

    def forward(self, images):
        outputs = self.head(images.flatten(1))
        return outputs if self._rank == 0 else outputs + self.bias


def train(rank, sync, *, model=None, samples=SAMPLES, claim=True, done=0, **options):
    """Train two steps after ``done`` earlier ones; return what the engine saw, and weights."""
    model = model or model_of().to(memory_format=torch.channels_last)
    engine = TrainingEngine(
        model, "cpu", distributed=True, sync=sync, sync_batchnorm=False, **options
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine.prepare(optimizer, nn.CrossEntropyLoss())
    if not claim:
        engine.claim.close()
        engine.claim = None
    engine.step = done
    torch.manual_seed(7)
    engine.train_epoch(batches(rank, samples), epoch=1)
    engine.agree_on_buffers()
    seen = engine.claim.result() if claim else None
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    engine.close()
    return seen, weights, torch.get_rng_state()


def on_rank(rank, size):
    found = {}
    for name in EXACT_ONES:
        found[name] = train(rank, build_sync(name), samples=SAMPLES - rank)[0]
    found["accumulated"] = train(
        rank, build_sync("ddp"), samples=SAMPLES - rank, accumulation_steps=2
    )[0]
    found["autocast"] = train(rank, build_sync("ddp"), use_amp=True, amp_dtype=torch.bfloat16)[0]
    found["16 bits"] = train(rank, build_sync("ring"), model=Half())[0]
    found["16 bits, sum"] = train(rank, wrong_strategies.Sum(), model=Half())[0]
    found["unused"] = train(rank, build_sync("all_reduce"), model=UnusedOnRank0(rank))[0]
    last = rank == size - 1
    found["without samples"] = train(rank, build_sync("ring"), samples=0 if last else SAMPLES)[0]
    found["resumed"] = train(rank, build_sync("ring"), done=6)[0]
    for name in ("fsdp", *LOSSY):
        found[name] = train(rank, build_sync(name))[0]
    for name in ("Sum", "LiteralDivisor", "OwnGradient", "AveragedTwice", "FirstParameterLeftOut"):
        found[name] = train(rank, getattr(wrong_strategies, name)())[0]
    return found


@pytest.fixture(scope="module", params=[2, 3])
def seen(request):
    size = request.param
    return size, run_ranks(size, on_rank, size, timeout_seconds=200)[0]


def test_what_every_exact_strategy_gives_is_the_mean(seen):
    size, found = seen
    for name in (*EXACT_ONES, "accumulated"):
        claim = found[name]
        assert claim.why_not == "", (name, claim)
        assert claim.step == 1
        assert claim.residue <= EXACT, (name, claim)
        assert np.allclose(claim.weights, 1 / size, atol=1e-4), (name, claim)


@pytest.mark.parametrize("kind", ["autocast", "unused", "without samples", "resumed"])
def test_the_mean_is_seen_whatever_a_rank_computes(seen, kind):
    size, found = seen
    claim = found[kind]
    assert claim.step == (7 if kind == "resumed" else 1)
    assert not claim.rounded
    assert is_mean(as_matrix(claim.weights), claim.residue), claim
    assert np.allclose(claim.weights, 1 / size, atol=1e-4)


def test_gradients_of_16_bits_are_the_mean_up_to_their_rounding(seen):
    _, found = seen
    claim = found["16 bits"]
    assert claim.rounded
    assert EXACT < claim.residue <= ROUNDED
    assert is_mean(as_matrix(claim.weights), claim.residue, rounded=True)
    assert not is_mean(as_matrix(claim.weights), claim.residue)
    assert np.allclose(found["16 bits, sum"].weights, 1, atol=1e-2)


def test_a_wrong_average_is_seen_as_what_it_is(seen):
    size, found = seen
    assert np.allclose(found["Sum"].weights, 1, atol=1e-4)
    assert np.allclose(found["LiteralDivisor"].weights, 1 / 2, atol=1e-4)
    assert np.allclose(found["OwnGradient"].weights, np.eye(size), atol=1e-4)
    assert np.allclose(found["AveragedTwice"].weights, 1 / size**2, atol=1e-4)
    assert found["FirstParameterLeftOut"].residue > EXACT


def test_what_is_not_claimed_is_not_called_the_mean(seen):
    _, found = seen
    for name in ("fsdp", *LOSSY):
        assert found[name].weights is None
        assert found[name].why_not


def both_ways(rank):
    found = [train(rank, build_sync("all_reduce"), claim=claim) for claim in (True, False)]
    (_, first, state), (_, second, other_state) = found
    same = {name: torch.equal(value, second[name]) for name, value in first.items()}
    return same, torch.equal(state, other_state)


def test_a_training_that_is_watched_is_the_same_bit_for_bit():
    for same, random_state in run_ranks(2, both_ways):
        assert random_state
        assert all(same.values()), same


def same_samples(rank):
    return train(0, build_sync("all_reduce"))[0], train(0, wrong_strategies.OwnGradient())[0]


def test_equal_gradients_prove_nothing():
    for claim in run_ranks(2, same_samples)[0]:
        assert claim.weights is None
        assert "same gradient" in claim.why_not
