"""Whether the ranks start from the same weights and settings, and keep the same weights.

``Replicas`` holds what all ranks have recorded of one optimiser; gradient_fit.py reads it as well.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, found
from lab.audit.findings.where import first_step_apart, lasting_optimizers, recording_exchanges
from lab.audit.probe.coordinates import coordinates
from lab.audit.recording import Numbers, Record, Recording

# Initial weights that differ by more than this, relatively, are different weights.
START = 1e-5
# Weights that differ by less than this a step, relatively to a parameter's norm, are rounded.
SAME = 1e-6


def check(recording: Recording) -> Iterator[Outcome]:
    """Check the ranks' weights; see lab/audit/findings/finding.py."""
    if recording.size < 2 or len(recording.ranks) < recording.size:
        return
    if any(rank.by_kind["fsdp"] for rank in recording.ranks):
        yield Unknown("weights: FSDP holds another part of them on each rank")
        return
    families = [[Replicas(recording, o) for o in one] for one in lasting_optimizers(recording)]
    replicas = [one for family in families for one in family]
    exchanged, settings = recording_exchanges(recording), [*_different_settings(replicas)]
    starts = [first for first, *_ in families if 0 in first.weights]
    different = [one for one in starts if one.spread(0).max(initial=0.0) > START]
    if exchanged:
        yield from map(_different_start, different)
    yield from settings
    apart = [(one, step) for one in replicas for step in one.weights if one.is_apart(step)]
    if not any(one.weights for one in replicas):
        yield Unknown("weights: no ranks' weights of equal parameters were seen")
    elif not different:
        yield Right("all ranks start from the same weights")
        if apart and exchanged and not settings:
            yield _name_divergence(*apart[0])
        elif not apart and any(max(one.weights, default=0) > 0 for one in replicas):
            yield Right("the ranks' weights stay equal in the watched steps")


class Replicas:
    """What all ranks have recorded of one optimiser, while they are in step.

    Attributes
    ----------
    rows : of its parameters on rank 0, see probe/__init__.py.
    names, columns : of each parameter.
    own, got, weights : by step, an array of shape (ranks, columns): samples of the ranks' own
        gradients, of what their optimisers get, and of the weights before this update. It ends
        early where parameters were added later. All are empty if the ranks' parameters are not the
        same; ``weights`` also if no backward() gave a gradient, as for copies of a model.
    """

    def __init__(self, recording: Recording, optimizer: int) -> None:
        rows = [
            [row for one in rank.by_kind["params"] if one["o"] == optimizer for row in one["rows"]]
            for rank in recording.ranks
        ]
        self.recording, self.optimizer, self.rows = recording, optimizer, rows[0]
        self.names = [str(row[1] or row[0]) for row in self.rows]
        self.columns = side_by_side([len(coordinates(row[4])) for row in self.rows])
        self.same = all([row[:3] for row in one] == [row[:3] for row in rows[0]] for one in rows)
        self.steps = self.records("step")
        self.own, self.got = self._read("step", "own"), self._read("step", "got")
        trains = any(map(np.any, self.own.values())) or not any(map(np.any, self.got.values()))
        weights = self._read("weights", "values") if trains else {}
        self.weights = {step: one for step, one in weights.items() if np.isfinite(one).all()}

    def records(self, kind: str) -> dict[int, list[Record]]:
        """Return by step the ranks' records of a kind, while the ranks are in step."""
        ranks = [
            {one["step"]: one for one in rank.by_kind[kind] if one["o"] == self.optimizer}
            for rank in self.recording.ranks
        ]
        end, common = first_step_apart(self.recording), set.intersection(*map(set, ranks))
        return {step: [one[step] for one in ranks] for step in sorted(common) if step < end}

    def _read(self, kind: str, name: str) -> dict[int, Numbers]:
        """Return by step the ranks' samples of a name, where all ranks have equally many."""
        ranks, records = self.recording.ranks, self.records(kind) if self.same else {}
        pairs = {step: zip(ranks, row, strict=True) for step, row in records.items()}
        samples = {
            step: [np.asarray(rank.numbers(record[name])) for rank, record in both]
            for step, both in pairs.items()
        }
        return {step: np.array(row) for step, row in samples.items() if len({*map(len, row)}) == 1}

    def spread(self, step: int) -> Numbers:
        """Return by parameter how far the ranks' weights are apart, relatively to their norm."""
        values = self.weights[step]
        apart, sizes = norms(values - values[0], self.columns), norms(values, self.columns)
        return np.asarray(apart.max(axis=0) / np.maximum(sizes.max(axis=0), 1e-300))

    def is_apart(self, step: int) -> bool:
        """Return whether the ranks' weights differ by more than rounding before a step."""
        after, before = self.weights[step], self.weights.get(step - 1, self.weights[step])
        move = float(np.linalg.norm(after[:, : before.shape[1]] - before))
        moved = move / max(float(np.linalg.norm(before)), 1e-300)
        return self.spread(step).max(initial=0.0) > max(SAME * (step + 1), 1e-3 * moved)


def side_by_side(widths: Iterable[int]) -> list[slice]:
    """Return the columns of parameters of which one follows another."""
    return [slice(int(start), int(stop)) for start, stop in pairwise(np.cumsum([0, *widths]))]


def norms(rows: Numbers, columns: list[slice]) -> Numbers:
    """Return the norm of each row in each parameter: shape (rows, parameters)."""
    lengths = [np.linalg.norm(rows[:, at], axis=1) for at in columns]
    return np.array(lengths, dtype=np.float64).reshape(len(columns), len(rows)).T


def shortlist(names: Sequence[str]) -> str:
    """Return the first names, and how many there are more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _different_start(one: Replicas) -> Finding:
    spread = one.spread(0)
    names = [one.names[i] for i in np.argsort(-spread) if spread[i] > START]
    return found(
        "different-start",
        different=len(names),
        parameters=len(one.names),
        spread=spread.max(),
        names=shortlist(names),
    )


def _different_settings(replicas: list[Replicas]) -> Iterator[Finding]:
    """Yield the first of the learning rates, other settings and classes that differ."""
    for step, records in [item for one in replicas for item in one.steps.items()]:
        settings = [_settings(one) for one in records]
        for name in settings[0]:
            values = [one.get(name) for one in settings]
            if len(set(values)) > 1:
                listed = ", ".join(f"rank {r}: {value}" for r, value in enumerate(values))
                yield found("different-learning-rates", step=step, setting=name, values=listed)
                return


def _settings(record: Record) -> dict[str, str]:
    """Return a step's settings that are plain values, rounded, in words."""
    rates = {f"lr of group {i}" if i else "lr": one for i, one in enumerate(record["lr"])}
    values = {"optimizer": record["optimizer"], **record["settings"], **rates}
    return {
        name: f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
        if isinstance(value, int | float) or (isinstance(value, str) and " at 0x" not in value)
    }


def _name_divergence(one: Replicas, step: int) -> Finding:
    """Return what makes the weights differ before ``step``, which were equal before."""
    spread, got = one.spread(step), one.got.get(step - 1)
    states = [record["state"] for record in one.records("stepped").get(step - 1, [])]
    other = next((r for r, state in enumerate(states) if state != states[0]), None)
    equal = got is None or (got == got[0]).all()
    by_state = other is not None and None not in states and equal
    return found(
        "different-optimizer-state" if by_state else "weights-diverge",
        step=step,
        spread=spread.max(),
        worst=one.names[int(spread.argmax())],
        rank=other,
    )
