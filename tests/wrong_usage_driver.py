"""Run command lines in one process, each as its own program does: fast, as torch loads once.

    python wrong_usage_driver.py '[["PartOne", "--epochs", "0"], ...]'

Prints [status, stderr] of each as JSON. test_wrong_usage.py starts it from another folder.
"""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(program: str, *arguments: str) -> tuple[object, str]:
    file = ROOT / ("lab/__main__.py" if program == "lab" else f"{program}/main.py")
    sys.argv = [str(file), *arguments]
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        try:
            runpy.run_path(str(file), run_name="__main__")
        except SystemExit as end:
            return end.code, error.getvalue()
    return 0, error.getvalue()


print(json.dumps([run(*command) for command in json.loads(sys.argv[1])]))
