"""What it costs to hand in late, by the rubric's ``due`` and ``late``.

The time comes from the roster, or from Gradescope's ``submission_metadata.json``; never from files,
which a copy or a checkout changes.
"""

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from common.errors import UserError
from common.say import count, percent
from common.utils.typed_json import read_json
from lab.grade.rubric import Rubric


@dataclass(frozen=True)
class Lateness:
    """Late days, and the share of the marks that they cost."""

    days: int
    share: float

    def __str__(self) -> str:
        """Say it, e.g. "2 days late: -10 %"."""
        cost = f": -{percent(self.share)}" if self.share else ", which costs nothing"
        return f"{count(self.days, 'day')} late{cost}"


def lateness(
    submitted: datetime | None, due: datetime | None, rubric: Rubric, free_days: float | None = None
) -> Lateness | None:
    """Return what a submission's time costs by the rubric; None: not late, or not known.

    Every day that has begun counts. free_days : of the student; None: those of the rubric. Raises
    UserError if one time has an offset to UTC and the other has none.
    """
    if submitted is None or due is None or rubric.late is None:
        return None
    if (submitted.tzinfo is None) != (due.tzinfo is None):
        raise UserError(
            f"handed in at {submitted} and due at {due}: give both an offset to UTC, as in "
            "2026-12-01T23:59:00-06:00, or none"
        )
    over = submitted - due - timedelta(minutes=rubric.late.grace_minutes)
    days = math.ceil(over / timedelta(days=1))
    if days <= 0:
        return None
    free = rubric.late.free_days if free_days is None else free_days
    return Lateness(days, min(1.0, rubric.late.per_day * max(0.0, days - free)))


class _Assignment(msgspec.Struct, frozen=True):
    due_date: datetime | None = None


class _User(msgspec.Struct):
    """One of those who handed in; Gradescope adds the own dates of each, without documenting it."""

    assignment: _Assignment = _Assignment()


class _Metadata(msgspec.Struct):
    """What ``submission_metadata.json`` says of the times (Gradescope, "Submission Metadata")."""

    created_at: datetime
    assignment: _Assignment = _Assignment()
    users: list[_User] = []

    def due(self, of_rubric: datetime | None) -> datetime | None:
        """Return when it was due: by the rubric, or else Gradescope; later by an extension."""
        due = of_rubric or self.assignment.due_date
        for user in self.users:
            own = user.assignment.due_date
            # A date without an offset to UTC is compared with none; ``lateness`` refuses it.
            if due and own and due.tzinfo and own.tzinfo:
                due = max(due, own)
        return due


def lateness_on_gradescope(path: Path | None, rubric: Rubric) -> Lateness | None:
    """Return what Gradescope's time costs; the rubric's ``due`` comes before Gradescope's."""
    if path is None or rubric.late is None:
        return None
    metadata = read_json(path, _Metadata, most_bytes=2**26)
    return lateness(metadata.created_at, metadata.due(rubric.due), rubric)
