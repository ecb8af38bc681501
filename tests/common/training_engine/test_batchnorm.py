"""BatchNorm with every strategy: statistics per rank in training, the same in evaluation."""

import copy

import pytest
import torch
from torch import nn

from common.models import build_model
from common.training_engine.batchnorm import without_samples
from common.utils.hashing import digest
from lab.proofs.equivalence import parameter_errors
from tests.helpers import run_ranks
from tests.helpers.engines import prepared
from tests.helpers.strategies import EXACT, SGD

SHARES = {2: [(3, 2), (2, 4), (3, 0)], 3: [(3, 2, 2), (2, 4, 3)]}  # once a rank has no samples


def small(classes):
    """Return a model with two BatchNorm layers; VGG-11 has eight."""
    first = nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.Tanh()
    second = nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Tanh()
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(392, classes))


def vgg11(classes):
    return build_model("vgg11", classes)


def errors_in_turn(rank, size, build, ways):
    """Compare float64 training, by strategy, with one process that computes the shards in turn."""
    generator = torch.Generator().manual_seed(3)
    batches = []  # of each step the shards, rank 0's first
    for split in SHARES[size]:
        images = torch.randn(sum(split), 3, 32, 32, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 10, (sum(split),), generator=generator)
        batches.append(list(zip(images.split(split), labels.split(split), strict=True)))
    torch.manual_seed(100)
    start = build(10).double()
    # equal weights, separate running statistics
    shards = [copy.deepcopy(start) for _ in range(size)]
    optimizers = [torch.optim.SGD(shard.parameters(), **SGD) for shard in shards]
    for batch in batches:
        samples = sum(len(labels) for _, labels in batch)
        for shard, optimizer, (images, labels) in zip(shards, optimizers, batch, strict=True):
            optimizer.zero_grad()
            if len(labels):
                loss = nn.functional.cross_entropy(shard(images), labels)
                (loss * len(labels) / samples).backward()
        for parameters in zip(*(shard.parameters() for shard in shards), strict=True):
            total = sum(p.grad for p in parameters if p.grad is not None)
            for parameter in parameters:
                parameter.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()
    seen = [sum(split[index] for split in SHARES[size]) for index in range(size)]
    expected = {
        name: sum(shard.state_dict()[name] * n for shard, n in zip(shards, seen, strict=True))
        / sum(seen)
        for name in start.state_dict()
        if "running" in name
    }

    results = {}
    for name in ways:
        model = copy.deepcopy(start)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + rank  # initial weights differ from rank 0's
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        engine = prepared(model, name, optimizer=optimizer, sync_batchnorm=False)
        engine.train_epoch([batch[rank] for batch in batches], epoch=1)
        own = model.state_dict()[next(iter(expected))].clone()
        engine.agree_on_buffers()
        engine.close()
        state = model.state_dict()
        errors = parameter_errors(model, shards[0], floor=1e-3)
        assert max(errors[weight] for weight, _ in model.named_parameters()) <= 1e-9, name
        off = max(
            float((state[key] - value).norm() / value.norm()) for key, value in expected.items()
        )
        assert off <= 1e-9, (
            f"{name}: running statistics differ from those of the shards in turn by {off:.1e}"
        )
        results[name] = digest(own), digest(state)
    return results


def assert_equal_to_shards_in_turn(size, build, ways):
    results = run_ranks(size, errors_in_turn, size, build, ways)
    for name in ways:
        before, after = (len({one[name][index] for one in results}) for index in (0, 1))
        assert before == size, "each rank has statistics of its own before"
        assert after == 1, f"{name}: weights or buffers differ between ranks"


def test_running_statistics_are_the_mean_over_all_samples():
    """With every exact strategy, weights and statistics equal those of the shards in turn."""
    for size in (2, 3):
        assert_equal_to_shards_in_turn(size, small, EXACT)


@pytest.mark.slow
def test_vgg11_with_batchnorm_equals_the_shards_in_turn():
    """The assignment's strategies on three ranks; slow, since VGG-11 runs in float64."""
    assert_equal_to_shards_in_turn(3, vgg11, ["gather_scatter", "all_reduce", "ddp"])


def test_an_empty_batch_teaches_a_layer_nothing_and_the_next_one_does():
    layer = nn.BatchNorm1d(2)
    with without_samples(nn.Sequential(layer)):
        layer(torch.ones(4, 2))
    assert layer.running_mean.tolist() == [0, 0]
    layer(torch.ones(4, 2))
    assert layer.running_mean.tolist() == pytest.approx([0.1, 0.1])
