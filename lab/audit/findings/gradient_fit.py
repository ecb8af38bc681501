"""How the gradients that an optimiser gets come from those that the ranks computed.

``Update`` joins what the ranks recorded of one update. ``_explain`` fits what each rank's optimiser
gets by the ranks' own gradients, which leaves an error of about 1e-7, and otherwise tries what is
not such a sum.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.audit.findings.weights import Replicas, norms, side_by_side
from lab.audit.findings.where import local_samples
from lab.audit.recording import Numbers
from lab.audit.records import Clip

# The greatest misfit of float32, and of 16-bit gradients.
EXACT = 1e-4
ROUNDED = 2e-2
_TINY = 1e-300


class Explanation(NamedTuple):
    """What an update is; the fields are those of ``Update``."""

    kind: str
    residue: float
    total: float
    texts: list[str]


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
    misfit : the greatest relative error of a sum that explains a gradient.
    tolerance : how far a weight times N may be from a whole number that it should be.
    alike : all ranks computed the same gradient: the mean then equals each rank's own.
    cuts : to which part each rank's clip_grad_norm_ cut what it got; 1 without one.
    samples : by rank, how many it trained on; 0 where that is not known.
    kind : "mean" (times ``total``); "rows" (each rank gets what ``texts`` says); "weighted" (all
        ranks the same sum, with unequal weights); "norm" and "value" (by which each rank clips
        before averaging); "extreme" (the ranks' greatest or smallest numbers); "parameters"
        (``texts`` says how, and which); "stale"; "kept" (old gradients are still there); "nothing"
        (no gradient, or zeros); "unknown".
    residue : the greatest relative error.
    """

    def __init__(self, replicas: Replicas, step: int) -> None:
        self.step = step
        self.records = replicas.steps[step]
        own = replicas.own[step]
        got = replicas.got[step]
        self.size = len(own)
        finite = np.asarray((np.isfinite(own) & np.isfinite(got)).all(axis=0))
        kept = _measurable(np.where(finite, own, np.nan), replicas.columns)
        self.known = bool(finite.any() and (kept.size or not got[:, finite].any()))
        self.names = [replicas.names[index] for index in kept]
        slices = [replicas.columns[index] for index in kept]
        self.widths = _widths(slices)
        self.columns = side_by_side(self.widths)
        columns = [column for at in slices for column in range(at.start, at.stop)]
        self.own = own[:, columns]
        self.got = got[:, columns]
        self.previous = _like(own, replicas.own.get(step - 1))[:, columns]
        self.before = _like(own, replicas.weights.get(step))[:, columns]
        self.after = _like(own, replicas.weights.get(step + 1))[:, columns]
        self._unscale()
        self.mean = np.asarray(self.own.mean(axis=0))
        self.samples = local_samples(replicas.recording, step)
        rounded = any("16" in replicas.rows[index].dtype for index in kept)
        self.misfit = ROUNDED if rounded else EXACT
        self.tolerance = 1e-2 if rounded else 1e-3
        apart = norms(self.own - self.own[0], self.columns)
        self.alike = bool((apart <= self.misfit * norms(self.own, self.columns)).all())
        self.cuts = self._cuts()
        self.kind, self.residue, self.total, self.texts = _explain(self)
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
        cuts = []
        for calls in self.clips("norm"):
            if len(calls) != 1 or not calls[0].norm or calls[0].limit is None:
                return np.ones(self.size)
            cuts.append(min(1, calls[0].limit / (calls[0].norm + 1e-6)))
        return np.array(cuts)

    def clips(self, kind: str) -> list[list[Clip]]:
        """Return by rank the calls of clip_grad_norm_ ("norm") or clip_grad_value_ ("value")."""
        return [
            [clip for clip in record.clips if clip.kind == kind and clip.limit is not None]
            for record in self.records
        ]


def _widths(columns: list[slice]) -> NDArray[np.int64]:
    return np.array([at.stop - at.start for at in columns], dtype=np.int64)


def _measurable(own: Numbers, columns: list[slice]) -> NDArray[np.int64]:
    """Return which parameters' gradients are more than rounding errors of the greatest ones."""
    lengths = np.linalg.norm(norms(own, columns), axis=0)
    sizes = lengths / np.sqrt(np.maximum(_widths(columns), 1))
    return np.flatnonzero(sizes > 1e-6 * np.nanmax(sizes, initial=0.0))


def _like(own: Numbers, values: Numbers | None) -> Numbers:
    """Return the values, or NaN in their shape where they are not known."""
    if values is None or values.shape != own.shape:
        return np.full_like(own, np.nan)
    return values


def misfits(basis: Numbers, weights: Numbers, got: Numbers, columns: list[slice]) -> Numbers:
    """Return by row of ``got`` how far weights @ basis is from it, in the worst parameter.

    The scale is what is added up, so a sum that nearly cancels is not measured by what is left.
    """
    sizes = np.maximum(np.abs(weights) @ norms(basis, columns), norms(got, columns))
    apart = norms(weights @ basis - got, columns) / np.maximum(sizes, _TINY)
    return np.asarray(apart.max(axis=1, initial=0.0))


def fit(basis: Numbers, got: Numbers, columns: list[slice]) -> tuple[Numbers, Numbers]:
    """Return the smallest weights with which weights @ basis is nearest to got, and the misfits.

    All parameters count alike. Gradients that are equal share their weight.
    """
    sizes = [np.linalg.norm(basis[:, at]) or np.inf for at in columns]
    balance = np.repeat(1 / np.array(sizes), [at.stop - at.start for at in columns])
    found = np.linalg.lstsq((basis * balance).T, (got * balance).T, rcond=1e-3)[0]
    weights = np.asarray(found.T, dtype=np.float64)
    return weights, misfits(basis, weights, got, columns)


def _explain(update: Update) -> Explanation:
    """Explain an update by the first that fits it."""
    if not update.got.any():
        return Explanation("nothing", 0.0, 0.0, [])
    linear = _linear(update)
    if linear.residue <= update.misfit:
        return linear
    for kind, basis, how in _bases(update):
        weights, errors = fit(basis, update.got, update.columns)
        if errors.max() <= update.misfit:
            total = float(weights.sum(axis=1).mean())
            return Explanation(kind, float(errors.max()), total, [how])
    exact = _by_number(update, linear.residue, error=EXACT)
    return exact or _by_number(update, linear.residue, error=2**-7, smallest=1.2e-7) or linear


# --- sums of the ranks' gradients ---


def _linear(update: Update) -> Explanation:
    """A sum of the ranks' gradients, or on some ranks something else (a reduce to one rank)."""
    weights, errors = fit(update.own, update.got, update.columns)
    residue = float(errors.max())
    total = float(weights.sum(axis=1).mean())
    sources = [_source(update, rank) for rank in range(update.size)]
    texts = [text for text, _ in sources]
    factors = [factor for _, factor in sources]
    same = np.ptp(factors) <= update.tolerance * np.abs(factors).max()
    if same and all(text.endswith("the mean") for text in texts):
        return Explanation("mean", residue, float(np.mean(factors)), [])
    if errors.min() > update.misfit:
        return Explanation("unknown", residue, total, [])
    equal_rows = np.ptp(weights, axis=0).max() <= 1e-2 * np.abs(weights).max()
    if equal_rows and not any(texts):
        return _weighted(update, weights.mean(axis=0), residue)
    for rank, text in enumerate(texts):
        if not text:
            texts[rank] = _row_text(weights[rank], fits=bool(errors[rank] <= update.misfit))
    return Explanation("rows", residue, total, texts)


def _row_text(weights: Numbers, *, fits: bool) -> str:
    if not fits:
        return "no weighted sum of the gradients"
    return f"weights {' '.join(f'{weight:.3f}' for weight in weights)}"


def _source(update: Update, rank: int) -> tuple[str, float]:
    """Return which multiple of which gradient a rank's optimiser gets; "" if of none."""
    alone = np.eye(update.size)
    got = update.got[[rank]]
    rows = {"the mean": np.full(update.size, 1 / update.size), "its own": alone[rank]}
    rows |= {f"rank {other}'s own": alone[other] for other in range(update.size)}
    multiples = []
    for name, row in rows.items():
        values = row @ update.own
        factor = float(got[0] @ values / max(values @ values, _TINY))
        error = misfits(update.own, factor * row[None], got, update.columns)[0]
        if error <= update.misfit:
            multiples.append((_multiple_text(factor, name), factor))
    for text, factor in multiples:
        if abs(factor - 1) <= update.tolerance:
            return text, factor
    return multiples[0] if multiples else ("", 1.0)


def _multiple_text(factor: float, name: str) -> str:
    if factor == 0:
        return "nothing"
    return name if abs(factor - 1) < 1e-2 else f"{factor:.3f} times {name}"


def _weighted(update: Update, shares: Numbers, residue: float) -> Explanation:
    """A sum in which the ranks count differently: by their samples, clipped, or wrong."""
    if all(update.samples):
        by_samples = np.array(update.samples) / sum(update.samples)
        if np.abs(shares - by_samples).max() < 1e-3:
            return Explanation("mean", residue, 1.0, ["weighted by the ranks' samples"])
    times = shares * update.size
    cuts = update.cuts
    if cuts.min() == 1:
        cuts = _cuts_by_hand(update, times)
    uncut = times / cuts
    if cuts.min() < 1 and np.ptp(uncut) < 10 * update.tolerance * np.abs(uncut).max():
        how = ", ".join(_how_cut(rank, part) for rank, part in enumerate(cuts))
        return Explanation("norm", residue, float(np.mean(uncut)), [how])
    return Explanation("weighted", residue, 1.0, [", ".join(f"{share:.4f}" for share in shares)])


def _cuts_by_hand(update: Update, times: Numbers) -> Numbers:
    """Return to which parts gradients are cut if each rank cuts them to one norm by hand."""
    sizes = np.array([record.own_norm or np.nan for record in update.records])
    limit = np.max((times * sizes)[times < 0.999], initial=0.0) or np.inf
    return np.asarray(np.minimum(1, limit / sizes))


def _how_cut(rank: int, part: float) -> str:
    cut = f"cut to {part:.1%} of its length" if part < 1 else "not cut"
    return f"rank {rank}'s gradient is {cut}"


# --- sums of something else ---

# A kind, the rows of the sum, and how.
Basis = tuple[str, Numbers, str]


def _bases(update: Update) -> Iterator[Basis]:
    """Yield what else the optimisers may get a sum of."""
    yield from _decayed(update)
    yield from _clipped_by_value(update)
    greatest = update.own.max(axis=0)
    smallest = update.own.min(axis=0)
    yield "extreme", greatest[None], "greatest of the ranks' gradients (ReduceOp.MAX)"
    yield "extreme", smallest[None], "smallest of the ranks' gradients (ReduceOp.MIN)"
    yield from _clipped_by_parameter(update)
    yield from _with_previous(update)


def _decayed(update: Update) -> Iterator[Basis]:
    weights = update.before[0]
    if np.isfinite(update.before).all():
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
    if changed.any():  # in most of these columns the greatest number alone is beyond it
        at = np.abs(update.own).argmax(axis=0)[None]
        greatest = np.take_along_axis(update.own, at, axis=0)[0]
        limits.add(float(np.median(np.abs(update.size * moved + greatest)[changed])))
    return limits


def _clipped_by_parameter(update: Update) -> Iterator[Basis]:
    shares = []
    for at in update.columns:
        weights, _ = fit(update.own[:, at], update.got[:, at], [slice(0, at.stop - at.start)])
        shares.append(np.clip(update.size * weights.mean(axis=0), 0, 1))
    wide = update.widths >= 2 * update.size
    if np.ptp(np.array(shares)[wide], axis=1).max(initial=0.0) > 1e-2:  # else the mean is cut
        short = update.own * np.repeat(shares, update.widths, axis=0).T
        yield "norm", short.mean(axis=0)[None], "each rank clips each parameter by itself"


def _with_previous(update: Update) -> Iterator[Basis]:
    """Yield the sum of this step's and the last one's gradients, if both are known well."""
    if not np.isfinite(update.previous).all() or 8 * update.size > update.own.shape[1]:
        return
    both = np.concatenate([update.own, update.previous])
    weights = np.abs(fit(both, update.got, update.columns)[0])
    exchanged = weights[:, : update.size] * (1 - np.eye(update.size))  # of this step
    kind = "kept" if exchanged.max() > 0.05 * weights.max() else "stale"
    yield kind, both, ""


# --- number by number ---


def _by_number(
    update: Update, residue: float, *, error: float, smallest: float = 0.0
) -> Explanation | None:
    """Each number is the mean or something else: in some parameters or parts, or rounded."""
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
    """Return which ways explain the parameters.

    fits : by way, which numbers it explains: (ranks, columns).
    """
    by_parameter = [_first_way(fits, at) for at in update.columns]
    found = set(by_parameter)
    if None in found:
        shares = fits["averaged"].mean(axis=1)
        texts = [f"the mean in {share:.0%} of its numbers" for share in shares]
        return Explanation("rows", residue, 1.0, texts)
    if found == {"averaged"}:
        return Explanation("mean", residue, 1.0, [])
    if found == {"multiplied"}:
        return Explanation("mean", residue, multiple * update.size, [])
    if not found & {"averaged", "added up"}:
        return Explanation("rows", residue, 1.0, ["its own"] * update.size)
    how = next(way for way in by_parameter if way is not None and way != "averaged")
    names = [name for name, way in zip(update.names, by_parameter, strict=True) if way == how]
    return Explanation("parameters", residue, 1.0, [how, *names])


def _first_way(fits: Mapping[str, NDArray[np.bool_]], at: slice) -> str | None:
    """Return the first way that explains all numbers of a parameter."""
    return next((way for way, fitting in fits.items() if fitting[:, at].all()), None)
