"""What the grader writes: class.csv, class.html, and for each student a page and results.json.

``results.json`` follows Gradescope's "Autograder Specifications"
(gradescope-autograders.readthedocs.io/en/latest/specs/): a score for all, and tests with name,
score, max_score, status and output. A part whose mark is open has no score there.
"""

import csv
import io
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from common.errors import count
from common.utils.atomic_files import write_atomically
from common.utils.typed_json import calm, encode
from lab.audit.findings.finding import catalogue
from lab.audit.report import page_template
from lab.flags import first_that_holds
from lab.grade.marks import OVERRIDES, Mark, lesson_of
from lab.grade.rubric import Rubric

# The marks of each submission's parts.
Graded = Mapping[str, Sequence[Mark]]


def marks_text(mark: Mark) -> str:
    """Return "3 of 3", or that the mark is open."""
    of = f"of {mark.points:g}"
    return f"look by hand (? {of})" if mark.marks is None else f"{mark.marks:g} {of}"


def _total(marks: Sequence[Mark]) -> float:
    """Return the marks that are not open, added up."""
    return sum(mark.marks or 0.0 for mark in marks)


def _open(marks: Sequence[Mark]) -> int:
    return sum(mark.marks is None for mark in marks)


def write_class(out: Path, rubric: Rubric, graded: Graded, *, sandboxed: bool) -> None:
    """Write all files of a class."""
    write_atomically(out / "class.csv", _table(rubric, graded).encode())
    shared = {"rubric": rubric, "sandboxed": sandboxed, "date": time.strftime("%Y-%m-%d %H:%M")}
    _write_page(out / "class.html", "class", _class_view(rubric, graded) | shared)
    if not (out / "overrides.csv").exists():
        write_atomically(out / "overrides.csv", (",".join(OVERRIDES) + "\n").encode())
    for name, marks in graded.items():
        folder = out / "submissions" / name
        _write_page(folder / "index.html", "student", _view(name, marks) | shared)
        results = encode(results_json(marks), indent=1)
        write_atomically(folder / "results.json", results + b"\n")


def _table(rubric: Rubric, graded: Graded) -> str:
    """Return class.csv. A cell that a spreadsheet would take for a formula begins with a quote."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(
        ["submission", *rubric.parts, "total", "faults", "seconds", "by hand", "overridden"]
    )
    for name, marks in graded.items():
        cells = [
            name,
            *("" if mark.marks is None else f"{mark.marks:g}" for mark in marks),
            "" if _open(marks) else f"{_total(marks):g}",
            " ".join(f"{mark.part}:{fault}" for mark in marks for fault in mark.faults),
            f"{sum(mark.seconds for mark in marks):.0f}",
            calm("; ".join(f"{mark.part}: {look}" for mark in marks for look in mark.look)),
            "; ".join(f"{mark.part}: {mark.given}" for mark in marks if mark.given),
        ]
        rows.writerow([f"'{cell}" if cell[:1] in tuple("=+-@\t") else cell for cell in cells])
    return text.getvalue()


def _view(name: str, marks: Sequence[Mark]) -> dict[str, Any]:
    """Return what the pages show of a submission, with all texts calm."""
    looks: dict[str, list[str]] = {}
    for mark in marks:
        for text in mark.look:
            looks.setdefault(calm(text), []).append(mark.part)
    return {
        "name": name,
        "total": f"{_total(marks):g}",
        "points": f"{sum(mark.points for mark in marks):g}",
        "open": _open(marks),
        "looks": {text: ", ".join(parts) for text, parts in looks.items()},
        "parts": [
            msgspec.structs.asdict(mark)
            | {
                "shown": "?" if mark.marks is None else f"{mark.marks:g}",
                "of": f"{mark.points:g}",
                "state": _state(mark),
                "why": [calm(text) for text in mark.why],
                "look": [calm(text) for text in mark.look],
                "given": calm(mark.given or ""),
            }
            for mark in marks
        ],
    }


def _state(mark: Mark) -> str:
    return first_that_holds(
        {
            "given": mark.given is not None,
            "open": mark.marks is None,
            "full": mark.marks == mark.points,
            "less": True,
        }
    )


def _class_view(rubric: Rubric, graded: Graded) -> dict[str, Any]:
    faults = Counter(
        fault for marks in graded.values() for fault in {f for mark in marks for f in mark.faults}
    )
    points = sum(part.points for part in rubric.parts.values())
    finished = [_total(marks) for marks in graded.values() if not _open(marks)]
    bins = Counter(min(int(10 * marks / points), 9) for marks in finished)
    most = max(bins.values(), default=1)
    return {
        "rows": [_view(name, marks) for name, marks in graded.items()],
        "faults": [
            {"entry": catalogue()[name], "lesson": lesson_of(name), "times": count(times, "time")}
            for name, times in faults.most_common()
        ],
        "bins": [
            {
                "range": f"{points * tenth / 10:g} to {points * (tenth + 1) / 10:g}",
                "count": bins[tenth],
                "percent": round(100 * bins[tenth] / most),
            }
            for tenth in reversed(range(10))
        ],
        "finished": count(len(finished), "submission"),
        "by_hand": count(sum(map(_open, graded.values())), "part"),
    }


def results_json(marks: Sequence[Mark]) -> dict[str, Any]:
    """Return what Gradescope takes for a submission; it is hidden as long as a mark is open."""
    tests = []
    for mark in marks:
        lines = [
            *([f"Set by your grader: {mark.given}"] if mark.given else []),
            *mark.why,
            *(f"A person will look at this: {text}" for text in mark.look),
            *(f"Read {lesson}." for lesson in mark.lessons),
        ]
        passed = "passed" if mark.marks == mark.points else "failed"
        known = {} if mark.marks is None else {"score": mark.marks, "status": passed}
        tests.append(
            {
                "name": mark.title,
                "number": mark.part,
                "max_score": mark.points,
                "output": calm("\n".join(lines)),
                "output_format": "text",
                **known,
            }
        )
    return {
        "score": _total(marks),
        "output": f"{count(_open(marks), 'part')} to be looked at by hand." if _open(marks) else "",
        "visibility": "hidden" if _open(marks) else "visible",
        "tests": tests,
    }


def _write_page(path: Path, name: str, view: dict[str, Any]) -> None:
    """Write a page atomically; jinja2 escapes every text."""
    template = page_template(Path(__file__).with_name(f"{name}.html.jinja"))
    write_atomically(path, template.render(view).encode(errors="replace"))
