"""benchmarks/gpu.py, for a GPU that is lent for minutes: a dry run, and calls that go on."""

import json
import re
import sys

import psutil
import pytest

from tests.helpers import ROOT, Started, user_environment

GPU = ROOT / "benchmarks/gpu.py"


def start(*words):
    """Start benchmarks/gpu.py as on a machine without an installation."""
    command = [sys.executable, *map(str, words)]
    return Started(command, cwd=ROOT, env=user_environment(OMP_NUM_THREADS="1"))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_dry_run_runs_every_step_and_a_later_call_goes_on(tmp_path):
    """The first call has time for one step, and that one is not repeated."""
    ended = start(GPU, "--dry-run", "--out", tmp_path, "--budget-seconds", 60.1).end(
        timeout_seconds=300
    )
    assert ended.status == 0, ended.out
    first = json.loads((tmp_path / "results.json").read_text())
    assert {one["status"] for one in first.values()} == {"ok", "waits"}
    assert [name for name, one in first.items() if one["status"] == "ok"] == ["machine"]
    # more than its ten minutes, so that no step waits on a busy machine
    again = start(GPU, "--dry-run", "--out", tmp_path, "--budget-seconds", 3000)
    ended = again.end(timeout_seconds=560)
    found = json.loads((tmp_path / "results.json").read_text())
    assert ended.status == 0, f"{ended.out}\n{found}"
    assert found["machine"] == first["machine"]
    assert all(one["status"] == "ok" for one in found.values())
    assert found["vgg11"]["result"]["ours/plain"] > 0
    assert found["gather_scatter"]["result"]["step_seconds"] > 0
    assert len(ended.out.splitlines()) == len(found) == 9
    assert {f"{name}.log" for name in found} < {path.name for path in tmp_path.iterdir()}


HANGS = """
import subprocess, sys, time
child = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child])
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("code", "status", "last"),
    [
        (HANGS, "killed", None),
        ("raise OSError('no card')", "failed", "OSError: no card"),
        ("pass", "ok", "no output"),
    ],
)
def test_a_step_that_fails_or_hangs_is_recorded_and_leaves_nothing(tmp_path, code, status, last):
    """In a process of its own, since it ends everything that its process has started."""
    step = (
        f"import json, pathlib, sys; sys.path.insert(0, {str(GPU.parent)!r}); import gpu; "
        f"step = gpu.Step('step', ['-c', {code!r}], 60); "
        f"print(json.dumps(gpu.run_step(step, pathlib.Path({str(tmp_path)!r}), 5)))"
    )
    found = json.loads(start("-c", step).end(timeout_seconds=60).out)
    assert found["status"] == status
    if last is None:
        assert not psutil.pid_exists(int((tmp_path / "step.log").read_text()))
    else:
        assert found["result"] == {"last line": last}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # a Python without its site-packages
        (["-S", GPU], "does not find torch, .*, psutil, .*, pytest: install them"),
        ([GPU, "--only", "machin"], r"--only: got machin; choose from \['machine',"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(words, said, tmp_path):
    ended = start(*words, "--out", tmp_path / "out").end(timeout_seconds=30)
    assert ended.status == 2, ended.out
    assert re.search(said, ended.err.replace("\n", " "))
    assert not (tmp_path / "out").exists()
