"""Run the page's scripts in node, where there is one."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node on the path")

_READ = 'JSON.parse(require("fs").readFileSync(0, "utf8"))'
_LIMIT = 60.0


def run_script(
    name: str, expression: str, given: Any, *, uses: Sequence[str] = (), limit: float = _LIMIT
) -> Any:
    """Return the value of a JavaScript expression of ``it``, one of the page's scripts.

    name : of the script, "state". given : JSON values, ``given`` in the expression. uses : other
    scripts that come before it in the page. limit : in seconds.
    """
    assert NODE is not None
    before = [f"globalThis.{other.capitalize()} = require({_path(other)});" for other in uses]
    program = (
        f"{''.join(before)} const it = require({_path(name)}); const given = {_READ};"
        f"process.stdout.write(JSON.stringify({expression}));"
    )
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


def _path(script: str) -> str:
    """Return the path of a script, quoted."""
    return json.dumps(str(Path(ROOT, "lab", "whatif", f"{script}.js")))
