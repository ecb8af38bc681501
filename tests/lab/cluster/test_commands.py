"""``lab cluster`` as a user runs it: output, exit status, a second terminal, and leftovers."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time

import psutil
import pytest

from lab.cli import main
from lab.explain.diagnosis import diagnose
from lab.explain.streams import read_logs
from tests.helpers import LONG, ROOT, wait_until
from tests.helpers.cluster import held_networks, needs_namespaces, networks, with_word


def word():
    """Return a sleep duration in seconds that appears in no other process's command line."""
    return f"{os.getpid()}.{time.monotonic_ns()}"


def run_nodes(lab, nodes, script, *flags):
    """Run a script on each node to its end; return the exit status and the output."""
    return lab.end(lab.start_nodes(nodes, script, *flags))


@needs_namespaces
def test_output_is_prefixed_and_kept_by_node(lab):
    script = "echo from {rank} of {nodes}; ip -brief address show eth0; echo to {master}:{port} >&2"
    status, output = run_nodes(lab, 2, script, "--rate", "1gbit")
    lines = output.splitlines()
    assert status == 0, output
    assert re.fullmatch(
        r"2 nodes, 10\.9\.0\.1 to 10\.9\.0\.2, 1gbit in each direction; started in [\d.]+ s",
        lines[0],
    )
    expected = {"node 0 | from 0 of 2", "node 1 | from 1 of 2", "node 1 | to 10.9.0.1:29500"}
    assert expected <= set(lines)
    assert any(line.startswith("node 1 | eth0") and "10.9.0.2/24" in line for line in lines)
    assert lines[-1].startswith("all nodes finished without errors after ")
    assert lab.log(1)[0] == "from 1 of 2"


@needs_namespaces
def test_the_ranks_of_a_node_share_its_network_and_are_told_apart(lab):
    script = (
        "echo {rank} of {nodes} on {node}.{local_rank}; readlink /proc/self/ns/net; "
        "test {rank} != 3 || { echo error: no luck; exit 7; }"
    )
    status, output = run_nodes(lab, 2, script, "--ranks-per-node", "2", "--rate", "1gbit")
    assert status == 7, output
    assert output.startswith("2 nodes with 2 ranks each, 10.9.0.1 to 10.9.0.2, 1gbit in each")
    log = lab.folder / "node1-rank3.log"
    assert f"error: rank 3 ended with status 7: error: no luck (output: {log})" in output
    networks_of = {}
    for rank in range(4):
        node = rank // 2
        told = f"{rank} of 4 on {node}.{rank % 2}"
        assert f"node {node} rank {rank} | {told}" in output.splitlines()
        first, network, *_ = (lab.folder / f"node{node}-rank{rank}.log").read_text().splitlines()
        assert first == told
        networks_of.setdefault(node, set()).add(network)
    assert [len(found) for found in networks_of.values()] == [1, 1]
    assert networks_of[0] != networks_of[1]


@pytest.mark.slow
@needs_namespaces
def test_the_nodes_of_a_cluster_share_a_token_and_rank_0_listens_at_its_address(lab):
    """A rank without the token is refused; with it the same command works."""
    program = shlex.quote(str(ROOT / "tests" / "helpers" / "tokens.py"))
    flags = "--master-ip {master} --master-port {port} --num-nodes {nodes} --rank {rank}"
    told = {}
    listening = "until ss -ltnH | grep .; do sleep 0.05; done"  # in vain on node 1
    for drop in (-1, 1):
        command = f"timeout 60 sh -c '{listening}' & python {program} {flags} --drop {drop}"
        _, told[drop] = run_nodes(lab, 2, command)
    tokens = re.findall(r"token (\w{64})", told[-1] + told[1])
    assert len(tokens) == 4, told
    assert tokens[0] == tokens[1] != "none"
    assert tokens[0] not in tokens[2:], "each run has its own"
    assert told[-1].count("| met") == 2, told[-1]
    assert "refused rank 1: rank 0 has a run token and this rank has none" in told[1]
    assert "1 of 2 ranks came to" in told[1], "and rank 0 waited on"
    assert re.search(r"LISTEN .* 10\.9\.0\.1:29500 ", told[1]), told[1]
    assert not re.search(r"LISTEN .* (\*|0\.0\.0\.0|\[::\]):29500", told[1]), told[1]


@pytest.mark.parametrize(
    ("cause", "flags", "status", "message"),
    [
        pytest.param(
            "echo 'ValueError: bad luck'; exit 7",
            [],
            7,
            "ended with status 7: ValueError: bad luck",
            marks=[needs_namespaces, pytest.mark.slow],
        ),
        ("kill -SEGV $$", ["--loopback"], 139, "was killed by SIGSEGV: it printed nothing"),
        # A real-time signal has no name.
        ("kill -40 $$", ["--loopback"], 168, "was killed by signal 40: it printed nothing"),
        (
            "echo 'ValueError: bad luck'; exit 7",
            ["--loopback"],
            7,
            "ended with status 7: ValueError: bad luck",
        ),
    ],
)
def test_the_first_that_failed_gives_status_and_message(lab, cause, flags, status, message):
    """The other nodes fail before it, but name another rank as the cause."""
    prefixed = "echo 'error: broke: another rank has ended'; exit 1"
    script = f"test {{rank}} = 1 || {{ sleep 0.5; {prefixed}; }}; {cause}"
    ended, output = run_nodes(lab, 3, script, *flags)
    assert ended == status, output
    log = lab.folder / "node1.log"
    assert output.splitlines()[-1] == f"error: node 1 {message} (output: {log})"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--nodes", "2"], "no command: add it after --"),
        (["run", "--nodes", "0", "--", "true"], "--nodes: got 0, give 1 to 250"),
        (["run", "--rate", "fast", "--", "true"], "--rate: got 'fast', give a number with a unit"),
        (
            ["run", "--loopback", "--rate", "1gbit", "--", "true"],
            "--loopback has no links: remove --rate",
        ),
        (
            ["run", "--", "echo", "{ranks}"],
            "unknown placeholder {ranks} in the command: choose from {master}, {nodes}, {rank}, "
            "{node}, {local_rank}, {port}",
        ),
        (
            ["run", "--nodes", "30", "--ranks-per-node", "9", "--", "true"],
            "--ranks-per-node: got 9, give 1 to 8: 30 nodes may have at most 250 ranks in all",
        ),
        (
            ["run", "--ranks-per-node", "0", "--", "true"],
            "--ranks-per-node: got 0, give 1 to 62",
        ),
        (
            ["fault", "--node", "0"],
            "one of the arguments --cut --slow --pause --kill --restore is required",
        ),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(tmp_path, capsys, arguments, message):
    if arguments[0] == "run":
        arguments = ["run", "--output-dir", str(tmp_path / "reports"), *arguments[1:]]
    status, output = here(capsys, *arguments)
    assert status == 2, output
    assert output.startswith(f"error: {message}"), output
    assert output.count("\n") == 1
    assert not (tmp_path / "reports").exists()


def here(capsys, *arguments):
    """Run ``lab cluster`` in this process; return its exit status and output."""
    try:
        status = main(["cluster", *arguments])
    except SystemExit as ended:  # raised by the argument parser
        status = ended.code
    return status, "".join(capsys.readouterr())


ENDS = {  # the command's last words, the signal to lab, and lab's exit status
    "well": ("true", None, 0),
    "failure": ("exit 3", None, 3),
    "interrupt": ("trap 'echo saved; exit' INT; sleep {mark} & wait", signal.SIGINT, 130),
    "kill": ("sleep {mark}", signal.SIGKILL, -9),
    "save": ("trap 'echo saved; exit 75' TERM; sleep {mark} & wait", signal.SIGTERM, 75),
    "terminate": ("sleep {mark}", signal.SIGTERM, 143),
}
SLOW = {"namespaces": ("well", "save", "terminate"), "loopback": ("well", "failure", "interrupt")}


@pytest.mark.parametrize(
    ("place", "end"),
    [
        pytest.param(
            place,
            end,
            marks=[needs_namespaces] * (place == "namespaces")
            + [pytest.mark.slow] * (end in SLOW[place]),
        )
        for place in SLOW
        for end in ENDS
    ],
)
def test_nothing_is_left_behind(lab, place, end):
    """No process, network namespace, link or temporary file is left.

    Processes in their own session count too.
    """
    mark, links = word(), sorted(os.listdir("/sys/class/net"))
    last, number, status = ENDS[end]
    seen, loopback = lab.folder / "seen", place == "loopback"
    stays = f"until test -e {seen}; do sleep 0.1; done; " * (number is None)
    script = f"setsid sleep {mark} & {stays}{last.format(mark=mark)}"
    flags = ["--loopback"] if loopback else ["--rate", "1gbit"]
    process = lab.start_nodes(3, script, *flags)
    wait_until(lambda: len(sleeping(mark)) == (6 if number else 3), "all nodes are up")
    children = psutil.Process(process.pid).children(recursive=True)
    with held_networks([process.pid, *(child.pid for child in children)]) as made:
        assert len(made) == (1 if loopback else 5), "one a node, the bridge's, and lab's own"
        seen.touch()
        if number is not None:
            process.send_signal(number)
        ended, output = lab.end(process)
        assert ended == status, output
        wait_until(lambda: with_word(mark) == [], "every process of every node is gone")

        # If lab is killed, nobody waits for the cluster, whose first process ends after its nodes.
        def left():
            in_them = (made - networks([os.getpid()])) & networks(psutil.pids())
            return (
                in_them,
                with_word(str(lab.temporary)),
                sorted(set(os.listdir("/sys/class/net")) - set(links)),
                list(lab.temporary.iterdir()),
            )

        if ended < 0:
            wait_until(lambda: not any(left()), "nothing is left")
        assert not any(left()), left()
    if end == "interrupt":
        assert "interrupted: all processes on all nodes have ended" in output
    if end == "save":
        assert "after saving a checkpoint; resume with" in output
    if end in ("interrupt", "save"):
        assert output.count("| saved") == 3, "each node got the signal"


def sleeping(mark):
    return with_word(mark, name="sleep")


def stopped(mark):
    found = []
    for pid in sleeping(mark):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                found.append(pid)
    return found


@needs_namespaces
def test_killing_what_holds_the_namespaces_ends_all_and_is_told(lab):
    mark = word()
    process = lab.start_nodes(2, f"setsid sleep {mark} & sleep {mark}")
    wait_until(lambda: len(sleeping(mark)) == 4, "the nodes are up")
    children = psutil.Process(process.pid).children()
    next(child for child in children if child.name() == "unshare").kill()
    status, output = lab.end(process)
    told = "error: the cluster has ended: its first process has ended"
    assert (status, output.splitlines()[-1]) == (1, told)
    wait_until(lambda: with_word(mark) == [], "every process is gone")


@needs_namespaces
def test_a_running_cluster_is_reached_from_another_terminal(lab, capsys):
    """The process id selects the cluster, since others may run clusters on this machine."""
    mark = word()
    process = lab.start_nodes(2, f"echo up; sleep {mark}; echo on", "--rate", "100mbit")
    wait_until(lambda: lab.log(1), "node 1 is up")
    place = ("--cluster", str(process.pid))

    # A new process, since this one would stay in the node.
    def shell(*command):
        return lab.run("shell", "--node", command[0], *place, "--", *command[1:])

    def fault(*what):
        return here(capsys, "fault", "--node", "1", *place, *what)

    status, output = shell("1", "sh", "-c", "ip -brief address show eth0; pwd; exit 5")
    assert (status, output.splitlines()[1]) == (5, str(ROOT))
    assert "10.9.0.2/24" in output
    assert shell("2", "true") == (2, "error: --node: got 2, the cluster has nodes 0 to 1\n")
    assert shell("0", "no-such") == (127, "error: no-such: No such file or directory\n")
    assert fault("--slow", "3")[1].startswith("error: --rate: got '3'")
    assert lab.run("fault", "--node", "1", *place, "--cut") == (0, "node 1: link disconnected\n")
    for what, message in (
        (["--slow", "10mbit"], "link limited to 10mbit"),
        (["--restore"], "restored"),
        (["--pause"], "processes stopped"),
    ):
        assert fault(*what) == (0, f"node 1: {message}\n")
    wait_until(lambda: len(stopped(mark)) == 1, "node 1 is stopped")
    status, output = here(capsys, "fault", "--node", "0", "--cut", "--cluster", "1")
    assert status == 2
    assert re.match(rf"error: --cluster: got 1: give --cluster, one of .*\b{process.pid}\b", output)
    # End node 0's sleep, or the command would wait for it after node 1 has failed.
    for other in {*sleeping(mark)} - {*stopped(mark)}:
        psutil.Process(other).terminate()
    assert fault("--kill") == (0, "node 1: processes killed\n")
    ended, output = lab.end(process)
    assert ended == 128 + signal.SIGKILL, output
    assert "error: node 1 was killed by SIGKILL" in output
    killed = "lab cluster: node 1 was killed by SIGKILL"
    assert {*lab.log(1)[-2:]} == {"lab cluster fault: node 1: processes killed", killed}
    (first, *_) = diagnose(read_logs([str(lab.folder / "node1.log")]))
    assert (first.status, first.line.text) == (-signal.SIGKILL, killed)


def test_a_node_on_loopback_is_reached_from_another_terminal(lab, capsys):
    """Its processes are known, also one that has left its session and its parent."""
    mark = word()
    process = lab.start_nodes(2, f"(setsid sleep {mark} &); exec sleep {mark}", "--loopback")
    wait_until(lambda: len(sleeping(mark)) == 4, "the nodes are up")
    place = ("--node", "1", "--cluster", str(process.pid))
    assert here(capsys, "fault", *place, "--pause") == (0, "node 1: processes stopped\n")
    wait_until(lambda: len(stopped(mark)) == 2, "node 1 is stopped, and node 0 is not")
    victims = {*stopped(mark)}
    status, output = here(capsys, "fault", *place, "--cut")
    assert (status, "a node on loopback has no link of its own to cut" in output) == (2, True)
    assert here(capsys, "fault", *place, "--kill")[0] == 0
    wait_until(lambda: not victims & {*sleeping(mark)}, "both processes of node 1 have ended")
    here(capsys, "fault", "--node", "0", *place[2:], "--kill")
    assert lab.end(process)[0] == 128 + signal.SIGKILL


def test_a_fault_hits_all_ranks_of_a_node_and_no_others(lab, capsys):
    mark = word()
    flags = ("--loopback", "--ranks-per-node", "2")
    process = lab.start_nodes(2, f"exec sleep {mark}", *flags)
    wait_until(lambda: len(sleeping(mark)) == 4, "the ranks are up")
    place = ("--cluster", str(process.pid))
    told = "node 1 with its ranks 2 to 3: processes stopped"
    assert here(capsys, "fault", "--node", "1", *place, "--pause") == (0, f"{told}\n")
    wait_until(lambda: len(stopped(mark)) == 2, "both ranks of node 1 are stopped")
    for rank in (2, 3):
        log = (lab.folder / f"node1-rank{rank}.log").read_text()
        assert log == f"lab cluster fault: {told}\n"
    assert (lab.folder / "node0-rank0.log").read_text() == ""
    here(capsys, "fault", "--node", "1", *place, "--kill")
    wait_until(lambda: not stopped(mark), "both have ended")
    here(capsys, "fault", "--node", "0", *place, "--kill")
    status, output = lab.end(process)
    assert status == 128 + signal.SIGKILL
    assert re.search(r"error: rank [23] was killed by SIGKILL.*node1-rank[23]\.log", output)


@needs_namespaces
def test_a_shell_on_a_terminal(lab):
    """Commands typed at a terminal run in the node."""
    cluster = lab.start_nodes(2, "echo up; sleep 100")
    wait_until(lambda: lab.log(1), "node 1 is up")
    inner, outer = os.openpty()
    place = ["--node", "1", "--cluster", str(cluster.pid)]
    shell = subprocess.Popen(
        ["env", "SHELL=/bin/sh", *cluster.args[:4], "shell", *place],
        **dict.fromkeys(("stdin", "stdout", "stderr"), outer),
        start_new_session=True,
        cwd=ROOT,
    )
    lab.started.append(shell)
    os.close(outer)
    os.write(inner, b"ip -brief address show eth0\nexit 4\n")
    seen = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while text := os.read(inner, 4096):
            seen += text
    os.close(inner)
    assert shell.wait(LONG) == 4
    assert b"a shell on node 1 of cluster" in seen
    assert b"10.9.0.2/24" in seen
