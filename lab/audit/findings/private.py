"""Set models aside that ranks train by themselves, beside the one that all ranks train together.

Rank 0 may train a reference alone, on the whole batch, or every rank may train one on the same
samples. ``shared_part`` returns the recording without them, so that every check reads the ranks as
if they trained the shared model alone.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as replace_fields

from lab.audit.findings.one_model import exchanges_activations
from lab.audit.findings.where import (
    ComputedWith,
    computed_with,
    first_parameters,
    samples_of,
    steps_by_tensor,
)
from lab.audit.recording import RankRecords, Recording
from lab.audit.records import (
    Backward,
    Batch,
    CodeLine,
    CollectiveCall,
    EpochRecord,
    Evaluation,
    OptimizerRecord,
    Parameter,
    Parameters,
    RandomForward,
    Record,
    Step,
    Trained,
)


@dataclass(frozen=True)
class _Model:
    """What a rank trains with an optimiser, or with several built one after another.

    Parameters
    ----------
    numbers : of the optimisers.
    optimizer : the class of the first one.
    shapes : of its parameters.
    alone : it gets this rank's own gradients in all steps.
    samples : on how many its first backward computed; 0 if that is not known.
    steps : how many it has done.
    inputs : by backward that reaches nothing else.
    """

    numbers: Sequence[int]
    optimizer: str
    shapes: Sequence[Sequence[int]]
    alone: bool
    samples: int
    steps: int
    inputs: Sequence[ComputedWith]
    at: CodeLine | None

    def matches(self, other: "_Model") -> tuple[bool, ...]:
        """Return how it differs from another rank's, the gravest first: the smallest fits best."""
        return (
            self.alone,
            self.samples != other.samples,
            self.optimizer != other.optimizer,
            self.steps != other.steps,
        )


def shared_part(recording: Recording) -> Recording:
    """Return the recording without private models, with a sentence on each in ``set_aside``.

    A model is private if ranks that train more models than others train it with their own gradients
    alone; or if all ranks do so on the same samples, while they exchange the gradients of another.
    It is the same recording where there are none, or where nobody can tell which they are.
    """
    if recording.size < 2 or len(recording.ranks) < recording.size:
        return recording
    models = [_models(rank) for rank in recording.ranks]
    fewest = min(models, key=len)
    surplus = [_surplus(of_rank, fewest) for of_rank in models]
    if not fewest or None in surplus:
        return recording
    private = [of_rank or [] for of_rank in surplus]
    sentences = [*_told(private, fewest)]
    if not exchanges_activations(recording):
        for of_ranks in _on_every_rank(models, private):
            sentences.append(
                "Every rank also trains another model by itself, on the same samples "
                f"({_described(of_ranks[0])}): it is set aside."
            )
            for of_rank, model in zip(private, of_ranks, strict=True):
                of_rank.append(model)
    if not any(private):
        return recording
    ranks = []
    for rank, of_rank in zip(recording.ranks, private, strict=True):
        ranks.append(_without(rank, {number for model in of_rank for number in model.numbers}))
    _name_alike(ranks, ranks[models.index(fewest)])
    return replace(recording, ranks=ranks, set_aside=sentences)


def _name_alike(ranks: Sequence[RankRecords], named: RankRecords) -> None:
    """Give all ranks' parameters the names of one rank's.

    A rank that trains a private model first has seen no forward that names the others.
    """
    names = {row.key: row.name for row in _rows(named)}
    for rank in ranks:
        for row in _rows(rank):
            row.name = names.get(row.key, row.name)


def _rows(rank: RankRecords) -> list[Parameter]:
    return [row for parameters in rank.of(Parameters) for row in parameters.rows]


def _models(rank: RankRecords) -> list[_Model]:
    """Return what a rank trains, in the order in which it began."""
    first = first_parameters(rank)
    models = []
    for steps in steps_by_tensor(rank, first):
        numbers = sorted({step.optimizer_number for step in steps})
        parameters = first.get(numbers[0])
        backwards = [
            backward
            for backward in rank.of(Backward)
            if backward.optimizers and set(backward.optimizers) <= set(numbers)
        ]
        if parameters is None:
            continue
        models.append(
            _Model(
                numbers=numbers,
                optimizer=parameters.optimizer,
                shapes=[row.shape for row in parameters.rows],
                alone=all(_gets_its_own(rank, step) for step in steps if step.sampled),
                samples=samples_of(backwards[0]) if backwards else 0,
                steps=len(steps),
                inputs=[computed_with(backward) for backward in backwards],
                at=parameters.at,
            )
        )
    return models


def _gets_its_own(rank: RankRecords, step: Step) -> bool:
    """Return whether what the optimiser gets is a multiple of the rank's own gradient."""
    own = rank.numbers(step.own)
    got = rank.numbers(step.got)
    # the cosine of their angle is 1; NaN: nobody knows
    return bool(np.dot(own, got) >= (1 - 1e-6) * np.linalg.norm(own) * np.linalg.norm(got))


def _surplus(models: Sequence[_Model], fewest: Sequence[_Model]) -> list[_Model] | None:
    """Return the models of a rank that the rank with the fewest lacks; None if nobody can tell."""
    left = list(models)
    for wanted in fewest:
        alike = [model for model in left if model.shapes == wanted.shapes]
        if not alike:
            return [] if len(models) == len(fewest) else None
        left.remove(min(alike, key=lambda model: model.matches(wanted)))
    return left if all(model.alone for model in left) else None


def _on_every_rank(
    models: Sequence[Sequence[_Model]], private: Sequence[Sequence[_Model]]
) -> list[tuple[_Model, ...]]:
    """Return the models that every rank trains alone on the same inputs, while sharing another.

    private : by rank, those that are known to be none of these.
    """
    kept = []
    for of_rank, aside in zip(models, private, strict=True):
        kept.append([model for model in of_rank if model not in aside])
    groups = list(zip(*kept, strict=True))
    alone = [group for group in groups if all(model.alone for model in group)]
    if len(alone) == len(groups):
        return []
    return [group for group in alone if _same_inputs(group)]


def _same_inputs(models: Sequence[_Model]) -> bool:
    first = models[0].inputs
    known = bool(first) and all(inputs and None not in inputs for inputs, _ in first)
    compared = min(len(model.inputs) for model in models)
    return known and all(model.inputs[:compared] == first[:compared] for model in models)


def _told(private: Sequence[Sequence[_Model]], fewest: Sequence[_Model]) -> Iterator[str]:
    """Yield a sentence on each private model of a rank.

    None on what the ranks make in different numbers, as an optimiser a batch.
    """
    made_often = [model.shapes for model in fewest if model.alone]
    for rank, models in enumerate(private):
        for model in models:
            if model.shapes not in made_often:
                yield (
                    f"Rank {rank} also trains another model by itself ({_described(model)}): "
                    "it is set aside."
                )


def _described(model: _Model) -> str:
    text = f"{len(model.shapes)} parameters, {model.optimizer}"
    return text if model.at is None else f"{text} at {model.at.file}:{model.at.line}"


def _without(rank: RankRecords, private: set[int]) -> RankRecords:
    """Return a rank's records without those of private optimisers, counted as if none existed."""
    numbers = {parameters.optimizer_number for parameters in rank.of(Parameters)} - private
    places = {number: place for place, number in enumerate(sorted(numbers))}
    loaders = _loaders_of(rank, private)
    epochs = _private_epochs(rank, private)
    done: Counter[int] = Counter()  # updates by optimiser
    micro: Counter[int] = Counter()  # backwards by step
    kept: list[Record] = []
    for record in rank.records:
        step = max(done.values(), default=0)
        if isinstance(record, OptimizerRecord | Parameters):
            if record.optimizer_number in private:
                continue
            record = replace_fields(record, optimizer_number=places[record.optimizer_number])
        if isinstance(record, Parameters):
            number = record.optimizer_number
            rows = [
                replace_fields(row, key=f"{number}.{row.key.partition('.')[2]}")
                for row in record.rows
            ]
            record = replace_fields(record, built=min(record.built, step), rows=rows)
        if isinstance(record, EpochRecord):
            epoch = (record.loader_number, record.epoch)
            if epoch in epochs or record.loader_number not in loaders:
                continue
        if isinstance(record, Backward):
            if _is_private(record, private):
                continue
            record = replace_fields(record, step=step, micro=micro[step])
            micro[step] += 1
        if isinstance(record, CollectiveCall | Evaluation | RandomForward):
            record = replace_fields(record, step=step)
        if isinstance(record, Step):
            done[record.optimizer_number] += 1
        kept.append(record)
    return RankRecords(rank.pid, kept, rank._numbers, rank=rank.rank)


def _is_private(backward: Backward, private: set[int]) -> bool:
    reached = backward.optimizers
    return bool(reached) and private.issuperset(reached or ())


def _private_epochs(rank: RankRecords, private: set[int]) -> set[tuple[int, int]]:
    """Return the loaders and epochs of which the first backward is a private one."""
    epochs: set[tuple[int, int]] = set()
    begun: list[Trained] = []  # each is written right before the backward that uses its batch
    for record in rank.records:
        if isinstance(record, Trained):
            begun.append(record)
        if isinstance(record, Backward):
            if _is_private(record, private):
                epochs.update((trained.loader_number, trained.epoch) for trained in begun)
            begun = []
    return epochs


def _loaders_of(rank: RankRecords, private: set[int]) -> set[int]:
    """Return the loaders whose batches have as many samples as the backwards that are kept.

    All loaders, if none has.
    """
    kept = {samples_of(one) for one in rank.of(Backward) if not _is_private(one, private)}
    loaders = {batch.loader_number for batch in rank.of(Batch)}
    fitting = {batch.loader_number for batch in rank.of(Batch) if len(batch.indices or ()) in kept}
    return fitting or loaders
