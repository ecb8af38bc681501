"""What is said about a finding: the audit's texts, those of a rubric, and what to read about it."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from common.utils.typed_json import Name, Text
from lab.audit.findings.finding import FAULT, CatalogueEntry, catalogue
from lab.learn.course import LESSONS

# The number of the lesson for a fault that no other lesson explains.
_ANY_FAULT = 9


class OwnFinding(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A fault that a course's driver finds, besides the audit's.

    title, cause, cure : what is wrong, why it comes, and what to do, as sentences.
    explains : the findings that follow from it, and are left out where both are found.
    read : what to read about it; "" for the lesson on any fault.
    """

    title: Text
    cause: Text
    cure: Text
    explains: list[Name] = []
    read: Text = ""


def entries(own: Mapping[str, OwnFinding]) -> dict[str, CatalogueEntry]:
    """Return what is said about each finding, by name, in the order of a mark.

    First the audit's, then those of the runner of all drivers, then a rubric's own.
    """
    every = dict(catalogue())
    for name, finding in {**runner_findings(), **own}.items():
        every[name] = CatalogueEntry(
            name, FAULT, finding.title, finding.cause, finding.cure, explains=finding.explains
        )
    return every


@cache
def runner_findings() -> dict[str, OwnFinding]:
    """Return the faults that the runner of every driver finds."""
    text = Path(__file__).with_name("findings.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, OwnFinding])


def lesson_of(fault: str, own: Mapping[str, OwnFinding]) -> str:
    """Return what to read about a fault: a lesson's title and page, or what the rubric says.

    "" for a fault of the rubric's own that names nothing: no lesson is about it.
    """
    if fault in own:
        return own[fault].read
    explaining = [lesson for lesson in LESSONS if fault in lesson.faults]
    lesson = next(iter(explaining), LESSONS[_ANY_FAULT - 1])
    return f"Lesson {lesson.number}: {lesson.title} (docs/learn/{lesson.name}.md)"
