"""How ``lab launch`` handles hosts, commands and refusals, tested without a host."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import UserError
from lab.ssh import remote_agent, remote_handlers
from lab.ssh.command import NodeCommands
from lab.ssh.hosts import Host, SSHOptions, parse_hosts, program, remote_folder, ssh_command
from lab.ssh.probe import problems_of, refuse
from lab.ssh.refusals import explain

FACTS = {
    "folder": "/lab",
    "folder_there": True,
    "script_there": True,
    "python": "/lab/.venv/bin/python",
    "version": "3.11.7",
    "torch": "2.15.0",
    "code": {"common/a.py": "1"},
    "name": "a",
    "addresses": ["10.0.0.1"],
    "clock": 1.0,
}


def filled(command, *, rank=1, nodes=3, port=None):
    return " ".join(
        NodeCommands.of(command.split(), nodes=nodes, port=port).fill(
            master="10.0.0.1", rank=rank, python="PY"
        )
    )


@pytest.mark.parametrize(
    ("command", "there"),
    [
        (
            "python PartTwo/main.py --sync ring",
            "PY PartTwo/main.py --sync ring --master-ip 10.0.0.1 --num-nodes 3 --rank 1",
        ),
        (
            "python3 -u ./PartThree/main.py",
            "PY -u ./PartThree/main.py --master-ip 10.0.0.1 --num-nodes 3 --rank 1",
        ),
        (
            "torchrun --nproc-per-node 2 PartThree/main.py --rank-like 1",
            "PY -m torch.distributed.run --nnodes=3 --node-rank=1 --master-addr=10.0.0.1 "
            "--master-port=29500 --nproc-per-node 2 PartThree/main.py --rank-like 1",
        ),
        (
            "python -m torch.distributed.run --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint a:1 "
            "train.py --nnodes 9",
            "PY -m torch.distributed.run --node-rank=1 --nnodes 2:4 --rdzv-backend c10d "
            "--rdzv-endpoint a:1 train.py --nnodes 9",
        ),
        (
            "/opt/torchrun --master_port=7 train.py",
            "/opt/torchrun --nnodes=3 --node-rank=1 --master-addr=10.0.0.1 --master_port=7 "
            "train.py",
        ),
        (
            "python PartTwo/main.py -M {master} -N {nodes} --rank {rank}",
            "PY PartTwo/main.py -M 10.0.0.1 -N 3 --rank 1",
        ),
        ("hostname -I", "hostname -I"),
        ("./train {master}:{port}", "./train 10.0.0.1:29500"),
    ],
)
def test_each_host_gets_its_place_as_the_command_takes_it(command, there):
    assert filled(command) == there


def test_a_port_that_is_given_goes_to_the_parts():
    assert filled("python PartTwo/main.py", port=29600).endswith("--rank 1 --master-port 29600")
    assert filled("echo {port}", port=29600) == "echo 29600"
    assert "--master-port=29600" in filled("torchrun a.py", port=29600)
    assert (
        NodeCommands.of(["torchrun", "--master_port=7", "a.py"], nodes=2, port=None).master_port
        == 7
    )
    assert filled("python PartOne/main.py", nodes=1, rank=0) == "PY PartOne/main.py", (
        "PartOne has no such flags"
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "no command: add it after --, for example lab launch"),
        (
            "python PartTwo/main.py --num-nodes 4",
            "--num-nodes in the command: lab launch gives each host its",
        ),
        ("python PartTwo/main.py -R 1", "-R in the command: lab launch gives each host its"),
        (
            "python PartTwo/main.py --master_ip=1.2.3.4",
            "--master_ip in the command: .*give --master-ip and .* to lab launch, before",
        ),
        (
            "python PartTwo/main.py --distributed",
            "--distributed in the command: .*-- torchrun --nproc-per-node 2",
        ),
        ("torchrun --nnodes 2 PartTwo/main.py", "--nnodes 2 in the command, but --hosts names 3"),
        ("torchrun --node-rank 0 PartTwo/main.py", "--node-rank 0 in the command: remove it"),
        ("torchrun --standalone PartTwo/main.py", "--standalone is for one machine"),
        ("python PartOne/main.py", "PartOne trains in one process, but --hosts names 3"),
        ("echo {ranks}", r"\{ranks\} in the command: choose from"),
    ],
)
def test_a_command_that_contradicts_the_hosts_is_refused(command, message):
    with pytest.raises(UserError, match=message):
        NodeCommands.of(command.split(), nodes=3, port=None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--hosts is empty"),
        ("a,,b", "'a,,b', which has an empty name"),
        ("a,b,", "which has an empty name"),
        ("a,b,a", "a is named twice.*give --master-port.*torchrun"),
        ("-oProxyCommand=x", "is not a host name"),
        ("a b", "'a b' is not a host name"),
    ],
)
def test_hosts_that_cannot_be(text, message):
    with pytest.raises(UserError, match=message):
        parse_hosts(text, shares_a_port=False)


def test_the_same_host_twice_where_the_port_is_given():
    assert [host.rank for host in parse_hosts("a,a", shares_a_port=True)] == [0, 1]


@pytest.mark.parametrize(
    ("given", "name"),
    [("node0", "node0"), ("u@10.0.0.1", "10.0.0.1"), ("ssh://u@a.b:2222", "a.b"), ("ssh://a", "a")],
)
def test_a_hosts_name_is_without_user_and_port(given, name):
    assert str(Host(2, given)) == f"node 2 ({name})"


def test_the_command_of_ssh_never_asks_and_takes_what_the_user_says_first():
    options = SSHOptions(
        "lab",
        user="u",
        config=Path("conf"),
        options=("Port=22", "ConnectTimeout=3"),
        silence_seconds=30,
    )
    words = ssh_command(Host(0, "node0"), options)
    assert words[:4] == ["ssh", "-T", "-F", "conf"]
    assert words[4:8] == ["-o", "Port=22", "-o", "ConnectTimeout=3"], (
        "of options that stand twice ssh takes the first"
    )
    assert {"BatchMode=yes", "ServerAliveInterval=10"} <= set(words)
    assert words[-5:-1] == ["-l", "u", "--", "node0"]
    assert "\n" not in words[-1]
    assert "-l" not in ssh_command(Host(0, "v@node0"), options), "user@host wins"
    assert [remote_folder(one) for one in ("~/lab", "~", "/a/b", "lab")] == [
        "lab",
        ".",
        "/a/b",
        "lab",
    ]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "ssh: Could not resolve hostname n: Name or service not known",
            "unknown host (ssh: Could not resolve hostname n: Name or "
            "service not known): check the name, or give it an address in ~/.ssh/config or "
            "/etc/hosts",
        ),
        (
            "ssh: connect to host n port 22: Connection refused",
            "it refuses connections on ssh's port",
        ),
        (
            "ssh: connect to host n port 22: No route to host",
            "no answer (ssh: connect to host n port 22: No route to host)",
        ),
        (
            "Connection timed out during banner exchange",
            "no answer (ssh: Connection timed out during banner exchange)",
        ),
        (
            "u@n: Permission denied (publickey,password).",
            "it refuses your ssh key (ssh: u@n: Permission denied (publickey,password).): "
            "copy your key there: ssh-copy-id u@n",
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
        ("sh: 1: exec: python3: not found", "no Python there"),
        (
            "kex_exchange_identification: Connection closed by remote host",
            "it closed the connection before the login",
        ),
        (
            "Welcome to n\nThis account is currently not available.",
            "ssh: This account is currently not available.",
        ),
        (
            "Warning: Permanently added 'n' (ED25519) to the list of known hosts.",
            "ssh ended without a message: try ssh u@n",
        ),
    ],
)
def test_what_ssh_says_becomes_what_to_do(said, told):
    assert explain(said.splitlines(), name="n", given="u@n").startswith(told)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"folder_there": False}, "there is no folder /lab: clone the project there"),
        ({"script_there": False}, "/lab has no PartTwo/main.py"),
        ({"torch": None}, "/lab/.venv/bin/python has no torch: run make setup in /lab"),
        ({"torch": "2.14.0+cu126"}, "torch 2.14.0+cu126, but node 0 (a) has 2.15.0"),
        ({"version": "3.12.1"}, "Python 3.12.1 (/lab/.venv/bin/python), but node 0 (a) has 3.11.7"),
        (
            {"version": "3.9.2", "torch": None},
            "/lab/.venv/bin/python is Python 3.9.2, and this project needs 3.11",
        ),
        (
            {"code": {"common/a.py": "2"}},
            "its code differs from node 0 (a): common/a.py: check out the same commit",
        ),
        (
            {"code": {"common/a.py": "1", "common/b.py": "1"}},
            "its code differs from node 0 (a): common/b.py",
        ),
        ({"code": None}, "its code differs from node 0 (a): common/a.py"),
        (
            {"addresses": ["10.0.0.1"]},
            "the same machine as node 0 (a), so two ranks would share it",
        ),
        ({"torch": "2.15.0+cpu", "version": "3.11.2"}, None),
    ],
)
def test_what_differs_on_one_host_is_told_of_that_host(change, told):
    hosts = [Host(0, "a"), Host(1, "b")]
    commands = NodeCommands.of(["python", "PartTwo/main.py"], nodes=2, port=None)
    facts = [FACTS, FACTS | {"addresses": ["10.0.0.2"]} | change]
    problems = problems_of(hosts, facts, commands, shares_a_port=False)
    assert list(problems) == ([] if told is None else [hosts[1]])
    assert told is None or problems[hosts[1]].startswith(told)


def test_any_other_command_asks_for_the_folder_alone():
    hosts = [Host(0, "a"), Host(1, "b")]
    other = {"torch": None, "version": "3.6.1", "code": None, "addresses": ["10.0.0.2"]}
    commands = NodeCommands.of(["nvidia-smi"], nodes=2, port=None)
    assert not problems_of(hosts, [FACTS, FACTS | other], commands, shares_a_port=False)
    assert not problems_of(hosts, [FACTS, FACTS], replace(commands, part=None), shares_a_port=True)


def test_of_many_hosts_that_fail_some_are_named():
    with pytest.raises(UserError) as caught:
        refuse({Host(rank, f"h{rank}"): "no answer" for rank in range(400)}, of=1000)
    lines = str(caught.value).splitlines()
    assert lines[0] == "400 of 1000 hosts cannot take part; nothing was started"
    assert (len(lines), lines[-1]) == (18, "  and 384 more")


@pytest.mark.parametrize("module", [remote_agent, remote_handlers])
def test_what_runs_on_a_host_is_python_3_6(module):
    """A host with an old Python must be able to report its version.

    Annotations count too: Python evaluates them unless they are quoted.
    """
    text = Path(module.__file__).read_text(encoding="utf-8")
    tree = ast.parse(text, feature_version=(3, 6))
    arguments = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg)]
    returns = [node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    variables = [node.annotation for node in tree.body if isinstance(node, ast.AnnAssign)]
    plain = (ast.Constant, ast.Name, ast.Attribute, type(None))
    for annotation in (*arguments, *returns, *variables):
        assert isinstance(annotation, plain), ast.unparse(annotation)


def test_the_text_for_a_host_has_each_name_once():
    """Both files share one namespace on the host."""
    body = ast.parse(program("token", 30.0).split(b"\n", 1)[1]).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert len(names) == len(set(names)) >= 20
