"""Many starts and stops leave no process, socket, file or namespace behind."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lab.cluster import Cluster
from tests.helpers import wait_until
from tests.helpers.stage import GRACE, Stage, hidden_files

_OPEN = {"01", "0A"}
"""/proc/net/tcp states: established, listening. A closed socket may linger for late packets."""


def end_it(stage: Stage, how: str) -> None:
    """Stop the run on nodes 0 and 1 in the way that ``how`` names."""
    if how == "kill":
        stage.cluster.fault(1, "kill")
        stage.cluster.fault(0, "kill")
    elif how in ("terminate", "interrupt"):
        stage.cluster.send_signal(signal.SIGTERM if how == "terminate" else signal.SIGINT)
    elif how == "lose one":
        stage.cluster.fault(1, "kill")


EXPECTED = {
    "come to its end": {0},
    "kill": {-signal.SIGKILL},
    "terminate": {75},
    "interrupt": {130, 1},
    "lose one": {-signal.SIGKILL, 1},
}


@pytest.mark.slow
@pytest.mark.alone  # on loopback, another test might be given a port that a run here has used
def test_20_runs_in_a_row_leave_no_process_socket_or_file(stage: Stage) -> None:
    ports = []
    for turn in range(20):
        how = list(EXPECTED)[turn % len(EXPECTED)]
        disturbed = how != "come to its end"
        stage.start(
            size=2,
            nodes=[0, 1],
            name=f"run{turn}",
            hurt=(1, "forward", "hold") if disturbed else None,
        )
        ports.append(f"{stage.port:04X}")
        if disturbed:
            stage.wait_for("held now", node=1)
            end_it(stage, how)
            stage.let_go()
        for ended in stage.end().values():
            assert ended.status in EXPECTED[how], (how, ended)
        wait_until(
            lambda: processes(lambda process: process.cwd() == str(stage.folder)) == [],
            "the end of all processes",
        )
        (stage.folder / "go").unlink(missing_ok=True)
        assert list(stage.temporary.iterdir()) == []
        # A killed rank 0 cannot remove its lock file; the lock itself is free.
        locks = {f"run{one}/.lock" for one in range(turn + 1)}
        assert set(hidden_files(stage.run().parent)) <= locks
    stage.cluster.start(["cat", "/proc/net/tcp", "/proc/net/tcp6"], nodes=[0])
    stage.cluster.wait(limit_seconds=GRACE)
    sockets = [
        line.split()[1:4]
        for line in stage.text(0).splitlines()
        if line.strip()[:1].isdigit() and ": " in line
    ]
    left = [
        one
        for one in sockets
        if one[2] in _OPEN and (not stage.cluster.loopback or one[0].split(":")[1] in ports)
    ]
    assert left == []
    assert sorted(path.name for path in stage.run().parent.iterdir()) == sorted(
        f"run{turn}" for turn in range(20)
    )


def processes(matches: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Return all matching processes except this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and matches(process):
                found.append(process)
        except (psutil.Error, OSError):  # it has ended meanwhile, or belongs to another user
            continue
    return found


def machine() -> dict[str, object]:
    """Return the state that a cluster could leave changed.

    That is network interfaces, mounts and named network namespaces.
    """
    names = Path("/run/netns")
    return {
        "interfaces": sorted(psutil.net_if_addrs()),
        "mounts": Path("/proc/self/mounts").read_text(),
        "names": sorted(names.iterdir()) if names.is_dir() else [],
    }


def namespaces(*, with_environment: str) -> set[str]:
    """Return the network and mount namespaces of processes with this environment variable."""
    return {
        os.readlink(f"/proc/{process.pid}/ns/{kind}")
        for kind in ("net", "mnt")
        for process in processes(lambda process: with_environment in process.environ())
    }


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("turns", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_clusters_in_a_row_leave_no_process_namespace_or_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Half the clusters are closed; the others' namespace-holding process gets SIGKILL."""
    monkeypatch.setenv("FAULTS_OF", str(tmp_path))
    before = machine()
    for turn in range(turns):
        with Cluster(2, logs=tmp_path, fresh=True) as cluster:
            cluster.start(["sleep", "600"])
            wait_until(
                lambda: len(namespaces(with_environment="FAULTS_OF")) >= 3,
                "a mount namespace, and two networks",
            )
            if turn % 2:
                psutil.Process(cluster.host_pid).parent().kill()
        wait_until(
            lambda: processes(lambda process: "FAULTS_OF" in process.environ()) == [],
            "the end of all processes",
        )
        assert machine() == before
