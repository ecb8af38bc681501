"""The audit's cases: training scripts with one mistake or none.

``scripts/`` holds those that lesson 9 and its gallery train with, tests/audit_cases/ the others. A
case is a whole script, or an edit of another one; tests/audit_cases/README.md has the format.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

FOLDER = Path(__file__).with_name("scripts")
STARTER_CODE = FOLDER / "student.py"  # which the others import


@dataclass(frozen=True)
class Script:
    """A script.

    Parameters
    ----------
    what : what it does, in a sentence.
    body : the script without its docstring.
    base, edit : how it differs from the script ``base``; empty for a whole one.
    keys : what the audit must find in it, as text.
    """

    name: str
    what: str = ""
    body: str = ""
    base: str = ""
    edit: str = ""
    keys: str = ""


def read_scripts(*folders: Path) -> dict[str, Script]:
    """Return the scripts of this package and then those in other folders, by name.

    Raises ValueError for an edit that does not match once, KeyError for a base that is no script
    above it.
    """
    scripts: dict[str, Script] = {}
    for folder in (FOLDER, *folders):
        for path in sorted(folder.glob("right_*.py")):
            _, docstring, body = path.read_text(encoding="utf-8").split('"""', 2)
            what, _, keys = docstring.partition("\n\n")
            scripts[path.stem] = Script(path.stem, what, body.lstrip("\n"), keys=keys)
        for path in sorted(folder.glob("*.txt")):
            _, *entries = path.read_text(encoding="utf-8").split("\n[")
            for entry in entries:
                script = _read_edit(entry, scripts)
                assert script.name not in scripts, f"{path}: rename the second {script.name}"
                scripts[script.name] = script
    return scripts


def _read_edit(entry: str, scripts: Mapping[str, Script]) -> Script:
    """Return the script of an entry, "name] keys", a line that says what it does, and its edit."""
    header, what, *edit = entry.rstrip().split("\n")
    name, _, keys = header.partition("]")
    named = re.search(r"base: (\w+)", keys)
    base = named[1] if named else ""
    body = scripts[base].body if named else ""
    script = Script(name, what, body, base, "\n".join(edit), keys)
    return replace(script, body=apply_edit(script))


def apply_edit(script: Script) -> str:
    """Return the body, which is still the base's, with the edit.

    The places of an edit are separated by a line "...". In each a line that begins with "-" goes,
    one with "+" comes, and one with a space stays.

    Raises ValueError if the old lines of one of its places do not stand in it exactly once.
    """
    if not script.edit:
        return script.body
    body = f"\n{script.body}"
    places = []
    for place in script.edit.split("\n...\n"):
        old = new = ""
        for line in place.split("\n"):
            sign = line[:1]
            text = f"{line[1:]}\n"
            if sign != "+":
                old += text
            if sign != "-":
                new += text
        times = body.count(f"\n{old}")
        if times != 1:
            raise ValueError(f"{script.name}: {times} times, not once, in its base:\n{old}")
        places.append((body.index(f"\n{old}") + 1, old, new))
    for begin, old, new in sorted(places, reverse=True):  # the last first: it moves no other
        body = body[:begin] + new + body[begin + len(old) :]
    return body[1:]
