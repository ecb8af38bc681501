"""From what was seen of a part to its mark: every point that is lost has a sentence.

A mark is a proposal. Only faults of which the audit is certain cost points; whatever it cannot tell
leaves the mark open for a person, who gives it in overrides.csv.
"""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from common.errors import UserError
from lab.audit.findings.finding import FAULT
from lab.audit.result import ranks_text
from lab.grade.part import Facts
from lab.grade.rubric import WAYS, Part, Rubric
from lab.grade.submissions import check_row, read_rows

OVERRIDES = ("submission", "part", "marks", "reason")


class Mark(msgspec.Struct, kw_only=True):
    """The mark of a part.

    Parameters
    ----------
    marks : None as long as a person has to look.
    why : a sentence for each deduction, or for full marks.
    look : what a person has to look at.
    faults, lessons : names of what was found, and what to read about it.
    given : the reason of a person who has set the marks.
    """

    part: str
    title: str
    points: float
    marks: float | None = None
    why: list[str] = []
    look: list[str] = []
    faults: list[str] = []
    lessons: list[str] = []
    seconds: float = 0.0
    given: str | None = None
    page: str | None = None


def mark_part(name: str, seen: Facts | str, rubric: Rubric) -> Mark:
    """Return the mark that the rubric gives for what was seen.

    seen : or why nothing was seen.
    """
    part = rubric.parts[name]
    if isinstance(seen, str):
        return Mark(part=name, title=part.title, points=part.points, look=[seen])
    audit = seen.audit
    faults = [one for one in audit["findings"] if one["severity"] == FAULT]
    accepted = [one for one in faults if one["name"] in part.accepts]
    counted = [one for one in faults if one not in accepted and audit["status"] == 1]
    lost = {one["name"]: rubric.deduction(part, one["name"]) for one in counted}
    marks = max(0.0, part.points - sum(lost.values()))
    look = seen.doubts or _unclear(part, seen, counted, marks)
    why = [
        f"-{lost[one['name']]:g}: {one['title']} ({one['name']}{_place(one)}). {one['cure']}"
        for one in counted
    ]
    why += [
        f"Accepted: {one['title']} ({one['name']}). {part.accepts[one['name']]}" for one in accepted
    ]
    return Mark(
        part=name,
        title=part.title,
        points=part.points,
        marks=None if look else marks,
        why=why or [] if look else why or [_full(part)],
        look=look,
        faults=list(lost),
        lessons=sorted({lesson_of(one) for one in lost}),
        seconds=round(seen.seconds, 1),
        page=f"{name}.html",
    )


def _full(part: Part) -> str:
    if part.ranks == [1]:
        return "It trains on one process; only this was checked."
    return "No fault was found: the same updates as one process that averages all gradients."


def _place(finding: Mapping[str, Any]) -> str:
    at = finding["at"]
    return f", {at['file']}:{at['line']}" if at else ""


def _unclear(
    part: Part, seen: Facts, counted: Sequence[Mapping[str, Any]], marks: float
) -> list[str]:
    """Return what the audit could not tell about a part, as sentences.

    marks : what the rubric gives if all faults are real.
    """
    audit, alone = seen.audit, part.ranks == [1]
    ran = {one["ranks"] for one in audit["runs"]}
    unsure = [one["title"] for one in counted if one["sure"] != "certain"]
    missing = [WAYS.get(one, one) for one in part.uses if one not in seen.used]
    if alone:
        return [] if seen.whole else [f"it does not train to the audit's end: {audit['headline']}"]
    if audit["status"] == 2:
        return [audit["headline"]]
    sentences = {
        f"if it really has this fault, it gets {marks:g}: {', '.join(unsure)} (the audit is not "
        "certain)": bool(unsure),
        f"this part is to use {', '.join(part.uses)}; it never calls {', '.join(missing)}": (
            bool(missing)
        ),
        f"it ran on {ranks_text(ran)} only: look at its divisor": (
            len(ran) < len(part.ranks) and not counted
        ),
        **{
            f"beside an accepted fault, this could not be checked: {one}": not counted
            for one in audit["unknown"]
            if audit["status"] == 1 and one.startswith(("gradients: ", "weights: "))
        },
        f"beside an accepted fault, the run ended early: {audit['failure']}": (
            bool(audit["failure"]) and not counted
        ),
    }
    return [sentence for sentence, holds in sentences.items() if holds]


# --- lessons ---


@cache
def _lessons() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("lessons.toml").read_text(encoding="utf-8"))


def lesson_of(fault: str) -> str:
    """Return the lesson that explains a fault: its title and page."""
    found = next((one for one in _lessons().values() if fault in one["faults"]), None)
    lesson = found or _lessons()["09_find_the_bug"]
    page = next(name for name, one in _lessons().items() if one is lesson)
    return f"{lesson['title']} (docs/learn/{page}.md)"


# --- what a person decides ---


def read_overrides(
    path: Path, names: Mapping[str, Any], rubric: Rubric
) -> dict[tuple[str, str], tuple[float, str]]:
    """Return the marks that a person has given, and why, by submission and part.

    Raises UserError for a row that fits no submission or part, has no reason, or impossible marks.
    """
    given: dict[tuple[str, str], tuple[float, str]] = {}
    for row in read_rows(path, OVERRIDES) if path.exists() else []:
        check_row(row, names, rubric, where=str(path))
        points = rubric.parts[row["part"]].points
        try:
            marks = float(row["marks"])
        except ValueError:
            marks = -1.0
        if not 0 <= marks <= points or not row["reason"]:
            where = f"{path}, {row['submission']} {row['part']}"
            got = f"got {row['marks']!r} and {row['reason']!r}"
            raise UserError(f"{where}: give marks from 0 to {points:g} and a reason, {got}")
        given[row["submission"], row["part"]] = marks, row["reason"]
    return given


def override(mark: Mark, given: tuple[float, str] | None) -> Mark:
    """Return the mark with what a person has decided."""
    if given is None:
        return mark
    return msgspec.structs.replace(mark, marks=given[0], given=given[1], look=[])
