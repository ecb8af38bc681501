"""``lab launch`` and ``lab collect`` on three hosts, each with its own sshd, network and disk."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers import LONG, ROOT, make_image_folder, only_run_folder, wait_until
from tests.helpers.sshd import HOSTS, Machines, missing

pytestmark = pytest.mark.skipif(
    missing() is not None, reason=f"no hosts with sshd here: {missing()}"
)

ALL = ("--hosts", ",".join(HOSTS))
TRAINING = ("--dataset", "digits", "--batch-size", "48", "--threads", "1")
REFUSED = "error: {} of 3 hosts cannot take part; nothing was started"


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    with Machines(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_on_the_hosts(machines):
    """After every test, check that each host runs only its listening sshd, the terminal nothing."""
    yield
    machines.end_commands()
    wait_until(
        lambda: not any(machines.running(node) for node in range(4)),
        f"all is gone: {machines.running(1)}",
    )


def mark():
    """Return a sleep duration in seconds that appears in no other process's command line."""
    return f"1000.{time.monotonic_ns()}"


def sleepers(machines, node, seconds):
    return list(machines.running(node).values()).count(f"sleep {seconds}")


def launch(machines, folder, command, *flags, hosts=ALL[1]):
    """Run ``lab launch`` to its end; return its exit status and output."""
    words = command if isinstance(command, tuple) else ("sh", "-c", command)
    return machines.run("launch", "--hosts", hosts, "--logs", folder, *flags, "--", *words)


def test_training_is_launched_collected_and_reported(machines, tmp_path):
    """Each host writes to its own disk; ``lab collect`` merges the files into one run."""
    part = ("PartTwo/main.py", "--sync", "all_reduce", "--max-steps", "2", "--measure-only")
    place = (*ALL, "--output-dir", tmp_path)
    status, output = machines.run("launch", *place, "--", "python", *part, *TRAINING)
    assert status == 0, output
    lines = output.splitlines()
    launch = next(tmp_path.glob("launch-*"))
    assert lines[0] == f"3 hosts, node1 to node3; rank 0 at 10.9.0.2:29500; logs: {launch}"
    equal = "equal weights          yes, on all ranks"
    assert f"node 0 | {equal}" in lines
    assert lines[-1].startswith("all nodes finished without errors after ")
    assert equal in (launch / "node0.log").read_text()

    there = [
        only_run_folder(machines.own_checkout(node) / "reports", "PartTwo-all_reduce")
        for node in (1, 2, 3)
    ]
    logs = [[path.name for path in folder.glob("logs_rank*.txt")] for folder in there]
    assert logs == [[f"logs_rank{rank}.txt"] for rank in range(3)], "else the disks are shared"
    summary = json.loads((there[0] / "summary.json").read_text())
    expected = {"nodes": 3, "ranks_hold_equal_weights": True, "last_step": 2}
    assert {key: summary[key] for key in expected} == expected

    status, output = machines.run("collect", launch, "--output-dir", tmp_path)
    assert status == 0, output
    here = only_run_folder(tmp_path, "PartTwo-all_reduce")
    assert f"{here}: from node1, node2 and node3" in output
    first = {path.name: path.read_bytes() for path in there[0].iterdir() if path.is_file()}
    copied = {path.name: path.read_bytes() for path in here.iterdir()}
    assert copied.keys() == first.keys() | {"logs_rank1.txt", "logs_rank2.txt"}
    assert copied.items() >= first.items()
    report = subprocess.run(
        [sys.executable, "-m", "lab", "report", str(here), "--output-dir", str(tmp_path)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=LONG,
    )
    assert report.returncode == 0, report.stderr
    assert "all_reduce" in next(tmp_path.glob("report-*/table.md")).read_text()

    (here / "logs_rank1.txt").write_text("my own notes\n")
    full = (here / "metrics.jsonl").read_text()
    # As if collected during the run.
    (here / "metrics.jsonl").write_text(full.splitlines(keepends=True)[0])
    status, output = machines.run("collect", launch, "--output-dir", tmp_path)
    assert status == 1, output
    kept = f"PartTwo-all_reduce/{here.name}/logs_rank1.txt"
    assert f"warning: 1 file not copied: {kept}: different " in output
    assert (here / "logs_rank1.txt").read_text() == "my own notes\n"
    assert (here / "metrics.jsonl").read_text() == full


def test_a_checked_launch_passes_sigterm_on_to_the_parts_which_save(machines, tmp_path):
    part = ("python", "PartThree/main.py", "--max-steps", "4000", "--log-every", "1", *TRAINING)
    flags = ("--hosts", "node1,node2", "--check", "--logs", tmp_path)
    process = machines.start("launch", *flags, "--", *part)
    log = tmp_path / "node0.log"
    wait_until(lambda: log.exists() and "step 2/4000" in log.read_text(), "training goes on")
    psutil.Process(machines.lab_pid(process)).send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 75, output
    met = "node 0 | ok       nodes         2 of 2 ranks connected at 10.9.0.2:29500"
    assert met in output.splitlines()
    saved = "saving a checkpoint; resume with the same command and --resume auto"
    assert re.search(rf"stopped after [\d.]+ s, after {saved}", output), output
    run = only_run_folder(machines.own_checkout(1) / "reports", "PartThree-ddp")
    assert list((run / "checkpoints").glob("*.pt"))
    assert json.loads((tmp_path / "launch.json").read_text())["status"] == 75


BROKE = (255, "error: the connection to node 0 (node1) broke after ")
ENDS = {
    "failure": (7, "error: node 1 ended with status 7: up (host node2; output: "),
    "interrupt": (130, "interrupted: all processes on all nodes have ended"),
    "terminate": (143, "ended by SIGTERM: all processes"),
    "kill": (137, ""),
    "cut": BROKE,
    "node": BROKE,
    "connection": BROKE,
}
SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_on_any_host(machines, tmp_path, end):
    """Nothing survives a launch, however it ends; processes in their own session count too."""
    seconds, nodes = mark(), (1, 2) if end == "failure" else (1,)
    last = "test {rank} = 0 || exit 7; " if end == "failure" else ""
    script = f"setsid sleep {seconds} & echo up; {last}sleep {seconds}"
    place = ("--hosts", ",".join(f"node{node}" for node in nodes), "--logs", tmp_path)
    process = machines.start("launch", *place, "--silence", "3", "--", "sh", "-c", script)
    if end != "failure":
        wait_until(lambda: sleepers(machines, 1, seconds) == 2, "the command runs")
        lab = psutil.Process(machines.lab_pid(process))
    match end:
        case "interrupt" | "terminate" | "kill":
            lab.send_signal(SIGNALS[end])
        case "cut":
            machines.cluster.fault(1, "cut")
        case "node":
            commands = machines.running(1).items()
            [agent] = [pid for pid, command in commands if "-m lab.ssh" in command]
            os.kill(agent, signal.SIGTERM)
        case "connection":
            next(child for child in lab.children() if child.name() == "ssh").kill()
    output, _ = process.communicate(timeout=LONG)
    status, told = ENDS[end]
    assert process.returncode == status, output
    assert told in output
    gone = "every process is gone, the link cut or not"
    wait_until(lambda: not any(sleepers(machines, node, seconds) for node in nodes), gone)
    if end == "cut":  # sshd notices the break only when the link is back
        machines.cluster.fault(1, "restore")


def test_of_many_hosts_the_terminal_shows_rank_0_and_the_first_failure(machines, tmp_path):
    """Nine nodes on three hosts: each host runs three of them, which share the given port."""
    script = (
        "echo from {rank} of {nodes} at {master}:{port}; test {rank} = 5 || { sleep 2; "
        "exit; }; echo 'ValueError: five'; exit 9"
    )
    hosts = ",".join(HOSTS * 3)
    status, output = launch(machines, tmp_path, script, "--master-port", "29600", hosts=hosts)
    assert status == 9, output
    log = tmp_path / "node5.log"
    first, *lines, last = output.splitlines()
    assert first == (
        f"3 hosts, node1 to node3; rank 0 at 10.9.0.2:29600; logs: {tmp_path}; "
        "showing only rank 0's output and the first failure's"
    )
    said = [f"from {node} of 9 at 10.9.0.2:29600" for node in range(9)]
    shown = [f"node 0 | {said[0]}", "node 5 | ValueError: five", f"node 5 | {said[5]}"]
    assert sorted(lines) == shown
    told = f"error: node 5 ended with status 9: ValueError: five (host node3; output: {log})"
    assert last == told
    logs = [(tmp_path / f"node{node}.log").read_text().splitlines()[0] for node in range(9)]
    assert logs == said


def test_the_masters_address_is_one_that_the_others_reach(machines, tmp_path):
    """The launch uses an address of rank 0 that the other hosts reach.

    The first host's name may resolve to an address that every host has, such as a container
    bridge's. The error names a host that cannot reach rank 0.
    """

    logs = tmp_path / "logs"
    hides = (
        "ip link add a0 type veth peer name a1 && ip address add 172.17.0.1/16 dev a0 && "
        "ip link set a0 up && ip link set a1 up && echo 172.17.0.1 node1 > hosts && "
        "mount --bind hosts /etc/hosts && getent hosts node1"
    )
    try:
        status, output = launch(machines, logs, hides)
        assert output.count("| 172.17.0.1      node1") == 3, output
        status, output = launch(machines, logs, "echo {master}")
        found = output.splitlines()[0].split("; ")[1]
        assert (status, found) == (0, "rank 0 at 10.9.0.2:29500"), output
        route = "ip route add unreachable 10.9.0.2"
        assert launch(machines, logs, route, hosts="node2")[0] == 0
        status, output = launch(machines, logs, "echo {master}")
        first, second = output.splitlines()
        assert (status, first) == (2, REFUSED.format(1)), output
        assert second.startswith(
            "  node 1 (node2): cannot reach node 0 (node1) at 10.9.0.2:29500 (no route to "
            "host): open the port there, or give another address of that host with --master-ip"
        ), output
    finally:
        undo = "umount /etc/hosts; ip link delete a0; ip route delete unreachable 10.9.0.2; true"
        launch(machines, logs, undo)


def test_the_ranks_of_a_launch_have_a_token_which_nobody_else_sees(machines, tmp_path, monkeypatch):
    """A rank without it is refused; neither process lists nor the launch's files show it."""
    flags = "--master-ip {master} --master-port {port} --num-nodes {nodes} --rank {rank}"
    monkeypatch.setenv("LAB_RUN_TOKEN", "the-token-of-this-launch")
    shown = 'test -n "$LAB_RUN_TOKEN" && ! ps -ef | grep -v grep | grep -q "$LAB_RUN_TOKEN"'
    logs = tmp_path / "logs"
    program = shlex.quote(f"{ROOT}/tests/helpers/tokens.py")
    for drop in (-1, 1):
        command = f"{shown} && python {program} {flags} --drop {drop}"
        status, output = launch(machines, logs, command)
        assert status == 0, output
        assert len(set(re.findall(r"token (\w{64})", output))) == 1, output
        if drop < 0:
            assert output.count("| met") == 3, output
        else:
            assert "refused rank 1: rank 0 has a run token and this rank has none" in output
    assert not any(b"the-token" in path.read_bytes() for path in logs.rglob("*.*"))


def refused(machines, folder, *flags, config=None):
    """Run a launch that is refused; return the lines of its output."""
    hosts = () if "--hosts" in flags else ALL
    flags = (*hosts, "--output-dir", folder / "reports", *flags)
    part = ("python", "PartTwo/main.py", *TRAINING)
    status, output = machines.run("launch", *flags, "--", *part, config=config)
    assert status == 2, output
    assert not (folder / "reports").exists()
    return output.splitlines()


def test_hosts_that_ssh_does_not_reach_are_named_all_at_once(machines, tmp_path):
    hosts = ("--hosts", "node1,nowhere,10.9.0.77")
    first, *lines = refused(machines, tmp_path, *hosts, "--ssh-option", "ConnectTimeout=2")
    assert first == REFUSED.format(2)
    unknown = r"unknown host \(ssh: Could not resolve hostname nowhere: .*\): check the"
    silent = r"no answer \(ssh: connect to host .*\): check that"
    told = (rf"  node 1 \(nowhere\): {unknown}", rf"  node 2 \(10\.9\.0\.77\): {silent}")
    for line, pattern in zip(lines, told, strict=True):
        assert re.match(pattern, line)
    lines = refused(machines, tmp_path, "--ssh-option", "Port=2299")
    assert "it refuses connections on ssh's port" in lines[3]


@pytest.mark.parametrize(
    ("entry", "other", "told"),
    [
        (
            "keys/user\n",
            "keys/stranger\n",
            "it refuses your ssh key (ssh: root@node2: Permission denied (publickey).): copy your "
            "key there: ssh-copy-id node2; or give --user",
        ),
        (
            "known_hosts",
            "none",
            "its host key is unknown here (ssh: Host key verification failed.): connect once by "
            "hand and compare the fingerprint: ssh node2",
        ),
        (
            "known_hosts",
            "swapped",
            "its host key has changed: if the host was reinstalled: ssh-keygen -R node2, then "
            "connect once by hand: ssh node2",
        ),
    ],
    ids=["stranger", "unknown", "changed"],
)
def test_keys_that_are_refused(machines, tmp_path, entry, other, told):
    config = tmp_path / "config"
    config.write_text(machines.config.read_text().replace(entry, other))
    keys = [(machines.keys / f"host{node}.pub").read_text() for node in (1, 2, 3)]
    (machines.keys / "swapped").write_text(f"node1 {keys[0]}node2 {keys[2]}node3 {keys[2]}")
    assert f"  node 1 (node2): {told}" in refused(machines, tmp_path, config=config)


def test_other_code_or_folders_or_pythons_are_found_before_anything_starts(machines, tmp_path):
    code = machines.own_checkout(2) / "common" / "config" / "schema.py"
    part = machines.own_checkout(3) / "PartTwo"
    before = code.read_text()
    (machines.own_checkout(1) / "only-here").mkdir()
    try:
        code.write_text(before + "# another\n")
        part.rename(part.with_name("Gone"))
        assert refused(machines, tmp_path) == [
            REFUSED.format(2),
            "  node 1 (node2): its code differs from node 0 (node1): common/config/schema.py: "
            "check out the same commit on all hosts (git pull), and run make setup there",
            f"  node 2 (node3): {machines.checkout} has no PartTwo/main.py: give --workdir, the "
            "project's folder on the hosts",
        ]
    finally:
        code.write_text(before)
        part.with_name("Gone").rename(part)
    lines = refused(machines, tmp_path, "--workdir", machines.checkout / "only-here")
    assert lines[1].startswith("  node 0 (node1): the folder has no checkout of this version")
    assert lines[2].startswith("  node 1 (node2): there is no folder of the project")
    assert "no Python there" in refused(machines, tmp_path, "--python", "/no/such/python3")[3]


def test_one_machine_by_two_names_and_a_port_that_is_taken(machines, tmp_path):
    lines = refused(machines, tmp_path, "--hosts", "node1,10.9.0.2")
    same = "  node 1 (10.9.0.2): the same machine as node 0 (node1), so two ranks would share it"
    assert lines[1].startswith(same)
    assert refused(machines, tmp_path, "--master-port", "22") == [
        "error: node 0 (node1): its port 22 cannot be used (address already in use): end the "
        "program that listens there, or give another --master-port"
    ]


def test_check_finds_a_dataset_that_one_host_lacks(machines, tmp_path):
    make_image_folder(machines.own_checkout(1) / "pictures")
    data = ("--dataset", "folder", "--data-dir", machines.checkout / "pictures")
    part = ("python", "PartTwo/main.py", *data)
    status, output = launch(machines, tmp_path, part, "--check", hosts="node1,node2")
    assert status == 1, output
    assert "node 0 | ok       dataset       2 classes" in output
    assert "node 0 | failure  same dataset  the ranks differ:" in output
    # The failure that rank 0 has not, and its remedy: what all hosts say is shown once.
    first, _remedy = [line for line in output.splitlines() if line.startswith("node 1 |")]
    lacks = r"node 1 \| failure  dataset +--dataset folder: \S+/pictures/train is missing"
    assert re.match(lacks, first), output
    assert output.splitlines()[-1] == (
        "error: lab doctor found failures on node 0 (node1) and node 1 (node2): nothing was started"
    )
    assert "writing to" not in output
