"""Whether every optimiser gets the mean of what the ranks computed.

``check`` explains each update (patterns.py) and checks all updates of an optimiser
together: a fault holds in all of them. What depends on how the losses are scaled is in factors.py.
"""

from collections.abc import Iterator

import numpy as np

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown
from lab.audit.findings.gradients.combination import (
    GradientStep,
    gradient_steps,
    parameter_rows,
)
from lab.audit.findings.gradients.factors import check_factor, check_loss
from lab.audit.findings.gradients.own import bypassed, check_own
from lab.audit.findings.gradients.patterns import Pattern, clips_of, explain, limits_before_exchange
from lab.audit.findings.gradients.replicas import Replicas, read_replicas
from lab.audit.findings.where import (
    backward_line,
    bypasses_ddp,
    ends_without_sync,
    exchange_line,
    exchanges,
    local_samples,
    uses_ddp,
)
from lab.audit.recording import CodeLine, Recording, code_line

_SMALL = 0.1
"""Up to this relative error the nearest weighted sum is worth telling."""
_UNIFORM = frozenset({"mean", "factor"})
"""Patterns in which all ranks count equally; a single step may look so by chance."""


def check(recording: Recording) -> Iterator[Outcome]:
    """Check what the optimisers get; see lab/audit/findings/finding.py."""
    if recording.size < 2 or len(recording.ranks) < 2:
        yield Unknown("gradients: one rank alone has nothing to average")
        return
    if any(one.get("version") == 1 for rank in recording.ranks for one in rank.of("fsdp")):
        yield Unknown(
            "gradients: FSDP1's flat parameters cannot be compared with what each rank computed"
        )
        return
    try:
        optimizers = gradient_steps(recording)
    except ValueError as error:
        yield Unknown(f"gradients: {error}")
        return
    replicas = read_replicas(recording)
    if not any(optimizers.values()):
        yield Unknown(f"gradients: {_why_unseen(recording)}")
        return
    for o, steps in optimizers.items():
        whose = _holder(recording, o) if len(optimizers) > 1 else "the optimiser"
        if not steps:
            yield Unknown(f"gradients: {whose} took no step of which all ranks saw the gradients")
            continue
        patterns = _explain_all(steps, replicas.get(o))
        yield from _check(recording, patterns, replicas.get(o), whose)


def _holder(recording: Recording, o: int) -> str:
    """Return "the optimiser of" and its first parameter's name, to tell it from others."""
    rows = parameter_rows(recording.ranks[0], o)
    return f"the optimiser of {rows[0][1] or rows[0][0]}" if rows else "an optimiser"


def _why_unseen(recording: Recording) -> str:
    without = [rank.rank for rank in recording.ranks if not rank.by_kind["step"]]
    if len(without) == len(recording.ranks):
        return "no step of a torch optimiser was seen"
    if without:
        return f"rank {without[0]} took no step of a torch optimiser, others did"
    if not all(rank.by_kind["backward"] for rank in recording.ranks):
        return "no backward() was seen on a rank"
    return (
        "the tensors that the optimisers hold are not those that backward() fills (copies of the"
        " weights in another precision?)"
    )


def _explain_all(steps: list[GradientStep], replicas: Replicas | None) -> list[Pattern]:
    patterns = []
    for index, step in enumerate(steps):
        start = None if replicas is None else replicas.values.get(step.step)
        previous = steps[index - 1] if index and steps[index - 1].step == step.step - 1 else None
        patterns.append(explain(step, previous, None if start is None else start[0]))
    return patterns


def _check(
    recording: Recording, patterns: list[Pattern], replicas: Replicas | None, whose: str
) -> Iterator[Outcome]:
    """Check all updates of one optimiser; ``whose`` names it."""
    after_backward = [
        one for one in patterns if any(record.get("micro") for record in one.step.records)
    ]
    received = [one for one in after_backward or patterns if one.kind != "nothing"]
    observed = [one for one in received if one.kind != "same"]
    kinds = {one.kind for one in observed}
    if not received:
        why = "is zero_grad() called between backward() and step(), or is the loss constant"
        yield Unknown(
            f"gradients: {whose} gets none, or zeros, in all {len(patterns)} steps ({why}?)"
        )
    elif not observed:
        yield from _check_same(recording, patterns, whose)
    elif {one.kind for one in observed if one.step.step > 0} == {"stale"}:
        yield _stale([one for one in observed if one.kind == "stale"])
    elif kinds & {"unknown", "kept", "stale"}:
        yield _unknown(recording, observed)
    elif kinds & {"own", "rows"}:
        yield from check_own(recording, observed, replicas)
    elif kinds == {"extreme"}:
        yield _extreme(recording, observed)
    elif kinds == {"parameters"}:
        yield _some_parameters(recording, observed, repeated=len(patterns) - len(after_backward))
    elif "clipped" in kinds and kinds <= {*_UNIFORM, "clipped"}:
        yield _clipped([one for one in observed if one.kind == "clipped"], len(observed))
    elif "clamped" in kinds and kinds <= {*_UNIFORM, "clamped"}:
        yield _clamped([one for one in observed if one.kind == "clamped"], len(observed))
    elif "weighted" in kinds and kinds <= {*_UNIFORM, "weighted"}:
        yield from _check_weighted(recording, observed)
    elif kinds <= _UNIFORM:
        yield from _check_total(recording, observed, whose)
    else:
        yield Unknown("gradients: the ranks' gradients are combined differently from step to step")


def _check_total(recording: Recording, observed: list[Pattern], whose: str) -> Iterator[Outcome]:
    """Check updates that are the mean times a number."""
    if any(one.kind == "factor" for one in observed):
        yield from check_factor(recording, observed)
        return
    if scaled := check_loss(recording, observed):
        yield scaled
        return
    if early := _clipped_without_effect(recording, observed):
        yield early
    worst = max(min(one.residue, _deviation(one.step)) for one in observed)
    extra = {text for one in observed for text in one.texts}
    yield Right(
        f"{whose} gets the mean of the ranks' gradients in all {len(observed)} steps"
        f" (greatest deviation {worst:.0e}{''.join(', ' + one for one in sorted(extra))})"
    )


def _deviation(step: GradientStep) -> float:
    """Return how far the optimisers' gradients are from the mean, relatively to its norm."""
    mean = step.own.mean(axis=0)
    apart = max(float(np.linalg.norm(got - mean)) for got in step.got)
    return apart / max(float(np.linalg.norm(mean)), 1e-300)


def _check_same(recording: Recording, patterns: list[Pattern], whose: str) -> Iterator[Outcome]:
    if bypasses_ddp(recording) and not exchanges(recording, patterns[0].step.step):
        yield bypassed(recording, patterns)
        return
    yield Unknown(
        f"gradients: all ranks compute the same gradient for {whose}, so the audit"
        " cannot tell the mean from one rank's"
    )


def _stale(observed: list[Pattern]) -> Finding:
    one = observed[0]
    return Finding(
        "stale-gradient",
        (
            f"{_where(one)}: the optimiser gets the gradients of step"
            f" {one.step.step - 1} (their weights add up to {one.total:.3f}, relative error"
            f" {one.residue:.0e})",
        ),
    )


def _unknown(recording: Recording, observed: list[Pattern]) -> Outcome:
    first = next(one for one in observed if one.kind in {"unknown", "kept", "stale"})
    if all(ends_without_sync(recording, one.step.step) for one in observed):
        text = (
            f"{_where(first)}: the last micro-batch runs under no_sync() and an earlier one does"
            " not, so what comes after that is never averaged"
        )
        return Finding("own-gradient", (text,), backward_line(recording))
    if first.kind == "kept":
        return Unknown(
            f"gradients: in {_where(first)} .grad still holds gradients of the step before"
            " (is zero_grad() missing?)"
        )
    text = (
        f"gradients: in {_where(first)} what the optimiser gets is not a weighted sum of what the"
        f" ranks computed (relative error {first.residue:.0e})"
    )
    if first.residue < _SMALL:
        text += (
            f", as after lossy compression or with added noise; the nearest one is"
            f" {first.total:.2f} times the mean"
        )
    return Unknown(text)


def _extreme(recording: Recording, observed: list[Pattern]) -> Finding:
    one = observed[0]
    text = (
        f"{_where(one)}: the optimiser gets the {one.texts[0]} of the ranks' gradients, number by"
        " number (ReduceOp.MAX or MIN)"
    )
    return Finding("not-the-mean", (text,), exchange_line(recording, one.step.step))


def _some_parameters(recording: Recording, observed: list[Pattern], *, repeated: int) -> Outcome:
    always = set.intersection(*(set(one.texts[1:]) for one in observed))
    if not always:
        return Unknown("gradients: other parameters are left out in each step")
    how = observed[0].texts[0]
    names = [one for one in observed[0].texts[1:] if one in always]
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    text = (
        f"{_where(observed[0])}: {len(names)} of {len(observed[0].step.measured)} parameters are"
        f" {how}, not averaged: {listed}"
    )
    again = f"{repeated} more updates have no backward() of their own: is step() inside the loop?"
    texts = (text, again) if repeated else (text,)
    return Finding("some-parameters", texts, exchange_line(recording, observed[0].step.step))


def _clipped(observed: list[Pattern], steps: int) -> Finding:
    first = observed[0]
    weights = first.weights.mean(axis=0) * first.step.size / (first.total or 1)
    shares = ", ".join(f"rank {r}'s counts {one:.3f} times" for r, one in enumerate(weights))
    detail = first.texts[0] if first.texts else shares
    text = (
        f"{_where(first)}: the optimiser gets the mean of clipped gradients ({detail}),"
        f" in {len(observed)} of {steps} steps"
    )
    return Finding("clipped-before-averaging", (text,), _clip_line(observed, "norm"))


def _clamped(observed: list[Pattern], steps: int) -> Finding:
    text = (
        f"{_where(observed[0])}: the optimiser gets the mean of gradients that each rank limited to"
        f" ±{observed[0].texts[0]}, in {len(observed)} of {steps} steps"
    )
    return Finding("value-clipped-before-averaging", (text,), _clip_line(observed, "value"))


def _clip_line(observed: list[Pattern], kind: str) -> CodeLine | None:
    lines = [
        clip["at"]
        for one in observed
        for record in one.step.records
        for clip in clips_of(record, kind)
    ]
    return code_line(lines[0]) if lines else None


def _clipped_without_effect(recording: Recording, observed: list[Pattern]) -> Finding | None:
    """Clipping before an exchange by hand whose limit no rank reached in these steps."""
    if uses_ddp(recording):
        return None
    for kind in ("norm", "value"):
        early = all(
            any(limits_before_exchange(clip, record) for clip in clips_of(record, kind))
            for one in observed
            for record in one.step.records
        )
        if early and all(exchanges(recording, one.step.step, "gradient") for one in observed):
            text = (
                "each rank clips before its gradients are exchanged; no gradient reached the limit"
                f" in these {len(observed)} steps, so it made no difference yet"
            )
            return Finding("clips-too-early", (text,), _clip_line(observed, kind))
    return None


def _check_weighted(recording: Recording, observed: list[Pattern]) -> Iterator[Outcome]:
    """Check sums in which the ranks count differently."""
    bad = [one for one in observed if one.kind == "weighted" and not _by_samples(recording, one)]
    if not bad:
        yield Right("the optimiser gets the ranks' gradients weighted by their samples")
        return
    limits = [limit for one in bad if (limit := _norm_limit(one)) is not None]
    if len(limits) == len(bad) and np.ptp(limits) < 1e-2 * max(limits):
        text = f"clipped to a norm of {limits[0]:.4g} by hand"
        yield _clipped(
            [Pattern("clipped", o.step, o.weights, 1, o.residue, (text,)) for o in bad],
            len(observed),
        )
        return
    first = bad[0]
    numbers = ", ".join(f"{one:.4f}" for one in first.weights.mean(axis=0))
    if len(bad) < len(observed):
        yield Unknown(
            f"gradients: the ranks' weights are {numbers} in {_where(first)}, but not in all steps"
        )
        return
    text = f"{_where(first)}: the ranks' gradients count {numbers} times, not 1/{first.step.size}"
    yield Finding("not-the-mean", (text,), exchange_line(recording, first.step.step))


def _by_samples(recording: Recording, one: Pattern) -> bool:
    """Return whether the weights are the ranks' shares of the samples."""
    samples = local_samples(recording, one.step.step)
    if samples is None or not sum(samples):
        return False
    share = np.array(samples) / sum(samples)
    return bool(np.abs(one.weights - share).max() < 1e-3)


def _norm_limit(one: Pattern) -> float | None:
    """Return the norm to which all ranks' gradients were clipped; None if they were not."""
    norms = [record.get("own_norm") for record in one.step.records]
    if any(norm is None for norm in norms):
        return None
    scale = float(one.step.records[0].get("scale") or 1)
    factors = one.weights.mean(axis=0) * one.step.size
    clipped = [factor < 0.999 for factor in factors]
    limits = [
        factor * norm for factor, norm, yes in zip(factors, norms, clipped, strict=True) if yes
    ]
    if not limits or factors.max() > 1.001 or np.ptp(limits) > 1e-2 * max(limits):
        return None
    below = [norm for norm, yes in zip(norms, clipped, strict=True) if not yes]
    return None if any(norm > limits[0] * 1.01 for norm in below) else limits[0] / scale


def _where(one: Pattern) -> str:
    return f"step {one.step.step}"
