"""The group of ranks: ``process_group`` opens and closes it, ``World`` says which rank this is.

``setup_distributed`` and ``cleanup_distributed`` do the same for callers without a launch.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from common.distributed.failures import (
    Activity,
    CollectiveGuard,
    FailureWatch,
    cause_of,
    explain_lost_rank,
    nccl_failure,
    open_connections,
)
from common.distributed.launch_env import LaunchSpec, launch_from_environment
from common.errors import GroupError, Stopped, UserError, first_line, print_to_stderr
from common.utils.network import interface_of, route_to
from common.utils.typed_json import calm

if TYPE_CHECKING:
    from common.distributed.meeting import MeetingOutcome

_ASYNCHRONOUS = ("nccl",)  # these backends' collectives return before they are done


@dataclass(frozen=True)
class World:
    """This process is ``rank`` of ``size``, and ``local_rank`` of ``local_size`` on its machine.

    ``backend`` is None without a group. ``node`` is the number of its node, see node_identity.py.
    ``activity`` is what this rank is doing, see failures.py.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = torch.device("cpu")
    backend: str | None = None
    node: int = 0
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, the one that prints and writes files."""
        return self.rank == 0


def current_world(device: torch.device | str | None = None) -> World:
    """Return the World of the open group, for callers without one, e.g. in a notebook.

    Without a group it is a World of one. Any code may have opened the group, so local rank,
    local size and node are unknown. ``device`` None means the current GPU under NCCL, else the CPU.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return World(device=torch.device(device or "cpu"))
    backend = dist.get_backend()
    if device is None:
        device = f"cuda:{torch.cuda.current_device()}" if backend == "nccl" else "cpu"
    return World(
        dist.get_rank(), dist.get_world_size(), device=torch.device(device), backend=backend
    )


@contextmanager
def process_group(
    launch: LaunchSpec,
    *,
    backend: str | None = None,
    timeout_seconds: float = 60.0,
    meeting_seconds: float | None = None,
) -> Iterator[World]:
    """Open the group, yield this process's World, and close the group whatever happens.

    The ranks have ``meeting_seconds`` to start (default: ``timeout_seconds``). Without a master's
    address there is no group, and the World has one rank.
    Raises GroupError with another rank's message if a collective breaks because that rank failed.
    Under NCCL no exception reaches a thread that waits for the GPU: the process then ends with that
    message and status 1.
    """
    if launch.master_ip is None:
        on_gpu = torch.cuda.is_available() and backend != "gloo"
        yield World(device=torch.device("cuda" if on_gpu else "cpu"))
        return
    if launch.opens_store:  # so there is a guard, which names the lost rank, unlike the watchdog
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    before = open_connections()
    world, store = open_group(
        launch, backend=backend, timeout_seconds=timeout_seconds, meeting_seconds=meeting_seconds
    )
    watch = FailureWatch(
        store, launch, activity=world.activity, timeout_seconds=timeout_seconds, others=before
    )
    guard = CollectiveGuard(nccl_failure, watch, partial(_end, world.rank, watch))
    closes = True
    try:
        watch.start()
        if store is not None and world.backend in _ASYNCHRONOUS:
            guard.start()
        yield world
        world.activity.enter("end of the run")
        dist.barrier()  # rank 0 keeps the store alive until all ranks have finished
    except Stopped:  # on all ranks alike
        dist.barrier()
        raise
    except KeyboardInterrupt:
        watch.interrupted()
        raise
    except Exception as error:
        guard.close()
        closes = world.backend not in _ASYNCHRONOUS  # it would wait for the lost rank
        if message := watch.explain(error):
            raise GroupError(message) from error
        raise
    finally:
        guard.close()
        watch.close()
        if closes:
            dist.destroy_process_group()


def _end(rank: int, watch: FailureWatch, timed_out: bool) -> NoReturn:
    """Say why a collective broke and end this process, from another thread than the main one."""
    collective = "a collective"
    found = watch.explain_broken(collective, timed_out=timed_out) or explain_lost_rank(collective)
    print_to_stderr(calm(f"error (rank {rank}): {found}"))
    watch.close()
    sys.stdout.flush()
    os._exit(1)


def open_group(
    launch: LaunchSpec,
    *,
    backend: str | None = None,
    timeout_seconds: float = 60.0,
    meeting_seconds: float | None = None,
) -> tuple[World, dist.Store | None]:
    """Open the group; return this process's World and the ranks' own store (None under torchrun).

    The caller destroys the group. ``backend`` None means NCCL if each rank has a GPU of its own,
    else Gloo, which trains on the CPU. Raises GroupError and UserError as ``meet`` does.
    """
    from common.distributed.gpus import choose_backend, gpu_of
    from common.distributed.meeting import meet  # a single process meets nobody

    assert launch.master_ip is not None  # a process without a group opens none
    _choose_interface(launch.master_ip)
    meet_ranks = meet if launch.opens_store else _meet_under_torchrun
    met_in, outcome = meet_ranks(launch, meeting_seconds or timeout_seconds)
    local_rank, local_size = outcome.places[launch.rank]
    # Under torchrun one machine may have several agents, each with its own local ranks.
    local_size = launch.local_size or local_size
    backend, reason = choose_backend(backend, outcome.gpus, launch.world_size)
    if launch.rank == 0:
        for line in filter(None, (reason, outcome.notice)):
            print_to_stderr(line)
    gpu = gpu_of(local_rank) if backend == "nccl" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    try:
        dist.init_process_group(
            backend,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=gpu,
            store=dist.PrefixStore("group", met_in),
        )
    except RuntimeError as error:
        raise GroupError(
            f"the ranks met at {launch.master_ip}:{launch.master_port}, but {backend} could not "
            f"connect them: {cause_of(error)}. A rank may have ended since: read the others' "
            "output. If the nodes have several networks, set GLOO_SOCKET_IFNAME (or "
            "NCCL_SOCKET_IFNAME) to the interface that joins them"
        ) from error
    device = gpu or torch.device("cpu")
    node = outcome.nodes[launch.rank]
    world = World(launch.rank, launch.world_size, local_rank, local_size, device, backend, node)
    return world, met_in if launch.opens_store else None


def _meet_under_torchrun(
    launch: LaunchSpec, timeout_seconds: float
) -> "tuple[dist.Store, MeetingOutcome]":
    """As ``meet``, in torchrun's own store, or one that torch opens on rank 0's node."""
    from common.distributed.meeting import meet, refuse_stranger

    assert launch.master_ip is not None
    host = f"[{launch.master_ip}]" if ":" in launch.master_ip else launch.master_ip
    address = f"{host}:{launch.master_port}"
    timeout = timedelta(seconds=timeout_seconds)
    if launch.rank > 0 or launch.agent is not None:  # else torch opens the store in this process
        refuse_stranger(launch)
    try:
        store, _, _ = next(
            torch_rendezvous(f"tcp://{address}", launch.rank, launch.world_size, timeout=timeout)
        )
    except RuntimeError as error:
        raise GroupError(
            f"torchrun started the ranks to meet at {address}, but rank {launch.rank} found no "
            f"store there: {first_line(error)}"
        ) from error
    _, outcome = meet(launch, timeout_seconds, store=dist.PrefixStore("rendezvous", store))
    store.set_timeout(timeout)
    return dist.PrefixStore("default_pg", store), outcome


def _choose_interface(master_ip: str) -> None:
    """Make Gloo and NCCL use the interface that routes to the master, unless the user chose one.

    Gloo would use the one that the host's name resolves to, which is often loopback.
    """
    with suppress(OSError):  # an unknown name or no route: the rendezvous reports it
        if name := interface_of(route_to(master_ip)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def set_debug() -> None:
    """Make torch.distributed and NCCL log what they do, unless the user has set this already.

    Call it before the group is opened. INFO, not DETAIL: with DETAIL DistributedDataParallel ends
    in a segmentation fault (torch 2.15, Gloo).
    """
    os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    dist.set_debug_level_from_env()


def setup_distributed(rank: int, world_size: int, backend: str | None = None) -> World:
    """Open the process group of ``world_size`` ranks, unless it is open; return this rank's World.

    The ranks meet at MASTER_ADDR:MASTER_PORT of the environment (default 127.0.0.1:29500).
    ``backend`` None means NCCL if each rank has a GPU of its own, else Gloo. Raises GroupError
    naming the ranks that are missing after a minute, UserError if the open group has another rank
    or size.
    """
    world = current_world()
    if world.backend is None:
        return open_group(launch_from_environment(rank, world_size), backend=backend)[0]
    if (world.rank, world.size) != (rank, world_size):
        raise UserError(
            f"setup_distributed: this process is rank {world.rank} of {world.size} already, not "
            f"{rank} of {world_size}: call cleanup_distributed first"
        )
    return world


def cleanup_distributed() -> None:
    """Close the process group, if one is open."""
    if current_world().backend is not None:
        dist.destroy_process_group()


def own_device(device: torch.device | str, local_rank: int, *, distributed: bool) -> torch.device:
    """Return ``device``; in a group, "cuda" without a number means the GPU of ``local_rank``."""
    device = torch.device(device)
    if not distributed or device != torch.device("cuda"):
        return device
    from common.distributed.gpus import gpu_of

    return gpu_of(local_rank)


def check_open(world_size: int, backend: str | None) -> None:
    """Raise UserError if no group is open, or its size or backend is not what the caller expects.

    A ``world_size`` of 1 and a ``backend`` of None are not checked.
    """
    world = current_world()
    if world.backend is None:
        raise UserError(
            "distributed=True, but no process group is open: call "
            "TrainingEngine.setup_distributed(rank, world_size) first, or start with "
            "launch_distributed_training"
        )
    if world_size not in (1, world.size):
        raise UserError(
            f"world_size: got {world_size}, but the open group has {world.size} ranks: give that, "
            "or nothing"
        )
    if backend not in (None, world.backend):
        raise UserError(
            f"backend: got {backend!r}, but the open group uses {world.backend!r}: give that, or "
            "nothing"
        )
