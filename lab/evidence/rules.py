"""What a matrix of weights shows: one table of rules, the first that fits counts.

Each rule names a pattern, gives the audit's name for the mistake, and says it in a sentence; the
cures stand by name.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np

from common.errors import ranks_text
from common.utils.gradient_fit import SAME, Numbers
from lab.evidence.evidence import Evidence

# What a sentence says of a matrix that a rule fits; None if it does not fit.
Values = Mapping[str, object] | None

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
    "own-gradient": "Average the gradients, and write the mean into .grad before optimizer.step().",
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
    sentence : what is wrong, with places for values. cure : where it is not that of the finding.
    """

    pattern: str
    finding: str
    sentence: str
    fits: Callable[[Evidence], Values]
    cure: str = ""


class Judgement(NamedTuple):
    """What a matrix shows.

    pattern, finding : see ``Rule``.
    sentence : without a full stop. cure : what to do; "" if nothing is wrong.
    values : those in the sentence.
    """

    pattern: str
    finding: str
    sentence: str
    cure: str
    values: Mapping[str, object]

    @property
    def right(self) -> bool:
        """Whether the ranks got what they should."""
        return not self.finding


def judge(evidence: Evidence) -> Judgement:
    """Return what the first rule that fits says.

    A matrix out of a file is ``Evidence(weights, residue)``.
    """
    for rule in RULES:
        values = rule.fits(evidence)
        if values is not None:
            known = {"size": evidence.size, "factor": evidence.factor, **values}
            sentence = rule.sentence.format(**known)
            cure = rule.cure or CURES.get(rule.finding, "")
            return Judgement(rule.pattern, rule.finding, sentence, cure, known)
    raise AssertionError("the last rule fits everything")


# --- a multiple of the mean, the same on all ranks ---


def judge_multiple(
    factor: float,
    size: int,
    *,
    rounded: bool = False,
    groups: Collection[frozenset[int]] = (),
) -> Judgement:
    """Return what a multiple of the mean of ``size`` ranks shows, e.g. 2.0 of 4 ranks."""
    weights = np.full((size, size), factor / size)
    return judge(Evidence(weights, rounded=rounded, groups=groups))


def _near(value: float, right: float) -> bool:
    return abs(value - right) < SAME * abs(right)


def _zero(evidence: Evidence) -> Values:
    return {} if evidence.factor == 0 else None


def _sum(evidence: Evidence) -> Values:
    return {} if _near(evidence.factor, evidence.size) else None


def _twice(evidence: Evidence) -> Values:
    return {} if _near(evidence.factor * evidence.size, 1) else None


def _twice_by_group(evidence: Evidence) -> Values:
    sizes = _group_sizes(1 / evidence.factor, evidence.groups)
    return {"divisor": sizes[0]} if len(sizes) == 1 else None


def _by_group(evidence: Evidence) -> Values:
    sizes = _group_sizes(evidence.size / evidence.factor, evidence.groups)
    if not sizes:
        return None
    shown = f"{sizes[0]}, the size of a group"
    if len(sizes) > 1:
        shown = f"{sizes[0]} and again by {sizes[1]}, sizes of groups"
    return {"divisor": shown, "sizes": sizes}


def _group_sizes(divisor: float, groups: Collection[frozenset[int]]) -> tuple[int, ...]:
    """Return the size of a group that is the divisor, or two sizes whose product it is."""
    sizes = sorted({len(group) for group in groups} - {1})
    pairs = combinations_with_replacement(sizes, 2)
    for chosen in [*((size,) for size in sizes), *pairs]:
        if _near(divisor, float(np.prod(chosen))):
            return chosen
    return ()


def _literal(evidence: Evidence) -> Values:
    """Fit a whole number from 2 to 64: it may stand in the script."""
    divisor = whole_divisor(evidence.size / evidence.factor)
    return {"divisor": divisor} if divisor else None


def whole_divisor(divisor: float) -> int:
    """Return the whole number from 2 to 64 that a divisor is; 0 if it is none.

    The greater it is, the nearer it must be, since one number in ten is as near by chance.
    """
    if not 1.5 < divisor < 64.5:
        return 0
    whole = round(divisor)
    return whole if abs(divisor - whole) < min(SAME * whole, 0.05) else 0


def _a_factor(evidence: Evidence) -> Values:
    return None if np.isnan(evidence.factor) else {}


# --- one sum on all ranks, in which they count differently ---


def _shares(evidence: Evidence) -> Numbers:
    return np.asarray(evidence.weights.mean(axis=0))


def _by_samples(evidence: Evidence) -> Values:
    if len(evidence.samples) < evidence.size or not all(evidence.samples):
        return None
    shares = np.array(evidence.samples) / sum(evidence.samples)
    alike = evidence.same_sum and np.abs(_shares(evidence) - shares).max() < SAME / 10
    return {} if alike else None


def _one_rank(evidence: Evidence) -> Values:
    counting = _counting(evidence)
    if not evidence.same_sum or len(counting) != 1:
        return None
    return {"rank": counting[0]}


def _counting(evidence: Evidence) -> list[int]:
    """Return the ranks whose gradients count in any rank's sum."""
    greatest = np.abs(evidence.weights).max(axis=0)
    return [int(rank) for rank in np.flatnonzero(greatest > SAME * greatest.max())]


def _left_out(evidence: Evidence) -> Values:
    counting = _counting(evidence)
    shares = _shares(evidence)[counting]
    missing = [rank for rank in range(evidence.size) if rank not in counting]
    if not evidence.same_sum or not missing or np.ptp(shares) > SAME * np.abs(shares).max():
        return None
    whose = f"rank {missing[0]}'s own gradient is"
    if len(missing) > 1:
        whose = f"the gradients of {ranks_text(missing)} are"
    return {"whose": whose}


def _one_odd(evidence: Evidence) -> tuple[int, float] | None:
    """Return the one rank that counts otherwise than the others do alike, and how many times."""
    if not evidence.same_sum:
        return None
    shares = _shares(evidence)
    usual = float(np.median(shares)) if evidence.size > 2 else float(shares.min())
    odd = np.flatnonzero(np.abs(shares - usual) > SAME * np.abs(shares).max())
    if len(odd) != 1 or abs(usual) <= SAME * np.abs(shares).max():
        return None
    return int(odd[0]), float(shares[odd[0]]) / usual


def _counted_twice(evidence: Evidence) -> Values:
    odd = _one_odd(evidence)
    return {"rank": odd[0]} if odd and _near(odd[1], 2) else None


def _unequal_one(evidence: Evidence) -> Values:
    odd = _one_odd(evidence)
    return {"rank": odd[0], "ratio": odd[1]} if odd else None


def _unequal(evidence: Evidence) -> Values:
    if not evidence.same_sum:
        return None
    return {"weights": ", ".join(f"{share:.4f}" for share in _shares(evidence))}


def _unequal_groups(evidence: Evidence) -> Values:
    """Fit the mean of the means of groups of different sizes: a rank of n counts 1/n as often."""
    sizes = _uneven_sizes(evidence) if evidence.same_sum else []
    if not sizes:
        return None
    shares = _shares(evidence)
    counts = []
    for size in sorted(set(sizes), reverse=True):
        ranks = [rank for rank, other in enumerate(sizes) if other == size]
        share = shares[ranks].mean()
        counts.append(f"{share:.4f} times in a group of {size} ({ranks_text(ranks)})")
    total = float(evidence.weights.sum(axis=1).mean())  # 1 in a mean of the groups' means
    number = sum(1 / size for size in sizes)  # of groups
    return {"counts": "; ".join(counts), "again": _near(total * evidence.size / number, 1)}


def _uneven_sizes(evidence: Evidence) -> list[int]:
    """Return by rank the size of its group; nothing if each group does not count alike."""
    shares = _shares(evidence)
    if shares.min() <= SAME * shares.max():  # some rank does not count at all
        return []
    known = {len(group) for group in evidence.groups} | {1}
    for number in range(2, evidence.size):  # of groups
        exact = shares.sum() / (number * shares)
        sizes = [int(size) for size in exact.round()]
        whole = np.abs(exact - exact.round()).max() < SAME
        complete = all(sizes.count(size) % size == 0 for size in set(sizes) if size)
        if whole and complete and len(set(sizes)) > 1 and known.issuperset(sizes):
            return sizes
    return []


def _unequal_groups_again(evidence: Evidence) -> Values:
    values = _unequal_groups(evidence)
    return values if values and values["again"] else None


# --- different sums ---


def _no_sum(evidence: Evidence) -> Values:
    lacking = np.flatnonzero(~evidence.explained)
    return {"ranks": ranks_text([int(rank) for rank in lacking])} if lacking.size else None


def _multiples(evidence: Evidence) -> Values:
    return {} if evidence.gradients == {"the mean"} else None


def _own(evidence: Evidence) -> Values:
    return {} if evidence.gradients == {"its own"} else None


def _having(evidence: Evidence) -> list[int]:
    """Return the ranks that got the mean, or a multiple."""
    return [rank for rank, it in enumerate(evidence.sources) if it.gradient == "the mean"]


def _one_group(evidence: Evidence) -> Values:
    having = _having(evidence)
    return {"ranks": ranks_text(having)} if frozenset(having) in evidence.groups else None


def _some_have_mean(evidence: Evidence) -> Values:
    having = _having(evidence)
    return {"ranks": ranks_text(having)} if having else None


def _others_have_own(evidence: Evidence) -> Values:
    return None if "none" in evidence.gradients else _some_have_mean(evidence)


def _own_left_out(evidence: Evidence) -> Values:
    weights = np.abs(evidence.weights)
    alone = "none" not in evidence.gradients
    left_out = np.diagonal(weights).max() <= SAME * weights.max()
    return {} if left_out and not alone else None


def _one_gradient_each(evidence: Evidence) -> Values:
    return None if "none" in evidence.gradients else {}


def _inside_groups(evidence: Evidence) -> Values:
    """Fit groups that share the ranks out: each rank gets its group's sum, in equal parts."""
    weights = evidence.weights
    counts = weights > SAME * weights.max()
    found = {tuple(int(rank) for rank in np.flatnonzero(row)) for row in counts}
    members = sorted(rank for group in found for rank in group)
    expected = counts * np.diagonal(weights)[:, None]
    shares_out = members == list(range(evidence.size)) and np.diagonal(counts).all()
    if not shares_out or np.abs(weights - expected).max() > SAME * weights.max():
        return None
    times = weights.sum(axis=1)
    what = "the mean"
    if np.abs(times - 1).max() > SAME:
        what = " or ".join(sorted({f"{one:.3f} times the mean" for one in times}))
    return {"what": what, "groups": "; ".join(ranks_text(group) for group in sorted(found))}


def _anything(_evidence: Evidence) -> Values:
    return {}


RULES: tuple[Rule, ...] = (
    Rule(
        "no sum",
        "not-the-mean",
        "what {ranks} gets is no weighted sum of the ranks' gradients",
        _no_sum,
    ),
    Rule("mean", "", "every rank gets the mean", lambda evidence: {} if evidence.right else None),
    Rule("by samples", "", "every rank gets the mean over all samples", _by_samples),
    Rule("zero", "not-the-mean", "the gradients are zero after the averaging", _zero),
    Rule("sum", "sum-not-mean", "the gradients are added up and never divided", _sum),
    Rule("twice", "averaged-twice", "the sum is divided by {size} twice", _twice),
    Rule(
        "twice by a group",
        "averaged-twice",
        "the sum is divided by {size}, the number of ranks, and by {divisor}, the size of a group",
        _twice_by_group,
    ),
    Rule(
        "by a group",
        "group-divisor",
        "the sum is divided by {divisor}, not by the number of ranks",
        _by_group,
    ),
    Rule(
        "literal",
        "literal-divisor",
        "the sum is divided by {divisor}, not by the number of ranks",
        _literal,
    ),
    Rule("factor", "not-the-mean", "every gradient is multiplied by a wrong number", _a_factor),
    Rule("multiples", "not-the-mean", "the ranks get different multiples of the mean", _multiples),
    Rule("own", "own-gradient", "each rank keeps its own gradient", _own),
    Rule("one rank's", "own-gradient", "every rank gets rank {rank}'s gradient", _one_rank),
    Rule("one group", "one-group", "the mean comes to the group of {ranks} only", _one_group),
    Rule("some have it", "own-gradient", "the mean comes to {ranks} only", _others_have_own),
    Rule("some have it", "not-the-mean", "the mean comes to {ranks} only", _some_have_mean),
    Rule(
        "groups again",
        "averaged-twice",
        "the groups' means are divided by {size}, the number of ranks, again",
        _unequal_groups_again,
    ),
    Rule(
        "unequal groups",
        "unequal-groups",
        "groups of different sizes count alike: a rank's gradient counts {counts}",
        _unequal_groups,
    ),
    Rule("left out", "not-the-mean", "{whose} missing from the sum", _left_out, _COUNT_ONCE),
    Rule(
        "counted twice",
        "not-the-mean",
        "rank {rank}'s gradient is counted twice",
        _counted_twice,
        _COUNT_ONCE,
    ),
    Rule(
        "unequal",
        "not-the-mean",
        "rank {rank}'s gradient counts {ratio:.3g} times as much as the others'",
        _unequal_one,
        _COUNT_ONCE,
    ),
    Rule(
        "unequal",
        "not-the-mean",
        "the ranks' gradients count {weights} times, not 1/{size} each",
        _unequal,
        _COUNT_ONCE,
    ),
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
        _one_gradient_each,
    ),
    Rule(
        "inside groups",
        "inside-groups",
        "each rank gets {what} of its own group alone: {groups}",
        _inside_groups,
    ),
    Rule(
        "mixed",
        "not-the-mean",
        "the ranks' gradients count unequally, not 1/{size} each",
        _anything,
    ),
)
