"""The remote agent as a local process, and launch and collect through a fake ``ssh``.

The fake ``ssh`` runs its command on this machine.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from common.errors import UserError
from common.utils.source_hash import source_digests
from lab.cli import main
from lab.ssh import remote_handlers
from lab.ssh.collect import Listing, _copy_runs, _fetch, _is_safe
from lab.ssh.hosts import Host, SSHOptions, program, ssh_command
from lab.ssh.remote_handlers import read, runs
from tests.helpers import LONG, ROOT, start_lab, wait_until


class RemoteAgent:
    """A remote agent with its input and output, as ssh would connect them."""

    def __init__(self, silence_seconds=LONG):
        there = ssh_command(Host(0, "here"), SSHOptions(str(ROOT), python=sys.executable))[-1]
        self.process = subprocess.Popen(
            ["sh", "-c", there],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.process.stdin.write(program("begin", silence_seconds))
        self.process.stdin.flush()
        assert self.answer() == {"answer": "ready"}

    def send(self, **request):
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self):
        before, token, message = self.process.stdout.readline().partition(b"begin")
        assert (before, token) == (b"", b"begin")
        return json.loads(message)

    def start(self, *command):
        self.send(do="start", command=command, environment={}, folder="/")

    def started(self):
        """Return the agent, a child of the guard process, and everything that it has started."""
        return psutil.Process(self.process.pid).children(recursive=True)


def lives(process):
    """Return whether a process still runs; a dead one may wait to be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def remote_agents():
    made: list[RemoteAgent] = []
    yield made
    for one in made:
        with contextlib.suppress(psutil.Error):
            for process in [*one.started(), one.process]:
                process.kill()
        one.process.wait(LONG)
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
            with contextlib.suppress(OSError):
                stream.close()


@pytest.mark.parametrize("end", ["closed", "silence", "agent killed", "guard killed", "terminated"])
def test_it_ends_all_that_it_has_started_however_it_ends(remote_agents, end):
    """Processes that left the agent's session, or whose parent has ended, count too."""
    remote_agents.append(one := RemoteAgent(silence_seconds=0.5 if end == "silence" else LONG))
    one.start("sh", "-c", "(setsid sh -c 'sleep 1000 & sleep 1000' &) ; echo up; sleep 1000")
    assert one.answer() == {"line": "up"}
    wait_until(lambda: sum(process.name() == "sleep" for process in one.started()) == 3, "all run")
    processes = one.started()
    match end:
        case "closed":
            one.process.stdin.close()
        case "agent killed":
            psutil.Process(one.process.pid).children()[0].kill()
        case "guard killed":
            one.process.kill()
        case "terminated":
            one.process.terminate()
    wait_until(lambda: not any(map(lives, processes)), "all are gone")
    one.process.wait(LONG)
    if end == "agent killed":
        assert one.process.stderr.read() == b"lab's process on the host was killed by signal 9\n"
    elif end != "guard killed":
        assert one.answer() == {"ended": -signal.SIGKILL}, "the end is told where it can be"


def test_a_beat_is_answered_and_keeps_it_alive_and_an_end_is_told_when_all_is_gone(
    remote_agents,
):
    remote_agents.append(one := RemoteAgent(silence_seconds=1.0))
    for _ in range(3):
        time.sleep(0.5)  # three beats take longer than the silence that the agent allows
        one.send(do="beat")
        assert one.answer() == {"answer": "beat", "result": None}
    one.start("sh", "-c", "(setsid sleep 1000 &); printf 'no newline'; exit 3")
    assert [one.answer(), one.answer()] == [{"line": "no newline"}, {"ended": 3}]
    assert [process.name() for process in one.started() if process.name() == "sleep"] == []
    one.start("/no/such/program")
    assert [one.answer(), one.answer()] == [
        {"line": "error: /no/such/program: No such file or directory"},
        {"ended": 127},
    ]
    one.send(do="facts", folder="/no/such/folder", script="x")
    facts = one.answer()["result"]
    assert (facts["folder_there"], facts["script_there"], facts["code"]) == (False, False, None)
    one.send(do="facts", folder=str(ROOT), script="lab/cli.py")
    facts = one.answer()["result"]
    assert facts["script_there"]
    assert facts["code"] == source_digests(), "of the code that the ranks compare, too"
    one.send(do="read", reports="/no/such", path="x", offset=0)
    assert one.answer() == {"answer": "read", "result": None}, "a file that has gone"
    one.send(do="read", reports="/", path="etc", offset=0)
    assert one.answer() == {
        "answer": "read",
        "error": "[Errno 21] Is a directory: '/etc'",
    }, "a request that breaks is answered, too"


@pytest.fixture
def ssh_here(tmp_path, monkeypatch):
    """Put a fake ssh in PATH that prints a login shell's noise, then runs its command here."""
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text(
        '#!/bin/sh\necho Welcome; echo "a banner" >&2\nfor last; do :; done\nexec sh -c "$last"\n'
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_two_ranks_here_and_their_runs_brought_back(ssh_here, capsys):
    """Collect merges what the hosts wrote after the launch, and replaces no other file."""
    there, here = ssh_here / "there", ssh_here / "here"

    def lab(*arguments):
        status = main(list(map(str, arguments)))
        return status, "".join(capsys.readouterr())

    for name in ("PartTwo-ring/earlier", "PartTwo-ring/other"):
        (there / "reports" / name).mkdir(parents=True)
        (there / "reports" / name / "config.json").write_text("{}")
        os.utime(there / "reports" / name / "config.json", (1, 1))
    run = "reports/PartTwo-ring/2026"
    script = (
        f"mkdir -p {run}/checkpoints; cd {run}; echo {{rank}} > logs_rank{{rank}}.txt; test "
        f"{{rank}} = 1 || {{ echo [] > config.json; echo w > checkpoints/Epoch_1.pt; ln -s "
        f"/etc/passwd link; }}; pwd"
    )
    status, output = lab(
        "launch",
        "--hosts",
        "a,a",
        "--master-port",
        "29711",
        "--master-ip",
        "10.0.0.9",
        "--workdir",
        there,
        "--python",
        sys.executable,
        "--output-dir",
        here,
        "--",
        "sh",
        "-c",
        script,
    )
    assert status == 0, output
    assert f"node 1 | {there / run}" in output.splitlines()
    assert "Welcome" not in output
    status, output = lab("collect", "--output-dir", here)
    assert status == 0, output
    got = here / "PartTwo-ring" / "2026"
    assert sorted(path.name for path in got.iterdir()) == [
        "config.json",
        "logs_rank0.txt",
        "logs_rank1.txt",
    ]
    assert [path.name for path in (here / "PartTwo-ring").iterdir()] == ["2026"], (
        "runs from before the launch stay there"
    )
    assert lab("collect", "--checkpoints", "--output-dir", here)[0] == 0
    assert (got / "checkpoints" / "Epoch_1.pt").read_text() == "w\n"
    status, output = lab(
        "collect",
        "--hosts",
        "a",
        "--workdir",
        there,
        "--python",
        sys.executable,
        "--output-dir",
        here,
        "reports/PartTwo-ring/other/",
    )
    assert (status, (here / "PartTwo-ring" / "other" / "config.json").read_text()) == (0, "{}"), (
        output
    )


def test_a_slow_line_is_no_broken_connection(ssh_here, capsys):
    """A file takes several times --silence, and data counts as a message while it arrives."""
    slow = (
        "import os,time\n"
        "while piece := os.read(0, 20_000): os.write(1, piece); time.sleep(len(piece) / 200_000)"
    )
    ssh = ssh_here / "bin" / "ssh"
    throttle = ssh_here / "throttle.py"
    throttle.write_text(slow)
    ssh.write_text(
        f'#!/bin/sh\nfor last; do :; done\nsh -c "$last" | {sys.executable} {throttle}\n'
    )
    run = ssh_here / "there" / "reports" / "PartTwo-ring" / "2026"
    run.mkdir(parents=True)
    (run / "config.json").write_bytes(content := os.urandom(500_000))
    place = ["--hosts", "a", "--workdir", str(ssh_here / "there"), "--python", sys.executable]
    here = ["--output-dir", str(ssh_here / "here"), "--silence", "1"]
    began = time.monotonic()
    assert main(["collect", *place, *here, "PartTwo-ring/2026"]) == 0, capsys.readouterr().err
    assert time.monotonic() - began > 3
    assert (ssh_here / "here" / "PartTwo-ring" / "2026" / "config.json").read_bytes() == content


def start_launch(folder, *flags, command):
    """Start ``lab launch`` on one host; return it and its process."""
    # A fresh interpreter is fast here, since a launch does not import torch.
    process = start_lab(
        "launch",
        "--hosts",
        "a",
        "--workdir",
        "/",
        "--python",
        sys.executable,
        *flags,
        "--logs",
        folder / "logs",
        "--",
        *command,
        cold=True,
    )
    return process, psutil.Process(process.process.pid)


def test_a_launch_that_is_killed_leaves_nothing(ssh_here):
    process, me = start_launch(ssh_here, command=["sh", "-c", "setsid sleep 1000 & sleep 1000"])
    wait_until(
        lambda: sum(one.name() == "sleep" for one in me.children(recursive=True)) == 2, "it runs"
    )
    processes = me.children(recursive=True)
    process.send(signal.SIGKILL)
    process.end(timeout_seconds=LONG)
    wait_until(lambda: not any(map(lives, processes)), "all are gone")


def test_a_host_that_is_silent_while_its_connection_stands_is_given_up(ssh_here):
    """This happens behind a shared ssh master, whose end we cannot wait for."""
    process, me = start_launch(ssh_here, "--silence", "1", command=["sleep", "1000"])
    wait_until(lambda: any(one.name() == "sleep" for one in me.children(recursive=True)), "it runs")
    for one in me.children(recursive=True):
        one.suspend()
    ended = process.end(timeout_seconds=LONG)
    assert ended.status == 255
    assert re.search(
        r"error: the connection to node 0 \(a\) broke after .* \(no message for \d+ s\)",
        ended.err,
    ), ended


class _SendingHost:
    """A fake for the connections that has every file asked for, each of two bytes."""

    hosts = (Host(0, "a"),)

    def __init__(self):
        self.asked: list[str] = []

    def ask(self, what, *, path, **_values):
        assert what == "read"
        self.asked.append(path)
        return {0: {"result": [1, 2, base64.b64encode(b"{}").decode()]}}


class _EndlessHost(_SendingHost):
    """Sends another inode, a growing size, or a size of a petabyte with every piece."""

    def __init__(self, *, inode, bytes_more):
        super().__init__()
        self.facts, self.more = [0, 2], (inode, bytes_more)

    def ask(self, what, *, path, **values):
        self.facts = [fact + more for fact, more in zip(self.facts, self.more, strict=True)]
        return {0: {"result": [*self.facts, base64.b64encode(b"x" * 4).decode()]}}


@pytest.mark.parametrize(("inode", "more"), [(1, 9), (0, 2**50)])
def test_a_host_that_never_ends_a_file_is_given_up(inode, more):
    with pytest.raises(UserError, match=r"node 0 \(a\): best.pt .*copy it by hand"):
        _fetch(_EndlessHost(inode=inode, bytes_more=more), 0, "/r", "best.pt", 6)


@pytest.mark.parametrize("result", [[1, 2], "x", [1, 2, "not base64!"], [1, 2, None], {}])
def test_another_answer_than_a_piece_is_one_message(result):
    class Host(_SendingHost):
        def ask(self, what, **_values):
            return {0: {"result": result}}

    with pytest.raises(UserError, match="sent another answer"):
        _fetch(Host(), 0, "/r", "best.pt", 6)


class _ReplacingHost(_SendingHost):
    """Replaces a file of 6 bytes by one of 8 after its first piece; a piece has at most 4 bytes."""

    def ask(self, what, *, path, **values):
        inode, content = (1, b"oldold") if not self.asked else (2, b"newnewer")
        self.asked.append(path)
        piece = content[values["offset"] :][:4]
        return {0: {"result": [inode, len(content), base64.b64encode(piece).decode()]}}


def test_a_file_that_is_replaced_while_it_is_fetched_arrives_whole():
    assert _fetch(_ReplacingHost(), 0, "/r", "best.pt", 6) == b"newnewer"


def test_a_run_that_goes_on_meanwhile(tmp_path):
    """Its records grow, are cut and are replaced, and a checkpoint goes, while they are copied.

    What arrives is a whole state of each file, and a later collect completes it.
    """
    run, here = tmp_path / "PartTwo-ring" / "2026", tmp_path / "here"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", "epochs.jsonl", "summary.json"):
        (run / name).write_text("old\n")
    (run / "checkpoints" / "Epoch_1.pt").write_text("old\n")

    class RunningHost(_SendingHost):
        changes = True

        def ask(self, what, *, nodes, limit_seconds, **values):
            if self.changes:
                with (run / "metrics.jsonl").open("a") as file:
                    file.write("new\n")
                (run / "epochs.jsonl").write_text("cu")
                (run / "new").write_text("replaced\n")
                (run / "new").rename(run / "summary.json")
                (run / "checkpoints" / "Epoch_1.pt").unlink()
                self.changes = False
            return {0: {"result": read(**values)}}

    host = RunningHost()
    for copied in (4, 0):
        found = runs("/", str(tmp_path), ["PartTwo-ring/2026"], 0.0, checkpoints=True)
        listing = msgspec.convert(found, Listing)
        outcome = _copy_runs(host, {0: listing}, here)
        assert (outcome.written, outcome.kept) == (copied, [])
    there = {path.name: path.read_text() for path in run.iterdir() if path.is_file()}
    copies = {path.name: path.read_text() for path in (here / "PartTwo-ring/2026").iterdir()}
    assert copies == there
    assert there["metrics.jsonl"] == "old\nnew\n"


def test_files_that_go_while_they_are_listed_are_left_out(tmp_path, monkeypatch):
    run = tmp_path / "PartTwo-ring" / "2026"
    run.mkdir(parents=True)
    for name in ("config.json", "a", "b"):
        (run / name).write_text("{}")
    digest, lstat = remote_handlers._digest_of_existing, Path.lstat

    def digest_later(path):
        (run / "a").unlink(missing_ok=True)
        return digest(path)

    def lstat_later(path):
        (run / "b").unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(remote_handlers, "_digest_of_existing", digest_later)
    monkeypatch.setattr(Path, "lstat", lstat_later)
    [files] = runs("/", str(tmp_path), [], 0.0, checkpoints=True)["runs"].values()
    assert list(files) == ["config.json"]


def test_files_come_only_under_safe_names_and_replace_no_different_one(tmp_path):
    """This holds whatever names a host lists."""
    here = tmp_path / "here"
    (here / "PartTwo-ring" / "2026").mkdir(parents=True)
    for name, content in (("same", "{}"), ("shorter", "{"), ("other", "[]")):
        (here / "PartTwo-ring" / "2026" / name).write_text(content)
    new = ["same", "shorter", "other", "config.json", "a/b.txt"]
    digest = hashlib.sha256(b"{}").hexdigest()
    files = {name: [2, digest] for name in (*new, "../../../out")}
    other = {"out/x": [2, digest]}
    (tmp_path / "outside").mkdir()
    (here / "PartTwo-ring" / "2026" / "link").symlink_to(tmp_path / "outside")
    files |= {"link/x": [2, digest], ".hidden": [2, digest]}
    listing = Listing("/r", {"PartTwo-ring/2026": files, "..": other, "/etc": other})
    host = _SendingHost()
    outcome = _copy_runs(host, {0: listing, 1: listing}, here)
    run = here / "PartTwo-ring" / "2026"
    asked = [f"PartTwo-ring/2026/{name}" for name in new[1:]]
    assert sorted(host.asked) == sorted(asked), "each file once"
    written = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {run / name for name in new}
    assert {path.read_text() for path in written - {run / "other"}} == {"{}"}
    assert (run / "other").read_text() == "[]"
    assert (outcome.written, outcome.same, outcome.kept) == (3, 1, [run / "other"])
    assert outcome.runs["PartTwo-ring/2026"] == [0, 1]
    assert len(outcome.refused) == 5
    assert not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize(
    ("path", "safe"),
    [
        ("PartTwo-ring/2026/config.json", True),
        ("PartTwo-ring/2026/a/b.txt", True),
        ("../2026/config.json", False),
        ("/etc/2026/config.json", False),
        ("PartTwo-ring/2026/../../x", False),
        ("PartTwo-ring/2026", False),
    ],
)
def test_where_a_host_may_have_files_put(path, safe):
    assert _is_safe(path) == safe


def test_bad_input_of_collect_is_one_message(tmp_path, capsys):
    for arguments, message in [
        (["--output-dir", tmp_path], f"{tmp_path} has no folder of lab launch"),
        ([tmp_path], f"{tmp_path} is not a folder of lab launch (no launch.json of format 1)"),
        (["--hosts", "a"], "--hosts needs the names of runs"),
        (["--workdir", "x", tmp_path], "--workdir works only with --hosts"),
    ]:
        assert main(["collect", *map(str, arguments)]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"error: {message}"), told
        assert told.count("\n") == 1
