"""What the grader writes: class.csv, class.html, and for each student a page and results.json.

``results.json`` follows Gradescope's "Autograder Specifications"
(gradescope-autograders.readthedocs.io/en/latest/specs/): a score for all, and tests with name,
score, max_score, status and output. A part whose mark is open has no score there.
"""

import csv
import io
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jinja2

from common.errors import count
from common.utils.atomic_files import write_atomically
from common.utils.typed_json import calm, encode
from lab.audit.findings.finding import catalogue
from lab.grade.marks import OVERRIDES, Mark, lesson_of
from lab.grade.rubric import Rubric


class Graded(Protocol):
    """A submission with its marks, by part."""

    name: str
    problem: str
    marks: dict[str, Mark]


def marks_text(mark: Mark) -> str:
    """Return "3 of 3", or that the mark is open."""
    of = f"of {mark.points:g}"
    return f"look by hand (? {of})" if mark.marks is None else f"{mark.marks:g} {of}"


def total(one: Graded) -> float:
    """Return the marks that are not open, added up."""
    return sum(mark.marks or 0.0 for mark in one.marks.values())


def open_parts(one: Graded) -> list[Mark]:
    """Return the marks that a person has to give."""
    return [mark for mark in one.marks.values() if mark.marks is None]


def summary(handed_in: Sequence[Graded], out: Path) -> str:
    """Return what the terminal says at the end."""
    by_hand = sum(len(open_parts(one)) for one in handed_in)
    return (
        f"{count(len(handed_in), 'submission')}, {count(by_hand, 'part')} to look at by hand; "
        f"see {out / 'class.html'} and {out / 'class.csv'}"
    )


def write_class(out: Path, rubric: Rubric, handed_in: Sequence[Graded], *, sandboxed: bool) -> None:
    """Write all files of a class."""
    write_atomically(out / "class.csv", _table(rubric, handed_in).encode())
    shared = {"rubric": rubric, "sandboxed": sandboxed, "date": time.strftime("%Y-%m-%d %H:%M")}
    _write_page(out / "class.html", "class", {**_class_view(rubric, handed_in), **shared})
    if not (out / "overrides.csv").exists():
        write_atomically(out / "overrides.csv", (",".join(OVERRIDES) + "\n").encode())
    for one in handed_in:
        folder = out / "submissions" / one.name
        view = {"name": one.name, "problem": calm(one.problem), "parts": _parts(one), **_sums(one)}
        _write_page(folder / "index.html", "student", {**view, **shared})
        results = encode(results_json(one, sandboxed=sandboxed), indent=1)
        write_atomically(folder / "results.json", results + b"\n")


def _table(rubric: Rubric, handed_in: Sequence[Graded]) -> str:
    """Return class.csv. A cell that a spreadsheet would take for a formula begins with a quote."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(
        ["submission", *rubric.parts, "total", "faults", "seconds", "by hand", "overridden"]
    )
    for one in handed_in:
        marks = one.marks.values()
        cells = [
            one.name,
            *("" if mark.marks is None else f"{mark.marks:g}" for mark in marks),
            f"{total(one):g}",
            " ".join(f"{mark.part}:{fault}" for mark in marks for fault in mark.faults),
            f"{sum(mark.seconds for mark in marks):.0f}",
            calm("; ".join(f"{mark.part}: {look}" for mark in marks for look in mark.look)),
            "; ".join(f"{mark.part}: {mark.given}" for mark in marks if mark.given),
        ]
        rows.writerow([f"'{cell}" if cell[:1] in tuple("=+-@\t") else cell for cell in cells])
    return text.getvalue()


def _sums(one: Graded) -> dict[str, Any]:
    return {
        "total": f"{total(one):g}",
        "of": f"{sum(mark.points for mark in one.marks.values()):g}",
        "open": len(open_parts(one)),
    }


def _parts(one: Graded) -> list[dict[str, Any]]:
    """Return what the pages show of each part, with all texts calm."""
    return [
        {
            "name": mark.part,
            "title": mark.title,
            "marks": "?" if mark.marks is None else f"{mark.marks:g}",
            "points": f"{mark.points:g}",
            "state": _state(mark),
            "why": [calm(text) for text in mark.why],
            "look": [calm(text) for text in mark.look],
            "faults": mark.faults,
            "lessons": mark.lessons,
            "given": calm(mark.given or ""),
            "page": mark.page and Path(mark.page).name,
        }
        for mark in one.marks.values()
    ]


def _state(mark: Mark) -> str:
    if mark.given:
        return "given"
    if mark.marks is None:
        return "open"
    return "full" if mark.marks == mark.points else "less"


def _class_view(rubric: Rubric, handed_in: Sequence[Graded]) -> dict[str, Any]:
    faults = Counter(
        fault
        for one in handed_in
        for fault in {f for mark in one.marks.values() for f in mark.faults}
    )
    points = sum(part.points for part in rubric.parts.values())
    finished = [total(one) for one in handed_in if not open_parts(one)]
    bins = Counter(min(int(10 * marks / points), 9) for marks in finished)
    most = max(bins.values(), default=1)
    return {
        "rows": [
            {"name": one.name, "problem": calm(one.problem), "parts": _parts(one), **_sums(one)}
            for one in handed_in
        ],
        "faults": [
            {
                "name": name,
                "title": catalogue()[name].title,
                "cure": catalogue()[name].cure,
                "lesson": lesson_of(name),
                "times": count(times, "submission"),
            }
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
        "finished": len(finished),
        "by_hand": sum(len(open_parts(one)) for one in handed_in),
    }


def results_json(one: Graded, *, sandboxed: bool) -> dict[str, Any]:
    """Return what Gradescope takes for a submission."""
    tests = []
    for mark in one.marks.values():
        lines = [*mark.why, *(f"A person will look at this: {text}" for text in mark.look)]
        lines += [f"Read {lesson}." for lesson in mark.lessons]
        if mark.given:
            lines = [f"Set by your grader: {mark.given}", *lines]
        test = {
            "name": mark.title,
            "number": mark.part,
            "max_score": mark.points,
            "output": calm("\n".join(lines)),
            "output_format": "text",
        }
        if mark.marks is not None:
            passed = "passed" if mark.marks == mark.points else "failed"
            test |= {"score": mark.marks, "status": passed}
        tests.append(test)
    notes = [f"{count(len(open_parts(one)), 'part')} will be looked at by hand."] * bool(
        open_parts(one)
    )
    notes += ["Run without a sandbox of lab grade."] * (not sandboxed)
    return {
        "score": total(one),
        "output": calm(" ".join([*notes, one.problem]).strip()),
        "visibility": "visible",
        "tests": tests,
    }


def _write_page(path: Path, name: str, view: dict[str, Any]) -> None:
    """Write a page atomically; jinja2 escapes every text."""
    here = Path(__file__).parent
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader([here, here.parent / "report"]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(f"{name}.html.jinja")
    write_atomically(path, template.render(view).encode(errors="replace"))
