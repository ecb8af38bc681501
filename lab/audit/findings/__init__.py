"""What an audit finds: one check a fault, each on what the probe recorded.

A check gets the ``Recording`` of one run (one number of ranks) and yields what it finds wrong, what
it finds right, and what it cannot check, see ``finding.py``. Names, causes and cures are in
``catalogue.toml``. ``run_checks`` runs all of them on all runs.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from common.say import counts
from lab.audit.findings import (
    clocks,
    collectives,
    ddp,
    endings,
    evaluation,
    gradients,
    notices,
    randomness,
    samples,
    saving,
    unapplied,
    weights,
)
from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, merge
from lab.audit.findings.one_model import ActivationExchange
from lab.audit.findings.properties import PropertyRow, property_rows
from lab.audit.recording import Recording
from lab.audit.records import Trouble

# ``check(recording)`` of each is run, in this order.
CHECKS = (
    endings,
    collectives,
    ddp,
    gradients,
    weights,
    samples,
    unapplied,
    randomness,
    evaluation,
    saving,
    notices,
    clocks,
)
_OF_REPLICAS = (gradients, weights, samples)


@dataclass(frozen=True)
class Checked:
    """What all checks say of all runs.

    Parameters
    ----------
    findings : one a name, faults first, without those that another finding of their run explains.
    possible : what is found on a condition that the records leave open, see ``Finding.condition``.
    properties : what was looked at and held, what is broken, and what was not seen; each sentence
        once, with the numbers of ranks if it does not hold for all runs.
    """

    findings: Sequence[Finding]
    possible: Sequence[Finding]
    properties: Sequence[PropertyRow]


def run_checks(recordings: Sequence[Recording]) -> Checked:
    """Run all checks on all runs."""
    found: list[Finding] = []
    seen: list[Finding] = []
    said: dict[Right | Unknown, set[int]] = defaultdict(set)  # by sentence, on how many ranks
    for recording in recordings:
        findings = []
        for outcome in [*_check_all(recording), *_troubles(recording)]:
            if isinstance(outcome, Finding):
                findings.append(replace(outcome, sizes=(recording.size,)))
            else:
                said[outcome].add(recording.size)
        found += without_explained(findings)
        seen += findings
    found += notices.compare(recordings)
    resolved = gradients.resolve(found, recordings)
    findings = merge([finding for finding in resolved if not finding.condition])
    names = {finding.name for finding in findings}
    possible = merge(
        [finding for finding in resolved if finding.condition and finding.name not in names]
    )
    sizes = {recording.size for recording in recordings}
    return Checked(
        findings, possible, _properties([*findings, *_implied(findings, seen)], said, sizes)
    )


def _implied(findings: Sequence[Finding], seen: Iterable[Finding]) -> Iterator[Finding]:
    """Yield what was seen, for certain, and follows from the findings."""
    explained = _explained(findings)
    for finding in seen:
        if finding.name in explained and not finding.condition:
            yield finding


def _properties(
    findings: Sequence[Finding], said: Mapping[Right | Unknown, set[int]], sizes: set[int]
) -> list[PropertyRow]:
    """Return what is said of each property.

    findings : with those that others explain: what follows from a fault is broken as well.
    """
    broken: dict[str, list[str]] = defaultdict(list)
    for finding in findings:
        entry = finding.entry
        if entry.broken and entry.title not in broken[entry.broken]:
            broken[entry.broken].append(entry.title)
    held: dict[str, list[str]] = defaultdict(list)
    unseen: dict[str, list[str]] = defaultdict(list)
    for told, on_ranks in said.items():
        rows = held if isinstance(told, Right) else unseen
        rows[told.of].append(_on(told.text, on_ranks, sizes))
    return property_rows(broken, unseen, held)


def _on(text: str, held: set[int], sizes: set[int]) -> str:
    """Return a sentence, with the numbers of ranks on which it held unless these are all."""
    return text if held == sizes else f"{text} (on {counts(held, 'rank')})"


def _check_all(recording: Recording) -> Iterator[Outcome]:
    """Yield the outcomes of all checks.

    A finding on replicas may suppose what nobody can tell; then that is unknown. So is a check that
    fails on the records.
    """
    exchange = ActivationExchange(recording)
    for part in CHECKS:
        try:
            for outcome in part.check(recording):
                doubt = None
                if isinstance(outcome, Finding) and part in _OF_REPLICAS:
                    doubt = exchange.doubt(outcome)
                if doubt is None:
                    yield outcome
                else:
                    yield Unknown("gradients", doubt.why)
                    yield replace(outcome, condition=doubt.condition)
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            why = f"the records could not be read ({type(error).__name__}: {error})"
            yield Unknown(part.__name__.rpartition(".")[2], why)


def _troubles(recording: Recording) -> Iterator[Unknown]:
    """Yield where the probe itself has failed: this tool's fault, not the script's."""
    for process in recording.processes:
        for trouble in process.of(Trouble):
            error = trouble.text.strip().splitlines()[-1]
            # What is unknown about gradients makes the verdict "cannot tell"; clocks do not.
            yield Unknown(
                "clocks" if trouble.part == "clocks" else "gradients",
                f"a part of lab audit itself, {trouble.part}, failed on this script "
                f"({error}), which is no fault of the script",
            )


def without_explained(found: Sequence[Finding]) -> list[Finding]:
    """Return the findings of a run that do not follow from another one in it.

    One that holds on a condition explains none that holds without it.
    """
    certain = _explained(finding for finding in found if not finding.condition)
    possible = certain | _explained(found)
    return [
        finding
        for finding in found
        if finding.name not in (possible if finding.condition else certain)
    ]


def _explained(found: Iterable[Finding]) -> set[str]:
    return {name for finding in found for name in finding.entry.explains}
