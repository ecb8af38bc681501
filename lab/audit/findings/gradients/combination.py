"""What each rank computed and what its optimiser got, as arrays, and how one gives the other.

``gradient_steps`` joins the records of all ranks into one ``GradientStep`` per update;
``combine`` solves got = sum over ranks k of c[k] * own[k]; ``misfit`` says how well given weights
explain what an optimiser got.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.audit.findings.where import first_step_apart, lasting_optimizers
from lab.audit.probe.coordinates import coordinates
from lab.audit.recording import Numbers, RankRecords, Record, Recording

Row = list[Any]
"""A row of a params record."""

NEGLIGIBLE = 1e-6
"""A parameter whose gradient is smaller than the greatest by this factor holds rounding errors."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of an optimiser: its name, and its columns [start, stop) in the arrays."""

    key: str
    name: str
    dtype: str
    start: int
    stop: int
    sharded: bool = False

    @property
    def columns(self) -> slice:
        """Its columns."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class GradientStep:
    """One update of one optimiser on all ranks.

    Parameters
    ----------
    records : the ranks' records of the kind step.
    own : (ranks, columns), the sum of each rank's own gradients; divided by GradScaler's scale if
        what the optimiser gets is.
    got : (ranks, columns), what each rank's optimiser gets.
    sent : (ranks, columns), .grad before the exchange; None where it is not known.
    """

    step: int
    optimizer: int
    records: tuple[Record, ...]
    parameters: tuple[Parameter, ...]
    own: Numbers
    got: Numbers
    sent: Numbers | None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.records)

    @cached_property
    def measured(self) -> tuple[Parameter, ...]:
        """The parameters whose gradients are more than rounding errors."""
        typical = {
            one: float(np.sqrt(np.mean(np.square(self.own[:, one.columns]))))
            for one in self.parameters
            if one.stop > one.start
        }
        greatest = max(typical.values(), default=0.0)
        return tuple(one for one, size in typical.items() if size > NEGLIGIBLE * greatest)

    @cached_property
    def balance(self) -> Numbers:
        """A factor per column that gives all measured parameters the same weight in a fit."""
        factors = np.zeros(self.own.shape[1])
        for one in self.measured:
            factors[one.columns] = 1 / np.linalg.norm(self.own[:, one.columns])
        return factors

    @property
    def low_precision(self) -> bool:
        """Whether a parameter has 16 bits."""
        return any("16" in one.dtype for one in self.parameters)


def gradient_steps(recording: Recording) -> dict[int, list[GradientStep]]:
    """Return the updates of each optimiser that all ranks have recorded; broken ones are left out.

    Raises ValueError, with a sentence for the user, if the ranks' optimisers cannot be compared.
    """
    if len(recording.ranks) < recording.size:
        missing = set(range(recording.size)) - {one.rank for one in recording.ranks}
        raise ValueError(f"rank {min(missing)} recorded nothing")
    numbers = chain.from_iterable(lasting_optimizers(recording))
    return {o: list(_steps_of(recording, o)) for o in numbers}


def _steps_of(recording: Recording, o: int) -> Iterator[GradientStep]:
    end = first_step_apart(recording)
    steps = [
        {one["step"]: one for one in rank.by_kind["step"] if one["o"] == o and one["step"] < end}
        for rank in recording.ranks
    ]
    for number in sorted(set.intersection(*(set(one) for one in steps))):
        records = tuple(one[number] for one in steps)
        rows = [parameter_rows(rank, o) for rank in recording.ranks]
        if len({tuple((r[0], r[1], tuple(r[2])) for r in one) for one in rows}) > 1:
            raise ValueError("the optimisers of the ranks hold different parameters")
        step = _join(recording, records, rows)
        if step is not None:
            yield _without_scale(step)


def parameter_rows(rank: RankRecords, o: int) -> list[Row]:
    """Return the rows of the parameters of optimiser ``o``, in the order of their samples."""
    first: dict[str, Row] = {}
    for record in rank.by_kind["params"]:
        for row in record["rows"]:
            if str(row[0]).split(".")[0] == str(o):
                first.setdefault(row[0], row)
    return list(first.values())


def _join(
    recording: Recording,
    records: tuple[Record, ...],
    rows: list[Row],
) -> GradientStep | None:
    """Return the arrays of a step; None if a rank's gradients are missing or not finite."""
    own, got, sent = [], [], []
    kept = [np.array(coordinates(row[4]), dtype=int) for row in rows[0]]
    counts = [len(one) for one in kept]
    sharded = [any(ranks[i][6] < ranks[i][4] for ranks in rows) for i in range(len(counts))]
    for rank, record in zip(recording.ranks, records, strict=True):
        own.append(rank.numbers(record["own"]))
        got.append(rank.numbers(record["got"]))
        sent.append(rank.numbers(record["sent"]))
    if any(sharded):
        got = _join_shards(got, rows, kept)
    arrays = [one for one in [*own, *got] if one is not None]
    lengths = {len(one) for one in arrays}
    if len(arrays) < 2 * len(records) or len(lengths) > 1:
        return None
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(int)
    finite = np.isfinite(np.sum(arrays, axis=0))
    known = [
        i
        for i in range(len(counts))
        if starts[i + 1] <= len(finite) and finite[starts[i] : starts[i + 1]].all()
    ]
    if not known:
        return None
    parameters = tuple(
        Parameter(r[0], r[1], str(r[3]), int(starts[i]), int(starts[i + 1]), sharded[i])
        for i, r in ((i, rows[0][i]) for i in known)
    )
    if not np.any(_zeroed(own)) and np.any(_zeroed(got)):
        return None  # backward() fills other tensors than those that the optimiser holds
    whole = None if any(one is None for one in sent) else np.array(sent)
    if whole is not None and (whole.shape[1] not in lengths or not np.isfinite(whole).all()):
        whole = None
    return GradientStep(
        records[0]["step"],
        records[0]["o"],
        records,
        parameters,
        _zeroed(own),
        _zeroed(got),
        whole,
    )


def _zeroed(arrays: list[Numbers | None]) -> Numbers:
    """Return (ranks, columns) with zeros where a number is not known: nothing is checked there."""
    return np.nan_to_num(np.array(arrays, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def _join_shards(
    got: list[Numbers | None],
    rows: list[Row],
    coordinates: list[NDArray[np.int64]],
) -> list[Numbers | None]:
    """Put the ranks' shards together: afterwards every rank has the whole gradient."""
    if any(one is None for one in got):
        return [None for _ in got]
    whole = [np.full(len(one), np.nan) for one in coordinates]
    for values, mine in zip(got, rows, strict=True):
        assert values is not None
        at = 0
        for i, row in enumerate(mine):
            inside = (coordinates[i] >= row[5]) & (coordinates[i] < row[5] + row[6])
            piece = values[at : at + int(inside.sum())]
            whole[i][np.flatnonzero(inside)[: len(piece)]] = piece
            at += int(inside.sum())
    joined = np.concatenate(whole) if whole else np.zeros(0)
    return [joined for _ in got]


def _without_scale(step: GradientStep) -> GradientStep:
    """Divide the own gradients by GradScaler's scale if the optimiser gets them divided."""
    scale = float(step.records[0].get("scale") or 1)
    if scale == 1:
        return step
    got, own = float(np.linalg.norm(step.got)), float(np.linalg.norm(step.own))
    if got == 0 or own == 0 or abs(np.log(got / own * scale)) > abs(np.log(got / own)):
        return step
    return replace(
        step, own=step.own / scale, sent=None if step.sent is None else step.sent / scale
    )


def combine(basis: Numbers, target: Numbers, balance: Numbers) -> Numbers:
    """Return the smallest weights c (len(basis),) with sum of c[k] * basis[k] nearest to target.

    Gradients that are equal share their weight: then only the sum of their weights is known.
    """
    matrix = (basis * balance).T
    return np.asarray(np.linalg.lstsq(matrix, target * balance, rcond=1e-3)[0], dtype=np.float64)


def misfit(
    basis: Numbers, weights: Numbers, target: Numbers, parameters: tuple[Parameter, ...]
) -> Numbers:
    """Return by parameter how far sum of weights[k] * basis[k] is from target, relatively.

    The scale is what is added up, so a sum that nearly cancels is not measured by what is left.
    """
    predicted = weights @ basis
    found = []
    for one in parameters:
        at = one.columns
        added = float(np.abs(weights) @ np.linalg.norm(basis[:, at], axis=1))
        size = max(added, float(np.linalg.norm(target[at])), 1e-300)
        found.append(float(np.linalg.norm(predicted[at] - target[at])) / size)
    return np.array(found, dtype=np.float64)
