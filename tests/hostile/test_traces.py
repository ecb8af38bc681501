"""A submission that looks for the audit: its lines are found, and right ones have none."""

from pathlib import Path

import pytest

from lab.audit.records import Searched
from lab.grade.traces import traces
from tests.helpers import ROOT
from tests.helpers.audited import run_script

LOOKING = {
    "asks": "import os\nif 'LAB_AUDIT' in os.environ:\n    divide()\n",
    "gets": "import os\n\nos.getenv('LAB_AUDIT')\n",
    "any": "import os\nwatched = any(name.endswith('_AUDIT') for name in os.environ)\n",
    "module": "import sys\nprobe = sys.modules.get('_lab_audit_probe')\n",
    "path": "import sys\nif any('lab/audit' in entry for entry in sys.path): divide()\n",
    "gc": "import gc\nprobes = [one for one in gc.get_objects() if hasattr(one, 'note_trouble')]\n",
    "from gc": "from gc import get_referrers as who\nwho(print)\n",
    "star": "from gc import *\n",
    "f-string": "import os\nname = 'x'\nfound = f'{name}LAB_AUDIT' in os.environ\n",
    "report": "print('lab-grade-report {}')\n",
}


def sentences(tmp_path, code, name="main.py"):
    place = tmp_path / "code" / name
    place.parent.mkdir(parents=True)
    place.write_text(code)
    return list(traces(tmp_path))


@pytest.mark.parametrize("name", LOOKING)
def test_a_script_that_looks_for_the_audit_is_named_with_its_line(tmp_path, name):
    [first, *_] = sentences(tmp_path, LOOKING[name])
    code = LOOKING[name].splitlines()
    number = int(first.split(":")[1].split()[0])
    assert first.startswith("code/main.py:")
    assert any(word in code[number - 1] for word in ("AUDIT", "audit", "gc", "report", "get_")), (
        first
    )


def test_comments_docstrings_and_other_words_are_no_traces(tmp_path):
    code = (
        '"""Checked by lab audit (LAB_AUDIT)."""\nimport gc\n# LAB_AUDIT\n'
        "gc.collect()\nprint('an audit of the data')\nimport os\nos.environ['RANK']\n"
    )
    assert sentences(tmp_path, code) == []


@pytest.mark.parametrize("code", ["x = (" * 5000, "\0", "def", "\ud800".encode("utf-8", "replace")])
def test_what_cannot_be_parsed_has_no_traces(tmp_path, code):
    assert sentences(tmp_path, code if isinstance(code, str) else code.decode()) == []


def test_no_right_solution_here_has_traces():
    for folder in ("tests/lab/grade/solutions", "PartOne", "PartTwo", "PartThree", "docs/examples"):
        assert list(traces(ROOT / folder)) == []
    assert list(traces(Path(ROOT / "lab/audit/cases/scripts"))) == []


def test_a_search_through_memory_is_recorded_however_it_is_spelled(tmp_path):
    text = """\
import gc
import torch
getattr(gc, "get_" + "objects")()
gc.collect()
"""
    run = run_script(tmp_path, text)
    found = [one for process in run.recording.processes for one in process.of(Searched)]
    assert [(one.what, one.at.file, one.at.line) for one in found] == [
        ("gc.get_objects", "main.py", 3)
    ]
