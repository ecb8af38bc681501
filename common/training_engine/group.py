"""The engine's side of the process group: opening it from a notebook or a worker, and checks against common mistakes."""

import hashlib
import warnings

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed import World, current_world, gather_objects, open_group, place_from_environment
from common.errors import UserError


def setup_distributed(rank: int, world_size: int, backend: str | None = None) -> World:
    """Open the process group of ``world_size`` ranks and return this one's World; a group that is open already is kept.

    The ranks meet at MASTER_ADDR:MASTER_PORT of the environment (default 127.0.0.1:29500). ``backend`` None means NCCL
    where each rank has a GPU of its own, else Gloo. Raises GroupError naming the ranks that are missing after a minute,
    UserError where an open group is another one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return open_group(place_from_environment(rank, world_size), backend=backend)
    world = current_world("cuda" if dist.get_backend() == "nccl" else "cpu")
    if (world.rank, world.size) != (rank, world_size):
        raise UserError(f"setup_distributed: this process is rank {world.rank} of {world.size} already, not {rank} of "
                        f"{world_size}: call cleanup_distributed first")
    return world


def cleanup_distributed() -> None:
    """Close the process group, if one is open."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def own_device(device: torch.device | str, local_rank: int, *, distributed: bool) -> torch.device:
    """Return ``device``; "cuda" without a number is the GPU of ``local_rank`` where ranks share a machine."""
    device = torch.device(device)
    if distributed and device.type == "cuda" and device.index is None:
        return torch.device("cuda", local_rank)
    return device


def check_open(world_size: int, backend: str | None) -> None:
    """UserError where no group is open, or it is not what the caller believes (a ``world_size`` of 1 says nothing)."""
    world = current_world()
    if world.backend is None:
        raise UserError("distributed=True, but no process group is open: call TrainingEngine.setup_distributed(rank, "
                        "world_size) first, or start with launch_distributed_training")
    if world_size not in (1, world.size):
        raise UserError(f"world_size: got {world_size}, but the open group has {world.size} ranks: give that, or nothing")
    if backend not in (None, world.backend):
        raise UserError(f"backend: got {backend!r}, but the open group uses {world.backend!r}: give that, or nothing")


def warn_of_equal_batches(world: World, inputs: Tensor, labels: Tensor) -> None:
    """Warn of the commonest mistake of all: no sampler, so that all ranks train on the same samples. Collective."""
    if world.size == 1:
        return
    mine = [hashlib.sha256(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
            for t in (inputs, labels)]
    others = gather_objects(world, (*mine, len(labels) >= 8 and len(labels.unique()) > 1))
    same_inputs, same_labels = (len({other[column] for other in others}) == 1 for column in (0, 1))
    if len(labels) and (same_inputs or (same_labels and all(telling for *_, telling in others))):
        warnings.warn("all ranks train on the same samples: their first batches are equal. Give each rank a share of its "
                      "own, e.g. by torch.utils.data.DistributedSampler", stacklevel=5)
