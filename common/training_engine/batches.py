"""What the engine asks of a loader besides (inputs, labels) of this rank's share.

All of it is optional. ``sampler`` or ``batch_sampler`` with ``set_epoch`` orders each epoch anew.
``global_batch_sizes`` has the samples of each step over all ranks; without it, each step costs an
extra 8-byte all_reduce. ``micro_batches`` numbers this rank's micro-batches within each global
batch; without it, ``accumulation_steps`` batches make a step. ``shards_here`` is the number of
shards that this rank computes in turn. ``start_at(step)`` skips the first steps of the next epoch.
"""

from collections.abc import Iterable, Sized
from typing import Any

from torch import Tensor

from common.distributed.collectives import check_same_on_all_ranks
from common.distributed.process_group import World
from common.errors import UserError

# Inputs of shape (samples, ...) and labels of shape (samples,) for one forward pass.
MicroBatch = tuple[Tensor, Tensor]


def count_samples(micro_batches: Iterable[MicroBatch]) -> int:
    """Return the number of samples in all of them."""
    return sum(len(labels) for _, labels in micro_batches)


def check_lengths(world: World, loader: Iterable[MicroBatch], *, epochs: str) -> None:
    """Raise UserError if the ranks would train different numbers of batches or epochs. Collective.

    Otherwise they would wait for each other for ever at the end of the shorter one.
    """
    steps = getattr(loader, "global_batch_sizes", loader)
    amount = {
        "number of batches in train_loader": len(steps) if isinstance(steps, Sized) else -1,
        "epochs": epochs,
    }
    check_same_on_all_ranks(world, amount, what="how much they train")


def set_epoch(loader: Iterable[MicroBatch], epoch: int) -> None:
    """Choose the epoch's order of the samples; without it all epochs would have the same order."""
    for name in ("sampler", "batch_sampler"):
        sampler: Any = getattr(loader, name, None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def skip_steps(loader: Iterable[MicroBatch], steps: int, *, epoch: int) -> None:
    """Skip the first steps of the epoch. Raises UserError if the loader cannot."""
    if not hasattr(loader, "start_at"):
        raise UserError(
            f"resuming within epoch {epoch}, after step {steps}, needs a loader with a method "
            f"start_at(step), and {type(loader).__name__} has none: resume from the checkpoint of "
            "an epoch"
        )
    loader.start_at(steps)
