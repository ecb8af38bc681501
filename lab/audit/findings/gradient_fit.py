"""How the gradients that an optimiser gets come from those that the ranks computed.

``Update`` joins what the ranks recorded of one update. ``_explain`` fits what each rank's optimiser
gets by the ranks' own gradients, which leaves an error of about 1e-7, and otherwise tries what is
not such a sum.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.say import percent
from common.utils.gradient_fit import EXACT, fit, measurable, norms, side_by_side
from lab.audit.findings.weights import Replicas
from lab.audit.findings.where import local_samples
from lab.audit.recording import Numbers
from lab.audit.records import Clip
from lab.evidence import Evidence, explain, judge

BY_SAMPLES = "weighted by the ranks' samples"
_TINY = 1e-300


class Explanation(NamedTuple):
    """What an update is; the fields are those of ``Update``."""

    kind: str
    residue: float
    total: float
    texts: Sequence[str] = ()
    evidence: Evidence | None = None  # that of the update, if the numbers told nothing else


class Update:
    """One update of one optimiser on all ranks.

    Attributes
    ----------
    records : the ranks' records of the kind step.
    known : whether all ranks' gradients are known, and come from a backward().
    names, columns, widths : of the parameters whose gradients are more than rounding errors.
    own, mean : (ranks, columns), the sum of each rank's own gradients, and (columns,), their mean;
        divided by GradScaler's scale if what the optimiser gets is.
    got : (ranks, columns), what each rank's optimiser gets.
    previous, before, after : (ranks, columns), own of the step before, and the weights before and
        after this update; NaN where they are not known.
    misfit, tolerance : see ``Evidence``.
    alike : all ranks computed the same gradient: the mean then equals each rank's own.
    cuts : to which part each rank's clip_grad_norm_ cut what it got; 1 without one.
    kind : "mean" (times ``total``); "rows" (each rank gets what ``texts`` says); "weighted" (all
        ranks the same sum, with unequal weights); "norm" and "value" (by which each rank clips
        before averaging); "extreme" (the ranks' greatest or smallest numbers); "parameters"
        (``texts`` says how, and which); "stale"; "kept" (old gradients are still there); "nothing"
        (no gradient, or zeros); "unknown".
    residue : the greatest relative error.
    total : the multiple of the mean; for "norm" and "value", of the clipped gradients' mean; for
        "unknown", of the nearest sum.
    texts : what each rank gets if the kind is "rows"; else how the update comes about.
    evidence : how what the optimisers get comes from the ranks' own gradients.
    is_mean : what the optimisers get is the mean itself, not a multiple.
    """

    def __init__(
        self, replicas: Replicas, step: int, groups: Collection[frozenset[int]] = ()
    ) -> None:
        self.step = step
        self.records = replicas.steps[step]
        own = replicas.own[step]
        got = replicas.got[step]
        self.size = len(own)
        finite = np.asarray((np.isfinite(own) & np.isfinite(got)).all(axis=0))
        kept = measurable(np.where(finite, own, np.nan), replicas.columns)
        self.known = bool(finite.any() and (kept.size or not got[:, finite].any()))
        self.names = [replicas.names[index] for index in kept]
        slices = [replicas.columns[index] for index in kept]
        self.widths = np.array([at.stop - at.start for at in slices], dtype=np.int64)
        self.columns = side_by_side(self.widths)
        columns = [column for at in slices for column in range(at.start, at.stop)]
        self.own = own[:, columns]
        self.got = got[:, columns]
        self.previous = _like(own, replicas.own.get(step - 1))[:, columns]
        self.before = _like(own, replicas.weights.get(step))[:, columns]
        self.after = _like(own, replicas.weights.get(step + 1))[:, columns]
        self._unscale()
        self.mean = np.asarray(self.own.mean(axis=0))
        self.evidence = explain(
            self.own,
            self.got,
            columns=self.columns,
            rounded=any("16" in replicas.rows[index].dtype for index in kept),
            samples=local_samples(replicas.recording, step),
            groups=groups,
        )
        self.misfit = self.evidence.misfit
        self.tolerance = self.evidence.tolerance
        apart = norms(self.own - self.own[0], self.columns)
        self.alike = bool((apart <= self.misfit * norms(self.own, self.columns)).all())
        self.cuts = self._cuts()
        explanation = _explain(self)
        self.kind = explanation.kind
        self.residue = explanation.residue
        self.total = explanation.total
        self.texts = explanation.texts
        self.evidence = explanation.evidence or self.evidence
        self.is_mean = self.kind == "mean" and abs(self.total - 1) <= self.tolerance

    def _unscale(self) -> None:
        """Divide the ranks' own gradients by GradScaler's scale if that is nearer to what is got.

        What a fused optimiser gets is already divided by it.
        """
        scale = self.records[0].scale or 1.0
        if scale * np.linalg.norm(self.got) ** 2 < np.linalg.norm(self.own) ** 2:
            self.own = self.own / scale
            self.previous = self.previous / scale

    def _cuts(self) -> Numbers:
        """Return ``cuts``; 1 for all ranks if any rank clips several times or never."""
        cuts = []
        for calls in self.clips("norm"):
            if len(calls) != 1 or not calls[0].norm or calls[0].limit is None:
                return np.ones(self.size)
            cuts.append(min(1, calls[0].limit / (calls[0].norm + 1e-6)))  # as torch computes it
        return np.array(cuts)

    def clips(self, kind: str) -> list[list[Clip]]:
        """Return by rank the calls of clip_grad_norm_ ("norm") or clip_grad_value_ ("value")."""
        return [
            [clip for clip in record.clips if clip.kind == kind and clip.limit is not None]
            for record in self.records
        ]


def _like(own: Numbers, values: Numbers | None) -> Numbers:
    """Return the values, or NaN in their shape where they are not known."""
    if values is None or values.shape != own.shape:
        return np.full_like(own, np.nan)
    return values


def _explain(update: Update) -> Explanation:
    """Explain an update: by the ranks' gradients, by other sums, or number by number.

    The first that fits is returned. If none does, its kind is "unknown", or "rows" if the ranks'
    gradients explain at least one rank's.
    """
    if not update.got.any():
        return Explanation("nothing", 0.0, 0.0)
    linear = _linear(update)
    if linear.residue <= update.misfit:
        return linear
    for kind, basis, how in _bases(update):
        weights, errors = fit(basis, update.got, update.columns)
        if errors.max() <= update.misfit:
            total = float(weights.sum(axis=1).mean())
            return Explanation(kind, float(errors.max()), total, [how])
    exact = _by_number(update, linear.residue, error=EXACT)
    if exact is not None:
        return exact
    # the precision of bfloat16, and twice the smallest number of float16
    rounded = _by_number(update, linear.residue, error=2**-7, smallest=1.2e-7)
    return linear if rounded is None else rounded


# --- sums of the ranks' gradients ---


def _linear(update: Update) -> Explanation:
    """Explain an update by the ranks' gradients.

    The kind is "mean", or "weighted" if all ranks get the same sum, or "rows" if they get different
    ones, or some ranks get something else (a reduce to one rank), or "unknown" if all do.
    """
    evidence = update.evidence
    if not np.isnan(evidence.factor):
        return Explanation("mean", evidence.residue, evidence.factor)
    if not evidence.explained.any():
        return Explanation("unknown", evidence.residue, evidence.nearest)
    if evidence.same_sum and evidence.gradients == {"none"}:
        return _weighted(update)
    texts = [source.text for source in evidence.sources]
    return Explanation("rows", evidence.residue, evidence.nearest, texts)


def _weighted(update: Update) -> Explanation:
    """Explain a sum in which the ranks count differently.

    The kind is "mean" if they count by their samples, "norm" if each rank clipped its gradient,
    else "weighted".
    """
    evidence = update.evidence
    residue = evidence.residue
    if judge(evidence).right:
        return Explanation("mean", residue, 1.0, [BY_SAMPLES])
    times = evidence.shares * update.size  # 1 where a rank counts as in the mean
    cuts = update.cuts
    if cuts.min() == 1:
        cuts = _cuts_by_hand(update, times)
    uncut = times / cuts
    if cuts.min() < 1 and np.ptp(uncut) < 10 * update.tolerance * np.abs(uncut).max():
        how = ", ".join(_how_cut(rank, part) for rank, part in enumerate(cuts))
        return Explanation("norm", residue, float(np.mean(uncut)), [how])
    return Explanation("weighted", residue, 1.0, [evidence.shares_text])


def _cuts_by_hand(update: Update, times: Numbers) -> Numbers:
    """Return to which parts gradients are cut if each rank cuts them to one norm by hand.

    times : the weights in the mean, by rank; smaller than 1 where a rank cut its gradient.
    """
    sizes = np.array([record.own_norm or np.nan for record in update.records])
    lengths_after = times * sizes
    limit = np.max(lengths_after[times < 0.999], initial=0.0) or np.inf  # inf: nobody cut
    return np.asarray(np.minimum(1, limit / sizes))


def _how_cut(rank: int, part: float) -> str:
    cut = f"cut to {percent(part, 1)} of its length" if part < 1 else "not cut"
    return f"rank {rank}'s gradient is {cut}"


# --- sums of something else ---

# A kind, the rows of the sum, and how.
Basis = tuple[str, Numbers, str]


def _bases(update: Update) -> Iterator[Basis]:
    """Yield what else the optimisers may get a sum of."""
    yield from _decayed(update)
    yield from _clipped_by_value(update)
    # [None] makes a basis of one row
    greatest = update.own.max(axis=0)
    smallest = update.own.min(axis=0)
    yield "extreme", greatest[None], "greatest of the ranks' gradients (ReduceOp.MAX)"
    yield "extreme", smallest[None], "smallest of the ranks' gradients (ReduceOp.MIN)"
    yield from _clipped_by_parameter(update)
    yield from _with_previous(update)


def _decayed(update: Update) -> Iterator[Basis]:
    weights = update.before[0]
    if np.isfinite(update.before).all():
        # the number of times the weights that fits best what was added to the mean
        decay = weights @ (update.got[0] - update.mean) / max(weights @ weights, _TINY)
        yield "mean", (update.mean + decay * weights)[None], "with weight decay added"


def _clipped_by_value(update: Update) -> Iterator[Basis]:
    for limit in _value_limits(update):
        how = f"each rank limits its gradient to ±{limit:.6g}"
        yield "value", np.clip(update.own, -limit, limit).mean(axis=0)[None], how
        yield "mean", np.clip(update.mean, -limit, limit)[None], "then clipped by value"


def _value_limits(update: Update) -> set[float]:
    """Return the limits by which values may be clipped: as called, or as the numbers tell."""
    calls = [clip for of_rank in update.clips("value") for clip in of_rank]
    limits = {clip.limit for clip in calls if clip.limit is not None}
    limits.add(float(np.abs(update.got).max()))  # where all ranks' values are beyond it
    moved = update.got[0] - update.mean
    changed = np.abs(moved) > update.misfit * np.abs(update.own).max(axis=0)
    if changed.any():
        # In most of these columns only one rank's number is beyond the limit, the greatest g: then
        # the mean moves by (limit - g) / ranks.
        at = np.abs(update.own).argmax(axis=0)[None]
        greatest = np.take_along_axis(update.own, at, axis=0)[0]
        limits.add(float(np.median(np.abs(update.size * moved + greatest)[changed])))
    return limits


def _clipped_by_parameter(update: Update) -> Iterator[Basis]:
    shares = []  # by parameter and rank, to which part a rank cut its gradient
    for at in update.columns:
        weights, _ = fit(update.own[:, at], update.got[:, at], [slice(0, at.stop - at.start)])
        shares.append(np.clip(update.size * weights.mean(axis=0), 0, 1))
    wide = update.widths >= 2 * update.size  # enough numbers for a fit of all ranks
    # Equal shares of all ranks would mean that the mean is cut, not each rank's gradient.
    if np.ptp(np.array(shares)[wide], axis=1).max(initial=0.0) > 1e-2:
        short = update.own * np.repeat(shares, update.widths, axis=0).T
        yield "norm", short.mean(axis=0)[None], "each rank clips each parameter by itself"


def _with_previous(update: Update) -> Iterator[Basis]:
    """Yield this step's and the last one's gradients, if enough numbers are known to fit both.

    The kind is "kept" if gradients of this step are exchanged too, else "stale".
    """
    if not np.isfinite(update.previous).all() or 8 * update.size > update.own.shape[1]:
        return
    both = np.concatenate([update.own, update.previous])
    weights = np.abs(fit(both, update.got, update.columns)[0])
    # the weights of other ranks' gradients of this step
    exchanged = weights[:, : update.size] * (1 - np.eye(update.size))
    kind = "kept" if exchanged.max() > 0.05 * weights.max() else "stale"
    yield kind, both, ""


# --- number by number ---


def _by_number(
    update: Update, residue: float, *, error: float, smallest: float = 0.0
) -> Explanation | None:
    """Explain an update whose every number is the mean, the sum or a rank's own; None if it is not.

    So some parameters, or parts of them, may be left out of an exchange.

    error, smallest : how far a number may be off, relatively to the gradients and absolutely.
    """
    added = update.own.sum(axis=0)
    multiple = float(update.got[0] @ added / (added @ added))
    ways = {
        "averaged": update.mean,
        "each rank's own": update.own,
        "each rank's own, divided": update.own / update.size,
        "multiplied": multiple * added,
        "added up": added,
    }
    sizes = np.linalg.norm(norms(update.own, update.columns), axis=0)
    allowed = smallest + error * np.abs(update.own).mean(axis=0)
    allowed = allowed + 1e-6 * np.repeat(sizes, update.widths)
    fits = {way: np.abs(update.got - values) <= allowed for way, values in ways.items()}
    if not np.any([*fits.values()], axis=0).all():
        return None
    explanation = _by_parameter(update, residue, fits, multiple=multiple)
    if smallest and explanation.kind == "mean":
        return explanation._replace(texts=["rounded to 16 bits"])
    return explanation


def _by_parameter(
    update: Update, residue: float, fits: Mapping[str, NDArray[np.bool_]], *, multiple: float
) -> Explanation:
    """Return whether all parameters are explained in one way, or which ones are the exception.

    fits : by way, which numbers it explains: (ranks, columns); the first way that fits counts.
    multiple : the number in the way "multiplied".
    """
    by_parameter = [_first_way(fits, at) for at in update.columns]
    found = set(by_parameter)
    if None in found:  # a parameter of which no single way explains all numbers
        shares = fits["averaged"].mean(axis=1)
        texts = [f"the mean in {percent(share)} of its numbers" for share in shares]
        means = np.where(shares[:, None] == 1, 1 / update.size, np.nan)
        weights = np.broadcast_to(means, (update.size, update.size))
        return Explanation("rows", residue, 1.0, texts, replace(update.evidence, weights=weights))
    if found == {"averaged"}:
        return Explanation("mean", residue, 1.0)
    if found == {"multiplied"}:
        return Explanation("mean", residue, multiple * update.size)
    if not found & {"averaged", "added up"}:
        own = replace(update.evidence, weights=np.eye(update.size), residue=0.0)
        return Explanation("rows", residue, 1.0, [source.text for source in own.sources], own)
    how = next(way for way in by_parameter if way is not None and way != "averaged")
    names = [name for name, way in zip(update.names, by_parameter, strict=True) if way == how]
    return Explanation("parameters", residue, 1.0, [how, *names])


def _first_way(fits: Mapping[str, NDArray[np.bool_]], at: slice) -> str | None:
    """Return the first way that explains all numbers of a parameter."""
    return next((way for way, fitting in fits.items() if fitting[:, at].all()), None)
