"""The group of ranks: ``process_group`` opens and closes it, ``World`` says where this process stands in it.

``agree`` and ``everyone`` make a failure or a difference on one rank a clear error on all of them, in place of a hang.
"""

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from common.config import DEFAULT_MASTER_PORT
from common.errors import GroupError, Stopped, UserError
from common.failures import explain_collective_failure, first_line, is_torchs
from common.last_words import LastWords, open_sockets
from common.place import Launch
from common.rendezvous import meet
from common.waiting import in_thread

T = TypeVar("T")
_FIRST_PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class World:
    """This process's place: ``rank`` of ``size``, ``local_rank`` of ``local_size`` on its machine; ``backend`` None
    without a group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = torch.device("cpu")
    backend: str | None = None
    timeout_seconds: float = 60.0

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, the one that speaks and writes."""
        return self.rank == 0


def current_world(device: torch.device | str = "cpu") -> World:
    """The world of the group that is open in this process, whoever opened it; a world of one without a group."""
    device = torch.device(device)
    if not (dist.is_available() and dist.is_initialized()):
        return World(device=device)
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device, backend=dist.get_backend())


@contextmanager
def process_group(launch: Launch, *, backend: str | None = None, timeout_seconds: float = 60.0) -> Iterator[World]:
    """Form the group, yield this process's World, and close the group whatever happens.

    Without a master's address there is no group, but a World of one. Otherwise as ``open_group``. Where a collective breaks
    because another rank has failed, and that one could still say why, raises GroupError with its words.
    """
    if launch.master_ip is None:
        yield World(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return
    before = open_sockets()
    world, store = _open(launch, backend, timeout_seconds)
    words = LastWords(store, world.rank, world.size, patience_seconds=timeout_seconds, others_sockets=before)
    try:
        try:
            yield world
            dist.barrier()  # nobody takes the store away while others still use it
        except Stopped:  # on all ranks alike
            dist.barrier()
            raise
        except Exception as error:
            if not is_torchs(error) or (broken := explain_collective_failure(error)) is None:
                words.leave(error)
            elif told := words.read():
                raise GroupError(f"{told}. Finished checkpoints are kept. ({broken.split(':')[0]} here: another rank has ended)"
                                 ) from error
            raise
    finally:
        dist.destroy_process_group()
        words.part()


def open_group(launch: Launch, *, backend: str | None = None, timeout_seconds: float = 60.0) -> World:
    """Form the group and return this process's World; the caller destroys the group.

    ``backend`` None means NCCL where each rank has a GPU of its own, else Gloo. Gloo trains on the CPU. Raises GroupError
    and UserError as ``rendezvous.meet`` does.
    """
    return _open(launch, backend, timeout_seconds)[0]


def _open(launch: Launch, backend: str | None, timeout_seconds: float) -> tuple[World, dist.Store | None]:
    """As ``open_group``, with the store at which the ranks met; None under torchrun."""
    _choose_interface(launch.master_ip)
    store, local_rank, local_size, gpus_suffice = None, launch.local_rank, launch.local_size, True
    if launch.torchrun:
        gpus_suffice = torch.cuda.device_count() >= local_size
    else:
        store, seat = meet(launch, timeout_seconds)
        local_rank, local_size, gpus_suffice = seat.local_rank, seat.local_size, seat.gpus_suffice
    if backend == "nccl" and not gpus_suffice:
        raise UserError(f"--backend nccl needs a GPU for each of the {local_size} ranks on a machine, and this one has "
                        f"{torch.cuda.device_count()}: give --backend gloo, or fewer ranks")
    backend = backend or ("nccl" if gpus_suffice and dist.is_nccl_available() else "gloo")
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend, rank=launch.rank, world_size=launch.size, timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type == "cuda" else None,
            **({"init_method": "env://"} if store is None else {"store": dist.PrefixStore("group", store)}))
    except RuntimeError as error:
        met = "the ranks met" if store is not None else "torchrun started the ranks to meet"
        raise GroupError(f"{met} at {launch.master_ip}:{launch.master_port}, but {backend} could not connect them: "
                         f"{first_line(error)}. If the nodes have several networks, set GLOO_SOCKET_IFNAME (or "
                         "NCCL_SOCKET_IFNAME) to the interface that joins them") from error
    return World(launch.rank, launch.size, local_rank, local_size, device, backend, timeout_seconds), store


def place_from_environment(rank: int, world_size: int) -> Launch:
    """Return the place of a rank that a caller has numbered; where to meet is MASTER_ADDR:MASTER_PORT (default
    127.0.0.1:29500)."""
    local = {name: int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in os.environ}
    torchrun = (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == (str(rank), str(world_size)) and len(local) == 2
    return Launch(rank, world_size, os.environ.get("MASTER_ADDR", "127.0.0.1"),
                  int(os.environ.get("MASTER_PORT", DEFAULT_MASTER_PORT)),
                  local["LOCAL_RANK"] if torchrun else None, local["LOCAL_WORLD_SIZE"] if torchrun else None, torchrun)


def _choose_interface(master_ip: str) -> None:
    """Make Gloo and NCCL use the interface that routes to the master, unless the user has chosen one.

    Gloo would take the one that the host's name resolves to, which is often loopback.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(master_ip, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: chooses a route, sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return  # an unknown name or no route: the rendezvous says so
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def set_debug() -> None:
    """Make torch.distributed and NCCL tell what they do; before the group is formed. The user's own settings win.

    Not DETAIL: with it DistributedDataParallel ends in a segmentation fault (torch 2.15, Gloo).
    """
    os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    dist.set_debug_level_from_env()


def agree(world: World, facts: Mapping[str, Any], *, what: str) -> None:
    """Raise UserError on every rank, naming each fact that differs with the values and who has them.

    One all_reduce of 64 bytes where all agree, however many they are. ``facts`` are plain values by name, e.g. settings or
    tensor shapes.
    """
    if world.size == 1:
        return
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(world.device)
    largest = torch.stack([mine, ~mine])  # the largest of all complements is the complement of the smallest
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if torch.equal(largest[0], ~largest[1]):  # the same verdict on every rank
        return
    all_facts = gather_objects(world, dict(facts))
    names = list(dict.fromkeys(name for one in all_facts for name in one))
    lines = [f"{name}: {_by_value([one.get(name, 'absent') for one in all_facts])}" for name in names
             if any(one.get(name, "absent") != all_facts[0].get(name, "absent") for one in all_facts)]
    more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
    raise UserError(f"the ranks differ in {what}. {'; '.join(lines[:5])}{more}. Start every rank with the same")


def _by_value(values: list[Any]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} on rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who[:8]))}"
                     f"{' …' if len(who) > 8 else ''}" for value, who in ranks.items())


def everyone(world: World, action: Callable[[], T], *, patient: bool = False) -> T:
    """Run ``action`` on every rank; if it fails with UserError or OSError on one, raise UserError on all.

    ``patient`` waits for as long as the action takes (a download), provided that every rank answers within the group's timeout.
    """
    if world.size == 1:
        return _told(action)
    if patient:
        action = _done_on_all(world, action)
    error: str | None = None
    try:
        result = _told(action)
    except UserError as failure:
        error = str(failure)
    failures = torch.tensor([int(error is not None)], device=world.device)
    dist.all_reduce(failures)
    if int(failures):
        errors = gather_objects(world, error)
        rank = world.rank if error else next(r for r, text in enumerate(errors) if text)
        raise UserError(errors[rank] if rank == world.rank else f"rank {rank} stopped: {errors[rank]}")
    return result


def _done_on_all(world: World, action: Callable[[], T]) -> Callable[[], T]:
    """Run ``action`` in a thread until it has ended on every rank, and return what gives its result or raises its error.

    Meanwhile the ranks ask each other every second, so that one that is lost is missed within the group's timeout.
    """
    outcome = in_thread(action)
    pause = _FIRST_PAUSE_SECONDS
    while True:
        wait([outcome], timeout=pause)
        working = torch.tensor([int(not outcome.done())], device=world.device)
        dist.all_reduce(working)
        if not int(working):
            return outcome.result
        pause = min(2 * pause, 1.0)


def on_rank0(world: World, action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 alone and give its result (a small, picklable one) or its error to every rank."""
    if world.size == 1:
        return _told(action)
    shared: list[Any] = [None, None]
    if world.is_root:
        try:
            shared[0] = _told(action)
        except UserError as failure:
            shared[1] = str(failure)
    dist.broadcast_object_list(shared, src=0)
    if shared[1] is not None:
        raise UserError(shared[1] if world.is_root else f"rank 0 stopped: {shared[1]}")
    return shared[0]


def gather_objects(world: World, mine: T) -> list[T]:
    """Return every rank's object (small and picklable), by rank, on every rank."""
    if world.size == 1:
        return [mine]
    objects: list[Any] = [None] * world.size
    dist.all_gather_object(objects, mine)
    return objects


def broadcast_bytes(world: World, read: Callable[[], bytes], *, source: int = 0) -> bytes:
    """Run ``read`` on rank ``source`` and return its bytes on every rank; its UserError or OSError reaches all of them."""
    content = everyone(world, lambda: read() if world.rank == source else b"")
    if world.size == 1:
        return content
    length = torch.tensor([len(content)], dtype=torch.int64, device=world.device)
    dist.broadcast(length, src=source)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if world.rank == source:
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    buffer = buffer.to(world.device)
    dist.broadcast(buffer, src=source)
    return content if world.rank == source else buffer.cpu().numpy().tobytes()


def _told(action: Callable[[], T]) -> T:
    try:
        return action()
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(f"{error.strerror or error}{where}") from error
