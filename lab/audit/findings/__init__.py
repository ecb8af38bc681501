"""What an audit finds: one check a fault, each on what the probe recorded.

A check gets the ``Recording`` of one run (one number of ranks) and yields what it finds wrong, what
it finds right, and what it cannot check, see ``finding.py``. Names, causes and cures are in
``catalogue.toml``. ``run_checks`` runs all of them on all runs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType

from lab.audit.findings import clocks, collectives, gradients, notices, samples, weights
from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, merge
from lab.audit.findings.gradients.factors import resolve
from lab.audit.findings.where import is_one_model
from lab.audit.recording import Recording

CHECKS = (collectives, gradients, weights, samples, notices, clocks)
"""``check(recording)`` of each is run, in this order."""

EXPLAINS = {
    "collectives-differ": {
        "own-gradient",
        "not-the-mean",
        "some-parameters",
        "weights-diverge",
        "different-optimizer-state",
    },
    "group-unused": {
        "own-gradient",
        "not-the-mean",
        "some-parameters",
        "different-start",
        "weights-diverge",
        "different-optimizer-state",
    },
    "ddp-bypassed": {"own-gradient", "not-the-mean", "some-parameters", "weights-diverge"},
    "weights-averaged": {"own-gradient", "not-the-mean", "weights-diverge"},
    "different-batch-counts": {"collectives-differ", "weights-diverge"},
    "different-start": {"weights-diverge"},
    "different-learning-rates": {"weights-diverge"},
    "different-optimizer-state": {"weights-diverge"},
    "own-gradient": {"weights-diverge", "different-optimizer-state"},
    "some-parameters": {"weights-diverge", "different-optimizer-state"},
    "not-the-mean": {"weights-diverge", "different-optimizer-state"},
    "same-samples": {"uneven-coverage"},
    "wrong-global-batch": {"batch-grows"},
}
"""By finding: the findings that follow from it and are left out when both are found in a run."""


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
    right: dict[str, list[int]] = {}
    unknown: dict[str, list[int]] = {}
    for recording in recordings:
        outcomes = list(_check_all(recording))
        found += [
            replace(one, sizes=(recording.size,))
            for one in without_explained(one for one in outcomes if isinstance(one, Finding))
        ]
        for one in outcomes:
            if not isinstance(one, Finding):
                said = right if isinstance(one, Right) else unknown
                said.setdefault(one.text, []).append(recording.size)
    known = {one.name for one in found}
    compared = notices.compare(recordings)
    found += [one for one in compared if not _explained(one.name, known)]
    sizes = {one.size for one in recordings}
    return merge(resolve(found, recordings)), _with_sizes(right, sizes), _with_sizes(unknown, sizes)


def _with_sizes(said: dict[str, list[int]], sizes: set[int]) -> list[str]:
    """Return the sentences, with the numbers of ranks of those that do not hold for all."""
    return [
        text
        if set(held) == sizes
        else f"{text} (on {' and '.join(map(str, dict.fromkeys(held)))} ranks)"
        for text, held in said.items()
    ]


def _check_all(recording: Recording) -> Iterator[Outcome]:
    """Yield the outcomes of all checks; no faults of replicas where the ranks may hold none."""
    if not is_one_model(recording):
        for part in CHECKS:
            yield from _check(part, recording)
        return
    one_model = False
    for part in CHECKS:
        for one in _check(part, recording):
            if not isinstance(one, Finding) or part not in (gradients, weights, samples):
                yield one
            elif not one_model:
                one_model = True
                yield Unknown(
                    "gradients: the ranks exchange activations, so they may compute one model"
                    " together (tensor, expert or pipeline parallel); only replicas are compared"
                )


def _check(part: ModuleType, recording: Recording) -> Iterator[Outcome]:
    """Yield the outcomes of one check. What it cannot read, it cannot check."""
    try:
        yield from part.check(recording)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        name = part.__name__.rpartition(".")[2]
        why = f"the records could not be read ({type(error).__name__}: {error})"
        yield Unknown(f"{name}: not checked, because {why}")


def without_explained(found: Iterable[Finding]) -> list[Finding]:
    """Return the findings of a run that do not follow from another one in it."""
    everything = list(found)
    names = {one.name for one in everything}
    return [one for one in everything if not _explained(one.name, names)]


def _explained(name: str, names: set[str]) -> bool:
    return any(name in EXPLAINS.get(other, ()) for other in names)
