"""How the gradients that an optimiser gets come from those that the ranks computed.

``Update`` joins what the ranks recorded of one update. ``_explain`` fits what each rank's optimiser
gets by the ranks' own gradients, which leaves an error of about 1e-7, and otherwise tries what is
not such a sum.
"""

from collections.abc import Iterator
from itertools import compress

import numpy as np

from lab.audit.findings.weights import Replicas, norms, side_by_side
from lab.audit.findings.where import local_samples
from lab.audit.recording import Numbers, Record

# The greatest misfit of float32, and of 16-bit gradients.
EXACT, ROUNDED = 1e-4, 2e-2
_TINY = 1e-300

# The kind, residue, total and texts of an update.
Explained = tuple[str, float, float, list[str]]


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
        own, got, columns = replicas.own[step], replicas.got[step], replicas.columns
        finite = np.asarray((np.isfinite(own) & np.isfinite(got)).all(axis=0))
        widths = np.array([at.stop - at.start for at in columns])
        lengths = np.linalg.norm(norms(np.where(finite, own, np.nan), columns), axis=0)
        sizes = lengths / np.sqrt(np.maximum(widths, 1))
        kept = np.flatnonzero(sizes > 1e-6 * np.nanmax(sizes, initial=0.0))  # the others: rounding
        at = [j for i in kept for j in range(columns[i].start, columns[i].stop)]
        self.known = bool(finite.any() and (kept.size or not got[:, finite].any()))
        near = (replicas.own.get(step - 1), *(replicas.weights.get(step + i) for i in (0, 1)))
        missing = np.full_like(own, np.nan)
        self.previous, self.before, self.after = (
            (missing if one is None or one.shape != own.shape else one)[:, at] for one in near
        )
        self.own, self.got, self.size = own[:, at], got[:, at], len(own)
        self.step, self.records = step, replicas.steps[step]
        scale = float(self.records[0]["scale"] or 1)
        if scale * np.linalg.norm(self.got) ** 2 < np.linalg.norm(self.own) ** 2:  # nearer with it
            self.own, self.previous = self.own / scale, self.previous / scale
        self.mean = np.asarray(self.own.mean(axis=0))
        self.samples = local_samples(replicas.recording, step)
        self.names = [replicas.names[i] for i in kept]
        self.widths = widths[kept]
        self.columns = side_by_side(self.widths)
        short = any("16" in replicas.rows[i][3] for i in kept)
        self.misfit, self.tolerance = (ROUNDED, 1e-2) if short else (EXACT, 1e-3)
        apart, lengths = (norms(one, self.columns) for one in (self.own - self.own[0], self.own))
        self.alike = bool((apart <= self.misfit * lengths).all())
        calls, self.cuts = self.clips("norm"), np.ones(self.size)
        if all(len(row) == 1 and row[0]["norm"] for row in calls):
            self.cuts = np.array([min(1, one["limit"] / (one["norm"] + 1e-6)) for (one,) in calls])
        self.kind, self.residue, self.total, self.texts = _explain(self)
        self.is_mean = self.kind == "mean" and abs(self.total - 1) <= self.tolerance

    def clips(self, kind: str) -> list[list[Record]]:
        """Return by rank the calls of clip_grad_norm_ ("norm") or clip_grad_value_ ("value")."""
        names = ("kind", "limit", "norm", "collectives", "at")
        calls = [[dict(zip(names, one, strict=True)) for one in r["clips"]] for r in self.records]
        return [
            [one for one in row if one["kind"] == kind and one["limit"] is not None]
            for row in calls
        ]


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


def _explain(one: Update) -> Explained:
    """Explain an update by the first that fits it."""
    if not one.got.any():
        return "nothing", 0.0, 0.0, []
    linear = _linear(one)
    if linear[1] <= one.misfit:
        return linear
    for kind, basis, how in _bases(one):
        weights, errors = fit(basis, one.got, one.columns)
        if errors.max() <= one.misfit:
            return kind, float(errors.max()), float(weights.sum(axis=1).mean()), [how]
    return _by_number(one, linear[1], EXACT) or _by_number(one, linear[1], 2**-7, 1.2e-7) or linear


def _linear(one: Update) -> Explained:
    """A sum of the ranks' gradients, or on some ranks something else (a reduce to one rank)."""
    weights, errors = fit(one.own, one.got, one.columns)
    residue, total = float(errors.max()), float(weights.sum(axis=1).mean())
    texts, factors = zip(*(_source(one, r) for r in range(one.size)), strict=True)
    same = np.ptp(factors) <= one.tolerance * np.abs(factors).max()
    if same and all(text.endswith("the mean") for text in texts):
        return "mean", residue, float(np.mean(factors)), []
    if errors.min() > one.misfit:
        return "unknown", residue, total, []
    if np.ptp(weights, axis=0).max() <= 1e-2 * np.abs(weights).max() and not any(texts):
        return _weighted(one, weights.mean(axis=0), residue)
    sums = [f"weights {' '.join(f'{weight:.3f}' for weight in row)}" for row in weights]
    others = np.where(errors <= one.misfit, sums, "no weighted sum of the gradients")
    listed = [text or str(other) for text, other in zip(texts, others, strict=True)]
    return "rows", residue, total, listed


def _source(one: Update, rank: int) -> tuple[str, float]:
    """Return which multiple of which gradient a rank's optimiser gets; "" if of none."""
    alone, got, found = np.eye(one.size), one.got[[rank]], []
    rows = {"the mean": np.full(one.size, 1 / one.size), "its own": alone[rank]}
    for name, row in (rows | {f"rank {r}'s own": alone[r] for r in range(one.size)}).items():
        values = row @ one.own
        factor = float(got[0] @ values / max(values @ values, _TINY))
        if misfits(one.own, factor * row[None], got, one.columns)[0] <= one.misfit:
            times = "" if abs(factor - 1) < 1e-2 else f"{factor:.3f} times "
            found.append((times + name if factor else "nothing", factor))
    return min(found, key=lambda item: abs(item[1] - 1) > one.tolerance, default=("", 1.0))


def _weighted(one: Update, shares: Numbers, residue: float) -> Explained:
    """A sum in which the ranks count differently: by their samples, clipped, or wrong."""
    if all(one.samples) and np.abs(shares - np.array(one.samples) / sum(one.samples)).max() < 1e-3:
        return "mean", residue, 1.0, ["weighted by the ranks' samples"]
    times, cuts = shares * one.size, one.cuts
    if cuts.min() == 1:  # perhaps by hand: to one norm
        sizes = np.array([record["own_norm"] or np.nan for record in one.records])
        limit = np.max((times * sizes)[times < 0.999], initial=0.0) or np.inf
        cuts = np.minimum(1, limit / sizes)
    if cuts.min() < 1 and np.ptp(times / cuts) < 10 * one.tolerance * np.abs(times / cuts).max():
        how = ", ".join(
            f"rank {r}'s gradient is "
            + (f"cut to {part:.1%} of its length" if part < 1 else "not cut")
            for r, part in enumerate(cuts)
        )
        return "norm", residue, float(np.mean(times / cuts)), [how]
    return "weighted", residue, 1.0, [", ".join(f"{share:.4f}" for share in shares)]


def _bases(one: Update) -> Iterator[tuple[str, Numbers, str]]:
    """Yield what else the optimisers may get a sum of: a kind, the rows of the sum, and how."""
    own, mean, got = one.own, one.mean, one.got[0]
    if np.isfinite(one.before).all():
        decay = one.before[0] @ (got - mean) / max(one.before[0] @ one.before[0], _TINY)
        yield "mean", (mean + decay * one.before[0])[None], "with weight decay added"
    called = [float(clip["limit"]) for row in one.clips("value") for clip in row]
    limits = {*called, float(np.abs(one.got).max())}  # where all ranks' values are beyond it
    changed = np.abs(got - mean) > one.misfit * np.abs(own).max(axis=0)
    if changed.any():  # in most of these columns the greatest number alone is beyond it
        greatest = np.take_along_axis(own, np.abs(own).argmax(axis=0)[None], axis=0)[0]
        limits.add(float(np.median(np.abs(one.size * (got - mean) + greatest)[changed])))
    for limit in limits:
        how = f"each rank limits its gradient to ±{limit:.6g}"
        yield "value", np.clip(own, -limit, limit).mean(axis=0)[None], how
        yield "mean", np.clip(mean, -limit, limit)[None], "then clipped by value"
    yield "extreme", own.max(axis=0)[None], "greatest of the ranks' gradients (ReduceOp.MAX)"
    yield "extreme", own.min(axis=0)[None], "smallest of the ranks' gradients (ReduceOp.MIN)"
    parts = [fit(own[:, at], one.got[:, at], [slice(0, at.stop - at.start)]) for at in one.columns]
    shares = np.clip([one.size * weights.mean(axis=0) for weights, _ in parts], 0, 1)
    wide = one.widths >= 2 * one.size
    if np.ptp(shares[wide], axis=1).max(initial=0.0) > 1e-2:  # else the mean is cut
        short = (own * np.repeat(shares, one.widths, axis=0).T).mean(axis=0)
        yield "norm", short[None], "each rank clips each parameter by itself"
    if np.isfinite(one.previous).all() and 8 * one.size <= own.shape[1]:
        both = np.concatenate([own, one.previous])
        weights = np.abs(fit(both, one.got, one.columns)[0])
        exchanged = weights[:, : one.size] * (1 - np.eye(one.size))  # of this step
        yield "kept" if exchanged.max() > 0.05 * weights.max() else "stale", both, ""


def _by_number(
    one: Update, residue: float, error: float, smallest: float = 0.0
) -> Explained | None:
    """Each number is the mean or something else: in some parameters or parts, or rounded."""
    added = one.own.sum(axis=0)
    multiple = float(one.got[0] @ added / (added @ added))
    ways = {
        "averaged": one.mean,
        "each rank's own": one.own,
        "each rank's own, divided": one.own / one.size,
        "multiplied": multiple * added,
        "added up": added,
    }
    sizes = np.linalg.norm(norms(one.own, one.columns), axis=0)
    allowed = smallest + error * np.abs(one.own).mean(axis=0) + 1e-6 * np.repeat(sizes, one.widths)
    fits = {way: np.abs(one.got - values) <= allowed for way, values in ways.items()}
    if not np.any([*fits.values()], axis=0).all():
        return None
    found = [next((way for way in ways if fits[way][:, at].all()), "") for at in one.columns]
    if "" in found:
        shares = fits["averaged"].mean(axis=1)
        return "rows", residue, 1.0, [f"the mean in {share:.0%} of its numbers" for share in shares]
    if {*found} in ({"averaged"}, {"multiplied"}):
        total = multiple * one.size if "multiplied" in found else 1.0
        return "mean", residue, total, ["rounded to 16 bits"] if smallest else []
    if not {"averaged", "added up"} & {*found}:
        return "rows", residue, 1.0, ["its own"] * one.size
    how = next(way for way in found if way != "averaged")
    return "parameters", residue, 1.0, [how, *compress(one.names, [way == how for way in found])]
