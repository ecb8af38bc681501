"""The pages as tests read them: their blocks, their commands, and the outputs that they show.

``python -m tests.helpers.documentation`` rewrites what the pages copy from the code: the outputs
of `lab predict`, the tables of known errors and of the audit's findings. Read the diff in git.
"""

import contextlib
import io
import re
import shlex
import textwrap
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from tests.helpers.paths import ROOT

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PREDICTED = re.compile(
    r"^```bash\n(lab predict [^\n]+)\n```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
_KNOWN_ERRORS = re.compile(
    r"(?<=^\| kind \| errors \| what they are \|\n\| -- \| -- \| -- \|\n)(\|.*\n)*", re.MULTILINE
)
_KINDS = {
    "cause": "why a run fails",
    "symptom": "what a rank meets; its reason may be in another rank's output",
    "echo": "what another failure leads to, or a launcher's report of it",
    "note": "what looks like a failure and is none",
}
_FINDINGS = re.compile(
    r"(?<=^\| finding \| severity \| an edit that makes it \| scripts \| not told from \|\n"
    r"\| -- \| -- \| -- \| -- \| -- \|\n)(\|.*\n)*",
    re.MULTILINE,
)
_SIDES = re.compile(
    r"^(\| right: `(\w+)` \| wrong: `(\w+)` \|\n\| -- \| -- \|\n)\|.*", re.MULTILINE
)


@dataclass(frozen=True)
class Page:
    """A page of the documentation."""

    path: Path

    @property
    def name(self):
        """The path from the project's folder."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def text(self):
        """The whole page."""
        return self.path.read_text(encoding="utf-8")

    def blocks(self):
        """Return (language, content) of each fenced block."""
        return _BLOCK.findall(self.text)

    def prose(self):
        """Return the page without fenced blocks and HTML comments."""
        return re.sub(r"<!--.*?-->", "", _BLOCK.sub("", self.text), flags=re.DOTALL)

    def commands(self):
        """Return the lines of the bash blocks."""
        return [
            line
            for language, content in self.blocks()
            if language == "bash"
            for line in content.splitlines()
        ]


def pages():
    """Return every page that a reader is sent to."""
    folders = ("reports", "launch", "lab/explain", "tests/faults", "tests/audit_cases")
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    files += [ROOT / folder / "README.md" for folder in (*folders, "tests/lab/explain/logs")]
    rest = [path for folder in ("benchmarks", "docs") for path in (ROOT / folder).rglob("*.md")]
    return [Page(path) for path in [*files, *sorted(rest)]]


def predict(command):
    """Return what a `lab predict` command prints, without spaces at the ends of lines."""
    from lab.cli import main

    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        status = main(shlex.split(command)[1:])
    assert status == 0, command
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().rstrip().splitlines())


def findings_table():
    """Return the rows of tests/audit_cases/README.md: how each finding looks. Each has a case."""
    from lab.audit.findings.finding import catalogue
    from tests.helpers.audited import read_cases

    rows = []
    for name, finding in catalogue().items():
        cases = [one for one in read_cases() if name in one.finds | one.notices]
        whole = [one for one in cases if one.base.startswith("right_")]
        shown = min(whole, key=lambda one: (len(one.finds), len(one.edit)))
        others = sorted(frozenset().union(*(one.finds for one in cases)) - {name})
        means = f"`{name}`: {finding.title} | {finding.severity}"
        looks = f"{shown.what}<br>{_edit_cell(shown.edit)}"
        rows.append(f"| {means} | {looks} | {len(cases)} | {', '.join(others) or '-'} |\n")
    return "".join(rows)


def _edit_cell(edit):
    """Return an edit for a cell of a table, without empty lines and common indentation."""
    lines = [line for line in edit.splitlines() if line[1:]]
    code = textwrap.dedent(
        "\n".join("" if line == "..." else line[1:] for line in lines)
    ).splitlines()
    signed = [
        f"`{line[0]} {text}`" if text else "…" for line, text in zip(lines, code, strict=True)
    ]
    return "<br>".join(signed).replace("|", "\\|")


def sides(match):
    """Return a table of docs/learn/gallery.md with a right script beside a wrong one."""
    from lab.audit.cases import read_scripts
    from tests.helpers.audited import CASES

    scripts = read_scripts(CASES)
    bodies = [scripts[name].body.splitlines() for name in match.groups()[1:]]
    cells = [], []
    for group in SequenceMatcher(None, *bodies, autojunk=False).get_grouped_opcodes(1):
        for cell, body, at in zip(cells, bodies, (1, 3), strict=True):
            lines = [
                (line, "" if tag == "equal" else "**")
                for tag, *bounds in group
                for line in body[slice(*bounds[at - 1 : at + 1])]
                if line
            ]
            indent = min(len(line) - len(line.lstrip()) for line, _ in lines)
            cell.append("<br>".join(f"{bold}`{line[indent:]}`{bold}" for line, bold in lines))
    return f"{match[1]}| {' | '.join('<br>…<br>'.join(cell) for cell in cells)} |"


def with_copies(text):
    """Return a page with today's known errors, findings and outputs of `lab predict`."""
    from lab.explain.diagnosis import KINDS, known_errors

    counts = Counter(error.kind for error in known_errors())
    rows = "".join(f"| {kind} | {counts[kind]} | {_KINDS[kind]} |\n" for kind in KINDS)
    text = _KNOWN_ERRORS.sub(lambda _: rows, text)
    text = _FINDINGS.sub(lambda _: findings_table(), text)
    text = _SIDES.sub(sides, text)
    for command, shown in _PREDICTED.findall(text):
        text = text.replace(shown, predict(command))
    return text


if __name__ == "__main__":
    for page in pages():
        page.path.write_text(with_copies(page.text), encoding="utf-8")
