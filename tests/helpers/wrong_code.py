"""The wrong functions that ``wrong.py`` lists, a few lines each.

The entries of ``WRONG`` say what each function gets wrong and which function of the project it
replaces. Wrong strategies are in ``wrong_strategies.py``.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common import checkpoint
from common.data import augmentation
from common.data.sharding import GlobalBatchSampler
from common.distributed.process_group import World
from common.sync.base import GradientSync, broadcast_from_rank0
from common.training_engine import TrainingEngine, batches, batchnorm

# Keep the right code here, since planting binds its names to the wrong code.
_right_average = batchnorm._average
_right_state = TrainingEngine.state
_right_digest = checkpoint.digest
_right_train_step = TrainingEngine.train_step
_right_sizes = batches.agreed_sizes


def whole_batch(samples: int, rank: int, world_size: int) -> slice:
    return slice(0, samples)


def overlapping(samples: int, rank: int, world_size: int) -> slice:
    return slice(samples * rank // world_size, min(samples, samples * (rank + 1) // world_size + 1))


def rest_dropped(samples: int, rank: int, world_size: int) -> slice:
    return slice(rank * (samples // world_size), (rank + 1) * (samples // world_size))


def one_order(samples: int, *, seed: int, epoch: int) -> Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed))


def unseeded_order(samples: int, *, seed: int, epoch: int) -> Tensor:
    return torch.randperm(samples)


def unseeded_draw(
    samples: int, *, seed: int, epoch: int, flip: str, device: Any = "cpu"
) -> augmentation.Draws:
    return augmentation.draw(
        samples, seed=int(torch.randint(2**31, ())), epoch=epoch, flip=flip, device=device
    )


def as_if_shards_were_equal(world: Any, loader: Any, accumulation_steps: int) -> list[int]:
    alone = _right_sizes(World(device=world.device), loader, accumulation_steps)
    return [max(1, count) * world.size for count in alone]


def every_batch_full(sampler: GlobalBatchSampler) -> list[int]:
    return [sampler._bounds[1]] * (len(sampler._bounds) - 1)


def rank0s_statistics(model: nn.Module, shards: Any, size: int) -> None:
    broadcast_from_rank0(list(model.buffers()))


def unweighted_statistics(
    model: nn.Module, shards: Sequence[tuple[int, Tensor]], size: int
) -> None:
    _right_average(model, [(1, statistics) for _, statistics in shards], size)


def state_without_momentum(engine: TrainingEngine, **progress: Any) -> dict[str, Any]:
    entries = _right_state(engine, **progress)
    return entries | {"optimizer_state_dict": entries["optimizer_state_dict"] | {"state": {}}}


def epochs_counted_from_the_start(sampler: GlobalBatchSampler, epoch: int) -> None:
    attributes = vars(sampler)
    attributes["calls"] = attributes.get("calls", 0) + 1
    sampler.epoch = attributes["calls"]


def clip_before_averaging(engine: TrainingEngine, micro_batches: Any, **more: Any) -> Any:
    average = engine.sync.synchronize

    def clip_first(model: nn.Module) -> None:
        if engine._clip_norm is not None and not engine.sync.weights_under_way:
            nn.utils.clip_grad_norm_(model.parameters(), engine._clip_norm)
        average(model)

    vars(engine.sync)["synchronize"] = clip_first  # hides the method
    try:
        return _right_train_step(engine, micro_batches, **more)
    finally:
        del vars(engine.sync)["synchronize"]


def clip_each_parameter(
    parameters: list[nn.Parameter], max_norm: float, _total_norm: Tensor
) -> None:
    for parameter in parameters:
        nn.utils.clip_grad_norm_(parameter, max_norm)


def save_without_hash(path: Path, entries: dict[str, Any]) -> None:
    torch.save(dict(entries), path)


def hash_of_the_weights_alone(value: Any) -> str:
    if isinstance(value, dict) and "model_state_dict" in value:
        value = value["model_state_dict"]
    return _right_digest(value)


def no_sync_that_does_nothing(sync: GradientSync) -> nullcontext:
    return nullcontext()


def micro_batches_added_up(world: Any, loader: Any, accumulation_steps: int) -> list[int]:
    return [n // accumulation_steps for n in _right_sizes(world, loader, accumulation_steps)]
