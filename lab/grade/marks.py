"""From what was seen of a part to its mark: every point that is lost has a sentence.

A mark is a proposal. Only faults of which the audit is certain cost points; whatever it cannot tell
leaves the mark open for a person, who gives it in overrides.csv.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from common.errors import UserError
from lab.audit.findings.finding import FAULT
from lab.audit.report import AuditContent, FindingContent
from lab.grade.facts import CANNOT_TELL, FOUND_FAULTS, Facts, Look, what_ended
from lab.grade.findings import lesson_of
from lab.grade.rubric import WAYS, Part, Rubric
from lab.grade.submissions import CsvRow, Place, places_of, read_rows


class Mark(msgspec.Struct, kw_only=True):
    """The mark of a part.

    Parameters
    ----------
    marks : None as long as a person has to look.
    why : a sentence for each deduction, or for full marks.
    look : what a person has to look at.
    faults, lessons : names of what was found, and what to read about it.
    script, command : what ran; "" if nothing did.
    changes : in what the command differs from the demanded one; see demands.py.
    given : the reason of a person who has set the marks.
    """

    part: str
    title: str
    points: float
    marks: float | None = None
    why: list[str] = []
    look: list[Look] = []
    faults: list[str] = []
    lessons: list[str] = []
    script: str = ""
    command: str = ""
    changes: list[str] = []
    seconds: float = 0.0
    given: str | None = None
    page: str | None = None


def mark_part(name: str, seen: Facts | Look, rubric: Rubric) -> Mark:
    """Return the mark that the rubric gives for what was seen.

    seen : or why nothing was seen.
    """
    part = rubric.parts[name]
    if isinstance(seen, Look):
        mark = Mark(part=name, title=part.title, points=part.points)
        if not seen.missing or rubric.missing is None:
            return msgspec.structs.replace(mark, look=[seen])
        why = [f"Not handed in: {seen.for_student}"]
        return msgspec.structs.replace(mark, marks=rubric.missing * part.points, why=why)
    counted = _counted(part, seen)
    lost = {fault.name: rubric.deduction(part, fault.name) for fault in counted}
    certain = sum(lost[fault.name] for fault in counted if fault.sure == "certain")
    changes = [] if seen.refused else seen.changes
    cost = rubric.other_command * part.points if changes else 0.0
    marks = max(0.0, part.points - sum(lost.values()) - cost)
    look = _doubted(seen)
    if not look and certain < part.points:  # else whatever a person sees leaves it at 0
        look = _unclear(part, seen, counted, marks)
    why = [_why_lost(fault, lost[fault.name]) for fault in counted]
    why += _accepted(part, seen)
    if not look and not why:
        why.append(_why_full(part, seen))
    if cost:
        why.append(f"-{cost:g}: another command than the demanded one starts it.")
    return Mark(
        part=name,
        title=part.title,
        points=part.points,
        marks=None if look else marks,
        why=why,
        look=look,
        faults=list(lost),
        lessons=sorted({lesson_of(fault, rubric.findings) for fault in lost} - {""}),
        script=seen.script,
        command="" if seen.refused else seen.command,
        changes=changes,
        seconds=round(seen.seconds, 1),
        page=None if part.is_driven else f"{name}.html",
    )


def _counted(part: Part, seen: Facts) -> list[FindingContent]:
    """Return what costs points: the faults that the course does not accept, and what it demands."""
    counted: list[FindingContent] = []
    if seen.audit.status == FOUND_FAULTS:
        counted += [fault for fault in seen.audit.faults if fault.name not in part.accepts]
    if not _is_open(part, seen.audit):
        counted += [found for found in seen.audit.findings if found.name in part.demands]
    return counted


def _accepted(part: Part, seen: Facts) -> Iterator[str]:
    """Yield a sentence for each fault that the course asks for."""
    for fault in seen.audit.faults:
        if fault.name in part.accepts:
            yield f"Accepted: {fault.title} ({fault.name}). {part.accepts[fault.name]}"


def _why_lost(fault: FindingContent, points: float) -> str:
    """Return the sentence for a deduction, with the first thing that was seen."""
    seen = "".join(f" Seen: {sentence}." for sentence in fault.evidence[:1])
    return f"-{points:g}: {fault.title} ({_place(fault)}).{seen} {fault.cure}"


def _place(finding: FindingContent) -> str:
    """Return a finding's name, with the line of the script if it has one."""
    if finding.at is None:
        return finding.name
    return f"{finding.name}, {finding.at.file}:{finding.at.line}"


def _why_full(part: Part, seen: Facts) -> str:
    if part.is_driven:
        return seen.audit.headline
    if part.ranks == [1]:
        return "It trains on one process; only this was checked."
    why = "No fault was found: the same updates as one process that averages all gradients."
    ran = {run.ranks for run in seen.audit.runs}
    if len(ran) > 1:
        return why
    number = max(ran)
    return f"{why} It ran on {number} ranks alone, where a literal {number} is the right divisor."


def _doubted(seen: Facts) -> list[Look]:
    """Return why the records may not be what the probe wrote."""
    return [Look(f"{doubt}.", grader="Read its code.") for doubt in seen.doubts]


def _is_open(part: Part, audit: AuditContent) -> bool:
    """Return whether the audit cannot tell, or has not seen, what the rubric asks for."""
    if audit.status != CANNOT_TELL:
        return False
    unseen = [row.name for row in audit.properties if row.state == "not seen"]
    equal = audit.failure is None and audit.verdict.answer == "yes"
    return not equal or any(name in part.properties for name in unseen)


def _unclear(
    part: Part, seen: Facts, counted: Sequence[FindingContent], marks: float
) -> list[Look]:
    """Return what the audit could not tell about a part.

    counted : the faults that cost points.
    marks : what the rubric gives if all faults are real.
    """
    audit = seen.audit
    if part.ranks == [1] and seen.whole:
        return []
    if part.ranks == [1] or _is_open(part, audit):
        return [_undecided(seen)]
    looks: list[Look] = []
    unsure = [fault.title for fault in counted if fault.sure != "certain"]
    if unsure:
        looks.append(
            Look(
                f"the audit is not certain of this: {', '.join(unsure)}.",
                grader=f"If it really has this fault, it gets {marks:g}.",
            )
        )
    missing = [WAYS.get(way, way) for way in part.uses if way not in seen.used]
    if missing:
        looks.append(
            Look(
                f"this part is to use {', '.join(part.uses)}; it never calls {', '.join(missing)}, "
                "or sends next to nothing by it."
            )
        )
    if not counted:
        looks += _unchecked(audit)
    return looks


def _undecided(seen: Facts) -> Look:
    """Return why the audit could not judge a part at all, with what it found on a condition."""
    audit = seen.audit
    look = Look(f"{audit.headline.rstrip('.')}.")
    if audit.diagnosis:
        look = Look(what_ended(audit.diagnosis), student=audit.diagnosis.cure)
    advice = [
        f"If {finding.condition}: {finding.title} ({_place(finding)})."
        for finding in audit.possible
        if finding.severity == FAULT
    ]
    if seen.refused:
        tried = [attempt.command for attempt in seen.tries] + [seen.command]
        advice.append(f"Tried: {'; '.join(tried)}.")
        if look.student:
            advice.append("Ask its author to change that, or mark it in overrides.csv.")
        else:
            advice.append("If another command starts it, name that with --map.")
    look.grader = " ".join(advice)
    return look


def _unchecked(audit: AuditContent) -> Iterator[Look]:
    """Yield what the audit could not check of a part in which no fault counts."""
    if not audit.runs:
        yield Look("no run of it was seen.")
    if audit.status == FOUND_FAULTS:
        for row in audit.properties:
            if row.name in ("gradients", "weights") and row.state == "not seen":
                yield Look(f"beside an accepted fault, {row.claim} was not seen: {row.said[0]}")
    if audit.diagnosis:
        yield Look(f"beside an accepted fault, the run ended early: {what_ended(audit.diagnosis)}")


# --- what a person decides ---


class OverrideRow(CsvRow):
    """A row of overrides.csv."""

    marks: str
    reason: str


class Override(msgspec.Struct):
    """The marks that a person has given, and why.

    of_open : whether they are for a mark only as long as it is open.
    """

    marks: float
    reason: str
    of_open: bool = False


def read_overrides(
    path: Path, names: Mapping[str, object], rubric: Rubric
) -> dict[Place, Override]:
    """Return what a person has decided, by submission and part; nothing without the file.

    A row with ``*``, for all submissions or parts, decides only what is open and has no row.

    Raises UserError for a row that fits no submission or part, has no reason, or impossible marks.
    """
    if not path.exists():
        return {}
    decided: dict[Place, Override] = {}
    for row in read_rows(path, OverrideRow):
        for name, part in places_of(row, names, rubric, where=str(path)):
            decided[name, part] = _decision(row, rubric.parts[part].points, path)
    return decided


def _decision(row: OverrideRow, points: float, path: Path) -> Override:
    """Return what a row decides. Raises UserError for impossible marks, or without a reason."""
    try:
        marks = float(row.marks)
    except ValueError:
        marks = -1.0  # refused below
    if not 0 <= marks <= points or not row.reason:
        raise UserError(
            f"{path}, {row.submission} {row.part}: give marks from 0 to {points:g} and a reason, "
            f"got {row.marks!r} and {row.reason!r}"
        )
    return Override(marks, row.reason, of_open=row.is_general)


def override(mark: Mark, decided: Override | None) -> Mark:
    """Return the mark with what a person has decided."""
    if decided and (mark.marks is None or not decided.of_open):
        mark = msgspec.structs.replace(mark, marks=decided.marks, given=decided.reason, look=[])
    return mark
