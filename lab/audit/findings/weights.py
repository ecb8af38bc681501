"""Whether the ranks start from the same weights and settings, and keep the same weights.

``read_replicas`` returns the ranks' weights before each step. gradients.py needs them as well, and
shares ``same_rows`` and ``common_steps``, which match what the ranks have recorded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, found
from lab.audit.findings.where import first_step_apart, lasting_optimizers, recording_exchanges
from lab.audit.probe.coordinates import coordinates
from lab.audit.recording import Numbers, RankRecords, Record, Recording

START = 1e-5
"""Initial weights that differ by more than this, relatively, are different weights."""
SAME = 1e-6
"""Weights that differ by less than this a step, relatively to a parameter's norm, are rounded."""


def check(recording: Recording) -> Iterator[Outcome]:
    """Check the ranks' weights; see lab/audit/findings/finding.py."""
    if recording.size < 2 or len(recording.ranks) < recording.size:
        return
    if any(rank.by_kind["fsdp"] for rank in recording.ranks):
        yield Unknown("weights: FSDP holds another part of them on each rank")
        return
    replicas, exchanged = read_replicas(recording), recording_exchanges(recording)
    first_of_family = [family[0] for family in lasting_optimizers(recording)]
    starts = [replicas[o] for o in first_of_family if o in replicas and 0 in replicas[o].values]
    different = [one for one in starts if one.spread(0).max(initial=0.0) > START]
    if exchanged:
        yield from map(_different_start, different)
    settings = _different_settings(recording)
    if settings:
        yield settings
    if different:
        return
    if not any(one.values for one in replicas.values()):
        yield Unknown("weights: no ranks' weights of equal parameters were seen")
        return
    yield Right("all ranks start from the same weights")
    apart = [(one, step) for one in replicas.values() if (step := _first_apart(one)) is not None]
    if apart and exchanged and not settings:
        yield _name_divergence(recording, *apart[0])
    elif not apart and any(max(one.values, default=0) > 0 for one in replicas.values()):
        yield Right("the ranks' weights stay equal in the watched steps")


@dataclass(frozen=True)
class Replicas:
    """The weights of one optimiser's parameters on all ranks.

    Parameters
    ----------
    optimizer : its number in the records.
    names : of the parameters.
    columns : of each parameter.
    values : by number of updates, an array of shape (ranks, columns): the weights after them. It
        ends early where parameters were added later.
    """

    optimizer: int
    names: list[str]
    columns: list[slice]
    values: dict[int, Numbers]

    def spread(self, step: int) -> Numbers:
        """Return by parameter how far the ranks' weights are apart, relatively to their norm."""
        values = self.values[step]
        apart = norms(values - values[0], self.columns).max(axis=0)
        sizes = norms(values, self.columns).max(axis=0)
        return np.asarray(apart / np.maximum(sizes, 1e-300))

    def moved(self, step: int) -> float:
        """Return how far the weights moved since the step before, relatively; 0 if unknown."""
        after = self.values[step]
        before = self.values.get(step - 1, after)
        move = float(np.linalg.norm(after[:, : before.shape[1]] - before))
        return move / max(float(np.linalg.norm(before)), 1e-300)


def norms(rows: Numbers, columns: list[slice]) -> Numbers:
    """Return the norm of each row in each parameter: shape (rows, parameters)."""
    found = [np.linalg.norm(rows[:, at], axis=1) for at in columns]
    return np.array(found, dtype=np.float64).reshape(len(columns), len(rows)).T


def read_replicas(recording: Recording) -> dict[int, Replicas]:
    """Return the weights by optimiser, without those that cannot be compared."""
    replicas = {}
    for o in chain.from_iterable(lasting_optimizers(recording)):
        rows = same_rows(recording, o)
        if rows is None or all(_trains_copies(rank, o) for rank in recording.ranks):
            continue
        values = {}
        for step, records in common_steps(recording, "weights", o).items():
            pairs = zip(recording.ranks, records, strict=True)
            weights = [np.asarray(rank.numbers(one["values"])) for rank, one in pairs]
            if len({len(one) for one in weights}) == 1 and np.isfinite(weights).all():
                values[step] = np.array(weights)
        names = [str(row[1] or row[0]) for row in rows]
        replicas[o] = Replicas(o, names, columns_of(rows), values)
    return replicas


def same_rows(recording: Recording, o: int) -> list[list[Any]] | None:
    """Return the rows of an optimiser's parameters; None if they are not the same on all ranks."""
    rows = [parameter_rows(rank, o) for rank in recording.ranks]
    keys = [[row[:3] for row in one] for one in rows]
    return rows[0] if all(one == keys[0] for one in keys) else None


def parameter_rows(rank: RankRecords, o: int) -> list[list[Any]]:
    """Return the rows of an optimiser's parameters, in the order of their samples."""
    return [row for one in rank.by_kind["params"] if one["o"] == o for row in one["rows"]]


def columns_of(rows: list[list[Any]]) -> list[slice]:
    """Return at which columns the samples of each parameter lie."""
    stops = np.cumsum([0] + [len(coordinates(row[4])) for row in rows])
    return [slice(int(start), int(stop)) for start, stop in pairwise(stops)]


def common_steps(recording: Recording, kind: str, o: int) -> dict[int, list[Record]]:
    """Return by step the ranks' records of a kind on an optimiser, while the ranks are in step."""
    ranks = [
        {one["step"]: one for one in rank.by_kind[kind] if one["o"] == o}
        for rank in recording.ranks
    ]
    end, common = first_step_apart(recording), set.intersection(*map(set, ranks))
    return {step: [one[step] for one in ranks] for step in sorted(common) if step < end}


def shortlist(names: Sequence[str]) -> str:
    """Return the first names, and how many there are more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _trains_copies(rank: RankRecords, o: int) -> bool:
    """Return whether an optimiser steps with gradients that no backward() gave: for copies."""
    steps = [one for one in rank.by_kind["step"] if one["o"] == o]
    own, got = ([rank.numbers(one[name]) for one in steps] for name in ("own", "got"))
    return not any(np.any(one) for one in own) and any(np.any(one) for one in got)


def _different_start(one: Replicas) -> Finding:
    spread = one.spread(0)
    names = [one.names[i] for i in np.argsort(-spread) if spread[i] > START]
    numbers = {"different": len(names), "parameters": len(one.names), "spread": spread.max()}
    return found("different-start", **numbers, names=shortlist(names))


def _different_settings(recording: Recording) -> Finding | None:
    """Return the finding if learning rates, other numbers or the optimiser's class differ."""
    for o in chain.from_iterable(lasting_optimizers(recording)):
        for step, records in common_steps(recording, "step", o).items():
            settings = [_settings(one) for one in records]
            for name in settings[0]:
                values = [one.get(name) for one in settings]
                if len(set(values)) > 1:
                    listed = ", ".join(f"rank {r}: {value}" for r, value in enumerate(values))
                    return found("different-learning-rates", step=step, setting=name, values=listed)
    return None


def _settings(record: Record) -> dict[str, str]:
    """Return a step's settings that are plain values, rounded, in words."""
    rates = {f"lr of group {i}" if i else "lr": one for i, one in enumerate(record["lr"])}
    values = {"optimizer": record["optimizer"], **record["settings"], **rates}
    return {
        name: f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
        if isinstance(value, int | float) or (isinstance(value, str) and " at 0x" not in value)
    }


def _first_apart(one: Replicas) -> int | None:
    """Return the first step before which the weights differ by more than rounding."""
    for step in sorted(one.values):
        apart = one.spread(step).max(initial=0.0)
        if apart > SAME * (step + 1) and apart > 1e-3 * max(one.moved(step), 1e-12):
            return step
    return None


def _name_divergence(recording: Recording, one: Replicas, step: int) -> Finding:
    """Return what makes the weights differ before ``step``, which were equal before."""
    spread = one.spread(step)
    worst = one.names[int(spread.argmax())]
    updates = common_steps(recording, "step", one.optimizer).get(step - 1, [])
    pairs = zip(recording.ranks, updates, strict=False)
    got = [np.asarray(rank.numbers(one["got"])) for rank, one in pairs]
    stepped = common_steps(recording, "stepped", one.optimizer).get(step - 1, [])
    states = [r["state"] for r in stepped]
    other = next((r for r, state in enumerate(states) if state != states[0]), None)
    values = {"step": step, "spread": spread.max(), "worst": worst, "rank": other}
    equal = all(np.array_equal(mine, got[0]) for mine in got)
    state = other is not None and None not in states and equal
    return found("different-optimizer-state" if state else "weights-diverge", **values)
