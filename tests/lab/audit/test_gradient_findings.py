"""lab/audit/findings: what the optimisers get, told from records with known gradients."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.audit.findings.finding import Finding, Right, Unknown
from lab.audit.findings.gradients import check as check_gradients
from lab.audit.findings.gradients.factors import resolve
from lab.audit.findings.weights import check as check_weights
from lab.audit.recording import Recording, read_recording
from lab.audit.result import EqualityVerdict, verdict
from tests.lab.audit.recordings import COLUMNS, Exchange, Numbers, gradients, mean, train


def names(recording: Recording) -> list[str]:
    outcomes = [*check_gradients(recording), *check_weights(recording)]
    return [one.name for one in outcomes if isinstance(one, Finding)]


def same_on_all(row: Numbers, own: Numbers) -> Numbers:
    return np.repeat(row[None], len(own), axis=0)


def verdict_of(recording: Recording) -> EqualityVerdict:
    """Return the verdict on one run, whatever other checks find."""
    unknown = [one.text for one in check_gradients(recording) if isinstance(one, Unknown)]
    unknown += [one.text for one in check_weights(recording) if isinstance(one, Unknown)]
    return verdict([recording], [], unknown)


def weighted(*weights: float) -> Exchange:
    return lambda own, step: same_on_all(np.array(weights) @ own, own)


def total(own: Numbers, step: int) -> Numbers:
    return mean(own, step) * len(own)


def only_some(own: Numbers, step: int) -> Numbers:
    """fc.bias, the last 10 columns, is forgotten."""
    got = mean(own, step)
    got[:, -10:] = own[:, -10:]
    return got


class Late:
    """The exchanged buffer is applied one step late."""

    def __init__(self) -> None:
        self.last: Numbers | None = None

    def __call__(self, own: Numbers, step: int) -> Numbers:
        got = np.zeros_like(own) if self.last is None else self.last
        self.last = mean(own, step)
        return got


def norm_clipped(own: Numbers, step: int) -> Numbers:
    norms = np.linalg.norm(own, axis=1, keepdims=True)
    return mean(own * np.minimum(1, 35 / (norms + 1e-6)), step)


def each_parameter_clipped(own: Numbers, step: int) -> Numbers:
    clipped = own.copy()
    for start, stop, limit in ((0, 216, 15), (216, 224, 2), (224, 624, 20), (624, 634, 3)):
        piece = clipped[:, start:stop]
        piece *= np.minimum(1, limit / np.linalg.norm(piece, axis=1, keepdims=True))
    return mean(clipped, step)


def values_clipped_by_hand(own: Numbers, step: int) -> Numbers:
    return mean(np.clip(own, -0.5, 0.5), step)


def scatter_wrong_list(own: Numbers, step: int) -> Numbers:
    return np.roll(own, 1, axis=0)


def gather_only(own: Numbers, step: int) -> Numbers:
    got = own.copy()
    got[0] = own.mean(axis=0)
    return got


@pytest.mark.parametrize(
    ("exchange", "name"),
    [
        (total, "sum-not-mean"),
        (lambda own, step: total(own, step) / 2, "literal-divisor"),
        (lambda own, step: total(own, step) / 4, "literal-divisor"),
        (lambda own, step: mean(own, step) / len(own), "averaged-twice"),
        (lambda own, step: own, "own-gradient"),
        (scatter_wrong_list, "own-gradient"),
        (gather_only, "own-gradient"),
        (weighted(1, 0, 0), "own-gradient"),
        (weighted(0.5, 0.25, 0.25), "not-the-mean"),
        (only_some, "some-parameters"),
        (Late(), "stale-gradient"),
        (norm_clipped, "clipped-before-averaging"),
        (each_parameter_clipped, "clipped-before-averaging"),
        (values_clipped_by_hand, "value-clipped-before-averaging"),
    ],
)
def test_each_fault_has_its_own_name(exchange: Exchange, name: str, tmp_path: Path) -> None:
    recording = train(tmp_path, exchange)
    assert names(recording) == [name]
    findings = [one for one in check_gradients(recording) if isinstance(one, Finding)]
    assert findings[0].sure == "certain"
    assert verdict([recording], findings).answer == "no"


def test_a_literal_divisor_is_named(tmp_path: Path) -> None:
    found = next(iter(check_gradients(train(tmp_path, lambda own, step: total(own, step) / 2))))
    assert isinstance(found, Finding)
    assert "divided by 2 on 3 ranks" in found.evidence[0]
    assert "1.500 times the mean" in found.evidence[1]


def value_clipped(own: Numbers, step: int) -> Numbers:
    return mean(np.clip(own, -0.5, 0.5), step)


def clip_record(kind: str, limit: float, norm: float | None = None, before: int = 0) -> list[Any]:
    return [kind, limit, norm, before, ["main.py", 9, "clip"]]


def test_value_clipping_before_averaging(tmp_path: Path) -> None:
    def edit(kind: str, rank: int, fields: dict[str, Any]) -> None:
        if kind == "step":
            fields["clips"] = [clip_record("value", 0.5)]

    recording = train(tmp_path, value_clipped, edit=edit)
    assert names(recording) == ["value-clipped-before-averaging"]
    assert str(next(iter(check_gradients(recording))).at) == "main.py:9: clip"  # type: ignore[union-attr]  # a Finding


def test_clipping_that_never_bit_is_a_notice(tmp_path: Path) -> None:
    limit = 1000.0

    def edit(kind: str, rank: int, fields: dict[str, Any]) -> None:
        if kind == "step":
            fields["clips"] = [clip_record("norm", limit, fields["own_norm"])]

    recording = train(tmp_path / "hand", edit=edit)
    found = [one for one in check_gradients(recording) if isinstance(one, Finding)]
    assert [(one.name, one.entry.severity) for one in found] == [("clips-too-early", "notice")]
    assert verdict([recording], found).answer == "yes"
    assert names(train(tmp_path / "ddp", edit=edit, ddp=True)) == []
    limit = float("inf")  # only to learn the norm
    assert names(train(tmp_path / "log", edit=edit)) == []


def clip_after(own: Numbers, step: int) -> Numbers:
    got = mean(own, step)
    return got * min(1.0, 20 / (float(np.linalg.norm(got[0])) + 1e-6))


def test_clipping_after_averaging_is_right(tmp_path: Path) -> None:
    def edit(kind: str, rank: int, fields: dict[str, Any]) -> None:
        if kind == "step":
            own = np.array([gradients(r, fields["step"]) for r in range(3)])
            norm = float(np.linalg.norm(mean(own, 0)[0]))
            fields["clips"] = [clip_record("norm", 20.0, norm, 1)]

    assert names(train(tmp_path / "call", clip_after, edit=edit)) == []
    assert names(train(tmp_path / "hand", clip_after)) == []
    one_value = lambda own, step: np.clip(mean(own, step), -0.5, 0.5)  # noqa: E731

    def values(kind: str, rank: int, fields: dict[str, Any]) -> None:
        if kind == "step":
            fields["clips"] = [clip_record("value", 0.5, None, 1)]

    assert names(train(tmp_path / "value", one_value, edit=values)) == []


def losses(**changes: Any) -> Any:
    def edit(kind: str, rank: int, fields: dict[str, Any]) -> None:
        if kind == "backward":
            fields["loss"] |= changes

    return edit


def test_the_scale_of_the_loss_counts(tmp_path: Path) -> None:
    third = losses(arriving=1 / 3)
    assert names(train(tmp_path / "twice", edit=third)) == ["scaled-in-loss"]
    assert names(train(tmp_path / "sum", total, edit=third)) == []
    assert names(train(tmp_path / "half", edit=losses(arriving=0.5))) == []
    summed = losses(arriving=1 / 24, reduction="sum")
    assert names(train(tmp_path / "global", total, edit=summed)) == []


def test_sums_over_the_tokens_of_all_ranks(tmp_path: Path) -> None:
    """Each rank divides the sum of its losses by the number of all ranks' tokens."""

    def edit(kind: str, rank: int, fields: dict[str, Any]) -> None:
        if kind == "backward":
            fields["loss"] |= {"reduction": "none", "arriving": (4, 9, 5)[rank] / (18 * parts)}

    parts = 1
    assert names(train(tmp_path / "right", total, edit=edit)) == []
    parts = 2
    recording = train(tmp_path / "half", total, edit=edit)
    assert names(recording) == []
    assert verdict_of(recording).answer == "cannot tell"


def test_sum_with_a_rate_divided_by_the_ranks(tmp_path: Path) -> None:
    recordings = [
        train(tmp_path / str(size), total, size=size, rates=lambda rank, size=size: 0.6 / size)
        for size in (2, 3)
    ]
    found = [one for r in recordings for one in check_gradients(r) if isinstance(one, Finding)]
    assert {one.name for one in found} == {"sum-not-mean"}
    assert resolve(found, recordings) == []
    recordings[1] = train(tmp_path / "same rate", total, rates=lambda rank: 0.3)
    assert resolve(found, recordings) == found


def test_half_a_loss_on_two_ranks_only_is_no_division_by_ranks(tmp_path: Path) -> None:
    half = losses(arriving=0.5)
    recordings = [train(tmp_path / str(size), size=size, edit=half) for size in (2, 3)]
    found = [one for r in recordings for one in check_gradients(r) if isinstance(one, Finding)]
    assert [one.sure for one in found] == ["likely"]
    found = [Finding(found[0].name, found[0].evidence, sizes=(2,))]
    assert resolve(found, recordings) == []
    assert resolve(found, recordings[:1]) == found


def accumulated(own: Numbers, step: int) -> Numbers:
    return mean(own, step) / 4


def test_accumulation_divided_by_hand_is_right(tmp_path: Path) -> None:
    def edit(kind: str, rank: int, fields: dict[str, Any]) -> None:
        if kind == "step":
            fields |= {"micro": 4, "own_norm": None}

    assert names(train(tmp_path, accumulated, edit=edit)) == []


def test_grad_scaler_unscales(tmp_path: Path) -> None:
    def edit(kind: str, rank: int, fields: dict[str, Any]) -> None:
        if kind == "step":
            fields["scale"] = 65536.0
        if kind == "backward":
            fields["loss"]["arriving"] = 65536.0

    unscaled = lambda own, step: mean(own, step) / 65536  # noqa: E731
    assert names(train(tmp_path / "unscaled", unscaled, edit=edit)) == []
    assert names(train(tmp_path / "fused", mean, edit=edit)) == []
    summed = lambda own, step: total(own, step) / 65536  # noqa: E731
    assert names(train(tmp_path / "sum", summed, edit=edit)) == ["sum-not-mean"]


def rounded(own: Numbers, step: int) -> Numbers:
    small = (own / len(own)).astype(np.float16).sum(axis=0, dtype=np.float16)
    return same_on_all(small.astype(np.float64), own)


def test_rounding_to_16_bits_is_a_mean(tmp_path: Path) -> None:
    outcomes = list(check_gradients(train(tmp_path, rounded, ddp=True)))
    assert isinstance(outcomes[0], Right)
    assert "rounded to 16 bits" in outcomes[0].text


@pytest.mark.parametrize(
    "exchange",
    [
        lambda own, step: np.sign(mean(own, step)),
        lambda own, step: np.where(np.abs(own) > 1, own, 0).mean(axis=0) + 0 * own,
        lambda own, step: mean(own, step) + np.random.default_rng(step).normal(size=COLUMNS),
    ],
    ids=["sign", "top-k", "noise"],
)
def test_what_is_not_linear_cannot_be_told(exchange: Exchange, tmp_path: Path) -> None:
    recording = train(tmp_path, exchange)
    assert names(recording) == []
    assert verdict_of(recording).answer == "cannot tell"


def test_weight_decay_by_hand_is_right(tmp_path: Path) -> None:
    weights = [np.linspace(-1, 1, COLUMNS)]

    def decayed(own: Numbers, step: int) -> Numbers:
        got = mean(own, step) + 0.05 * weights[-1]
        weights.append(weights[-1] - 0.1 * got[0])
        return got

    assert names(train(tmp_path, decayed)) == []


def test_old_gradients_that_were_never_cleared_are_not_stale(tmp_path: Path) -> None:
    kept: list[Numbers] = [np.zeros((3, COLUMNS))]

    def exchange(own: Numbers, step: int) -> Numbers:
        kept.append(kept[-1] + mean(own, step))
        return kept[-1]

    recording = train(tmp_path, exchange, steps=2)
    assert names(recording) == []
    unknown = [one for one in check_gradients(recording) if isinstance(one, Unknown)]
    assert "zero_grad()" in unknown[0].text


def test_equal_gradients_show_a_sum_but_no_mean(tmp_path: Path) -> None:
    alike = lambda rank, step: gradients(0, step)  # noqa: E731
    recording = train(tmp_path / "mean", own=alike)
    assert names(recording) == []
    assert "cannot tell" in verdict_of(recording).why
    assert verdict_of(recording).answer == "cannot tell"
    assert names(train(tmp_path / "sum", total, own=alike)) == ["sum-not-mean"]
    two = lambda rank, step: gradients(max(rank, 1), step)  # noqa: E731
    assert names(train(tmp_path / "own", lambda own, step: own, own=two)) == ["own-gradient"]
    assert names(train(tmp_path / "two", own=two)) == []


def test_noise_before_batchnorm_and_zeroed_gradients_are_left_out(tmp_path: Path) -> None:
    def own(rank: int, step: int) -> Numbers:
        values = gradients(rank, step)
        values[-10:] = np.random.default_rng([rank, step]).normal(size=10) * 1e-9
        return values

    def exchange(mine: Numbers, step: int) -> Numbers:
        got = mean(mine, step)
        got[:, :216] = 0
        got[:, -10:] = mine[:, -10:] * 3
        return got

    assert names(train(tmp_path, exchange, own=own)) == []


def test_uneven_batches_weighted_by_samples_are_right(tmp_path: Path) -> None:
    def edit(kind: str, rank: int, fields: dict[str, Any]) -> None:
        if kind == "backward":
            fields["loss"]["samples"] = (8, 4, 4)[rank]

    assert names(train(tmp_path, weighted(0.5, 0.25, 0.25), edit=edit)) == []


def test_averaged_weights_are_named(tmp_path: Path) -> None:
    def every_second(weights: Numbers, step: int) -> Numbers:
        return weights if step % 2 == 0 else same_on_all(weights.mean(axis=0), weights)

    own = lambda own, step: own  # noqa: E731
    averaged = train(tmp_path / "averaged", own, after=every_second)
    assert names(averaged) == ["weights-averaged"]
    copied = train(tmp_path / "rank0", own, after=lambda w, step: same_on_all(w[0], w))
    assert names(copied) == ["own-gradient"]


def test_an_unused_group_and_a_bypassed_ddp(tmp_path: Path) -> None:
    def no_calls(kind: str, rank: int, fields: dict[str, Any]) -> None:
        if kind == "call":
            fields |= {"name": "barrier", "bytes": 0}

    own = lambda own, step: own  # noqa: E731
    assert names(train(tmp_path / "unused", own, edit=no_calls)) == []

    def bypass(kind: str, rank: int, fields: dict[str, Any]) -> None:
        if kind == "backward":
            fields["forwards"][0][2] = "bypass"

    assert names(train(tmp_path / "bypass", own, ddp=True, edit=bypass)) == ["ddp-bypassed"]


def test_the_right_run_says_what_is_right(tmp_path: Path) -> None:
    recording = train(tmp_path)
    outcomes = [*check_gradients(recording), *check_weights(recording)]
    texts = [one.text for one in outcomes if isinstance(one, Right)]
    assert texts[0].startswith("the optimiser gets the mean of the ranks' gradients in all 4 steps")
    assert texts[1:] == [
        "all ranks start from the same weights",
        "the ranks' weights stay equal in the watched steps",
    ]
    assert len(outcomes) == 3
    assert verdict_of(recording).answer == "yes"


def test_an_optimiser_whose_gradients_nobody_saw_is_named(tmp_path: Path) -> None:
    train(tmp_path)
    row = ["1.0.0", "critic.weight", [4], "float32", 4, 0, 4]
    for rank in range(3):
        with (tmp_path / f"{1000 + rank}.jsonl").open("a", encoding="utf-8") as file:
            records: list[dict[str, Any]] = [{"k": "params", "optimizer": "SGD", "rows": [row]}]
            records += [{"k": "step", "step": 0, "own": None, "got": None, "sent": None}]
            for record in records:
                file.write(json.dumps({"t": 1.0, "o": 1, **record}) + "\n")
    recording = read_recording(tmp_path)
    outcomes = [*check_gradients(recording)]
    assert [type(one) for one in outcomes] == [Right, Unknown]
    assert "the optimiser of critic.weight took no step" in outcomes[1].text
    assert verdict_of(recording).answer == "cannot tell"


def test_weights_that_differ_are_named_once(tmp_path: Path) -> None:
    def start(rank: int) -> Numbers:
        return np.random.default_rng(rank).normal(size=COLUMNS)

    def nudge(weights: Numbers, step: int) -> Numbers:
        if step == 1:
            weights[2] *= 1.01
        return weights

    def state(kind: str, rank: int, fields: dict[str, Any]) -> None:
        if kind == "stepped":
            fields["state"] = rank // 2

    assert names(train(tmp_path / "start", start=start)) == ["different-start"]
    assert names(train(tmp_path / "nudge", after=nudge)) == ["weights-diverge"]
    assert names(train(tmp_path / "state", after=nudge, edit=state)) == [
        "different-optimizer-state"
    ]
    assert names(train(tmp_path / "sharded", edit=state)) == []
    rates = lambda rank: 0.1 * (rank + 1)  # noqa: E731
    assert names(train(tmp_path / "rates", rates=rates)) == ["different-learning-rates"]


def test_missing_ranks_and_records_break_nothing(tmp_path: Path) -> None:
    recording = train(tmp_path)
    recording.ranks.pop()
    assert names(recording) == []
    assert verdict_of(recording).answer == "cannot tell"
    assert verdict([], []).answer == "cannot tell"
