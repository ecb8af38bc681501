"""Notebooks and scripts for Python 2, made scripts for Python 3 before a submission is tried.

``make_scripts`` writes into the grader's copy, and says which script is not as it was handed in.
"""

import ast
import json
import re
import warnings
from pathlib import Path

from common.errors import UserError
from common.utils.atomic_files import read_regular

_MOST_BYTES = 2**24
_MOST_FILES = 100
# A notebook's lines for IPython or the shell.
_MAGIC = re.compile(r"^([ \t]*)[%!].*$", re.MULTILINE)
# What Python 2 writes otherwise: a pattern of one line, and its replacement.
_OF_PYTHON_2 = (
    (r"(^[ \t]*|: )print[ \t]+(?![ \t(=>])([^\n]*)$", r"\1print(\2)"),
    (r"(^[ \t]*|: )print$", r"\1print()"),
    (r"^([ \t]*except [\w.]+),[ \t]*(\w+):", r"\1 as \2:"),
    (r"\bxrange\(", "range("),
    (r"\braw_input\(", "input("),
    (r"\.iter(items|keys|values)\(\)", r".\1()"),
)


def make_scripts(folder: Path) -> dict[Path, str]:
    """Convert what Python 3 cannot run in a submission; return what was done, by script.

    A notebook beside a script of the same name stays as it is.
    """
    done: dict[Path, str] = {}
    for notebook in sorted(folder.rglob("*.ipynb"))[:_MOST_FILES]:
        script = notebook.with_suffix(".py")
        if not script.exists() and (cells := _cells(_text(notebook))):
            script.write_text(cells, encoding="utf-8")
            done[script] = f"from the cells of {notebook.name}"
    for script in sorted(folder.rglob("*.py"))[:_MOST_FILES]:
        text = _text(script)
        converted = text
        for pattern, replacement in _OF_PYTHON_2:
            converted = re.sub(pattern, replacement, converted, flags=re.MULTILINE)
        if not _is_python(text) and _is_python(converted):
            script.write_text(converted, encoding="utf-8")
            done[script] = " ".join([done.get(script, ""), "converted from Python 2"]).strip()
    return done


def _text(path: Path) -> str:
    try:
        return read_regular(path, most_bytes=_MOST_BYTES, follow=False).decode(errors="replace")
    except (UserError, OSError):  # a folder of this name, or too large
        return ""


def _cells(notebook: str) -> str:
    """Return the code of a notebook; "" for what is none."""
    try:
        cells = json.loads(notebook)["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return "".join(_MAGIC.sub(r"\1pass", f"{cell}\n\n") for cell in code)


def _is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):  # such as "\d" in a text
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
