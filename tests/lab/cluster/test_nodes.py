"""Nodes of an emulated cluster: addresses, links, programs and their ends, and training traffic.

The tests of forked programs and of training share one cluster, which imports torch once.
"""

import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from common.errors import UserError
from common.models import build_model
from common.sync import build_sync
from common.sync.message_cost import GradientSize
from common.utils.system import usable_cores
from lab.cluster import Cluster, cluster, tools
from lab.compare.cells import part_of
from tests.helpers import LONG, ROOT, wait_until
from tests.helpers.cluster import REFUSED, needs_namespaces, traffic

NODES = 3

MEET = """
import socket, sys, threading
own, others = sys.argv[1], sys.argv[2].split(",")
listener = socket.create_server((own, 4000))
def answer():
    for _ in others:
        connection, (address, _port) = listener.accept()
        connection.sendall(f"{own} to {address}".encode())
        connection.close()
thread = threading.Thread(target=answer)
thread.start()
for other in others:
    for _ in range(600):
        try:
            connection = socket.create_connection((other, 4000), timeout=5)
            break
        except ConnectionRefusedError:
            threading.Event().wait(0.1)
    print(connection.recv(100).decode(), flush=True)
thread.join()
"""
MOVE = """
import socket, sys, threading, time
rank, senders, nbytes = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if rank == 0:
    listener = socket.create_server(("10.9.0.1", 4000))
    connections = [listener.accept()[0] for _ in range(senders)]
    began = time.monotonic()
    for connection in connections:
        connection.sendall(b"go")
    def receive(connection):
        while connection.recv(65536):
            pass
    threads = [threading.Thread(target=receive, args=[connection]) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(time.monotonic() - began, flush=True)
else:
    for _ in range(600):
        try:
            connection = socket.create_connection(("10.9.0.1", 4000))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)  # between two looks
    connection.recv(2)
    connection.sendall(bytes(nbytes))
    connection.close()
"""
FACTS = """
import json, os, sys
from pathlib import Path
import torch
print(json.dumps({"name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0],
    "folder": os.getcwd(), "word": os.environ["WORD"], "threads": torch.get_num_threads(),
    "seed": torch.initial_seed(), "input": sys.stdin.read(),
    "executable": sys.executable, "scheduling": getattr(os, "sched_getscheduler", int)(0),
    "open": sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2)[1:]}))
sys.stderr.write("last words")
"""
# Two ranks on this node, which train the model of tests as a student starts them by hand.
TWO_RANKS = """
import os, runpy, sys
main, repository, node, *flags = sys.argv[1:]
sys.path.insert(0, repository)
import tests  # registers the models of tests
ranks = []
for local in range(2):
    if not (pid := os.fork()):
        sys.argv = [main, *flags, "--rank", str(2 * int(node) + local)]
        runpy.run_path(main, run_name="__main__")
        break
    ranks.append(pid)
else:
    sys.exit(any(os.waitpid(pid, 0)[1] for pid in ranks))
"""


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def run(cluster, *command, **how):
    """Run a command on nodes; return the exit statuses in the order of the ends."""
    cluster.start([*map(str, command)], **how)
    return [end.status for end in cluster.wait(limit_seconds=LONG)]


@needs_namespaces
def test_every_node_has_an_address_and_reaches_every_other(tmp_path):
    with Cluster(3, rate="1gbit", logs=tmp_path, fresh=True) as cluster:
        meet = script(tmp_path, MEET)
        for node in range(3):
            others = ",".join(f"node{other}" for other in range(3) if other != node)
            cluster.start([sys.executable, meet, cluster.address(node), others], ranks=[node])
        assert [end.status for end in cluster.wait(limit_seconds=LONG)] == [0, 0, 0]
        assert [cluster.address(node) for node in range(3)] == ["10.9.0.1", "10.9.0.2", "10.9.0.3"]
        assert cluster.output(2).splitlines() == ["10.9.0.1 to 10.9.0.3", "10.9.0.2 to 10.9.0.3"]
        assert (tmp_path / "node2.log").read_text() == cluster.output(2) + "\n"


@needs_namespaces
@pytest.mark.parametrize(
    ("senders", "nbytes"), [pytest.param(1, 4_000_000, marks=pytest.mark.slow), (2, 1_000_000)]
)
def test_links_are_limited_where_they_send_and_where_they_receive(tmp_path, senders, nbytes):
    """Two senders at full rate share the receiver's link, so its receiving end must be limited."""
    with Cluster(3, rate="20mbit", logs=tmp_path, fresh=True) as cluster:
        move = (sys.executable, script(tmp_path, MOVE), "{rank}", senders, nbytes)
        assert {*run(cluster, *move, ranks=range(senders + 1))} == {0}
        seconds = float(cluster.output(0))
        bursts = 2 * 128 * 1024 * 8 / 20e6
        assert seconds > senders * nbytes * 8 / 20e6 - bursts
        (_, received), (sent, answered), *_ = traffic(cluster)
        assert senders * nbytes < received < 1.1 * senders * nbytes
        assert nbytes < sent < 1.1 * nbytes
        assert answered < 0.1 * nbytes


@needs_namespaces
def test_messages_between_ranks_of_a_node_pass_no_link(tmp_path):
    """Ranks 1 and 2 send to rank 0, and rank 1 is on its node."""
    nbytes = 1_000_000
    with Cluster(2, ranks_per_node=2, rate="20mbit", logs=tmp_path, fresh=True) as cluster:
        move = (sys.executable, script(tmp_path, MOVE), "{rank}", 2, nbytes)
        assert run(cluster, *move, ranks=range(3)) == [0] * 3
        (answered, received), (sent, _) = traffic(cluster)
        assert nbytes < received < 1.1 * nbytes
        assert nbytes < sent < 1.1 * nbytes
        assert answered < 0.1 * nbytes
        ends = {"node0-rank0.log", "node0-rank1.log", "node1-rank2.log"}
        assert {path.name for path in tmp_path.glob("*.log")} == ends


@pytest.fixture(scope="module")
def forking(tmp_path_factory):
    """Start this module's one cluster that forks programs; without namespaces, on loopback."""
    with Cluster(
        NODES, logs=tmp_path_factory.mktemp("forking"), loopback=REFUSED is not None
    ) as cluster:
        yield cluster


def test_a_forked_program_finds_what_a_fresh_one_finds(tmp_path, forking):
    check_facts(forking, tmp_path)


@pytest.mark.slow
def test_on_loopback_too_a_forked_program_finds_what_a_fresh_one_finds(tmp_path):
    with Cluster(NODES, logs=tmp_path, loopback=True) as forking_there:
        check_facts(forking_there, tmp_path)


def check_facts(forking, folder):
    facts = script(folder, FACTS)

    def facts_of(cluster, nodes):
        logs = folder / f"logs{len(nodes)}"
        how = {"environment": {"WORD": "given"}, "cwd": folder, "ranks": nodes, "logs": logs}
        assert {*run(cluster, "python", facts, "{rank} of {nodes}", **how)} == {0}
        answers = [(logs / f"node{node}.log").read_text().splitlines() for node in nodes]
        assert [last for _, last in answers] == ["last words"] * len(nodes), (
            "what ends without a line's end is kept"
        )
        return [json.loads(answer) for answer, _ in answers]

    with Cluster(NODES, logs=folder, loopback=forking.loopback, fresh=True) as cluster:
        (fresh,) = facts_of(cluster, [1])
    other, forked = facts_of(forking, [0, 1])
    assert len({one.pop("seed") for one in (fresh, forked, other)}) == 3, (
        "chance is each node's own"
    )
    assert forked == fresh
    assert fresh["argv"] == [facts, f"1 of {NODES}"]
    assert fresh["word"] == "given"
    do_not_interrupt = sys.platform == "linux" and usable_cores() < NODES
    assert fresh["scheduling"] == (os.SCHED_BATCH if do_not_interrupt else 0)


@pytest.mark.parametrize(
    ("text", "status", "told"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit('no luck')", 1, "no luck"),
        (
            "def f():\n    raise ValueError('bad')\nf()",
            1,
            'Traceback (most recent call last):\n  File "{script}", line 3, in <module>\n    f()\n'
            '  File "{script}", line 2, in f\n'
            "    raise ValueError('bad')\nValueError: bad",
        ),
        ("import os; os.abort()", -6, None),
        ("import atexit; atexit.register(print, 'farewell')", 0, "farewell"),
        (
            "import threading, time; threading.Thread(target=lambda: (time.sleep(0.3), "
            "print('late'))).start()",
            0,
            "late",
        ),
    ],
)
def test_a_forked_program_ends_as_a_fresh_one_does(tmp_path, text, status, told, forking):
    path = script(tmp_path, text)
    assert run(forking, "python", path, ranks=[0], logs=tmp_path) == [status]
    if told is not None:
        printed = (tmp_path / "node0.log").read_text().strip()
        underlined = r"^ +[~^]+\n"  # Python 3.13 marks more lines of a traceback than 3.11
        assert re.sub(underlined, "", printed, flags=re.MULTILINE) == told.replace("{script}", path)


def test_modules_and_threads(tmp_path, forking):
    (tmp_path / "told.py").write_text("import sys\nprint(sys.argv[1:], __name__)\n")
    how = {"ranks": [0, 1], "cwd": tmp_path, "logs": tmp_path}
    assert run(forking, "python", "-m", "told", "{rank}", **how) == [0, 0]
    assert (tmp_path / "node1.log").read_text() == "['1'] __main__\n"


def test_a_program_elsewhere_has_its_own_modules(tmp_path, forking):
    """The forked interpreter's imported modules of the same name are not used."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "config.py").write_text("WHOSE = 'mine'\n")
    path = script(tmp_path, "from common.config import WHOSE\nprint(WHOSE)")
    assert run(forking, "python", path, ranks=[0], logs=tmp_path) == [0]
    assert (tmp_path / "node0.log").read_text() == "mine\n"


def test_who_joins_later_meets_at_the_same_port(tmp_path, forking):
    joined = tmp_path / "joined"
    stays = f"echo {{port}}; until test -e {joined}; do sleep 0.1; done"
    forking.start(["sh", "-c", stays], ranks=[0], logs=tmp_path)
    forking.start(["echo", "{port}"], ranks=[1], logs=tmp_path)
    joined.touch()
    forking.wait(limit_seconds=LONG)
    assert (tmp_path / "node0.log").read_text() == (tmp_path / "node1.log").read_text()


def test_what_cannot_be_started_is_told(tmp_path, forking):
    forking.start(["no-such-program"], ranks=[0], logs=tmp_path)
    forking.start(["sleep", "30"], ranks=[1], cwd=Path("/no/such/folder"), logs=tmp_path)
    assert [end.status for end in forking.wait(limit_seconds=LONG)] == [127, 127]
    reason = "No such file or directory"
    for node, what in enumerate(("no-such-program", "/no/such/folder")):
        assert (tmp_path / f"node{node}.log").read_text() == f"error: {what}: {reason}\n"
    with pytest.raises(UserError, match=r"placeholder \{ranks\} in the command: choose from \{mas"):
        forking.start(["echo", "{ranks}"])
    with pytest.raises(UserError, match=f"node {NODES}: the cluster has nodes 0 to {NODES - 1}"):
        forking.start(["true"], ranks=[NODES])
    forking.start(["sleep", "30"], ranks=[1], logs=tmp_path)
    with pytest.raises(UserError, match="node 1 still runs"):
        forking.start(["true"], logs=tmp_path)
    with pytest.raises(TimeoutError, match=r"after 0\.3 s these nodes still run: 1"):
        forking.wait(limit_seconds=0.3)
    forking.fault(1, "kill")
    assert {end.node: end.status for end in forking.wait(limit_seconds=LONG)} == {1: -9}, (
        "nothing started"
    )


def test_the_others_end_when_one_has_failed(tmp_path, forking):
    forking.start(
        ["sh", "-c", "test {rank} = 0 && exit 7; setsid sleep 100 & exec sleep 100"],
        ranks=[0, 1],
        logs=tmp_path,
    )
    ends = forking.wait(limit_seconds=LONG, grace_seconds=0.5)
    assert [(end.node, end.status) for end in ends] == [(0, 7), (1, -9)]
    assert (tmp_path / "node0.log").read_text() == ""
    told = "lab cluster: node 1, rank 1, was stopped, since node 0, rank 0, had failed\n"
    assert (tmp_path / "node1.log").read_text() == told


@pytest.mark.parametrize("loopback", [True, pytest.param(False, marks=needs_namespaces)])
def test_nothing_is_left_of_a_cluster_that_stands_still(loopback, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "_CLOSE_SECONDS", 0.5)
    with Cluster(2, loopback=loopback, logs=tmp_path, fresh=True) as stopped:
        stopped.start(["sleep", "600"])
        wait_until(lambda: stopped.pids(0) and stopped.pids(1), "both programs run")
        left = psutil.Process(stopped.host_pid).children(recursive=True)
        os.kill(stopped.host_pid, signal.SIGSTOP)  # it does not see that the cluster closes
    assert len(left) == 4, "two programs, and a parent of each"
    assert psutil.wait_procs(left, timeout=60)[1] == [], "these still run"


@needs_namespaces
def test_a_user_namespace_does_where_root_is_not_at_hand(tmp_path, monkeypatch):
    command = ("unshare", "--user", "--map-root-user", *tools._NAMESPACES)
    monkeypatch.setattr(tools, "unshare_command", lambda: command)
    with Cluster(2, rate="100mbit", logs=tmp_path, fresh=True) as cluster:
        look = "ip -brief address show eth0; readlink /proc/self/ns/net"
        assert run(cluster, "sh", "-c", look) == [0, 0]
        assert "10.9.0.2/24" in cluster.output(1)
        assert cluster.output(0).splitlines()[1] != cluster.output(1).splitlines()[1]


@pytest.mark.parametrize(
    ("lacking", "most", "switch", "words"),
    [
        ({"tc": "iproute2"}, "7", "1", "tc is not installed: install the package iproute2"),
        ({}, "0", "1", "sysctl -w user.max_user_namespaces=10000"),
        ({}, "7", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
        ({}, "7", "1", "--cap-add SYS_ADMIN"),
    ],
)
def test_where_none_is_allowed_the_setting_to_change_is_told(
    tmp_path, monkeypatch, lacking, most, switch, words
):
    files = tmp_path / "most", tmp_path / "switch"
    for file, content in zip(files, (most, switch), strict=True):
        file.write_text(f"{content}\n")
    monkeypatch.setattr(tools, "missing", lambda: lacking)
    monkeypatch.setattr(tools, "unshare_command", lambda: None)
    monkeypatch.setattr(tools, "_MOST_NAMESPACES", files[0])
    setting = ("0", "kernel.unprivileged_userns_clone=1")
    monkeypatch.setattr(tools, "_SWITCHES", {str(files[1]): setting})
    with pytest.raises(UserError, match=re.escape(words)) as told:
        Cluster(2, logs=tmp_path)
    assert "--loopback runs the same command" in str(told.value)


@needs_namespaces
def test_latency_is_added_or_said_to_be_left_out(tmp_path):
    cluster = Cluster(2, latency="50ms", logs=tmp_path, fresh=True)
    if not tools.has_netem():
        assert "this kernel has no sch_netem" in cluster.warnings[0]
        assert cluster.latency_seconds is None
        return
    with cluster:
        until_connected = (
            "import socket, time; time.sleep(1); b = time.monotonic(); s = socket.socket(); "
            "s.connect_ex(('node1', 9)); print(time.monotonic() - b)"
        )
        assert run(cluster, sys.executable, "-c", until_connected, ranks=[0]) == [0]
        assert float(cluster.output(0)) > 0.099, "there and back"


@needs_namespaces
def test_faults_of_links_and_of_processes(tmp_path):
    with Cluster(2, rate="100mbit", logs=tmp_path, fresh=True) as cluster:

        def moved(nbytes):
            move = (sys.executable, script(tmp_path, MOVE), "{rank}", 1, nbytes)
            assert {*run(cluster, *move)} == {0}
            return float(cluster.output(0).splitlines()[-1])

        cluster.fault(1, "slow", rate="5mbit")
        assert moved(600_000) > 600_000 * 8 / 5e6 - 2 * 128 * 1024 * 8 / 5e6
        cluster.fault(1, "restore")

        cluster.start([sys.executable, script(tmp_path, MOVE), "{rank}", "1", "6000000"])
        wait_until(lambda: traffic(cluster)[0][1] > 1_500_000, "the transfer begins")
        cluster.fault(1, "cut")
        _, before = traffic(cluster)[0]
        with pytest.raises(TimeoutError):
            cluster.wait(limit_seconds=1)
        assert traffic(cluster)[0][1] < before + 100_000, "a cut link lets nothing pass"
        cluster.fault(1, "restore")
        assert {end.status for end in cluster.wait(limit_seconds=LONG)} == {0}

        cluster.start(["sh", "-c", "setsid sleep 50 & sleep 50"], ranks=[1])
        # Wait for the names: sh cannot be stopped until its fork has become the sleep.
        wait_until(
            lambda: sorted(map(name, cluster.pids(1))) == ["sh", "sleep", "sleep"],
            "both sleeps run",
        )
        cluster.fault(1, "pause")
        wait_until(lambda: states(cluster.pids(1)) == "TTT", "all three are stopped")
        cluster.fault(1, "restore")
        wait_until(lambda: "T" not in states(cluster.pids(1)), "all three go on")
        cluster.fault(1, "kill")
        assert [end.status for end in cluster.wait(limit_seconds=LONG)] == [-9]
        wait_until(lambda: cluster.pids(1) == [], "what it had started is killed, too")


def name(pid):
    with contextlib.suppress(OSError):  # it has just ended
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def states(pids):
    return "".join(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] for pid in pids)


@pytest.mark.slow
@needs_namespaces
def test_ranks_know_who_shares_their_node_and_all_share_the_machines_cores(forking, tmp_path):
    main = ROOT / "PartTwo" / "main.py"
    flags = (
        "--master-ip {master} --master-port {port} --num-nodes 4 --model tiny --dataset digits "
        f"--batch-size 8 --max-steps 2 --measure-only --sync ring --timeout {LONG}"
    ).split()
    flags += ["--output-dir", tmp_path / "out"]
    two_ranks = script(tmp_path, TWO_RANKS)
    command = ("python", two_ranks, main, ROOT, "{rank}", *flags)
    ended = run(forking, *command, ranks=[0, 1], logs=tmp_path)
    assert ended == [0, 0], (tmp_path / "node0.log").read_text()
    [path] = (tmp_path / "out").glob("*/*/ranks.json")
    ranks = json.loads(path.read_text())["ranks"]
    assert [rank["node"] for rank in ranks] == [0, 0, 1, 1]
    assert {rank["threads"] for rank in ranks} == {max(1, usable_cores() // 4)}
    card = (tmp_path / "node0.log").read_text()
    host = os.uname().nodename
    places = f"4 on 2 nodes: ranks 0-1 on node 0 ({host}); ranks 2-3 on node 1 ({host})"
    assert re.search(f"^ranks +{re.escape(places)}$", card, re.MULTILINE)


FEW, MANY = 1, 3
"""Steps of two runs, whose difference leaves out their start and end, apart from a few messages."""


def sent_bytes(cluster, sync, steps, folder):
    """Train VGG-11 for ``steps`` steps; return the bytes that each node has sent in total."""
    flags = (
        f"--master-ip {{master}} --num-nodes {{nodes}} --rank {{rank}} --dataset digits "
        f"--batch-size 6 --max-steps {steps} --measure-only --timeout {LONG}"
    ).split()
    flags += ["--sync", sync] * (sync != "ddp")
    before = traffic(cluster)
    program = ROOT / part_of(sync) / "main.py"
    ended = run(cluster, "python", program, *flags, "--output-dir", folder, ranks=range(NODES))
    assert ended == [0] * NODES, cluster.output(0)
    after = traffic(cluster)
    return [after[node][0] - before[node][0] for node in range(NODES)]


@needs_namespaces
@pytest.mark.parametrize(
    "sync",
    [
        "ring",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gather_scatter", "all_reduce", "ddp")
        ),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("tree", "overlapped")),
    ],
)
def test_bytes_on_the_links_are_those_of_the_formula(forking, sync, tmp_path):
    """A node sends what the formula says, plus at most 10 % for headers and control messages."""
    few, many = (sent_bytes(forking, sync, steps, tmp_path) for steps in (FEW, MANY))
    sizes = GradientSize.of([p for p in build_model("vgg11", 10).parameters() if p.requires_grad])
    for node in range(NODES):
        formula = float(build_sync(sync).plan.bytes_sent(sizes, node, NODES)) * (MANY - FEW)
        # Less than the formula if TCP sent data twice in the shorter run, on a busy machine.
        assert formula * 0.95 < many[node] - few[node] < formula * 1.10, f"node {node} of {sync}"
