"""Scripts that attack the audit: every one ends with status 2 and one line, and leaves nothing."""

import sys

import pytest

from common.errors import UserError
from lab.audit import recording, runner
from lab.audit.isolation import LOOPBACK, run_network
from lab.cluster import tools
from tests.helpers.processes import running_in
from tests.helpers.waiting import wait_until

FOLDER = """\
import json, os, sys, time
folder = json.loads(os.environ["LAB_AUDIT"])["folder"]
records = f"{folder}/{os.getpid()}.jsonl"
"""
SLEEPS = "time.sleep(1000)\n"
LOG_FIFO = """\
for rank in (0, 1):
    try:
        os.unlink(f"{folder}/rank{rank}.log"); os.mkfifo(f"{folder}/rank{rank}.log")
    except OSError:
        pass
sys.exit(1)
"""
ENDLESS_LINE = """\
with open(records, "a") as file:
    while file.tell() < 3_000_000:
        file.write("x" * 100_000)
"""
ENDLESS_OUTPUT = """\
for _ in range(30):
    print("x" * 100_000, end="", flush=True)
"""
NO_FOLDER = """\
import shutil
time.sleep(1)
shutil.rmtree(folder, ignore_errors=True)
"""
NONSENSE = """\
open(records, "a").write('{"k": "group", "t": 0, "rank": [], "world": 2, "at": null}\\n')
sys.exit()
"""
OLD_TORCH = 'open(records, "a").write(\'{"k": "torch", "t": 0, "version": "1.13.1+cpu"}\\n\')\n'
CASES = {
    "fifo": ("os.unlink(records); os.mkfifo(records)\n", "jsonl is a FIFO, not a regular file"),
    "link": (
        "os.unlink(records); os.symlink('/dev/zero', records)\n",
        "jsonl is a link, not a regular file",
    ),
    "log": (LOG_FIFO, "log is a FIFO, not a regular file"),
    "line": (ENDLESS_LINE, "and at most 1,000,000 are read"),
    "output": (ENDLESS_OUTPUT, "printed more than 1,000,000 bytes"),
    "brackets": ("open(records, 'a').write('[' * 100_000 + '\\n')\n", "no sense (RecursionError"),
    "nonsense": (NONSENSE, "the records make no sense (TypeError"),
    "no folder": (NO_FOLDER, "the records make no sense (FileNotFoundError"),
    "old torch": (OLD_TORCH, "torch 1.13.1+cpu, and lab audit works with torch 2.0 and newer"),
}
DAEMON = """\
import subprocess
subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True, stdout=-3, stderr=-3)
"""


@pytest.fixture
def ended(tmp_path, refusal):
    """Audit a script; return the one line that says why it cannot be. Nothing may be left."""

    def run(script):
        (tmp_path / "main.py").write_text(FOLDER + script)
        said = refusal("--timeout", "30", "--", sys.executable, "main.py", "{rank}")
        assert said.startswith("error: could not be run")
        assert running_in(tmp_path) == []
        return said

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("script", "message"), CASES.values(), ids=CASES)
def test_what_a_script_does_to_the_records_is_told_on_one_line(ended, monkeypatch, script, message):
    monkeypatch.setattr(recording, "MOST_RECORDS", 1_000_000)
    monkeypatch.setattr(runner, "MOST_OUTPUT", 1_000_000)
    monkeypatch.setattr(runner, "_TERMINATE_SECONDS", 0.0)
    assert message in ended(script + SLEEPS)


@pytest.mark.slow
@pytest.mark.skipif(bool(tools.namespaces_refused()), reason=str(tools.namespaces_refused()))
def test_a_daemon_with_an_empty_environment_ends_with_its_run(ended):
    assert "before any torch.optim optimiser took a step" in ended(DAEMON)


def test_without_namespaces_the_ranks_run_as_they_are_and_none_are_isolated(tmp_path, monkeypatch):
    monkeypatch.setattr(tools, "unshare_command", lambda *_: None)
    with run_network(2, tmp_path, tmp_path, isolate=None, rate=None) as network:
        assert network == LOOPBACK
    wait_until(lambda: running_in(tmp_path) == [], "the end of all", timeout_seconds=5)
    monkeypatch.setattr(tools, "namespaces_refused", lambda: "start it as root")
    refused = pytest.raises(UserError, match=r"--isolate: this machine allows no .*: start it as")
    with refused, run_network(2, tmp_path, tmp_path, isolate=[], rate=None):
        pass
