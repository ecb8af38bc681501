"""What a host runs, as a local process, and launch and collect through a fake ``ssh``.

The fake ``ssh`` runs its command on this machine.
"""

import contextlib
import io
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import tarfile
import time

import psutil
import pytest

from common.utils.source_hash import code_facts
from lab.cli import main
from lab.ssh.collect import _store
from lab.ssh.hosts import Host, SSHOptions, ssh_command
from lab.ssh.node import READY, RESULT, send_runs
from tests.helpers import LONG, ROOT, free_port, start_lab, wait_until

THERE = ("--python", sys.executable)


def lives(process):
    """Return whether a process still runs; a dead one may wait to be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def below(pid, name="sleep"):
    """Return the processes of that name that descend from a process."""
    found = []
    for one in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a shell that has just ended
            found += [one] * (one.name() == name)
    return found


@pytest.fixture
def serve():
    """Serve requests in new processes, as ssh would start them; kill what is left."""
    made = []

    def start(**request):
        words = ssh_command(Host(0, "here"), SSHOptions(python=sys.executable))
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        made.append(process := subprocess.Popen(["sh", "-c", words[-1]], **pipes))
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"\n"
        assert process.stdout.readline() == READY
        return process

    yield start
    for process in made:
        process.stdin.close()  # which ends it, with all that it has started
        process.wait(LONG)
        process.stdout.close()
        process.stderr.close()


def run_there(serve, *command, silence_seconds=LONG):
    return serve(do="run", command=command, environment={}, silence_seconds=silence_seconds)


def result(process):
    """Return the lines that a process has written, and the result of its request."""
    output, errors = process.stdout.read(), process.stderr.read()
    return output.decode().splitlines(), json.loads(errors.partition(RESULT)[2])


@pytest.mark.parametrize("end", ["closed", "silence", "terminated"])
def test_nothing_is_left_on_a_host(serve, end):
    """Processes that left the session, or whose parent has ended, count too."""
    command = "(setsid sh -c 'sleep 1000 & sleep 1000' &) ; echo up; sleep 1000"
    process = run_there(serve, "sh", "-c", command, silence_seconds=1 if end == "silence" else LONG)
    assert process.stdout.readline() == b"up\n"
    wait_until(lambda: len(below(process.pid)) == 3, "all run")
    sleepers = below(process.pid)
    if end == "closed":
        process.stdin.close()
    if end == "terminated":
        process.terminate()
    wait_until(lambda: not any(map(lives, sleepers)), "all are gone")
    process.wait(LONG)


def test_a_sign_of_life_keeps_the_command_and_a_signal_reaches_it(serve):
    command = "trap 'echo got it; exit 3' TERM; echo up; while true; do sleep 0.1; done"
    process = run_there(serve, "sh", "-c", command, silence_seconds=1)
    for _ in range(4):  # together longer than the silence that is allowed
        time.sleep(0.5)
        os.write(process.stdin.fileno(), b"\0")
    assert process.poll() is None
    os.write(process.stdin.fileno(), bytes([signal.SIGTERM]))
    lines, status = result(process)
    assert (lines[-1], status) == ("got it", 3)


def test_the_end_of_a_command_is_told_when_all_is_gone(serve):
    process = run_there(serve, "sh", "-c", "(setsid sleep 1000 &); printf 'no newline'; exit 3")
    assert result(process) == (["no newline"], 3)
    process = run_there(serve, "/no/such/program")
    assert result(process) == (["error: /no/such/program: No such file or directory"], 127)
    assert result(run_there(serve, "sh", "-c", "kill -9 $$")) == ([], -9)


def test_facts_of_a_host(serve):
    _, facts = result(serve(do="facts", script="lab/cli.py"))
    assert facts["script_there"]
    assert facts["folder"] == str(ROOT)
    assert facts["code"].items() > code_facts().items(), "of the code that the ranks compare, too"
    assert not result(serve(do="facts", script="no/such/file.py"))[1]["script_there"]


def test_an_address_is_found_where_a_host_listens(serve):
    """Guests that connect and say nothing delay nobody."""
    port = free_port()
    listening = serve(do="listen", port=port)
    assert listening.stdout.readline() == b"listening\n"
    own = result(serve(do="facts", script=None))[1]["addresses"]
    for _ in range(3):
        names = ["no.such.host", "127.0.0.1", *own]
        _, reached = result(serve(do="connect", names=names, port=port))
        assert reached == dict.fromkeys(own, ""), "loopback is no address for others"
    assert set(result(serve(do="connect", names=own, port=free_port()))[1].values()) == (
        {"connection refused"} if own else set()
    )
    taken = serve(do="listen", port=port)
    assert taken.stderr.read() == b"address already in use\n"


@pytest.fixture
def ssh_here(tmp_path, monkeypatch):
    """Put a fake ssh in PATH that prints a login shell's noise, then runs its command here.

    In its own session, as on a host: what kills ssh does not reach it.
    """
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text(
        '#!/bin/sh\necho Welcome; echo "a banner" >&2\nfor last; do :; done\n'
        'setsid -w sh -c "$last"\n'
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def make_run(reports, name="PartTwo-ring/2026", **files):
    for path, content in ({"config.json": "{}"} | files).items():
        file = reports / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return reports / name


def test_two_ranks_here_and_their_runs_brought_back(ssh_here, capsys):
    """Collect merges what the hosts wrote after the launch, and replaces no other file."""
    there, here = ssh_here / "there", ssh_here / "my runs"

    def lab(*arguments):
        status = main([*map(str, arguments), *THERE, "--output-dir", str(here)])
        return status, "".join(capsys.readouterr())

    for name in ("PartTwo-ring/earlier", "PartTwo-ring/other"):
        os.utime(make_run(there, name) / "config.json", (1, 1))
    run = there / "PartTwo-ring/2026"
    script = (
        f"mkdir -p {run}/checkpoints; cd {run}; echo {{rank}} > logs_rank{{rank}}.txt; "
        "test {rank} = 1 || { echo [] > config.json; echo w > checkpoints/Epoch_1.pt; "
        "ln -s /etc/passwd link; }; pwd"
    )
    place = ["--hosts", "a,a", "--master-port", "29711", "--master-ip", "10.0.0.9", *THERE]
    command = ["--output-dir", here, "--", "sh", "-c", script, "--output-dir", there]
    status = main([*map(str, ["launch", *place, *command])])
    output = "".join(capsys.readouterr())
    assert status == 0, output
    assert f"node 1 | {run}" in output.splitlines()
    assert "Welcome" not in output
    status, output = lab("collect")
    assert status == 0, output
    got = here / "PartTwo-ring" / "2026"
    assert shlex.split(output.partition("next: ")[2])[:3] == ["lab", "report", str(got)]
    assert {path.name for path in got.iterdir()} == {
        "config.json",
        "logs_rank0.txt",
        "logs_rank1.txt",
    }
    assert list((here / "PartTwo-ring").iterdir()) == [got], "older runs stay there"
    assert lab("collect", "--checkpoints")[0] == 0
    assert (got / "checkpoints" / "Epoch_1.pt").read_text() == "w\n"
    by_name = ["collect", "--hosts", "a", "PartTwo-ring/other/", "--remote-reports"]
    status, output = lab(*by_name, there)
    assert (status, (here / "PartTwo-ring/other/config.json").read_text()) == (0, "{}"), output


def test_several_ranks_on_a_host_have_places_prefixes_and_logs_of_their_own(ssh_here, capsys):
    logs = ssh_here / "logs"
    place = ["--hosts", "a,b", "--ranks-per-node", "2", "--master-port", "29711"]
    words = "echo {rank} of {nodes} on {node}.{local_rank}; test {rank} != 3 || exit 7"
    flags = [*place, "--master-ip", "10.0.0.9", *THERE, "--logs", str(logs)]
    status = main(["launch", *flags, "--", "sh", "-c", words])
    captured = capsys.readouterr()
    assert status == 7, captured
    expected = {
        f"node {rank // 2} rank {rank} | {rank} of 4 on {rank // 2}.{rank % 2}" for rank in range(4)
    }
    assert expected <= set(captured.out.splitlines())
    assert "2 hosts, a to b, 2 ranks on each" in captured.out
    assert {path.name for path in logs.glob("*.log")} == {
        "node0-rank0.log",
        "node0-rank1.log",
        "node1-rank2.log",
        "node1-rank3.log",
    }
    assert "rank 3 ended with status 7" in captured.err
    assert str(logs / "node1-rank3.log") in captured.err


def test_a_dry_run_prints_what_a_launch_then_does_and_reaches_no_host(ssh_here, capsys):
    """Its lines, typed by hand, give what the launch gives: a program's words and variables."""
    ssh = ssh_here / "bin/ssh"
    calls = ssh_here / "calls"
    ssh.write_text(ssh.read_text().replace("\n", f'\nprintf "%s\\n" "$*" >> {calls}\n', 1))
    program = ssh_here / "my words.py"
    program.write_text(
        "import os, sys\nprint('was given', sys.argv[1:], os.environ.get('PYTHONUNBUFFERED'))\n"
    )
    flags = ["--hosts", "a,a", "--master-port", "29711", "--master-ip", "10.0.0.9", *THERE]
    command = ["--", "python", str(program), "{rank} of {nodes}", "{master}:{port}", "$HOME"]
    assert main(["launch", *flags, "--dry-run", *command]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not calls.exists()
    typed = [line for line in lines if str(program) in line]
    said = [
        subprocess.run(line, shell=True, capture_output=True, text=True, timeout=LONG).stdout
        for line in typed
    ]
    assert main(["launch", *flags, "--logs", str(ssh_here / "logs"), *command]) == 0
    logs = [(ssh_here / f"logs/node{rank}.log").read_text() for rank in range(2)]
    assert said == logs
    assert "'1 of 2', '10.0.0.9:29711', '$HOME'] 1" in said[1]
    reached = [shlex.split(line.partition("over: ")[2]) for line in lines if "over: ssh" in line]
    assert {" ".join(words[1:]) for words in reached} == set(calls.read_text().splitlines())


def test_a_slow_line_is_no_broken_connection(ssh_here, capsys):
    """A file takes several times --silence."""
    throttle = ssh_here / "throttle.py"
    throttle.write_text(
        "import os,time\n"
        "while piece := os.read(0, 20_000): os.write(1, piece); time.sleep(len(piece) / 200_000)"
    )
    throttled = f"{shlex.quote(sys.executable)} {throttle}"
    (ssh_here / "bin" / "ssh").write_text(
        f'#!/bin/sh\nfor last; do :; done\nsh -c "$last" | {throttled}\n'
    )
    content = os.urandom(250_000).hex()
    make_run(ssh_here / "there", **{"config.json": content})
    flags = ["--remote-reports", ssh_here / "there", "--output-dir", ssh_here / "here", *THERE]
    began = time.monotonic()
    words = ["collect", "--hosts", "a", "--silence", "1", *flags, "PartTwo-ring/2026"]
    assert main([*map(str, words)]) == 0, capsys.readouterr().err
    assert time.monotonic() - began > 2
    assert (ssh_here / "here" / "PartTwo-ring/2026/config.json").read_text() == content


@pytest.mark.parametrize("end", ["killed", "a second interrupt"])
def test_a_launch_that_ends_at_once_leaves_nothing(ssh_here, end):
    """The command ignores signals, and has two minutes to save after the first one."""
    # A fresh interpreter is fast here, since a launch does not import torch.
    place = ["--hosts", "a", *THERE, "--logs", ssh_here / "logs"]
    command = "trap '' INT TERM; setsid sleep 1000 & sleep 1000"
    process = start_lab("launch", *place, "--", "sh", "-c", command, cold=True)
    wait_until(lambda: len(below(process.process.pid)) == 2, "it runs")
    processes = psutil.Process(process.process.pid).children(recursive=True)
    if end == "killed":
        process.send(signal.SIGKILL)
        process.end(timeout_seconds=LONG)
    else:
        process.send(signal.SIGTERM)
        process.wait_for("sent to every node")
        process.send(signal.SIGINT)
        assert process.end(timeout_seconds=60).status == 128 + signal.SIGTERM
    wait_until(lambda: not any(map(lives, processes)), "all are gone")


def test_a_host_without_a_checkout_is_one_message(ssh_here, capsys):
    (ssh_here / "empty").mkdir()
    python = ssh_here / "python"  # one in which the project isn't installed
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -ES "$@"\n')
    python.chmod(0o755)
    for folder, told in (("empty", "the folder has no checkout"), ("none", "there is no folder")):
        words = ["launch", "--hosts", "a", "--workdir", str(ssh_here / folder)]
        words += ["--python", str(python)]
        assert main([*words, "--", "hostname"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "error: 1 of 1 host cannot take part; nothing was started"
        assert lines[1].startswith(f"  node 0 (a): {told}")
        assert len(lines) == 2


def test_a_host_that_is_cut_off_while_it_sends_is_one_message(ssh_here, capsys):
    ssh = ssh_here / "bin" / "ssh"
    ssh.write_text(ssh.read_text().strip() + " | head -c 700")
    make_run(ssh_here / "there")
    flags = ["--remote-reports", str(ssh_here / "there"), "--output-dir", str(ssh_here / "here")]
    status = main(["collect", "--hosts", "a", *THERE, *flags, "PartTwo-ring"])
    told = capsys.readouterr().err
    assert (status, told.count("\n")) == (2, 1)
    assert "its files were not copied completely" in told


def archive_of(monkeypatch, reports, *names, checkpoints=False):
    """Return the files that a host sends, by name."""
    output = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", output)
    send_runs("/", str(reports), names, 0.0, checkpoints)
    output.buffer.seek(0)
    with tarfile.open(fileobj=output.buffer) as archive:
        return {one.name: archive.extractfile(one).read().decode() for one in archive}


def test_a_run_that_goes_on_meanwhile(tmp_path, monkeypatch):
    """A file may grow, go or be replaced; hidden files are unfinished, links are nobody's."""
    run = make_run(tmp_path, gone="", replaced="old", **{".hidden": "", "checkpoints/a.pt": "w"})
    (run / "link").symlink_to("/etc/passwd")
    os.link(run / "config.json", run / "same")
    add = tarfile.TarFile.addfile

    def add_later(archive, member, file):
        (run / "gone").unlink(missing_ok=True)
        if member.name.endswith("replaced"):
            (run / "new").write_text("newer")
            (run / "new").rename(run / "replaced")
        add(archive, member, file)

    monkeypatch.setattr(tarfile.TarFile, "addfile", add_later)
    got = archive_of(monkeypatch, tmp_path, "PartTwo-ring")
    start = "PartTwo-ring/2026/"
    assert got == {start + "config.json": "{}", start + "same": "{}", start + "replaced": "old"}
    got = archive_of(monkeypatch, tmp_path, "PartTwo-ring/2026", checkpoints=True)
    assert got[start + "checkpoints/a.pt"] == "w"
    assert not archive_of(monkeypatch, tmp_path, "PartTwo-ring/2025")


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("PartTwo-ring/2026/new", "copied"),
        ("PartTwo-ring/2026/a/b.txt", "copied"),
        ("PartTwo-ring/2026/same", "same"),
        ("PartTwo-ring/2026/shorter", "copied"),
        ("PartTwo-ring/2026/other", "kept"),
        ("PartTwo-ring/2026/folder", "kept"),
        ("PartTwo-ring/2026", "refused"),
        ("PartTwo-ring/2026/../../../out", "refused"),
        ("PartTwo-ring/2026/.hidden", "refused"),
        ("PartTwo-ring/2026/link/x", "refused"),
        ("PartTwo-ring/2026/\x1b[2J", "refused"),
        ("/etc/2026/x", "refused"),
        ("../2026/config.json", "refused"),
    ],
)
def test_files_come_only_under_safe_names_and_replace_no_different_one(tmp_path, name, stored):
    """This holds whatever names a host lists; a file that has only grown is replaced."""
    here, outside = tmp_path / "here", tmp_path / "outside"
    run = make_run(here, same="{}", shorter="{", other="[]", **{"folder/x": ""})
    outside.mkdir()
    (run / "link").symlink_to(outside)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert _store(here, name, b"{}") == stored
    assert (run / "other").read_text() == "[]"
    added = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert added <= {here / name}
    if stored == "copied":
        assert (here / name).read_text() == "{}"


def test_bad_input_of_collect_is_one_message(tmp_path, capsys):
    for arguments, message in [
        (["--output-dir", tmp_path], f"{tmp_path} has no folder of lab launch"),
        ([tmp_path], f"{tmp_path} is not a folder of lab launch (no launch.json)"),
        (["--hosts", "a"], "--hosts needs the names of runs"),
    ]:
        assert main(["collect", *map(str, arguments)]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"error: {message}")
        assert told.count("\n") == 1
