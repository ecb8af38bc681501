"""lab/audit/findings: what the optimisers get, told from records with known gradients."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lab.audit.findings import without_explained
from lab.audit.findings.finding import Finding, Right, Unknown
from lab.audit.findings.gradients import check as check_gradients
from lab.audit.findings.gradients import resolve
from lab.audit.findings.weights import check as check_weights
from lab.audit.recording import read_recording
from lab.audit.result import verdict
from tests.lab.audit.recordings import COLUMNS, gradients, mean, train

Edit = Callable[[str, int, dict[str, Any]], None]


def told(recording):
    """Return the names of what is found, and the verdict, whatever other checks find."""
    outcomes = [*check_gradients(recording), *check_weights(recording)]
    found = without_explained([one for one in outcomes if isinstance(one, Finding)])
    unknown = [one.text for one in outcomes if isinstance(one, Unknown)]
    return [one.name for one in found], verdict([recording], found, unknown).answer


def findings(recording):
    return [one for one in check_gradients(recording) if isinstance(one, Finding)]


def to_all(row, own):
    return np.repeat(row[None], len(own), axis=0)


def times(factor):
    return lambda own, step: mean(own, step) * factor


def weighted(*weights):
    return lambda own, step: to_all(np.array(weights) @ own, own)


def nothing_sent(own, step):
    return own


def reduce_only(own, step):
    """Rank 0 gets the mean; what the others get is no gradient."""
    return np.concatenate([own.mean(axis=0)[None], np.sign(own[1:])])


def late(own, step):
    size = range(len(own))
    before = np.array([gradients(rank, max(step - 1, 0)) for rank in size])
    return mean(before, step) if step else np.zeros_like(own)


def others_late(own, step):
    before = late(own, step) if step else mean(own, 0)
    old = np.array([gradients(rank, max(step - 1, 0)) for rank in range(len(own))])
    return before + (own - old) / len(own)


def never_cleared(own, step):
    return mean(own, step) + (late(own, step) if step else 0)


def norm_clipped(own, step):
    norms = np.linalg.norm(own, axis=1, keepdims=True)
    return mean(own * np.minimum(1, 35 / (norms + 1e-6)), step)


def values_clipped(limit):
    return lambda own, step: mean(np.clip(own, -limit, limit), step)


def clipped_after(own, step):
    got = mean(own, step)
    return got * min(1.0, 20 / (float(np.linalg.norm(got[0])) + 1e-6))


def decayed(own, step):
    """Add a weight decay by hand, with the weights that SGD reaches."""
    weights = np.linspace(-1, 1, COLUMNS)
    for i in range(step + 1):
        mine = np.array([gradients(rank, i) for rank in range(3)])
        got = mean(mine, i) + 0.05 * weights
        weights = weights - 0.1 * got[0]
    return got


def noisy(own, step):
    return mean(own, step) + np.random.default_rng(step).normal(size=COLUMNS)


def edit(kind, **changes):
    """Return what changes the records of a kind; a function gets the rank and the fields."""

    def change(of, rank, fields):
        target = fields.get("loss", fields) if of == "backward" else fields
        for name, value in changes.items() if of == kind else ():
            target[name] = value(rank, fields) if callable(value) else value

    return change


def clip(kind, limit, *, before=0):
    def clips(rank, fields):
        own = np.array([gradients(r, fields["step"]) for r in range(3)])
        norm = fields["own_norm"] if before == 0 else float(np.linalg.norm(own.mean(axis=0)))
        return [[kind, limit, norm, before, ["main.py", 9, "clip"]]]

    return edit("step", clips=clips)


def of_scaler(of, rank, fields):
    edit("step", scale=65536.0)(of, rank, fields)
    edit("backward", arriving=65536.0)(of, rank, fields)


def of_tokens(share):
    """Each rank divides the sum of its losses by the number of all ranks' tokens."""
    part = lambda rank, fields: (4, 9, 5)[rank] / 18 * share  # noqa: E731
    return edit("backward", reduction="none", arriving=part)


same = lambda kind, rank, fields: None  # noqa: E731
third = edit("backward", arriving=1 / 3)
ROWS = [
    ("divided by 2.5", times(3 / 2.5), same, [], "cannot tell"),
    ("reduce only", reduce_only, same, ["not-the-mean"], "no"),
    ("weighted", weighted(0.5, 0.25, 0.25), same, ["not-the-mean"], "no"),
    ("never cleared", never_cleared, same, [], "cannot tell"),
    ("others late", others_late, same, ["stale-gradient", "weights-diverge"], "no"),
    ("norm by hand", norm_clipped, same, ["clipped-before-averaging"], "no"),
    ("loose value", values_clipped(2.5), same, ["value-clipped-before-averaging"], "no"),
    ("norm, no effect", mean, clip("norm", 1000), ["clips-too-early"], "yes"),
    ("norm, measured", mean, clip("norm", float("inf")), [], "yes"),
    ("norm after by hand", clipped_after, same, [], "yes"),
    ("half a loss", mean, edit("backward", arriving=0.5), [], "yes"),
    ("sums", times(3), edit("backward", reduction="sum", arriving=1 / 24), [], "yes"),
    ("plain sums", times(3), edit("backward", reduction="sum"), [], "yes"),
    ("tokens", times(3), of_tokens(1), [], "yes"),
    ("half the tokens", times(3), of_tokens(0.5), [], "cannot tell"),
    ("accumulated", times(1 / 4), edit("step", micro=4, own_norm=None), [], "yes"),
    ("fused", mean, of_scaler, [], "yes"),
    ("unscaled sum", times(3 / 65536), of_scaler, ["sum-not-mean"], "no"),
    ("weight decay by hand", decayed, same, [], "yes"),
    ("sign", lambda own, s: np.sign(mean(own, s)), same, [], "cannot tell"),
    ("top-k", lambda own, s: mean(np.where(abs(own) > 1, own, 0), s), same, [], "cannot tell"),
    ("noise", noisy, same, [], "cannot tell"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_exchange_has_its_own_name(row, tmp_path):
    _, exchange, change, names, answer = row
    steps = 2 if exchange is never_cleared else 4
    recording = train(tmp_path, exchange, edit=change, steps=steps)
    assert told(recording) == (names, answer)


def test_evidence_has_the_numbers_and_the_line(tmp_path):
    (literal,) = findings(train(tmp_path / "literal", times(3 / 2)))
    assert "divided by 2 on 3 ranks" in literal.evidence[0]
    assert "1.500 times" in literal.evidence[0]
    (cut,) = findings(train(tmp_path / "cut", norm_clipped, edit=clip("norm", 35)))
    norm = np.linalg.norm(gradients(0, 0))
    assert f"rank 0's gradient is cut to {35 / norm:.1%} of its length" in cut.evidence[0]
    assert str(cut.at) == "main.py:9: clip"


def test_another_size_may_contradict(tmp_path):
    def of_sizes(name, **options):
        runs = [
            train(
                tmp_path / f"{name}{n}", times(n), size=n, rates=lambda r, n=n: rate / n, **options
            )
            for n in (2, 3)
        ]
        return [one for run in runs for one in findings(run)], runs

    rate = 0.6  # the learning rate is divided by the ranks: the sum is right
    found, runs = of_sizes("sum")
    assert [one.name for one in found] == ["sum-not-mean"] * 2
    assert resolve(found, runs) == []
    runs[1] = train(tmp_path / "same rate", times(3), rates=lambda rank: 0.3)
    assert resolve(found, runs) == found
    half = [
        train(tmp_path / f"half{n}", size=n, edit=edit("backward", arriving=0.5)) for n in (2, 3)
    ]
    found = [one for run in half for one in findings(run)]
    assert [(one.name, one.sure) for one in found] == [("scaled-in-loss", "likely")]
    found = [Finding(found[0].name, found[0].evidence, sizes=(2,))]
    assert resolve(found, half) == []
    assert resolve(found, half[:1]) == found


def test_equal_gradients_show_a_sum_but_no_mean(tmp_path):
    alike = lambda rank, step: gradients(0, step)  # noqa: E731
    two = lambda rank, step: gradients(max(rank, 1), step)  # noqa: E731
    for name, exchange, own, expected in (
        ("mean", mean, alike, ([], "cannot tell")),
        ("clipped", clipped_after, alike, ([], "cannot tell")),
        ("sum", times(3), alike, (["sum-not-mean"], "no")),
        ("two", mean, two, ([], "yes")),
        ("two own", nothing_sent, two, (["own-gradient"], "no")),
    ):
        change = clip("norm", 20) if name == "clipped" else same
        recording = train(tmp_path / name, exchange, own=own, edit=change)
        assert told(recording) == expected, name


def test_a_single_number_is_its_own_rather_than_a_multiple_of_the_mean(tmp_path):
    one = lambda rank, step: np.append(np.zeros(COLUMNS - 1), rank + 1.0)  # noqa: E731
    assert told(train(tmp_path / "own", nothing_sent, own=one)) == (["own-gradient"], "no")
    assert told(train(tmp_path / "sum", times(3), own=one)) == (["sum-not-mean"], "no")
    assert told(train(tmp_path / "mean", own=one)) == ([], "yes")


def test_what_is_rounding_in_one_step_may_be_measured_in_the_next(tmp_path):
    def own(rank, step):
        noise = np.full(10, 1e-9 if step % 2 else 1e-5)
        return np.append(gradients(rank, step)[:-10], noise * (rank + 1))

    def one_late(mine, step):
        return mean(np.array([own(rank, max(step - 1, 0)) for rank in range(3)]), step)

    assert told(train(tmp_path, one_late, own=own)) == (["stale-gradient"], "no")


def test_noise_before_batchnorm_and_zeroed_gradients_are_left_out(tmp_path):
    def own(rank, step):
        values = gradients(rank, step)
        values[-10:] = np.random.default_rng([rank, step]).normal(size=10) * 1e-9
        return values

    def exchange(mine, step):
        got = mean(mine, step)
        got[:, :216], got[:, -10:] = 0, mine[:, -10:] * 3
        return got

    assert told(train(tmp_path, exchange, own=own))[0] == []


def test_an_optimiser_whose_gradients_nobody_saw_is_named(tmp_path):
    train(tmp_path)
    row = ["1.0.0", "critic.weight", [4], "float32", 4, 99]
    step = {
        "k": "step",
        "step": 0,
        "own": [0, 0],
        "got": [0, 0],
        "optimizer": "SGD",
        "scale": 1,
        "clips": [],
    }
    for rank in range(3):
        with (tmp_path / f"{1000 + rank}.jsonl").open("a", encoding="utf-8") as file:
            records = [{"k": "params", "built": 0, "rows": [row]}]
            for record in [*records, step | {"lr": [0.1], "settings": {}}]:
                file.write(json.dumps({"t": 1.0, "o": 1, **record}) + "\n")
    recording = read_recording(tmp_path)
    outcomes = [*check_gradients(recording)]
    assert [type(one) for one in outcomes] == [Right, Unknown]
    assert "critic.weight" in outcomes[1].text  # type: ignore[union-attr]  # it is Unknown
    assert told(recording)[1] == "cannot tell"


def test_weights_that_differ_are_named_once(tmp_path):
    def nudge(weights, step):
        weights[2] *= 1.01 if step == 1 else 1
        return weights

    states = edit("stepped", state=lambda rank, fields: rank // 2)
    start = lambda rank: np.random.default_rng(rank).normal(size=COLUMNS)  # noqa: E731
    for options, expected in (
        ({"start": start, "steps": 0, "ddp": True}, ["different-start"]),
        ({"after": nudge, "edit": states}, ["different-optimizer-state"]),
        ({"edit": states}, []),
    ):
        assert told(train(tmp_path / str(id(options)), **options))[0] == expected  # type: ignore[arg-type]  # a table


def test_a_missing_rank_breaks_nothing(tmp_path):
    recording = train(tmp_path)
    recording.ranks.pop()
    assert told(recording) == ([], "cannot tell")
    assert verdict([], []).answer == "cannot tell"
