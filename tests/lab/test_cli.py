"""Each ``lab`` command starts in a fresh interpreter, as users start it, and does its own work."""

import argparse
import subprocess
import sys

from lab.cli import build_parser
from tests.helpers import ROOT, start_lab

STARTED_COLD_ELSEWHERE = {
    "audit": "tests/lab/audit/test_audit_command.py",
    "cluster": "tests/lab/cluster/test_commands.py",
    "doctor": "tests/lab/doctor/test_doctor.py",
    "explain": "tests/lab/explain/test_explain.py",
    "launch": "tests/lab/ssh/test_launch.py",
}
PLAN = "--plan --nodes 1 --sync none --dataset digits --no-predict --output-dir out"
HERE = {
    "grade": ("--print-rubric", 0, "CS744, assignment 2"),
    "learn": ("1 --check", 2, "lab learn 1 writes it"),
    "predict": ("--nodes 4", 0, "gather_scatter"),
    "whatif": ("--out page.html", 0, "page.html"),
    "compare": (PLAN, 0, "lab run-cell"),
    "report": ("nowhere", 2, "nowhere is not the folder of a run"),
    "calibrate": ("--ranks 2 --num-nodes 2", 2, "error: "),
    "collect": ("nowhere", 2, "error: "),
    "run-cell": ("nowhere --run 1", 2, "make one with lab compare --plan"),
}


def test_every_command_has_a_cold_start():
    actions = build_parser()._actions
    [commands] = [one for one in actions if isinstance(one, argparse._SubParsersAction)]
    assert set(commands.choices) == {*STARTED_COLD_ELSEWHERE, *HERE}


def test_commands_start_cold(tmp_path):
    """All commands start at once, to save time."""
    how = {"cwd": tmp_path, "env": {"PYTHONPATH": str(ROOT)}, "cold": True}
    started = {name: start_lab(name, *words.split(), **how) for name, (words, *_) in HERE.items()}
    for name, process in started.items():
        ended, (_, status, words) = process.end(), HERE[name]
        assert ended.status == status, (name, ended)
        assert words in ended.out + ended.err, (name, ended)
        assert "Traceback" not in ended.err, (name, ended)


def test_a_reader_that_leaves_ends_a_command_quietly():
    """As with ``lab predict --json | head``: the pipe breaks while the command writes."""
    command = [sys.executable, "-m", "lab", "predict", "--json", "--nodes", "4", "8"]
    program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout
    assert program.stderr
    program.stdout.close()
    with program:
        errors = program.stderr.read()
        assert program.wait(60) == 1
    assert errors == b""
