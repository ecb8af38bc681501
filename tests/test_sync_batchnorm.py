"""BatchNorm beside every strategy: each rank's own statistics in training, one set for all before evaluation."""

import copy

import pytest
import torch
from torch import nn

from common.checkpoint import digest
from common.models import build_model
from common.training_engine import TrainingEngine
from tests.helpers import run_ranks
from tests.test_sync import DISTRIBUTED, EXACT, SGD, largest_error, mine


def vgg_ways(size: int) -> list[str]:
    """All strategies on two ranks; on three the assignment's, since a step of VGG-11 takes its time."""
    return EXACT if size == 2 else ["gather_scatter", "all_reduce", "ddp"]


def vgg_errors(rank: int, size: int) -> dict:
    """VGG-11 in float64 against one process that computes the shards in turn, each with a BatchNorm of its own."""
    shares = {2: [(3, 2), (2, 4)], 3: [(3, 2, 2), (2, 4, 3)]}[size]
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(sum(split), 3, 32, 32, generator=generator, dtype=torch.float64),
                torch.randint(0, 10, (sum(split),), generator=generator), split) for split in shares]
    torch.manual_seed(100)
    first = build_model("vgg11", 10).double()
    start = copy.deepcopy(first)
    shards = [copy.deepcopy(first) for _ in range(size)]  # equal weights, running statistics of their own
    optimizers = [torch.optim.SGD(shard.parameters(), **SGD) for shard in shards]
    for batch in batches:
        for index, (shard, optimizer) in enumerate(zip(shards, optimizers, strict=True)):
            images, labels = mine(batch, index)
            optimizer.zero_grad()
            (nn.functional.cross_entropy(shard(images), labels) * len(labels) / len(batch[1])).backward()
        for parameters in zip(*(shard.parameters() for shard in shards), strict=True):
            total = sum(p.grad for p in parameters)
            for parameter in parameters:
                parameter.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()
    seen = [sum(split[index] for split in shares) for index in range(size)]
    expected = {name: sum(shard.state_dict()[name] * n for shard, n in zip(shards, seen, strict=True)) / sum(seen)
                for name in first.state_dict() if "running" in name}

    results = {}
    for name in vgg_ways(size):
        model = copy.deepcopy(start)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + rank  # so that they begin with other weights than rank 0's
        engine = TrainingEngine(model, "cpu", distributed=True, sync=name)
        engine.prepare(torch.optim.SGD(model.parameters(), **SGD), nn.CrossEntropyLoss())
        engine.train_epoch([mine(batch, rank) for batch in batches], epoch=1)
        own = model.state_dict()["features.1.running_mean"].clone()
        engine.agree_on_buffers()
        engine.close()
        state = model.state_dict()
        results[name] = {
            "weights": largest_error(model, shards[0], floor=1e-3),
            "statistics": max(float((state[key] - value).norm() / value.norm()) for key, value in expected.items()),
            "before": own.numpy(), "digest": digest(state)}
    return results


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.slow
def test_vgg11_with_batchnorm_equals_the_shards_in_turn(size: int) -> None:
    results = run_ranks(size, vgg_errors, size)
    for name in vgg_ways(size):
        assert max(one[name]["weights"] for one in results) <= 1e-9, name
        assert max(one[name]["statistics"] for one in results) <= 1e-9, f"{name}: running statistics"
        assert len({one[name]["digest"] for one in results}) == 1, f"{name}: weights or buffers differ between ranks"
        assert len({one[name]["before"].tobytes() for one in results}) == size, "each rank has statistics of its own before"


def empty_rank_with_batchnorm(rank: int, name: str) -> tuple[bool, str]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    engine = TrainingEngine(model, "cpu", distributed=True, sync=name)
    engine.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    count = 4 if rank == 0 else 0
    engine.train_epoch([(torch.randn(count, 3, 8, 8), torch.zeros(count, dtype=torch.int64))] * 2, epoch=1)
    engine.agree_on_buffers()
    engine.close()
    return all(bool(t.isfinite().all()) for t in model.state_dict().values()), digest(model.state_dict())


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_a_rank_without_samples_leaves_batchnorm_whole(name: str) -> None:
    results = run_ranks(2, empty_rank_with_batchnorm, name)
    assert all(finite for finite, _ in results)
    assert results[0][1] == results[1][1]
