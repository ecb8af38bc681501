"""lab/evidence: what the optimisers got, told from matrices of weights, without any rank."""

import numpy as np
import pytest

from lab.evidence import CURES, RULES, Evidence, explain, explain_parameters, judge


def numbers(size, seed=0):
    return np.random.default_rng(seed).normal(size=(size, 60))


def found(weights, own=None, **known):
    """Return the judgement of ranks that get their own gradients by these weights."""
    weights = np.array(weights, dtype=float)
    own = numbers(len(weights)) if own is None else own
    return judge(explain(own, weights @ own, **known))


def patterns(size):
    """Return weights on ``size`` ranks by what they are, with the pattern and the audit's name."""
    mean = np.full((size, size), 1 / size)
    eye = np.eye(size)
    first = np.ones(size)
    first[0] = 0
    twice = np.ones(size)
    twice[0] = 2
    literal = ("literal", "literal-divisor")
    by_2 = {2: ("mean", "")}.get(size, literal)
    by_4 = {2: ("twice", "averaged-twice"), 4: ("mean", "")}.get(size, literal)
    left_out = ("left out", "not-the-mean") if size > 2 else ("one rank's", "own-gradient")
    own_left_out = ("own left out" if size > 2 else "another's", "not-the-mean")
    return {
        "mean": (mean, "mean", ""),
        "sum": (mean * size, "sum", "sum-not-mean"),
        "divided twice": (mean / size, "twice", "averaged-twice"),
        "by 2": (mean * size / 2, *by_2),
        "by 4": (mean * size / 4, *by_4),
        "zero": (mean * 0, "zero", "not-the-mean"),
        "own": (eye, "own", "own-gradient"),
        "own, divided": (eye / size, "own", "own-gradient"),
        "rank 1 to all": (np.tile(eye[1], (size, 1)), "one rank's", "own-gradient"),
        "only rank 0": (np.vstack([mean[0], eye[1:]]), "some have it", "own-gradient"),
        "rank 0 left out": (np.tile(first / size, (size, 1)), *left_out),
        "rank 0 twice": (np.tile(twice / size, (size, 1)), "counted twice", "not-the-mean"),
        "the next one's": (np.roll(eye, 1, axis=0), "another's", "not-the-mean"),
        "own left out": ((1 - eye) / size, *own_left_out),
        "odd factor": (mean * 0.37, "factor", "not-the-mean"),
    }


CASES = [
    pytest.param(*case, id=f"{name} on {size}")
    for size in (2, 3, 4, 5)
    for name, case in patterns(size).items()
]


@pytest.mark.parametrize(("weights", "pattern", "finding"), CASES)
def test_each_matrix_has_one_name(weights, pattern, finding):
    assert found(weights)[:2] == (pattern, finding)
    stored = judge(Evidence(np.array(weights), residue=1e-7))
    assert stored[:2] == (pattern, finding)
    assert stored.right == (not finding)


SENTENCES = {  # on 3 ranks, what the sentence holds
    "sum": "added up and never divided",
    "divided twice": "divided by 3 twice",
    "by 2": "divided by 2, not by the number of ranks",
    "own": "each rank keeps its own gradient",
    "rank 1 to all": "every rank gets rank 1's gradient",
    "only rank 0": "the mean comes to rank 0 only",
    "rank 0 left out": "rank 0's own gradient is missing from the sum",
    "rank 0 twice": "rank 0's gradient is counted twice",
    "the next one's": "each rank gets one rank's gradient",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_each_of_the_usual_mistakes_is_told_in_its_own_sentence(name):
    sentences = {other: found(weights).sentence for other, (weights, *_) in patterns(3).items()}
    assert [other for other, text in sentences.items() if SENTENCES[name] in text] == (
        ["own", "own, divided"] if name == "own" else [name]
    )


HALF = [0.5, 0.5, 0, 0]
PAIRS = [HALF, HALF, HALF[::-1], HALF[::-1]]
BETWEEN = [frozenset({0, 2}), frozenset({1, 3})]
UNEVEN = [frozenset({0, 1}), frozenset({2})]


@pytest.mark.parametrize(
    ("weights", "groups", "pattern", "words"),
    [
        (PAIRS, (), "inside groups", "the mean of its own group alone: ranks 0 and 1; ranks 2"),
        (np.array(PAIRS) / 2, (), "inside groups", "0.500 times the mean of its own group"),
        ([[1 / 4] * 4, HALF, [1 / 4] * 4, HALF], BETWEEN, "one group", "ranks 0 and 2"),
        ([[1 / 4] * 4, HALF, [1 / 4] * 4, HALF], (), "some have it", "ranks 0 and 2 only"),
        ([[1 / 2] * 4] * 4, BETWEEN, "by a group", "divided by 2, sizes of groups"),
        ([[1 / 8] * 4] * 4, BETWEEN, "twice by a group", "by the size of a group"),
        ([[1 / 4, 1 / 4, 1 / 2]] * 3, UNEVEN, "unequal groups", "0.5000 times in a group of 1"),
        ([[1 / 6, 1 / 6, 1 / 3]] * 3, UNEVEN, "groups again", "divided by 3"),
        ([[1 / 4, 1 / 4, 1 / 2]] * 3, (), "counted twice", "rank 2's"),
        ([[1 / 2, 0, 1 / 2, 0]] * 4, BETWEEN, "left out", "ranks 1 and 3 are missing"),
        ([[0.1, 0.2, 0.7]] * 3, (), "unequal", "0.1000, 0.2000, 0.7000 times"),
        ([[3 / 5, 1 / 5, 1 / 5]] * 3, (), "unequal", "rank 0's gradient counts 3 times"),
        ([[1 / 3] * 3, [1] * 3, [1] * 3], (), "multiples", "different multiples"),
        ([[1, 1, 0], [0, 1, 1], [1, 0, 1]], (), "mixed", "unequally"),
    ],
)
def test_sums_over_groups_and_unequal_ones_have_names(weights, groups, pattern, words):
    judgement = found(weights, groups=groups)
    assert judgement.pattern == pattern
    assert words in judgement.sentence
    assert judgement.cure


def test_ranks_that_count_by_their_samples_are_right():
    weights = [[0.5, 0.3, 0.2]] * 3
    assert found(weights, samples=[5, 3, 2]).pattern == "by samples"
    assert found(weights, samples=[5, 3, 0]).pattern == "unequal"


def test_ranks_that_computed_the_same_may_still_keep_their_own():
    own = numbers(4)
    own[1] = own[0]
    assert found(np.eye(4), own).pattern == "own"
    assert found(np.full((4, 4), 1 / 4), own).right
    assert not found(np.tile(np.eye(4)[0], (4, 1)), own).right
    assert found(np.eye(4), np.tile(own[0], (4, 1))).right  # the mean is each rank's own


@pytest.mark.parametrize("noise", [0.01, np.nan])
def test_what_is_no_sum_is_no_mean(noise):
    own = numbers(3)
    got = np.tile(own.mean(axis=0), (3, 1))
    got[1, 7] += noise * 10
    evidence = explain(own, got)
    assert evidence.explained.tolist() == [True, False, True]
    assert judge(evidence).pattern == "no sum"
    assert "rank 1 gets" in judge(evidence).sentence
    assert not evidence.right


def test_a_stored_residue_is_believed():
    mean = np.full((2, 2), 0.5)
    assert judge(Evidence(mean, residue=0.01)).pattern == "no sum"
    assert judge(Evidence(mean, residue=0.01, rounded=True)).right
    assert not judge(Evidence(np.full((2, 2), 0.4985))).right
    assert judge(Evidence(np.full((2, 2), np.nan), residue=0.0)).pattern == "no sum"


def test_rounding_errors_before_batchnorm_say_nothing():
    own = numbers(3)
    got = np.tile(own.mean(axis=0), (3, 1))
    own[:, 50:] *= 1e-9
    got[:, 50:] = numbers(3, seed=1)[:, 50:] * 1e-9
    assert judge(explain(own, got, columns=[slice(0, 50), slice(50, 60)])).right
    own[:, 50:] *= 1e6
    got[:, 50:] *= 1e6
    assert not judge(explain(own, got, columns=[slice(0, 50), slice(50, 60)])).right


def test_a_parameter_that_is_left_out_is_told_from_the_others():
    own = numbers(3)
    got = np.tile(own.mean(axis=0), (3, 1))
    got[:, 50:] = own[:, 50:]
    parts = explain_parameters(own, got, [slice(0, 20), slice(20, 50), slice(50, 60)])
    assert [judge(part).pattern for part in parts] == ["mean", "mean", "own"]
    single = explain_parameters(own[:, :2], got[:, :2], [slice(0, 1), slice(1, 2)])
    assert all(part.right for part in single)


def test_every_finding_has_a_cure():
    assert {rule.finding for rule in RULES} - {""} <= CURES.keys()
