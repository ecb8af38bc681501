"""Which rank this process is, of how many, and where the ranks meet.

The order of the calls: ``choose_gpus`` limits the GPUs that this process sees. ``ranks_to_start``
says whether it starts the ranks or is one itself. A rank combines its flags (None: not given) and
torchrun's environment variables with ``resolve_launch``; callers without flags use
``launch_from_environment``. torch is imported only inside functions, after the GPUs are chosen.
"""

import contextlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import psutil

from common.errors import UserError
from common.say import listed
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
    ip_flag = "--master-ip"
    port_flag = "--master-port"
    if dist_url not in (None, "env://"):
        ip_flag = port_flag = "--dist-url"
    if started_by_launcher(environment):
        launch = _from_torchrun(environment)
        _check_flag("--rank", rank, "RANK", launch.rank)
        _check_flag("--num-nodes", world_size, "WORLD_SIZE", launch.world_size)
        _check_flag("--local-rank", local_rank, "LOCAL_RANK", launch.local_rank)
        _check_flag(port_flag, master_port, "MASTER_PORT", launch.master_port)
        if master_ip and not resolve(master_ip) & resolve(launch.master_ip or ""):
            _check_flag(ip_flag, master_ip, "MASTER_ADDR", launch.master_ip)
        return launch
    if (rank, world_size, master_ip) == (None, None, None):
        return None
    if rank is None or world_size is None or master_ip is None:
        raise _incomplete({ip_flag: master_ip, "--num-nodes": world_size, "--rank": rank})
    _check_interface(environment)
    return LaunchSpec(rank, world_size, master_ip, master_port or DEFAULT_MASTER_PORT)


def _check_flag(flag: str, got: str | int | None, variable: str, wanted: str | int | None) -> None:
    """Raise UserError if a flag was given and is not what torchrun's variable says."""
    if got not in (None, wanted):
        raise UserError(
            f"{flag} {got} contradicts torchrun's {variable}={wanted}: leave the flag out "
            "under torchrun"
        )


def _incomplete(flags: Mapping[str, str | int | None]) -> UserError:
    """Return the error for flags that are needed together, of which some are None."""
    given = [flag for flag, value in flags.items() if value is not None]
    missing = [flag for flag in flags if flag not in given]
    return UserError(
        f"{listed(given)} given without {listed(missing)}: give --master-ip, "
        "--num-nodes and --rank together, for example --master-ip 10.0.0.1 --num-nodes 4 "
        "--rank 0; or --distributed --world-size 4 for all ranks on this machine"
    )


def started_by_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun, or another launcher like it, started this process as a rank."""
    return {"RANK", "WORLD_SIZE"} <= environment.keys()


def launch_from_environment(rank: int, world_size: int) -> LaunchSpec:
    """Return the LaunchSpec of a rank whose number the caller knows.

    The ranks meet at MASTER_ADDR:MASTER_PORT (default 127.0.0.1:29500).
    """
    found = read_torchrun(os.environ, advice="set it to that, or unset it")
    _check_interface(os.environ)
    launch = LaunchSpec(
        rank,
        world_size,
        found.master_addr or "127.0.0.1",
        found.master_port or DEFAULT_MASTER_PORT,
        agent=_agent(os.environ),
        generation=_generation(os.environ),
    )
    theirs = (os.environ.get("RANK"), os.environ.get("WORLD_SIZE"))
    is_torchruns = theirs == (str(rank), str(world_size))
    if is_torchruns and {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        return replace(launch, local_rank=found.local_rank, local_size=found.local_world_size)
    return launch


def _master_address(
    master_ip: str | None, master_port: int | None, dist_url: str | None
) -> tuple[str | None, int | None]:
    """Return address and port of rank 0's node: --dist-url, or --master-ip and --master-port."""
    if dist_url is None or dist_url == "env://":
        return master_ip, master_port
    url = re.fullmatch(r"tcp://(\[[^][/?#@]+\]|[^][/?#@:]+):(\d{1,5})", dist_url)
    if url is None or not 1 <= int(url[2]) <= 65_535:
        raise UserError(
            f"--dist-url: got {dist_url!r}, give tcp://ADDRESS:PORT of rank 0's machine, e.g. "
            "tcp://127.0.0.1:23456"
        )
    host = url[1].strip("[]")
    if master_ip not in (None, host):
        raise _two_places(dist_url, f"--master-ip {master_ip}")
    port = int(url[2])
    if master_port not in (None, port):
        raise _two_places(dist_url, f"--master-port {master_port}")
    return host, port


def _two_places(dist_url: str, flag: str) -> UserError:
    return UserError(f"--dist-url {dist_url} and {flag} name different places: give one of them")


def _from_torchrun(environment: Mapping[str, str]) -> LaunchSpec:
    """Read torchrun's environment variables. Raises UserError if they make no sense."""
    found = read_torchrun(environment, advice=_START_OTHERWISE)
    _check_torchrun(found)
    _check_interface(environment)
    largest_size = found.world_size
    agent = _agent(environment)
    if agent is not None:
        largest_size = max(largest_size, _largest_size(found))
    return LaunchSpec(
        found.rank,
        found.world_size,
        found.master_addr,
        found.master_port,
        found.local_rank,
        found.local_world_size or 1,
        largest_size=largest_size,
        restarts=found.torchelastic_max_restarts,
        agent=agent,
        stale_addresses=found.torchelastic_use_agent_store == "True",
        generation=_generation(environment),
    )


def _check_torchrun(found: TorchrunVariables) -> None:
    """Raise UserError if variables are missing or contradict each other."""
    size = found.world_size
    local_rank = found.local_rank
    local_size = found.local_world_size  # 0: the launcher does not tell
    if found.rank >= size:
        raise _senseless(f"RANK={found.rank} of WORLD_SIZE={size}; ranks count from 0")
    if local_size and local_rank >= local_size:
        raise _senseless(
            f"LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_size}; ranks count from 0"
        )
    if local_size > size:
        raise _senseless(f"LOCAL_WORLD_SIZE={local_size} of WORLD_SIZE={size}")
    if not found.master_addr:
        raise _senseless("RANK and WORLD_SIZE, as torchrun sets them, but no MASTER_ADDR")
    if not found.master_port:
        raise _senseless("RANK and WORLD_SIZE, as torchrun sets them, but no MASTER_PORT")


def _senseless(what: str) -> UserError:
    return UserError(f"the environment has {what}: {_START_OTHERWISE}")


def _check_interface(environment: Mapping[str, str]) -> None:
    """Raise UserError if the user chose an interface for Gloo that this machine does not have."""
    chosen = read_settings(environment)["GLOO_SOCKET_IFNAME"]
    own = psutil.net_if_addrs()
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
    in_command = re.search(r"--nnodes[= ](?:\d+:)?(\d{1,5})(?!\d)", command)
    nodes = in_command or re.fullmatch(r"(?:\d+:)?(\d+)", found.pet_nnodes)
    if nodes is None:
        return 0
    return int(nodes[1]) * (found.local_world_size or 1)


def _generation(environment: Mapping[str, str]) -> str:
    """Return torchrun's job, round of workers and their number; "" if torchrun has no part.

    A store of the workers' own has a new port in each round. An agent's store stays, so there the
    restarts count; agents that replace others have counted fewer.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return ""
    in_turn = (
        "TORCHELASTIC_RESTART_COUNT"
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        else "MASTER_PORT"
    )
    names = ("TORCHELASTIC_RUN_ID", in_turn, "WORLD_SIZE")
    return " ".join(environment.get(name, "") for name in names)


def _agent(environment: Mapping[str, str]) -> str | None:
    """Return a name of torchrun's agent, the parent process, that no other will ever have."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
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

    None if it is a rank itself; ``distributed`` and several GPUs ask it to start them, and so does
    one GPU with ``dist_url``. The ranks meet at 127.0.0.1 and a free port, unless ``dist_url`` or a
    port is given. Raises UserError if flags contradict each other.
    """
    if distributed and rank is not None:
        raise UserError(
            "--distributed starts all ranks on this machine, and --rank is one of them: give "
            "one of the two"
        )
    if rank is not None or started_by_launcher():
        return []
    if distributed and master_ip is not None:
        raise UserError(
            "--distributed starts all ranks on this machine, and --master-ip is for ranks on "
            "several: leave --master-ip out; or start one rank on each machine, with --master-ip, "
            "--num-nodes and --rank"
        )
    size = len(gpu_ids.split(",")) if gpu_ids is not None else 0
    if distributed:
        size = world_size or size or _default_size()
    elif size < (1 if dist_url else 2):
        return []
    host, port = _master_address(master_ip, master_port, dist_url)
    return _torchrun_variables(size, host, port)


def _default_size() -> int:
    """Return a rank for each GPU, or two on a machine without one."""
    import torch

    return torch.cuda.device_count() or 2


def _torchrun_variables(size: int, host: str | None, port: int | None) -> list[dict[str, str]]:
    """Return torchrun's variables for each of ``size`` ranks on this machine."""
    host = host or "127.0.0.1"
    if not port:
        address, _ = listening_address(host)
        port = free_port(address=address)
    group = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    return [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


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

    found = torch.cuda.device_count()
    if found == len(ids.split(",")):
        return
    remedy = "give others, or leave the flag out"
    if found == 0:
        remedy += " to train on the CPU"
    raise UserError(
        f"--gpu-ids: got {ids}, but only {found} of these GPUs can be used on this machine: "
        f"{remedy}"
    )
