"""Run the page's scripts in node, where there is one."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node on the path")

_READ = 'JSON.parse(require("fs").readFileSync(0, "utf8"))'
_LIMIT = 60.0
# In the page's order; those after them reach the page's elements at once.
_WITHOUT_ELEMENTS = (
    *("plans", "engine", "timeline", "state", "words"),
    *("measured", "questions"),
)


def run_scripts(expression: str, given: Any, *, limit: float = _LIMIT) -> Any:
    """Return the value of a JavaScript expression in one scope with the page's scripts.

    given : JSON values, ``given`` in the expression. limit : in seconds.
    """
    paths = [str(Path(ROOT, "lab", "whatif", f"{name}.js")) for name in _WITHOUT_ELEMENTS]
    program = (
        f"const {{ runInThisContext }} = require('node:vm'); globalThis.given = {_READ};"
        f"for (const path of {json.dumps(paths)})"
        " runInThisContext(require('fs').readFileSync(path, 'utf8'), { filename: path });"
        f"const value = runInThisContext({json.dumps(expression)});"
        "process.stdout.write(JSON.stringify(value));"
    )
    return _run(program, given, limit)


def _run(program: str, given: Any, limit: float) -> Any:
    assert NODE is not None
    ended = subprocess.run(
        [NODE, "-e", program],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)
