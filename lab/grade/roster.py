"""Who is in the class, who handed in when, and the files that a gradebook imports.

``read_roster`` reads the students, ``Class.of`` finds each one's submission, ``write_gradebook``
writes gradebook.csv and, of a roster that Canvas exported, canvas.csv: its columns are those of
Canvas's gradebook (Student, ID, SIS User ID, SIS Login ID, Section, the assignment), with the
export's own header of the assignment, "Assignment 2 (87568490)", if there is one.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from common.errors import UserError, file_errors
from common.say import count, listed
from common.utils.atomic_files import read_regular, write_atomically
from lab.grade.exported import Exported
from lab.grade.late import lateness
from lab.grade.marks import Mark
from lab.grade.pages import count_open, harmless, total
from lab.grade.rubric import Rubric

# The headers that name a column, in lower case: ours, those of Canvas and those of Gradescope.
_HEADERS = {
    "name": ("name", "student", "full name", "student name"),
    "login": ("login", "sis login id", "username", "netid"),
    "sid": ("sid", "sis user id", "student id"),
    "email": ("email", "e-mail", "email address"),
    "section": ("section", "sections"),
    "group": ("group", "team", "group name"),
    "submitted": ("submitted", "submission time", "created_at"),
    "free_days": ("free days", "late days left"),
    "number": ("id",),
}
_CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
_POINTS_ROW = "Points Possible"  # what Canvas calls its second row, with spaces before it
# What Canvas calls a downloaded file: the student's name, perhaps LATE, his number, the file's.
_DOWNLOADED = re.compile(r"(.+?)_(?:LATE_)?(\d+)_\d+(?:_|$)")


@dataclass(frozen=True)
class Student:
    """A row of the roster; "" and None are unknown.

    sid : the university's number. number : Canvas's. free_days : late days that cost nothing.
    """

    row: Mapping[str, str]
    name: str = ""
    login: str = ""
    sid: str = ""
    email: str = ""
    section: str = ""
    group: str = ""
    number: str = ""
    submitted: datetime | None = None
    free_days: float | None = None

    @property
    def called(self) -> str:
        """What to call the student: the name, or else the login or the e-mail address."""
        return self.name or self.login or self.email or self.sid

    @property
    def keys(self) -> set[str]:
        """What a submission of this student may be called, see ``_key``."""
        turned = " ".join(reversed(self.name.split()))
        local_part = self.email.partition("@")[0]
        names = (self.name, turned, self.login, self.sid, self.email, local_part, self.number)
        return {_key(name) for name in names} - {""}


def _key(text: str) -> str:
    """Return a name without what differs between spellings: capitals, and all but letters."""
    return re.sub(r"[\W_]", "", text.casefold())


# --- reading ---


def read_roster(path: Path, rubric: Rubric) -> list[Student]:
    """Return the students of a CSV file, e.g. a gradebook that Canvas exported.

    Raises UserError if it cannot be read, names nobody, or has a time or a number that is none.
    """
    if rubric.late is not None and rubric.due is None:
        raise UserError("the rubric has late, and with a roster it also needs due, a date and time")
    headers, rows = _read_table(path)
    columns = {field: _column(headers, names) for field, names in _HEADERS.items()}
    if not any(columns[field] for field in ("name", "login", "sid", "email")):
        raise UserError(
            f"{path}: no column names a student, here are: {listed(headers) or 'none'}; give "
            "login, e-mail or name"
        )
    students = [_student(row, columns, path) for row in rows]
    return [one for one in students if one.called not in ("", _POINTS_ROW)]


def _read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the headers and the rows of a table with commas or semicolons."""
    with file_errors(f"{path} cannot be read"):
        lines = read_regular(path, most_bytes=2**24).decode("utf-8-sig").splitlines()
        first = lines[0] if lines else ""
        delimiter = ";" if first.count(";") > first.count(",") else ","
        reader = csv.DictReader(lines, restkey="", restval="", delimiter=delimiter)
        return list(reader.fieldnames or []), list(reader)


def _student(row: Mapping[str, str], columns: Mapping[str, str | None], path: Path) -> Student:
    """Return the student of a row. Raises UserError for a time or a number that is none."""
    cells = {field: (row[column] or "").strip() for field, column in columns.items() if column}
    submitted = cells.pop("submitted", "")
    free_days = cells.pop("free_days", "")
    where = f"{path}, {', '.join(cells.values())}"
    with file_errors(f"{where}: submitted is a time such as 2026-12-01T23:59-06:00"):
        time = datetime.fromisoformat(submitted) if submitted else None
    with file_errors(f"{where}: free days are a number"):
        free = float(free_days) if free_days else None
    return Student(row=row, submitted=time, free_days=free, **cells)


def _column(headers: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the first header that is one of these names."""
    for header in headers:
        if header.strip().lower() in names:
            return header
    return None


# --- who handed in what ---


@dataclass(frozen=True)
class Class:
    """The students, and the submission of each: "" if there is none.

    strangers : submissions that fit no student.
    """

    students: Sequence[Student]
    handed_in: Sequence[str]
    strangers: Sequence[str]

    @classmethod
    def of(
        cls,
        students: Sequence[Student],
        submissions: Iterable[str],
        exported: Mapping[str, Exported],
    ) -> "Class":
        """Find each student's submission: his own, or else that of his group or of a mate.

        exported : what Gradescope says of submissions; its times count if the roster has none.

        Raises UserError if a submission fits several students, or several fit one student.
        """
        own: dict[int, str] = {}  # by the student's place in the list
        of_groups: dict[str, list[str]] = {}
        strangers = []
        for submission in submissions:
            authors = _authors(submission, students, exported.get(submission))
            groups = {students[at].group for at in authors} or _groups(submission, students)
            if not groups:
                strangers.append(submission)
            for at in authors:
                if at in own:
                    both = f"{own[at]} and {submission} both fit {students[at].called}"
                    raise UserError(f"{both}: leave one out")
                own[at] = submission
            for group in groups - {""}:
                of_groups.setdefault(group, []).append(submission)
        handed_in = [
            own.get(at) or _of_group(student, of_groups) for at, student in enumerate(students)
        ]
        dated = [
            _dated(student, exported.get(submission))
            for student, submission in zip(students, handed_in, strict=True)
        ]
        return cls(dated, handed_in, strangers)


def _dated(student: Student, exported: Exported | None) -> Student:
    """Return the student with the time that Gradescope gives, unless the roster has one."""
    if exported is None or student.submitted is not None:
        return student
    return replace(student, submitted=exported.created_at)


def _authors(submission: str, students: Sequence[Student], exported: Exported | None) -> list[int]:
    """Return the places of those who handed in: the students of Gradescope, or of the name."""
    submitters = exported.submitters if exported else []
    authors: dict[int, None] = {}
    for names in [submitter.called for submitter in submitters] or [[submission]]:
        fitting = (_author(name, students) for name in names)
        first = next((at for at in fitting if at is not None), None)
        if first is not None:
            authors[first] = None
    return list(authors)


def _author(submission: str, students: Sequence[Student]) -> int | None:
    """Return the place of the one student whom a submission's name fits, or None."""
    keys = _keys_of(submission)
    fitting = [at for at, student in enumerate(students) if keys & student.keys]
    if len(fitting) > 1:
        both = listed([students[at].called for at in fitting])
        raise UserError(f"the submission {submission} fits {both}: rename it to a login")
    return fitting[0] if fitting else None


def _groups(submission: str, students: Sequence[Student]) -> set[str]:
    """Return the groups that have the submission's name: one, unless spellings differ."""
    keys = _keys_of(submission)
    return {student.group for student in students if student.group and _key(student.group) in keys}


def _of_group(student: Student, of_groups: Mapping[str, Sequence[str]]) -> str:
    """Return the one submission of a student's group, or "" if there is none."""
    found = of_groups.get(student.group, [])
    if len(found) > 1:
        raise UserError(
            f"{listed(sorted(found))} are of group {student.group}, and none is {student.called}'s "
            "own: leave one out"
        )
    return found[0] if found else ""


def _keys_of(submission: str) -> set[str]:
    """Return the keys that a submission's name may stand for."""
    keys = {_key(submission)}
    if downloaded := _DOWNLOADED.match(submission):
        keys |= {_key(part) for part in downloaded.groups()}
    return keys


# --- writing ---


@dataclass(frozen=True)
class _StudentMarks:
    """What the gradebook says of a student; total None: not known yet."""

    marks: float
    total: float | None
    note: str


def write_gradebook(
    out: Path, rubric: Rubric, attendance: Class, graded: Mapping[str, Sequence[Mark]]
) -> str:
    """Write gradebook.csv, and canvas.csv for Canvas's own roster; return a sentence about them."""
    students = attendance.students
    marks = [
        _marks_of(student, submission, graded, rubric)
        for student, submission in zip(students, attendance.handed_in, strict=True)
    ]
    table = [["name", "login", "email", "section", "group", "submission", "marks", "total", "note"]]
    for student, submission, line in zip(students, attendance.handed_in, marks, strict=True):
        own = [student.name, student.login, student.email, student.section, student.group]
        table.append([*own, submission, f"{line.marks:g}", _cell(line.total), line.note])
    _write(out / "gradebook.csv", table)
    written = ["gradebook.csv"]
    headers = list(students[0].row) if students else []
    if {"Student", "ID"} <= set(headers):
        _write(out / "canvas.csv", _canvas(students, marks, headers, rubric))
        written.append("canvas.csv")
    done = sum(line.total is not None for line in marks)
    said = f"{listed(written)}: {count(len(marks), 'student')}, {done} with a total"
    absent = attendance.handed_in.count("")
    if absent:
        said += f", {absent} without a submission"
    if attendance.strangers:
        said += f"; no student fits {listed(attendance.strangers)}: rename it to a login"
    return said


def _marks_of(
    student: Student, submission: str, graded: Mapping[str, Sequence[Mark]], rubric: Rubric
) -> _StudentMarks:
    if not submission:
        points = sum(part.points for part in rubric.parts.values())
        marks = points * (rubric.missing or 0.0)
        return _StudentMarks(marks, None if rubric.missing is None else marks, "not handed in")
    marks = total(graded[submission])
    late = lateness(student.submitted, rubric.due, rubric, student.free_days)
    notes = [str(late)] if late else []
    if rubric.due is not None and student.submitted is None:
        notes.append("time not known")
    number = count_open(graded[submission])
    if number:
        notes.append(f"{count(number, 'part')} by hand")
        return _StudentMarks(marks, None, "; ".join(notes))
    share = late.share if late else 0.0
    return _StudentMarks(marks, marks * (1 - share), "; ".join(notes))


def _canvas(
    students: Sequence[Student],
    marks: Sequence[_StudentMarks],
    headers: Sequence[str],
    rubric: Rubric,
) -> list[list[str]]:
    """Return the rows that Canvas imports; a total that is not known yet is an empty cell."""
    own = [column for column in _CANVAS if column in headers]
    column = rubric.column or rubric.title
    exported = re.compile(re.escape(column) + r"( \(\d+\))?")
    named = [header for header in headers if exported.fullmatch(header)]
    points = sum(part.points for part in rubric.parts.values())
    rows = [
        [*own, *(named[:1] or [column])],
        [f"    {_POINTS_ROW}", *[""] * (len(own) - 1), f"{points:g}"],
    ]
    for student, line in zip(students, marks, strict=True):
        rows.append([*(student.row[header] for header in own), _cell(line.total)])
    return rows


def _cell(total: float | None) -> str:
    return "" if total is None else f"{total:g}"


def _write(path: Path, table: Sequence[Sequence[str]]) -> None:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for row in table:
        rows.writerow([harmless(cell) for cell in row])
    write_atomically(path, text.getvalue().encode())
