"""Of which samples the metrics of evaluations are, and how often each sample counts in them.

An evaluation is an iteration over a loader with which nothing is trained. What the ranks combine
between its first batch and the next backward pass is taken as its metrics.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from lab.audit.findings.epochs import (
    Epoch,
    TrainingLoader,
    evaluation_loaders,
    same_data,
)
from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, found, gravest
from lab.audit.findings.samples import Coverage
from lab.audit.recording import Numbers, Recording
from lab.audit.records import Backward, CodeLine, CollectiveCall, Loaded

_COMBINING = ("all_reduce", "reduce", "all_gather", "gather", "send", "isend")
_TIMES = 2  # in a row that a total is summed again, until that cannot be by chance


def check(recording: Recording) -> Iterator[Outcome]:
    """Yield what is found about the evaluations of a run."""
    if len(recording.ranks) < max(2, recording.size):
        return
    yield from _summed_again(recording)
    for loaders in evaluation_loaders(recording):
        evaluations = zip(*(loader.epochs for loader in loaders), strict=False)
        outcome = gravest(_judge(recording, loaders, epochs) for epochs in evaluations)
        if outcome is not None:
            yield outcome


def _judge(
    recording: Recording, loaders: Sequence[TrainingLoader], epochs: Sequence[Epoch]
) -> Outcome | None:
    """Judge whose samples count in an evaluation; None if the ranks only look at some."""
    seen = Coverage(loaders, 1, epochs)
    if seen.left:
        return None
    data = {same_data(loaders[0], other) for other in loaders[1:]}
    own_data = False in data
    known = _disjoint(loaders) if own_data else None not in data or not seen.repeats
    if not (seen.whole and known):
        return Unknown("evaluation", "which samples several ranks evaluate is not known")
    if not own_data and len(set(map(frozenset, seen.shares))) == 1:
        return Right("evaluation", "every rank evaluates the same samples")
    calls = list(map(_combining, loaders, epochs))
    if not all(calls):
        return _own_share(recording, len(seen.shares[0]))
    if not seen.repeats or own_data:
        return Right("evaluation", "one rank evaluates each sample, and numbers are combined")
    return _padded(
        loaders[0].facts.line, calls, draws=seen.counts.total(), different=len(seen.counts)
    )


def _disjoint(loaders: Sequence[TrainingLoader]) -> bool:
    """Return whether the ranks get samples of other content, as all of them tell."""
    contents = [set(loader.drawn.values()) for loader in loaders]
    every = set().union(*contents)
    return None not in every and len(every) == sum(map(len, contents))


def _padded(
    line: CodeLine | None, calls: Sequence[Sequence[CollectiveCall]], *, draws: int, different: int
) -> Outcome:
    """Judge by the numbers that the ranks add up whether they count samples twice."""
    added: set[float] = set()
    for _, values in _totals(calls):
        added.update(values.sum(axis=0).tolist())
    counted = added & {draws, different}
    repeats = draws - different
    if counted == {draws}:
        return found("padding-counted", line, draws=draws, different=different, repeats=repeats)
    if counted == {different}:
        return Right("evaluation", f"of {draws:,} draws {different:,} are counted")
    return Unknown("evaluation", f"whether {repeats:,} samples that two ranks evaluate count twice")


def _combining(loader: TrainingLoader, epoch: Epoch) -> list[CollectiveCall]:
    """Return the calls that combine numbers, from an evaluation's first batch to a backward."""
    begin = epoch.whole[0].t
    later = [backward.t for backward in loader.records.of(Backward) if backward.t > begin]
    end = min(later, default=math.inf)
    return [
        call
        for call in loader.records.of(CollectiveCall)
        if begin < call.t < end and call.content == "other" and call.name.startswith(_COMBINING)
    ]


def _own_share(recording: Recording, samples: int) -> Outcome:
    """Judge that each rank evaluates a share of its own, and nothing combines what comes out.

    A fault if each then goes back to a file of its own: by luck they choose the same epoch.
    """
    loaded = [[load for load in rank.of(Loaded) if load.step] for rank in recording.ranks]
    paths = [{load.path for load in of_rank} for of_rank in loaded]
    if all(paths) and not set.intersection(*paths):
        first = loaded[0][0]
        file = os.path.basename(first.path)
        return found("own-checkpoint", first.at, sure=False, step=first.step, file=file)
    return Unknown(
        "evaluation",
        f"whether a metric of one rank's share is meant: each rank evaluates another share (the "
        f"first one {samples:,} samples), and nothing is combined before training goes on",
    )


def _totals(calls: Sequence[Sequence[CollectiveCall]]) -> Iterator[tuple[CollectiveCall, Numbers]]:
    """Yield rank 0's calls that add up a few numbers, with those of each rank in a row.

    calls : by rank.
    """
    summed = [[call for call in of_rank if call.values] for of_rank in calls]
    for of_ranks in zip(*summed, strict=False):
        values = [call.values or [] for call in of_ranks]
        if len(set(map(len, values))) == 1:
            yield of_ranks[0], np.array(values)


def _summed_again(recording: Recording) -> Iterator[Finding]:
    """Find a tensor that holds a sum over the ranks, is added to, and is summed over them again."""
    latest: dict[int | None, Numbers] = {}
    times: Counter[int | None] = Counter()
    for call, values in _totals([rank.of(CollectiveCall) for rank in recording.ranks]):
        before = latest.get(call.tensor, np.full(values.shape[1], np.nan))
        times[call.tensor] = times[call.tensor] + 1 if _adds_to(before, values) else 0
        if times[call.tensor] == _TIMES:
            yield found("summed-again", call.at, sums=before.tolist())
            return
        latest[call.tensor] = values.sum(axis=0)


def _adds_to(before: Numbers, values: Numbers) -> bool:
    """Return whether every rank has added less than a sum to that sum."""
    between = (values >= before) & (values <= 2 * before)
    more = (values > before).any(axis=1)
    return bool(between.all() and more.all())
