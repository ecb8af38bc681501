"""Test whether the strategies that claim to be exact compute the same, by their first losses.

``check(block, nodes)`` returns the result, findings.py the sentences. After one
update the losses of right strategies differ by rounding alone. Runs that start alike (the same
seed, batches and weights, so the same loss at step 1) are therefore compared at steps 2 to 4. The
largest set of strategies that agree with each other counts as right; between sets of equal size,
the one with PyTorch's DDP. Where this leaves a doubt, one_process.py has computed the first steps
again, and that decides.

``START`` and ``GROWTH`` say how large rounding may be. Measured with VGG-11 in fp32 on a CPU, the
largest differences between right strategies, relative to the loss:

    runs                               step 1   step 2   step 3   step 4   step 5
    digits, 3 ranks, 9 strategies      0        1.7e-7   5.7e-7   4.2e-4   2.7e-3
    digits, 4 ranks, 9 strategies      0        1.3e-7   3.1e-5   1.1e-3   9.3e-3
    digits, 4 ranks, bf16              0        0        0        0        0
    CIFAR-10, 4 ranks, 5 strategies    0        1.1e-7   8.1e-6   2.0e-4   5.1e-3
    CIFAR-10, 2 ranks, 5 strategies    0        0        0        0        0

Zeros: a sum over 2 ranks has one order, and fp32 adds a few bf16 gradients without rounding. Wrong
strategies on 2 ranks, digits and CIFAR-10: a sum divided by 4 differs at step 2 by 0.8 %, one that
is not divided by 1.5 %, a rank that keeps its own gradients by 0.07 % and 0.002 % (0.7 % at step 3;
its ranks also end with different weights).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from common.utils.grouping import first_fit, grouped
from lab.comparison.record import OneProcess, Repeat
from lab.report.view import CellRow, ComparisonGroup, Rows

STEPS = (2, 3, 4)
GROWTH = 100.0  # of rounding, a step; from step 5 on the test would accept anything
# The difference at step 2, relative to the loss, that rounding does not reach, by number type.
# fp32: a hundred times what was measured. The others are estimates with a wide margin:
# convolutions on a GPU may use TF32 and sum in another order from run to run; bf16 keeps two to
# three digits. Earlier versions did not record the type.
START = {"fp32": 1e-5, "fp32 on a GPU": 1e-4}
START_OF_OTHERS = 1e-3
DDP = "ddp"


class Deviation(NamedTuple):
    """The first step at which two losses differ by more than ``limit``, all that rounding does."""

    step: int
    value: float  # infinite if one of the two is not finite
    limit: float


class Curve(NamedTuple):
    """The losses of one run by step, NaN where the loss was not finite or, at 1, not recorded."""

    sync: str
    seed: int
    precision: str
    losses: Mapping[int, float]

    @property
    def kind(self) -> tuple[int, str]:
        """What two runs must share for their losses to be comparable."""
        return self.seed, self.precision


@dataclass
class Equality:
    """What the first losses say about the strategies that claim to be exact.

    equal : the strategies that compute the same; empty if none could be compared.
    confirmed : those of which one process has computed the same.
    wrong : by strategy, how it deviates from these.
    mistakes : by strategy, what it seems to do instead of averaging.
    disputed : the strategies that disagree where the test cannot tell which is wrong, and how.
    untested : by strategy, why it could not be compared, nor computed again.
    unequal_ranks : the strategies whose ranks ended with different weights.
    """

    equal: list[str] = field(default_factory=list)
    confirmed: list[str] = field(default_factory=list)
    wrong: dict[str, Deviation] = field(default_factory=dict)
    mistakes: dict[str, str] = field(default_factory=dict)
    disputed: dict[str, Deviation] = field(default_factory=dict)
    untested: dict[str, str] = field(default_factory=dict)
    unequal_ranks: list[str] = field(default_factory=list)

    @property
    def doubtful(self) -> set[str]:
        """The strategies of which at least one is certainly wrong."""
        return {*self.wrong, *self.disputed, *self.unequal_ranks}


def check(block: ComparisonGroup, nodes: int) -> Equality:
    """Compare the strategies on ``nodes`` nodes that claim to be exact.

    First with each other, among runs that start alike; then by what one process has computed.
    """
    rows = [row for row in block.at(nodes) if row.exact and row.sync != "none"]
    result = Equality(unequal_ranks=[row.sync for row in rows if _ranks_end_unequal(row)])
    groups = _starting_alike(rows)
    for group in groups:
        if len(_names(group)) > 1:
            _compare(group, result)
    again = _computed_again(rows)
    _decide(again, result)
    tested = {*result.equal, *result.doubtful}
    result.equal = [sync for sync in dict.fromkeys(result.equal) if sync not in result.doubtful]
    # Of the strategies below, which nothing has tested, one process could not compute the runs.
    not_again = {sync: f"; in one process neither: {found.why_not}" for sync, found in again}
    for row in rows:
        if row.sync not in tested:
            reason = _why_untested(block, row.sync, len(rows), groups)
            result.untested[row.sync] = reason + not_again.get(row.sync, "")
    return result


def wrong_rows(block: ComparisonGroup) -> set[CellRow]:
    """Return the rows whose strategy is doubtful on that number of nodes."""
    wrong: set[CellRow] = set()
    for nodes in block.nodes_beyond_one:
        doubtful = check(block, nodes).doubtful
        wrong.update(row for row in block.at(nodes) if row.sync in doubtful)
    return wrong


def _ranks_end_unequal(row: CellRow) -> bool:
    return not all(run.equal_weights for run in row.runs)


def _curve(sync: str, run: Repeat) -> Curve:
    losses = {1: math.nan}
    for step, loss in run.losses:
        losses[step] = math.nan if loss is None else loss
    return Curve(sync, run.seed, run.precision or "unknown", losses)


def _starting_alike(rows: Rows) -> list[list[Curve]]:
    """Return the runs of one seed and number type in groups with the same loss at step 1."""
    curves = [_curve(row.sync, run) for row in rows for run in row.runs]
    kinds = grouped((curve.kind, curve) for curve in curves if math.isfinite(curve.losses[1]))
    groups: list[list[Curve]] = []
    for kind in kinds.values():
        groups += _agreeing(kind, (1,))
    return groups


def _computed_again(rows: Rows) -> list[tuple[str, OneProcess]]:
    """Return what one process found about runs, with the name of the strategy."""
    runs = [(row.sync, run) for row in rows for run in row.runs]
    return [(sync, found) for sync, run in runs if (found := run.one_process) is not None]


def _names(curves: Sequence[Curve]) -> set[str]:
    """Return the strategies of these runs."""
    return {curve.sync for curve in curves}


def _agreeing(curves: Sequence[Curve], steps: Sequence[int]) -> list[list[Curve]]:
    """Return the curves in groups that agree at these steps."""
    return first_fit(curves, lambda group, curve: _deviation(group[0], curve, steps) is None)


def _deviation(one: Curve, other: Curve, steps: Sequence[int] = STEPS) -> Deviation | None:
    """Return the first step at which two runs differ by more than rounding, or None."""
    start = START.get(one.precision, START_OF_OTHERS)
    for step in steps:
        losses = [curve.losses[step] for curve in (one, other) if step in curve.losses]
        finite = [abs(loss) for loss in losses if math.isfinite(loss)]
        if len(losses) < 2 or not finite:
            continue
        value = math.inf  # if one of the two is not finite
        if len(finite) == 2:
            value = abs(losses[0] - losses[1])
        tolerance = start * GROWTH ** max(0, step - STEPS[0])
        limit = tolerance * max(finite)
        if value > limit:
            return Deviation(step, value, limit)
    return None


def _compare(group: Sequence[Curve], result: Equality) -> None:
    """Sort runs that start alike into sets that agree, and add what follows to ``result``.

    The set with the largest ``_weight`` is right and the others are wrong; sets that share the
    largest weight dispute who is right.
    """
    right, *others = sorted(_agreeing(group, STEPS), key=_weight, reverse=True)
    tied = [curves for curves in others if _weight(curves) == _weight(right)]
    if not tied:
        result.equal += [curve.sync for curve in right]
    for curves in others:
        found = result.disputed if curves in tied else result.wrong
        for curve in curves:
            deviation = _deviation(right[0], curve)
            if deviation is not None:
                # Of several runs of a strategy, the one that deviates at the earliest step.
                found[curve.sync] = min(deviation, found.get(curve.sync, deviation))
    first = _deviation(right[0], tied[0][0]) if tied else None
    if first is not None:
        result.disputed |= {curve.sync: first for curve in right}


def _decide(again: Sequence[tuple[str, OneProcess]], result: Equality) -> None:
    """Correct ``result`` by what one process has found about runs of strategies, by name.

    If it confirms a strategy, those that disagree with it are wrong. If it only contradicts some,
    the others in their dispute become untested.
    """
    for sync, outcomes in grouped(again).items():
        if all(outcome.agrees for outcome in outcomes):
            result.confirmed.append(sync)
    differing = {sync: outcome for sync, outcome in again if outcome.agrees is False}
    if not differing and not result.confirmed:
        return
    known = result.wrong | result.disputed if result.confirmed else result.wrong
    result.wrong = {sync: far for sync, far in known.items() if sync not in result.confirmed}
    result.disputed = {}
    result.equal += result.confirmed
    for sync, outcome in differing.items():
        result.wrong[sync] = Deviation(STEPS[0], outcome.difference, outcome.limit)
        result.mistakes[sync] = outcome.mistake


def _weight(curves: Sequence[Curve]) -> tuple[int, bool]:
    """Return the number of strategies in a set, and whether DDP is one of them."""
    names = _names(curves)
    return len(names), DDP in names


def _why_untested(
    block: ComparisonGroup, sync: str, strategies: int, groups: Sequence[Sequence[Curve]]
) -> str:
    """Return why a strategy could not be compared.

    strategies : how many claim to be exact on this number of nodes. groups : see
    ``_starting_alike``.
    """
    # It started like another strategy, and that one turned out to be wrong.
    if any({sync} < _names(group) for group in groups):
        return "only a wrong strategy was there to compare it with"
    if block.emulated_compute:
        return "emulated compute has no losses"
    if strategies == 1:
        return "no other strategy that claims to be exact was measured with these settings"
    # The strategy shares its group with no other one, or a return above has said why.
    firsts = [group[0] for group in groups]
    own = next((curve for curve in firsts if curve.sync == sync), None)
    if own is None:
        return "the losses of the first steps were not recorded"
    return _why_apart(own, [curve for curve in firsts if curve is not own])


def _why_apart(own: Curve, others: Sequence[Curve]) -> str:
    """Return why a run did not start like any of the others."""
    if not others:
        return "the other strategies recorded no losses"
    if own.kind not in {curve.kind for curve in others}:
        kinds = sorted({f"{curve.precision}, seed {curve.seed}" for curve in (own, *others)})
        return f"number types or seeds differ ({'; '.join(kinds)})"
    return (
        "the losses differ at step 1, before any gradient is exchanged: initial weights or "
        "batches are not the same"
    )
