"""Run command lines in one process, each as its own program does: fast, as torch loads once.

    python wrong_usage_driver.py 'RANK=0 PartOne --epochs 0' 'lab conquer' ...

Words before the program set environment variables. Prints [status, stderr] of each as JSON.
tests/helpers/expectations.py starts it from another folder.
"""

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # this folder has a package common, too


def run(*words):
    first = next(index for index, word in enumerate(words) if "=" not in word)
    with mock.patch.dict(os.environ, dict(word.split("=", 1) for word in words[:first])):
        return run_program(*words[first:])


def run_program(program, *arguments):
    file = ROOT / ("lab/__main__.py" if program == "lab" else f"{program}/main.py")
    sys.argv = [str(file), *arguments]
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        try:
            runpy.run_path(str(file), run_name="__main__")
        except SystemExit as end:
            return end.code, error.getvalue()
    return 0, error.getvalue()


def words(usage):
    """Return the words of a usage; an escape as in Python stands for a character."""
    return usage.encode("latin-1").decode("unicode_escape").split(" ")


print(json.dumps([run(*words(usage)) for usage in sys.argv[1:]]))
