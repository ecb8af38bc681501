"""How a process finds its rank, the world size and rank 0: from flags, from torchrun, or not.

Also which command lines start the ranks themselves, with which variables. Nothing here needs torch
but the number of GPUs.
"""

import os
import socket
from unittest import mock

import pytest
import torch

from common.config.parser import parse_arguments
from common.distributed.launch_env import LaunchSpec, ranks_to_start, resolve_launch
from common.errors import UserError

FLAGS = ("rank", "world_size", "master_ip", "master_port", "dist_url")
THREE = "-M 10.0.0.1 -N 2 -R 0"
URL = "--dist-url tcp://10.0.0.1:23456"


def settings(words, *more):
    config = parse_arguments("PartThree", "", ("ddp", "fsdp"), words.split())
    return {name: getattr(config, name) for name in (*FLAGS, *more)}


def place(words, environment=None):
    return resolve_launch(**settings(words, "local_rank"), environment=environment or {})


def to_start(words, environment=None):
    with mock.patch.dict(os.environ, environment or {}):
        return ranks_to_start(**settings(words, "distributed", "gpu_ids"))


def torchrun(rank, size, port=4000):
    """Return what torchrun and ``torch.distributed.launch`` set, with all ranks on one machine."""
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    values = ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in values.items()}


RANK_1_OF_3 = LaunchSpec(1, 3, "127.0.0.1", 4000, 1, 3, largest_size=3)


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        ("--master-port 4000", {}, None),
        ("", {"WORLD_SIZE": "3"}, None),  # left by a scheduler
        (THREE, {"WORLD_SIZE": "7"}, LaunchSpec(0, 2, "10.0.0.1", 29500)),
        ("-N 4 -R 3 -M h --master-port 1234", {}, LaunchSpec(3, 4, "h", 1234)),
        (f"-N 4 -R 2 {URL}", {}, LaunchSpec(2, 4, "10.0.0.1", 23456)),
        (f"{THREE} {URL} --master-port 23456", {}, LaunchSpec(0, 2, "10.0.0.1", 23456)),
        ("--dist-url env://", torchrun(1, 3), RANK_1_OF_3),
        # flags that repeat what torchrun says, also by another name of the host
        ("-N 3 -R 1 -M localhost --master-port 4000 --distributed", torchrun(1, 3), RANK_1_OF_3),
        # torch.distributed.launch adds it to its processes
        ("--local_rank=1", torchrun(1, 3), RANK_1_OF_3),
    ],
)
def test_the_place_of_a_rank(words, environment, expected):
    assert place(words, environment) == expected


@pytest.mark.parametrize(
    ("words", "environment", "named"),
    [
        ("-R 0", torchrun(1, 3), ("--rank 0", "RANK=1")),
        ("-N 2", torchrun(1, 3), ("--num-nodes 2", "WORLD_SIZE=3")),
        ("--local-rank 0", torchrun(1, 2), ("--local-rank 0", "LOCAL_RANK=1")),
        ("-M 10.9.9.9", torchrun(1, 3), ("--master-ip 10.9.9.9", "MASTER_ADDR=127.0.0.1")),
        ("--master-port 5000", torchrun(1, 3), ("--master-port 5000", "MASTER_PORT=4000")),
        ("--dist-url tcp://127.0.0.1:40", torchrun(1, 3), ("--dist-url 40", "MASTER_PORT=4000")),
        ("--dist-url tcp://10.9.9.9:4000", torchrun(1, 3), ("--dist-url 10.9.9.9", "MASTER_ADDR")),
        ("--distributed --world-size 4", torchrun(1, 2), ("4", "WORLD_SIZE=2")),
        ("--distributed --rank 0", {}, ("--distributed", "--rank")),
        (f"--distributed {THREE}", {}, ("--distributed", "--rank")),
        ("--distributed -N 4 -M 10.0.0.1", {}, ("--distributed", "leave --master-ip out")),
        (f"{URL} --master-ip 10.0.0.2 -R 0 -N 2", {}, ("10.0.0.1", "--master-ip 10.0.0.2")),
        (f"{URL} --master-port 5000 -R 0 -N 2", {}, ("23456", "--master-port 5000")),
        # only some of the three
        ("-M h", {}, ("--master-ip given", "--num-nodes and --rank:")),
        ("-N 2 -R 0", {}, ("--num-nodes and --rank given", "without --master-ip:")),
        ("-M h -R 0", {}, ("--master-ip and --rank given", "without --num-nodes:")),
        (URL, {}, ("--dist-url given", "without --num-nodes and --rank:")),
        (f"{URL} -R 0", {}, ("--dist-url and --rank given", "without --num-nodes:")),
    ],
)
def test_contradictions_and_missing_flags_are_named(words, environment, named):
    with pytest.raises(UserError) as error:  # in the order of main()
        assert to_start(words, environment) or place(words, environment)
    assert all(name in str(error.value) for name in named), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    "127.0.0.1:23456 tcp://127.0.0.1 tcp://:23456 tcp://h:99999 tcp://h:0 tcp://h:port "
    "http://h:23456 tcp://h:23456/x tcp://[h:1".split(),
)
def test_a_dist_url_that_is_none_is_an_error(url):
    with pytest.raises(UserError, match="give tcp://ADDRESS:PORT") as error:
        place(f"--dist-url {url} --rank 0 --world-size 2")
    assert url in str(error.value)


# --- commands that start their ranks ---


@pytest.mark.parametrize(
    ("words", "gpus", "processes"),
    [
        ("", 3, 0),
        (THREE, 3, 0),
        ("--distributed", 0, 2),
        ("--distributed", 1, 1),
        ("--distributed", 3, 3),
        ("--distributed --world-size 4", 0, 4),
        ("--distributed --gpu-ids 4,5,6,7", 0, 4),
        ("--gpu-ids 4,5,6,7 --world-size 2 --distributed", 0, 2),
        ("--gpu-ids 6,7", 0, 2),
        ("--gpu-ids 4", 0, 0),
        ("--gpu-ids 4 --dist-url tcp://127.0.0.1:23456", 0, 1),
    ],
)
def test_how_many_ranks_a_command_starts(words, gpus, processes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert len(to_start(words)) == processes
    assert to_start(words, torchrun(0, processes or 1)) == [], "a rank starts no others"


@pytest.mark.parametrize(
    ("words", "meeting"),
    [
        ("--gpu-ids 0,1 --dist-url tcp://127.0.0.1:23456", ("127.0.0.1", 23456)),
        ("--distributed --world-size 2", ("127.0.0.1", None)),
        ("--distributed --world-size 2 --dist-url tcp://10.0.0.9:4321", ("10.0.0.9", 4321)),
        ("--distributed --world-size 2 --master-port 4321", ("127.0.0.1", 4321)),
    ],
)
def test_ranks_that_a_command_starts_find_their_place(words, meeting):
    """Each rank gets its number, the world size and the address as torchrun would give them."""
    launches = [place(words, variables) for variables in to_start(words)]
    assert [(one.rank, one.local_rank) for one in launches if one] == [(0, 0), (1, 1)]
    for launch in launches:
        assert launch is not None
        assert (launch.world_size, launch.local_size, launch.master_ip) == (2, 2, meeting[0])
        assert launch.master_port == meeting[1] or (meeting[1] is None and launch.master_port > 0)
        assert launch.opens_store


def test_two_commands_at_once_meet_at_ports_of_their_own():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ports = {int(to_start("--distributed --world-size 2")[0]["MASTER_PORT"]) for _ in range(20)}
        assert taken.getsockname()[1] not in ports
    assert len(ports) > 1


@pytest.mark.parametrize(("stays", "differs"), [("False", "MASTER_PORT"), ("True", "restarts")])
def test_rounds_of_torchruns_workers_are_told_apart(stays, differs):
    """Also where one agent has replaced another, so that it has counted fewer restarts."""

    def generation(port, restarts):
        elastic = {"RUN_ID": "job", "RESTART_COUNT": restarts, "USE_AGENT_STORE": stays}
        elastic = {f"TORCHELASTIC_{name}": str(value) for name, value in elastic.items()}
        return place("", torchrun(0, 2, port) | elastic).generation

    first = generation(4000, 1)
    assert (generation(5000, 1) != first) == (differs == "MASTER_PORT")
    assert (generation(4000, 0) != first) == (differs == "restarts")
