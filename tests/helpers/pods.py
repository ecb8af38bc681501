"""Start and end the pods of a TrainJob on emulated nodes, as Trainer's controller and a kubelet do.

A pod gets the PET_* variables of Trainer's torch plugin, the manifest's own variables, its command
with $(NAME) filled in, a host name, names that it can look up, and a process namespace. SIGTERM
comes from outside and goes to the first process of that namespace. On loopback there is neither a
host name nor a first process. Order: ``start`` the pods, ``publish`` their names, ``terminate``
one.
"""

import contextlib
import re
import signal
from pathlib import Path

import psutil

from common.errors import UserError
from tests.helpers import free_port, wait_until

_NAMED = re.compile(r"\$\((\w+)\)")
# As in a container, torchrun replaces the shell and becomes process 1.
_AS_A_POD = [
    *"unshare --uts --pid --mount --fork --kill-child --mount-proc sh -c".split(),
    'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"',
    "pod",
]


class Pods:
    """The pods of ``job`` on the nodes of a cluster, pod 0 on node 0.

    Parameters
    ----------
    image : the folder that stands for the image's working folder.
    volume : the folder that stands for the job's volume.
    flags : appended to the manifest's own flags; if a flag occurs twice, the last one counts.
    """

    def __init__(self, cluster, job, *, image, volume, flags):
        self._cluster, self._image, self._volume = cluster, image, volume
        self._name, self._trainer = job["metadata"]["name"], job["spec"]["trainer"]
        [self._mount] = (mount["mountPath"] for mount in mounts(job) if mount["name"] == "volume")
        self._flags = [str(flag) for flag in flags]
        self._master_port = free_port() if cluster.loopback else 29500
        self._published = False
        self._first: dict[int, psutil.Process] = {}

    def start(self, pod):
        """Start a pod once its predecessor has ended.

        Until ``publish``, the pod knows only its own name.
        """
        environment = self._environment(pod)
        words = [
            self._fill_in(word, environment)
            for word in [*self._trainer["command"], *self._trainer["args"]]
        ] + self._flags
        if not self._cluster.loopback:
            words = [*_AS_A_POD, self._host(pod), str(self._write_names(pod)), *words]

        def started():
            try:
                self._cluster.start(words, ranks=[pod], environment=environment, cwd=self._image)
            except UserError:  # the predecessor still runs
                return False
            return True

        wait_until(started, f"pod {pod} has ended", look_seconds=0.1)

    def publish(self):
        """Let the pods look each other up, as the cluster's DNS does some time after they start."""
        self._published = True
        if not self._cluster.loopback:
            for pod in range(self._trainer["numNodes"]):
                self._write_names(pod)

    def holds_the_meeting_place(self, pod):
        """Return whether a pod listens at PET_MASTER_PORT."""
        process = self.first_process(pod)
        if process is None:
            return False
        # The pod's own network tables list a listening socket with state 0A.
        listening = re.compile(rf":{self._master_port:04X} \S+ 0A ")
        return any(
            listening.search(_read(f"/proc/{process.pid}/net/{table}")) for table in ("tcp", "tcp6")
        )

    def terminate(self, pod):
        """Send SIGTERM to a container's first process, as a kubelet does."""
        process = self.first_process(pod)
        assert process is not None, f"pod {pod} runs nothing"
        process.send_signal(signal.SIGTERM)

    def first_process(self, pod):
        """Return a pod's torchrun, or None if it has ended.

        Outside loopback it must be number 1 in its process namespace.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            known = self._first.get(pod)
            if known is not None and known.is_running() and known.status() != psutil.STATUS_ZOMBIE:
                # Searching all processes at every poll would take a core from the ranks.
                return known
        found = self._find_first_process(pod)
        if found is not None:
            self._first[pod] = found
        return found

    def _find_first_process(self, pod):
        if self._cluster.loopback:
            candidates = psutil.Process(self._cluster.host_pid).children(recursive=True)
            return next((one for one in candidates if _is_torchrun(one, pod)), None)
        for pid in self._cluster.pids(pod):
            is_first = re.search(r"NSpid:.*\s1\n", _read(f"/proc/{pid}/status"))
            if is_first and "torchrun" in _command(psutil.Process(pid)):
                return psutil.Process(pid)
        return None

    def _environment(self, pod):
        limits = self._trainer["resourcesPerNode"]["limits"]
        own = {}
        for entry in self._trainer["env"]:
            source = entry.get("valueFrom", {})
            if "fieldRef" in source:
                own[entry["name"]] = f"the value of {source['fieldRef']['fieldPath']}"
            elif "resourceFieldRef" in source:
                resource = source["resourceFieldRef"]["resource"]
                own[entry["name"]] = limits[resource.removeprefix("limits.")]
            else:
                own[entry["name"]] = entry["value"]
        places = {
            "PET_NNODES": str(self._trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(self._trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(pod),
            "PET_MASTER_ADDR": f"{self._host(0)}.{self._name}",
            "PET_MASTER_PORT": str(self._master_port),
        }
        if self._cluster.loopback:
            places |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_LOCAL_ADDR": "127.0.0.1"}
        return own | places

    def _fill_in(self, word, environment):
        """Fill in $(NAME) as Kubernetes does: unknown names stay."""
        filled = _NAMED.sub(lambda found: environment.get(found[1], found[0]), word)
        return filled.replace(f"{self._mount}/", f"{self._volume}/")

    def _host(self, pod):
        return f"{self._name}-node-0-{pod}"

    def _write_names(self, pod):
        """Write a pod's /etc/hosts and return its path.

        It holds the pod's own line as a kubelet writes it and, once published, the names of the
        headless service.
        """
        domain = f"{self._name}.default.svc.cluster.local"
        own = self._host(pod)
        lines = [f"127.0.0.1 localhost\n{self._cluster.address(pod)} {own}.{domain} {own}\n"]
        for node in range(self._trainer["numNodes"] if self._published else 0):
            host = self._host(node)
            lines.append(f"{self._cluster.address(node)} {host}.{self._name} {host}.{domain}\n")
        path = self._volume.parent / f"hosts{pod}"
        path.write_text("".join(lines))
        return path


def mounts(job):
    """Return the volume mounts of the job's containers."""
    containers = pod_patch(job)["containers"]
    return [mount for container in containers for mount in container["volumeMounts"]]


def pod_patch(job):
    """Return what the job changes in the runtime's pods."""
    [patch] = job["spec"]["runtimePatches"]
    [replicated] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]["template"]["spec"]


def _is_torchrun(process, pod):
    try:
        found = process.environ()
        return (
            found.get("PET_NODE_RANK") == str(pod)
            and "RANK" not in found
            and "torchrun" in _command(process)
        )
    except psutil.Error:
        return False


def _command(process):
    """Return the program and its first argument, which is a script's path."""
    try:
        return " ".join(process.cmdline()[:2])
    except psutil.Error:
        return ""


def _read(path):
    try:
        return Path(path).read_text()
    except OSError:  # the process has just ended
        return ""
