"""Wrong usages of the parts and of ``lab``, started from another folder.

tests/expectations/wrong_usage.txt has the message and the exit status of each, compared by
test_expectations.py; here is what depends on the machine and on how a program is started.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest

from common.utils.dependencies import MODULES, OLDEST_PYTHON, OLDEST_TORCH
from tests.helpers import ROOT, user_environment
from tests.helpers.expectations import read_usages

TORCHRUN = "WORLD_SIZE=2 RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=4000"


def finished(*command, cwd, **variables):
    words, env = list(map(str, command)), user_environment(**variables)
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_an_interface_that_this_machine_lacks(tmp_path):
    """With flags and under torchrun alike: the message names what there is."""
    others = ", ".join(psutil.net_if_addrs())
    driver = Path(__file__).with_name("wrong_usage_driver.py")
    interface = "GLOO_SOCKET_IFNAME=lo,nosuch0"
    flags = "PartTwo --master-ip 127.0.0.1 --num-nodes 2 --rank 0"
    usages = [f"{interface} {flags}", f"{interface} {TORCHRUN} PartTwo"]
    done = finished(sys.executable, driver, *usages, cwd=tmp_path, PYTHONPATH=str(ROOT))
    said = (
        f"error: the environment has {interface}, but this machine has no interface nosuch0, only "
        f"{others}: set it to the one that joins the nodes, or unset it\n"
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [[2, said], [2, said]]


# --- started as a user starts them ---


@pytest.mark.parametrize(
    "usage",
    [
        "PartTwo --sync ddp",
        "PartOne --epochs 0",
        "lab comapre",
        "lab compare --nodez 2",
        "COLUMNS=0 PartOne",
        "WORLD_SIZE=2 RANK=0 PartTwo",
    ],
)
def test_the_program_itself_answers_alike(usage, tmp_path):
    words = usage.split()
    variables = dict(word.split("=") for word in words if "=" in word)
    program, *arguments = words[len(variables) :]
    start = ["-m", "lab"] if program == "lab" else [ROOT / program / "main.py"]
    done = finished(
        sys.executable, *start, *arguments, cwd=tmp_path, PYTHONPATH=str(ROOT), **variables
    )
    shared, _ = read_usages()
    assert done.stdout == ""
    assert f"{done.returncode} {done.stderr}" == shared[usage] + "\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [(), ("cluster",)])
def test_lab_without_a_command_prints_its_help(command, tmp_path):
    """As git does: the help, and a status that stops a script."""
    lab = (sys.executable, "-m", "lab", *command)
    bare = finished(*lab, cwd=tmp_path, PYTHONPATH=str(ROOT))
    helped = finished(*lab, "--help", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert (bare.returncode, bare.stdout, bare.stderr) == (2, "", helped.stdout)
    assert helped.returncode == 0


# --- a Python without the project's packages ---

PACKAGES = (
    "torch, torchvision, numpy, sklearn, matplotlib, PIL, cloudpickle, jinja2, scipy, filelock, "
    "psutil, rich, msgspec"
)
ADVICE = "Set up the project's environment once, then start the command with its Python:"


@pytest.mark.parametrize(
    "command", ["PartOne/main.py", "PartTwo/main.py --help", "PartThree/main.py --epochs 1"]
)
def test_a_python_without_the_packages_says_what_to_run(command):
    done = finished(sys.executable, "-I", "-S", *command.split(), cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: this Python ({sys.executable}) has no package {PACKAGES}.\n{ADVICE}\n\n"
        f"    make setup\n    .venv/bin/python {command}\n"
    )


def test_lab_without_the_packages_and_from_another_folder(tmp_path):
    """lab starts without torch, since lab doctor says what to install in its place."""
    done = finished(
        *(sys.executable, "-S", "-m", "lab", "report", "my run"), cwd=tmp_path, PYTHONPATH=str(ROOT)
    )
    needed = PACKAGES.removeprefix("torch, torchvision, ")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: this Python ({sys.executable}) has no package {needed}.\n{ADVICE}\n\n"
        f"    make -C {shlex.quote(str(ROOT))} setup\n"
        f"    {shlex.quote(f'{ROOT}/.venv/bin/python')} -m lab report 'my run'\n"
    )


def test_a_copy_without_a_makefile_and_an_error_of_its_own(tmp_path):
    """An installed copy is told to use pip; an ImportError of the code stays what it is."""
    for name in ("PartOne", "common"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    done = finished(sys.executable, "-I", "-S", "PartOne/main.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith(
        "msgspec.\nInstall the project with its packages: python -m pip install data-parallel-lab\n"
    )
    (tmp_path / "common" / "errors.py").write_text("from common import nothing_of_this_name\n")
    done = finished(sys.executable, "PartOne/main.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: cannot import name 'nothing_of_this_name' from 'common'"
    )


def test_the_list_of_packages_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = {"scikit-learn": "sklearn", "pillow": "PIL"}
    names = {re.split("[<>=]", one)[0] for one in project["dependencies"]}
    names.remove("pyyaml")  # which trains nothing: lab grade reads Gradescope's exports with it
    assert sorted(modules.get(name, name) for name in names) == sorted(MODULES)
    assert f"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]},<2.16" in project["dependencies"]
    assert project["requires-python"] == ">=" + ".".join(map(str, OLDEST_PYTHON))


@pytest.mark.parametrize("start", [("PartTwo/main.py", "--help"), ("-m", "lab", "predict")])
def test_an_old_torch_is_named_before_it_is_imported(start, tmp_path):
    (tmp_path / "torch-2.4.1.dist-info").mkdir()
    (tmp_path / "torch-2.4.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.4.1\n")
    done = finished(sys.executable, *start, cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "has torch 2.4.1; this project needs 2.11 or later" in done.stderr.splitlines()[0]
