"""``lab cluster`` as a user starts it: output, exit status, reaching a running cluster, and that nothing is left behind."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import LONG, PLACES, Lab, needs_namespaces, networks, until, with_word
from tests.helpers import ROOT


def word() -> str:
    """A number of seconds to sleep that no other process of the machine has in its command."""
    return f"{os.getpid()}.{time.monotonic_ns()}"


@needs_namespaces
def test_output_is_prefixed_and_kept_by_node(lab: Lab) -> None:
    status, output = lab.run("run", "--nodes", "2", "--rate", "1gbit", "--logs", str(lab.folder / "logs"), "--",
                             "sh", "-c", "echo from {rank} of {nodes}; ip -brief address show eth0; echo to {master}:{port} >&2")
    lines = output.splitlines()
    assert status == 0, output
    assert re.fullmatch(r"2 nodes, 10\.9\.0\.1 to 10\.9\.0\.2, 1gbit both ways; up in [\d.]+ s", lines[0])
    assert {"node 0 | from 0 of 2", "node 1 | from 1 of 2", "node 1 | to 10.9.0.1:29500"} <= set(lines)
    assert any(line.startswith("node 1 | eth0") and "10.9.0.2/24" in line for line in lines)
    assert lines[-1].startswith("all nodes ended well after ")
    assert (lab.folder / "logs" / "node1.log").read_text().splitlines()[0] == "from 1 of 2"


@pytest.mark.parametrize("loopback", PLACES)
def test_the_first_that_failed_gives_status_and_message(lab: Lab, loopback: bool) -> None:
    echo, cause = "sleep 0.5; echo 'error: broke: another rank has ended'; exit 1", "echo 'ValueError: bad luck'; exit 7"
    status, output = lab.run("run", "--nodes", "3", *(["--loopback"] if loopback else []), "--output-dir", str(lab.folder), "--",
                             "sh", "-c", f"test {{rank}} = 1 || {{ {echo}; }}; {cause}")
    assert status == 7, output
    log = next(lab.folder.glob("cluster-*/node1.log"))
    assert output.splitlines()[-1] == f"error: node 1 ended with status 7: ValueError: bad luck (its output: {log})"


def test_a_crash_is_told_by_its_signal(lab: Lab) -> None:
    status, output = lab.run("run", "--nodes", "2", "--loopback", "--logs", str(lab.folder), "--", "sh", "-c", "kill -SEGV $$")
    assert status == 128 + signal.SIGSEGV
    assert "was killed by SIGSEGV: it said nothing" in output


@pytest.mark.parametrize(("arguments", "message"), [
    (["run", "--nodes", "2"], "no command: give it behind --"),
    (["run", "--nodes", "0", "--", "true"], "--nodes: got 0, give 1 to 250"),
    (["run", "--rate", "fast", "--", "true"], "--rate: got 'fast', give a number with a unit"),
    (["run", "--loopback", "--rate", "1gbit", "--", "true"], "--loopback has no links: leave out --rate"),
    (["run", "--", "echo", "{ranks}"], "{ranks} in the command: choose from {master}, {nodes}, {rank}, {port}"),
    (["fault", "--node", "0"], "one of the arguments --cut --slow --pause --kill --restore is required"),
])
def test_bad_input_is_one_message_and_leaves_nothing(lab: Lab, arguments: list[str], message: str) -> None:
    if arguments[0] == "run":
        arguments = ["run", "--output-dir", str(lab.folder / "reports"), *arguments[1:]]
    status, output = lab.run(*arguments)
    assert status == 2, output
    assert output.startswith(f"error: {message}"), output
    assert output.count("\n") == 1
    assert not (lab.folder / "reports").exists()


@pytest.mark.parametrize("end", ["well", "failure", "interrupt", "kill", "terminate"])
@pytest.mark.parametrize("loopback", PLACES)
def test_nothing_is_left_behind(lab: Lab, loopback: bool, end: str) -> None:
    """Counted: processes, also in sessions of their own, network namespaces, links, sockets of Unix, temporary files."""
    mark, links, last = word(), sorted(os.listdir("/sys/class/net")), {"well": "true", "failure": "exit 3"}
    process = lab.start("run", "--nodes", "3", *(["--loopback"] if loopback else ["--rate", "1gbit"]), "--logs",
                        str(lab.folder / "logs"), "--", "sh", "-c",
                        f"setsid sleep {mark} & sleep 2; {last.get(end, f'sleep {mark}')}")
    until(lambda: len(sleeping(mark)) == (3 if end in last else 6), what="all nodes are up")
    made = networks([process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))])
    assert len(made) == (1 if loopback else 5), "one a node, the bridge's, and that of lab itself"
    assert len(sockets(process.pid)) == 1
    if end not in last:
        process.send_signal({"interrupt": signal.SIGINT, "kill": signal.SIGKILL, "terminate": signal.SIGTERM}[end])
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == {"well": 0, "failure": 3, "interrupt": 130, "kill": -9, "terminate": -15}[end], output
    until(lambda: with_word(mark) == [], what="every process of every node is gone")
    # Who kills lab leaves nobody who waits: then the first process of the namespaces ends a moment after its nodes.
    def left() -> tuple:
        here = (made - networks([os.getpid()])) & networks(psutil.pids())
        return here, sockets(process.pid), sorted(set(os.listdir("/sys/class/net")) - set(links)), list(lab.temporary.iterdir())

    if end == "kill":
        until(lambda: not any(left()), what=f"nothing is left: {left()}")
    assert not any(left()), left()
    if end == "interrupt":
        assert "interrupted: every process of every node is ended" in output


def sleeping(mark: str) -> list[int]:
    return [pid for pid in with_word(mark) if psutil.Process(pid).name() == "sleep"]


def sockets(pid: int) -> list[str]:
    return re.findall(rf"@data-parallel-lab\S*\.{pid}\b", Path("/proc/net/unix").read_text())


@needs_namespaces
def test_killing_what_holds_the_namespaces_ends_all_and_is_told(lab: Lab) -> None:
    mark = word()
    process = lab.start("run", "--nodes", "2", "--logs", str(lab.folder), "--", "sh", "-c", f"setsid sleep {mark} & sleep {mark}")
    until(lambda: len(sleeping(mark)) == 4, what="the nodes are up")
    next(child for child in psutil.Process(process.pid).children() if child.name() == "unshare").kill()
    output, _ = process.communicate(timeout=LONG)
    assert (process.returncode, output.splitlines()[-1]) == (1, "error: the cluster has ended: its first process is gone")
    until(lambda: with_word(mark) == [], what="every process is gone")


@needs_namespaces
def test_a_running_cluster_is_reached_from_another_terminal(lab: Lab) -> None:
    """By its process id, since others may run clusters on this machine."""
    mark = word()
    process = lab.start("run", "--nodes", "2", "--rate", "100mbit", "--logs", str(lab.folder), "--", "sh", "-c",
                        f"echo up; sleep {mark}; echo on")
    until(lambda: (lab.folder / "node1.log").exists() and (lab.folder / "node1.log").read_text(), what="node 1 is up")
    def ask(what: str, node: int, *more: str) -> tuple[int, str]:
        return lab.run(what, "--node", str(node), "--cluster", str(process.pid), *more)

    status, output = ask("shell", 1, "--", "sh", "-c", "ip -brief address show eth0; pwd; exit 5")
    assert (status, output.splitlines()[1]) == (5, str(ROOT))
    assert "10.9.0.2/24" in output
    assert ask("shell", 2, "--", "true") == (2, "error: --node: got 2, the cluster has nodes 0 to 1\n")
    assert ask("shell", 0, "--", "no-such") == (127, "error: no-such: No such file or directory\n")
    assert ask("fault", 1, "--slow", "3")[1].startswith("error: --rate: got '3'")
    for fault, told in ((["--cut"], "cut"), (["--slow", "10mbit"], "slow 10mbit"), (["--restore"], "restore")):
        assert ask("fault", 1, *fault) == (0, f"node 1: {told}\n")
    assert ask("fault", 1, "--pause") == (0, "node 1: pause\n")
    assert [psutil.Process(pid).status() for pid in sleeping(mark)].count(psutil.STATUS_STOPPED) == 1
    status, output = lab.run("fault", "--node", "0", "--cut", "--cluster", "1")
    assert status == 2
    assert re.match(rf"error: --cluster: got 1, choose one of .*\b{process.pid}\b", output)
    assert ask("fault", 1, "--kill") == (0, "node 1: kill\n")
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 128 + signal.SIGKILL, output
    assert "error: node 1 was killed by SIGKILL" in output


@needs_namespaces
def test_a_shell_on_a_terminal(lab: Lab) -> None:
    """With a terminal of its own, as a person has it: commands typed are answered from within the node."""
    lab.start("run", "--nodes", "2", "--logs", str(lab.folder), "--", "sh", "-c", "echo up; sleep 100")
    until(lambda: (lab.folder / "node1.log").exists() and (lab.folder / "node1.log").read_text(), what="node 1 is up")
    inner, outer = os.openpty()
    shell = subprocess.Popen(["env", "SHELL=/bin/sh", *lab.started[0].args[:4], "shell", "--node", "1", "--cluster",
                              str(lab.started[0].pid)], stdin=outer,
                             stdout=outer, stderr=outer, start_new_session=True, cwd=ROOT)
    lab.started.append(shell)
    os.close(outer)
    os.write(inner, b"ip -brief address show eth0\nexit 4\n")
    seen = b""
    try:
        while text := os.read(inner, 4096):
            seen += text
    except OSError:  # the other end is closed
        pass
    os.close(inner)
    assert shell.wait(LONG) == 4
    assert b"a shell in node 1 of the cluster" in seen
    assert b"10.9.0.2/24" in seen
