"""Whether every optimiser gets the mean of what the ranks computed.

``check`` explains each update (gradient_fit.py) and judges all updates of an optimiser together,
since a fault holds in all of them, by the gravest kind among them; the judges follow. ``resolve``
compares runs of several sizes.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, found
from lab.audit.findings.gradient_fit import Update, fit
from lab.audit.findings.weights import SAME, Replicas, shortlist
from lab.audit.findings.where import (
    backward_line,
    bypasses_ddp,
    ends_without_sync,
    exchange_line,
    exchanges,
    first_line,
    lasting_optimizers,
    recording_exchanges,
    samples_of,
    unawaited,
    uses_ddp,
)
from lab.audit.recording import CodeLine, Recording

_CLASSIFIERS = ("NllLoss", "CrossEntropy", "BinaryCrossEntropy")
_UNEXPLAINED = {"unknown", "kept", "stale"}
# The kinds of updates of which the fit has said it all.
_FAULTS = {
    "norm": "clipped-before-averaging",
    "value": "value-clipped-before-averaging",
    "extreme": "not-the-mean",
    "weighted": "not-the-mean",
    "parameters": "some-parameters",
}


def check(recording: Recording) -> Iterator[Outcome]:
    """Check what the optimisers get; see lab/audit/findings/finding.py."""
    stepping = {rank.rank for rank in recording.ranks if rank.by_kind["step"]}
    if recording.size < 2:
        yield Unknown("gradients: one rank alone has nothing to average")
    elif any(rank.by_kind["fsdp"] for rank in recording.ranks):
        yield Unknown(
            "gradients: FSDP gives each rank a part of every parameter, which cannot be compared"
            " with the gradients of whole parameters that each rank computed"
        )
    elif missing := sorted(set(range(recording.size)) - stepping):
        yield Unknown(
            "gradients: no step of a torch optimiser was seen on rank"
            f" {', '.join(map(str, missing))}"
        )
    else:
        numbers = [*chain.from_iterable(lasting_optimizers(recording))]
        for replicas in [Replicas(recording, o) for o in numbers]:
            name = f" of {replicas.names[0]}" if numbers[1:] else ""
            yield from _check_optimizer(replicas, f"the optimiser{name}")


def _check_optimizer(replicas: Replicas, whose: str) -> Iterator[Outcome]:
    recording = replicas.recording
    steps = sorted(replicas.own.keys() & replicas.got.keys())
    updates = [one for one in (Update(replicas, step) for step in steps) if one.known]
    computed = [one for one in updates if any(record["micro"] for record in one.records)]
    received = [one for one in computed or updates if one.kind != "nothing"]
    telling = [one for one in received if not (one.is_mean and one.alike)] or received
    if telling:
        yield _judge(recording, whose, telling)
        yield from _clipped_multiple(recording, telling)
        if all(one.is_mean for one in telling) and not uses_ddp(recording):
            yield from _early_clips(recording, telling)
    elif updates:
        yield Unknown(
            f"gradients: {whose} gets none, or zeros, in all {len(updates)} steps (is"
            " zero_grad() called between backward() and step(), or is the loss constant?)"
        )
    else:
        yield Unknown(
            f"gradients: {whose} took no step of which all ranks saw the gradients: the ranks"
            " hold different parameters in it, or copies of those that backward() fills"
        )


def _judge(recording: Recording, whose: str, updates: list[Update]) -> Outcome:
    kinds = {one.kind for one in updates}
    grave = kinds & _UNEXPLAINED or kinds & {"rows"} or kinds - {"mean"}
    bad = [one for one in updates if one.kind in grave] or updates
    line = exchange_line(recording, updates[0].step) or backward_line(recording)
    values: dict[str, Any] = {
        "step": bad[0].step,
        "bad": len(bad),
        "steps": len(updates),
        "size": bad[0].size,
    }
    if not grave:
        return _mean(recording, whose, updates, line, values)
    if grave <= _UNEXPLAINED:
        return _unexplained(recording, updates, bad, values)
    if grave == {"rows"}:
        return _rows(recording, bad, line, values)
    kind, (how, *names) = bad[0].kind, bad[0].texts
    always = [name for name in names if all(name in one.texts for one in bad)]
    changes = len(bad) < len(updates) and kind not in ("norm", "value")
    if len(grave) > 1 or changes or (names and not always):
        return Unknown("gradients: the ranks' gradients are combined differently from step to step")
    values |= {"names": shortlist(always), "some": len(always), "every": len(bad[0].names)}
    line = _clip_line(bad, kind) or (exchange_line(recording, bad[0].step) if names else line)
    return found(_FAULTS[kind], line, kind=kind, how=how, weights=how, **values)


def _clip_line(updates: list[Update], kind: str) -> CodeLine | None:
    return first_line(clip for one in updates for row in one.clips(kind) for clip in row)


def _unexplained(
    recording: Recording, updates: list[Update], bad: list[Update], values: dict[str, Any]
) -> Outcome:
    """Judge updates that are no sum of the ranks' gradients, or one with old gradients."""
    where = f"gradients: in step {bad[0].step}"
    if {one.kind for one in updates if one.step > 0} == {"stale"}:
        return found("stale-gradient", step=max(1, bad[0].step))
    if all(ends_without_sync(recording, one.step) for one in updates):
        return found("own-gradient", backward_line(recording), kind="no_sync", **values)
    if bad[0].kind == "kept":
        return Unknown(
            f"{where} .grad still holds gradients of the step before (is zero_grad() missing?)"
        )
    near = (
        ", as after lossy compression or with added noise; the nearest one is"
        f" {bad[0].total:.2f} times the mean"
    )
    return Unknown(
        f"{where} what the optimiser gets is not a weighted sum of what the ranks computed"
        f" (relative error {bad[0].residue:.0e}){near if bad[0].residue < 0.1 else ''}"
    )


def _rows(
    recording: Recording, bad: list[Update], line: CodeLine | None, values: dict[str, Any]
) -> Outcome:
    """Judge updates with one rank's own gradient: what do the ranks exchange in its place?"""
    all_own = all(text.endswith("its own") for one in bad for text in one.texts)
    if all_own and bypasses_ddp(recording):
        return found("ddp-bypassed", backward_line(recording), **values)
    if not recording_exchanges(recording):  # group-unused says it if they were to train together
        return Unknown("gradients: the ranks exchange nothing")
    if equal := [one for one in bad if _ends_equal(one)]:
        return _equal_weights(equal[0], all_own)
    mixing = [one.step for one in bad if exchanges(recording, one.step, "weights")]
    averaging = any(exchanges(recording, one.step, "gradient") for one in bad)
    if all_own and 2 * len(mixing) >= len(bad) and not averaging:
        line, values = exchange_line(recording, mixing[0]), values | {"mixed": len(mixing)}
        return found("weights-averaged", line, kind="exchanged", sure=False, **values)
    if len(bad) == 1 < values["steps"]:
        return Unknown(
            f"gradients: the optimisers get the mean in all steps but step {bad[0].step}"
        )
    single = all(text.endswith(("own", "the mean")) for text in bad[0].texts)
    lost = unawaited(recording, bad[0].step)
    own = "unawaited" if lost else "own"
    rows = "; ".join(f"rank {r} gets {text}" for r, text in enumerate(bad[0].texts))
    values |= {"kind": own if all_own else "rows", "rows": rows, "lost": lost}
    name, sure = "own-gradient" if single else "not-the-mean", len(bad) == values["steps"]
    return found(name, line, sure=sure, **values)


def _ends_equal(one: Update) -> bool:
    """Return whether the weights are the same on all ranks after an update that was not."""
    size, moved = np.linalg.norm(one.before[0]), np.linalg.norm(one.after[0] - one.before[0])
    apart = np.linalg.norm(one.after - one.after[0], axis=1).max()
    same = apart <= min(SAME * (one.step + 1) * size, 1e-2 * moved)
    return bool(same and moved > 1e-7 * size and not np.allclose(one.got, one.got[0], atol=0))


def _equal_weights(one: Update, all_own: bool) -> Outcome:
    """Judge ranks that make their weights equal: do they all take those of one rank?"""
    if not all_own:
        return Unknown(
            f"gradients: in step {one.step} the optimisers get different gradients, but afterwards"
            " the ranks make their weights equal"
        )
    weights, errors = fit(one.got, one.after[:1] - one.before[:1], one.columns)
    along = np.flatnonzero(np.abs(weights[0]) > 1e-2 * np.abs(weights).max())
    if errors[0] < 1e-2 and len(along) == 1:
        return found("own-gradient", kind="copied", step=one.step, rank=along[0])
    return found("weights-averaged", kind="equal", step=one.step)


def _mean(
    recording: Recording,
    whose: str,
    updates: list[Update],
    line: CodeLine | None,
    values: dict[str, Any],
) -> Outcome:
    """Judge updates that are the mean times a number.

    A sum is right if each rank divides its loss by the number of ranks, and a mean of such losses
    is not: what counts is that number times the weight with which the losses are differentiated.
    """
    first, totals = updates[0], np.array([one.total for one in updates])
    cuts = np.array([one.cuts[0] if np.ptp(one.cuts) < 1e-3 else 1.0 for one in updates])
    sizes = [one.records[0]["got_norm"] or 0.0 for one in updates if not one.is_mean]
    one_norm = len(sizes) > 1 and np.ptp(sizes) < 1e-3 * max(sizes)
    if one_norm and totals.max() < 1.001 and np.ptp(totals) > 1e-2:  # cut to it by hand
        cuts = totals
    totals, tolerance = totals / cuts, 10 * first.tolerance
    if np.ptp(totals) > tolerance * np.abs(totals).max():
        return Unknown(
            "gradients: the optimiser gets the mean times a factor that changes from step to step"
            f" ({totals[0]:.3f} in step {first.step}, then {totals[1]:.3f})"
        )
    if np.abs(totals - 1).max() >= 2e-3:
        return _multiple(recording, updates, line, values | {"total": float(totals[0])})
    if all(one.alike for one in updates):
        if bypasses_ddp(recording) and not exchanges(recording, first.step):
            return found("ddp-bypassed", backward_line(recording), **values)
        return Unknown(
            f"gradients: all ranks compute the same gradient for {whose}, so the audit"
            " cannot tell the mean from one rank's"
        )
    weight, ways, classify = _losses(recording, updates)
    micro, sure = first.records[0]["micro"] or 1, first.size > 2
    again = _near(weight * first.size) or _near(weight * first.size / micro)
    meant = ways != {"mean"} or not (classify or sure)  # half the squared error is a common loss
    if again and not meant and not _near(weight) and cuts.min() > 0.999:
        return found("scaled-in-loss", backward_line(recording), sure=sure, **values)
    extras = {text for one in updates for text in one.texts}
    extras |= {"then clipped"} if cuts.min() < 0.999 else set()
    worst = max(one.residue for one in updates)
    limit = f"{10 ** np.ceil(np.log10(max(worst, 1e-16))):.0e}"  # the same for most runs
    return Right(
        f"{whose} gets the mean of the ranks' gradients in every watched step"
        f" (relative error at most {limit}{''.join(', ' + one for one in sorted(extras))})"
    )


def _clipped_multiple(recording: Recording, updates: list[Update]) -> Iterator[Outcome]:
    """Yield what else is wrong where clipped gradients are added up, but not divided by the ranks.

    A course may ask for clipping before the exchange; a sum is wrong there as well.
    """
    clipped = [one for one in updates if one.kind in ("norm", "value")]
    totals, tolerance = np.array([one.total for one in clipped]), 10 * updates[0].tolerance
    if (
        clipped
        and {one.kind for one in updates} <= {"mean", clipped[0].kind}
        and np.abs(totals - 1).max() >= tolerance > np.ptp(totals) / 9
    ):
        yield _multiple(
            recording,
            clipped,
            exchange_line(recording, clipped[0].step) or backward_line(recording),
            {"size": clipped[0].size, "steps": len(clipped), "total": float(totals[0])},
        )


def _near(value: float, tolerance: float = 1e-3) -> bool:
    return abs(value - 1) < tolerance


def _losses(recording: Recording, updates: list[Update]) -> tuple[float, set[Any], bool]:
    """Return the weight of the losses of an optimiser's steps, their reductions, if they classify.

    The weight is what those of all samples' losses in a step add up to, divided by the number of
    ranks: 1 for a mean on each rank. 0 if a loss was not seen, or whose it is. Sums that are not
    divided are meant to be added up over the ranks as well.
    """
    scales = {one.step: float(one.records[0]["scale"] or 1) for one in updates}
    backwards = [one for rank in recording.ranks for one in rank.by_kind["backward"]]
    backwards = [one for one in backwards if one["step"] in scales]
    losses, weights = [one["loss"] or {} for one in backwards], []
    for backward, loss in zip(backwards, losses, strict=True):
        arriving = abs(loss.get("arriving") or 0.0) / scales[backward["step"]]
        added = 1 / recording.size if _near(arriving) else samples_of(backward)
        counts = {"mean": 1, "none": 1, "sum": added}
        weights.append(arriving * counts.get(str(loss.get("reduction")), 0))
    steps = [one for rank in recording.ranks for one in rank.by_kind["step"]]
    known = all(weights) and all(one["o"] == updates[0].records[0]["o"] for one in steps)
    classify = all(str(one.get("node")).startswith(_CLASSIFIERS) for one in losses)
    weight = sum(weights) / recording.size / len(scales) if known else 0.0
    return weight, {one.get("reduction") for one in losses}, classify


def _multiple(
    recording: Recording, updates: list[Update], line: CodeLine | None, values: dict[str, Any]
) -> Outcome:
    """Judge a constant multiple of the mean."""
    tolerance, size, total = 10 * updates[0].tolerance, updates[0].size, values["total"]
    (weight, ways, _), ddp = _losses(recording, updates), uses_ddp(recording)
    micro = updates[0].records[0]["micro"] or 1
    added, twice = _near(total / size, tolerance), _near(total * size, tolerance)
    if _near(total * weight, tolerance) or (micro > 1 and _near(total * micro, tolerance)):
        return Right("the losses' scale and the exchange together give the mean of all samples")
    if added and ways == {"mean"}:
        return found("sum-not-mean", line, sure=weight > 0, **values)
    if twice and (ddp or size > 2):
        return found("averaged-twice", line, **values)
    divisor = 1 / total if ddp else size / total
    whole = round(divisor)
    if 1 < whole <= 16 and _near(divisor / whole, tolerance):
        again = " (or by 2 and by 2 again)" if twice else ""
        values |= {"of": "mean" if ddp else "sum", "divisor": f"{whole}{again}"}
        return found("literal-divisor", line, sure=not twice, compare=total, **values)
    unseen = "; what the losses are divided by was not seen" if added else ""
    return Unknown(
        f"gradients: the optimiser gets {total:.3f} times the mean of the {size} ranks' gradients,"
        f" on all ranks and in all {len(updates)} steps{unseen}"
    )


def _early_clips(recording: Recording, updates: list[Update]) -> Iterator[Finding]:
    """Yield the notice if each rank clips before an exchange by hand, so far without effect.

    A limit of a hundred times the norm is there to measure the norm, not to limit it.
    """
    for kind in ("norm", "value"):
        if all(exchanges(recording, one.step, "gradient") for one in updates) and all(
            any(
                clip["collectives"] == 0 and clip["limit"] < 100 * max(record["got_norm"], 1)
                for clip in row
            )
            for one in updates
            for row, record in zip(one.clips(kind), one.records, strict=True)
        ):
            yield found("clips-too-early", _clip_line(updates, kind), steps=len(updates))


def resolve(findings: Sequence[Finding], recordings: Sequence[Recording]) -> list[Finding]:
    """Return the findings, one a size, without those that another size contradicts.

    A loss that is halved on two ranks and on three is not divided by the number of ranks; a
    divisor of 4 on two ranks may be 2 times 2, which three ranks tell apart. The same multiple of
    the mean on all sizes is a rate, and so is a sum whose learning rate is divided by the ranks.
    """
    sizes = {one.size for one in recordings if one.size > 1}
    if len(sizes) < 2:
        return list(findings)
    at: dict[str, dict[int, Any]] = defaultdict(dict)
    for one in findings:
        at[one.name] |= dict.fromkeys(one.sizes, one.value)
    literal, rates = at["literal-divisor"], {_rate_of_the_mean(one) for one in recordings}
    constant = literal.keys() == sizes and np.ptp([*literal.values()]) < 1e-3
    twice = literal.keys() == {2} and max(at["averaged-twice"], default=0) > 2
    wrong = {
        "sum-not-mean": len(rates) == 1 and None not in rates,
        "scaled-in-loss": at["scaled-in-loss"].keys() < sizes,
        "literal-divisor": constant or twice,
    }
    return [one for one in findings if not wrong.get(one.name)]


def _rate_of_the_mean(recording: Recording) -> float | None:
    """Return the first learning rate times the ranks, if the update is linear in the gradient."""
    steps = recording.ranks[0].by_kind["step"] if recording.ranks else []
    if not steps or steps[0]["optimizer"] != "SGD" or steps[0]["settings"].get("weight_decay"):
        return None
    return round(float(steps[0]["lr"][0]) * recording.size, 9)
