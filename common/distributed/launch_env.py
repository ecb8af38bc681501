"""Which rank this process is, of how many, and where the ranks meet.

The order of the calls: ``choose_gpus`` limits the GPUs that this process sees. ``ranks_to_start``
says whether it starts the ranks or is one itself. A rank combines its flags (None: not given) and
torchrun's environment variables with ``resolve_launch``; callers without flags use
``launch_from_environment``. torch is imported only inside functions, after the GPUs are chosen.
"""

import contextlib
import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from common.errors import UserError
from common.utils.environment import (
    DEFAULT_MASTER_PORT,
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

    Without a group ``world_size`` is 1, ``master_ip`` None. The rest is set under torchrun alone:

    local_rank, local_size : this rank's place on its machine; else the rendezvous finds them.
    largest_size : the job's largest number of ranks; 0 if torchrun does not tell.
    restarts : how often torchrun may restart the workers.
    agent : a name of the process that restarts this node's workers.
    stale_addresses : whether restarted workers under Gloo would read their predecessors' addresses.
    generation : differs after torchrun has restarted the workers, whose store may be the same.

    token : the secret of the run, by which rank 0 knows its ranks; "" for none.
    """

    rank: int = 0
    world_size: int = 1
    master_ip: str | None = None
    master_port: int = DEFAULT_MASTER_PORT
    local_rank: int | None = None
    local_size: int | None = None
    largest_size: int | None = None
    restarts: int = 0
    agent: str | None = None
    stale_addresses: bool = False
    generation: str = ""
    token: str = field(default_factory=run_token, repr=False)

    @property
    def by_hand(self) -> bool:
        """Whether somebody starts the ranks one by one: launchers set a local rank or a token."""
        return self.local_rank is None and not self.token

    @property
    def opens_store(self) -> bool:
        """Whether rank 0 opens the store where the ranks meet; else their launcher decides."""
        return self.local_rank is None or (
            self.agent is None and self.local_size == self.world_size
        )


def resolve_launch(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    master_ip: str | None = None,
    master_port: int | None = None,
    dist_url: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> LaunchSpec | None:
    """Return the launch that flags or torchrun's environment give; None if neither gives one.

    Raises UserError if they contradict each other or only some of the flags are given.
    """
    master_ip, master_port = _master_address(master_ip, master_port, dist_url)
    by_url = dist_url not in (None, "env://")
    ip_flag = "--dist-url" if by_url else "--master-ip"
    if started_by_launcher(environment):
        launch = _from_torchrun(environment)
        same_host = not master_ip or resolve(master_ip) & resolve(launch.master_ip or "")
        for flag, got, name, wanted in (
            ("--rank", rank, "RANK", launch.rank),
            ("--num-nodes", world_size, "WORLD_SIZE", launch.world_size),
            ("--local-rank", local_rank, "LOCAL_RANK", launch.local_rank),
            (
                "--dist-url" if by_url else "--master-port",
                master_port,
                "MASTER_PORT",
                launch.master_port,
            ),
            (ip_flag, None if same_host else master_ip, "MASTER_ADDR", launch.master_ip),
        ):
            if got not in (None, wanted):
                raise UserError(
                    f"{flag} {got} contradicts torchrun's {name}={wanted}: leave the flag out "
                    "under torchrun"
                )
        return launch
    if rank is None and world_size is None and master_ip is None:
        return None
    if rank is None or world_size is None or master_ip is None:
        needed = {ip_flag: master_ip, "--num-nodes": world_size, "--rank": rank}
        given = [name for name, value in needed.items() if value is not None]
        missing = [name for name in needed if name not in given]
        raise UserError(
            f"{', '.join(given)} given without {' and '.join(missing)}: give --master-ip, "
            "--num-nodes and --rank together, for example --master-ip 10.0.0.1 --num-nodes 4 "
            "--rank 0; or --distributed --world-size 4 for all ranks on this machine"
        )
    _check_interface(environment)
    return LaunchSpec(rank, world_size, master_ip, master_port or DEFAULT_MASTER_PORT)


def started_by_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun, or another launcher like it, started this process as a rank."""
    return {"RANK", "WORLD_SIZE"} <= environment.keys()


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
        found["MASTER_ADDR"] or "127.0.0.1",
        found["MASTER_PORT"] or DEFAULT_MASTER_PORT,
        found["LOCAL_RANK"] if torchrun else None,
        found["LOCAL_WORLD_SIZE"] if torchrun else None,
        agent=_agent() if "TORCHELASTIC_RUN_ID" in os.environ else None,
        generation=_generation(os.environ),
    )


def _master_address(
    master_ip: str | None, master_port: int | None, dist_url: str | None
) -> tuple[str | None, int | None]:
    """Return address and port of rank 0's node: --dist-url, or --master-ip and --master-port."""
    if dist_url is None or dist_url == "env://":
        return master_ip, master_port
    url = re.fullmatch(r"tcp://(\[[^][/?#@]+\]|[^][/?#@:]+):(\d{1,5})", dist_url)
    if url is None or not 1 <= int(url[2]) <= 65_535:
        raise UserError(
            f"--dist-url: got {dist_url!r}, give tcp://ADDRESS:PORT of rank 0's node, e.g. "
            "tcp://127.0.0.1:23456"
        )
    host, port = url[1].strip("[]"), int(url[2])
    for flag, given, other in (
        ("--master-ip", master_ip, host),
        ("--master-port", master_port, port),
    ):
        if given not in (None, other):
            raise UserError(
                f"--dist-url {dist_url} and {flag} {given} name different places: give one of them"
            )
    return host, port


def _from_torchrun(environment: Mapping[str, str]) -> LaunchSpec:
    """Read torchrun's environment variables. Raises UserError if they make no sense."""
    found = read_torchrun(environment, advice=_START_OTHERWISE)
    _check_torchrun(found)
    _check_interface(environment)
    agent = "TORCHELASTIC_RUN_ID" in environment
    return LaunchSpec(
        found["RANK"],
        found["WORLD_SIZE"],
        found["MASTER_ADDR"],
        found["MASTER_PORT"],
        found["LOCAL_RANK"],
        found["LOCAL_WORLD_SIZE"] or 1,
        largest_size=max(found["WORLD_SIZE"], _largest_size(found) if agent else 0),
        restarts=found["TORCHELASTIC_MAX_RESTARTS"],
        agent=_agent() if agent else None,
        stale_addresses=found["TORCHELASTIC_USE_AGENT_STORE"] == "True",
        generation=_generation(environment),
    )


def _check_torchrun(found: Mapping[str, Any]) -> None:
    """Raise UserError if variables are missing or contradict each other."""
    rank, size, local_rank = found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]
    local_size = found["LOCAL_WORLD_SIZE"] or math.inf
    problems = {
        f"RANK={rank} of WORLD_SIZE={size}; ranks count from 0": rank >= size,
        f"LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_size}; ranks count from 0": (
            local_rank >= local_size
        ),
        f"LOCAL_WORLD_SIZE={local_size} of WORLD_SIZE={size}": size < local_size < math.inf,
        "RANK and WORLD_SIZE, as torchrun sets them, but no MASTER_ADDR": not found["MASTER_ADDR"],
        "RANK and WORLD_SIZE, as torchrun sets them, but no MASTER_PORT": not found["MASTER_PORT"],
    }
    for problem, is_there in problems.items():
        if is_there:
            raise UserError(f"the environment has {problem}: {_START_OTHERWISE}")


def _check_interface(environment: Mapping[str, str]) -> None:
    """Raise UserError if the user chose an interface for Gloo that this machine does not have."""
    chosen, own = read_settings(environment)["GLOO_SOCKET_IFNAME"], psutil.net_if_addrs()
    missing = [name for name in chosen.split(",") if name and name not in own]
    if missing:
        raise UserError(
            f"the environment has GLOO_SOCKET_IFNAME={chosen}, but this machine has no interface "
            f"{missing[0]}, only {', '.join(own)}: set it to the one that joins the nodes, or "
            "unset it"
        )


def _largest_size(found: Mapping[str, Any]) -> int:
    """Return the largest number of ranks that torchrun may start; 0 if it is unknown.

    Workers get only the present number. The maximum is in torchrun's command line (or PET_NNODES):
    ``--nnodes MIN:MAX``.
    """
    command = ""
    with contextlib.suppress(psutil.Error):  # torchrun has just ended, or hides its command line
        command = " ".join(psutil.Process(os.getppid()).cmdline())
    nodes = re.search(r"--nnodes[= ](?:\d+:)?(\d{1,5})(?!\d)", command) or re.fullmatch(
        r"(?:\d+:)?(\d+)", found["PET_NNODES"]
    )
    return int(nodes[1]) * (found["LOCAL_WORLD_SIZE"] or 1) if nodes else 0


def _generation(environment: Mapping[str, str]) -> str:
    """Return torchrun's job, round of workers and their number; "" if torchrun has no part.

    A store of the workers' own has a new port in each round. An agent's store stays, so there the
    restarts count; agents that replace others have counted fewer.
    """
    stays = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    in_turn = "TORCHELASTIC_RESTART_COUNT" if stays else "MASTER_PORT"
    names = ("TORCHELASTIC_RUN_ID", in_turn, "WORLD_SIZE")
    return " ".join(
        environment.get(name, "") for name in names if "TORCHELASTIC_RUN_ID" in environment
    )


def _agent() -> str:
    """Return a name of the parent process that no other process will ever have."""
    parent = psutil.Process(os.getppid())
    return f"{socket.gethostname()}-{parent.pid}-{parent.create_time():.2f}"


def ranks_to_start(
    *,
    distributed: bool,
    gpu_ids: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    master_ip: str | None = None,
    master_port: int | None = None,
    dist_url: str | None = None,
) -> list[dict[str, str]]:
    """Return the variables, torchrun's, of each rank that this process must start on this machine.

    None if it is a rank itself; ``distributed`` and several GPUs ask it to start them. The ranks
    meet at 127.0.0.1 and a free port, unless another address is given.
    """
    if distributed and rank is not None:
        raise UserError(
            "--distributed starts all ranks on this machine, and --rank is one of them: give "
            "one of the two"
        )
    gpus = len(gpu_ids.split(",")) if gpu_ids is not None else 0
    asked = distributed or gpus > 1 or (gpus == 1 and dist_url)
    if not asked or rank is not None or started_by_launcher():
        return []
    processes = (world_size if distributed else None) or gpus
    if not processes:
        import torch

        processes = torch.cuda.device_count() or 2
    host, port = _master_address(master_ip, master_port, dist_url)
    host = host or "127.0.0.1"
    group = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port or free_port(address=listening_address(host)[0])),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    return [group | {"RANK": str(one), "LOCAL_RANK": str(one)} for one in range(processes)]


def choose_gpus(ids: str | None) -> None:
    """Let this process see only these GPUs, by the machine's numbers.

    Raises UserError if one is missing.
    """
    if ids is None:
        return
    if (before := os.environ.setdefault("CUDA_VISIBLE_DEVICES", ids)) != ids:
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
