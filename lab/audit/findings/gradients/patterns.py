"""What one update's gradients look like: ``explain`` names the ``Pattern`` of a GradientStep.

It tries the linear explanations first (they leave a residue of about 1e-7), then what is explained
though it is not linear, and otherwise says "unknown".
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.audit.findings.gradients.combination import GradientStep, Parameter, combine, misfit
from lab.audit.recording import Numbers, Record

EXACT, ROUNDED = 1e-4, 2e-2
"""The greatest misfit of float32, and of 16-bit gradients."""
_MEASURED = 100.0
"""A clipping limit this many times the norm is there to measure the norm, not to limit it."""


@dataclass(frozen=True)
class Pattern:
    """How the optimisers' gradients of one update come from the ranks' own.

    Parameters
    ----------
    kind : "mean"; "factor" (the mean times ``total``); "same" (all ranks computed the same, so that
        mean and own are one); "own" (each rank its own); "rows" (each rank what ``texts`` says);
        "weighted" (all ranks the same sum, with unequal weights); "clipped" and "clamped" (before
        averaging, by norm and by value); "extreme" (the ranks' greatest or smallest numbers);
        "parameters" (``texts`` says which, how); "stale"; "kept" (old gradients are still there);
        "nothing" (no gradient, or zeros); "unknown".
    weights : (ranks, ranks), row r holds the weights of what rank r's optimiser gets.
    total : the mean of the weights' sums; 1 for a mean.
    residue : the greatest relative misfit.
    """

    kind: str
    step: GradientStep
    weights: Numbers
    total: float
    residue: float
    texts: tuple[str, ...] = ()


def explain(step: GradientStep, previous: GradientStep | None, start: Numbers | None) -> Pattern:
    """Name the pattern of a step.

    Parameters
    ----------
    previous : the step before.
    start : the weights before the update, (columns,): a weight decay by hand adds a multiple.
    """
    weights = np.array([combine(step.own, got, step.balance) for got in step.got])
    total = float(weights.sum(axis=1).mean())
    residue = max(_worst(step, row, got) for row, got in zip(weights, step.got, strict=True))

    def pattern(kind: str, *texts: str, total: float = total, residue: float = residue) -> Pattern:
        return Pattern(kind, step, weights, total, residue, texts)

    if not step.got.any():
        return pattern("nothing")
    if residue <= _tolerance(step):
        return _linear(step, weights, pattern)
    for attempt in (_clamped, _extreme, _stale, _by_part, _rounded, _decayed, _shortened, _some):
        if found := attempt(step, previous, start, pattern):
            return found
    return pattern("unknown")


MakePattern = Callable[..., Pattern]


def _tolerance(step: GradientStep) -> float:
    return ROUNDED if step.low_precision else EXACT


def coefficient_tolerance(step: GradientStep) -> float:
    """Return how far a weight times N may be from a whole number that it should be."""
    return 1e-2 if step.low_precision else 1e-3


def _worst(step: GradientStep, weights: Numbers, got: Numbers) -> float:
    return float(misfit(step.own, weights, got, step.measured).max(initial=0.0))


def _linear(step: GradientStep, weights: Numbers, pattern: MakePattern) -> Pattern:
    size, limit = step.size, _tolerance(step)
    total = float(weights.sum(axis=1).mean())
    uniform = np.full(size, total / size)
    if all(_worst(step, uniform, got) <= limit for got in step.got):
        if abs(total - 1) > coefficient_tolerance(step):
            return pattern("factor")
        ones = np.eye(size)
        same = all(_worst(step, ones[0], own) <= limit for own in step.own)
        return pattern("same" if same and size > 1 else "mean")
    rows = [_describe(step, r, weights[r]) for r in range(size)]
    if all(row.endswith("its own") for row in rows):
        return pattern("own")
    if any(rows) or np.abs(weights - weights[0]).max() > 1e-2 * np.abs(weights).max():
        return pattern("rows", *[row or _numbers(weights[r]) for r, row in enumerate(rows)])
    factors = _clip_factors(step)
    if factors is not None and factors.min() < 1:
        ratios = weights.mean(axis=0) * size / factors
        if np.ptp(ratios) < 10 * coefficient_tolerance(step) * np.abs(ratios).max():
            return pattern("clipped", total=float(ratios.mean()))
    return pattern("weighted")


def _describe(step: GradientStep, rank: int, weights: Numbers) -> str:
    """Say in words what a rank's optimiser gets; empty if these are other weights."""
    size, limit = step.size, _tolerance(step)
    got, ones = step.got[rank], np.eye(step.size)
    if _worst(step, ones[rank], got) <= limit:
        return "its own"
    if weights[rank] > 0 and _worst(step, ones[rank] * weights[rank], got) <= limit:
        return f"{weights[rank]:.3f} times its own"
    for k in range(size):
        if weights[k] and _worst(step, ones[k] * weights[k], got) <= limit:
            times = "" if abs(weights[k] - 1) < 1e-2 else f"{weights[k]:.3f} times "
            return f"{times}rank {k}'s own"
    for words, factor in (("the mean", 1 / size), ("the sum", 1.0), ("nothing", 0.0)):
        if _worst(step, np.full(size, factor), got) <= limit:
            return words
    return ""


def _numbers(weights: Numbers) -> str:
    return "weights " + " ".join(f"{one:.3f}" for one in weights)


def clips_of(record: Record, kind: str) -> list[Record]:
    """Return a step's calls of clip_grad_norm_ ("norm") or clip_grad_value_ ("value") by name."""
    names = ("kind", "limit", "norm", "collectives", "at")
    clips = [dict(zip(names, one, strict=False)) for one in record.get("clips") or ()]
    return [one for one in clips if one["kind"] == kind]


def limits_before_exchange(clip: Record, record: Record) -> bool:
    """Return whether a clip comes before the exchange and means to limit, not only to measure."""
    greatest = _MEASURED * max(float(record.get("got_norm") or 0), 1.0)
    limit = clip["limit"]
    return clip["collectives"] == 0 and limit is not None and float(limit) < greatest


def _clip_factors(step: GradientStep) -> Numbers | None:
    """Return by how much clip_grad_norm_ shortened each rank's gradient; None if it is unclear."""
    factors = []
    for record in step.records:
        clips = clips_of(record, "norm")
        if len(clips) != 1 or not clips[0]["norm"]:
            return None
        factors.append(min(1.0, clips[0]["limit"] / (clips[0]["norm"] + 1e-6)))
    return np.array(factors)


def common_clip_factor(step: GradientStep) -> float | None:
    """Return the factor of a clipping after averaging: the same on all ranks; None without."""
    factors = _clip_factors(step)
    if factors is None or np.ptp(factors) > 1e-3 * factors.max():
        return None
    return float(factors.mean())


def _clamped(
    step: GradientStep, _: GradientStep | None, __: Numbers | None, pattern: MakePattern
) -> Pattern | None:
    """Values clipped before averaging, or after it, which is right."""
    limits = [clip["limit"] for one in step.records for clip in clips_of(one, "value")]
    if not limits and step.sent is not None:
        limits = [float(np.abs(step.sent).max())]
    limits.append(float(np.abs(step.got).max()))  # where all ranks' values are beyond the limit
    for limit in set(limits):
        mean = np.full(step.size, 1 / step.size)
        clamped = np.clip(step.own, -limit, limit)
        if _all_fit(clamped, mean, step):
            return pattern("clamped", f"{limit:.6g}", total=1.0, residue=0.0)
        after = np.clip(step.own.mean(axis=0), -limit, limit)[None]
        if _all_fit(after, np.ones(1), step):
            return pattern("mean", total=1.0, residue=0.0)
    return None


def _extreme(
    step: GradientStep, _: GradientStep | None, __: Numbers | None, pattern: MakePattern
) -> Pattern | None:
    """The greatest or the smallest of the ranks' numbers (ReduceOp.MAX or MIN)."""
    for words, values in (("greatest", step.own.max(axis=0)), ("smallest", step.own.min(axis=0))):
        if _all_fit(values[None], np.ones(1), step):
            return pattern("extreme", words, residue=0.0)
    return None


def _some(
    step: GradientStep, _: GradientStep | None, __: Numbers | None, pattern: MakePattern
) -> Pattern | None:
    """A weighted sum on some ranks, and something else on others (a reduce to one rank)."""
    rows = []
    for rank, got in enumerate(step.got):
        found = combine(step.own, got, step.balance)
        fits = _worst(step, found, got) <= _tolerance(step)
        known = (_describe(step, rank, found) or _numbers(found)) if fits else ""
        rows.append(known or "no weighted sum of the ranks' gradients")
    return pattern("rows", *rows) if len(set(rows)) > 1 else None


def _all_fit(basis: Numbers, weights: Numbers, step: GradientStep) -> bool:
    limit = _tolerance(step)
    return all(misfit(basis, weights, got, step.measured).max() <= limit for got in step.got)


def _stale(
    step: GradientStep, previous: GradientStep | None, _: Numbers | None, pattern: MakePattern
) -> Pattern | None:
    """Gradients of the step before, in place of this step's or added to them."""
    if previous is None or previous.own.shape != step.own.shape:
        return None
    both, size = np.concatenate([step.own, previous.own]), step.size
    balance = step.balance
    if 4 * len(both) > np.count_nonzero(balance):
        return None
    weights = np.array([combine(both, got, balance) for got in step.got])
    fits = [misfit(both, w, g, step.measured).max() for w, g in zip(weights, step.got, strict=True)]
    if max(fits) > _tolerance(step):
        return None
    now, before = weights[:, :size], weights[:, size:]
    others = now - np.diag(np.diag(now))
    if np.abs(others).max() > 0.05 * np.abs(weights).max():
        return pattern("kept", residue=max(fits))
    return pattern("stale", total=float(before.sum(axis=1).mean()), residue=max(fits))


def _by_part(
    step: GradientStep, _: GradientStep | None, __: Numbers | None, pattern: MakePattern
) -> Pattern | None:
    """The mean in some parameters or parts of them, something else in others."""
    size, checked = step.size, [one for one in step.measured if step.got[:, one.columns].any()]
    total, columns = step.own.sum(axis=0), np.zeros(step.own.shape[1], dtype=bool)
    for one in checked:
        columns[one.columns] = True
    allowed = np.abs(step.own).sum(axis=0)
    allowed[columns] += 1e-2 / step.balance[columns]
    named = {
        "averaged": total / size,
        "each rank's own": step.own,
        "each rank's own, divided": step.own / size,
        "added up": total,
    }
    fits = {
        words: np.abs(step.got - values) <= _tolerance(step) * allowed
        for words, values in named.items()
    }
    if not checked or not np.any(list(fits.values()), axis=0)[:, columns].all():
        return None
    found: dict[str, list[Parameter]] = {}
    for one in checked:
        whole = (words for words, fit in fits.items() if fit[:, one.columns].all())
        found.setdefault(next(whole, ""), []).append(one)
    if "" in found:
        return pattern("rows", *(_shares(fits, r, columns) for r in range(size)), residue=0.0)
    if set(found) <= {"averaged"}:
        return pattern("mean", total=1.0, residue=0.0)
    if not {"averaged", "added up"} & set(found):
        return pattern("own")
    if len(found) == 1:
        return pattern("factor", total=float(size), residue=0.0)
    how, few = min(found.items(), key=lambda item: (item[0] == "averaged", len(item[1])))
    return pattern("parameters", how, *[one.name or one.key for one in few])


def _shares(fits: dict[str, NDArray[np.bool_]], rank: int, columns: NDArray[np.bool_]) -> str:
    """Say which share of the numbers that a rank's optimiser gets is what."""
    texts, left = [], columns.copy()
    for words, fit in fits.items():
        if (now := left & fit[rank]).any():
            share = f"{now.sum() / columns.sum():.0%}"
            texts.append(f"{share} {words}".replace("each rank's", "its"))
        left &= ~now
    return "numbers of which are " + ", ".join(texts)


def _rounded(
    step: GradientStep, _: GradientStep | None, __: Numbers | None, pattern: MakePattern
) -> Pattern | None:
    """A mean that was rounded to 16 bits on its way, element by element."""
    columns = step.balance > 0
    added = step.own.sum(axis=0)[columns]
    sizes = np.abs(step.own).sum(axis=0)[columns]
    total = float(step.got[0][columns] @ added / max(float(added @ added), 1e-300)) * step.size
    for got in step.got:
        error = np.abs(got[columns] - total / step.size * added)
        if (error > abs(total) / step.size * sizes * 2**-7 + 1.2e-7).any():
            return None
    kind = "mean" if abs(total - 1) < 1e-2 else "factor"
    return pattern(kind, "rounded to 16 bits", total=total)


def _decayed(
    step: GradientStep, _: GradientStep | None, start: Numbers | None, pattern: MakePattern
) -> Pattern | None:
    """The mean and a multiple of the weights: a weight decay by hand."""
    if start is None or start.shape != step.got[0].shape or not np.isfinite(start).all():
        return None
    basis = np.concatenate([step.own.mean(axis=0)[None], start[None]])
    for got in step.got:
        weights = combine(basis, got, step.balance)
        if misfit(basis, weights, got, step.measured).max() > _tolerance(step):
            return None
        if abs(weights[0] - 1) > coefficient_tolerance(step):
            return None
    return pattern("mean", "with weight decay added", total=1.0, residue=0.0)


def _shortened(
    step: GradientStep, _: GradientStep | None, __: Numbers | None, pattern: MakePattern
) -> Pattern | None:
    """A mean of gradients of which each rank has shortened each parameter by itself."""
    factors = []
    for one in step.measured:
        if one.stop - one.start < 2 * step.size:
            continue
        for got in step.got:
            found = combine(step.own[:, one.columns], got[one.columns], np.ones(1))
            if misfit(step.own, found, got, (one,))[0] > _tolerance(step):
                return None
            factors.append(found * step.size)
    shares = np.array(factors)
    if len(factors) < 2 * step.size or shares.max() > 1 + 1e-3 or shares.min() <= 0:
        return None
    if (np.ptp(shares, axis=1) / shares.max(axis=1)).max() < 1e-2:
        return None
    return pattern("clipped", "each parameter by itself", total=1.0)
