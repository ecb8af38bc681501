"""Starting, watching and ending a script's ranks: nothing may be left, whatever the script does."""

import json
import os
import re
import signal
import sys

import pytest

from lab.audit import runner
from lab.audit.isolation import run_network, sort_names
from lab.audit.runner import start_process
from lab.cluster import tools
from tests.helpers.audited import run_script, start_forked
from tests.helpers.paths import ROOT
from tests.helpers.processes import running_in, start_lab
from tests.helpers.waiting import wait_until
from tests.lab.audit.recordings import FIELDS

TRAINING = """\
import sys, torch, torch.distributed as dist
master, port, world, rank, wanted = *sys.argv[1:3], *map(int, sys.argv[3:6])
dist.init_process_group(
    "gloo", init_method=f"tcp://{master}:{port}", rank=rank, world_size=wanted or world
)
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(100):
    optimizer.zero_grad()
    model(torch.full((3, 2), 1.0 + rank)).mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
"""
STUBBORN = """\
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:  # a daemon: its parent ends, and it has a session of its own
    os.setsid()
    if os.fork():
        os._exit(0)
print("started", flush=True)
time.sleep(1000)
"""
WORKERS = """\
import time
from torch.utils.data import DataLoader
class Slow:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        if index:
            print("started", flush=True)
            time.sleep(1000)
        return index
for batch in DataLoader(Slow(), num_workers=1):
    print("started", flush=True)
"""
WRITES = f"""\
import json, os, time
FIELDS = {FIELDS}
def write(kind, t):
    folder = json.loads(os.environ["LAB_AUDIT"])["folder"]
    with open(folder + f"/{{os.getpid()}}.jsonl", "a") as file:
        file.write(json.dumps({{**FIELDS[kind], "k": kind, "t": t}}) + "\\n")
"""
NAMESPACES = pytest.mark.skipif(
    bool(tools.namespaces_refused()), reason=str(tools.namespaces_refused())
)


def run(folder, script, *, literal=0, size=2, start=start_process, **options):
    """Run a script, see that nothing is left of it, and return how it ended."""
    command = f"python {{script}} {{master}} {{port}} {{nodes}} {{rank}} {literal}"
    end = run_script(folder, script, command=command, size=size, start=start, **options)
    assert running_in(folder) == []
    return end


def test_each_rank_gets_its_words_no_input_and_the_probe(tmp_path):
    script = """\
import json, os, sys
probe = json.loads(os.environ["LAB_AUDIT"])
names = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "OMP_NUM_THREADS")
print(sys.argv[3:5], repr(sys.stdin.read()), probe["rank"], probe["script"])
print([os.environ[name] for name in names], sys.argv[1] + sys.argv[2] == "127.0.0.1"
      + os.environ["MASTER_PORT"])
"""
    end = run(tmp_path, script)
    assert (end.statuses, end.failed, end.recording.steps, end.hung) == ((0, 0), {}, 0, None)
    for rank in range(2):
        said, variables = end.output(rank).splitlines()
        assert said == f"['2', '{rank}'] '' {rank} {tmp_path}"
        assert variables.startswith("['lo', '127.0.0.1', '")
        assert variables.endswith("True")
    starts = [json.loads(path.read_text().splitlines()[0]) for path in end.folder.glob("*.jsonl")]
    assert sorted(start["hint"] for start in starts) == [0, 1]


@pytest.mark.slow
def test_a_rank_that_ignores_sigterm_and_its_daemon_are_ended_after_a_failure(tmp_path):
    script = f"import sys\nif sys.argv[4] == '1': raise ValueError('mine')\n{STUBBORN}"
    end = run(tmp_path / "my lab ü", script)
    assert (end.statuses, end.hung, list(end.failed)) == ((None, 1), None, [1])
    assert "ValueError: mine" in end.output(1)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "literal"), [(2, 4), (3, 2)])
def test_a_literal_number_of_ranks_is_noticed(tmp_path, size, literal):
    end = run(tmp_path, TRAINING, literal=literal, size=size, start=start_forked)
    assert end.wanted_size == literal, (end, end.output(0))


@pytest.mark.slow
def test_commands_that_start_two_ranks_each_are_nodes_of_two(tmp_path):
    """As torchrun does: the script takes the number of nodes, and waits for no other ranks."""
    joins = "dist.init_process_group("
    two = "import os\nchild = os.fork()\nrank, world = 2 * rank + (child == 0), 2 * world\n"
    script = TRAINING.replace(joins, two + joins) + "if child:\n    os.waitpid(child, 0)\n"
    end = run(tmp_path, script, start=start_forked)
    assert (end.recording.size, len(end.recording.ranks)) == (4, 4), end.output(0)
    assert (end.wanted_size, end.fixed_size, end.hung) == (None, None, None)


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_have_hung(tmp_path):
    two_steps = TRAINING.replace("range(100)", "range(2)")
    waits = "if rank:\n    dist.barrier()\nimport time; time.sleep(1000)\n"
    end = run(tmp_path, f"{two_steps}\n{waits}", idle_seconds=4)
    assert end.hung.startswith("no rank made progress for ")
    assert end.recording.steps == 2
    assert (end.folder / "dump").exists()


@pytest.mark.slow
def test_without_a_limit_the_first_steps_say_how_long_to_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_QUIET_SECONDS", 1.0)
    script = "for t in 0, 0.2, 0.4: write('step', t)\nwhile True: pass"
    end = run(tmp_path, WRITES + script, limit_seconds=None)
    assert re.match(r"nothing happened for [45] s, after steps of 0.2 s", end.hung)


@pytest.mark.slow
def test_a_script_that_was_slow_before_the_cut_gets_as_long_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_CUT_SECONDS", 0.5)
    script = """\
time.sleep(2); write("step", 0); write("cut", 0)
time.sleep(2); write("step", 1)
time.sleep(1000)
"""
    end = run(tmp_path, WRITES + script)
    assert (end.recording.steps, end.statuses) == (2, (None, None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags", "number", "whole_group"),
    [
        (STUBBORN, (), signal.SIGINT, True),
        (WORKERS, (), signal.SIGINT, False),
        (STUBBORN, (), signal.SIGTERM, False),
        (STUBBORN, (), signal.SIGKILL, False),
        (WORKERS, (), signal.SIGKILL, False),
        pytest.param(STUBBORN, ("--isolate",), signal.SIGKILL, False, marks=NAMESPACES),
    ],
)
def test_nothing_is_left_when_the_audit_is_stopped_or_killed(
    tmp_path, script, flags, number, whole_group
):
    (tmp_path / "main.py").write_text(script)
    words = ["audit", *flags, "--", sys.executable, "main.py", "{rank}"]
    where = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    audit = start_lab(*words, cwd=tmp_path, env=where, cold=True)
    logs = "lab-audit-*/2-ranks/rank?.log"
    wait_until(
        lambda: [log.read_text() for log in tmp_path.glob(logs)] == ["started\n" * 2] * 2,
        "both ranks",
        timeout_seconds=60,
    )
    assert len(running_in(tmp_path)) >= 5  # two ranks, a child of each, the audit
    (os.killpg if whole_group else os.kill)(audit.process.pid, number)
    end = audit.end(timeout_seconds=30)
    killed = number == signal.SIGKILL
    assert end.status == (-number if killed else 130)
    assert killed or end.err == "interrupted\n"
    wait_until(lambda: running_in(tmp_path) == [], "the end of all", timeout_seconds=15)
    wait_until(lambda: not list(tmp_path.glob("lab-*")), "an empty folder", timeout_seconds=5)


def test_names_to_isolate_are_sorted():
    sorted_names = sort_names(["enp3s0", "10.10.1.2", "node-7.cluster", "ib0"])
    assert sorted_names == (["enp3s0", "ib0"], ["10.10.1.2"], ["node-7.cluster"])
    assert sort_names([]) == (["eth1"], ["10.9.1.1"], [])
    for wrong in ("a b", "10.0.0", "10.0.0.1.2", "$(reboot)", "x;y", "-x"):
        with pytest.raises(ValueError, match="--isolate: got"):
            sort_names([wrong])


@NAMESPACES
def test_isolated_ranks_have_the_interface_address_and_names(tmp_path):
    script = """\
import os, socket
names = [name for _, name in socket.if_nameindex()]
with socket.socket() as listening:
    listening.bind(("10.10.1.2", 0))
print("ens3" in names, socket.gethostname(), socket.gethostbyname("head"), os.getcwd())
print(os.environ["GLOO_SOCKET_IFNAME"], os.environ["MASTER_ADDR"])
"""
    (tmp_path / "records").mkdir()
    names = ["ens3", "10.10.1.2", "head"]
    with run_network(2, tmp_path / "records", tmp_path, isolate=names, rate=None) as network:
        end = run(tmp_path, script, network=network)
    for rank in range(2):
        said = end.output(rank).splitlines()
        assert said == [f"True head 10.10.1.2 {tmp_path}", "ens3 10.10.1.2"], end
    assert "ens3" not in os.listdir("/sys/class/net")
