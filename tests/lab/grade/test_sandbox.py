"""Strangers in the sandbox, and what they cannot do. Each has hard limits of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.utils.typed_json import encode
from lab.audit.runner import HOOK
from lab.grade import sandbox
from tests.helpers.audited import BY_FLAGS
from tests.helpers.paths import ROOT
from tests.helpers.processes import running_in
from tests.helpers.waiting import wait_until
from tests.lab.grade.conftest import RUBRIC

LOOKS = """\
import os, socket, subprocess
for what in (
    lambda: open("/usr/new", "w"),
    lambda: open({probe!r}, "a"),
    lambda: open({other!r}),
    lambda: socket.create_connection(("1.1.1.1", 80), 1),
    lambda: subprocess.run(["unshare", "-U", "true"], check=True, stderr=-3),
):
    try:
        print("allowed", what())
    except (OSError, subprocess.SubprocessError) as error:
        print(type(error).__name__)
try:
    open({own!r}, "a").write("# changed")
except OSError:
    pass
open("main.py", "a").write(open("deep/data/images").read())
open("deep/new", "w").close()
subprocess.Popen(["sleep", "300"], env={{}}, start_new_session=True, stdout=-3, stderr=-3)
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
FILLS_WITHOUT_END = """\
import os, time
kept = [bytearray(30_000_000)]
for number in range(7):
    with open(f"{folder}/{{number}}", "wb") as file:
        file.write(bytes(20_000_000))
        if {removed}:
            kept.append(os.dup(file.fileno()))
            os.unlink(file.name)
time.sleep(9)
"""
HIDES_MEMORY = """\
import os, time
for number in range(10):
    with open(os.memfd_create("hidden"), "wb", closefd=False) as file:
        file.write(bytes(20_000_000))
time.sleep(9)
"""
FORKS = "import os, time\nfor _ in range(500):\n    if not os.fork():\n        time.sleep(2)\n"
HOGS = "import os, time\nos.fork()\nkept = bytearray(100_000_000)\ntime.sleep(9)\n"
WRITES = "while True:\n    open({records!r} + '/1.jsonl', 'ab').write(b'x' * 100_000)\n"
HIDES = """\
import os, time
os.mkdir({records!r} + "/deep")
kept = []
for number in range(80):
    kept.append(open({records!r} + "/deep/file", "wb", buffering=0))
    os.unlink({records!r} + "/deep/file")
    kept[-1].write(b"x" * 100_000)
time.sleep(9)
"""
WANTS = """\
import socket
print(sorted(name for _, name in socket.if_nameindex()), socket.gethostbyname("node0"))
open("/users/me/out/log", "w").close()
open("deep/out/log", "w").close()
socket.create_server(("10.10.1.1", 0)).close()
"""
MEMFD = "import os\nos.write(os.memfd_create('hidden'), bytes(10**8)); os.write(3, b'x')\n"

ON_A_FULL_MACHINE = """\
import subprocess, sys, time
from pathlib import Path
import msgspec
from lab.grade import limits, sandbox

folder = Path(sys.argv[1])
is_big = sys.argv[2] == "big"
other = folder / ("small" if is_big else "big")
own = folder / sys.argv[2]

def wait_until(condition):
    while not condition():
        time.sleep(0.02)

def is_full():
    if (folder / "full").exists():
        with (own / "looks").open("a") as looks:
            looks.write("x")
    return (folder / "full").exists()

def looks_of_other():
    return len((other / "looks").read_text()) if (other / "looks").exists() else 0

limits._machine_is_full = is_full
size = 60_000_000 if is_big else 1
script = f"kept = bytearray({size}); print('runs', flush=True); print(input())"
task = msgspec.json.decode((own / "task").read_bytes(), type=sandbox.Task)
ended = []
with sandbox.sandbox(task, own, ended) as network:
    words = [*network.prefixes[0], *task.words, "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as stranger:
        stranger.stdout.readline()
        (own / "runs").touch()
        wait_until((other / "runs").exists)
        if is_big:
            (folder / "full").touch()
            wait_until(lambda: ended)
            before = looks_of_other()
            wait_until(lambda: looks_of_other() > before + 1)
            (folder / "full").unlink()
            (folder / "over").touch()
        else:
            wait_until((folder / "over").exists)
        print(stranger.communicate(None if is_big else "finished")[0], end="")
print(*ended)
"""


@pytest.fixture
def stranger(tmp_path):
    """Run a script in a sandbox with small limits; return its output, and what ended it."""

    def run(script, **wanted):
        (tmp_path / "mounted").mkdir()
        (tmp_path / "mounted/images").write_text("cifar")
        task = small_task(tmp_path, mounts={"deep/data": f"{tmp_path}/mounted"}, **wanted)
        ended = []
        try:
            with sandbox.sandbox(task, tmp_path, ended) as network:
                words = [*network.prefixes[0], sys.executable, "-c", script]
                done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        except (sandbox.UserError, FileNotFoundError) as error:
            pytest.skip(str(error))
        assert (task.cwd / "main.py").read_text() == "mine"
        wait_until(lambda: running_in(tmp_path) == [], "the end of all", timeout_seconds=10)
        return done.stdout + done.stderr, " ".join(ended)

    return run


def small_task(folder, **wanted):
    """Return a task with small limits, and make its submission."""
    (folder / "submission/deep").mkdir(parents=True)
    (folder / "submission/main.py").write_text("mine")
    given = {
        "words": [sys.executable],
        "ranks": [2],
        "submission": f"{folder}/submission",
        "script": "main.py",
        "facts": "",
        "key": "",
        "mounts": {},
        "memory_bytes": 150 * 2**20,
        "disk_bytes": 8 * 2**20,
        "processes": 40,
        "limit_seconds": 10,
        "sandboxed": True,
    }
    return sandbox.Task(**given | wanted)


def test_without_bubblewrap_the_grader_says_once_what_to_install_and_runs_nothing(
    grade, monkeypatch, tmp_path
):
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(sandbox.tools, "search_path", lambda: f"{tmp_path}/bin")
    seen = grade({"ada": {"part2": "open('ran', 'w')\n"}})
    assert (seen.status, seen.error.count("\n")) == (2, 1)
    assert "apt-get install bubblewrap" in seen.error
    assert "--no-sandbox" in seen.error
    assert seen.rows == {}


def test_a_driver_that_others_may_not_read_is_refused_with_what_to_do(grade, tmp_path):
    driver = tmp_path / "own.py"
    driver.write_text("PARTS = {}\n")
    driver.chmod(0o600)
    rubric = RUBRIC.replace('title = "A course"', 'title = "A course"\ndriver = "own.py"')
    rubric = rubric.replace(BY_FLAGS, "python {driver} {script}")
    seen = grade({"ada": {"part2": "x"}}, rubric=rubric)
    assert seen.status == 2
    assert f"chmod -R a+rX {driver}" in seen.error


def test_a_stranger_changes_and_sees_nothing_outside(stranger, tmp_path):
    """Where this checkout lies in /tmp, a stranger has a memory there: the file is what counts."""
    (tmp_path / "other").write_text("another submission")
    own = Path(sandbox.__file__)
    before = own.read_bytes()
    said, _ = stranger(
        LOOKS.format(own=str(own), probe=str(HOOK / "sitecustomize.py"), other=f"{tmp_path}/other")
    )
    assert (said.count("Error"), "allowed" in said) == (5, False), said
    assert own.read_bytes() == before


def test_a_stranger_gets_the_network_and_the_folders_that_he_demands(stranger, tmp_path):
    names = ["eth1", "10.10.1.1", "node0"]
    # The second folder would hide what the sandbox itself needs: it is not made.
    folders = ["/users/me/out", f"{tmp_path}", f"{tmp_path}/submission/deep/out"]
    said, _ = stranger(WANTS, names=names, folders=folders)
    assert said == "['eth1', 'lo', 'peer1'] 10.10.1.1\n"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (FILLS, "/dev/shm No space left on device"),
        (FORKS, "BlockingIOError"),
        (HOGS, "it used more than 0.146 GB of memory: 0."),
        (WRITES, "wrote more than 0.00781 GB of records"),
        (HIDES, "wrote more than 0.00781 GB of records"),
        (MEMFD, "File too large"),
    ],
    ids=["fills", "forks", "hogs", "writes", "hides", "memfd"],
)
def test_what_breaks_a_limit_is_ended_and_named(stranger, tmp_path, script, why):
    assert why in " ".join(stranger(script.replace("{records!r}", repr(f"{tmp_path}/records"))))


@pytest.mark.parametrize(
    "script",
    [
        FILLS_WITHOUT_END.format(folder="/tmp", removed=False),
        FILLS_WITHOUT_END.format(folder="/dev/shm", removed=True),
        FILLS_WITHOUT_END.format(folder=".", removed=False),
        HIDES_MEMORY,
    ],
    ids=["tmp", "shared", "submission", "memfd"],
)
def test_files_that_lie_in_memory_count_as_memory(stranger, script):
    """No file, no folder and no process reaches a limit, and no process maps the files."""
    said, why = stranger(script, disk_bytes=2**30)
    found = re.fullmatch(
        r"it used more than 0.146 GB of memory: (\S+) GB in processes, (\S+) GB in files, .*", why
    )
    assert found, (said, why)
    in_processes, in_files = map(float, found.groups())
    assert in_processes < 0.08
    assert in_files > 0.146 - 0.08


def test_a_folder_in_memory_is_no_larger_than_the_memory(stranger):
    said, _ = stranger(
        "import os\nfor at in ('.', '/tmp', '/dev/shm'):\n"
        "    space = os.statvfs(at)\n    print(space.f_blocks * space.f_frsize)",
        disk_bytes=2**40,
    )
    assert said.split() == [str(150 * 2**20)] * 3


def test_on_a_full_machine_only_the_largest_part_ends(stranger, tmp_path):
    """The machine is full until the other part has seen that twice after the end of the first."""
    stranger("")  # which skips where there is no sandbox
    parts = {}
    for name in ("big", "small"):
        (tmp_path / name).mkdir()
        words = [sys.executable, "-c", ON_A_FULL_MACHINE, tmp_path, name]
        env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        (tmp_path / name / "task").write_bytes(encode(small_task(tmp_path / name)))
        parts[name] = subprocess.Popen(words, env=env, stdout=subprocess.PIPE)
    said = {name: part.communicate(timeout=60)[0].decode() for name, part in parts.items()}
    assert re.fullmatch(
        r"the machine's memory was full, and this part used the most: 0.0[67]\d+ GB\n", said["big"]
    )
    assert said["small"] == "finished\n\n"
