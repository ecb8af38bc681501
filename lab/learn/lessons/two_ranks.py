"""Lesson 2: each rank trains on a share of its own, from the same weights, and nothing is sent."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
from torch.utils.data import DistributedSampler

from lab.audit.recording import Recording
from lab.audit.records import Weights
from lab.learn.causes import told
from lab.learn.program import fault_of, kinds_of, on_watched_ranks, run_program
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile

_SAMPLES = 1797
_EPOCHS = 3
_GLOBAL_BATCH = 64
_SIZES = (3, 5, 2)  # the last is the question's
Ranks = Sequence[list[list[int]]]  # by rank and epoch, the samples in their order


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 2; return the percentage of the samples that rank 0 of 2 sees in 3 epochs."""
    for size in _SIZES:
        epochs, recording = on_watched_ranks(
            student, size, _train_noted, student.path, global_batch=_GLOBAL_BATCH
        )
        problem = _problem(epochs, recording)
        if problem:
            raise Mistake(problem)
        say(
            f"on {size} ranks all {_SAMPLES:,} samples are shared out in each of {_EPOCHS} epochs, "
            "and each rank takes its share in a new order"
        )
    say("the ranks' weights, equal at first, end apart: no rank has sent anything")
    seen = set().union(*epochs[0])
    return 100 * len(seen) / _SAMPLES


def _problem(ranks: Ranks, recording: Recording) -> str | None:
    """Return what is wrong with the ranks' samples, steps and weights; None if nothing is."""
    size = len(ranks)
    if not any(ranks):
        return fault_of(recording, averages=False) or (
            f"on {size} ranks no DistributedSampler gives out samples: pass one to DataLoader, as "
            "sampler"
        )
    problem = _wrong_shares(ranks) or _wrong_order(ranks) or fault_of(recording, averages=False)
    if problem:
        return problem
    starts = [rank.numbers(rank.of(Weights)[0].values) for rank in recording.ranks]
    for number, start in enumerate(starts):
        if not np.array_equal(start, starts[0]):
            return told(
                "different-start",
                "the ranks start from different weights",
                f"on {size} ranks, rank {number}'s first weights are not rank 0's",
                "Seed all alike.",
            )
    return _messages(recording)


def _wrong_shares(ranks: Ranks) -> str | None:
    """Say in which epoch the ranks' shares are not all samples, each once."""
    size = len(ranks)
    for epoch in range(_EPOCHS):
        drawn = [sample for rank in ranks for share in rank[epoch:][:1] for sample in share]
        different = len(set(drawn))
        if different == _SAMPLES and len(drawn) < _SAMPLES + size:
            continue
        cure = "For a share of its own a rank needs its number, and how many ranks there are."
        if epoch:
            cure = "Before each epoch, every rank must give set_epoch the same number, the epoch's."
        return told(
            "uneven-coverage" if epoch else "same-samples",
            "the ranks do not share the samples out",
            f"on {size} ranks they take {len(drawn)} samples in epoch {epoch + 1}, {different} "
            f"different ones of {_SAMPLES}",
            cure,
        )
    return None


def _wrong_order(ranks: Ranks) -> str | None:
    """Say which rank has an epoch's order again."""
    for number, rank in enumerate(ranks):
        for epoch, order in enumerate(rank):
            earlier = rank[:epoch]
            if order in earlier:
                return told(
                    "same-order",
                    "an epoch has the same order and the same shares as an earlier one",
                    f"on {len(ranks)} ranks, rank {number}'s epoch {epoch + 1} is its epoch "
                    f"{earlier.index(order) + 1}",
                    "On every rank call loader.sampler.set_epoch(epoch) in each epoch, before its "
                    "first batch.",
                )
    return None


def _messages(recording: Recording) -> str | None:
    """Say which rank has sent anything; here none does."""
    for number, kinds in enumerate(kinds_of(recording)):
        if kinds:
            return (
                f"on {recording.size} ranks, rank {number} calls {', '.join(sorted(kinds))}. The "
                "ranks of this lesson send nothing; lesson 3 averages"
            )
    return None


def _train_noted(_names: Namespace, path: Path, records: Path) -> list[list[int]]:
    """Run the program, and return the samples of each epoch in their order."""
    begun: list[list[int]] = []
    complete: list[list[int]] = []  # not one that was left early, as to look at a batch
    samples_of = DistributedSampler.__iter__

    def noted(sampler: DistributedSampler) -> Iterator[int]:
        order = list(samples_of(sampler))
        begun.append(order)
        yield from order
        complete.append(order)

    with patch.object(DistributedSampler, "__iter__", noted):
        run_program(path, records=records)
    return complete or begun
