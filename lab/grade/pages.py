"""What the grader writes: class.csv, class.html, and for each student a page and results.json.

``results.json`` follows Gradescope's "Autograder Specifications"
(gradescope-autograders.readthedocs.io/en/latest/specs/): a score for all, and tests with name,
score, max_score, status and output. A part whose mark is open has no score there.
"""

import csv
import io
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from common.say import count
from common.utils.atomic_files import write_atomically
from common.utils.typed_json import calm, encode, read_json
from lab.audit.report import AuditContent, MarkNote, write_content
from lab.grade.facts import Facts, what_ended
from lab.grade.findings import entries, lesson_of
from lab.grade.late import Lateness
from lab.grade.marks import Mark, OverrideRow
from lab.grade.rubric import Rubric
from lab.html_page import page_template

# The marks of each submission's parts.
Graded = Mapping[str, Sequence[Mark]]
MOST_FACTS = 64 * 2**20
_FORMULA_SIGNS = ("=", "+", "-", "@", "\t")


def marks_text(mark: Mark) -> str:
    """Return "3 of 3", or that the mark is open."""
    if mark.marks is None:
        return f"look by hand (? of {mark.points:g})"
    return f"{mark.marks:g} of {mark.points:g}"


def count_open(marks: Iterable[Mark]) -> int:
    """Return how many marks a person still has to give."""
    return sum(mark.marks is None for mark in marks)


def total(marks: Sequence[Mark]) -> float:
    """Return the marks that are not open, added up."""
    return sum((mark.marks for mark in marks if mark.marks is not None), start=0.0)


def write_class(out: Path, rubric: Rubric, graded: Graded, *, unsafe: str) -> None:
    """Write the table and the page of a class, and a table for overrides if there is none."""
    write_atomically(out / "class.csv", _table(rubric, graded).encode())
    view = _class_view(rubric, graded) | _shared(rubric, unsafe)
    _write_page(out / "class.html", "class", view)
    if not (out / "overrides.csv").exists():
        header = ",".join(OverrideRow.__struct_fields__)
        write_atomically(out / "overrides.csv", f"{header}\n".encode())


def write_submission(
    out: Path,
    rubric: Rubric,
    name: str,
    marks: Sequence[Mark],
    *,
    unsafe: str,
    late: Lateness | None = None,
) -> None:
    """Write the page of a student, the audit's pages of his parts, and results.json."""
    folder = out / "submissions" / name
    view = _view(name, marks) | _shared(rubric, unsafe)
    _write_page(folder / "index.html", "student", view | {"late": _late_text(marks, late)})
    for mark in marks:
        if mark.page:
            _write_audit_page(folder / mark.page, mark)
    results = encode(results_json(marks, late), indent=1)
    write_atomically(folder / "results.json", results + b"\n")


def _write_audit_page(path: Path, mark: Mark) -> None:
    """Write the audit's page of a part, in the colour of its mark."""
    facts = read_json(path.with_suffix(".json"), Facts, most_bytes=MOST_FACTS)
    note = MarkNote(f"{mark.title}: {marks_text(mark)}", _colour(mark))
    write_content(path, _for_student(facts.audit), mark=note)


def _for_student(audit: AuditContent) -> AuditContent:
    """Return what an audit said, without its advice to who runs ``lab audit``."""
    told = audit.diagnosis
    if told is None:
        return audit
    failure = f"{what_ended(told)} {told.cure}".strip()
    headline = failure if audit.headline == audit.failure else audit.headline
    return msgspec.structs.replace(audit, headline=headline, failure=failure)


def _shared(rubric: Rubric, unsafe: str) -> dict[str, Any]:
    """Return what all pages show; unsafe : how scripts ran without a sandbox, "" with one."""
    return {"rubric": rubric, "unsafe": unsafe, "date": time.strftime("%Y-%m-%d %H:%M")}


# --- class.csv ---


def _table(rubric: Rubric, graded: Graded) -> str:
    """Return class.csv."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(
        [
            *("submission", *rubric.parts, "total", "so far", "faults", "seconds"),
            *("by hand", "overridden", "other commands"),
        ]
    )
    for name, marks in graded.items():
        rows.writerow([harmless(cell) for cell in _cells(name, marks)])
    return text.getvalue()


def harmless(cell: str) -> str:
    """Return a cell; one that a spreadsheet would take for a formula begins with a quote."""
    if cell.startswith(_FORMULA_SIGNS):
        return f"'{cell}"
    return cell


def _cells(name: str, marks: Sequence[Mark]) -> list[str]:
    """Return a submission's row; the cell of an open mark, and then that of the total, is empty."""
    faults: list[str] = []
    looks: list[str] = []
    overridden: list[str] = []
    commands: list[str] = []
    for mark in marks:
        faults += [f"{mark.part}:{fault}" for fault in mark.faults]
        looks += [f"{mark.part}: {look.for_grader}" for look in mark.look]
        if mark.changes:
            commands.append(f"{mark.part}: {mark.command} ({', '.join(mark.changes)})")
        if mark.given:
            overridden.append(f"{mark.part}: {mark.given}")
    whole = "" if count_open(marks) else f"{total(marks):g}"
    seconds = sum(mark.seconds for mark in marks)
    return [
        name,
        *(_shown(mark, unknown="") for mark in marks),
        whole,
        f"{total(marks):g}",
        " ".join(faults),
        f"{seconds:.0f}",
        calm("; ".join(looks)),
        "; ".join(overridden),
        calm("; ".join(commands)),
    ]


def _shown(mark: Mark, *, unknown: str) -> str:
    return unknown if mark.marks is None else f"{mark.marks:g}"


# --- the pages ---


def _view(name: str, marks: Sequence[Mark]) -> dict[str, Any]:
    """Return what the pages show of a submission, with all texts calm."""
    looks: dict[str, list[str]] = {}
    for mark in marks:
        for look in mark.look:
            looks.setdefault(calm(look.for_grader), []).append(mark.part)
    points = sum(mark.points for mark in marks)
    return {
        "name": name,
        "total": f"{total(marks):g}",
        "points": f"{points:g}",
        "open": count_open(marks),
        "of_parts": count(len(marks), "part"),
        "looks": {look: ", ".join(parts) for look, parts in looks.items()},
        "parts": [_part_view(mark) for mark in marks],
    }


def _part_view(mark: Mark) -> dict[str, Any]:
    """Return a mark, with what the pages show of it and with all texts calm."""
    return msgspec.structs.asdict(mark) | {
        "shown": _shown(mark, unknown="?"),
        "of": f"{mark.points:g}",
        "state": _state(mark),
        "why": [calm(sentence) for sentence in mark.why],
        "look": [calm(look.for_student) for look in mark.look],
        "ran": calm(_ran(mark)),
        "given": calm(mark.given or ""),
    }


def _ran(mark: Mark) -> str:
    """Return which script ran and with which command, as a sentence; "" if none did."""
    if not mark.command:
        return ""
    if not mark.changes:
        return f"Ran {mark.script}: {mark.command}"
    how = ", ".join(mark.changes)
    return f"{mark.script} does not run as demanded. It ran {how}: {mark.command}"


def _state(mark: Mark) -> str:
    """Return the name by which the pages' style and filters know a mark."""
    return "given" if mark.given is not None else _colour(mark)


def _colour(mark: Mark) -> str:
    """Return "full", "less" or "open"."""
    if mark.marks is None:
        return "open"
    return "full" if mark.marks == mark.points else "less"


def _class_view(rubric: Rubric, graded: Graded) -> dict[str, Any]:
    """Return what the page of a class shows."""
    points = sum(part.points for part in rubric.parts.values())
    finished = [total(marks) for marks in graded.values() if not count_open(marks)]
    open_marks = sum(count_open(marks) for marks in graded.values())
    return {
        "rows": [_view(name, marks) for name, marks in graded.items()],
        "faults": _faults_view(rubric, graded),
        "bins": _bins_view(finished, points),
        "submissions": count(len(graded), "submission"),
        "finished": count(len(finished), "submission"),
        "by_hand": count(open_marks, "part"),
    }


def _faults_view(rubric: Rubric, graded: Graded) -> list[dict[str, Any]]:
    """Return the faults of a class, the most frequent first; one counts once for a submission."""
    times: Counter[str] = Counter()
    for marks in graded.values():
        times.update({fault for mark in marks for fault in mark.faults})
    known = entries(rubric.findings)
    return [
        {
            "entry": known[fault],
            "lesson": lesson_of(fault, rubric.findings),
            "times": count(number, "time"),
        }
        for fault, number in times.most_common()
    ]


def _bins_view(finished: Sequence[float], points: float) -> list[dict[str, Any]]:
    """Return how many submissions have how many tenths of the points, the best first."""
    # Full marks lie in the tenth from 9 to 10.
    submissions = Counter(min(int(10 * marks / points), 9) for marks in finished)
    most = max(submissions.values(), default=1)
    bins: list[dict[str, Any]] = []
    for tenth in reversed(range(10)):
        lowest = points * tenth / 10
        highest = points * (tenth + 1) / 10
        bins.append(
            {
                "range": f"{lowest:g} to {highest:g}",
                "count": submissions[tenth],
                "percent": round(100 * submissions[tenth] / most),
            }
        )
    return bins


# --- Gradescope ---


class GradescopeTest(msgspec.Struct, kw_only=True):
    """The result of a part; ``score`` and ``status`` are left out as long as its mark is open."""

    name: str
    number: str
    max_score: float
    output: str
    output_format: str = "text"
    score: float | msgspec.UnsetType = msgspec.UNSET
    status: str | msgspec.UnsetType = msgspec.UNSET


class GradescopeResults(msgspec.Struct):
    """The results of a submission."""

    score: float
    output: str
    visibility: str
    tests: list[GradescopeTest]


def results_json(marks: Sequence[Mark], late: Lateness | None = None) -> GradescopeResults:
    """Return what Gradescope takes for a submission; it is hidden as long as a mark is open."""
    score = total(marks)
    said = _late_text(marks, late)
    results = GradescopeResults(score, said, "visible", [_test(mark) for mark in marks])
    if late is not None:
        results.score = score * (1 - late.share)
    number = count_open(marks)
    if number:
        results.output = f"{said} {count(number, 'part')} to be looked at by hand.".strip()
        results.visibility = "hidden"
    return results


def _late_text(marks: Sequence[Mark], late: Lateness | None) -> str:
    """Return what the time costs, as a sentence; "" if nothing is known of it."""
    return "" if late is None else f"{late} of {total(marks):g}."


def _test(mark: Mark) -> GradescopeTest:
    """Return what Gradescope shows of a part."""
    lines: list[str] = []
    if mark.given:
        lines.append(f"Set by your grader: {mark.given}")
    lines += mark.why
    lines += [f"A person will look at this: {look.for_student}" for look in mark.look]
    if mark.changes:
        lines.append(_ran(mark))
    lines += [f"Read {lesson}." for lesson in mark.lessons]
    test = GradescopeTest(
        name=mark.title,
        number=mark.part,
        max_score=mark.points,
        output=calm("\n".join(lines)),
    )
    if mark.marks is not None:
        test.score = mark.marks
        test.status = "passed" if mark.marks == mark.points else "failed"
    return test


# --- writing ---


def _write_page(path: Path, name: str, view: dict[str, Any]) -> None:
    """Write a page atomically; jinja2 escapes every text."""
    template = page_template(Path(__file__).with_name(f"{name}.html.jinja"))
    write_atomically(path, template.render(view).encode(errors="replace"))
