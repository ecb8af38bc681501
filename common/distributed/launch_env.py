"""Which rank this process is, of how many, and where the ranks meet: from the flags and from launchers' environment variables.

``choose_gpus`` limits the GPUs that this process sees. ``processes_to_start`` decides whether this process starts the ranks
(``launcher_command``) or is one itself; then ``resolve_launch`` joins flags and environment. ``launch_from_environment`` serves
callers without flags. torch is imported only inside functions, after the GPUs are chosen.
"""

import contextlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from common.errors import UserError
from common.utils.environment import DEFAULT_MASTER_PORT


@dataclass(frozen=True)
class LaunchSpec:
    """How this process joins the group.

    ``size`` is 1 and ``master_ip`` None for a process without a group; ``local_rank`` and ``local_size`` are None until the
    rendezvous finds them. The rest is set under torchrun alone: ``largest_size`` of the job, the number of ``restarts``
    allowed, ``agent`` (a name of the process that restarts this node's workers), and ``stale_addresses``: whether restarted
    workers would read old addresses under Gloo.
    """

    rank: int = 0
    size: int = 1
    master_ip: str | None = None
    master_port: int = DEFAULT_MASTER_PORT
    local_rank: int | None = None
    local_size: int | None = None
    torchrun: bool = False
    largest_size: int | None = None
    restarts: int = 0
    agent: str | None = None
    stale_addresses: bool = False


@dataclass(frozen=True)
class LaunchFlags:
    """The flags that say which rank this process is and where the ranks meet; None where a flag is not given."""

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
    """Join flags and torchrun's environment; None where neither says anything. UserError on a contradiction."""
    master_ip, master_port = _master_address(flags)
    if {"RANK", "WORLD_SIZE"} <= environment.keys():
        return _from_environment(flags, environment, master_ip, master_port)
    given = {
        name: value
        for name, value in (
            ("--dist-url" if flags.dist_url else "--master-ip", master_ip),
            ("--num-nodes", flags.num_nodes),
            ("--rank", flags.rank),
        )
        if value is not None
    }
    if not given:
        return None
    missing = [
        name
        for name in ("--master-ip", "--num-nodes", "--rank")
        if name not in given and not (name == "--master-ip" and flags.dist_url)
    ]
    if missing:
        raise UserError(
            f"{', '.join(given)} given without {' and '.join(missing)}: give --master-ip, --num-nodes and "
            "--rank together, for example --master-ip 10.0.0.1 --num-nodes 4 --rank 0; or --distributed "
            "--world-size 4 for all ranks on this machine"
        )
    assert flags.rank is not None  # else it is in ``missing``
    assert flags.num_nodes is not None
    return LaunchSpec(flags.rank, flags.num_nodes, master_ip, master_port or DEFAULT_MASTER_PORT)


def launch_from_environment(rank: int, world_size: int) -> LaunchSpec:
    """Return the LaunchSpec of a rank that a caller has numbered; the ranks meet at MASTER_ADDR:MASTER_PORT (default
    127.0.0.1:29500)."""
    local = {
        name: int(os.environ[name])
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if name in os.environ
    }
    numbers = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    torchrun = numbers == (str(rank), str(world_size)) and len(local) == 2
    return LaunchSpec(
        rank,
        world_size,
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(os.environ.get("MASTER_PORT", DEFAULT_MASTER_PORT)),
        local["LOCAL_RANK"] if torchrun else None,
        local["LOCAL_WORLD_SIZE"] if torchrun else None,
        torchrun,
    )


def _master_address(flags: LaunchFlags) -> tuple[str | None, int | None]:
    """Return the address and port of rank 0's node, from --master-ip and --master-port or from --dist-url."""
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
    for name, flag, other in (
        ("address", flags.master_ip, host),
        ("port", flags.master_port, port),
    ):
        if flag is not None and flag != other:
            raise UserError(
                f"--dist-url {flags.dist_url} and --master-{'ip' if name == 'address' else 'port'} {flag} give "
                f"different {name}{'es' if name == 'address' else 's'}: give one of them"
            )
    return host, port


def _from_environment(
    flags: LaunchFlags,
    environment: Mapping[str, str],
    master_ip: str | None,
    master_port: int | None,
) -> LaunchSpec:
    def number(name: str, default: str | None = None) -> int:
        text = environment.get(name, default)
        if text is None or not text.isdecimal():
            raise UserError(
                f"the environment has RANK and WORLD_SIZE, as torchrun sets them, but {name}={text!r}: "
                "start with torchrun, or unset RANK and WORLD_SIZE"
            )
        return int(text)

    size, local_size = number("WORLD_SIZE"), number("LOCAL_WORLD_SIZE", "1")
    address = environment.get("MASTER_ADDR", "127.0.0.1")
    agent = "TORCHELASTIC_RUN_ID" in environment
    launch = LaunchSpec(
        number("RANK"),
        size,
        address,
        number("MASTER_PORT", str(DEFAULT_MASTER_PORT)),
        number("LOCAL_RANK", "0"),
        local_size,
        torchrun=True,
        largest_size=max(size, _largest_size(environment, local_size)) if agent else size,
        restarts=number("TORCHELASTIC_MAX_RESTARTS", "0"),
        agent=_agent() if agent else None,
        stale_addresses=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    if launch.rank >= launch.size:
        raise UserError(
            f"the environment has RANK={launch.rank} of WORLD_SIZE={launch.size}; ranks count from 0: start "
            "with torchrun, or unset RANK and WORLD_SIZE"
        )
    if not 1 <= launch.master_port <= 65535:
        raise UserError(
            f"the environment has MASTER_PORT={launch.master_port}: give one from 1 to 65535"
        )
    port_flag, address_flag = (
        ("--dist-url", "--dist-url") if flags.dist_url else ("--master-port", "--master-ip")
    )
    for flag, got, name, wanted in (
        ("--rank", flags.rank, "RANK", launch.rank),
        ("--num-nodes", flags.num_nodes, "WORLD_SIZE", launch.size),
        ("--local-rank", flags.local_rank, "LOCAL_RANK", launch.local_rank),
        (port_flag, master_port, "MASTER_PORT", launch.master_port),
    ):
        if got is not None and got != wanted:
            raise UserError(
                f"{flag} {got} contradicts torchrun's {name}={wanted}: leave the flag out under torchrun"
            )
    if master_ip is not None and _addresses(master_ip).isdisjoint(_addresses(address)):
        raise UserError(
            f"{address_flag} {master_ip} contradicts torchrun's MASTER_ADDR={address}: leave "
            "the flag out under torchrun"
        )
    return launch


def _addresses(host: str) -> set[str]:
    try:
        return {host, *(str(entry[4][0]) for entry in socket.getaddrinfo(host, None))}
    except OSError:
        return {host}


def _largest_size(environment: Mapping[str, str], local_size: int) -> int:
    """Return the largest number of ranks that torchrun may start; 0 where it is unknown.

    Workers get only the present number; the maximum is in torchrun's command line (or PET_NNODES), ``--nnodes MIN:MAX``.
    """
    command = ""
    with contextlib.suppress(psutil.Error):
        command = " ".join(psutil.Process(os.getppid()).cmdline())
    found = re.search(r"--nnodes[= ](?:\d+:)?(\d+)", command)
    found = found or re.fullmatch(r"(?:\d+:)?(\d+)", environment.get("PET_NNODES", ""))
    return int(found[1]) * local_size if found else 0


def _agent() -> str:
    """Return a name of the process that started this one, which no other process will ever have."""
    parent = os.getppid()
    with contextlib.suppress(psutil.Error):
        return f"{socket.gethostname()}-{parent}-{psutil.Process(parent).create_time():.2f}"
    return f"{socket.gethostname()}-{parent}"


def processes_to_start(flags: LaunchFlags, environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks this process must start on this machine, by --distributed or by several --gpu-ids; 0 where it
    is a rank itself."""
    if {"RANK", "WORLD_SIZE"} <= environment.keys() or flags.rank is not None:
        if flags.distributed and flags.rank is not None:
            raise UserError(
                "--distributed starts all ranks here, --rank is one of them: give one of the two"
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


def launcher_command(flags: LaunchFlags, processes: int, command: Sequence[str]) -> list[str]:
    """Return the command of torchrun that starts ``processes`` ranks of ``command`` (file and arguments) here."""
    host, port = _master_address(flags)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = port or probe.getsockname()[1]
    arguments = [argument for argument in command if argument != "--distributed"]
    return [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
        "--master-addr",
        host or "127.0.0.1",
        "--master-port",
        str(port),
        *arguments,
    ]


def choose_gpus(ids: str | None) -> None:
    """Let this process see only these GPUs, as numbered by the machine. UserError where one is missing."""
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
            f"--gpu-ids: got {ids}, but only {found} of these GPUs can be used on this machine: give others, or "
            "leave the flag out" + ("" if found else " to train on the CPU")
        )
