"""Wrong usages of the parts and of ``lab``: the exact message and the exit status of each.

Real processes, started from another folder. Most usages share one process
(wrong_usage_driver.py), since importing costs more than they do.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest

from common.models import MODELS
from common.sync import BY_HAND
from common.utils.dependencies import MODULES, OLDEST_PYTHON
from tests.helpers import ROOT, user_environment

FLAGS = "({} lists the flags)"
ONE, TWO = FLAGS.format("PartOne/main.py --help-all"), FLAGS.format("PartTwo/main.py --help-all")
ONE_PROCESS = "it trains on one process. PartTwo and PartThree train on several"
STRATEGIES = ", ".join(BY_HAND)
NETWORKS = ", ".join(name for name in MODELS if name not in ("tiny", "wide"))  # of tests
DATASETS = "cifar10, cifar100, digits, folder"
RECIPES = ", ".join(sorted(path.stem for path in (ROOT / "recipes").glob("*.toml")))
COMMANDS = (
    "audit, compare, report, calibrate, predict, cluster, launch, collect, run-cell, "
    "doctor, explain"
)
TOGETHER = (
    "give --master-ip, --num-nodes and --rank together, for example --master-ip 10.0.0.1 "
    "--num-nodes 4 --rank 0; or --distributed --world-size 4 for all ranks on this machine"
)
MEETING = "--master-ip 127.0.0.1 --num-nodes 2"

TORCHRUN = "WORLD_SIZE=2 RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=4000"
OTHERWISE = "start with torchrun, or unset RANK and WORLD_SIZE"
UNSET = "set it to that, or unset it"
FROM_0, FROM_1 = (f"a whole number from {least} to 65535" for least in (0, 1))
LONGEST = "9" * 57


def wrong(variable, value, allowed, advice=OTHERWISE):
    return 2, f"the environment has {variable}={value}, but it must be {allowed}: {advice}"


ENVIRONMENTS = {  # variables and command: (status, what follows "error: ")
    # without torchrun's variables in full
    "WORLD_SIZE=2 RANK=0 PartTwo": (
        2,
        "the environment has RANK and WORLD_SIZE, as torchrun sets them, but no MASTER_ADDR: "
        + OTHERWISE,
    ),
    "WORLD_SIZE=2 RANK=0 MASTER_ADDR=127.0.0.1 PartThree": (
        2,
        "the environment has RANK and WORLD_SIZE, as torchrun sets them, but no MASTER_PORT: "
        + OTHERWISE,
    ),
    # values that no launcher sets
    f"{TORCHRUN} WORLD_SIZE=0 PartTwo": wrong("WORLD_SIZE", "'0'", FROM_1),
    f"{TORCHRUN} WORLD_SIZE=two PartTwo": wrong("WORLD_SIZE", "'two'", FROM_1),
    f"{TORCHRUN} WORLD_SIZE=65536 PartTwo": wrong("WORLD_SIZE", "'65536'", FROM_1),
    f"{TORCHRUN} WORLD_SIZE= PartTwo": wrong("WORLD_SIZE", "''", FROM_1),
    f"{TORCHRUN} RANK=-1 PartTwo": wrong("RANK", "'-1'", FROM_0),
    f"{TORCHRUN} RANK=1.0 PartTwo": wrong("RANK", "'1.0'", FROM_0),
    f"{TORCHRUN} RANK=1e0 PartTwo": wrong("RANK", "'1e0'", FROM_0),
    f"{TORCHRUN} RANK=²\x1b[31m PartTwo": wrong("RANK", r"'²\x1b[31m'", FROM_0),
    f"{TORCHRUN} RANK={'9' * 400} PartTwo": wrong("RANK", f"'{LONGEST} …", FROM_0),
    f"{TORCHRUN} MASTER_PORT=tcp://10.0.0.1:80 PartTwo": wrong(
        "MASTER_PORT", "'tcp://10.0.0.1:80'", FROM_1
    ),
    f"{TORCHRUN} MASTER_ADDR=a/b PartTwo": wrong(
        "MASTER_ADDR", "'a/b'", "a host name or an IP address"
    ),
    f"{TORCHRUN} LOCAL_WORLD_SIZE=0 PartTwo": wrong("LOCAL_WORLD_SIZE", "'0'", FROM_1),
    f"{TORCHRUN} LOCAL_RANK=first PartTwo": wrong("LOCAL_RANK", "'first'", FROM_0),
    f"{TORCHRUN} TORCHELASTIC_MAX_RESTARTS=many PartTwo": wrong(
        "TORCHELASTIC_MAX_RESTARTS", "'many'", FROM_0
    ),
    f"{TORCHRUN} TORCHELASTIC_USE_AGENT_STORE=1 PartTwo": wrong(
        "TORCHELASTIC_USE_AGENT_STORE", "'1'", "True or False"
    ),
    f"{TORCHRUN} PET_NNODES=2:many PartTwo": wrong(
        "PET_NNODES", "'2:many'", "a number of nodes, e.g. 4, or a range, e.g. 2:4"
    ),
    # values that contradict each other
    f"{TORCHRUN} RANK=2 PartTwo": (
        2,
        f"the environment has RANK=2 of WORLD_SIZE=2; ranks count from 0: {OTHERWISE}",
    ),
    f"{TORCHRUN} LOCAL_RANK=1 LOCAL_WORLD_SIZE=1 PartTwo": (
        2,
        f"the environment has LOCAL_RANK=1 of LOCAL_WORLD_SIZE=1; ranks count from 0: {OTHERWISE}",
    ),
    f"{TORCHRUN} LOCAL_WORLD_SIZE=3 PartTwo": (
        2,
        f"the environment has LOCAL_WORLD_SIZE=3 of WORLD_SIZE=2: {OTHERWISE}",
    ),
    # of any program
    "COLUMNS=0 PartOne": wrong("COLUMNS", "'0'", FROM_1, UNSET),
    "COLUMNS=wide PartTwo": wrong("COLUMNS", "'wide'", FROM_1, UNSET),
    "COLUMNS=0 lab predict": wrong("COLUMNS", "'0'", FROM_1, UNSET),
    "LINES=0 PartOne": wrong("LINES", "'0'", FROM_1, UNSET),
    "OMP_NUM_THREADS=0 PartOne": wrong("OMP_NUM_THREADS", "'0'", FROM_1, UNSET),
    "OMP_NUM_THREADS=all lab doctor": wrong("OMP_NUM_THREADS", "'all'", FROM_1, UNSET),
    "TORCH_DISTRIBUTED_DEBUG=verbose PartTwo": wrong(
        "TORCH_DISTRIBUTED_DEBUG", "'verbose'", "OFF, INFO or DETAIL", UNSET
    ),
    "TORCH_DISTRIBUTED_DEBUG= PartTwo": wrong(
        "TORCH_DISTRIBUTED_DEBUG", "''", "OFF, INFO or DETAIL", UNSET
    ),
    "NCCL_SOCKET_IFNAME=,eth0 PartTwo": wrong(
        "NCCL_SOCKET_IFNAME",
        "',eth0'",
        "prefixes of network interfaces, e.g. eth or ^docker,lo",
        UNSET,
    ),
    "GLOO_SOCKET_IFNAME=eth0, PartTwo": wrong(
        "GLOO_SOCKET_IFNAME",
        "'eth0,'",
        "a network interface, e.g. eth0, or several, e.g. eth0,eth1",
        UNSET,
    ),
}

USAGES = ENVIRONMENTS | {  # command: (status, what follows "error: ")
    # names that are nearly right
    "PartTwo --snyc ring": (2, f"there is no flag --snyc: did you mean --sync? {TWO}"),
    "PartTwo --master 10.0.0.1": (2, f"there is no flag --master: did you mean --master-ip? {TWO}"),
    "PartTwo --no_such_flag": (2, f"there is no flag --no-such-flag {TWO}"),
    "PartTwo --sync allreduce": (
        2,
        f"--sync: got 'allreduce', did you mean all_reduce? Choices: {STRATEGIES}",
    ),
    "PartTwo --sync telepathy": (2, f"--sync: got 'telepathy', choose one of {STRATEGIES}"),
    "PartThree --sync ddp_16": (
        2,
        "--sync: got 'ddp_16', did you mean ddp_fp16? Choices: ddp, ddp_fp16, ddp_powersgd, "
        "ddp_zero1, fsdp",
    ),
    "PartOne --dataset cifar": (
        2,
        f"--dataset: got 'cifar', did you mean cifar10? Choices: {DATASETS}",
    ),
    "PartOne --dataset mnist": (2, f"--dataset: got 'mnist', choose one of {DATASETS}"),
    "PartOne --model VGG-11": (
        2,
        f"--model: got 'VGG-11', did you mean vgg11? Choices: {NETWORKS}",
    ),
    "PartOne --recipe vgg11": (
        2,
        "--recipe: there is no recipe 'vgg11': did you mean vgg11-cifar10-fast? Choices: "
        f"{RECIPES}; or give a .toml file",
    ),
    "PartOne --recipe nowhere.toml": (
        2,
        f"--recipe: there is no file nowhere.toml: choose one of {RECIPES}; or give a .toml file",
    ),
    # what another part has
    "PartOne --sync ring": (2, f"PartOne has no --sync: {ONE_PROCESS}"),
    "PartOne --snyc ring": (
        2,
        f"there is no flag --snyc: did you mean --sync? PartOne has no --sync: {ONE_PROCESS} {ONE}",
    ),
    "PartOne -R 0": (2, f"PartOne has no -R: {ONE_PROCESS}"),
    "PartOne --world-size=2": (2, f"PartOne has no --world-size: {ONE_PROCESS}"),
    "PartTwo --sync ddp": (2, "--sync: PartTwo has no 'ddp'. Use PartThree --sync ddp"),
    "PartTwo --sync none": (2, "--sync: PartTwo has no 'none'. Use PartOne"),
    "PartThree --sync ring": (2, "--sync: PartThree has no 'ring'. Use PartTwo --sync ring"),
    # wrong and missing values
    "PartOne stray": (2, f"unexpected argument 'stray' {ONE}"),
    "PartOne --epochs": (2, f"--epochs: give a value {ONE}"),
    "PartOne --epochs two": (2, f"--epochs: got 'two', give a whole number {ONE}"),
    "PartOne --epochs 0": (2, "--epochs: got 0, give a whole number of at least 1"),
    "PartOne --seed 9999999999": (
        2,
        "--seed: got 9999999999, give a whole number of at least 0 and at most 2147483647",
    ),
    "PartOne --lr 0": (2, "--learning-rate: got 0.0, give a number above 0"),
    "PartOne --target-accuracy 85": (
        2,
        "--target-accuracy: got 85.0, give a number above 0 and at most 1",
    ),
    "PartOne --debug=maybe": (2, f"--debug: got 'maybe', but it takes no value {ONE}"),
    "PartOne --data-dir=": (2, f"--data-dir: got '', give a path or leave the flag out {ONE}"),
    # flags that do not go together
    "PartOne --batch-size 8 -b 4": (
        2,
        "--batch-size (global) and --local-batch-size (per rank) are both given: give one",
    ),
    "PartOne --measure-only --resume auto": (
        2,
        "--measure-only evaluates and saves nothing: leave it out, or leave out --validate, "
        "--target-accuracy, --resume, --checkpoint, --checkpoint-every and --save-every-epochs",
    ),
    f"PartTwo {MEETING}": (2, f"--master-ip, --num-nodes given without --rank: {TOGETHER}"),
    "PartTwo --rank 0": (2, f"--rank given without --master-ip and --num-nodes: {TOGETHER}"),
    f"PartTwo {MEETING} --rank 2": (
        2,
        "--rank: got 2 of --num-nodes 2; ranks count from 0, so give 0 to 1",
    ),
    "PartTwo --distributed --rank 0": (
        2,
        "--distributed starts all ranks on this machine, and --rank is one of them: give one of "
        "the two",
    ),
    "PartTwo --dist-url 10.0.0.1": (
        2,
        "--dist-url: got '10.0.0.1', give tcp://ADDRESS:PORT of rank 0's node, e.g. "
        "tcp://127.0.0.1:23456",
    ),
    # lab
    "lab conquer": (2, f"lab: there is no command 'conquer': choose one of {COMMANDS}"),
    "lab comapre": (
        2,
        f"lab: there is no command 'comapre': did you mean compare? Choices: {COMMANDS}",
    ),
    "lab cluster fualt": (
        2,
        "lab cluster: there is no command 'fualt': did you mean fault? Choices: run, shell, fault",
    ),
    "lab compare --nodez 2": (
        2,
        "there is no flag --nodez: did you mean --nodes? (lab compare --help lists the flags)",
    ),
    "lab compare --dataset cifar": (
        2,
        f"--dataset: got 'cifar', did you mean cifar10? Choices: {DATASETS}",
    ),
    "lab predict --nodes zero": (
        2,
        "--nodes: got 'zero', give a whole number (lab predict --help lists the flags)",
    ),
    "lab report": (2, "missing: RUN (lab report --help lists the flags)"),
    "lab report nowhere -- --epochs 2": (
        2,
        "-- --epochs 2: this command takes nothing after --. lab audit, lab compare, lab launch, "
        "lab cluster run and lab cluster shell do",
    ),
    "lab explain nowhere.txt": (
        2,
        "lab explain: nowhere.txt cannot be read (No such file or directory): give the file that "
        "holds the output of a rank, or - for standard input",
    ),
}


A_RUN = {  # it ends its process, so that it has one of its own
    "PartOne --dataset digits --resume nowhere.pt": (
        1,
        "checkpoint nowhere.pt cannot be read (No such file or directory)",
    ),
}


def finished(*command, cwd, **variables):
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=user_environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return the status and stderr of each usage."""
    driver = Path(__file__).with_name("wrong_usage_driver.py")
    folder = tmp_path_factory.mktemp("elsewhere")
    usages = json.dumps([usage.split(" ") for usage in USAGES])
    done = finished(sys.executable, driver, usages, cwd=folder, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout.splitlines()[-1])
    return {usage: (status, said) for usage, (status, said) in zip(USAGES, ended, strict=True)}


@pytest.mark.parametrize("usage", USAGES)
def test_a_wrong_usage_is_answered(usage, outcomes):
    status, said = USAGES[usage]
    assert outcomes[usage] == (status, f"error: {said}\n")


def test_an_interface_that_this_machine_lacks(tmp_path):
    """With flags and under torchrun alike: the message names what there is."""
    flags = f"PartTwo {MEETING} --rank 0".split()
    others = ", ".join(psutil.net_if_addrs())
    driver = Path(__file__).with_name("wrong_usage_driver.py")
    interface = "GLOO_SOCKET_IFNAME=lo,nosuch0"
    usages = [[interface, *flags], [interface, *TORCHRUN.split(), "PartTwo"]]
    done = finished(sys.executable, driver, json.dumps(usages), cwd=tmp_path, PYTHONPATH=str(ROOT))
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
        *A_RUN,
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
    status, said = (USAGES | A_RUN)[usage]
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"error: {said}\n")
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
        *(sys.executable, "-S", "-m", "lab", "report", "my run"),
        cwd=tmp_path,
        PYTHONPATH=str(ROOT),
    )
    needed = PACKAGES.removeprefix("torch, torchvision, ")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: this Python ({sys.executable}) has no package {needed}.\n{ADVICE}\n\n"
        f"    make -C {ROOT} setup\n    {ROOT}/.venv/bin/python -m lab report 'my run'\n"
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
    names = [re.split("[<>=]", one)[0] for one in project["dependencies"]]
    assert sorted(modules.get(name, name) for name in names) == sorted(MODULES)
    assert project["requires-python"] == ">=" + ".".join(map(str, OLDEST_PYTHON))
