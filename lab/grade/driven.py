"""Parts that a driver checks: it calls the student's functions in each rank; see driver/.

A part whose command has ``{driver}`` runs under the audit's runner and probe like any other, but
the driver says what is wrong. ``driven_facts`` reads the reports that the ranks printed. What it
finds has the names of the audit, or the rubric's own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from common.say import counts, listed
from common.utils.atomic_files import read_regular
from common.utils.gradient_fit import side_by_side
from lab.audit.findings.finding import FAULT, CatalogueEntry
from lab.audit.report import AuditContent, FindingContent, LineContent, RunContent, content_of
from lab.audit.result import AuditResult, titled
from lab.evidence import Judgement, explain_parameters, judge_parameters
from lab.grade.driver.mark import MARK
from lab.grade.facts import CANNOT_TELL, FOUND_FAULTS

RUNNER = Path(__file__).with_name("driver")
PLACEHOLDER = "{driver}"
# Optimiser steps after which the probe would end the driver: never.
STEPS = 1_000_000
_DIFFER = "collectives-differ"
# What a student's program can print into a report.
_MOST_LOG = 2**22
_Line = Annotated[str, Meta(max_length=1000)]


def driver_words(driver: Path, part: str) -> list[str]:
    """Return the words of a command that ``{driver}`` stands for; the script comes next."""
    return [str(RUNNER), str(driver), part, "{master}", "{port}", "{nodes}", "{rank}"]


class GatheredGradients(msgspec.Struct):
    """Gradients of all ranks that are not the mean; see ``Gradients`` in driver/checks.py."""

    lengths: Annotated[dict[_Line, Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=1000)]
    own: Annotated[list[list[float | None]], Meta(min_length=1, max_length=64)]
    got: list[list[float | None]]

    def __post_init__(self) -> None:
        """Raise ValueError unless all ranks have as many numbers as there are."""
        whole = sum(self.lengths.values())
        if len(self.own) != len(self.got) or {len(row) for row in self.own + self.got} != {whole}:
            raise ValueError("the ranks have different numbers of gradients")

    def judgement(self) -> Judgement:
        """Return what the ranks got."""
        own = np.array(self.own, dtype=np.float64)
        got = np.array(self.got, dtype=np.float64)
        parts = explain_parameters(own, got, side_by_side(self.lengths.values()))
        return judge_parameters(dict(zip(self.lengths, parts, strict=True)))


class FoundByRank(msgspec.Struct):
    """What a check found on a rank."""

    name: _Line
    evidence: _Line
    at: tuple[_Line, int] | None
    gradients: GatheredGradients | None = None

    def named(self) -> "FoundByRank":
        """Return it with the name of what the gradients are, if it has some."""
        if self.gradients is None:
            return self
        judgement = self.gradients.judgement()
        name = judgement.finding or self.name
        evidence = f"{self.evidence}: {judgement.sentence}"
        if judgement.right:
            evidence = f"{self.evidence}: some numbers are not the mean"
        return FoundByRank(name, evidence, self.at)


class RankReport(msgspec.Struct):
    """The last report of a rank; see ``Report`` in driver/running.py."""

    found: Annotated[list[FoundByRank], Meta(max_length=1000)]
    passed: Annotated[list[_Line], Meta(max_length=100)]
    end: str
    stopped: _Line


def driven_facts(
    result: AuditResult, folders: Mapping[int, Path], entries: Mapping[str, CatalogueEntry]
) -> AuditContent:
    """Return what the drivers of all runs have found.

    result : of the audit around them; it knows why a run failed or hung.
    folders : with the logs of the ranks, by their number.
    entries : what is said about each finding that a driver may name.
    """
    reports = {size: _reports(folder, size) for size, folder in folders.items()}
    every = [report for of_run in reports.values() for report in of_run]
    of_audit = content_of(result)
    findings = _findings(reports, entries) + _of_the_audit(of_audit)
    passed = list(dict.fromkeys(title for report in every for title in report.passed))
    status = 0
    headline = f"Equal to one process on {counts(folders, 'rank')}: {listed(passed, most=20)}."
    failure = None
    if not _is_explained(every, findings, ranks=sum(folders)):
        status = CANNOT_TELL
        failure = _why_stopped(every, result)
        names = [finding.name for finding in findings]
        headline = f"{failure}; found before that: {listed(names)}" if names else failure
    elif findings:
        status = FOUND_FAULTS
        headline = f"wrong: {findings[0].title}"
    return msgspec.structs.replace(
        of_audit,
        status=status,
        headline=headline,
        failure=failure,
        diagnosis=None,
        findings=findings,
        possible=[],
        unknown=[],
        runs=[RunContent(size, size, 0, hung=False) for size, found in reports.items() if found],
    )


def _reports(folder: Path, size: int) -> list[RankReport]:
    """Return the last report of each of ``size`` ranks that has one."""
    logs = [folder / f"rank{rank}.log" for rank in range(size)]
    return [report for report in map(_last_report, logs) if report]


def _is_explained(
    reports: Sequence[RankReport], findings: Sequence[FindingContent], *, ranks: int
) -> bool:
    """Return whether all ranks of all runs came to their end, or a finding says why not."""
    ends = [report.end for report in reports]
    if "fault" in ends or any(finding.name == _DIFFER for finding in findings):
        return True
    return ends.count("done") >= ranks


def _last_report(log: Path) -> RankReport | None:
    """Return the last report in a rank's output; None without one that a driver wrote."""
    if not log.exists():
        return None
    text = read_regular(log, last_bytes=_MOST_LOG).decode(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith(MARK)]
    if not lines:
        return None
    try:
        return msgspec.json.decode(lines[-1].removeprefix(MARK), type=RankReport)
    except msgspec.DecodeError:
        return None


def _findings(
    reports: Mapping[int, Sequence[RankReport]], entries: Mapping[str, CatalogueEntry]
) -> list[FindingContent]:
    """Return one finding a name, in the order of the texts, with the evidence of its first rank.

    What another one explains is left out.
    """
    first: dict[str, FoundByRank] = {}
    sizes: dict[str, set[int]] = {}
    for size, ranks in reports.items():
        for found in [found.named() for report in ranks for found in report.found]:
            first.setdefault(found.name, found)
            sizes.setdefault(found.name, set()).add(size)
    follow = {follower for name in first if name in entries for follower in entries[name].explains}
    findings: list[FindingContent] = []
    for name, entry in entries.items():
        if name in first and name not in follow:
            title = f"{titled(entry.title, sorted(sizes[name]))}: {first[name].evidence}"
            findings.append(_finding(entry, title, first[name], sorted(sizes[name])))
    return findings


def _finding(
    entry: CatalogueEntry, title: str, found: FoundByRank, sizes: list[int]
) -> FindingContent:
    return FindingContent(
        name=entry.name,
        severity=FAULT,
        title=title,
        evidence=[found.evidence],
        at=None if found.at is None else LineContent(*found.at, text=""),
        cause=entry.cause,
        cure=entry.cure,
        sure="certain",
        ranks=sizes,
        condition=None,
    )


def _of_the_audit(audit: AuditContent) -> list[FindingContent]:
    """Return the audit's finding that explains why ranks wait for each other, if it has it."""
    return [
        msgspec.structs.replace(finding, title=f"{finding.title}: {finding.evidence[0]}")
        for finding in audit.findings
        if finding.name == _DIFFER
    ]


def _why_stopped(reports: Sequence[RankReport], result: AuditResult) -> str:
    """Return why not all checks could be made."""
    reasons = [report.stopped for report in reports if report.stopped]
    reasons.append(result.failure.reason if result.failure else "a rank ended early")
    return reasons[0]
