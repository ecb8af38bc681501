"""Strangers in the sandbox: what they cannot do. Each has hard limits of its own."""

import subprocess
import sys

import pytest

from lab.grade import sandbox
from lab.grade.sandbox import Task
from tests.helpers.processes import running_in
from tests.helpers.waiting import wait_until

REFUSED = sandbox.refused()
pytestmark = pytest.mark.skipif(bool(REFUSED), reason=str(REFUSED))

MEGABYTE = 2**20
HOG = """\
import os, time
kept = []
os.fork()
while True:
    kept.append(bytearray(b"x" * 20_000_000))
    time.sleep(0.05)
"""
FORKS = """\
import os, time
number = 0
try:
    while os.fork() and number < 500:
        number += 1
    time.sleep(3)
except OSError:
    print("refused after", number)
"""
FILLS = """\
for folder in (".", "/tmp", "/dev/shm"):
    try:
        with open(folder + "/big", "wb") as file:
            while True:
                file.write(b"x" * 1_000_000)
    except OSError as error:
        print(folder, error.strerror)
"""
RECORDS = """\
while True:
    open({records!r} + "/1.jsonl", "ab").write(b"x" * 1_000_000)
"""
LOOKS = """\
import os, signal, socket, subprocess
for what in (
    lambda: open("/usr/new", "w"),
    lambda: open({own!r}, "w"),
    lambda: open({other!r}),
    lambda: socket.create_connection(("1.1.1.1", 80), 1),
    lambda: subprocess.run(["unshare", "-U", "true"], check=True, stderr=-3),
    lambda: os.kill(1, signal.SIGKILL) or os.kill(1, 0),
):
    try:
        what()
        print("allowed")
    except (OSError, subprocess.SubprocessError) as error:
        print(type(error).__name__)
print(os.getuid() in (0, 61_003), open("main.py").read() == "mine", sorted(os.listdir("/tmp")))
open("main.py", "w").write("changed")
subprocess.Popen(["sleep", "300"], env={{}}, start_new_session=True, stdout=-3, stderr=-3)
"""


@pytest.fixture
def stranger(tmp_path):
    """Run a script in a sandbox with small limits; return its status, output and what ended it."""

    def run(script):
        task = Task(
            words=[sys.executable],
            ranks=[2],
            submission=str(tmp_path / "submission"),
            script="main.py",
            facts="",
            key="",
            mounts={},
            memory_bytes=150 * MEGABYTE,
            disk_bytes=8 * MEGABYTE,
            processes=40,
            limit_seconds=10,
            sandboxed=True,
            slot=3,
        )
        task.cwd.mkdir()
        task.cwd.chmod(0o755)
        (task.cwd / "main.py").write_text("mine")
        ended = []
        with sandbox.sandbox(task, tmp_path, ended) as network:
            words = [*network.prefixes[0], sys.executable, "-c", script]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert (task.cwd / "main.py").read_text() == "mine"
        wait_until(lambda: running_in(tmp_path) == [], "the end of all", timeout_seconds=10)
        return done.returncode, done.stdout.splitlines(), ended

    return run


def test_a_stranger_sees_a_copy_and_changes_nothing_outside(stranger, tmp_path):
    (tmp_path / "other").write_text("another submission")
    status, lines, _ = stranger(LOOKS.format(own=sandbox.__file__, other=f"{tmp_path}/other"))
    assert "allowed" not in lines[:5]
    assert (status, lines[6].split()[:2]) == (0, ["True", "True"])


@pytest.mark.parametrize(
    ("script", "reason"), [(HOG, "used more than"), (RECORDS, "wrote more than")]
)
def test_too_much_memory_or_too_many_records_end_it(stranger, tmp_path, script, reason):
    status, _, ended = stranger(script.format(records=str(tmp_path / "records")))
    assert status != 0
    assert [one[: len(reason)] for one in ended] == [reason]


def test_the_number_of_processes_and_the_disk_are_limited(stranger, tmp_path):
    assert stranger(FILLS)[1] == [
        f"{one} No space left on device" for one in (".", "/tmp", "/dev/shm")
    ]


def test_forks_end_at_the_limit(stranger):
    _, lines, ended = stranger(FORKS)
    assert ended == []
    assert 0 < min(int(line.split()[-1]) for line in lines) <= 40


def test_without_bubblewrap_mounts_of_unshare_do_the_same(stranger, monkeypatch, tmp_path):
    which = sandbox.shutil.which
    monkeypatch.setattr(
        sandbox.shutil,
        "which",
        lambda name, **more: None if name == "bwrap" else which(name, **more),
    )
    test_a_stranger_sees_a_copy_and_changes_nothing_outside(stranger, tmp_path)


def test_without_permission_for_namespaces_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(sandbox, "_mounting", lambda *_: (["sh", "-c", "echo no; exit 1"], []))
    assert "no; install the package bubblewrap" in str(sandbox.refused())
