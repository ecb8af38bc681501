"""No child of the project imports what lies in the folder in which a user works.

``python -m`` and ``python -c`` look for modules in the current folder first: a stranger's psutil.py
there would run with the user's rights. ``-P`` keeps that folder out.
"""

import ast
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab.cluster.program import parse_python
from tests.helpers.paths import ROOT
from tests.lab.grade.conftest import RUBRIC

FOLDERS = ("common", "lab", "launch", "courses", "benchmarks", "PartOne", "PartTwo", "PartThree")
# Where a Python starts without -P, by file and function, and why it may.
OF_A_SCRIPT = "python puts the script's own folder first, and not the current one"
WITHOUT = {
    "common/distributed/spawn.py:rank_commands": "the caller's words follow",
    "common/distributed/spawn.py:launch_local_ranks": "the caller's words follow",
    "common/cli.py:_main": "what torchrun's user types; the part's own children get -P before it",
    "lab/compare/executors.py:run": "the caller's words follow",
    "lab/compare/jobs.py:_run_part": "part_command's words follow",
    "lab/compare/prediction.py:_measure_network": "starts in the project's folder",
    "lab/learn/lessons/nodes.py:run_on_nodes": OF_A_SCRIPT,
    "lab/learn/checking.py:check_apart": "forks; a new Python only elsewhere than on Linux",
    "lab/proofs/ranks.py:context": "_start_server starts it in the project's folder",
    "lab/proofs/ranks.py:_start_server": "starts in the project's folder",
    "lab/ssh/questions.py:": "starts in the project's folder on the host, from which it imports",
    "lab/ssh/__main__.py:": "the words of a message",
    "lab/__main__.py:": "the words of a message",
    "lab/audit/command.py:with_python": OF_A_SCRIPT,
    "lab/cluster/program.py:": "names of interpreters that a user types",
    "lab/compare/runner.py:": "names of facts",
    "lab/grade/demands.py:_own_command": "runs in the sandbox, where a student types torchrun",
    "lab/grade/demands.py:_torchrun": "runs in the sandbox, where a student types torchrun",
    "lab/grade/judge.py:try_here": OF_A_SCRIPT,
    "lab/grade/ordinary_user.py:refused": "starts in the system's root folder",
    "lab/grade/sandbox.py:refused": "runs in the sandbox, in an empty folder",
    "lab/cluster/program.py:parse_python": "compares a user's words",
    "benchmarks/train_step.py:__init__": "a developer's program, in the project's folder",
    "benchmarks/train_step.py:peak_memory_bytes": OF_A_SCRIPT,
}
INTERPRETERS = ("python", "python3", "sys.executable")
SHELLS = ("sh", "bash")


def words_of(sequence):
    """Return the words of a list, tuple or pattern: texts, names like sys.executable, or None."""
    elements = getattr(sequence, "elts", None) or getattr(sequence, "patterns", [])
    words = []
    for element in elements:
        if isinstance(element, ast.MatchValue):
            element = element.value
        if isinstance(element, ast.Starred) and isinstance(element.value, ast.List | ast.Tuple):
            words += words_of(element.value)
        elif isinstance(element, ast.Constant):
            words.append(element.value)
        else:
            words.append(ast.unparse(element))
    return words


def starts_unsafely(words):
    """Return whether these words start a Python that looks into the current folder, or may."""
    if "-P" in words:
        return False
    if any(word in INTERPRETERS for word in words[:3]):
        return True
    # Words for an interpreter that another function puts before them.
    return any(word == "-m" for word in words[:-1]) or runs_a_text(words)


def runs_a_text(words):
    """Return whether -c is for a Python, and not for a shell."""
    pairs = itertools.pairwise([None, *words])
    return any(word == "-c" and before not in SHELLS for before, word in pairs)


def makes_a_server(call):
    """Return whether a call chooses or starts multiprocessing's own Pythons."""
    name = ast.unparse(call.func).rpartition(".")[2]
    return name in ("get_context", "set_start_method", "ensure_running", "spawn", "start_processes")


def is_unsafe(node):
    """Return whether a list, tuple, pattern or call starts a Python without -P."""
    if isinstance(node, ast.List | ast.Tuple | ast.MatchSequence):
        return starts_unsafely(words_of(node))
    if isinstance(node, ast.Call):
        words = words_of(ast.Tuple(node.args))
        return makes_a_server(node) or ({"-m", "-c"} & set(words) and starts_unsafely(words))
    return False


def unsafe_nodes(text):
    """Return the nodes that start a Python without -P, each with the function that it is in."""
    tree = ast.parse(text)
    owners = {}
    compared = set()
    for node in ast.walk(tree):  # outer functions come first
        if isinstance(node, ast.FunctionDef):
            owners.update(dict.fromkeys(ast.walk(node), node.name))
        if isinstance(node, ast.Compare):
            compared.update(node.comparators)
    nodes = [node for node in ast.walk(tree) if node not in compared and is_unsafe(node)]
    return [(node, owners.get(node, "")) for node in nodes]


def places_in(path):
    """Return the functions of a file that start a Python without -P."""
    text = path.read_text(encoding="utf-8")
    return {f"{path.relative_to(ROOT)}:{owner}" for _, owner in unsafe_nodes(text)}


def test_each_place_that_starts_a_python_keeps_the_current_folder_out_or_says_why_not():
    found = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            found.update(places_in(path))
    assert found - WITHOUT.keys() == set(), "give -P, or name it in WITHOUT with the reason"
    assert WITHOUT.keys() - found == set(), "these have none any more"


@pytest.mark.parametrize(
    ("shape", "is_found"),
    [
        ("[sys.executable, '-m', 'lab']", True),
        ("(sys.executable, '-u', '-c', text)", True),
        ("[*prefix, *(sys.executable, file)]", True),
        ("['python3', '-m', 'lab']", True),
        ("['-m', 'lab']", True),
        ("run(enter, 'python', '-c', text)", True),
        ("multiprocessing.get_context('spawn')", True),
        ("[sys.executable, '-P', '-m', 'lab']", False),
        ("['sh', '-c', text]", False),
        ("word in ('python', 'python3')", False),
        ("Path(sys.executable)", False),
    ],
)
def test_a_python_of_any_shape_is_found(shape, is_found):
    assert bool(unsafe_nodes(f"def start():\n    return {shape}\n")) == is_found


def test_a_fork_that_stands_for_a_safe_python_leaves_the_folder_out(tmp_path):
    """On emulated nodes a fork runs ``python -P -m`` in place of a new interpreter."""
    for flags, safe in ((["-m"], False), (["-P", "-m"], True), (["-u", "-P", "-m"], True)):
        program = parse_python(["python", *flags, "json.tool", "x"])
        assert program is not None
        assert (program.target, program.module, program.safe_path) == ("json.tool", True, safe)
    assert parse_python(["python", "-P", "-c", "1"]) is None


# --- a folder of strangers' modules ---

MODULES = "json psutil msgspec random signal torch numpy common lab jinja2 rich socket selectors"
SCRIPT = "import torch\nprint(torch.ones(1))\n"


def hostile_folder(folder):
    """Write modules that tell when they are imported, and return where they do."""
    told = folder / "told"
    text = f"import sys\nopen({str(told)!r}, 'a').write(__name__ + ' ' + str(sys.argv) + '\\n')\n"
    here = folder / "here"
    for name in MODULES.split():
        package = here / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(text)
        (here / f"{name}.py").write_text(text)
    (here / "sitecustomize.py").write_text(text)
    return here, told


def lab_in(folder, *words, seconds=180):
    """Start the lab command in a folder, as its program in .venv/bin does."""
    command = [sys.executable, "-P", "-m", "lab", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds
    )


@pytest.mark.slow
def test_nothing_of_the_current_folder_is_imported(tmp_path):
    here, told = hostile_folder(tmp_path)
    student = tmp_path / "class/ada/part2"
    student.mkdir(parents=True)
    (student / "main.py").write_text(SCRIPT)
    (tmp_path / "rubric.toml").write_text(RUBRIC)
    control = subprocess.run([sys.executable, "-m", "json.tool"], cwd=here, input=b"1")
    assert control.returncode != 0
    assert told.exists()  # the modules do tell
    told.unlink()

    graded = lab_in(
        here,
        *("grade", tmp_path / "class/ada", "--rubric", tmp_path / "rubric.toml"),
        *("--out", tmp_path / "out", "--no-sandbox"),
    )
    assert graded.returncode == 0, graded.stderr
    facts = json.loads((tmp_path / "out/submissions/ada/part2.json").read_text())
    assert facts["used"] == []  # the audit ran
    audited = lab_in(here, "audit", "--json", "-", "--", sys.executable, student / "main.py")
    assert audited.returncode in (1, 2), audited.stderr
    helped = lab_in(here, "compare", "--help")
    assert helped.returncode == 0, helped.stderr
    assert not told.exists(), told.read_text()


def test_the_shells_name_a_python_in_the_checkout_alone():
    """Each of them has changed to the checkout, or checked that it is there, before."""
    for path in (ROOT / "launch").glob("slurm*.s*"):
        for line in re.findall(r'^.*"\$\{?(?:PYTHON|python)\}?" -[cm] .*$', path.read_text(), re.M):
            assert Path(path).name in ("slurm-common.sh", "slurm-node.sh", "slurm.sbatch"), line
