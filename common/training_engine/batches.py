"""What the engine takes from a loader: batches of tensors in any container, of this rank's share.

A batch is ``(inputs, targets)``, a dict of the model's arguments, or, with a ``forward_step``, any
tuple, list, dict or dataclass of tensors. forward.py says what model and criterion get.

A loader may have more, all of it optional. ``sampler`` or ``batch_sampler`` with ``set_epoch``
orders each epoch anew. ``global_batch_sizes`` has the samples of each step over all ranks; without
it, the ranks agree on them before each epoch, or, if only the batches tell, while they compute.
``micro_batches`` numbers this rank's micro-batches within each global batch; without it,
``accumulation_steps`` batches make a step. ``shards_here`` is the number of shards that this rank
computes in turn. ``start_at(step)`` skips the first steps of the next epoch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, default_collate

from common.distributed.collectives import check_same_on_all_ranks, start_all_reduce
from common.distributed.process_group import World
from common.errors import UserError

MicroBatch = Any  # what a loader yields: one forward pass
WHAT_A_LOADER_YIELDS = (
    "a loader must yield (inputs, targets) or a dict of the model's arguments; with "
    "forward_step=..., any tuple, list, dict or dataclass of tensors"
)


def map_tensors(change: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return the batch with each tensor changed; what is no tensor stays as it is."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(change, value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        changed = [map_tensors(change, value) for value in batch]
        if hasattr(batch, "_fields"):  # a named tuple
            return type(batch)(*changed)
        return type(batch)(changed)
    if is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: map_tensors(change, getattr(batch, f.name)) for f in fields(batch)}
        return replace(batch, **values)
    return batch


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in its order."""
    found: list[Tensor] = []
    map_tensors(found.append, batch)
    return found


def count_samples(batch: MicroBatch) -> int:
    """Return the length of the targets, or else of the first tensor; 0-d tensors count as one.

    Raises UserError, which says what a loader must yield, if there is no tensor.
    """
    counted = targets_of(batch)
    if not isinstance(counted, Tensor):
        found = tensors_in(batch)
        if not found:
            kind = type(batch).__name__
            raise UserError(f"the loader yielded a {kind} without tensors: {WHAT_A_LOADER_YIELDS}")
        counted = found[0]
    return counted.shape[0] if counted.dim() else 1


def is_pair(batch: MicroBatch) -> bool:
    """Whether it is (inputs, targets)."""
    return isinstance(batch, list | tuple) and len(batch) == 2


def targets_of(batch: MicroBatch) -> Any:
    """Return the targets of (inputs, targets), the "labels" of a dict, or else the whole batch."""
    if is_pair(batch):
        return batch[1]
    if isinstance(batch, Mapping):
        return batch.get("labels", batch)
    return batch


def first_samples(batch: MicroBatch, limit: int | None) -> MicroBatch:
    """Return at most the first ``limit`` samples of a batch; None: all."""
    samples = count_samples(batch)
    if limit is None or limit >= samples:
        return batch
    return map_tensors(lambda tensor: tensor[:limit] if tensor.dim() else tensor, batch)


def to_device(batch: MicroBatch, device: torch.device | str) -> MicroBatch:
    """Move all tensors; 4-d images get channels_last strides, for faster convolutions."""

    def move(tensor: Tensor) -> Tensor:
        if tensor.dim() == 4:
            return tensor.to(device, non_blocking=True, memory_format=torch.channels_last)
        return tensor.to(device, non_blocking=True)

    return map_tensors(move, batch)


def number_of_batches(loader: Iterable[MicroBatch]) -> int | None:
    """Return how many batches, or steps, a loader yields; None if that shows only at its end."""
    try:
        return len(getattr(loader, "global_batch_sizes", loader))  # type: ignore[arg-type]  # tried
    except TypeError:  # also of a DataLoader whose dataset is an IterableDataset
        return None


def check_lengths(world: World, loader: Iterable[MicroBatch], *, epochs: str) -> None:
    """Raise UserError if the ranks would train different numbers of batches or epochs. Collective.

    Otherwise they would wait for each other for ever at the end of the shorter one.
    """
    amount = {"number of batches in train_loader": number_of_batches(loader), "epochs": epochs}
    check_same_on_all_ranks(world, amount, what="how much they train")


def own_sizes(loader: Iterable[MicroBatch]) -> list[int] | None:
    """Return the samples of each batch of an epoch; None if only the batches themselves tell."""
    if isinstance(loader, list | tuple):
        return list(map(count_samples, loader))
    if not isinstance(loader, DataLoader) or loader.collate_fn is not default_collate:
        return None
    sampler = loader.batch_sampler
    if type(sampler) is not BatchSampler or not isinstance(sampler.sampler, Sized):
        return None
    whole, rest = divmod(len(sampler.sampler), sampler.batch_size)
    sizes = [sampler.batch_size] * whole
    if rest and not sampler.drop_last:
        sizes.append(rest)
    return sizes


def agreed_sizes(
    world: World, loader: Iterable[MicroBatch], accumulation_steps: int
) -> Sequence[int] | None:
    """Return the samples of each step over all ranks; None if a rank cannot tell. Collective.

    Unless the loader knows them, a message for a whole epoch, so that no step needs one.
    """
    known = getattr(loader, "global_batch_sizes", None)
    if known is not None:
        return known
    sizes = own_sizes(loader)
    knowing, batches = start_all_reduce(world, [sizes is not None, len(sizes or [])])()
    if sizes is None or knowing < world.size or batches != world.size * len(sizes):
        return None
    starts = range(0, len(sizes), accumulation_steps)
    steps = [sum(sizes[start : start + accumulation_steps]) for start in starts]
    return [int(samples) for samples in start_all_reduce(world, steps)()]


def set_epoch(loader: Iterable[MicroBatch], epoch: int) -> None:
    """Choose the epoch's order of the samples; without it all epochs would have the same order."""
    for name in ("sampler", "batch_sampler", "dataset"):
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
