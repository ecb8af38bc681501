"""Whether every optimiser gets the mean of what the ranks computed.

``check`` explains each update (gradient_fit.py) and judges all updates of an optimiser together,
since a fault holds in all of them, by the gravest kind among them; the judges follow. ``resolve``
compares runs of several sizes.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from common.say import count, listed
from common.utils.gradient_fit import fit, norms
from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, found
from lab.audit.findings.gradient_fit import BY_SAMPLES, Update
from lab.audit.findings.weights import SAME, Replicas
from lab.audit.findings.where import (
    averages_weights,
    backward_line,
    bypasses_ddp,
    ends_without_sync,
    exchange_line,
    exchanged_before_backward,
    exchanges,
    first_line,
    groups,
    in_step,
    lasting_optimizers,
    local_samples,
    never_synced,
    recording_exchanges,
    samples_of,
    unawaited,
    uses_ddp,
)
from lab.audit.recording import Numbers, RankRecords, Recording
from lab.audit.records import (
    Backward,
    CodeLine,
    CollectiveCall,
    Cut,
    DdpBuilt,
    Error,
    FsdpBuilt,
    Step,
    Unstepped,
)
from lab.evidence import Evidence, judge, multiple, near

_CLASSIFIERS = ("NllLoss", "CrossEntropy", "BinaryCrossEntropy")
_UNEXPLAINED = {"unknown", "kept", "stale"}
_CLIPPED = ("norm", "value")
_CHANGING = Unknown("gradients", "the ranks' gradients are combined differently from step to step")
# The kinds of updates of which the fit has said it all; of "weighted" lab/evidence says the name.
_FAULTS = {
    "norm": "clipped-before-averaging",
    "value": "value-clipped-before-averaging",
    "extreme": "not-the-mean",
    "parameters": "some-parameters",
}


def check(recording: Recording) -> Iterator[Outcome]:
    """Check what the optimisers get; see lab/audit/findings/finding.py."""
    if recording.size < 2:
        yield Unknown("gradients", "one rank alone has nothing to average")
        return
    if recording.of(FsdpBuilt):
        yield Unknown(
            "gradients",
            "FSDP gives each rank a part of every parameter, which cannot be compared"
            " with the gradients of whole parameters that each rank computed",
        )
        return
    stepping = {rank.rank for rank in recording.ranks if rank.of(Step)}
    missing = sorted(set(range(recording.size)) - stepping)
    if missing:
        yield from _steps_alone(recording, missing)
        yield Unknown(
            "gradients",
            f"no step of a torch optimiser was seen on rank {', '.join(map(str, missing))}",
        )
        return
    numbers = [number for family in lasting_optimizers(recording) for number in family]
    for replicas in [Replicas(recording, number) for number in numbers]:
        whose = f"the optimiser of {replicas.names[0]}" if len(numbers) > 1 else "the optimiser"
        yield from _check_optimizer(replicas, whose)


def _steps_alone(recording: Recording, missing: Sequence[int]) -> Iterator[Finding]:
    """Yield that a rank exchanges gradients and never changes its weights, to the program's end.

    missing : the ranks that take no step.
    """
    failed = recording.hung or bool(recording.of(Error))
    if failed or recording.of(Cut):
        return
    stepping = max(recording.ranks, key=lambda rank: len(rank.of(Step)))
    steps = stepping.of(Step)
    for rank in recording.ranks:
        if len(steps) > 1 and rank.rank in missing and _never_changes(rank):
            yield found(
                "steps-alone",
                steps[0].at,
                steps=len(steps),
                rank=stepping.rank,
                other=rank.rank,
                backwards=len(rank.of(Backward)),
            )
            return


def _never_changes(rank: RankRecords) -> bool:
    """Return whether a rank exchanges gradients, and the parameters of its optimisers stay."""
    sends = any(call.content == "gradient" for call in rank.of(CollectiveCall))
    unstepped = rank.of(Unstepped)
    return sends and bool(unstepped) and not any(record.changed for record in unstepped)


def _check_optimizer(replicas: Replicas, whose: str) -> Iterator[Outcome]:
    """Check what one optimiser gets in all its steps.

    whose : names it in sentences.
    """
    steps = sorted(replicas.own.keys() & replicas.got.keys())
    of_some = groups(replicas.recording)
    updates = [Update(replicas, step, of_some) for step in steps]
    updates = [update for update in updates if update.known]
    if not updates:
        yield Unknown(
            "gradients",
            f"{whose} took no step of which all ranks saw the gradients: the ranks"
            " hold different parameters in it, or copies of those that backward() fills",
        )
        return
    yield from _own_updates(replicas, whose, updates)
    telling = _telling(updates)
    if not telling:
        yield Unknown(
            "gradients",
            f"{whose} gets none, or zeros, in all {len(updates)} steps (is"
            " zero_grad() called between backward() and step(), or is the loss constant?)",
        )
        return
    without = sum(update.kind == "nothing" and update.records[0].micro > 0 for update in updates)
    seen = _Seen(replicas.recording, whose, telling, bad=telling, without=without)
    yield _judge(seen)
    yield from _clipped_multiple(seen)
    yield from _uneven_targets(seen)
    if all(update.is_mean for update in telling) and not uses_ddp(seen.recording):
        yield from _early_clips(seen)


def _own_updates(replicas: Replicas, whose: str, updates: list[Update]) -> Iterator[Outcome]:
    """Yield what becomes of the gradients in each rank's own updates: lost, kept, or clipped."""
    reached = [update for update in updates if update.records[0].micro and update.own.any()]
    if not reached:
        return
    lost = [update for update in reached if update.kind == "nothing"]
    wrong = [_lost(whose, lost, reached), _piled_up(replicas, updates), _clipped_scaled(updates)]
    yield from filter(None, wrong)
    if not any(wrong):
        seen = f"{len(reached) - len(lost)} of {len(reached)} steps" if lost else "each step"
        yield Right("updates", f"{whose} applies what backward() computed in {seen}")


def _lost(whose: str, lost: list[Update], reached: list[Update]) -> Finding | None:
    """Return that most steps find no gradient; None if few do, or if the optimiser never gets any.

    Then the gradients may go to another one. A script may drop those of a bad batch.
    """
    if not len(reached) < 2 * len(lost) < 2 * len(reached):
        return None
    first = lost[0]
    return found(
        "update-lost",
        first.records[0].at,
        step=first.step,
        whose=whose,
        lost=len(lost),
        steps=len(reached),
    )


def _piled_up(replicas: Replicas, updates: list[Update]) -> Finding | None:
    """Return that each step adds to the gradients of the step before; None if one does not."""
    sampled = {update.step for update in updates}
    later = [update for update in updates if update.step - 1 in sampled]
    records = [record for update in later for record in update.records]
    # a single backward added to what the update before had used
    if len(later) < 3 or not all(record.kept and record.micro == 1 for record in records):
        return None
    return found(
        "gradients-pile-up",
        backward_line(replicas.recording),
        steps=len(later),
        kept=records[0].kept,
        every=len(replicas.names),
    )


def _clipped_scaled(updates: list[Update]) -> Finding | None:
    """Return that a step clips gradients that GradScaler has not unscaled; None if none does."""
    records = [record for update in updates for record in update.records]
    clipped = next(filter(_clips_scaled, records), None)
    if clipped is None:
        return None
    clip = clipped.clips[0]
    return found(
        "clipped-while-scaled",
        clip.at,
        step=clipped.step,
        limit=clip.limit,
        norm=clip.norm,
        scale=clipped.scale,
    )


def _clips_scaled(step: Step) -> bool:
    """Return whether a step's only clipping cut gradients that were multiplied by the scale.

    What the optimiser gets then has the limit's norm, divided by the scale. A limit that grows with
    the scale, as it should then, is no small part of it.
    """
    if len(step.clips) != 1 or step.scale <= 1 or not step.got_norm:
        return False
    clip = step.clips[0]
    if clip.kind != "norm" or clip.unscaled or clip.limit is None or not clip.norm:
        return False
    cuts = clip.limit < 1e-2 * step.scale and clip.limit < clip.norm
    return cuts and near(step.got_norm * step.scale / clip.limit, 1)


def _telling(updates: list[Update]) -> list[Update]:
    """Return the updates that say what the ranks exchange; none where no optimiser gets anything.

    These are the updates that follow a backward, if there are any. Of them, those in which the
    mean equals each rank's own gradient tell nothing, so they count only if all are such.
    """
    computed = [update for update in updates if any(record.micro for record in update.records)]
    received = [update for update in computed or updates if update.kind != "nothing"]
    different = [update for update in received if not (update.is_mean and update.alike)]
    return different or received


@dataclass(frozen=True)
class _Seen:
    """The updates of an optimiser that are judged together.

    whose : names the optimiser.
    bad : those of the gravest kind, or all where each is the mean times a number.
    without : how many updates more followed a backward and got no gradient.
    """

    recording: Recording
    whose: str
    updates: list[Update]
    bad: list[Update]
    without: int = 0

    @property
    def line(self) -> CodeLine | None:
        """The line that exchanges gradients, or else that of a backward."""
        first = self.updates[0].step
        return exchange_line(self.recording, first) or backward_line(self.recording)

    @property
    def bad_steps(self) -> set[int]:
        """The steps of the bad updates."""
        return {update.step for update in self.bad}

    def found(
        self,
        name: str,
        line: CodeLine | None,
        *,
        kind: str | None = None,
        sure: bool = True,
        compare: float | None = None,
        **values: object,
    ) -> Finding:
        """Return a finding; its evidence may also tell steps, bad ones, and the ranks."""
        known: dict[str, object] = {
            "step": self.bad[0].step,
            "bad": len(self.bad),
            "steps": len(self.updates),
            "size": self.bad[0].size,
        }
        return found(name, line, kind=kind, sure=sure, compare=compare, **(known | values))


def _judge(seen: _Seen) -> Outcome:
    """Judge the updates by the gravest kind among them."""
    kinds = {update.kind for update in seen.updates}
    # the gravest first: a kind counts only where there is none of those before it
    grave = kinds & _UNEXPLAINED or kinds & {"rows"} or kinds - {"mean"}
    if not grave:
        return _mean(seen)
    bad = [update for update in seen.updates if update.kind in grave]
    seen = replace(seen, bad=bad)
    if grave <= _UNEXPLAINED:
        return _unexplained(seen)
    if grave == {"rows"}:
        return _rows(seen)
    return _CHANGING if len(grave) > 1 else _explained(seen)


def _explained(seen: _Seen) -> Outcome:
    """Judge updates of one kind of which the fit has said how they come about."""
    first = seen.bad[0]
    kind = first.kind
    how, *names = first.texts  # names: of the parameters, for the kind "parameters"
    always = [name for name in names if all(name in update.texts for update in seen.bad)]
    changes = len(seen.bad) < len(seen.updates) and kind not in _CLIPPED
    if changes or (names and not always):
        return _CHANGING
    line = _clip_line(seen.bad, kind)
    if line is None:
        line = exchange_line(seen.recording, first.step) if names else seen.line
    return seen.found(
        _FAULTS.get(kind) or judge(first.evidence).finding,
        line,
        kind=kind,
        how=how,
        weights=how,
        counts=first.evidence.group_counts,
        names=listed(always, most=3),
        some=len(always),
        every=len(first.names),
    )


def _clip_line(updates: list[Update], kind: str) -> CodeLine | None:
    """Return the first line that clips, by norm or by value; None if none does by a call."""
    return first_line(
        clip.at for update in updates for calls in update.clips(kind) for clip in calls
    )


def _unexplained(seen: _Seen) -> Outcome:
    """Judge updates whose gradient is no sum of what the ranks computed, or that of an older step.

    Step 0 has no older gradient, so it does not tell whether gradients are stale.
    """
    first = seen.bad[0]
    where = f"in step {first.step}"
    if {update.kind for update in seen.updates if update.step > 0} == {"stale"}:
        return found("stale-gradient", seen.line, step=max(1, first.step))
    if all(ends_without_sync(seen.recording, update.step) for update in seen.updates):
        return seen.found("own-gradient", backward_line(seen.recording), kind="no_sync")
    if first.kind == "kept":
        return Unknown(
            "gradients",
            f"{where} .grad still holds gradients of the step before (is zero_grad() missing?)",
        )
    text = (
        f"{where} what the optimiser gets is not a weighted sum of what the ranks computed"
        f" (relative error {first.residue:.0e})"
    )
    if first.residue < 0.1:
        text += (
            ", as after lossy compression or with added noise; the nearest one is"
            f" {first.total:.2f} times the mean"
        )
    return Unknown("gradients", text)


# --- one rank's own gradient ---


def _rows(seen: _Seen) -> Outcome:
    """Judge updates in which the ranks get different things, often their own gradients.

    What they exchange in place of gradients tells why.
    """
    recording = seen.recording
    all_own = all(update.evidence.gradients == {"its own"} for update in seen.bad)
    if all_own and bypasses_ddp(recording, seen.bad_steps):
        return _bypassed(seen)
    if not recording_exchanges(recording):  # group-unused says it if they were to train together
        return Unknown("gradients", "the ranks exchange nothing")
    if averages_weights(recording):
        return Unknown(
            "gradients",
            "torch's post-local SGD averages gradients inside groups of ranks alone, and"
            " the weights from time to time",
        )
    equal = [update for update in seen.bad if _ends_equal(update)]
    if equal:
        return _equal_weights(seen, equal[0], all_own)
    if all_own and (mixing := _mixing_weights(seen)):
        line = exchange_line(recording, mixing[0].step)
        return seen.found("weights-averaged", line, kind="exchanged", sure=False, mixed=len(mixing))
    return _exceptional(seen, all_own) or _what_each_gets(seen, all_own)


def _bypassed(seen: _Seen) -> Finding:
    """Return that the bad steps' forwards bypass DDP, which may be built again and again."""
    return seen.found(
        "ddp-bypassed",
        backward_line(seen.recording),
        kind="always" if len(seen.bad) == len(seen.updates) else "some",
        built=count(len(seen.recording.ranks[0].of(DdpBuilt)), "time"),
    )


def _lost_result(seen: _Seen) -> Finding | None:
    """Return that a rank gets zeros for some parameters, while another gets the mean of all."""
    first = seen.bad[0]
    apart = norms(first.got - first.mean, first.columns)  # (ranks, parameters)
    is_mean = apart <= 10 * first.misfit * norms(first.mean[None], first.columns)
    is_zero = norms(first.got, first.columns) == 0
    gets_all = is_mean.all(axis=1)
    if not gets_all.any() or not (is_mean | is_zero).all() or not is_mean.any(axis=1).all():
        return None
    rank = int(gets_all.argmin())
    lost = np.array(first.names)[is_zero[rank]]
    return seen.found(
        "result-lost",
        seen.line,
        rank=rank,
        other=int(gets_all.argmax()),
        some=len(lost),
        every=len(first.names),
        names=listed(lost.tolist(), most=3),
    )


def _exceptional(seen: _Seen, all_own: bool) -> Outcome | None:
    """Judge steps that lose a part, are one among others, or are left out by DDP; None if none."""
    lost = _lost_result(seen)
    if lost is not None or len(seen.bad) == len(seen.updates):
        return lost
    if all_own and all(never_synced(seen.recording, update.step) for update in seen.bad):
        return seen.found("own-gradient", seen.bad[0].records[0].at, kind="leftover")
    if len(seen.bad) == 1:
        return Unknown(
            "gradients", f"the optimisers get the mean in all steps but step {seen.bad[0].step}"
        )
    return None


def _mixing_weights(seen: _Seen) -> list[Update]:
    """Return the updates with an exchange of weights, if these are most and no gradients are."""
    mixing = [update for update in seen.bad if exchanges(seen.recording, update.step, "weights")]
    averaging = any(exchanges(seen.recording, update.step, "gradient") for update in seen.bad)
    return mixing if 2 * len(mixing) >= len(seen.bad) and not averaging else []


def _what_each_gets(seen: _Seen, all_own: bool) -> Finding:
    """Return the finding that lists what each rank gets in the first bad step.

    all_own : it is its own gradient in all steps.
    """
    first = seen.bad[0]
    evidence = first.evidence
    name = judge(evidence).finding
    line = seen.line
    lost = unawaited(seen.recording, first.step)
    kind = None
    if name == "inside-groups":
        partial = [ddp.at for ddp in seen.recording.of(DdpBuilt) if len(ddp.ranks) < first.size]
        line = first_line(partial) or line
    elif all_own:
        kind = "unawaited" if lost else _why_own(seen)
    elif name != "one-group":
        kind = "rows"
    return seen.found(
        name,
        line,
        kind=kind,
        sure=len(seen.bad) == len(seen.updates),
        rows="; ".join(f"rank {rank} gets {text}" for rank, text in enumerate(first.texts)),
        lost=lost,
        what=evidence.of_its_group,
        groups=evidence.inside_text,
    )


def _why_own(seen: _Seen) -> str:
    """Return the kind of evidence for ranks that keep their own gradients."""
    later = [update.step for update in seen.bad if update.step > 0]  # step 0 may have none yet
    if later and all(exchanged_before_backward(seen.recording, step) for step in later):
        return "early"
    return "own"


def _ends_equal(update: Update) -> bool:
    """Return whether the ranks got different gradients, and yet have equal weights afterwards.

    Equal means up to rounding, and up to 1 % of the move; weights that hardly move tell nothing.
    """
    size = np.linalg.norm(update.before[0])
    moved = np.linalg.norm(update.after[0] - update.before[0])
    apart = np.linalg.norm(update.after - update.after[0], axis=1).max()
    same = apart <= min(SAME * (update.step + 1) * size, 1e-2 * moved)
    got_alike = np.allclose(update.got, update.got[0], atol=0)
    return bool(same and moved > 1e-7 * size and not got_alike)


def _equal_weights(seen: _Seen, update: Update, all_own: bool) -> Outcome:
    """Judge ranks that make their weights equal: do they all take those of one rank?

    They do if the weights move along the gradient of that rank alone.
    """
    if not all_own:
        return Unknown(
            "gradients",
            f"in step {update.step} the optimisers get different gradients, but"
            " afterwards the ranks make their weights equal",
        )
    weights, errors = fit(update.got, update.after[:1] - update.before[:1], update.columns)
    sources = np.flatnonzero(np.abs(weights[0]) > 1e-2 * np.abs(weights).max())  # ranks
    if errors[0] < 1e-2 and len(sources) == 1:
        return found("own-gradient", seen.line, kind="copied", step=update.step, rank=sources[0])
    return found("weights-averaged", seen.line, kind="equal", step=update.step)


# --- the mean times a number ---


def _mean(seen: _Seen) -> Outcome:
    """Judge updates that are the mean times a number.

    A sum is right if each rank divides its loss by the number of ranks, and a mean of such losses
    is not: what counts is that number times the weight with which the losses are differentiated.
    The number must be the same in all steps, clipping of the mean aside.
    """
    first = seen.updates[0]
    totals, cuts = _totals_before_clipping(seen.updates)
    if np.ptp(totals) > 10 * first.tolerance * np.abs(totals).max():
        return Unknown(
            "gradients",
            "the optimiser gets the mean times a factor that changes from step to step"
            f" ({totals[0]:.3f} in step {first.step}, then {totals[1]:.3f})",
        )
    if np.abs(totals - 1).max() >= 2e-3:
        return _multiple(seen, seen.line, total=float(totals[0]))
    if all(update.alike for update in seen.updates):
        return _all_alike(seen)
    cut = cuts.min()  # 1: no step clips
    scaled = _scaled_in_loss(seen) if cut > 0.999 else None
    return scaled or _right_mean(seen, clipped=cut < 0.999)


def _totals_before_clipping(updates: list[Update]) -> tuple[Numbers, Numbers]:
    """Return by update the multiple of the mean, and to which part it is then clipped.

    A part of 0.3 means: multiplied by 0.3 to limit its norm; 1 means not clipped.
    """
    totals = np.array([update.total for update in updates])
    cuts = np.array([update.cuts[0] if np.ptp(update.cuts) < 1e-3 else 1.0 for update in updates])
    # Without a call of clip_grad_norm_: shortened by different parts, all to the same norm.
    lengths = [update.records[0].got_norm or 0.0 for update in updates if not update.is_mean]
    one_norm = len(lengths) > 1 and np.ptp(lengths) < 1e-3 * max(lengths)
    shortened = totals.max() < 1.001 and np.ptp(totals) > 1e-2
    if one_norm and shortened:
        # Each update was the mean before it was shortened.
        return np.ones_like(totals), totals
    return totals / cuts, cuts


def _all_alike(seen: _Seen) -> Outcome:
    """Judge ranks that all compute the same, so that the mean equals each rank's own gradient."""
    first = seen.updates[0]
    if bypasses_ddp(seen.recording, seen.bad_steps) and not exchanges(seen.recording, first.step):
        return _bypassed(seen)
    return Unknown(
        "gradients",
        f"all ranks compute the same gradient for {seen.whose}, so the audit"
        " cannot tell the mean from one rank's",
    )


def _scaled_in_loss(seen: _Seen) -> Finding | None:
    """Return that each rank divides its loss by the ranks, or multiplies it, and gets the mean.

    None if neither. On two ranks half a squared error looks the same, a common loss, so there only
    a classification's counts, and it is not certain.
    """
    first = seen.updates[0]
    losses = _losses(seen.recording, seen.updates)
    sure = first.size > 2
    if not losses.are_means or not (losses.classify or sure):
        return None
    if near(losses.weight, 1):
        return None
    micro_batches = first.records[0].micro or 1
    times_ranks = losses.weight * first.size
    name = None
    if near(times_ranks, 1) or near(times_ranks / micro_batches, 1):
        name = "scaled-in-loss"
    elif micro_batches == 1 and near(losses.weight, first.size):
        name = "multiplied-in-loss"
    return seen.found(name, backward_line(seen.recording), sure=sure) if name else None


def _right_mean(seen: _Seen, *, clipped: bool) -> Right:
    """Return that the optimiser gets the mean, with the relative error and what else was done."""
    extras = {text for update in seen.updates for text in update.texts}
    if clipped:
        extras.add("then clipped")
    watched = "every watched step"
    if seen.without:
        watched += f" but {seen.without} in which it gets none"
    worst = max(update.residue for update in seen.updates)
    limit = f"{10 ** np.ceil(np.log10(max(worst, 1e-16))):.0e}"  # the same for most runs
    details = ", ".join([f"relative error at most {limit}", *sorted(extras)])
    return Right(
        "gradients",
        f"{seen.whose} gets the mean of the ranks' gradients in {watched} ({details})",
    )


def _clipped_multiple(seen: _Seen) -> Iterator[Outcome]:
    """Yield what else is wrong where clipped gradients are added up, but not divided by the ranks.

    A course may ask for clipping before the exchange; a sum is wrong there as well.
    """
    clipped = [update for update in seen.updates if update.kind in _CLIPPED]
    if not clipped:
        return
    kinds = {update.kind for update in seen.updates}
    totals = np.array([update.total for update in clipped])
    tolerance = 10 * seen.updates[0].tolerance
    not_the_mean = np.abs(totals - 1).max() >= tolerance
    constant = np.ptp(totals) / 9 < tolerance
    if not_the_mean and constant and kinds <= {"mean", clipped[0].kind}:
        of_clipped = replace(seen, updates=clipped, bad=clipped)
        yield _multiple(of_clipped, of_clipped.line, total=float(totals[0]))


class _Losses(NamedTuple):
    """The losses of an optimiser's steps.

    weight : the weights of all samples' losses in a step, added up and divided by the number of
        ranks: 1 for a mean on each rank; 0 if a loss was not seen, or it is not known whose it is.
    are_means : they are all means.
    classify : they are all those of a classification.
    """

    weight: float
    are_means: bool
    classify: bool


def _losses(recording: Recording, updates: list[Update]) -> _Losses:
    """Return what the losses of these steps say."""
    scales = {update.step: update.records[0].scale or 1.0 for update in updates}
    weights: list[float] = []
    are_means = classify = True
    for backward in recording.of(Backward):
        if backward.step in scales:
            loss = backward.loss
            weights.append(
                _loss_weight(backward, scales[backward.step], recording.size)
            )  # 0: unknown
            are_means &= loss is not None and loss.reduction == "mean"
            classify &= loss is not None and loss.node.startswith(_CLASSIFIERS)
    optimizers = {step.optimizer_number for step in recording.of(Step)}
    known = all(weights) and len(optimizers) == 1
    weight = sum(weights) / recording.size / len(scales) if known else 0.0
    return _Losses(weight, are_means and bool(weights), classify)


def _loss_weight(backward: Backward, scale: float, size: int) -> float:
    """Return the weight of all samples of a backward in its loss; 0 if that is not known.

    scale : GradScaler's, which the loss is multiplied by.
    """
    loss = backward.loss
    if loss is None:
        return 0.0
    arriving = abs(loss.arriving) / scale
    if loss.reduction in ("mean", "none"):
        return arriving
    if loss.reduction == "sum" and near(arriving, 1):
        return arriving / size  # undivided: it is meant to be added up over the ranks as well
    if loss.reduction == "sum":
        return arriving * samples_of(backward)
    return 0.0


def _multiple(seen: _Seen, line: CodeLine | None, *, total: float) -> Outcome:
    """Judge a constant multiple of the mean, by what may have multiplied it.

    It is right if the scale of the losses makes up for it. Otherwise the gradients were added up,
    or divided by the ranks twice, or by a number that stands in the script, or nobody knows.

    total : the optimisers get this number times the mean.
    """
    first = seen.updates[0]
    size = first.size
    losses = _losses(seen.recording, seen.updates)
    micro = first.records[0].micro
    by_micro_batches = micro > 1 and near(total * micro, 1)  # a sum divided by hand
    if by_micro_batches or near(total * losses.weight, 1):
        return Right(
            "gradients", "the losses' scale and the exchange together give the mean of all samples"
        )
    shown = multiple(total, size, groups=first.evidence.groups)
    pattern = judge(shown).pattern
    if pattern == "sum" and losses.are_means:
        return seen.found("sum-not-mean", line, sure=losses.weight > 0, total=total)
    if pattern == "twice" and (uses_ddp(seen.recording) or size > 2):
        return seen.found("averaged-twice", line, kind="ranks", total=total)
    by_groups = pattern in ("by a group", "twice by a group")
    if by_groups and losses.are_means:
        return _divided_by_groups(seen, line, shown)
    literal = _literal_divisor(seen, line, shown)
    if literal is not None and not by_groups:
        return literal
    text = (
        f"the optimiser gets {total:.3f} times the mean of the {size} ranks' gradients,"
        f" on all ranks and in all {len(seen.updates)} steps"
    )
    if pattern == "sum" or by_groups:
        text += "; what the losses are divided by was not seen"
    return Unknown("gradients", text)


def _divided_by_groups(seen: _Seen, line: CodeLine | None, shown: Evidence) -> Finding:
    """Return that sizes of groups are what the sum is divided by, or is divided by once more."""
    total = shown.factor
    if judge(shown).finding == "averaged-twice":
        (size,) = shown.group_sizes(1 / total)
        return seen.found("averaged-twice", line, kind="group", total=total, divisor=size)
    sizes = shown.group_sizes(shown.divisor)
    divisor = f"{sizes[0]}, the size of a group"
    sure = len(sizes) == 1  # two sizes may as well be a number that stands in the script
    if not sure:
        divisor = f"{sizes[0]} and again by {sizes[1]}, sizes of groups"
    return seen.found("group-divisor", line, sure=sure, total=total, divisor=divisor)


def _literal_divisor(seen: _Seen, line: CodeLine | None, shown: Evidence) -> Finding | None:
    """Return that the gradients are divided by a whole number; None if they are not.

    On two ranks it may also be their number, by which the mean is divided once more.
    """
    total = shown.factor
    of = "sum"
    divisor = shown.divisor
    if uses_ddp(seen.recording):  # which has averaged before the script divides
        of = "mean"
        divisor = 1 / total
    if not shown.is_whole(divisor):
        return None
    twice = near(total * shown.size, 1)
    text = f"{divisor:.0f} (or by 2 and by 2 again)" if twice else f"{divisor:.0f}"
    return seen.found(
        "literal-divisor", line, sure=not twice, compare=total, total=total, of=of, divisor=text
    )


def _uneven_targets(seen: _Seen) -> Iterator[Finding]:
    """Yield the notice if the ranks' losses are means over different numbers of targets.

    ``uneven-batches`` tells of those that differ since the batches do.
    """
    worst: tuple[float, int, list[float]] = (1.0, 0, [])
    for update in seen.updates:
        counted = _counted_targets(seen.recording, update)
        if not update.is_mean or not counted or BY_SAMPLES in update.texts:
            return
        times = max(counted) / min(counted)
        if max(counted) > 1.1 * min(counted) + 1 and times > worst[0]:
            worst = (times, update.step, counted)
    times, step, counted = worst
    if not counted or counted == local_samples(seen.recording, step):
        return
    yield seen.found(
        "uneven-targets",
        backward_line(seen.recording),
        step=step,
        least=min(counted),
        fewer=int(np.argmin(counted)),
        greatest=max(counted),
        more=int(np.argmax(counted)),
        times=times,
    )


def _counted_targets(recording: Recording, update: Update) -> list[float]:
    """Return by rank of how many targets its loss is the mean; empty where that is not known."""
    counted = []
    for rank, record in zip(recording.ranks, update.records, strict=True):
        backwards = in_step(rank.of(Backward), update.step)
        loss = backwards[0].loss if len(backwards) == 1 else None
        if loss is None or not loss.counted or not near(loss.arriving / (record.scale or 1), 1):
            return []
        counted.append(loss.counted)
    return counted


def _early_clips(seen: _Seen) -> Iterator[Finding]:
    """Yield the notice if each rank clips before an exchange by hand, so far without effect."""
    if not all(exchanges(seen.recording, update.step, "gradient") for update in seen.updates):
        return
    for kind in _CLIPPED:
        if all(_clips_early(update, kind) for update in seen.updates):
            line = _clip_line(seen.updates, kind)
            yield found("clips-too-early", line, steps=len(seen.updates))


def _clips_early(update: Update, kind: str) -> bool:
    """Return whether each rank clips before any collective of a step.

    A limit of a hundred times the norm does not count: the call only measures the norm.
    """
    for calls, record in zip(update.clips(kind), update.records, strict=True):
        most = 100 * max(record.got_norm or 0.0, 1)
        early = [clip.limit for clip in calls if clip.collectives == 0]
        if not any(limit is not None and limit < most for limit in early):
            return False
    return True


# --- runs of several sizes ---


def resolve(findings: Sequence[Finding], recordings: Sequence[Recording]) -> list[Finding]:
    """Return the findings, one a size, without those that another size contradicts."""
    sizes = {recording.size for recording in recordings if recording.size > 1}
    if len(sizes) < 2:
        return list(findings)
    contradicted = _contradicted(findings, recordings, sizes)
    return [finding for finding in findings if finding.name not in contradicted]


def _contradicted(
    findings: Sequence[Finding], recordings: Sequence[Recording], sizes: set[int]
) -> set[str]:
    """Return the names that another size contradicts.

    A loss that is halved on two ranks and on three is not divided by the number of ranks; a
    divisor of 4 on two ranks may be 2 times 2, which three ranks tell apart. The same multiple of
    the mean on all sizes is a rate, and so is a sum whose learning rate is divided by the ranks.
    """
    values: dict[str, dict[int, float | None]] = defaultdict(dict)  # by name and size
    for finding in findings:
        values[finding.name] |= dict.fromkeys(finding.sizes, finding.value)
    contradicted = set()
    rates = {_rate_of_the_mean(recording) for recording in recordings}
    if len(rates) == 1 and None not in rates:
        contradicted.add("sum-not-mean")
    for name in ("scaled-in-loss", "multiplied-in-loss"):
        if values[name].keys() < sizes:
            contradicted.add(name)
    literal = values["literal-divisor"]
    constant = literal.keys() == sizes and np.ptp([*literal.values()]) < 1e-3
    twice = literal.keys() == {2} and max(values["averaged-twice"], default=0) > 2
    if constant or twice:
        contradicted.add("literal-divisor")
    return contradicted


def _rate_of_the_mean(recording: Recording) -> float | None:
    """Return the first learning rate times the ranks; None without plain SGD.

    With it the update is linear in the gradient, so a sum with this rate divided by the ranks is
    the mean.
    """
    steps = recording.ranks[0].of(Step) if recording.ranks else []
    if not steps or steps[0].optimizer != "SGD" or steps[0].settings.get("weight_decay"):
        return None
    rate = steps[0].lr[0]
    return None if rate is None else round(rate * recording.size, 9)
