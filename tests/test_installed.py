"""The commands of an installed wheel run from any folder, without a checkout."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.helpers import ROOT, Started, user_environment
from tests.helpers.paths import copy_clone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SHORT = ("--dataset", "digits", "--batch-size", "64")
TOP_LEVEL = (
    "common",
    "courses",
    "lab",
    "recipes",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)


def run(*command):
    """Run a command with a limit of two minutes and return its output."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return a wheel, built from a copy to keep the checkout clean."""
    copy = tmp_path_factory.mktemp("source")
    copy_clone(copy, wanted=lambda name: name.partition("/")[0] in TOP_LEVEL)
    folder = tmp_path_factory.mktemp("wheel")
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, copy)
    run(sys.executable, "-m", "pip", *build)
    [found] = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    """Return the program folder of a virtual environment in which the wheel is installed.

    A .pth file makes this environment's packages, such as torch, available there.
    """
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    site_packages = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])").strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel)
    (site_packages / "present.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return environment / "bin"


@pytest.fixture
def empty(tmp_path, programs, monkeypatch):
    """Return an empty folder from which the programs import nothing of the checkout."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    where = "import common, lab; print(common.__file__, lab.__file__)"
    done = subprocess.run(
        [programs / "python", "-c", where], cwd=tmp_path, capture_output=True, text=True
    )
    assert str(ROOT / "common") not in done.stdout, done.stdout
    assert done.stdout.count("site-packages") == 2, done.stdout + done.stderr
    return tmp_path


def end(programs, folder, *command):
    """Run one of the environment's programs in ``folder`` and return its output."""
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    started = Started(
        [str(programs / command[0]), *command[1:]], cwd=folder, env=user_environment(PATH=path)
    )
    ended = started.end(timeout_seconds=240)
    assert ended.status == 0, ended.err + ended.out
    return ended.out


def test_the_wheel_holds_code_recipes_and_what_is_no_code(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {f"common/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")}
    courses = {f"lab/courses/{path.name}" for path in (ROOT / "courses").glob("*.*")}
    packaged = {
        path.relative_to(ROOT).as_posix()
        for package in ("common", "lab")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".json", ".toml", ".jinja")
    }
    assert "common/recipes/cs744.toml" in recipes
    assert {"lab/courses/cs336.toml", "lab/courses/cs336.py"} <= courses
    assert recipes | courses | packaged <= names
    outside = {name for name in names if not re.match(r"common/|lab/|[^/]+\.dist-info/", name)}
    assert outside == set()


def test_the_commands_run_from_an_empty_folder(programs, empty):
    """A recipe, ranks that a part starts, a comparison and a report write only there.

    The comparison is of one run, to save time. Nothing imports what lies there.
    """
    for name in ("msgspec", "psutil", "json", "common"):
        (empty / f"{name}.py").write_text("open('imported', 'w')")
    for part in ("part-one", "part-three"):
        printed = end(programs, empty, part, "--recipe", "vgg11-cifar10-fast", "--print-config")
        assert "batch_size = 128" in printed
    end(
        programs,
        empty,
        *("part-two", "--distributed", "--world-size", "2", "--sync", "ring"),
        *(*SHORT, "--max-steps", "2", "--run-name", "run"),
    )
    ranks, summary, environment = (
        json.loads((empty / "reports/PartTwo-ring/run" / f"{name}.json").read_text())
        for name in ("ranks", "summary", "environment")
    )
    assert len(ranks["ranks"]) == 2
    assert summary["steps"] == 2
    assert environment["git_commit"] is None
    end(
        programs,
        empty,
        *("lab", "compare", "--nodes", "1", "--dataset", "digits"),
        *("--steps", "2", "--warmup", "1", "--repeats", "1", "--no-predict"),
    )
    [comparison] = (empty / "reports").glob("compare-*")
    results = json.loads((comparison / "results.json").read_text())
    assert [cell["repeats"][0]["status"] for cell in results["cells"]] == ["done"]
    assert (comparison / "report.html").stat().st_size > 10_000
    end(programs, empty, "lab", "report", "reports/PartTwo-ring/run")
    [report] = (empty / "reports").glob("report-*")
    assert (report / "report.html").exists()
    written = {path.name for path in empty.iterdir() if path.suffix != ".py"}
    assert written <= {"reports", "data"}


def test_the_module_without_a_part_says_what_to_give(programs, empty):
    for given, words in (((), "got nothing"), (("PartFour",), "got PartFour")):
        command = [programs / "python", "-m", "common.cli", *given]
        done = subprocess.run(command, cwd=empty, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert f"{words}, give one of PartOne, PartTwo, PartThree" in done.stderr
