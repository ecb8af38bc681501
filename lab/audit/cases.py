"""The cases of the audit, training scripts with one mistake or none, in tests/audit_cases/.

A case is a whole script, or an edit of another one; tests/audit_cases/README.md has the format.
"""

import re
from dataclasses import dataclass, replace

from common.errors import UserError
from common.utils.paths import REPOSITORY

FOLDER = REPOSITORY / "tests/audit_cases"
STARTER_CODE = FOLDER / "student.py"


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


def read_scripts() -> dict[str, Script]:
    """Return all scripts, by name.

    Raises UserError without a checkout, ValueError for an edit that does not match once, KeyError
    for a base that is no script above it.
    """
    if not STARTER_CODE.is_file():
        raise UserError(f"{FOLDER} is missing: this needs the project's checkout, with its tests/")
    scripts: dict[str, Script] = {}
    for path in sorted(FOLDER.glob("right_*.py")):
        _, docstring, body = path.read_text(encoding="utf-8").split('"""', 2)
        what, _, keys = docstring.partition("\n\n")
        scripts[path.stem] = Script(path.stem, what, body.lstrip("\n"), keys=keys)
    for path in sorted(FOLDER.glob("*.txt")):
        for entry in path.read_text(encoding="utf-8").split("\n[")[1:]:
            header, what, *edit = entry.rstrip().split("\n")
            name, _, keys = header.partition("]")
            assert name not in scripts, f"{path}: there are two scripts {name}: rename one"
            base = (re.findall(r"base: (\w+)", keys) or [""])[0]
            body = scripts[base].body if base else ""
            script = Script(name, what, body, base, "\n".join(edit), keys)
            scripts[name] = replace(script, body=apply_edit(script))
    return scripts


def apply_edit(script: Script) -> str:
    """Return the body, which is still the base's, with the edit.

    Raises ValueError if the old lines of one of its places do not stand in it exactly once.
    """
    body, places = f"\n{script.body}", []
    for place in script.edit.split("\n...\n") if script.edit else ():
        lines = place.split("\n")
        old, new = ("".join(f"{one[1:]}\n" for one in lines if one[:1] != sign) for sign in "+-")
        if (times := body.count(f"\n{old}")) != 1:
            raise ValueError(f"{script.name}: {times} times, not once, in its base:\n{old}")
        places.append((body.index(f"\n{old}") + 1, old, new))
    for begin, old, new in sorted(places, reverse=True):
        body = body[:begin] + new + body[begin + len(old) :]
    return body[1:]
