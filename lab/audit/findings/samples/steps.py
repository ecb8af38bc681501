"""What each rank did in each step: batches, samples, backward passes, gradient exchanges."""

from collections import Counter
from dataclasses import dataclass, field

from lab.audit.findings.samples.epochs import trained_epochs
from lab.audit.recording import RankRecords, Record, Recording


@dataclass
class TrainingStep:
    """What a rank did for one update of its first optimiser.

    Parameters
    ----------
    batches : batches that its loaders gave.
    loaded : samples of these batches; None if they are not known.
    samples : that the losses are computed of; without such a record, those loaded, or without a
        loader, the leading dimension of the model's inputs; None if nothing is known.
    backwards : the records ``backward``.
    scale : GradScaler's, by which the loss is multiplied; 1 without.
    exchanged : the batches, counted from 1 in this step, during which gradients were exchanged by
        hand; those of DDP are not seen.
    """

    batches: int = 0
    loaded: int | None = 0
    samples: int | None = None
    scale: float = 1.0
    backwards: list[Record] = field(default_factory=list)
    exchanged: set[int] = field(default_factory=set)

    @property
    def takes_a_part(self) -> bool:
        """Whether the model gets fewer samples than the loader gave, as when ranks slice a batch.

        Inputs may have another dimension first, so a loss of the whole batch says no.
        """
        given = sum(one["forwards"][0][0] or 0 for one in self.backwards if one["forwards"])
        in_losses = sum((one["loss"] or {}).get("samples") or 0 for one in self.backwards)
        return 0 < given < 0.9 * (self.loaded or 0) and in_losses != self.loaded

    @property
    def accumulates(self) -> bool:
        """Whether each of several batches has its own backward pass."""
        return self.batches > 1 and self.batches == len(self.backwards)


def training_steps(rank: RankRecords) -> list[TrainingStep]:
    """Return a rank's steps in order."""
    trained = trained_epochs(rank)
    optimizer = min((one["o"] for one in rank.by_kind["step"]), default=None)
    steps, now = [], TrainingStep()
    for record in rank.records:
        kind = record["k"]
        if kind == "batch" and (record["l"], record["epoch"]) in trained:
            now.batches += 1
            rows = record.get("indices")
            now.loaded = None if rows is None or now.loaded is None else now.loaded + len(rows)
        elif kind == "backward":
            now.backwards.append(record)
        elif kind == "call" and record.get("content") == "gradient":
            now.exchanged.add(now.batches)
        elif kind == "step" and record["o"] == optimizer:
            of_loss = _input_samples(now)
            now.samples = of_loss if of_loss is not None or not now.batches else now.loaded
            now.scale = record.get("scale") or 1.0
            steps.append(now)
            now = TrainingStep()
    return steps


def _input_samples(step: TrainingStep) -> int | None:
    """Return the samples of a step by its inputs, or None if a loss had another number.

    With a loader, every loss must tell its number, and there is one loss a batch.
    """
    if 0 < step.batches < len(step.backwards):
        return None
    total = 0
    for record in step.backwards:
        samples = record["forwards"][0][0] if len(record["forwards"]) == 1 else None
        in_loss = (record["loss"] or {}).get("samples")
        if not samples or (in_loss != samples and (step.batches or in_loss is not None)):
            return None
        total += samples
    return total or None


def local_batches(recording: Recording) -> dict[int, int] | None:
    """Return the samples that each rank has in most of its steps; None if a rank's are unknown.

    The last step of an epoch may have fewer, and a loader may be a batch ahead.
    """
    sizes = {}
    for rank in recording.ranks:
        counts = Counter(step.samples for step in training_steps(rank))
        (most, times), *_ = counts.most_common(1) or [(None, 0)]
        if most is None or most == 0 or times * 2 < counts.total():
            return None
        sizes[rank.rank] = most
    return sizes if len(sizes) == recording.size else None
