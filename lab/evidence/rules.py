"""What a matrix of weights shows: one table of rules, the first that fits counts.

Each rule names a pattern, gives the audit's name for the mistake, and says it in a sentence; the
cures stand by name.

A new rule is a row in ``RULES``, before the wider ones that fit its matrices, and a matrix in
tests/lab/evidence/test_evidence.py. Lessons, ``lab report`` and the drivers of ``lab grade`` say
its sentence, the first two its own cure as well. ``lab audit`` takes the name alone: it lists what
each rank gets, with the cure of ``CURES``. A new name takes an entry there and in
lab/audit/findings/catalogue.toml.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np

from common.say import listed
from common.utils.gradient_fit import SAME
from lab.evidence.evidence import Evidence, near

CURES = {
    "averaged-twice": (
        "Divide by the number of ranks once; with DDP, do not divide at all. What is averaged "
        "inside groups, divide only by the number of groups."
    ),
    "sum-not-mean": "Divide the sum by dist.get_world_size().",
    "group-divisor": (
        "Divide the sum over all ranks by dist.get_world_size(), or each of two sums by the "
        "size of its own group."
    ),
    "literal-divisor": (
        "Divide the sum by dist.get_world_size(); with DDP, which averages, do not divide."
    ),
    "some-parameters": "Average the gradient of every parameter that the optimiser updates.",
    "inside-groups": (
        "Exchange between the groups as well, for example by all_reduce in a group of one rank "
        "of each."
    ),
    "one-group": (
        "Afterwards broadcast the mean to the other ranks: inside each node, from the rank "
        "that has it."
    ),
    "own-gradient": "Average the gradients after backward(), and write the mean into .grad before "
    "optimizer.step().",
    "unequal-groups": (
        "Add up the gradients inside the groups and between them, and divide once, by the "
        "number of all ranks."
    ),
    "not-the-mean": (
        "Check what each rank sends and receives: all_reduce, then divide by the number of ranks."
    ),
}
_COUNT_ONCE = "Count each rank's gradient once."


class Rule(NamedTuple):
    """A row of the table.

    pattern : its name in this table. finding : the audit's name; "" if nothing is wrong.
    sentence : what is wrong, with places for what the evidence ``e`` shows.
    fits : whether a matrix of which no earlier row fits is of this kind.
    cure : what to do, where it is not that of the finding.
    """

    pattern: str
    finding: str
    sentence: str
    fits: Callable[[Evidence], bool]
    cure: str = ""


class Judgement(NamedTuple):
    """What a matrix shows.

    pattern, finding : see ``Rule``.
    sentence : without a full stop. cure : what to do; "" if nothing is wrong.
    """

    pattern: str
    finding: str
    sentence: str
    cure: str

    @property
    def right(self) -> bool:
        """Whether the ranks got what they should."""
        return not self.finding


def judge(evidence: Evidence) -> Judgement:
    """Return what the first rule that fits says.

    A matrix out of a file is ``Evidence(weights, residue)``.
    """
    rule = next(rule for rule in RULES if rule.fits(evidence))
    cure = rule.cure or CURES.get(rule.finding, "")
    return Judgement(rule.pattern, rule.finding, rule.sentence.format(e=evidence), cure)


def judge_parameters(parts: Mapping[str, Evidence]) -> Judgement:
    """Return what the evidence of all parameters shows, by their names.

    Parameters that are left out while others are averaged are one finding; else the first that is
    wrong counts.
    """
    wrong = {name: part for name, part in parts.items() if not part.right}
    first, *_ = [*wrong.values(), *parts.values()]
    kept = all(part.gradients == {"its own"} for part in wrong.values())
    if kept and 0 < len(wrong) < len(parts):
        sentence = f"only some parameters are averaged; left out: {listed(wrong)}"
        return Judgement("some parameters", "some-parameters", sentence, CURES["some-parameters"])
    return judge(first)


def multiple(
    factor: float,
    size: int,
    *,
    rounded: bool = False,
    groups: Collection[frozenset[int]] = (),
) -> Evidence:
    """Return the evidence of ``factor`` times the mean on all of ``size`` ranks."""
    return Evidence(np.full((size, size), factor / size), rounded=rounded, groups=groups)


def _by_samples(e: Evidence) -> bool:
    if len(e.samples) < e.size or not all(e.samples) or not e.same_sum:
        return False
    shares = np.array(e.samples) / sum(e.samples)
    return bool(np.abs(e.shares - shares).max() < SAME / 10)


def _left_out(e: Evidence) -> bool:
    shares = e.shares[e.counting]
    alike = np.ptp(shares) <= SAME * np.abs(shares).max()
    return bool(e.same_sum and len(e.counting) < e.size and alike)


def _own_left_out(e: Evidence) -> bool:
    weights = np.abs(e.weights)
    return bool(np.diagonal(weights).max() <= SAME * weights.max()) and not e.one_gradient_each


RULES: tuple[Rule, ...] = (
    Rule(
        "one group",
        "one-group",
        "the mean comes to {e.having_mean} only, which are a group",
        lambda e: e.having in e.groups and len(e.having) < e.size,
    ),
    Rule(
        "no sum",
        "not-the-mean",
        "what {e.unexplained} gets is no weighted sum of the ranks' gradients",
        lambda e: not e.explained.all(),
    ),
    # a multiple of the mean
    Rule("mean", "", "every rank gets the mean", lambda e: e.right),
    Rule("by samples", "", "every rank gets the mean over all samples", _by_samples),
    Rule(
        "zero",
        "not-the-mean",
        "the gradients are zero after the averaging",
        lambda e: e.factor == 0,
    ),
    Rule(
        "sum",
        "sum-not-mean",
        "the gradients are added up and never divided",
        lambda e: near(e.factor, e.size),
    ),
    Rule(
        "twice",
        "averaged-twice",
        "the sum is divided by {e.size} twice",
        lambda e: near(e.factor, 1 / e.size),
    ),
    Rule(
        "twice by a group",
        "averaged-twice",
        "the sum is divided by {e.size}, the number of ranks, and by the size of a group",
        lambda e: len(e.group_sizes(1 / e.factor)) == 1,
    ),
    Rule(
        "by a group",
        "group-divisor",
        "the sum is divided by {e.divisor:.0f}, sizes of groups, not by the number of ranks",
        lambda e: bool(e.group_sizes(e.divisor)),
    ),
    Rule(
        "literal",
        "literal-divisor",
        "the sum is divided by {e.divisor:.0f}, not by the number of ranks",
        lambda e: e.is_whole(e.divisor),
    ),
    Rule(
        "factor",
        "not-the-mean",
        "every gradient is multiplied by a wrong number",
        lambda e: not np.isnan(e.factor),
    ),
    Rule(
        "multiples",
        "not-the-mean",
        "the ranks get different multiples of the mean",
        lambda e: e.gradients == {"the mean"},
    ),
    # multiples of one rank's gradient
    Rule(
        "own",
        "own-gradient",
        "each rank keeps its own gradient",
        lambda e: e.gradients == {"its own"},
    ),
    Rule(
        "one rank's",
        "own-gradient",
        "every rank gets rank {e.counting[0]}'s gradient",
        lambda e: e.same_sum and len(e.counting) == 1,
    ),
    Rule(
        "some have it",
        "own-gradient",
        "the mean comes to {e.having_mean} only",
        lambda e: bool(e.having) and e.one_gradient_each,
    ),
    Rule(
        "some have it",
        "not-the-mean",
        "the mean comes to {e.having_mean} only",
        lambda e: bool(e.having),
    ),
    # one sum on all ranks
    Rule(
        "groups again",
        "averaged-twice",
        "the groups' means are divided by {e.size}, the number of ranks, again",
        lambda e: near(e.groups_total, 1 / e.size),
    ),
    Rule(
        "unequal groups",
        "unequal-groups",
        "groups of different sizes count alike: a rank's gradient counts {e.group_counts}",
        lambda e: bool(e.uneven_sizes),
    ),
    Rule("left out", "not-the-mean", "{e.left_out} missing from the sum", _left_out, _COUNT_ONCE),
    Rule(
        "counted twice",
        "not-the-mean",
        "rank {e.odd.rank}'s gradient is counted twice",
        lambda e: e.odd is not None and near(e.odd.times, 2),
        _COUNT_ONCE,
    ),
    Rule(
        "unequal",
        "not-the-mean",
        "rank {e.odd.rank}'s gradient counts {e.odd.times:.3g} times as much as the others'",
        lambda e: e.odd is not None,
        _COUNT_ONCE,
    ),
    Rule(
        "unequal",
        "not-the-mean",
        "the ranks' gradients count {e.shares_text} times, not 1/{e.size} each",
        lambda e: e.same_sum,
        _COUNT_ONCE,
    ),
    # different sums
    Rule(
        "own left out",
        "not-the-mean",
        "each rank leaves its own gradient out of the sum",
        _own_left_out,
    ),
    Rule(
        "another's",
        "not-the-mean",
        "each rank gets one rank's gradient, and nothing is added up",
        lambda e: e.one_gradient_each,
    ),
    Rule(
        "inside groups",
        "inside-groups",
        "each rank gets {e.of_its_group} of its own group alone: {e.inside_text}",
        lambda e: bool(e.inside),
    ),
    Rule(
        "mixed",
        "not-the-mean",
        "the ranks' gradients count unequally, not 1/{e.size} each",
        lambda _: True,
    ),
)
