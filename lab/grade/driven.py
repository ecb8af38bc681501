"""Parts that a driver checks: it calls the student's functions in each rank; see driver/.

A part whose command has ``{driver}`` runs under the audit's runner and probe like any other, but
the driver says what is wrong. ``driven_facts`` makes an audit's content of the verdicts (judge.py).
What is found has the names of the audit, or the rubric's own.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from common.say import counts, listed
from lab.audit.findings.finding import FAULT, CatalogueEntry
from lab.audit.report import AuditContent, FindingContent, LineContent, RunContent, content_of
from lab.audit.result import AuditResult, titled
from lab.grade.facts import CANNOT_TELL, FOUND_FAULTS
from lab.grade.judge import RUNNER, SILENT, FoundInRun, PartVerdict

PLACEHOLDER = "{driver}"
# Optimiser steps after which the probe would end the driver: never.
STEPS = 1_000_000
_DIFFER = "collectives-differ"


def driver_words(driver: Path, part: str) -> list[str]:
    """Return the words of a command that ``{driver}`` stands for; the script comes next."""
    return [str(RUNNER), str(driver), part, "{master}", "{port}", "{nodes}", "{rank}"]


def driven_facts(
    result: AuditResult, verdicts: Mapping[int, PartVerdict], entries: Mapping[str, CatalogueEntry]
) -> AuditContent:
    """Return what the drivers of all runs have found.

    result : of the audit around them; it knows why a run failed or hung.
    verdicts : on each run, by its number of ranks.
    entries : what is said about each finding that a driver may name.
    """
    of_audit = content_of(result)
    # Why ranks wait for each other, the audit says.
    differ = [finding for finding in of_audit.findings if finding.name == _DIFFER]
    findings = _findings(verdicts, entries) + differ
    passed = list(dict.fromkeys(title for each in verdicts.values() for title in each.passed))
    status = 0
    headline = f"Equal to one process on {counts(verdicts, 'rank')}: {listed(passed, most=20)}."
    failure = None
    found = {each.name for verdict in verdicts.values() for each in verdict.found}
    if unknown := sorted(found - entries.keys()):
        status = CANNOT_TELL
        headline = failure = (
            f"the driver found {listed(unknown)}, which [findings] does not explain"
        )
    elif not _is_explained(verdicts.values(), findings):
        status = CANNOT_TELL
        failure = _why_stopped(verdicts.values(), result)
        names = [finding.name for finding in findings]
        headline = f"{failure}; found before that: {listed(names)}" if names else failure
    elif findings:
        status = FOUND_FAULTS
        headline = f"wrong: {findings[0].title}: {findings[0].evidence[0]}"
    return msgspec.structs.replace(
        of_audit,
        status=status,
        headline=headline,
        failure=failure,
        diagnosis=None,
        findings=findings,
        possible=[],
        properties=[],
        runs=[RunContent(size, size, 0, hung=False) for size in verdicts],
    )


def _is_explained(verdicts: Iterable[PartVerdict], findings: Sequence[FindingContent]) -> bool:
    """Return whether all runs came to their end, or a finding says why not."""
    ends = {verdict.end for verdict in verdicts}
    if "fault" in ends or any(finding.name == _DIFFER for finding in findings):
        return True
    return ends == {"done"}


def _findings(
    verdicts: Mapping[int, PartVerdict], entries: Mapping[str, CatalogueEntry]
) -> list[FindingContent]:
    """Return one finding a name, in the order of the texts, with the evidence of its first run.

    What another one explains is left out.
    """
    first: dict[str, FoundInRun] = {}
    sizes: dict[str, set[int]] = {}
    for size, verdict in verdicts.items():
        for found in verdict.found:
            first.setdefault(found.name, found)
            sizes.setdefault(found.name, set()).add(size)
    follow = {follower for name in first if name in entries for follower in entries[name].explains}
    findings: list[FindingContent] = []
    for name, entry in entries.items():
        if name in first and name not in follow:
            findings.append(_finding(entry, first[name], sorted(sizes[name])))
    return findings


def _finding(entry: CatalogueEntry, found: FoundInRun, sizes: list[int]) -> FindingContent:
    return FindingContent(
        name=entry.name,
        severity=FAULT,
        title=titled(entry.title, sizes),
        evidence=[found.evidence],
        at=None if found.at is None else LineContent(*found.at, text=""),
        cause=entry.cause,
        cure=entry.cure,
        sure="certain",
        ranks=sizes,
        condition=None,
    )


def _why_stopped(verdicts: Iterable[PartVerdict], result: AuditResult) -> str:
    """Return why not all checks could be judged; what the student's code says comes first."""
    stopped = [verdict.stopped for verdict in verdicts if verdict.stopped]
    told = [reason for reason in stopped if not reason.endswith(SILENT)]
    if result.failure:
        told.append(result.failure.reason)
    return [*told, *stopped][0]
