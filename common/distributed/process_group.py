"""The group of ranks: ``process_group`` opens and closes it, ``World`` says which rank of it this process is."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from common.distributed.failures import (
    FailureReport,
    explain_collective_failure,
    first_line,
    is_torch_error,
    open_sockets,
)
from common.distributed.launch_env import LaunchSpec, launch_from_environment
from common.distributed.rendezvous import RankPlacement, rendezvous
from common.errors import GroupError, Stopped, UserError


@dataclass(frozen=True)
class World:
    """This process is ``rank`` of ``size``, and ``local_rank`` of ``local_size`` on its machine; ``backend`` is None without
    a group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = torch.device("cpu")
    backend: str | None = None
    timeout_seconds: float = 60.0

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, the one that speaks and writes."""
        return self.rank == 0


def current_world(device: torch.device | str = "cpu") -> World:
    """Return the World of the group that is open in this process, whoever opened it; a World of one without a group."""
    device = torch.device(device)
    if not (dist.is_available() and dist.is_initialized()):
        return World(device=device)
    return World(
        rank=dist.get_rank(), size=dist.get_world_size(), device=device, backend=dist.get_backend()
    )


@contextmanager
def process_group(
    launch: LaunchSpec, *, backend: str | None = None, timeout_seconds: float = 60.0
) -> Iterator[World]:
    """Form the group, yield this process's World, and close the group whatever happens.

    Without a master's address there is no group, but a World of one. Otherwise as ``open_group``. When a collective breaks
    because another rank has failed, and that rank has published why, raises GroupError with its message.
    """
    if launch.master_ip is None:
        yield World(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return
    before = open_sockets()
    world, store = _open(launch, backend, timeout_seconds)
    report = FailureReport(
        store, world.rank, world.size, patience_seconds=timeout_seconds, other_sockets=before
    )
    try:
        try:
            yield world
            dist.barrier()  # rank 0 keeps the store alive until all ranks have finished
        except Stopped:  # on all ranks alike
            dist.barrier()
            raise
        except Exception as error:
            if not is_torch_error(error) or (broken := explain_collective_failure(error)) is None:
                report.publish(error)
            elif message := report.fetch():
                raise GroupError(
                    f"{message}. Finished checkpoints are kept. ({broken.split(':')[0]} here: another rank has ended)"
                ) from error
            raise
    finally:
        dist.destroy_process_group()
        report.close()


def open_group(
    launch: LaunchSpec, *, backend: str | None = None, timeout_seconds: float = 60.0
) -> World:
    """Form the group and return this process's World; the caller destroys the group.

    ``backend`` None means NCCL where each rank has a GPU of its own, else Gloo. Gloo trains on the CPU. Raises GroupError
    and UserError as ``rendezvous`` does.
    """
    return _open(launch, backend, timeout_seconds)[0]


def _open(
    launch: LaunchSpec, backend: str | None, timeout_seconds: float
) -> tuple[World, dist.TCPStore | None]:
    """Do as ``open_group``, and return the store of the rendezvous too; None under torchrun."""
    assert launch.master_ip is not None  # a process without a group opens none
    _choose_interface(launch.master_ip)
    store = None
    if launch.torchrun:
        assert launch.local_rank is not None  # torchrun sets both
        assert launch.local_size is not None
        gpus_suffice = torch.cuda.device_count() >= launch.local_size
        placement = RankPlacement(launch.local_rank, launch.local_size, gpus_suffice)
    else:
        store, placement = rendezvous(launch, timeout_seconds)
    if backend == "nccl" and not placement.gpus_suffice:
        raise UserError(
            f"--backend nccl needs a GPU for each of the {placement.local_size} ranks on a machine, and this one has "
            f"{torch.cuda.device_count()}: give --backend gloo, or fewer ranks"
        )
    if backend is None:
        use_nccl = placement.gpus_suffice and dist.is_nccl_available()
        backend = "nccl" if use_nccl else "gloo"
    uses_gpu = backend == "nccl"
    device = torch.device("cuda", placement.local_rank) if uses_gpu else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend,
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type == "cuda" else None,
            init_method="env://" if store is None else None,
            store=None if store is None else dist.PrefixStore("group", store),
        )
    except RuntimeError as error:
        met = "the ranks met" if store is not None else "torchrun started the ranks to meet"
        raise GroupError(
            f"{met} at {launch.master_ip}:{launch.master_port}, but {backend} could not connect them: "
            f"{first_line(error)}. If the nodes have several networks, set GLOO_SOCKET_IFNAME (or "
            "NCCL_SOCKET_IFNAME) to the interface that joins them"
        ) from error
    world = World(
        launch.rank,
        launch.size,
        placement.local_rank,
        placement.local_size,
        device,
        backend,
        timeout_seconds,
    )
    return world, store


def _choose_interface(master_ip: str) -> None:
    """Make Gloo and NCCL use the interface that routes to the master, unless the user has chosen one.

    Gloo would use the one that the host's name resolves to, which is often loopback.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(master_ip, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket chooses a route and sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return  # an unknown name or no route: the rendezvous reports it
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def set_debug() -> None:
    """Make torch.distributed and NCCL log what they do; call it before the group is formed. The user's own settings win.

    INFO, not DETAIL: with DETAIL DistributedDataParallel ends in a segmentation fault (torch 2.15, Gloo).
    """
    os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    dist.set_debug_level_from_env()


def setup_distributed(rank: int, world_size: int, backend: str | None = None) -> World:
    """Open the process group of ``world_size`` ranks and return this one's World; keep a group that is open already.

    The ranks meet at MASTER_ADDR:MASTER_PORT of the environment (default 127.0.0.1:29500). ``backend`` None means NCCL
    where each rank has a GPU of its own, else Gloo. Raises GroupError naming the ranks that are missing after a minute,
    UserError where the open group has another rank or size.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return open_group(launch_from_environment(rank, world_size), backend=backend)
    world = current_world("cuda" if dist.get_backend() == "nccl" else "cpu")
    if (world.rank, world.size) != (rank, world_size):
        raise UserError(
            f"setup_distributed: this process is rank {world.rank} of {world.size} already, not {rank} of "
            f"{world_size}: call cleanup_distributed first"
        )
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
    """Raise UserError where no group is open, or not the one that the caller expects (a ``world_size`` of 1 says nothing)."""
    world = current_world()
    if world.backend is None:
        raise UserError(
            "distributed=True, but no process group is open: call TrainingEngine.setup_distributed(rank, "
            "world_size) first, or start with launch_distributed_training"
        )
    if world_size not in (1, world.size):
        raise UserError(
            f"world_size: got {world_size}, but the open group has {world.size} ranks: give that, or nothing"
        )
    if backend not in (None, world.backend):
        raise UserError(
            f"backend: got {backend!r}, but the open group uses {world.backend!r}: give that, or nothing"
        )
