"""Whether the ranks start from the same weights and settings, and keep the same weights.

``Replicas`` holds what all ranks have recorded of one optimiser; gradient_fit.py reads it as well.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from common.say import count, listed
from common.utils.gradient_fit import norms, side_by_side
from lab.audit.findings.finding import Finding, Outcome, Right, Unknown, found
from lab.audit.findings.where import (
    averages_weights,
    first_line,
    first_step_apart,
    lasting_optimizers,
    recording_exchanges,
)
from lab.audit.probe.coordinates import coordinates
from lab.audit.recording import Numbers, RankRecords, Recording
from lab.audit.records import (
    CodeLine,
    FsdpBuilt,
    Load,
    Parameter,
    Parameters,
    Samples,
    Step,
    Stepped,
    Weights,
)

# Initial weights that differ by more than this, relatively, are different weights.
START = 1e-5
# Weights that differ by less than this a step, relatively to a parameter's norm, are rounded.
SAME = 1e-6
_TINY = 1e-300

OfOptimizer = TypeVar("OfOptimizer", Step, Stepped, Weights)


def check(recording: Recording) -> Iterator[Outcome]:
    """Check the ranks' weights, what they load, and the settings of their optimisers.

    Ranks that never exchange anything may well start apart: ``group-unused`` tells of them. Of
    optimisers that share a tensor only the first one's start is compared. Whether weights diverge
    is told only if they started equal, and no different setting explains it.
    """
    yield from _loads(recording)
    if recording.size < 2 or len(recording.ranks) < recording.size:
        return
    if recording.of(FsdpBuilt):
        yield Unknown("weights", "FSDP holds another part of them on each rank")
        return
    replicas: list[Replicas] = []
    different_starts = []
    for family in lasting_optimizers(recording):
        of_family = [Replicas(recording, number) for number in family]
        replicas += of_family
        if _starts_apart(of_family[0]):
            different_starts.append(of_family[0])
    exchanged = recording_exchanges(recording)
    yield from filter(None, map(_part_apart, different_starts))
    if exchanged:
        yield from map(_different_start, different_starts)
    settings = [*_different_settings(replicas)]
    yield from settings
    if not any(several.weights for several in replicas):
        yield Unknown("weights", "no ranks' weights of equal parameters were seen")
    elif not different_starts:
        yield Right("weights", "all ranks start from the same weights")
        yield from _divergence(replicas, counts=exchanged and not settings)


def _loads(recording: Recording) -> Iterator[Outcome]:
    """Yield the first load that fits its model badly, or that all fit; nothing without a load.

    A state dict may have more than the model, or less; but not both, and little in common.
    """
    loads = recording.of(Load)
    for load in loads:
        least = min(load.missing, load.unexpected)
        if least > load.matched or (load.missing and not load.matched):
            yield found(
                "loads-nothing",
                load.at,
                sure=not load.matched,
                matched=load.matched,
                missing=load.missing,
                unexpected=load.unexpected,
                names=", ".join(load.names),
            )
            return
    if loads:
        yield Right("loads", f"{count(len(loads), 'load_state_dict')} found the model's keys")


def _loaded(replicas: "Replicas", step: int) -> Finding | None:
    """Return that some ranks load weights more often than others right before a step."""
    loads = [_loads_before(rank, replicas.optimizer, step) for rank in replicas.recording.ranks]
    most, fewest = max(loads, key=len), min(loads, key=len)
    if len(most) == len(fewest):
        return None
    return found(
        "loads-differ",
        most[-1].at,
        step=step,
        rank=loads.index(most),
        other=loads.index(fewest),
    )


def _loads_before(rank: RankRecords, optimizer: int, step: int) -> list[Load]:
    """Return what a rank loads between an optimiser's weights of a step and those before it."""
    previous = now = -math.inf
    for record in rank.of(Weights):
        if record.optimizer_number == optimizer and record.step <= step:
            previous, now = now, record.t
    return [load for load in rank.of(Load) if previous < load.t < now]


class Replicas:
    """What all ranks have recorded of one optimiser, while they are in step.

    Attributes
    ----------
    rows : of its parameters on rank 0, see probe/__init__.py.
    names, columns : of each parameter: its name, and where its samples are in the arrays below.
    same : the ranks' parameters are the same.
    steps : by step, the ranks' records of it.
    own, got, weights : by step, an array of shape (ranks, columns): samples of the ranks' own
        gradients, of what their optimisers get, and of the weights before this update. It ends
        early where parameters were added later. All are empty if the ranks' parameters are not the
        same; ``weights`` also if no backward() gave a gradient, as for copies of a model.
    """

    def __init__(self, recording: Recording, optimizer: int) -> None:
        self.recording = recording
        self.optimizer = optimizer
        rows = [_parameters(rank, optimizer) for rank in recording.ranks]
        self.rows = rows[0]
        self.names = [row.name or row.key for row in self.rows]
        self.columns = side_by_side([len(coordinates(row.numel)) for row in self.rows])
        self.same = all(_as_named(parameters) == _as_named(rows[0]) for parameters in rows)
        self.steps = self.records(Step)
        self.own: dict[int, Numbers] = {}
        self.got: dict[int, Numbers] = {}
        self.weights: dict[int, Numbers] = {}
        if self.same:
            for step, records in self.steps.items():
                self._read(self.own, step, [record.own for record in records])
                self._read(self.got, step, [record.got for record in records])
            self._read_weights()

    def records(self, kind: type[OfOptimizer]) -> dict[int, list[OfOptimizer]]:
        """Return by step the ranks' records of a kind, while the ranks are in step."""
        by_rank = []
        for rank in self.recording.ranks:
            mine = [record for record in rank.of(kind) if record.optimizer_number == self.optimizer]
            by_rank.append({record.step: record for record in mine})
        common = set.intersection(*map(set, by_rank))
        end = first_step_apart(self.recording)
        steps = sorted(step for step in common if step < end)
        return {step: [records[step] for records in by_rank] for step in steps}

    def _read(
        self, numbers: dict[int, Numbers], step: int, samples: Sequence[Samples | None]
    ) -> None:
        """Add the ranks' numbers of a step, if all ranks have sampled equally many."""
        if None in samples:  # a step that the probe has not sampled
            return
        pairs = zip(self.recording.ranks, samples, strict=True)
        rows = [rank.numbers(reference) for rank, reference in pairs]
        if len({len(row) for row in rows}) == 1:
            numbers[step] = np.array(rows)

    def unclipped(self, step: int) -> Numbers | None:
        """Return what the ranks' optimisers would get if no rank clipped it; None if unknown."""
        found: dict[int, Numbers] = {}
        self._read(found, step, [record.unclipped or record.got for record in self.steps[step]])
        return found.get(step)

    def _read_weights(self) -> None:
        """Read the weights where all are finite; none of what backward() never reaches."""
        some_got = any(map(np.any, self.got.values()))
        some_own = any(map(np.any, self.own.values()))
        if some_got and not some_own:  # the script sets the .grad of copies itself
            return
        found: dict[int, Numbers] = {}
        for step, records in self.records(Weights).items():
            self._read(found, step, [record.values for record in records])
        self.weights = {step: values for step, values in found.items() if np.isfinite(values).all()}

    @property
    def model_line(self) -> CodeLine | None:
        """The line that makes the model, as far as the probe has seen it."""
        return first_line(record.model for record in self._parameters())

    @property
    def optimizer_line(self) -> CodeLine | None:
        """The line that makes the optimiser."""
        return first_line(record.at for record in self._parameters())

    def _parameters(self) -> list[Parameters]:
        records = self.recording.of(Parameters)
        return [record for record in records if record.optimizer_number == self.optimizer]

    def spread(self, step: int) -> Numbers:
        """Return by parameter how far the ranks' weights are apart, relatively to their norm."""
        values = self.weights[step]
        apart = norms(values - values[0], self.columns).max(axis=0)
        sizes = norms(values, self.columns).max(axis=0)
        return np.asarray(apart / np.maximum(sizes, _TINY))

    def is_apart(self, step: int) -> bool:
        """Return whether the ranks' weights differ by more than rounding before a step.

        Rounding is allowed to grow by ``SAME`` a step, or to a thousandth of the latest move.
        """
        after = self.weights[step]
        before = self.weights.get(step - 1, after)
        # parameters that were added in between have no weights before
        move = float(np.linalg.norm(after[:, : before.shape[1]] - before))
        moved = move / max(float(np.linalg.norm(before)), _TINY)
        return self.spread(step).max(initial=0.0) > max(SAME * (step + 1), 1e-3 * moved)


def _parameters(rank: RankRecords, optimizer: int) -> list[Parameter]:
    """Return a rank's parameters of an optimiser, those that were added later too."""
    mine = [record for record in rank.of(Parameters) if record.optimizer_number == optimizer]
    return [row for parameters in mine for row in parameters.rows]


def _as_named(parameters: Iterable[Parameter]) -> list[tuple[str, str, list[int]]]:
    """Return what is the same on all ranks if they hold the same parameters."""
    return [(row.key, row.name, row.shape) for row in parameters]


def _starts_apart(replicas: Replicas) -> bool:
    return 0 in replicas.weights and replicas.spread(0).max(initial=0.0) > START


def _different_start(replicas: Replicas) -> Finding:
    spread = replicas.spread(0)
    names = [replicas.names[index] for index in np.argsort(-spread) if spread[index] > START]
    return _loaded(replicas, 0) or found(
        "different-start",
        replicas.model_line or replicas.optimizer_line,
        different=len(names),
        parameters=len(replicas.names),
        spread=spread.max(),
        names=listed(names, most=3),
    )


def _part_apart(replicas: Replicas) -> Finding | None:
    """Return the first update that makes a part different which was equal on ranks that differ.

    Such a part had equal weights, and after an exchange equal gradients.
    """
    for step, records in replicas.steps.items():
        if step + 1 not in replicas.weights or step not in replicas.weights:
            continue
        arrived = replicas.unclipped(step)
        if arrived is None or step not in replicas.own:
            continue
        own = replicas.own[step]
        exchanged = _differ(own, replicas.columns) & ~_differ(arrived, replicas.columns)
        exchanged &= norms(arrived, replicas.columns).all(axis=0)
        equal = exchanged & ~_differ(replicas.weights[step], replicas.columns)
        apart = equal & (replicas.spread(step + 1) > SAME)
        if not apart.any():
            continue
        clips = [record.clips for record in records]
        lines = [clip.at for of_rank in clips for clip in of_rank]
        return found(
            "shared-part-diverges",
            first_line(lines) or records[0].at,
            step=step,
            names=listed(np.array(replicas.names)[apart].tolist(), most=4),
            spread=replicas.spread(step + 1)[apart].max(),
            clips=listed(f"{len(of_rank)} on rank {n}" for n, of_rank in enumerate(clips)),
        )
    return None


def _differ(rows: Numbers, columns: list[slice]) -> NDArray[np.bool_]:
    """Return by parameter whether the ranks' numbers differ, be it by rounding."""
    return np.asarray(norms(rows - rows[0], columns).max(axis=0) != 0)


def _different_settings(replicas: list[Replicas]) -> Iterator[Finding]:
    """Yield a finding for the first setting that differs between the ranks, or nothing."""
    for several in replicas:
        for step, records in several.steps.items():
            settings = [_settings(record) for record in records]
            for name in settings[0]:
                values = [of_rank.get(name) for of_rank in settings]
                if len(set(values)) > 1:
                    yield found(
                        "different-learning-rates",
                        several.optimizer_line,
                        step=step,
                        setting=name,
                        values=", ".join(f"rank {rank}: {one}" for rank, one in enumerate(values)),
                    )
                    return


def _settings(step: Step) -> dict[str, str]:
    """Return a step's settings that are plain values, rounded, in words."""
    values = {"optimizer": step.optimizer, **step.settings}
    for group, rate in enumerate(step.lr):
        values[f"lr of group {group}" if group else "lr"] = rate
    plain = {}
    for name, value in values.items():
        if isinstance(value, float):
            plain[name] = f"{value:.6g}"
        elif isinstance(value, int) or (isinstance(value, str) and " at 0x" not in value):
            plain[name] = str(value)
    return plain


def _divergence(replicas: list[Replicas], *, counts: bool) -> Iterator[Outcome]:
    """Yield whether the weights, which were equal, stay equal; nothing if they were seen once only.

    counts : whether weights that part are a finding; not if another finding explains them.
    """
    for several in replicas:
        apart = [step for step in several.weights if several.is_apart(step)]
        if not apart:
            continue
        made_equal = [step for step in several.weights if step > apart[0] and step not in apart]
        if counts and (made_equal or averages_weights(several.recording)):
            yield Unknown(
                "weights",
                f"the weights differ between the ranks before step {apart[0]}, and the"
                " script makes them equal from time to time",
            )
        elif counts:
            yield _name_divergence(several, apart[0])
        return
    if any(max(several.weights, default=0) > 0 for several in replicas):
        yield Right("weights", "the ranks' weights stay equal in the watched steps")


def _name_divergence(replicas: Replicas, step: int) -> Finding:
    """Return what makes the weights differ before ``step``, which were equal before.

    It is the optimisers' state if they got equal gradients in the step before, and yet have
    different states; else it is not known.
    """
    spread = replicas.spread(step)
    got = replicas.got.get(step - 1)
    equal_gradients = got is None or (got == got[0]).all()
    states = [record.state for record in replicas.records(Stepped).get(step - 1, [])]
    other = next((rank for rank, state in enumerate(states) if state != states[0]), None)
    by_state = other is not None and None not in states and equal_gradients
    loaded = _loaded(replicas, step) if equal_gradients else None
    return loaded or found(
        "different-optimizer-state" if by_state else "weights-diverge",
        first_line(record.at for record in replicas.steps.get(step - 1, [])),
        step=step,
        spread=spread.max(),
        worst=replicas.names[int(spread.argmax())],
        rank=other,
    )
