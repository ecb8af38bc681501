"""Traces of the audit in a submission's own source: names that only a script that looks for it has.

A script may behave well only where it is watched. What asks for the audit's variable or modules, or
for objects in Python's memory, leaves the mark to a person, with the line.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError
from common.utils.atomic_files import read_regular

# In a text of the program, not in a comment or a docstring.
_OF_THE_AUDIT = re.compile(r"LAB_AUDIT|_AUDIT\b|lab_audit|lab[./]audit|lab-grade-report|lab\.grade")
_SEARCHES = ("get_objects", "get_referrers", "get_referents")
_MOST_FILES = 500
_MOST_BYTES = 2**20


def traces(submission: Path) -> Iterator[str]:
    """Yield a sentence for each line of a submission that asks for the audit."""
    files = sorted(path for path in submission.rglob("*.py") if path.is_file())
    for path in files[:_MOST_FILES]:
        name = path.relative_to(submission).as_posix()
        try:
            text = read_regular(path, most_bytes=_MOST_BYTES, follow=False)
            # Nested too deeply for the parser, it is nested too deeply to run.
            tree = ast.parse(text)
        except (UserError, OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for line, what in sorted(set(_in_tree(tree))):
            yield f"{name}:{line} looks for the audit: {what}"


def _in_tree(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of what asks for the audit."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in documents:
            for text in [node.value] if isinstance(node.value, str) else []:
                if found := _OF_THE_AUDIT.search(text):
                    yield node.lineno, found[0]
        elif isinstance(node, ast.Attribute) and node.attr in _SEARCHES:
            yield node.lineno, f"{ast.unparse(node)[:80]}"
        elif isinstance(node, ast.ImportFrom) and node.module in ("gc", "lab.audit", "lab.grade"):
            names = [alias.name for alias in node.names]
            if node.module != "gc" or set(names) & {*_SEARCHES, "*"}:
                yield node.lineno, f"from {node.module} import {', '.join(names)}"[:80]
