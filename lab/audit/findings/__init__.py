"""What an audit finds: one check a fault, each on what the probe recorded.

A check gets the ``Recording`` of one run (one number of ranks) and yields what it finds wrong, what
it finds right, and what it cannot check, see ``finding.py``. Names, causes and cures are in
``catalogue.toml``. ``run_checks`` runs all of them on all runs.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

from lab.audit.findings import clocks, collectives, gradients, notices, samples, weights
from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, catalogue, merge
from lab.audit.findings.where import POINT_TO_POINT
from lab.audit.recording import Recording

CHECKS = (collectives, gradients, weights, samples, notices, clocks)
"""``check(recording)`` of each is run, in this order."""
_OF_REPLICAS = (gradients, weights, samples)
_ONE_MODEL = Unknown(
    "gradients: the ranks exchange activations, so they may compute one model together (tensor, "
    "expert or pipeline parallel); only replicas are compared"
)
_OF_CLOCKS = ("clocks", "printed_losses")
"""The parts of the probe without which all else can be told."""


def run_checks(
    recordings: Sequence[Recording],
) -> tuple[list[Finding], list[str], list[str]]:
    """Run all checks on all runs.

    Returns
    -------
    findings : one a name, faults first, without those that another finding of their run explains.
    right, unknown : what was checked and found right, and what could not be checked; each sentence
        once, with the numbers of ranks if it does not hold for all runs.
    """
    found: list[Finding] = []
    said: dict[type, dict[str, list[int]]] = {Right: defaultdict(list), Unknown: defaultdict(list)}
    for recording in recordings:
        findings = []
        for one in [*_check_all(recording), *_troubles(recording)]:
            if isinstance(one, Finding):
                findings.append(replace(one, sizes=(recording.size,)))
            else:
                said[type(one)][one.text].append(recording.size)
        found += without_explained(findings)
    known = {one.name for one in found}
    found += [one for one in notices.compare(recordings) if not _explained(one.name, known)]
    sizes = {one.size for one in recordings}
    right, unknown = (
        [text if set(held) == sizes else f"{text} ({_on(held)})" for text, held in texts.items()]
        for texts in said.values()
    )
    return merge(gradients.resolve(found, recordings)), right, unknown


def _on(sizes: Iterable[int]) -> str:
    return f"on {' and '.join(map(str, dict.fromkeys(sizes)))} ranks"


def _check_all(recording: Recording) -> Iterator[Outcome]:
    """Yield the outcomes of all checks; no faults of replicas where the ranks may hold none.

    What a check cannot read, it cannot check.
    """
    one_model = is_one_model(recording)
    for part in CHECKS:
        try:
            for one in part.check(recording):
                hidden = one_model and part in _OF_REPLICAS and isinstance(one, Finding)
                yield _ONE_MODEL if hidden else one
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            name = part.__name__.rpartition(".")[2]
            why = f"the records could not be read ({type(error).__name__}: {error})"
            yield Unknown(f"{name}: not checked, because {why}")


def _troubles(recording: Recording) -> Iterator[Unknown]:
    """Yield where the probe itself has failed: this tool's fault, not the script's."""
    for process in recording.processes:
        for record in process.by_kind["trouble"]:
            part, error = record["part"], record["text"].strip().splitlines()[-1]
            subject = "clocks" if part in _OF_CLOCKS else "gradients"
            yield Unknown(
                f"{subject}: a part of lab audit itself, {part}, failed on this script ({error}), "
                "which is no fault of the script"
            )


def is_one_model(recording: Recording) -> bool:
    """Return whether the ranks compute one model together, by exchanging activations.

    They do so within the forward pass, by all_to_all or all_gather within backward, or between
    ranks that train different parameters. FSDP gathers weights in forward; DDP within Join sends a
    single number.
    """
    if any(rank.by_kind["fsdp"] for rank in recording.ranks):
        return False
    calls = [
        one
        for rank in recording.ranks
        for one in rank.by_kind["call"]
        if one.get("content") == "other" and prod(one.get("shape") or ()) > 1
    ]
    rows = [
        sorted(row[1:3] for one in rank.by_kind["params"] for row in one["rows"])
        for rank in recording.ranks
    ]
    if any(one != rows[0] for one in rows) and any(one["name"] in POINT_TO_POINT for one in calls):
        return True
    return any(
        one["within"] == "forward"
        or (one["within"] and one["name"].startswith(("all_to_all", "all_gather")))
        for one in calls
    )


def without_explained(found: Iterable[Finding]) -> list[Finding]:
    """Return the findings of a run that do not follow from another one in it."""
    everything = list(found)
    names = {one.name for one in everything}
    return [one for one in everything if not _explained(one.name, names)]


def _explained(name: str, names: set[str]) -> bool:
    return any(name in catalogue()[other].explains for other in names)
