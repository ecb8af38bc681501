"""Which rank this process is, of how many, and where the ranks meet.

The order of the calls: ``choose_gpus`` limits the GPUs that this process sees.
``processes_to_start`` decides whether it starts the ranks (with ``local_rank_variables``) or is a
rank itself. A rank combines its flags and torchrun's environment variables with ``resolve_launch``;
callers without flags use ``launch_from_environment``. torch is imported only inside functions,
after the GPUs are chosen.
"""

import contextlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil

from common.errors import UserError
from common.utils.environment import (
    DEFAULT_MASTER_PORT,
    TorchrunVariables,
    read_settings,
    read_torchrun,
    run_token,
)
from common.utils.network import listening_address, resolve
from common.utils.system import free_port

_START_OTHERWISE = "start with torchrun, or unset RANK and WORLD_SIZE"


@dataclass(frozen=True)
class LaunchSpec:
    """How this process joins the group.

    Without a group ``size`` is 1 and ``master_ip`` None. The rest is set under torchrun alone:

    local_rank, local_size : this rank's place on its machine; else the rendezvous finds them.
    largest_size : the job's largest number of ranks; 0 if torchrun does not tell.
    restarts : how often torchrun may restart the workers.
    agent : a name of the process that restarts this node's workers.
    stale_addresses : whether restarted workers under Gloo would read their predecessors' addresses.

    token : the secret of the run, by which rank 0 knows its ranks; "" for none.
    """

    rank: int = 0
    size: int = 1
    master_ip: str | None = None
    master_port: int = DEFAULT_MASTER_PORT
    local_rank: int | None = None
    local_size: int | None = None
    largest_size: int | None = None
    restarts: int = 0
    agent: str | None = None
    stale_addresses: bool = False
    token: str = field(default_factory=run_token, repr=False)

    @property
    def opens_store(self) -> bool:
        """Whether rank 0 opens the store where the ranks meet; else their launcher decides."""
        return self.local_rank is None or (self.agent is None and self.local_size == self.size)


@dataclass(frozen=True)
class LaunchFlags:
    """The flags that decide how ranks start and where they meet; None if not given."""

    master_ip: str | None = None
    master_port: int | None = None
    dist_url: str | None = None
    num_nodes: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    distributed: bool = False
    gpu_ids: str | None = None
    sync: str = "none"


def resolve_launch(
    flags: LaunchFlags, environment: Mapping[str, str] = os.environ
) -> LaunchSpec | None:
    """Return the launch given by flags or torchrun's environment; None if neither gives one.

    Raises UserError if they contradict each other or only some of the flags are given.
    """
    master_ip, master_port = _master_address(flags)
    address_flag = "--master-ip" if flags.dist_url in (None, "env://") else "--dist-url"
    if {"RANK", "WORLD_SIZE"} <= environment.keys():
        launch = _from_torchrun(environment)
        same_host = not master_ip or resolve(master_ip) & resolve(launch.master_ip or "")
        port_flag = "--master-port" if address_flag == "--master-ip" else address_flag
        for flag, got, name, wanted in (
            ("--rank", flags.rank, "RANK", launch.rank),
            ("--num-nodes", flags.num_nodes, "WORLD_SIZE", launch.size),
            ("--local-rank", flags.local_rank, "LOCAL_RANK", launch.local_rank),
            (port_flag, master_port, "MASTER_PORT", launch.master_port),
            (address_flag, None if same_host else master_ip, "MASTER_ADDR", launch.master_ip),
        ):
            if got not in (None, wanted):
                raise UserError(
                    f"{flag} {got} contradicts torchrun's {name}={wanted}: leave the flag out "
                    "under torchrun"
                )
        return launch
    needed = {address_flag: master_ip, "--num-nodes": flags.num_nodes, "--rank": flags.rank}
    given = [name for name, value in needed.items() if value is not None]
    if not given:
        return None
    if flags.rank is None or flags.num_nodes is None or master_ip is None:
        missing = [name for name in needed if name not in given]
        raise UserError(
            f"{', '.join(given)} given without {' and '.join(missing)}: give --master-ip, "
            "--num-nodes and --rank together, for example --master-ip 10.0.0.1 --num-nodes 4 "
            "--rank 0; or --distributed --world-size 4 for all ranks on this machine"
        )
    _check_interface(environment)
    return LaunchSpec(flags.rank, flags.num_nodes, master_ip, master_port or DEFAULT_MASTER_PORT)


def launch_from_environment(rank: int, world_size: int) -> LaunchSpec:
    """Return the LaunchSpec of a rank whose number the caller knows.

    The ranks meet at MASTER_ADDR:MASTER_PORT (default 127.0.0.1:29500).
    """
    found = read_torchrun(os.environ, advice="set it to that, or unset it")
    _check_interface(os.environ)
    numbers = (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == (str(rank), str(world_size))
    torchrun = numbers and {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys()
    return LaunchSpec(
        rank,
        world_size,
        found.master_addr or "127.0.0.1",
        found.master_port or DEFAULT_MASTER_PORT,
        found.local_rank if torchrun else None,
        found.local_world_size if torchrun else None,
        agent=_agent() if "TORCHELASTIC_RUN_ID" in os.environ else None,
    )


def _master_address(flags: LaunchFlags) -> tuple[str | None, int | None]:
    """Return address and port of rank 0's node: --dist-url, or --master-ip and --master-port."""
    if flags.dist_url is None or flags.dist_url == "env://":
        return flags.master_ip, flags.master_port
    url, host, port = None, None, None
    with contextlib.suppress(ValueError):
        url = urlsplit(flags.dist_url)
        host, port = url.hostname, url.port
    if url is None or url.scheme != "tcp" or not host or not port or url.path or url.query:
        raise UserError(
            f"--dist-url: got {flags.dist_url!r}, give tcp://ADDRESS:PORT of rank 0's node, e.g. "
            "tcp://127.0.0.1:23456"
        )
    for flag, given, other, differing in (
        ("--master-ip", flags.master_ip, host, "addresses"),
        ("--master-port", flags.master_port, port, "ports"),
    ):
        if given not in (None, other):
            raise UserError(
                f"--dist-url {flags.dist_url} and {flag} {given} give different {differing}: give "
                "one of them"
            )
    return host, port


def _from_torchrun(environment: Mapping[str, str]) -> LaunchSpec:
    """Read torchrun's environment variables. Raises UserError if they make no sense."""
    found = read_torchrun(environment, advice=_START_OTHERWISE)
    _check_torchrun(found)
    _check_interface(environment)
    agent = "TORCHELASTIC_RUN_ID" in environment
    return LaunchSpec(
        found.rank,
        found.world_size,
        found.master_addr,
        found.master_port,
        found.local_rank,
        found.local_world_size or 1,
        largest_size=max(found.world_size, _largest_size(found)) if agent else found.world_size,
        restarts=found.torchelastic_max_restarts,
        agent=_agent() if agent else None,
        stale_addresses=found.torchelastic_use_agent_store == "True",
    )


def _check_torchrun(found: TorchrunVariables) -> None:
    """Raise UserError if variables are missing or contradict each other."""
    problem = ""
    for name, number, size_name, size in (
        ("RANK", found.rank, "WORLD_SIZE", found.world_size),
        ("LOCAL_RANK", found.local_rank, "LOCAL_WORLD_SIZE", found.local_world_size),
    ):
        if size and number >= size:
            problem = f"{name}={number} of {size_name}={size}; ranks count from 0"
    if found.local_world_size > found.world_size:
        problem = f"LOCAL_WORLD_SIZE={found.local_world_size} of WORLD_SIZE={found.world_size}"
    for name, value in (("MASTER_PORT", found.master_port), ("MASTER_ADDR", found.master_addr)):
        if not value:  # torch reads both
            problem = f"RANK and WORLD_SIZE, as torchrun sets them, but no {name}"
    if problem:
        raise UserError(f"the environment has {problem}: {_START_OTHERWISE}")


def _check_interface(environment: Mapping[str, str]) -> None:
    """Raise UserError if the user chose an interface for Gloo that this machine does not have."""
    chosen, own = read_settings(environment).gloo_socket_ifname, psutil.net_if_addrs()
    missing = [name for name in chosen.split(",") if name and name not in own]
    if missing:
        raise UserError(
            f"the environment has GLOO_SOCKET_IFNAME={chosen}, but this machine has no interface "
            f"{missing[0]}, only {', '.join(own)}: set it to the one that joins the nodes, or "
            "unset it"
        )


def _largest_size(found: TorchrunVariables) -> int:
    """Return the largest number of ranks that torchrun may start; 0 if it is unknown.

    Workers get only the present number. The maximum is in torchrun's command line (or PET_NNODES):
    ``--nnodes MIN:MAX``.
    """
    command = ""
    with contextlib.suppress(psutil.Error):  # torchrun has just ended, or hides its command line
        command = " ".join(psutil.Process(os.getppid()).cmdline())
    nodes = re.search(r"--nnodes[= ](?:\d+:)?(\d{1,5})(?!\d)", command)
    nodes = nodes or re.fullmatch(r"(?:\d+:)?(\d+)", found.pet_nnodes)
    return int(nodes[1]) * (found.local_world_size or 1) if nodes else 0


def _agent() -> str:
    """Return a name of the parent process that no other process will ever have."""
    name = f"{socket.gethostname()}-{os.getppid()}"
    with contextlib.suppress(psutil.Error):
        name += f"-{psutil.Process(os.getppid()).create_time():.2f}"
    return name


def processes_to_start(flags: LaunchFlags, environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks this process must start on this machine; 0 if it is a rank itself.

    --distributed and several --gpu-ids ask it to start them.
    """
    if {"RANK", "WORLD_SIZE"} <= environment.keys() or flags.rank is not None:
        if flags.distributed and flags.rank is not None:
            raise UserError(
                "--distributed starts all ranks on this machine, and --rank is one of them: give "
                "one of the two"
            )
        return 0
    gpus = len(flags.gpu_ids.split(",")) if flags.gpu_ids is not None else 0
    if not flags.distributed:
        return gpus if (gpus > 1 or flags.dist_url) and flags.sync != "none" else 0
    if flags.num_nodes is not None:
        return flags.num_nodes
    if gpus == 0:
        import torch

        gpus = torch.cuda.device_count()
    return gpus or 2


def local_rank_variables(flags: LaunchFlags, processes: int) -> list[dict[str, str]]:
    """Return the environment variables, torchrun's, that make a process one of ``processes`` ranks.

    The ranks meet at 127.0.0.1 and a free port, unless the flags give another address.
    """
    host, port = _master_address(flags)
    host = host or "127.0.0.1"
    group = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port or free_port(address=listening_address(host)[0])),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    return [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def choose_gpus(ids: str | None) -> None:
    """Let this process see only these GPUs, by the machine's numbers.

    Raises UserError if one is missing.
    """
    if ids is None:
        return
    before = os.environ.setdefault("CUDA_VISIBLE_DEVICES", ids)
    if before != ids:
        raise UserError(
            f"--gpu-ids {ids} contradicts CUDA_VISIBLE_DEVICES={before}: give one of the two"
        )
    import torch

    wanted, found = ids.split(","), torch.cuda.device_count()
    if found != len(wanted):
        raise UserError(
            f"--gpu-ids: got {ids}, but only {found} of these GPUs can be used on this machine: "
            "give others, or leave the flag out" + ("" if found else " to train on the CPU")
        )
