"""The run book for a lent GPU, benchmarks/gpu.py: its plan, its runner, and a dry run of it all."""

import importlib
import json
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.helpers import ROOT, Started, user_environment, wait_until

BENCHMARKS = ROOT / "benchmarks"
MOST_FILES, MOST_BYTES, CALL_SECONDS = 8, 16 * 2**20, 570
FIELDS = {
    *("name", "command", "limit_seconds", "status", "reason", "seconds", "exit_status"),
    *("result", "last_lines"),
}


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a module of gpu_book."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"gpu_book.{name}")


def start_book(*arguments: object) -> Started:
    """Start benchmarks/gpu.py as on a machine without an installation."""
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *map(str, arguments)]
    return Started(command, cwd=ROOT, env=user_environment(OMP_NUM_THREADS="1"))


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


# --- plan ---


def call(plan: ModuleType, tmp_path: Path, *, dry_run: bool = False) -> Any:
    return plan.Call(dry_run, tmp_path, tmp_path, source=tmp_path, unpack="unpack.py")


def test_each_call_ends_within_ten_minutes(book: Any, tmp_path: Path) -> None:
    plan = book("plan")
    assert {"1", "2", "data"} < set(plan.STAGES)
    for name, stage in plan.STAGES.items():
        steps = stage(call(plan, tmp_path))
        assert sum(step.limit_seconds for step in steps) <= CALL_SECONDS, name
        assert len({step.name for step in steps}) == len(steps), name
        assert not any(step.not_here for step in steps), name


def test_steps_name_programs_and_tests_that_exist(book: Any, tmp_path: Path) -> None:
    plan = book("plan")
    for stage in plan.STAGES.values():
        for step in stage(call(plan, tmp_path)):
            program = step.command[0]
            assert program == "-m" or (ROOT / program).exists(), step
    assert all((ROOT / path).exists() for path in plan.GPU_TESTS)


def test_epochs_fit_into_the_time(book: Any) -> None:
    recipes = book("recipes")
    # 50,000 / 128 are 391 steps: 3.91 s an epoch; 95 % of 100 s hold 24 of these.
    assert recipes.epochs_that_fit(100, step_seconds=0.01, batch_size=128, most=200) == 24
    assert recipes.epochs_that_fit(100, step_seconds=0.01, batch_size=128, most=20) == 20
    assert recipes.epochs_that_fit(1, step_seconds=0.01, batch_size=128, most=200) == 1


def test_the_results_of_pytest_are_read(book: Any) -> None:
    read = book("summaries").read_pytest
    output = "....F\nFAILED tests/a.py::test_b - assert 1 == 2\n1 failed, 4 passed in 3.20s\n"
    found = read(output)
    assert found["counts"] == {"failed": 1, "passed": 4}
    assert found["failed"] == ["tests/a.py::test_b"]
    assert found["lines"] == ["1 failed, 4 passed", "failed: test_b"]
    with pytest.raises(ValueError, match="no counts"):
        read("ERROR: file or directory not found")


@pytest.mark.parametrize(
    "line",
    ["[gw0] [ 25%] {word} tests/a.py::test_{name} ", "tests/a.py::test_{name} {word} [ 25%]"],
)
def test_the_results_of_a_pytest_that_was_killed_are_read(book: Any, line: str) -> None:
    """With pytest-xdist, and without; five tests were selected, and the last one hangs."""
    ends = [("a", "PASSED"), ("b[x-1]", "FAILED"), ("c", "PASSED"), ("d", "SKIPPED")]
    output = ["collected 8 items / 3 deselected / 5 selected", "tests/a.py::test_a "]
    output += [line.format(name=name, word=word) for name, word in ends]
    found = book("summaries").read_pytest("\n".join([*output, "tests/a.py::test_e "]))
    assert found["counts"] == {"passed": 2, "failed": 1, "skipped": 1}
    assert found["failed"] == ["tests/a.py::test_b[x-1]"]
    assert found["lines"][0] == "2 passed, 1 failed, 1 skipped until pytest was killed"


def test_missing_packages_are_named_before_anything_runs(tmp_path: Path) -> None:
    """A Python without its site-packages, which finds some packages on PYTHONPATH."""
    present = (
        "torch torchvision numpy sklearn matplotlib PIL cloudpickle jinja2 scipy filelock rich"
    )
    for name in present.split():
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").touch()
    command = [sys.executable, "-S", str(BENCHMARKS / "gpu.py"), "--stage", "1"]
    command += ["--out", str(tmp_path / "out")]
    environment = user_environment(PYTHONPATH=str(tmp_path / "site"))
    ended = Started(command, cwd=tmp_path, env=environment).end(timeout_seconds=30)
    assert ended.status == 2, ended.out
    assert "3 of the packages that the run needs: psutil, msgspec, pytest. Nothing" in ended.err
    assert not (tmp_path / "out").exists()


# --- runner ---

DRIVER = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from gpu_book.runner import Step, run_steps, table
out = Path(sys.argv[2])
given = json.loads(sys.argv[3])
steps = [Step(name, ("-c", code), limit, not_here=why) for name, code, limit, why in given]
print(table(run_steps(steps, out, header={"stage": "test"}, budget_seconds=100)))
"""
GOOD = """print('noise'); print('{"value": 7, "lines": ["seven"]}')"""
HANGS = """
import subprocess, sys, time
child = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"
middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
subprocess.run([sys.executable, "-c", middle])
print('{"lines": ["a part"]}', flush=True)
time.sleep(60)
"""


def start_driver(tmp_path: Path, *steps: tuple[str, str, float, str]) -> tuple[Started, Path]:
    """Start a process that runs these steps; return it and the folder of the results.

    A step is a name, Python code, a limit in seconds, and why it cannot run here.
    """
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-c", DRIVER, str(BENCHMARKS), str(out), json.dumps(steps)]
    return Started(command, cwd=tmp_path, env=user_environment()), out


def test_one_step_does_not_stop_the_others(tmp_path: Path) -> None:
    """Steps fail, hang with children in other sessions, do not fit, or cannot run here."""
    driver, out = start_driver(
        tmp_path,
        ("good", GOOD, 20, ""),
        ("fails", "raise OSError('no card')", 20, ""),
        ("silent", "pass", 20, ""),
        ("hangs", HANGS, 1.5, ""),
        ("elsewhere", "1/0", 20, "needs a GPU"),
        ("too long", GOOD, 1000, ""),
        ("last", GOOD, 20, ""),
    )
    ended = driver.end(timeout_seconds=60)
    assert ended.status == 0, ended.err
    records = {record["name"]: record for record in results(out)["steps"]}
    assert {name: record["status"] for name, record in records.items()} == {
        "good": "ok",
        "fails": "failed",
        "silent": "failed",
        "hangs": "killed",
        "elsewhere": "not run",
        "too long": "not run",
        "last": "ok",
    }
    assert all(set(record) == FIELDS for record in records.values())
    assert records["good"]["result"]["value"] == 7
    assert "OSError: no card" in records["fails"]["reason"]
    assert "no output" in records["silent"]["reason"]
    assert records["elsewhere"]["reason"] == "needs a GPU"
    assert "not enough time (needs 1000 s," in records["too long"]["reason"]
    assert records["hangs"]["result"] == {"lines": ["a part"]}
    [grandchild] = [int(line) for line in records["hangs"]["last_lines"] if line.isdigit()]
    assert not psutil.pid_exists(grandchild)
    assert "    seven" in ended.out.splitlines()
    assert "===== fails" in (out / "stage.log").read_text()
    assert {path.name for path in out.iterdir()} == {"results.json", "stage.log"}


def test_a_process_that_outlives_its_kill_is_recorded(
    book: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hangs in a driver does; here nothing kills it, and it ends by itself."""
    runner = book("runner")
    monkeypatch.setattr(runner, "_kill", lambda _processes: None)
    monkeypatch.setattr(runner, "_KILL_SECONDS", 0.2)
    step = runner.Step("hangs", ("-c", "import time; time.sleep(2)"), 0.5)
    record = runner.Record(step.name, step.command, step.limit_seconds)
    runner._run(step, record, tmp_path)
    assert record.status == "killed"
    assert "has not ended within 0.2 s of SIGKILL" in record.reason


def test_results_are_whole_after_a_kill_in_the_middle(tmp_path: Path) -> None:
    driver, out = start_driver(
        tmp_path, ("good", GOOD, 20, ""), ("runs", "import time; time.sleep(30)", 60, "")
    )

    def last_runs() -> bool:
        return (out / "results.json").exists() and results(out)["steps"][-1]["status"] == "running"

    wait_until(last_runs, "the last step", timeout_seconds=60)
    children = psutil.Process(driver.process.pid).children()
    driver.send(signal.SIGKILL)
    driver.process.wait(timeout=10)
    for child in children:
        child.kill()
    statuses = [record["status"] for record in results(out)["steps"]]
    assert statuses == ["ok", "running"]


def test_a_table_has_at_most_forty_lines(book: Any) -> None:
    runner = book("runner")
    lines = {"lines": [str(number) for number in range(30)]}
    records = [runner.Record(name, ("x",), 1.0, "ok", result=lines) for name in "ab"]
    table = runner.table(records).splitlines()
    assert len(table) == 40
    assert table[-1] == "... 23 more lines: see results.json"


def test_results_are_never_written_over_others(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    ended = start_book("--stage", "1", "--dry-run", "--out", tmp_path).end(timeout_seconds=30)
    assert ended.status == 2
    assert "holds files already: give a new or an empty folder" in ended.err
    assert (tmp_path / "results.json").read_text() == "{}"


def test_the_parts_of_a_dataset_are_gathered_and_unpacked(tmp_path: Path) -> None:
    script = "import sys, pathlib\nroot = pathlib.Path(sys.argv[2])\n"
    script += "(root / 'whole').write_bytes((root / 'a').read_bytes() + (root / 'b').read_bytes())"
    for part, files in (("1", {"a": "first "}), ("2", {"b": "second", "join.py": script})):
        (tmp_path / part).mkdir()
        for name, text in files.items():
            (tmp_path / part / name).write_text(text)
        words = ["--stage", "data", "--part", part, "--of", 2, "--from", tmp_path / part]
        words += ["--data", tmp_path / "data", "--unpack", "join.py", "--dry-run"]
        ended = start_book(*words, "--out", tmp_path / f"out{part}").end(timeout_seconds=60)
        assert ended.status == 0, ended.out
    assert (tmp_path / "data" / "whole").read_text() == "first second"
    names = [record["name"] for record in results(tmp_path / "out1")["steps"]]
    assert names == ["gather"]


RANKS = """
import os, time
from gpu_book import ranks
from lab.proofs.ranks import fork_from_this_process

def check(rank, device, name):
    os.write(1, f"checks {name}\\n".encode())  # at once: two ranks write
    if name == "raises":
        raise OSError("no such kernel")
    if name == "hangs":
        time.sleep(60 * rank)
    return {"error": 0.0, "digests": [str(rank) if name == "differs" else "equal"]}

ranks.STRATEGIES = ("none", "good", "raises", "differs", "hangs", "last")
ranks.ALL_SECONDS, ranks.LIMIT_SECONDS = 4, 3
ranks.is_exact, ranks.check = lambda name: True, check
fork_from_this_process()  # so that the ranks have this check
ranks.main()
"""


@pytest.mark.slow
def test_checks_that_the_first_pair_of_ranks_leaves_get_a_pair_each(tmp_path: Path) -> None:
    environment = user_environment(PYTHONPATH=f"{ROOT}:{BENCHMARKS}")
    command = [sys.executable, "-c", RANKS, "--dry-run"]
    ended = Started(command, cwd=tmp_path, env=environment).end(timeout_seconds=100)
    assert ended.status == 1, ended.err
    lines = ended.out.splitlines()
    shown = [json.loads(line)["results"] for line in lines if line.startswith("{")]
    assert {"good": "", "differs": "the ranks hold different weights"} in shown  # by the first pair
    assert shown[-1] == {
        "good": "",
        "raises": "OSError: no such kernel",
        "differs": "the ranks hold different weights",
        "hangs": "no answer within 3 s from rank 1 of 2",
        "last": "",
    }
    ranks_of = {name: lines.count(f"checks {name}") for name in shown[-1]}
    assert ranks_of == {"good": 2, "raises": 4, "differs": 2, "hangs": 4, "last": 2}


# --- dry run ---


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", ["1", "2", "3-ema", "3-resnet50", "3-wide-resnet"])
def test_a_dry_run_runs_every_step_or_says_why_not(stage: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = start_book("--stage", stage, "--dry-run", "--out", out).end(timeout_seconds=560)
    found = results(out)
    assert ended.status == 0, f"{ended.out}\n{found}"
    assert (found["stage"], found["dry_run"]) == (stage, True)
    for record in found["steps"]:
        assert set(record) == FIELDS
        if record["status"] == "not run":
            assert record["reason"].startswith("a dry run "), record
        else:
            assert record["status"] == "ok", record
            assert record["result"]["lines"], record
            assert not any("Error" in line for line in record["result"]["lines"]), record
    files = [path for path in out.rglob("*") if path.is_file()]
    output = {"stage.log"} if any(record["status"] == "ok" for record in found["steps"]) else set()
    assert {"results.json"} | output <= {path.name for path in files}
    assert len(files) <= MOST_FILES
    assert all(path.parent == out and path.stat().st_size <= MOST_BYTES for path in files)
    assert len(ended.out.splitlines()) <= 40
