"""lab/audit/findings: what the optimisers get, told from records with known gradients."""

from collections import defaultdict

import numpy as np
import pytest

from lab.audit.findings import run_checks, without_explained
from lab.audit.findings.finding import Finding, Right, Unknown
from lab.audit.findings.gradients import check as check_gradients
from lab.audit.findings.gradients import resolve
from lab.audit.findings.properties import property_rows
from lab.audit.findings.weights import check as check_weights
from lab.audit.findings.where import exchanges
from lab.audit.records import Backward
from lab.audit.result import verdict
from tests.lab.audit.recordings import COLUMNS, gradients, mean, train


def told(recording):
    """Return the names of what is found, and the verdict, whatever other checks find."""
    outcomes = [*check_gradients(recording), *check_weights(recording)]
    found = without_explained([one for one in outcomes if isinstance(one, Finding)])
    unseen = defaultdict(list)
    for one in outcomes:
        if isinstance(one, Unknown):
            unseen[one.of].append(one.text)
    rows = property_rows({}, unseen, {})
    return [one.name for one in found], verdict([recording], found, rows).answer


def findings(*recordings):
    return [one for run in recordings for one in check_gradients(run) if isinstance(one, Finding)]


# What the ranks exchange: from their own gradients and the step to what each optimiser gets.


def times(factor):
    return lambda own, step: mean(own, step) * factor


def nothing_sent(own, step):
    return own


def reduce_only(own, step):
    """Rank 0 gets the mean; what the others get is no gradient."""
    return np.concatenate([own.mean(axis=0)[None], np.sign(own[1:])])


def before(step, own=gradients):
    return np.array([own(rank, max(step - 1, 0)) for rank in range(3)])


def others_late(own, step):
    return mean(before(step), step) + (own - before(step)) / 3


def never_cleared(own, step):
    return mean(own, step) + (mean(before(step), step) if step else 0)


def norm_clipped(own, step):
    norms = np.linalg.norm(own, axis=1, keepdims=True)
    return mean(own * np.minimum(1, 35 / (norms + 1e-6)), step)


def values_clipped(own, step):
    """Clip at a limit that no value of all ranks is beyond, so it is in no mean."""
    return mean(np.clip(own, -4.5, 4.5), step)


def clipped_after(own, step):
    got = mean(own, step)
    return got * min(1.0, 20 / (float(np.linalg.norm(got[0])) + 1e-6))


def decayed(own, step):
    """Add a weight decay by hand, with the weights that SGD reaches."""
    weights = np.linspace(-1, 1, COLUMNS)
    for i in range(step + 1):
        got = mean(before(i + 1), i) + 0.05 * weights
        weights = weights - 0.1 * got[0]
    return got


# Gradients that ranks compute.


def alike(ranks):
    """The first ranks compute the same."""
    return lambda rank, step: gradients(max(rank, ranks - 1), step)


def single_number(rank, step):
    return np.append(np.zeros(COLUMNS - 1), rank + 1.0)


def rounded(rank, step):
    """What is rounding in one step may be measured in the next."""
    noise = np.full(10, 1e-9 if step % 2 else 1e-5)
    return np.append(gradients(rank, step)[:-10], noise * (rank + 1))


def before_batchnorm(rank, step):
    noise = np.random.default_rng([rank, step]).normal(size=10) * 1e-9
    return np.append(gradients(rank, step)[:-10], noise)


def last_not_sent(own, step):
    return np.concatenate([mean(own, step)[:, :-10], 3 * own[:, -10:]], axis=1)


def clips(limit):
    """Each rank clips its own gradients before the exchange."""

    def call(rank, record):
        return [["norm", limit, record["own_norm"], 0, ["main.py", 9, "clip"]]]

    return "step", "clips", call


def in_groups(*groups):
    """Each rank exchanges in a group, the first of these that it is in."""

    def group(rank, record):
        return next(["group", list(members)] for members in groups if rank in members)

    return "call", "group", group


def counting(weights):
    """Each rank's optimiser gets the ranks' gradients by a row of weights."""
    return lambda own, step: np.array(weights) @ own


PAIRS = np.kron(np.eye(2), np.full((2, 2), 0.5))  # the mean of ranks 0 and 1, and of 2 and 3
PLACES = np.kron(np.full((2, 2), 0.5), np.eye(2))  # of ranks 0 and 2, and of 1 and 3
LEADERS = [[1 / 4] * 4, [1 / 2, 1 / 2, 0, 0], [1 / 4] * 4, [0, 0, 1 / 2, 1 / 2]]
OWN_LEFT = [[1 / 4] * 4, [0, 1, 0, 0], [1 / 4] * 4, [0, 0, 0, 1]]
NODES = {"size": 4, "changes": [in_groups((0, 1), (2, 3))]}
BETWEEN = {"size": 4, "changes": [in_groups((0, 2), (1, 3))]}
SIX = {"size": 6, "changes": [in_groups((0, 1), (2, 3), (4, 5))]}
THREE_PLACES = {"size": 6, "changes": [in_groups((0, 2, 4), (1, 3, 5))]}
UNEVEN = {"changes": [in_groups((0, 1), (2,))]}
OTHER_LOSSES = [("backward", "reduction", "none"), ("backward", "arriving", 0.3)]
IN_GROUPS = {
    "inside nodes": (counting(PAIRS), NODES, ["inside-groups"], "no"),
    "between nodes": (counting(PLACES), BETWEEN, ["inside-groups"], "no"),
    "inside, divided by all": (counting(PAIRS / 2), NODES, ["inside-groups"], "no"),
    "inside uneven nodes": (
        counting([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]]),
        UNEVEN,
        ["inside-groups"],
        "no",
    ),
    "own": (nothing_sent, NODES, ["own-gradient"], "no"),
    "own, two alike": (nothing_sent, NODES | {"own": alike(2)}, ["own-gradient"], "no"),
    "leaders": (counting(LEADERS), BETWEEN, ["one-group"], "no"),
    "leaders, others own": (counting(OWN_LEFT), BETWEEN, ["one-group"], "no"),
    "leaders without a group": (counting(LEADERS), NODES, ["not-the-mean"], "no"),
    "one sum": (times(2), NODES, ["group-divisor"], "no"),
    "one sum, three nodes": (times(2), THREE_PLACES, ["group-divisor"], "no"),
    "by the node twice": (times(6 / 4), SIX, ["group-divisor"], "no"),
    "by 2 without groups": (times(2), {"size": 4}, ["literal-divisor"], "no"),
    "no division": (times(4), NODES, ["sum-not-mean"], "no"),
    "twice": (times(1 / 2), NODES, ["averaged-twice"], "no"),
    "by all twice": (times(1 / 4), NODES, ["averaged-twice"], "no"),
    "loss divided, too": (
        times(2),
        NODES | {"changes": [*NODES["changes"], ("backward", "arriving", 1 / 2)]},
        [],
        "yes",
    ),
    "one sum, of other losses": (
        times(2),
        NODES | {"changes": [*NODES["changes"], *OTHER_LOSSES]},
        [],
        "cannot tell",
    ),
    "node means": (counting([[1 / 4, 1 / 4, 1 / 2]] * 3), UNEVEN, ["unequal-groups"], "no"),
    "node means by all": (counting([[1 / 6, 1 / 6, 1 / 3]] * 3), UNEVEN, ["averaged-twice"], "no"),
    "node means by chance": (counting([[1 / 4, 1 / 4, 1 / 2]] * 3), {}, ["not-the-mean"], "no"),
    "leaders alone count": (counting([[0.5, 0, 0.5, 0]] * 4), BETWEEN, ["not-the-mean"], "no"),
    "right": (mean, NODES, [], "yes"),
}
LATER_LAYERS = np.arange(COLUMNS) >= 216
ACCUMULATED = [("step", "micro", 4), ("step", "own_norm", None)]
SCALED = [("step", "scale", 65536.0), ("backward", "arriving", 65536.0)]
HALF_THE_TOKENS = [  # each rank divides the sum of its losses by twice the number of all tokens
    ("backward", "reduction", "none"),
    ("backward", "arriving", lambda rank, record: (4, 9, 5)[rank] / 36),
]
CASES = {
    "divided by 2.5": (times(3 / 2.5), {}, [], "cannot tell"),
    "reduce only": (reduce_only, {}, ["not-the-mean"], "no"),
    "weighted": (lambda own, step: [[0.5, 0.25, 0.25]] * 3 @ own, {}, ["not-the-mean"], "no"),
    "never cleared": (never_cleared, {"steps": 2}, [], "cannot tell"),
    "others late": (others_late, {}, ["stale-gradient", "weights-diverge"], "no"),
    "loose value": (values_clipped, {}, ["value-clipped-before-averaging"], "no"),
    "clipped": (norm_clipped, {"changes": [clips(35)]}, ["clipped-before-averaging"], "no"),
    "clipped, summed": (
        lambda own, step: 3 * norm_clipped(own, step),
        {"changes": [clips(35)]},
        ["clipped-before-averaging", "sum-not-mean"],
        "no",
    ),
    "clipped, divided by 2": (
        lambda own, step: 1.5 * norm_clipped(own, step),
        {"changes": [clips(35)]},
        ["clipped-before-averaging", "literal-divisor"],
        "no",
    ),
    "clipped, loss divided": (
        lambda own, step: 3 * norm_clipped(own, step),
        {"changes": [clips(35), ("backward", "arriving", 1 / 3)]},
        ["clipped-before-averaging"],
        "no",
    ),
    "values clipped, summed": (
        lambda own, step: 3 * values_clipped(own, step),
        {"changes": [("step", "clips", lambda *_: [["value", 4.5, None, 0, None]])]},
        ["value-clipped-before-averaging", "sum-not-mean"],
        "no",
    ),
    "norm, measured": (mean, {"changes": [clips(float("inf"))]}, [], "yes"),
    "norm after by hand": (clipped_after, {}, [], "yes"),
    "weight decay by hand": (decayed, {}, [], "yes"),
    "half a loss": (mean, {"changes": [("backward", "arriving", 0.5)]}, [], "yes"),
    "plain sums": (times(3), {"changes": [("backward", "reduction", "sum")]}, [], "yes"),
    "half the tokens": (times(3), {"changes": HALF_THE_TOKENS}, [], "cannot tell"),
    "accumulated": (times(1 / 4), {"changes": ACCUMULATED}, [], "yes"),
    "fused": (mean, {"changes": SCALED}, [], "yes"),
    "unscaled sum": (times(3 / 65536), {"changes": SCALED}, ["sum-not-mean"], "no"),
    "sign": (lambda own, step: np.sign(mean(own, step)), {}, [], "cannot tell"),
    "top-k": (lambda own, step: mean(np.where(abs(own) > 1, own, 0), step), {}, [], "cannot tell"),
    "other states": (mean, {"changes": [("stepped", "state", lambda r, _: r)]}, [], "yes"),
    "alike": (mean, {"own": alike(3)}, [], "cannot tell"),
    "alike, clipped": (clipped_after, {"own": alike(3), "changes": [clips(20)]}, [], "cannot tell"),
    "alike, summed": (times(3), {"own": alike(3)}, ["sum-not-mean"], "no"),
    "two alike": (mean, {"own": alike(2)}, [], "yes"),
    "two alike, own": (nothing_sent, {"own": alike(2)}, ["own-gradient"], "no"),
    "single number": (mean, {"own": single_number}, [], "yes"),
    "single number, own": (nothing_sent, {"own": single_number}, ["own-gradient"], "no"),
    "single number, summed": (times(3), {"own": single_number}, ["sum-not-mean"], "no"),
    "rounded": (
        lambda own, step: mean(before(step, rounded), step),
        {"own": rounded},
        ["stale-gradient"],
        "no",
    ),
    "before batchnorm": (last_not_sent, {"own": before_batchnorm}, [], "yes"),
    "zeroed layer": (lambda own, step: mean(own, step) * LATER_LAYERS, {}, [], "cannot tell"),
}


CASES |= IN_GROUPS


@pytest.mark.parametrize(("exchange", "options", "names", "answer"), CASES.values(), ids=CASES)
def test_each_exchange_has_its_own_name(exchange, options, names, answer):
    assert told(train(exchange, **options)) == (names, answer)


def test_evidence_has_the_numbers_and_the_line():
    (literal,) = findings(train(times(3 / 2)))
    assert "divided by 2," in literal.evidence[0]
    assert "1.500 times" in literal.evidence[0]
    (cut,) = findings(train(norm_clipped, changes=[clips(35)]))
    norm = np.linalg.norm(gradients(0, 0))
    assert f"rank 0's gradient is cut to {3500 / norm:.1f} % of its length" in cut.evidence[0]
    assert str(cut.at) == "main.py:9: clip"


def test_evidence_names_the_groups():
    (inside,) = findings(train(counting(PAIRS), **NODES))
    assert "ranks 0 and 1; ranks 2 and 3" in inside.evidence[0]
    (twice,) = findings(train(times(1 / 2), **NODES))
    assert "divided by 4, the number of ranks, and by 2, the size of a group" in twice.evidence[0]
    (uneven,) = findings(train(counting([[1 / 4, 1 / 4, 1 / 2]] * 3), **UNEVEN))
    assert "0.5000 times in a group of 1 (rank 2)" in uneven.evidence[0]
    assert [one.sure for one in (inside, twice, uneven)] == ["certain"] * 3


def test_weights_that_are_made_equal_again_are_no_fault():
    """Post-local SGD: inside the nodes first, then all ranks' weights are averaged."""

    def local(own, step):
        if step != 2:
            return PAIRS @ own
        moved = sum(PAIRS @ np.array([gradients(rank, at) for rank in range(4)]) for at in (0, 1))
        return own.mean(axis=0) - moved + moved.mean(axis=0)

    apart = train(local, steps=2, **NODES)
    assert [one.name for one in check_weights(apart) if isinstance(one, Finding)] == [
        "weights-diverge"
    ]
    again = train(local, steps=3, **NODES)
    assert not [one for one in check_weights(again) if isinstance(one, Finding)]
    assert told(again) == ([], "cannot tell")
    apart.ranks[0].record("hook", name="post_localSGD_hook")
    assert told(apart) == ([], "cannot tell")


def test_another_size_may_contradict():
    two, three = (train(times(size), size=size, rate=0.6 / size) for size in (2, 3))
    found = findings(two, three)  # the learning rate is divided by the ranks: the sum is right
    assert [one.name for one in found] == ["sum-not-mean"] * 2
    assert resolve(found, [two, three]) == []
    assert resolve(found, [two, train(times(3), rate=0.3)]) == found
    half = [train(size=size, changes=[("backward", "arriving", 0.5)]) for size in (2, 3)]
    (found,) = findings(*half)
    assert (found.name, found.sure) == ("scaled-in-loss", "likely")
    found = Finding(found.name, found.evidence, sizes=(2,))
    assert resolve([found], half) == []
    assert resolve([found], half[:1]) == [found]


def test_an_optimiser_whose_gradients_nobody_saw_is_named():
    recording = train()
    row = ["1.0.0", "critic.weight", [4], "float32", 4, 99]
    for one in recording.ranks:
        one.record("params", o=1, built=0, rows=[row])
        fields = {"own": [0, 0], "got": [0, 0], "optimizer": "SGD", "scale": 1, "clips": []}
        one.record("step", o=1, step=0, lr=[0.1], settings={}, **fields)
    outcomes = [one for one in check_gradients(recording) if one.of == "gradients"]
    assert [type(one) for one in outcomes] == [Right, Unknown]
    assert "critic.weight" in outcomes[1].text
    assert told(recording)[1] == "cannot tell"


def test_a_missing_rank_breaks_nothing():
    recording = train()
    recording.ranks.pop()
    assert told(recording) == ([], "cannot tell")
    assert verdict([], []).answer == "cannot tell"


def test_run_checks_merges_and_leaves_out_what_follows():
    wrong, right = [train(nothing_sent, size=size, steps=size) for size in (2, 3)], train(size=4)
    del right.ranks[0].of(Backward)[0].micro
    checked = run_checks([*wrong, right])
    found = checked.findings
    rows = {row.name: row for row in checked.properties}
    assert [(one.name, one.sizes) for one in found] == [
        ("own-gradient", (2, 3)),
        ("batch-grows", (2, 3, 4)),
    ]
    assert [one[-17:] for one in found[0].evidence] == ["(in 2 of 2 steps)", "(in 3 of 3 steps)"]
    assert rows["weights"].state == "broken"  # though own-gradient explains it
    assert "all ranks start from the same weights" in rows["weights"].said
    assert rows["gradients"].state == "broken"
    assert rows["gradients"].said[-1].endswith("(on 4 ranks)")
    assert rows["samples"].state == "not seen"
    failed = [text for row in checked.properties for text in row.said if "be read" in text]
    assert "(AttributeError: " in failed[-1]
    assert "'micro'" in failed[-1]


def test_barriers_are_no_exchange():
    for name, count in (("all_reduce", 3), ("barrier", 0), ("broadcast_object_list", 0)):
        assert len(exchanges(train(changes=[("call", "name", name)]), 1)) == count


def lost_on(*ranks, value=0.0, columns=slice(0, 216), every=False):
    """Return an exchange of whose result ranks lose the first parameter in step 2."""

    def exchange(own, step):
        got = mean(own, step)
        if step == 2 or every:
            got[list(ranks), columns] = value
        return got

    return exchange


@pytest.mark.parametrize(
    ("exchange", "name"),
    [
        (lost_on(1), "result-lost"),
        (lost_on(1, every=True), "result-lost"),
        (lost_on(0, 2), "result-lost"),
        (lost_on(1, value=0.5), None),  # other numbers: not known as lost
        (lost_on(1, columns=slice(None)), None),  # it gets nothing at all
        (lost_on(0, 1, 2), None),  # cleared on all ranks alike
    ],
)
def test_zeros_on_some_ranks_alone_are_a_lost_result(exchange, name):
    lost = [one for one in findings(train(exchange)) if one.name == "result-lost"]
    assert [one.name for one in lost] == [name] * (name is not None)
    for one in lost:
        assert "zeros for 1 of 4 parameters (conv.weight)" in one.evidence[0]


def test_a_lost_result_explains_that_the_weights_part():
    assert told(train(lost_on(1)))[0] == ["result-lost"]


def targets(*counted, **fields):
    """Return changes by which the ranks' losses are means over these numbers of targets."""
    changes = [("backward", "counted", lambda rank, _: counted[rank])]
    return [*changes, *(("backward", name, value) for name, value in fields.items())]


@pytest.mark.parametrize(
    ("exchange", "changes", "times"),
    [
        (mean, targets(512, 40, 128), "12.8 times"),
        (mean, targets(512, 500, 490), None),  # nearly equal
        (mean, targets(512, 40, None), None),
        (mean, targets(512, 40, 128, arriving=0.5), None),  # scaled: by what, nobody knows
        (times(2), targets(512, 40, 128), None),  # another fault
        (
            mean,
            [
                *targets(16, 8, 8),
                ("backward", "samples", lambda rank, _: 8 if rank else 16),
            ],
            None,  # uneven-batches tells it
        ),
    ],
)
def test_means_over_unequal_numbers_of_targets_are_a_notice(exchange, changes, times):
    told = [one for one in findings(train(exchange, changes=changes)) if "targets" in one.name]
    assert [times in one.evidence[0] for one in told] == [True] * (times is not None)
