"""Whether every optimiser gets the mean of what the ranks computed.

``check`` explains each update (gradient_fit.py) and judges all updates of an optimiser together,
since a fault holds in all of them. The judges follow in the order of ``_JUDGES``, and then
``resolve``, which compares runs of several sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, found
from lab.audit.findings.gradient_fit import Pattern, clips_of, explain, fit, read_steps
from lab.audit.findings.weights import SAME, parameter_rows, read_replicas, shortlist
from lab.audit.findings.where import (
    backward_line,
    bypasses_ddp,
    ends_without_sync,
    exchange_line,
    exchanges,
    lasting_optimizers,
    local_samples,
    recording_exchanges,
    samples_of,
    unawaited,
    uses_ddp,
)
from lab.audit.recording import CodeLine, Numbers, Recording, code_line

_GREATEST_LITERAL = 16
_SMALL = 0.1
"""Up to this relative error the nearest weighted sum is worth telling."""
_MEASURED = 100.0
"""A clipping limit this many times the norm is there to measure the norm, not to limit it."""
_CLASSIFIERS = ("NllLoss", "CrossEntropy", "BinaryCrossEntropy")


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
        listed = ", ".join(map(str, missing))
        yield Unknown(f"gradients: no step of a torch optimiser was seen on rank {listed}")
    else:
        yield from _check_optimizers(recording)


def _check_optimizers(recording: Recording) -> Iterator[Outcome]:
    numbers = list(chain.from_iterable(lasting_optimizers(recording)))
    replicas = read_replicas(recording)
    for o in numbers:
        rows = parameter_rows(recording.ranks[0], o)
        whose = f"the optimiser of {rows[0][1] or rows[0][0]}" if numbers[1:] else "the optimiser"
        patterns = [explain(one) for one in read_steps(recording, o, replicas.get(o))]
        if not patterns:
            yield Unknown(
                f"gradients: {whose} took no step of which all ranks saw the gradients: the ranks"
                " hold different parameters in it, or copies of those that backward() fills"
            )
            continue
        with_backward = [one for one in patterns if any(r["micro"] for r in one.step.records)]
        received = [one for one in with_backward or patterns if one.kind != "nothing"]
        if not received:
            yield Unknown(
                f"gradients: {whose} gets none, or zeros, in all {len(patterns)} steps (is"
                " zero_grad() called between backward() and step(), or is the loss constant?)"
            )
            continue
        telling = [one for one in received if not (one.is_mean and one.step.alike)] or received
        if outcome := _judge(Updates(recording, whose, telling)):
            yield outcome
        if all(one.is_mean for one in telling):
            yield from _early_clips(recording, telling)


@dataclass(frozen=True)
class Updates:
    """The explained updates of one optimiser; ``whose`` names it."""

    recording: Recording
    whose: str
    patterns: list[Pattern]

    def line(self) -> CodeLine | None:
        """Return the line that exchanges the gradients, else that of backward()."""
        step = self.patterns[0].step.step
        return exchange_line(self.recording, step) or backward_line(self.recording)

    def counts(self, bad: list[Pattern]) -> dict[str, Any]:
        """Return the first step of these, their number and that of all."""
        return {"step": bad[0].step.step, "bad": len(bad), "steps": len(self.patterns)}


def _judge(updates: Updates) -> Outcome | None:
    """Judge all updates of one optimiser by the gravest kind of pattern among them."""
    kinds = {one.kind for one in updates.patterns}
    for judged, companions, judge in _JUDGES:
        bad = [one for one in updates.patterns if one.kind in judged]
        if bad and kinds <= {*judged, *companions}:
            return judge(updates, bad)
    return Unknown("gradients: the ranks' gradients are combined differently from step to step")


def _unexplained(updates: Updates, bad: list[Pattern]) -> Outcome:
    """Judge updates that are no sum of the ranks' gradients, or one with old gradients."""
    first, counts = bad[0], updates.counts(bad)
    if {one.kind for one in updates.patterns if one.step.step > 0} == {"stale"}:
        return found("stale-gradient", step=max(1, counts["step"]))
    if all(ends_without_sync(updates.recording, one.step.step) for one in updates.patterns):
        return found("own-gradient", backward_line(updates.recording), kind="no_sync", **counts)
    where = f"gradients: in step {first.step.step}"
    if first.kind == "kept":
        return Unknown(
            f"{where} .grad still holds gradients of the step before (is zero_grad() missing?)"
        )
    near = (
        ", as after lossy compression or with added noise; the nearest one is"
        f" {first.total:.2f} times the mean"
    )
    return Unknown(
        f"{where} what the optimiser gets is not a weighted sum of what the ranks computed"
        f" (relative error {first.residue:.0e}){near if first.residue < _SMALL else ''}"
    )


def _own(updates: Updates, bad: list[Pattern]) -> Outcome:
    """Judge updates with one rank's own gradient: what do the ranks exchange in its place?"""
    recording, counts, line = updates.recording, updates.counts(bad), updates.line()
    everywhere = all(one.kind == "own" for one in bad)
    if everywhere and bypasses_ddp(recording):
        return found("ddp-bypassed", backward_line(recording), **counts)
    if not recording_exchanges(recording):  # group-unused says it if they were to train together
        return Unknown("gradients: the ranks exchange nothing")
    equal = [(one, move) for one in bad if (move := _common_move(one)) is not None]
    step = equal[0][0].step.step if equal else 0
    if equal and not everywhere:
        return Unknown(
            f"gradients: in step {step} the optimisers get different gradients, but afterwards the"
            " ranks make their weights equal"
        )
    if equal and (rank := _leader(*equal[0])) is not None:
        return found("own-gradient", kind="copied", step=step, rank=rank)
    if equal:
        return found("weights-averaged", kind="equal", step=step)
    steps = [one.step.step for one in bad]
    mixing = [step for step in steps if exchanges(recording, step, "weights")]
    averaging = any(exchanges(recording, step, "gradient") for step in steps)
    if everywhere and 2 * len(mixing) >= len(steps) and not averaging:
        line, mixed = exchange_line(recording, mixing[0]), len(mixing)
        return found("weights-averaged", line, kind="exchanged", sure=False, mixed=mixed, **counts)
    if len(bad) == 1 < len(updates.patterns):
        return Unknown(f"gradients: the optimisers get the mean in all steps but step {steps[0]}")
    sure, texts, lost = (
        len(bad) == len(updates.patterns),
        bad[0].texts,
        unawaited(recording, steps[0]),
    )
    if bad[0].kind == "own":
        kind = "unawaited" if lost else "own"
        return found("own-gradient", line, kind=kind, sure=sure, lost=lost, **counts)
    single = all(text.endswith("own") or text == "the mean" for text in texts)
    name = "own-gradient" if single else "not-the-mean"
    rows = "; ".join(f"rank {r} gets {text}" for r, text in enumerate(texts))
    return found(name, line, kind="rows", sure=sure, rows=rows, **counts)


def _common_move(one: Pattern) -> Numbers | None:
    """Return how the weights moved if, after different gradients, they are the same on all ranks.

    Shape (1, columns); None if they are not the same, or not known.
    """
    step = one.step
    if step.start is None or step.after is None or np.allclose(step.got, step.got[0], atol=0):
        return None
    move, size = step.after[:1] - step.start, float(np.linalg.norm(step.start))
    moved, apart = np.linalg.norm(move), np.linalg.norm(step.after - step.after[0], axis=1).max()
    limit = min(SAME * (step.step + 1) * size, 1e-2 * float(moved))
    return move if moved > 1e-7 * size and apart <= limit else None


def _leader(one: Pattern, move: Numbers) -> int | None:
    """Return the rank along whose gradient alone all ranks' weights moved; None without."""
    weights, errors = fit(one.step.got, move, one.step.columns)
    along = np.flatnonzero(np.abs(weights[0]) > 1e-2 * np.abs(weights).max())
    return int(along[0]) if errors[0] < 1e-2 and len(along) == 1 else None


def _by_name(updates: Updates, bad: list[Pattern]) -> Outcome:
    """Judge updates whose fault the fit has named: before averaging clipped, or extremes."""
    names = {
        "extreme": ("not-the-mean", "extreme", ""),
        "clamped": ("value-clipped-before-averaging", None, "value"),
        "shortened": ("clipped-before-averaging", None, "norm"),
    }
    name, kind, clip = names[bad[0].kind]
    line = _clip_line(bad, clip) or updates.line()
    return found(name, line, kind=kind, how=bad[0].texts[0], **updates.counts(bad))


def _clip_line(patterns: list[Pattern], kind: str) -> CodeLine | None:
    records = [record for one in patterns for record in one.step.records]
    lines = [clip["at"] for record in records for clip in clips_of(record, kind)]
    return code_line(lines[0]) if lines else None


def _parameters(updates: Updates, bad: list[Pattern]) -> Outcome:
    """Judge updates in which some parameters, the same ones in each, are not averaged."""
    always = set.intersection(*(set(one.texts[1:]) for one in bad))
    names = [name for name in bad[0].texts[1:] if name in always]
    if not names:
        return Unknown("gradients: other parameters are left out in each step")
    values: dict[str, Any] = {"how": bad[0].texts[0], "names": shortlist(names), "some": len(names)}
    line, every = exchange_line(updates.recording, bad[0].step.step), len(bad[0].step.names)
    return found("some-parameters", line, every=every, **values, **updates.counts(bad))


def _weighted(updates: Updates, patterns: list[Pattern]) -> Outcome:
    """Judge sums in which the ranks count differently: by their samples, clipped, or wrong."""
    bad = [one for one in patterns if one.kind == "weighted" and not _by_samples(updates, one)]
    if not bad:
        return Right("the optimiser gets the ranks' gradients weighted by their samples")
    weights, counts = bad[0].weights.mean(axis=0), updates.counts(bad)
    cuts = [one for pattern in bad if (one := _cut_before(pattern)) is not None]
    if len(cuts) == len(bad):
        how = ", ".join(
            f"rank {r}'s gradient is "
            + (f"cut to {part:.1%} of its length" if part < 1 else "not cut")
            for r, part in enumerate(cuts[0])
        )
        line = _clip_line(bad, "norm") or updates.line()
        return found("clipped-before-averaging", line, how=how, **counts)
    listed = ", ".join(f"{one:.4f}" for one in weights)
    if len(bad) < len(updates.patterns):
        where = f"in step {counts['step']}, but not in all steps"
        return Unknown(f"gradients: the ranks' weights are {listed} {where}")
    return found(
        "not-the-mean", updates.line(), kind="weighted", weights=listed, size=len(weights), **counts
    )


def _by_samples(updates: Updates, one: Pattern) -> bool:
    """Return whether the weights are the ranks' shares of the samples."""
    samples = np.array(local_samples(updates.recording, one.step.step) or [0])
    return bool(samples.any() and np.abs(one.weights - samples / samples.sum()).max() < 1e-3)


def _cut_before(one: Pattern) -> Numbers | None:
    """Return to which part each rank cut its gradient before the mean; None if they did not."""
    times = one.weights.mean(axis=0) * one.step.size
    factors = _cut_by_call(one)
    if factors is None:  # perhaps by hand
        norms = np.array([record["own_norm"] or np.nan for record in one.step.records])
        limit = np.max((times * norms)[times < 0.999], initial=0.0) or np.inf
        factors = np.minimum(1, limit / norms)
    ratios = times / factors
    alike = np.ptp(ratios) < 10 * one.step.tolerance * np.abs(ratios).max()
    return factors if alike and factors.min() < 1 else None


def _cut_by_call(one: Pattern) -> Numbers | None:
    """Return to which part each rank's clip_grad_norm_ cut what it got; None without one."""
    clips = [clips_of(record, "norm") for record in one.step.records]
    if any(len(calls) != 1 or not calls[0]["norm"] for calls in clips):
        return None
    return np.array([min(1, call["limit"] / (call["norm"] + 1e-6)) for (call,) in clips])


def _mean(updates: Updates, patterns: list[Pattern]) -> Outcome:
    """Judge updates that are the mean times a number, ``total``.

    A sum is right if each rank divides its loss by the number of ranks, and a mean of such losses
    is not: what counts is that number times the weight with which the losses are differentiated.
    """
    step, tolerance = patterns[0].step, 10 * patterns[0].step.tolerance
    totals = np.array([one.total for one in patterns])
    cuts = totals if _cut_by_hand(patterns) else np.array([_cut_after(one) for one in patterns])
    totals = totals / cuts
    if np.ptp(totals) > tolerance * np.abs(totals).max():
        return Unknown(
            "gradients: the optimiser gets the mean times a factor that changes from step to step"
            f" ({totals[0]:.3f} in step {step.step}, then {totals[1]:.3f})"
        )
    total, losses = float(totals[0]), _losses(updates)
    if np.abs(totals - 1).max() >= 2e-3:
        return _multiple(updates, total, losses)
    if all(one.step.alike for one in patterns):
        if bypasses_ddp(updates.recording) and not exchanges(updates.recording, step.step):
            line = backward_line(updates.recording)
            return found("ddp-bypassed", line, **updates.counts(patterns))
        return Unknown(
            f"gradients: all ranks compute the same gradient for {updates.whose}, so the audit"
            " cannot tell the mean from one rank's"
        )
    if cuts.min() > 0.999 and _divides_again(updates, losses):
        line, sure = backward_line(updates.recording), step.size > 2
        return found("scaled-in-loss", line, sure=sure, size=step.size, **updates.counts(patterns))
    extras = {text for one in patterns for text in one.texts}
    extras |= {"then clipped"} if cuts.min() < 0.999 else set()
    worst = max(one.residue for one in patterns)
    return Right(
        f"{updates.whose} gets the mean of the ranks' gradients in all {len(patterns)} steps"
        f" (greatest deviation {worst:.0e}{''.join(', ' + one for one in sorted(extras))})"
    )


def _cut_after(one: Pattern) -> float:
    """Return to which part all ranks' clip_grad_norm_ cut the mean; 1 if it is not the same."""
    factors = _cut_by_call(one)
    if factors is None or np.ptp(factors) > 1e-3 * factors.max():
        return 1.0
    return float(factors.mean())


def _cut_by_hand(patterns: list[Pattern]) -> bool:
    """Return whether several multiples of the mean have one norm, to which they were cut."""
    cut = [one for one in patterns if not one.is_mean]
    norms = [one.step.records[0]["got_norm"] or 0.0 for one in cut]
    totals = [one.total for one in patterns]
    constant = len(cut) > 1 and np.ptp(norms) < 1e-3 * max(norms)
    return bool(constant and max(totals) < 1.001 and np.ptp(totals) > 1e-2)


@dataclass(frozen=True)
class Losses:
    """The losses of an optimiser's steps, on all ranks.

    Parameters
    ----------
    weight : what the weights of all samples' losses in a step add up to, divided by the number of
        ranks: 1 for a mean on each rank. 0 if a loss was not seen, or whose it is.
    micro : the number of backwards in a step.
    means, sums, classify : all of them do. ``sums`` are not divided.
    """

    weight: float
    micro: int
    means: bool
    sums: bool
    classify: bool


def _losses(updates: Updates) -> Losses:
    steps = {one.step.step: one.step for one in updates.patterns}
    first, ranks = updates.patterns[0].step, updates.recording.ranks
    backwards = [one for rank in ranks for one in rank.by_kind["backward"] if one["step"] in steps]
    losses = [one["loss"] or {} for one in backwards]
    scales = [float(steps[one["step"]].records[0]["scale"] or 1) for one in backwards]
    arriving = np.abs([one.get("arriving") or 0.0 for one in losses]) / scales
    ways = [one.get("reduction") for one in losses]
    counts = [
        {"mean": 1, "none": 1, "sum": samples_of(one)}.get(str(way), 0)
        for one, way in zip(backwards, ways, strict=True)
    ]
    alone = all(one["o"] == first.optimizer for rank in ranks for one in rank.by_kind["step"])
    known = alone and all(arriving) and all(counts)
    return Losses(
        weight=float(arriving @ counts) / first.size / len(steps) if known else 0.0,
        micro=first.records[0]["micro"] or 1,
        means=set(ways) == {"mean"},
        sums=set(ways) == {"sum"} and np.allclose(arriving, 1, rtol=1e-3),
        classify=all(str(one.get("node")).startswith(_CLASSIFIERS) for one in losses),
    )


def _near(value: float, wanted: float, tolerance: float) -> bool:
    return abs(value / wanted - 1) < tolerance


def _divides_again(updates: Updates, losses: Losses) -> bool:
    """Return whether each rank's loss is a mean divided by the number of ranks."""
    size = updates.recording.size
    weights = (losses.weight, losses.weight / losses.micro)
    if not losses.means or _near(losses.weight, 1, 1e-3):
        return False
    if size == 2 and not losses.classify:
        return False  # half the squared error is a common loss
    return any(_near(one * size, 1, 1e-3) for one in weights)


def _multiple(updates: Updates, total: float, losses: Losses) -> Outcome:
    """Judge a constant multiple of the mean."""
    step, ddp, line = updates.patterns[0].step, uses_ddp(updates.recording), updates.line()
    size, tolerance = step.size, 10 * step.tolerance
    values: dict[str, Any] = {"total": total, "size": size, "steps": len(updates.patterns)}
    added, twice = _near(total, size, tolerance), _near(total, 1 / size, tolerance)
    by_micro = losses.micro > 1 and _near(total * losses.micro, 1, tolerance)
    if _near(total * losses.weight, 1, tolerance) or by_micro or (added and losses.sums):
        return Right("the losses' scale and the exchange together give the mean of all samples")
    if added and losses.means:
        return found("sum-not-mean", line, sure=losses.weight > 0, **values)
    if twice and (ddp or size > 2):
        return found("averaged-twice", line, **values)
    divisor = 1 / total if ddp else size / total
    if _near(divisor, round(divisor), tolerance) and 1 < round(divisor) <= _GREATEST_LITERAL:
        again = " (or by 2 and by 2 again)" if twice else ""
        values |= {"of": "mean" if ddp else "sum", "divisor": f"{round(divisor)}{again}"}
        return found("literal-divisor", line, sure=not twice, compare=total, **values)
    unseen = "; what the losses are divided by was not seen" if added else ""
    return Unknown(
        f"gradients: the optimiser gets {total:.3f} times the mean of the {size} ranks' gradients,"
        f" on all ranks and in all {len(updates.patterns)} steps{unseen}"
    )


_ANY = {"mean", "own", "rows", "weighted", "shortened", "clamped", "extreme", "parameters"}
_JUDGES: list[tuple[set[str], set[str], Callable[[Updates, list[Pattern]], Outcome]]] = [
    ({"unknown", "kept", "stale"}, _ANY, _unexplained),
    ({"own", "rows"}, _ANY, _own),
    ({"extreme"}, set(), _by_name),
    ({"parameters"}, set(), _parameters),
    ({"shortened"}, {"mean"}, _by_name),
    ({"clamped"}, {"mean"}, _by_name),
    ({"weighted"}, {"mean"}, _weighted),
    ({"mean"}, set(), _mean),
]
"""Which kinds of patterns, beside which others, are judged by which function."""


def _early_clips(recording: Recording, patterns: list[Pattern]) -> Iterator[Finding]:
    """Yield the notice if each rank clips before an exchange by hand, so far without effect."""
    if uses_ddp(recording) or not all(
        exchanges(recording, one.step.step, "gradient") for one in patterns
    ):
        return
    for kind in ("norm", "value"):
        early = [
            any(
                clip["collectives"] == 0 and clip["limit"] < _MEASURED * max(record["got_norm"], 1)
                for clip in clips_of(record, kind)
            )
            for one in patterns
            for record in one.step.records
        ]
        if all(early):
            yield found("clips-too-early", _clip_line(patterns, kind), steps=len(patterns))


def resolve(findings: Sequence[Finding], recordings: Sequence[Recording]) -> list[Finding]:
    """Return the findings, one a size, without those that another size contradicts.

    A loss that is halved on two ranks and on three is not divided by the number of ranks; a
    divisor of 4 on two ranks may be 2 times 2, which three ranks tell apart. The same multiple of
    the mean on all sizes is a rate, and so is a sum whose learning rate is divided by the ranks.
    """
    sizes = {one.size for one in recordings if one.size > 1}
    if len(sizes) < 2:
        return list(findings)
    values = {(one.name, size): one.value for one in findings for size in one.sizes}
    at = {name: {size for one, size in values if one == name} for name, _ in values}
    literal = at.get("literal-divisor", set())
    rates = {_rate_of_the_mean(one) for one in recordings}
    constant = literal == sizes and np.ptp([values["literal-divisor", one] for one in sizes]) < 1e-3
    twice = literal == {2} and max(at.get("averaged-twice", {0})) > 2
    wrong = {
        "sum-not-mean": len(rates) == 1 and None not in rates,
        "scaled-in-loss": at.get("scaled-in-loss", set()) < sizes,
        "literal-divisor": constant or twice,
    }
    return [one for one in findings if not wrong.get(one.name)]


def _rate_of_the_mean(recording: Recording) -> float | None:
    """Return the first learning rate times the ranks, if the update is linear in the gradient."""
    steps = recording.ranks[0].by_kind["step"] if recording.ranks else []
    if not steps or steps[0]["optimizer"] != "SGD" or steps[0]["settings"].get("weight_decay"):
        return None
    return round(float(steps[0]["lr"][0]) * recording.size, 9)
