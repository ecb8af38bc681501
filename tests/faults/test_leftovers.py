"""Many clusters leave no process, namespace, interface or mount behind."""

import os
from pathlib import Path

import psutil
import pytest

from lab.cluster import Cluster
from tests.helpers import wait_until


def processes(matches):
    """Return all matching processes except this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and matches(process):
                found.append(process)
        except (psutil.Error, OSError):  # it has ended meanwhile, or belongs to another user
            continue
    return found


def machine():
    """Return the state that a cluster could leave changed.

    That is network interfaces, mounts and named network namespaces.
    """
    names = Path("/run/netns")
    return {
        "interfaces": sorted(psutil.net_if_addrs()),
        "mounts": Path("/proc/self/mounts").read_text(),
        "names": sorted(names.iterdir()) if names.is_dir() else [],
    }


def namespaces(*, with_environment):
    """Return the network and mount namespaces of processes with this environment variable."""
    return {
        os.readlink(f"/proc/{process.pid}/ns/{kind}")
        for kind in ("net", "mnt")
        for process in processes(lambda process: with_environment in process.environ())
    }


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("turns", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_clusters_in_a_row_leave_no_process_namespace_or_interface(tmp_path, monkeypatch, turns):
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
