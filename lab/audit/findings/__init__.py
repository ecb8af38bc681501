"""What an audit finds: one check a fault, each on what the probe recorded.

A check gets the ``Recording`` of one run (one number of ranks) and yields what it finds wrong, what
it finds right, and what it cannot check, see ``finding.py``. Names, causes and cures are in
``catalogue.toml``. ``run_checks`` runs all of them on all runs.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from lab.audit.findings import clocks, collectives, gradients, notices, samples, weights
from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, merge
from lab.audit.findings.where import POINT_TO_POINT
from lab.audit.recording import Recording
from lab.audit.records import CollectiveCall, FsdpBuilt, Parameters, Trouble

# ``check(recording)`` of each is run, in this order.
CHECKS = (collectives, gradients, weights, samples, notices, clocks)
_OF_REPLICAS = (gradients, weights, samples)
_ONE_MODEL = Unknown(
    "gradients: the ranks exchange activations, so they may compute one model together (tensor, "
    "expert or pipeline parallel); only replicas are compared"
)


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
    said: dict[Right | Unknown, set[int]] = defaultdict(set)  # by sentence, on how many ranks
    for recording in recordings:
        findings = []
        for outcome in [*_check_all(recording), *_troubles(recording)]:
            if isinstance(outcome, Finding):
                findings.append(replace(outcome, sizes=(recording.size,)))
            else:
                said[outcome].add(recording.size)
        found += without_explained(findings)
    found += notices.compare(recordings)
    merged = merge(gradients.resolve(found, recordings))
    sizes = {recording.size for recording in recordings}
    right = [_on(told.text, held, sizes) for told, held in said.items() if isinstance(told, Right)]
    unknown = [
        _on(told.text, held, sizes) for told, held in said.items() if isinstance(told, Unknown)
    ]
    return merged, right, unknown


def _on(text: str, held: set[int], sizes: set[int]) -> str:
    """Return a sentence, with the numbers of ranks on which it held unless these are all."""
    return text if held == sizes else f"{text} (on {' and '.join(map(str, sorted(held)))} ranks)"


def _check_all(recording: Recording) -> Iterator[Outcome]:
    """Yield the outcomes of all checks.

    Where the ranks may compute one model together, a finding about replicas becomes unknown. So
    does a check that fails on the records.
    """
    one_model = is_one_model(recording)
    for part in CHECKS:
        try:
            for outcome in part.check(recording):
                hidden = one_model and part in _OF_REPLICAS and isinstance(outcome, Finding)
                yield _ONE_MODEL if hidden else outcome
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            name = part.__name__.rpartition(".")[2]
            why = f"the records could not be read ({type(error).__name__}: {error})"
            yield Unknown(f"{name}: not checked, because {why}")


def _troubles(recording: Recording) -> Iterator[Unknown]:
    """Yield where the probe itself has failed: this tool's fault, not the script's."""
    for process in recording.processes:
        for trouble in process.of(Trouble):
            error = trouble.text.strip().splitlines()[-1]
            # What is unknown about gradients makes the verdict "cannot tell"; clocks do not.
            subject = "clocks" if trouble.part == "clocks" else "gradients"
            yield Unknown(
                f"{subject}: a part of lab audit itself, {trouble.part}, failed on this script "
                f"({error}), which is no fault of the script"
            )


def is_one_model(recording: Recording) -> bool:
    """Return whether the ranks compute one model together, by exchanging activations.

    ``_sends_activations`` tells by which calls.
    """
    if recording.of(FsdpBuilt):  # what it gathers in forward are weights
        return False
    parameters = [
        sorted((row.name, row.shape) for record in rank.of(Parameters) for row in record.rows)
        for rank in recording.ranks
    ]
    different_parameters = any(rows != parameters[0] for rows in parameters)
    return any(
        _sends_activations(call, different_parameters=different_parameters)
        for call in recording.of(CollectiveCall)
    )


def _sends_activations(call: CollectiveCall, *, different_parameters: bool) -> bool:
    """Return whether a call exchanges activations: neither weights nor gradients of parameters.

    Any call within forward does, all_to_all and all_gather within backward, and send and recv
    anywhere if the ranks train different parameters, as the stages of a pipeline do.
    """
    single_number = prod(call.shape or ()) <= 1  # as DDP sends within Join
    if call.content != "other" or single_number:
        return False
    between_layers = call.name.startswith(("all_to_all", "all_gather"))
    if call.within == "forward" or (call.within == "backward" and between_layers):
        return True
    return different_parameters and call.name in POINT_TO_POINT


def without_explained(found: Sequence[Finding]) -> list[Finding]:
    """Return the findings of a run that do not follow from another one in it."""
    explained = {name for finding in found for name in finding.entry.explains}
    return [finding for finding in found if finding.name not in explained]
