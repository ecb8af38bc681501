"""How ``lab launch`` handles hosts, commands and refusals, tested without a host."""

from dataclasses import replace

import pytest

from common.errors import UserError
from lab.cli import build_parser
from lab.ssh.command import read_command
from lab.ssh.hosts import (
    Host,
    SSHOptions,
    explain,
    parse_hosts,
    refuse_hosts,
    share_hosts,
    ssh_command,
)
from lab.ssh.node import HostFacts
from lab.ssh.questions import refuse_differences

FACTS = HostFacts(
    folder="/lab",
    script_there=True,
    python="/lab/.venv/bin/python",
    code={"Python": "3.11", "torch": "2.15.0", "common/a.py": "1"},
    name="a",
    addresses=["10.0.0.1"],
    clock=0.0,
)


def filled(command, *, rank=1, nodes=3, port=None):
    read = read_command(command.split(), nodes=nodes, port=port)
    return " ".join(read.fill(master="10.0.0.1", nodes=nodes, rank=rank, python="PY"))


PLACE = "--master-ip 10.0.0.1 --num-nodes 3 --rank 1"
TORCHRUN = "-m torch.distributed.run"


@pytest.mark.parametrize(
    ("command", "there"),
    [
        ("python PartTwo/main.py --sync ring", f"PY PartTwo/main.py --sync ring {PLACE}"),
        ("python3 -u ./PartThree/main.py", f"PY -u ./PartThree/main.py {PLACE}"),
        (
            "torchrun --nproc-per-node 2 PartThree/main.py --rank-like 1",
            f"PY -P {TORCHRUN} --nnodes=3 --node-rank=1 --master-addr=10.0.0.1 --master-port=29500 "
            "--nproc-per-node 2 PartThree/main.py --rank-like 1",
        ),
        (
            f"python {TORCHRUN} --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint a:1 a.py -R 9",
            f"PY {TORCHRUN} --node-rank=1 --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint a:1 "
            "a.py -R 9",
        ),
        (
            "/opt/torchrun --master_port=7 a.py",
            "/opt/torchrun --nnodes=3 --node-rank=1 --master-addr=10.0.0.1 --master_port=7 a.py",
        ),
        ("python PartTwo/main.py -M {master} -R {rank}", "PY PartTwo/main.py -M 10.0.0.1 -R 1"),
        ("hostname -I", "hostname -I"),
        ("./train {master}:{port} {nodes}", "./train 10.0.0.1:29500 3"),
    ],
)
def test_each_host_gets_its_place_as_the_command_takes_it(command, there):
    assert filled(command) == there


def test_torchrun_is_recognised_in_a_folder_with_a_blank():
    for start in (["/my lab/torchrun"], ["/my lab/python3", "-m", "torch.distributed.run"]):
        read = read_command([*start, "PartThree/main.py"], nodes=2, port=None)
        assert [*read.words[: len(start)], read.words[-1]] == [*start, "PartThree/main.py"]
        assert "--node-rank={rank}" in read.words


def test_a_port_that_is_given_goes_to_the_parts():
    assert filled("python PartTwo/main.py", port=29600).endswith("--rank 1 --master-port 29600")
    assert filled("echo {port}", port=29600) == "echo 29600"
    assert "--master-port=29600" in filled("torchrun a.py", port=29600)
    assert read_command(["torchrun", "--master_port=7", "a.py"], nodes=2, port=None).port == 7
    # PartOne has no such flags.
    assert filled("python PartOne/main.py", nodes=1, rank=0) == "PY PartOne/main.py"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "no command: add it after --, for example lab launch"),
        ("python PartTwo/main.py --num-nodes 4", "--num-nodes in .* gives each host its own place"),
        ("python PartTwo/main.py -R 1", "-R in the command: lab launch gives each host its"),
        (
            "python PartTwo/main.py --master_ip=1.2.3.4",
            "--master-ip in the command: .*give --master-ip and .* to lab launch, before",
        ),
        ("python PartTwo/main.py --distributed", "--distributed in .*-- torchrun --nproc-per-node"),
        ("torchrun --nnodes 2 PartTwo/main.py", "--nnodes 2 in the command, but --hosts names 3"),
        ("torchrun --node-rank 0 PartTwo/main.py", "--node-rank in the command: .*remove it"),
        ("torchrun --standalone PartTwo/main.py", "--standalone in .*it is for one machine"),
        ("python PartOne/main.py", "PartOne trains in one process, but --hosts names 3"),
        ("echo {ranks}", r"\{ranks\} in the command: choose from"),
    ],
)
def test_a_command_that_contradicts_the_hosts_is_refused(command, message):
    with pytest.raises(UserError, match=message):
        read_command(command.split(), nodes=3, port=None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a host name"),
        ("a,,b", "got 'a,,b', and '' is not a host name"),
        ("a,b,", "'' is not a host name"),
        ("a,b,a", "a is named twice.*give --master-port.*torchrun"),
        ("-oProxyCommand=x", "is not a host name"),
        ("a b", "'a b' is not a host name"),
    ],
)
def test_hosts_that_cannot_be(text, message):
    with pytest.raises(UserError, match=message):
        parse_hosts(text, shares_a_port=False)


def test_several_ranks_on_a_host_are_refused_where_the_command_places_its_ranks_itself():
    for command, message in (
        ("torchrun a.py", "--ranks-per-node 2: torchrun .* --nproc-per-node 2"),
        ("python PartOne/main.py", "one process, but --ranks-per-node is 2"),
    ):
        with pytest.raises(UserError, match=message):
            read_command(command.split(), nodes=2, port=None, ranks_per_node=2)
    with pytest.raises(UserError, match="--ranks-per-node: got 0, give at least 1"):
        share_hosts(parse_hosts("a", shares_a_port=False), 0)


def test_hosts_are_named_without_user_and_port_and_may_share_a_port():
    hosts = parse_hosts("n, u@10.0.0.1, ssh://u@a.b:2222, ssh://n, n", shares_a_port=True)
    assert [host.name for host in hosts] == ["n", "10.0.0.1", "a.b", "n", "n"]
    assert str(hosts[2]) == "node 2 (a.b)"


def test_the_command_of_ssh_never_asks_and_takes_what_the_user_says_first():
    given = ["Port=22", "ConnectTimeout=3"]
    options = SSHOptions(user="u", ssh_config="conf", ssh_options=given, workdir="a b")
    words = ssh_command(Host(0, "node0"), options)
    # Of options that stand twice ssh takes the first.
    assert " ".join(words).startswith("ssh -T -F conf -o Port=22 -o ConnectTimeout=3 -o ")
    assert {"BatchMode=yes", "ServerAliveInterval=10"} <= set(words)
    assert words[-5:-1] == ["-l", "u", "--", "node0"]
    assert words[-1].endswith(" 'a b'")
    assert "-l" not in ssh_command(Host(0, "v@node0"), options), "user@host wins"


@pytest.mark.parametrize(
    ("given", "folder"), [("~/lab", "lab"), ("~", "."), ("/a/b", "/a/b"), ("lab", "lab")]
)
def test_a_folder_on_the_hosts_is_relative_to_the_home_folder(given, folder):
    args = build_parser().parse_args(["collect", "--workdir", given])
    assert SSHOptions.of(args).workdir == folder


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "ssh: Could not resolve hostname n: Name or service not known",
            "unknown host (ssh: Could not resolve hostname n: Name or service not known): check "
            "the name, or give it an address in ~/.ssh/config or /etc/hosts",
        ),
        ("ssh: connect to host n port 22: Connection refused", "it refuses connections on ssh's"),
        ("ssh: connect to host n port 22: No route to host", "no answer (ssh: connect to host n "),
        ("Connection timed out during banner exchange", "no answer (ssh: Connection timed out "),
        (
            "u@n: Permission denied (publickey,password).",
            "it refuses your ssh key (ssh: u@n: Permission denied (publickey,password).): copy "
            "your key there: ssh-copy-id u@n",
        ),
        (
            "@@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key "
            "verification failed.",
            "its host key has changed: if the host was reinstalled: ssh-keygen -R n, then",
        ),
        (
            "No ED25519 host key is known for n and you have requested strict checking.\nHost key "
            "verification failed.",
            "its host key is unknown here",
        ),
        ("sh: 1: exec: python3: not found", "no Python there that runs the project"),
        ("/usr/bin/python3: No module named lab", "the folder has no checkout of this version"),
        ("sh: 1: cd: can't cd to /lab", "there is no folder of the project"),
        ("kex_exchange_identification: Connection closed by remote host", "it closed the connec"),
        ("Welcome to n\nThis account is not available.", "ssh: This account is not available."),
        ("Warning: Permanently added 'n' to known hosts.", "ssh ended without a message: try "),
    ],
)
def test_what_ssh_says_becomes_what_to_do(said, told):
    assert explain(said.splitlines(), Host(0, "u@n")).startswith(told)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"script_there": False}, "/lab has no PartTwo/main.py"),
        ({"code": {"torch": "2.14.0"}}, "its code differs from node 0 (a): torch 2.14.0: check"),
        ({"code": {"Python": "3.12"}}, "its code differs from node 0 (a): Python 3.12: check out"),
        ({"code": {"common/a.py": "2"}}, "its code differs from node 0 (a): common/a.py: check"),
        ({"code": {"common/b.py": "1"}}, "its code differs from node 0 (a): common/b.py: check"),
        ({"addresses": ["10.0.0.1"]}, "the same machine as node 0 (a), so two ranks would share"),
        ({}, None),
    ],
)
def test_what_differs_on_one_host_is_told_of_that_host(change, told):
    code = FACTS.code | change.get("code", {})
    other = {"addresses": ["10.0.0.2"]} | change | {"code": code}
    facts = [FACTS, replace(FACTS, **other)]
    hosts = [Host(0, "a"), Host(1, "b")]

    def compare(command, **how):
        read = read_command(command.split(), nodes=2, port=None)
        refuse_differences(hosts, facts, read, **how)

    if told is None:
        compare("python PartTwo/main.py", shares_a_port=False)
    else:
        with pytest.raises(UserError) as caught:
            compare("python PartTwo/main.py", shares_a_port=False)
        assert str(caught.value).splitlines()[1].startswith(f"  node 1 (b): {told}")
        if "script_there" not in change:  # any other command may run anywhere, also twice there
            compare("nvidia-smi", shares_a_port=True)


def test_of_many_hosts_that_fail_some_are_named():
    with pytest.raises(UserError) as caught:
        refuse_hosts({Host(rank, f"h{rank}"): "no answer" for rank in range(400)}, of=1000)
    lines = str(caught.value).splitlines()
    assert lines[0] == "400 of 1,000 hosts cannot take part; nothing was started"
    assert (len(lines), lines[-1]) == (18, "  and 384 more")
