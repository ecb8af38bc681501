"""Whether every optimiser gets the mean of what the ranks computed.

``check`` explains each update (patterns.py) and judges all updates of an optimiser
together: a fault holds in all of them. What depends on how the losses are scaled is in factors.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown
from lab.audit.findings.gradients.combination import GradientStep, gradient_steps
from lab.audit.findings.gradients.factors import judge_factor, judge_loss
from lab.audit.findings.gradients.patterns import Pattern, clips_of, explain, limits_before_exchange
from lab.audit.findings.gradients.replicas import Replicas, read_replicas
from lab.audit.findings.where import (
    backward_line,
    bypasses_ddp,
    exchange_line,
    exchanges,
    local_samples,
    recording_exchanges,
    uses_ddp,
)
from lab.audit.recording import CodeLine, Numbers, Recording, code_line

_UNIFORM = frozenset({"mean", "factor"})
"""All ranks count alike: so they may in single steps, by chance, where they otherwise do not."""


def check(recording: Recording) -> Iterator[Outcome]:
    """Judge what the optimisers get; see lab/audit/findings/finding.py."""
    if recording.size < 2 or len(recording.ranks) < 2:
        yield Unknown("gradients: one rank alone has nothing to average")
        return
    try:
        optimizers = gradient_steps(recording)
    except ValueError as error:
        yield Unknown(f"gradients: {error}")
        return
    replicas = read_replicas(recording)
    for o, steps in optimizers.items():
        outcomes = _judge(recording, _explain_all(steps, replicas.get(o)), replicas.get(o))
        if len(optimizers) > 1 and steps:
            outcomes = map(partial(_naming, steps[0]), outcomes)
        yield from outcomes
    if not any(optimizers.values()):
        yield Unknown(f"gradients: {_why_unseen(recording)}")


def _naming(step: GradientStep, outcome: Outcome) -> Outcome:
    """Return an outcome that says which of several optimisers it is about."""
    one = f"optimiser {step.optimizer + 1} ({step.records[0]['optimizer']})"
    if isinstance(outcome, Finding):
        return replace(outcome, evidence=tuple(f"{one}: {text}" for text in outcome.evidence))
    if isinstance(outcome, Unknown):
        return Unknown(f"gradients: {one}: {outcome.text.removeprefix('gradients: ')}")
    return Right(f"{one}: {outcome.text}")


def _why_unseen(recording: Recording) -> str:
    stepping = [one.rank for one in recording.ranks if one.by_kind["step"]]
    if any(one.get("version") == 1 for rank in recording.ranks for one in rank.of("fsdp")):
        return "FSDP1's flat parameters cannot be compared with what each rank computed"
    if not stepping:
        return "no step of a torch optimiser was seen"
    if len(stepping) < recording.size:
        listed = " and ".join(map(str, stepping))
        return f"only rank {listed} of {recording.size} ranks made a step of a torch optimiser"
    return "what each rank computed was not seen (no ordinary backward(), or a rank ended early)"


def _explain_all(steps: list[GradientStep], replicas: Replicas | None) -> list[Pattern]:
    patterns = []
    for index, step in enumerate(steps):
        start = None if replicas is None else replicas.values.get(step.step)
        previous = steps[index - 1] if index and steps[index - 1].step == step.step - 1 else None
        patterns.append(explain(step, previous, None if start is None else start[0]))
    return patterns


def _judge(
    recording: Recording, patterns: list[Pattern], replicas: Replicas | None
) -> Iterator[Outcome]:
    """Judge all updates of one optimiser."""
    observed = [one for one in patterns if one.kind != "same"]
    kinds = {one.kind for one in observed}
    if not patterns:
        return
    if not any(one.step.got.any() for one in patterns):
        yield Unknown(
            "gradients: the optimiser gets none, or zeros, in all steps (does zero_grad() stand"
            " between backward() and step()?)"
        )
    elif not observed:
        yield from _judge_same(recording, patterns)
    elif {one.kind for one in observed if one.step.step > 0} == {"stale"}:
        yield _stale([one for one in observed if one.kind == "stale"])
    elif kinds & {"unknown", "kept", "stale"}:
        yield _unknown(observed)
    elif kinds & {"own", "rows"}:
        yield from _judge_own(recording, observed, replicas)
    elif kinds == {"parameters"}:
        yield _some_parameters(recording, observed)
    elif "clipped" in kinds and kinds <= {*_UNIFORM, "clipped"}:
        yield _clipped([one for one in observed if one.kind == "clipped"], len(observed))
    elif "clamped" in kinds and kinds <= {*_UNIFORM, "clamped"}:
        yield _clamped([one for one in observed if one.kind == "clamped"], len(observed))
    elif "weighted" in kinds and kinds <= {*_UNIFORM, "weighted"}:
        yield from _judge_weighted(recording, observed)
    elif kinds <= _UNIFORM:
        yield from _judge_total(recording, observed)
    else:
        yield Unknown(f"gradients: not the same in all steps ({', '.join(sorted(kinds))})")


def _judge_total(recording: Recording, observed: list[Pattern]) -> Iterator[Outcome]:
    """Judge updates that are the mean times a number."""
    if any(one.kind == "factor" for one in observed):
        yield from judge_factor(recording, observed)
        return
    if scaled := judge_loss(recording, observed):
        yield scaled
        return
    if early := _clipped_without_effect(recording, observed):
        yield early
    worst = max(one.residue for one in observed)
    extra = {text for one in observed for text in one.texts}
    yield Right(
        f"the optimiser gets the mean of the ranks' gradients in all {len(observed)} steps"
        f" (greatest deviation {worst:.0e}{''.join(', ' + one for one in sorted(extra))})"
    )


def _judge_same(recording: Recording, patterns: list[Pattern]) -> Iterator[Outcome]:
    if bypasses_ddp(recording) and not exchanges(recording, patterns[0].step.step):
        yield _bypassed(recording, patterns)
        return
    yield Unknown(
        "gradients: all ranks compute the same gradient, so the mean cannot be told from one rank's"
    )


def _stale(observed: list[Pattern]) -> Finding:
    one = observed[0]
    return Finding(
        "stale-gradient",
        (
            f"{_where(one)}: what the optimiser gets holds the gradients of step"
            f" {one.step.step - 1} (weights that add up to {one.total:.3f}, residue"
            f" {one.residue:.0e})",
        ),
    )


def _unknown(observed: list[Pattern]) -> Unknown:
    first = next(one for one in observed if one.kind in {"unknown", "kept", "stale"})
    if first.kind == "kept":
        return Unknown(
            f"gradients: in {_where(first)} .grad still holds gradients of the step before"
            " (is zero_grad() missing?)"
        )
    nearest = f"; the nearest is {first.total:.2f} times the mean" if first.residue < 0.2 else ""
    return Unknown(
        f"gradients: in {_where(first)} what the optimiser gets is not a weighted sum of what the"
        f" ranks computed (residue {first.residue:.0e}{nearest}), as after a lossy compression,"
        " added noise or another change that is not linear"
    )


def _judge_own(
    recording: Recording, observed: list[Pattern], replicas: Replicas | None
) -> Iterator[Outcome]:
    """Judge updates with one rank's own gradient."""
    bad = [one for one in observed if one.kind in {"own", "rows"}]
    if not any(rank.by_kind["group"] for rank in recording.ranks):
        yield Unknown("gradients: the ranks are not connected, no process group was made")
        return
    everywhere = all(one.kind == "own" for one in bad)
    if everywhere and bypasses_ddp(recording):
        yield _bypassed(recording, bad)
        return
    if everywhere and not recording_exchanges(recording):
        return  # group-unused says it
    averaged = _averaged_weights(bad, replicas) if everywhere else None
    if averaged is not None:
        yield averaged
        return
    again = [one for one in bad if not everywhere and _equal_again(one.step, replicas)]
    if again:
        yield Unknown(
            f"gradients: in {_where(again[0])} the optimisers get different gradients, but"
            " afterwards the ranks make their weights equal"
        )
        return
    if len(bad) == 1 < len(observed):
        yield Unknown(f"gradients: the optimisers get the mean in all steps but {_where(bad[0])}")
        return
    sure = "certain" if len(bad) == len(observed) else "likely"
    yield from _own_findings(recording, bad, sure, len(observed))


def _own_findings(
    recording: Recording, bad: list[Pattern], sure: str, steps: int
) -> Iterator[Outcome]:
    first, line = bad[0], exchange_line(recording, bad[0].step.step) or backward_line(recording)
    if first.kind == "own":
        text = (
            f"step {first.step.step}, all {first.step.size} ranks: each optimiser gets its rank's"
            f" own gradient (in {len(bad)} of {steps} steps)"
        )
        if any(exchanges(recording, one.step.step + 1, "weights") for one in bad):
            yield Finding("weights-averaged", (f"{text}; then the ranks exchange weights",))
            return
        yield Finding("own-gradient", (text,), line, sure)
        return
    texts = "; ".join(f"rank {r} gets {text}" for r, text in enumerate(first.texts))
    single = any(text.endswith("own") for text in first.texts)
    name = "own-gradient" if single else "not-the-mean"
    yield Finding(
        name, (f"step {first.step.step}: {texts} (in {len(bad)} of {steps} steps)",), line, sure
    )


def _bypassed(recording: Recording, bad: list[Pattern]) -> Finding:
    text = (
        f"{_where(bad[0])}: the forward pass did not run through DDP, and each optimiser gets its"
        " rank's own gradient"
    )
    return Finding("ddp-bypassed", (text,), backward_line(recording))


def _equal_again(step: GradientStep, replicas: Replicas | None) -> bool:
    """Return whether all ranks have the same weights after they got different gradients."""
    if replicas is None or step.step + 1 not in replicas.values:
        return False
    return replicas.equal(step.step + 1) and not np.allclose(step.got, step.got[0], atol=0)


def _averaged_weights(bad: list[Pattern], replicas: Replicas | None) -> Finding | None:
    """Return the finding if the weights are equal again after updates with different gradients."""
    if replicas is None:
        return None
    for one in bad:
        after = one.step.step + 1
        if after not in replicas.values or replicas.moved(after) < 1e-7:
            continue
        if not replicas.equal(after) or replicas.spread(after).max() > 1e-2 * replicas.moved(after):
            continue
        moved = replicas.values[after][0] - replicas.values[after - 1][0]
        whose = _follows_one_rank(one.step, moved)
        if whose is not None:
            text = f"before step {after} all ranks hold what rank {whose} computed by itself"
            return Finding("own-gradient", (f"{_where(one)}: {text}",))
        text = (
            f"{_where(one)}: each optimiser gets its rank's own gradient, and before step {after}"
            " the weights of all ranks are equal again"
        )
        return Finding("weights-averaged", (text,))
    return None


def _follows_one_rank(step: GradientStep, moved: Numbers) -> int | None:
    """Return the rank whose gradient alone points where the weights moved; None without."""
    if moved.shape != step.got[0].shape:
        return None
    for rank, got in enumerate(step.got):
        factor = float(got @ moved / max(float(got @ got), 1e-300))
        if np.linalg.norm(moved - factor * got) < 1e-2 * np.linalg.norm(moved):
            return rank
    return None


def _some_parameters(recording: Recording, observed: list[Pattern]) -> Outcome:
    always = set.intersection(*(set(one.texts[1:]) for one in observed))
    if not always:
        return Unknown("gradients: other parameters are left out in each step")
    how = observed[0].texts[0]
    names = [one for one in observed[0].texts[1:] if one in always]
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    text = (
        f"{_where(observed[0])}: {len(names)} of {len(observed[0].step.measured)} parameters are"
        f" not averaged but {how}: {listed}"
    )
    return Finding("some-parameters", (text,), exchange_line(recording, observed[0].step.step))


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


def _judge_weighted(recording: Recording, observed: list[Pattern]) -> Iterator[Outcome]:
    """Judge sums in which the ranks count differently."""
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
