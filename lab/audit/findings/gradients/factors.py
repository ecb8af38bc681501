"""What a constant factor between the mean and what the optimiser gets means.

A sum is right if each rank divides its loss by the number of ranks, and a mean of such losses is
not: so the factor is compared together with the scale at which the gradient reaches the loss.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown
from lab.audit.findings.gradients.patterns import (
    Pattern,
    clips_of,
    coefficient_tolerance,
    common_clip_factor,
)
from lab.audit.findings.where import backward_line, exchange_line, samples_of, uses_ddp
from lab.audit.recording import Record, Recording

GREATEST_LITERAL = 16
_BY_FACTOR = ("scaled-in-loss", "literal-divisor", "averaged-twice")
_CLASSIFIERS = ("NllLoss", "CrossEntropy", "BinaryCrossEntropy")


def check_factor(recording: Recording, observed: list[Pattern]) -> Iterator[Outcome]:
    """Check updates that are the mean times ``total``, on all ranks and for all parameters."""
    if _clipped_after(observed):
        yield Right("gradients are averaged, then clipped")
        return
    factors = [one.total / (common_clip_factor(one.step) or 1) for one in observed]
    factor, step = factors[0], observed[0].step
    tolerance = 10 * coefficient_tolerance(step)
    if np.ptp(factors) > tolerance * max(np.abs(factors)):
        yield Unknown(
            "gradients: the optimiser gets the mean times a factor that changes from step to step"
            f" ({factors[0]:.3f} in step {step.step}, then {factors[1]:.3f})"
        )
        return
    size, micro = step.size, int(step.records[0].get("micro") or 1)
    losses = _losses(recording, observed)
    weights = _weight_of_losses(losses, size)
    if weights and all(_near(one * factor, 1, tolerance) for one in weights):
        yield Right("the losses' scale and the exchange together give the mean of all samples")
    elif micro > 1 and _near(factor * micro, 1, tolerance):
        yield Right("the optimiser gets the mean of the ranks' gradients and of the micro-batches")
    elif _near(factor, size, tolerance) and _sums_losses(losses):
        yield Right("losses and gradients are sums: together the sum over the global batch")
    else:
        yield _name_factor(recording, observed, factor)


def _near(value: float, wanted: float, tolerance: float) -> bool:
    return abs(value / wanted - 1) < tolerance


def _clipped_after(observed: list[Pattern]) -> bool:
    """Return whether the factors are those of a norm that was limited after averaging."""
    by_call = [common_clip_factor(one.step) for one in observed]
    if all(
        factor is not None and _near(one.total, factor, 2e-3)
        for one, factor in zip(observed, by_call, strict=True)
    ):
        return True
    sharded = [clips_of(one.step.records[0], "norm") for one in observed if one.kind == "factor"]
    if all(len(clips) == 1 and clips[0]["norm"] is None for clips in sharded):
        return max(one.total for one in observed) < 1.001  # of a DTensor the norm is not known
    recorded = [one.step.records[0].get("got_norm") for one in observed if one.kind == "factor"]
    norms = [float(norm) for norm in recorded if norm]
    if len(norms) < max(2, len(recorded)):
        return False
    totals = [one.total for one in observed]
    return max(totals) < 1.001 and np.ptp(totals) > 1e-2 and np.ptp(norms) < 1e-3 * max(norms)


def _name_factor(recording: Recording, observed: list[Pattern], factor: float) -> Outcome:
    """Return the finding for a constant factor."""
    step, ddp = observed[0].step, uses_ddp(recording)
    size, residue = step.size, max(one.residue for one in observed)
    tolerance = 10 * coefficient_tolerance(step)
    line = exchange_line(recording, step.step)
    text = (
        f"step {step.step}, all ranks: what the optimiser gets is {factor:.3f} times the mean of"
        f" the {size} ranks' gradients (relative error {residue:.0e}; the same in {len(observed)}"
        " steps)"
    )
    if _near(factor, size, tolerance):
        means = [one.get("reduction") == "mean" for one in _losses_of_all(recording)]
        if not means or not all(means):
            return Unknown(f"gradients: {text}; what the losses are divided by was not seen")
        sure = "certain" if loss_scale(_losses(recording, observed)) else "likely"
        return Finding("sum-not-mean", (text,), line, sure)
    averaged = _near(factor, 1 / size, tolerance)
    if averaged and (ddp or size > 2):
        return Finding("averaged-twice", (text,), line or backward_line(recording))
    divisor = 1 / factor if ddp else size / factor
    whole = round(divisor)
    if abs(divisor - whole) < tolerance * whole and 1 < whole <= GREATEST_LITERAL:
        of = "the mean" if ddp else "the sum"
        says = f"{of} of the gradients is divided by {whole} on {size} ranks"
        if averaged:
            says += " (or by 2 and by 2 again)"
        sure = "likely" if averaged else "certain"
        return Finding("literal-divisor", (says, text), line, sure, value=factor)
    return Unknown(f"gradients: {text}; all ranks get the same multiple")


def _losses(recording: Recording, observed: list[Pattern]) -> list[Record]:
    """Return the losses of all backwards of these steps, on all ranks, with their ``samples``.

    ``arriving`` is without GradScaler's scale. Empty if a loss was not seen, or if it cannot be
    told which optimiser's it is.
    """
    steps = {one.step.step: float(one.step.records[0].get("scale") or 1) for one in observed}
    losses: list[Record] = []
    for rank in recording.ranks:
        if any(one["o"] != observed[0].step.optimizer for one in rank.by_kind["step"]):
            return []
        for backward in rank.by_kind["backward"]:
            if backward["step"] not in steps:
                continue
            loss = backward.get("loss")
            if loss is None or loss.get("arriving") is None:
                return []
            arriving = abs(float(loss["arriving"])) / steps[backward["step"]]
            place = {"step": backward["step"], "samples": samples_of(backward)}
            losses.append({**loss, "arriving": arriving, **place})
    return losses


def _losses_of_all(recording: Recording) -> list[Record]:
    """Return the losses of all backwards, whichever optimiser they are for."""
    return [one.get("loss") or {} for rank in recording.ranks for one in rank.by_kind["backward"]]


def _weight_of_losses(losses: list[Record], size: int) -> list[float]:
    """Return by step what the weights of all samples' losses on all ranks add up to, divided by N.

    1 for a mean on each rank. Empty if a loss was not seen, or if it is no sum of samples' losses.
    """
    totals: dict[int, float] = defaultdict(float)
    for one in losses:
        count = one["samples"] if one.get("reduction") == "sum" else 1
        if one.get("reduction") not in ("mean", "sum", "none") or not count:
            return []
        totals[one["step"]] += one["arriving"] * count / size
    return list(totals.values())


def loss_scale(losses: list[Record]) -> float | None:
    """Return by what each backward's mean loss is multiplied.

    None if a loss was not seen, is no mean and no sum, or the scales differ.
    """
    counts = [one["samples"] if one.get("reduction") == "sum" else 1 for one in losses]
    known = all(one.get("reduction") in ("mean", "sum") for one in losses)
    if not losses or not known or not all(counts):
        return None
    scales = [one["arriving"] * count for one, count in zip(losses, counts, strict=True)]
    return None if np.ptp(scales) > 1e-3 * max(scales) else float(np.mean(scales))


def _sums_losses(losses: list[Record]) -> bool:
    """Return whether the losses are sums over their samples that nobody divides."""
    return bool(losses) and all(
        one.get("reduction") == "sum" and _near(one["arriving"], 1, 1e-3) for one in losses
    )


def check_loss(recording: Recording, observed: list[Pattern]) -> Finding | None:
    """Return the finding if losses are divided by the number of ranks, and gradients averaged.

    On two ranks 1/2 may be a weight of the loss: then it is not sure (see ``settle``).
    """
    losses, step = _losses(recording, observed), observed[0].step
    scale = loss_scale(losses)
    micro, size = int(step.records[0].get("micro") or 1), step.size
    if not scale or any(one["reduction"] != "mean" for one in losses):
        return None
    if micro > 1 and _near(scale * micro, 1, 1e-3):
        return None
    if not (_near(scale * size, 1, 1e-3) or _near(scale * size * micro, 1, 1e-3)):
        return None
    if size == 2 and not all(str(one.get("node")).startswith(_CLASSIFIERS) for one in losses):
        return None  # half the squared error is a common loss
    text = (
        f"step {step.step}: each rank's loss is multiplied by {scale:.4f} = 1/{size} before"
        " backward(), and the optimiser gets the mean of these gradients"
    )
    sure = "certain" if size > 2 else "likely"
    return Finding("scaled-in-loss", (text,), backward_line(recording), sure)


def resolve(findings: Sequence[Finding], recordings: Sequence[Recording]) -> list[Finding]:
    """Return the findings, one a size, without those that another size contradicts.

    A loss that is halved on two ranks and on three is not divided by the number of ranks; a
    divisor of 4 on two ranks may be 2 times 2, which three ranks tell apart. The same multiple of
    the mean on all sizes is a rate, and so is a sum whose learning rate is divided by the ranks.
    """
    audited = {one.size for one in recordings if one.size > 1}
    rates = {_rate_of_the_mean(one) for one in recordings}
    wrong = set()
    if len(audited) > 1 and len(rates) == 1 and None not in rates:
        wrong.add("sum-not-mean")
    named = {name: [one for one in findings if one.name == name] for name in _BY_FACTOR}
    if {size for one in named["scaled-in-loss"] for size in one.sizes} < audited:
        wrong.add("scaled-in-loss")
    literal = {size: one.value or 0 for one in named["literal-divisor"] for size in one.sizes}
    twice = any(max(one.sizes) > 2 for one in named["averaged-twice"])
    constant = len(audited) > 1 and literal.keys() == audited
    if (constant and np.ptp(list(literal.values())) < 1e-3) or (twice and literal.keys() == {2}):
        wrong.add("literal-divisor")
    return [one for one in findings if one.name not in wrong]


def _rate_of_the_mean(recording: Recording) -> float | None:
    """Return the first learning rate times the ranks, if the update is linear in the gradient."""
    steps = recording.ranks[0].by_kind["step"] if recording.ranks else []
    if not steps or steps[0]["optimizer"] != "SGD" or steps[0]["settings"].get("weight_decay"):
        return None
    return round(float(steps[0]["lr"][0]) * recording.size, 9)
