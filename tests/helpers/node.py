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


def run_script(name: str, expression: str, given: Any) -> Any:
    """Return the value of a JavaScript expression of ``it``, one of the page's scripts.

    name : of the script, "state". given : JSON values, ``given`` in the expression.
    """
    assert NODE is not None
    path = Path(ROOT, "lab", "whatif", f"{name}.js")
    program = (
        f"const it = require({json.dumps(str(path))}); const given = {_READ};"
        f"process.stdout.write(JSON.stringify({expression}));"
    )
    ended = subprocess.run(
        [NODE, "-e", program],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=_LIMIT,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)
