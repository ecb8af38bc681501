"""How the gradients that an optimiser gets come from those that the ranks computed.

``read_steps`` joins the ranks' records into one ``GradientStep`` an update. ``explain`` then names
the ``Pattern`` of an update: it fits what each rank's optimiser gets by the ranks' own gradients,
which leaves an error of about 1e-7, and otherwise tries what is not such a sum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.audit.findings.weights import Replicas, columns_of, common_steps, norms, same_rows
from lab.audit.recording import Numbers, Record, Recording

EXACT, ROUNDED = 1e-4, 2e-2
"""The greatest misfit of float32, and of 16-bit gradients."""
_NEGLIGIBLE = 1e-6
"""A parameter whose gradient is smaller than the greatest by this factor holds rounding errors."""


@dataclass(frozen=True)
class GradientStep:
    """One update of one optimiser on all ranks.

    Parameters
    ----------
    records : the ranks' records of the kind step.
    names, columns : of the parameters whose gradients are more than rounding errors.
    own : (ranks, columns), the sum of each rank's own gradients; divided by GradScaler's scale if
        what the optimiser gets is.
    got : (ranks, columns), what each rank's optimiser gets.
    previous : own of the step before; None where it is not known.
    start : (columns,), the weights before the update; None where they are not known.
    after : (ranks, columns), each rank's weights at the next step; None where they are not known.
    low_precision : a parameter has 16 bits.
    """

    step: int
    optimizer: int
    records: Sequence[Record]
    names: list[str]
    columns: list[slice]
    own: Numbers
    got: Numbers
    previous: Numbers | None
    start: Numbers | None
    after: Numbers | None
    low_precision: bool

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.records)

    @property
    def mean(self) -> Numbers:
        """The mean of the ranks' own gradients, (columns,)."""
        return np.asarray(self.own.mean(axis=0))

    @property
    def misfit(self) -> float:
        """The greatest relative error of a sum that explains a gradient."""
        return ROUNDED if self.low_precision else EXACT

    @property
    def tolerance(self) -> float:
        """How far a weight times N may be from a whole number that it should be."""
        return 1e-2 if self.low_precision else 1e-3

    @property
    def alike(self) -> bool:
        """Whether all ranks computed the same gradient: the mean then equals each rank's own."""
        apart, sizes = (norms(one, self.columns) for one in (self.own - self.own[0], self.own))
        return bool((apart <= self.misfit * sizes).all())


@dataclass(frozen=True)
class Pattern:
    """How the optimisers' gradients of one update come from the ranks' own.

    Parameters
    ----------
    kind : "mean" (times ``total``); "own" (each rank its own); "rows" (each rank what ``texts``
        says); "weighted" (all ranks the same sum, with unequal weights); "shortened" and "clamped"
        (each rank's parameters by norm, or numbers by value, before averaging); "extreme" (the
        ranks' greatest or smallest numbers); "parameters" (``texts`` says how, and which); "stale";
        "kept" (old gradients are still there); "nothing" (no gradient, or zeros); "unknown".
    residue : the greatest relative error.
    total : the mean of the weights' sums; 1 for a mean.
    weights : (ranks, ranks), row r holds the weights of what rank r's optimiser gets.
    """

    kind: str
    step: GradientStep
    residue: float
    total: float
    weights: Numbers
    texts: Sequence[str] = ()

    @property
    def is_mean(self) -> bool:
        """Whether it is the mean itself, not a multiple."""
        return self.kind == "mean" and abs(self.total - 1) <= self.step.tolerance


def read_steps(recording: Recording, o: int, replicas: Replicas | None) -> list[GradientStep]:
    """Return the updates of an optimiser that all ranks have recorded, without broken ones."""
    rows = same_rows(recording, o)
    weights = {} if replicas is None else replicas.values
    common = common_steps(recording, "step", o) if rows is not None else {}
    steps = [
        _read_step(
            recording,
            rows or [],
            records,
            earlier=common.get(number - 1),
            before=weights.get(number),
            after=weights.get(number + 1),
        )
        for number, records in common.items()
    ]
    return [one for one in steps if one is not None]


def _read(recording: Recording, records: list[Record] | None, name: str) -> Numbers:
    """Return the ranks' samples of a name, (ranks, columns)."""
    pairs = zip(recording.ranks, records or [], strict=False)
    return np.array([rank.numbers(one[name]) for rank, one in pairs], dtype=np.float64)


def _read_step(
    recording: Recording,
    rows: list[list[Any]],
    records: list[Record],
    *,
    earlier: list[Record] | None,
    before: Numbers | None,
    after: Numbers | None,
) -> GradientStep | None:
    """Return the arrays of a step; None if the gradients are not known, or from no backward()."""
    own, got = _read(recording, records, "own"), _read(recording, records, "got")
    previous = np.nan_to_num(_read(recording, earlier, "own"))
    finite = np.asarray((np.isfinite(own) & np.isfinite(got)).all(axis=0))
    columns = columns_of(rows)
    known = [i for i, at in enumerate(columns) if at.stop <= finite.size and finite[at].all()]
    own, got = np.where(finite, own, 0), np.where(finite, got, 0)
    if not known or (got.any() and not own.any()):
        return None
    scale = float(records[0]["scale"] or 1)
    if scale * np.linalg.norm(got) ** 2 < np.linalg.norm(own) ** 2:  # nearer with it than without
        own, previous = own / scale, previous / scale
    sizes = {i: float(np.sqrt(np.mean(own[:, columns[i]] ** 2))) for i in known if rows[i][4]}
    kept = [i for i, one in sizes.items() if one > _NEGLIGIBLE * max(sizes.values())]
    mask = np.isin(
        np.arange(finite.size), [j for i in kept for j in range(finite.size)[columns[i]]]
    )
    return GradientStep(
        step=records[0]["step"],
        optimizer=records[0]["o"],
        records=records,
        names=[str(rows[i][1] or rows[i][0]) for i in kept],
        columns=columns_of([rows[i] for i in kept]),
        own=own[:, mask],
        got=got[:, mask],
        previous=previous[:, mask] if previous.shape == own.shape else None,
        start=None if before is None or before.shape != own.shape else before[0, mask],
        after=None if after is None or after.shape != own.shape else after[:, mask],
        low_precision=any("16" in rows[i][3] for i in known),
    )


def clips_of(record: Record, kind: str) -> list[Record]:
    """Return a step's calls of clip_grad_norm_ ("norm") or clip_grad_value_ ("value") by name."""
    names = ("kind", "limit", "norm", "collectives", "at")
    clips = [dict(zip(names, one, strict=True)) for one in record["clips"]]
    return [one for one in clips if one["kind"] == kind and one["limit"] is not None]


def misfits(basis: Numbers, weights: Numbers, got: Numbers, columns: list[slice]) -> Numbers:
    """Return by row of ``got`` how far weights @ basis is from it, in the worst parameter.

    The scale is what is added up, so a sum that nearly cancels is not measured by what is left.
    """
    added = np.abs(weights) @ norms(basis, columns)
    sizes = np.maximum(np.maximum(added, norms(got, columns)), 1e-300)
    return np.asarray((norms(weights @ basis - got, columns) / sizes).max(axis=1, initial=0.0))


def fit(basis: Numbers, got: Numbers, columns: list[slice]) -> tuple[Numbers, Numbers]:
    """Return the smallest weights with which weights @ basis is nearest to got, and the misfits.

    All parameters count alike. Gradients that are equal share their weight.
    """
    balance = np.zeros(basis.shape[1])
    for at in columns:
        size = float(np.linalg.norm(basis[:, at]))
        balance[at] = 1 / size if size else 0
    found = np.linalg.lstsq((basis * balance).T, (got * balance).T, rcond=1e-3)[0]
    weights = np.asarray(found.T, dtype=np.float64)
    return weights, misfits(basis, weights, got, columns)


def explain(step: GradientStep) -> Pattern:
    """Name the pattern of a step."""
    weights, errors = fit(step.own, step.got, step.columns)
    pattern = Pattern("unknown", step, errors.max(), weights.sum(axis=1).mean(), weights)
    if not step.got.any():
        kind, found = "nothing", dict[str, Any]()
    elif errors.max() <= step.misfit:
        kind, found = _linear(step, weights, errors)
    else:
        kind, found = (
            _fixed(step)
            or _with_old(step)
            or _by_number(step, EXACT, 0.0)
            or _by_number(step, 2**-7, 1.2e-7)
            or _by_parameter(step)
            or _linear(step, weights, errors)
        )
    return Pattern(**{**vars(pattern), "kind": kind, **found})


Explained = tuple[str, dict[str, Any]]
"""The kind of a pattern, and other fields of it."""


def _linear(step: GradientStep, weights: Numbers, errors: Numbers) -> Explained:
    """A sum of the ranks' gradients, or on some ranks something else (a reduce to one rank)."""
    sources = [step.mean, *step.own]
    fits = [fit(one[None], step.got, step.columns) for one in sources]
    whose: list[str] = []
    factors: list[float] = []
    texts = []
    for r in range(step.size):
        found = [k for k in (0, r + 1, *range(len(fits))) if fits[k][1][r] <= step.misfit]
        found.sort(key=lambda k: abs(fits[k][0][r, 0] - 1) > step.tolerance)
        if found:
            k, factor = found[0], float(fits[found[0]][0][r, 0])
            words = "the mean" if k == 0 else "its own" if k == r + 1 else f"rank {k - 1}'s own"
            whose, factors = [*whose, words], [*factors, factor]
            times = "" if abs(factor - 1) < 1e-2 else f"{factor:.3f} times "
            texts.append(times + words if factor else "nothing")
        elif errors[r] <= step.misfit:
            texts.append("weights " + " ".join(f"{one:.3f}" for one in weights[r]))
        else:
            texts.append("no weighted sum of the ranks' gradients")
    if len(whose) == step.size and len(set(whose)) == 1:
        if whose[0] == "its own":
            return "own", {}
        if whose[0] == "the mean" and np.ptp(factors) <= step.tolerance * max(np.abs(factors)):
            return "mean", {"total": float(np.mean(factors))}
    if errors.min() > step.misfit:
        return "unknown", {}
    if not whose and np.ptp(weights, axis=0).max() <= 1e-2 * np.abs(weights).max():
        return "weighted", {}
    return "rows", {"texts": texts}


def _fixed(step: GradientStep) -> Explained | None:
    """Values clipped before averaging, or after it, which is right; or the ranks' extremes."""
    for kind, basis, text in _predictions(step):
        weights = np.full((step.size, len(basis)), 1 / len(basis))
        error = misfits(basis, weights, step.got, step.columns).max()
        if error <= step.misfit:
            return kind, {"total": 1.0, "residue": error, "texts": [text] if text else []}
    return None


def _predictions(step: GradientStep) -> Iterator[tuple[str, Numbers, str]]:
    limits = {float(clip["limit"]) for one in step.records for clip in clips_of(one, "value")}
    limits.add(float(np.abs(step.got).max()))  # where all ranks' values are beyond the limit
    changed = np.abs(step.got[0] - step.mean) > step.misfit * np.abs(step.own).max(axis=0)
    if changed.any():  # in most of these columns the greatest number alone is beyond it
        greatest = np.take_along_axis(step.own, np.abs(step.own).argmax(axis=0)[None], axis=0)[0]
        limits.add(
            float(np.median(np.abs(step.size * (step.got[0] - step.mean) + greatest)[changed]))
        )
    for limit in limits:
        yield (
            "clamped",
            np.clip(step.own, -limit, limit),
            f"each rank limits its gradient to ±{limit:.6g}",
        )
        yield "mean", np.clip(step.mean, -limit, limit)[None], ""
    yield "extreme", step.own.max(axis=0)[None], "greatest of the ranks' gradients (ReduceOp.MAX)"
    yield "extreme", step.own.min(axis=0)[None], "smallest of the ranks' gradients (ReduceOp.MIN)"


def _with_old(step: GradientStep) -> Explained | None:
    """The mean with a weight decay by hand, or gradients of the step before."""
    if step.start is not None:
        weights, errors = fit(np.array([step.mean, step.start]), step.got, step.columns)
        if errors.max() <= step.misfit and np.abs(weights[:, 0] - 1).max() <= step.tolerance:
            return "mean", {
                "total": 1.0,
                "residue": errors.max(),
                "texts": ["with weight decay added"],
            }
    if step.previous is None or 8 * step.size > step.own.shape[1]:
        return None
    weights, errors = fit(np.concatenate([step.own, step.previous]), step.got, step.columns)
    if errors.max() > step.misfit:
        return None
    now, before = weights[:, : step.size], weights[:, step.size :]
    exchanged = now - np.diag(np.diag(now))
    if np.abs(exchanged).max() > 0.05 * np.abs(weights).max():
        return "kept", {"residue": errors.max()}
    return "stale", {"residue": errors.max(), "total": before.sum(axis=1).mean()}


def _by_number(step: GradientStep, error: float, smallest: float) -> Explained | None:
    """Each number is the mean or something else: in some parameters or parts, or rounded."""
    added = step.own.sum(axis=0)
    multiple = float(step.got[0] @ added / (added @ added))
    ways = {
        "averaged": step.mean,
        "each rank's own": step.own,
        "each rank's own, divided": step.own / step.size,
        "multiplied": multiple * added,
        "added up": added,
    }
    allowed = smallest + error * np.abs(step.own).mean(axis=0)
    for at in step.columns:
        allowed[at] += 1e-6 * np.linalg.norm(step.own[:, at])
    fits = np.array([np.abs(step.got - values) <= allowed for values in ways.values()])
    if not fits.any(axis=0).all():
        return None
    names: dict[str, list[str]] = {}
    for name, at in zip(step.names, step.columns, strict=True):
        whole = [words for words, one in zip(ways, fits, strict=True) if one[:, at].all()]
        names.setdefault(whole[0] if whole else "in parts", []).append(name)
    if "in parts" in names:
        first = fits.argmax(axis=0)
        texts = [
            " and ".join(
                f"{np.mean(row == i):.0%} {words}" for i, words in enumerate(ways) if i in row
            )
            for row in first
        ]
        return "rows", {"texts": [f"{one} numbers" for one in texts]}
    if len(names) == 1 and names.keys() <= {"averaged", "multiplied"}:
        total = multiple * step.size if "multiplied" in names else 1.0
        return "mean", {"total": total, "texts": ["rounded to 16 bits"] if smallest else []}
    if not {"averaged", "added up"} & names.keys():
        return "own", {}
    how, few = min(names.items(), key=lambda item: (item[0] == "averaged", len(item[1])))
    return "parameters", {"texts": [how, *few]}


def _by_parameter(step: GradientStep) -> Explained | None:
    """A mean of gradients of which each rank has shortened each parameter by itself."""
    found = []
    for at in step.columns:
        if at.stop - at.start >= 2 * step.size:
            own, got = step.own[:, at], step.got[:, at]
            weights, errors = fit(own, got, [slice(0, own.shape[1])])
            if errors.max() > step.misfit:
                return None
            found.append(weights * step.size)
    shares = np.array(found)
    if len(found) < 2 or shares.max() > 1 + 1e-3 or shares.min() <= 0:
        return None
    if (np.ptp(shares, axis=-1) / shares.max(axis=-1)).max() < 1e-2:
        return None
    return "shortened", {"total": 1.0, "texts": ["each rank clips each parameter by itself"]}
