"""Run a Slurm cluster on this machine: an emulated cluster whose nodes run slurmd.

Order: ``refused`` says why this machine cannot run it; ``SlurmCluster(folder)`` is a context
manager; ``sbatch``, ``wait``, ``output``; ``power_off`` and ``power_on`` a node. One more node, the
login node, runs Munge, slurmctld and the user's commands.

Every node has its own network, host name, processes and, at ``folder/own``, its own disk. All other
files are shared. Nothing is written outside ``folder``. Nothing remains when the ``with`` block
ends, since the kernel removes everything with the namespaces.
"""

import functools
import itertools
import os
import re
import secrets
import shutil
import subprocess
import time
from pathlib import Path

from lab.cluster import Cluster, tools
from tests.helpers import ROOT, wait_until

_PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "nsenter": "util-linux",
}
_UP_SECONDS = 90.0
_COMMAND_SECONDS = 60.0
# On the emulated cluster's own tmpfs, so that it disappears with the cluster. A socket's name must
# be short.
_STATE = "/run/slurm"
_ENDED = "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL OUT_OF_MEMORY BOOT_FAIL".split()

_SLURM_CONF = """\
ClusterName=lab
SlurmctldHost={login}({login_address})
AuthInfo=socket={state}/munge,cred_expire=15
SlurmUser=root
SlurmdUser=root
StateSaveLocation={state}/state
SlurmdSpoolDir={state}/%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/%n.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=10
MessageTimeout=5
TCPTimeout=2
MinJobAge=3600
GresTypes=gpu
{more}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60:00 State=UP
"""
_OTHER_FILES = {
    "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
    # Any two devices will do: Slurm counts them, and nothing opens them.
    "gres.conf": "Name=gpu File=/dev/zero\nName=gpu File=/dev/full\n",
    # Without it, looking up a name that is in no file waits seconds for an unreachable DNS server.
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}

_LOGIN = """\
hostname {name} && mkdir -p {state}/state && echo {key} > {state}/key && chmod 400 {state}/key
munged --force --key-file={state}/key --socket={state}/munge --pid-file={state}/munged.pid \
    --log-file={folder}/munged.log --seed-file={state}/seed
exec slurmctld -D -c
"""
_NODE = """\
hostname {name} && mount --bind {folder}/hosts-{name} /etc/hosts || exit 1
mount --bind {folder}/nsswitch.conf /etc/nsswitch.conf || exit 1
mount --bind {folder}/disk-{name} {folder}/own && mkdir -p {state}/{name} || exit 1
exec slurmd -D -N {name}
"""
_OWN_NAMESPACES = "unshare --uts --mount --pid --fork --kill-child=KILL --mount-proc".split()


def refused():
    """Return why this machine cannot run the cluster, or None if it can."""
    if reason := tools.namespaces_refused():
        return reason
    for program, package in _PROGRAMS.items():
        if shutil.which(program, path=tools.search_path()) is None:
            return f"{program} is not installed: install the package {package}"
    as_root = os.geteuid() == 0
    return None if as_root else "slurmd must run as root: it starts jobs in their users' names"


class SlurmCluster:
    """Compute nodes (node0, node1, ...) and a login node.

    Parameters
    ----------
    folder : receives configuration and logs; ``folder/own`` is a different disk on each node.
    nodes : number of compute nodes.
    names_resolve : whether the nodes know each other's names; by default a node knows only its own,
        as 127.0.1.1.
    cpus : cores of each node as Slurm counts them: how many tasks, of any jobs, share a node.
    settings : additional lines of slurm.conf.
    """

    def __init__(self, folder, *, nodes=4, names_resolve=False, cpus=4, settings=()):
        self.folder, self.nodes = folder, nodes
        self.own = folder / "own"
        self._booted: dict[int, int] = {}
        self._cluster = Cluster(nodes + 1, logs=folder, fresh=True)
        self._names_resolve, self._cpus, self._settings = names_resolve, cpus, settings
        self._environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": tools.search_path()}

    def __enter__(self):
        self._write_files()
        self._cluster.__enter__()
        try:
            self._boot(self.nodes, _LOGIN, key=secrets.token_hex(64))
            self._until(
                lambda: "is UP" in self.run("scontrol", "ping", check=False), "slurmctld answers"
            )
            for node in range(self.nodes):
                self.power_on(node, wait=False)
            for node in range(self.nodes):
                self._until_idle(node)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error):
        self.close()

    def close(self):
        """End every process, namespace and link."""
        self._cluster.close()

    @property
    def host_pid(self):
        """The process, as seen from outside, that holds the cluster's namespaces."""
        return self._cluster.host_pid

    def pids(self, node):
        """Return the processes of a node, as seen from outside."""
        return self._cluster.pids(node)

    def name(self, node):
        """Return a node's host name, which is also its name in Slurm."""
        return f"node{node}"

    def run(self, *command, node=None, cwd=ROOT, environment=None, check=True):
        """Run a command on the login node, or on another node, and return its output.

        The environment is that of this process, without the variables that Slurm or torchrun would
        set, plus ``environment``. Raises AssertionError with the output if the command fails.
        """
        target = self._booted[self.nodes if node is None else node]
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "SBATCH_", "RANK", "WORLD_"))
        }
        way = f"nsenter --target={target} --mount --uts --net --pid".split()
        done = subprocess.run(
            [*way, f"--wd={cwd}", "--", *command],
            env=clean | self._environment | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_COMMAND_SECONDS,
        )
        assert not check or done.returncode == 0, (
            f"{' '.join(command)}: status {done.returncode}: {done.stdout}"
        )
        return done.stdout

    def sbatch(self, *arguments, cwd=ROOT, environment=None):
        """Submit a job as a user does and return its id.

        Raises AssertionError with sbatch's message if Slurm refuses it.
        """
        words = ("sbatch", "--parsable", *map(str, arguments))
        return self.run(*words, cwd=cwd, environment=environment).splitlines()[-1]

    def job(self, job):
        """Return what Slurm knows about a job (``12``) or one job of an array (``12_3``).

        The keys are Slurm's: JobState, Restarts, BatchHost, ...
        """
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def state(self, job):
        """Return a job's state: PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, ..."""
        return self.job(job)["JobState"]

    def output(self, job):
        """Return what a job has written so far."""
        path = Path(self.job(job)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, job, *, limit_seconds=180.0):
        """Wait until a job has ended and return its state.

        A requeued job has not ended, so this waits for it, too (see ``start_now``).
        """
        self._until_job(job, lambda: self.state(job) in _ENDED, "ends", limit_seconds)
        return self.state(job)

    def wait_for(self, job, words, *, limit_seconds=120.0):
        """Return as soon as a job has written ``words``; AssertionError if it ends before."""
        path, looks = Path(self.job(job)["StdOut"]), itertools.count(1)

        def written():
            # Ask Slurm before reading the file, so that no output is missed, and only at every
            # 40th check.
            ended = next(looks) % 40 == 0 and self.state(job) in _ENDED
            if path.exists() and words in path.read_text(errors="replace"):
                return True
            assert not ended, f"job {job} ended without {words!r}:\n{self.output(job)}"
            return False

        self._until_job(job, written, f"writes {words!r}", limit_seconds, look_seconds=0.05)

    def wait_until_requeued(self, job, *, restarts=1, limit_seconds=120.0):
        """Return once Slurm has requeued a job ``restarts`` times."""
        self._until_job(
            job, lambda: int(self.job(job)["Restarts"]) >= restarts, "is requeued", limit_seconds
        )

    def start_now(self, job):
        """Start a requeued job at once.

        Slurm lets it wait while credentials are valid: 15 s here, two minutes elsewhere.
        """
        number = self.job(job)["JobId"]
        # Otherwise Slurm takes the previous start's exit status for the next one's. The nodes have
        # also revoked that start's credential, and all that are not at least a second younger.
        self.wait_until_gone(number)
        self._until_job(job, lambda: self.state(job) != "COMPLETING", "is in the queue")
        time.sleep(1.1)  # until that second is over
        # Slurm refuses this if the job has just started.
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)

    def wait_until_gone(self, number):
        """Return once no process of a job runs on any node.

        Slurm reports the end earlier, when the job's shell may still write.
        """
        self._until(lambda: not self._is_running(number), f"the last start of {number} has ended")

    def _is_running(self, number):
        """Return whether a step of a job still has its daemon on a node."""
        pids = [pid for node in range(self.nodes) for pid in self.pids(node)]
        return any(_read(pid, "cmdline").startswith(f"slurmstepd: [{number}.") for pid in pids)

    def power_off(self, node):
        """End everything on a node without notice; Slurm finds out after 10 s or more."""
        # Cut the link first, or slurmd reports the processes that are killed before it.
        self._cluster.fault(node, "cut")
        self._cluster.fault(node, "kill")
        self._until(lambda: not self._cluster.pids(node), f"node {node} is off")

    def power_on(self, node, *, wait=True):
        """Boot a node unless it is on, and wait until jobs can start there."""
        if self.pids(node):
            return
        self._cluster.fault(node, "restore")
        self._boot(node, _NODE)
        if wait:
            self._until_idle(node)

    def _boot(self, node, script, **values):
        script = script.format(name=self.name(node), state=_STATE, folder=self.folder, **values)
        command = [*_OWN_NAMESPACES, "sh", "-c", script]
        self._cluster.start(command, ranks=[node], environment=self._environment, cwd=Path("/"))
        self._until(lambda: self._first_process(node) is not None, f"node {node} boots")
        self._booted[node] = self._first_process(node)

    def _first_process(self, node):
        """Return the process that is number 1 on a node, or None if the node is off."""
        numbered_1 = re.compile(r"^NSpid:.*\s1$", re.MULTILINE)
        pids = self._cluster.pids(node)
        return next((pid for pid in pids if numbered_1.search(_read(pid, "status"))), None)

    def _until_idle(self, node):
        command = ("sinfo", "--noheader", "--nodes", self.name(node), "--format", "%t")
        self._until(
            lambda: self.run(*command).strip() in ("idle", "mix", "alloc"),
            f"{self.name(node)} is idle",
            tell=lambda: self._cluster.output(node) + self.run("sinfo"),
        )

    def _until(self, condition, what, limit_seconds=_UP_SECONDS, *, look_seconds=0.5, tell=str):
        limits = {"timeout_seconds": limit_seconds, "look_seconds": look_seconds}
        wait_until(condition, what, tell=tell, **limits)

    def _until_job(self, job, condition, what, limit_seconds=_UP_SECONDS, **more):
        tell = functools.partial(self._tell, job)
        self._until(condition, f"job {job} {what}", limit_seconds, tell=tell, **more)

    def _tell(self, job):
        return f"it is {self.state(job)}:\n{self.output(job)}"

    def _write_files(self):
        names = [self.name(node) for node in range(self.nodes + 1)]
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={self._cluster.address(node)} CPUs={self._cpus} Gres=gpu:2"
            for node, name in enumerate(names[:-1])
        )
        self.own.mkdir(parents=True)
        conf = _SLURM_CONF.format(
            login=names[-1],
            login_address=self._cluster.address(self.nodes),
            state=_STATE,
            nodes=nodes,
            more="\n".join(self._settings),
        )
        for name, text in {"slurm.conf": conf, **_OTHER_FILES}.items():
            (self.folder / name).write_text(text)
        everyones = "".join(
            f"{self._cluster.address(node)} {name}\n" for node, name in enumerate(names)
        )
        for name in names[:-1]:
            (self.folder / f"disk-{name}").mkdir()
            (self.folder / f"hosts-{name}").write_text(
                "127.0.0.1 localhost\n"
                + (everyones if self._names_resolve else f"127.0.1.1 {name}\n")
            )


def _read(pid, name):
    """Return a file of /proc about a process; "" if it has just ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
