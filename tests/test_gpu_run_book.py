"""benchmarks/gpu.py, for a GPU that is lent for minutes: a dry run, and calls that go on."""

import json
import sys

import psutil
import pytest

from tests.helpers import ROOT, Started, user_environment

GPU = ROOT / "benchmarks/gpu.py"


def start(*arguments, **variables):
    """Start benchmarks/gpu.py as on a machine without an installation."""
    command = [sys.executable, GPU, *map(str, arguments)]
    return Started(command, cwd=ROOT, env=user_environment(OMP_NUM_THREADS="1", **variables))


def results(out):
    return json.loads((out / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_runs_every_step_and_a_later_call_goes_on(tmp_path):
    """The first call has time for one step, and that one is not repeated."""
    ended = start("--dry-run", "--out", tmp_path, "--budget-seconds", 60.1).end(timeout_seconds=300)
    assert ended.status == 0, ended.out
    first = results(tmp_path)
    assert {name for name, one in first.items() if one["status"] == "ok"} == {"machine"}
    assert {one["status"] for one in first.values()} == {"ok", "waits"}
    ended = start("--dry-run", "--out", tmp_path).end(timeout_seconds=560)
    found = results(tmp_path)
    assert ended.status == 0, f"{ended.out}\n{found}"
    assert found["machine"] == first["machine"]
    assert all(one["status"] == "ok" for one in found.values())
    assert found["vgg11"]["result"]["ours/plain"] > 0
    assert found["gather_scatter"]["result"]["step_seconds"] > 0
    assert len(ended.out.splitlines()) == len(found) == 8
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
def test_a_step_that_fails_or_hangs_is_recorded_and_leaves_nothing(
    tmp_path, monkeypatch, code, status, last
):
    monkeypatch.syspath_prepend(str(GPU.parent))
    import gpu

    found = gpu.run_step(gpu.Step("step", ["-c", code], 60), tmp_path, 5)
    assert found["status"] == status
    if last is None:
        assert not psutil.pid_exists(int((tmp_path / "step.log").read_text()))
    else:
        assert found["result"] == {"last line": last}


def test_missing_packages_are_named_before_anything_runs(tmp_path):
    """A Python without its site-packages, which finds some packages on PYTHONPATH."""
    present = (
        "torch torchvision numpy sklearn matplotlib PIL cloudpickle jinja2 scipy filelock rich"
    )
    for name in present.split():
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").touch()
    command = [sys.executable, "-S", str(GPU), "--out", str(tmp_path / "out")]
    environment = user_environment(PYTHONPATH=str(tmp_path / "site"))
    ended = Started(command, cwd=tmp_path, env=environment).end(timeout_seconds=30)
    assert ended.status == 2, ended.out
    assert "does not find psutil, msgspec, pytest: install them" in ended.err
    assert not (tmp_path / "out").exists()


def test_an_unknown_step_is_refused_with_the_choices(tmp_path):
    ended = start("--out", tmp_path / "out", "--only", "machin").end(timeout_seconds=30)
    assert ended.status == 2
    assert "--only: got machin; choose from ['machine'," in ended.err
