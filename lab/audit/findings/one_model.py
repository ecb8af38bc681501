"""Do the ranks compute one model together, and what does a finding suppose where that is open?

Ranks that exchange activations may be tensor, expert, sequence or pipeline parallel: most findings
then say nothing. They may as well be replicas, with BatchNorm over all ranks or a loss over
gathered features. ``ActivationExchange.doubt`` says what a finding supposes that the records do not
show.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from common.utils.gradient_fit import norms
from lab.audit.findings.finding import Finding
from lab.audit.findings.weights import Replicas
from lab.audit.findings.where import POINT_TO_POINT, lasting_optimizers
from lab.audit.recording import Numbers, RankRecords, Recording
from lab.audit.records import (
    Backward,
    CollectiveCall,
    DdpBuilt,
    FsdpBuilt,
    Parameters,
    Step,
)

# Gradients whose relative difference is below the first are the same; above the second, different.
_EQUAL = 1e-4
_APART = 1e-3
_SAME_LOSS = 1e-3
_ITEM_BYTES = {"float64": 8, "float16": 2, "bfloat16": 2}
# Findings that count the gradients' multiple of the mean: a loss that all ranks share has another.
_OF_MULTIPLES = (
    *("sum-not-mean", "averaged-twice", "group-divisor", "literal-divisor", "scaled-in-loss"),
    "multiplied-in-loss",
)


@dataclass(frozen=True)
class Doubt:
    """What a finding supposes, as "the ranks are replicas", and why nobody can tell whether so."""

    condition: str
    why: str


_REPLICAS = Doubt(
    "the ranks are replicas",
    "the ranks exchange activations, so they may compute one model together (tensor, "
    "expert or pipeline parallel); only replicas are compared",
)
_OWN_LOSS = Doubt(
    "each rank's loss covers its own samples alone",
    "the ranks exchange activations and all compute the same loss, so it may be one loss"
    " over all their samples, of which the gradients are added up",
)
_WHOLE_SAMPLES = Doubt(
    "each rank computes on whole samples",
    "the ranks load the same samples and exchange activations, so each may compute a "
    "part of every sample (sequence parallel)",
)


class ActivationExchange:
    """What is known of ranks that exchange activations; see ``doubt``."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def doubt(self, finding: Finding) -> Doubt | None:
        """Return what a finding on replicas supposes that the records leave open; None: nothing.

        Each epoch's order has nothing to do with the other ranks, and what starts equal and is
        exchanged stays equal, also in a model that the ranks compute together.
        """
        if finding.name in ("same-order", "shared-part-diverges"):
            return None
        if self._activations and not self._replicas:
            return _REPLICAS
        if finding.name in _OF_MULTIPLES and self._shares_loss:
            return _OWN_LOSS
        if not self._activations:
            return None
        if finding.name == "same-samples" and not self._alike:
            return _WHOLE_SAMPLES
        return None

    @cached_property
    def _activations(self) -> bool:
        return exchanges_activations(self._recording)

    @cached_property
    def _trained(self) -> list[Replicas]:
        families = lasting_optimizers(self._recording)
        return [Replicas(self._recording, number) for family in families for number in family]

    @cached_property
    def _replicas(self) -> bool:
        """Whether every parameter's gradient, or weights, are exchanged over all ranks.

        Calls tell, or DDP, or what the optimisers get.
        """
        if not self._trained or not all(replicas.same for replicas in self._trained):
            return False
        if exchanged_numbers(self._recording) >= _trained_numbers(self._recording.ranks[0]):
            return True
        return all(map(_gets_exchanged, self._trained))

    @cached_property
    def _shares_loss(self) -> bool:
        """Whether the ranks may compute one loss, each with the gradients of its own samples.

        If they gather the loss's features outside the model and exchange something in backward,
        that brings each rank the gradients of all.
        """
        calls = self._recording.of(CollectiveCall)
        in_backward = any(call.content == "other" and call.within == "backward" for call in calls)
        gathers = _exchanges_before_backward(self._recording.ranks[0]) and not in_backward
        return (self._activations or gathers) and self._common_loss

    @property
    def _common_loss(self) -> bool:
        """Whether no ranks are known to differentiate losses of different values."""
        by_rank = [_loss_values(rank) for rank in self._recording.ranks]
        for place in set.intersection(*map(set, by_rank)):
            values = [losses[place] for losses in by_rank]
            if np.ptp(values) > _SAME_LOSS * np.abs(values).max():
                return False
        return True

    @cached_property
    def _alike(self) -> bool:
        """Whether all ranks compute the same gradients in all steps."""
        steps = [(replicas, own) for replicas in self._trained for own in replicas.own.values()]
        return bool(steps) and all(
            (_apart(own, replicas.columns) <= _EQUAL).all() for replicas, own in steps
        )


def exchanges_activations(recording: Recording) -> bool:
    """Return whether the ranks exchange activations, by a call of ``_sends_activations``."""
    if recording.of(FsdpBuilt):  # what it gathers in forward are weights
        return False
    parameters = [
        sorted((row.name, row.shape) for record in rank.of(Parameters) for row in record.rows)
        for rank in recording.ranks
    ]
    different_parameters = any(rows != parameters[0] for rows in parameters)
    with_loss = {_has_loss(rank) for rank in recording.ranks if rank.of(Backward)}
    stages = different_parameters or len(with_loss) > 1
    return any(_sends_activations(call, stages=stages) for call in recording.of(CollectiveCall))


def _has_loss(rank: RankRecords) -> bool:
    """Return whether some backward of a rank begins from a single number."""
    losses = [backward.loss for backward in rank.of(Backward)]
    return any(loss is not None and loss.value is not None for loss in losses)


def _sends_activations(call: CollectiveCall, *, stages: bool) -> bool:
    """Return whether a call exchanges activations: neither weights nor gradients of parameters.

    Any call within forward does, all_to_all and all_gather within backward, and send and recv
    anywhere if the ranks are stages of a pipeline: they train different parameters, or only some of
    them have a loss.
    """
    single_number = prod(call.shape or ()) <= 1  # as DDP sends within Join
    if call.content != "other" or single_number:
        return False
    between_layers = call.name.startswith(("all_to_all", "all_gather"))
    if call.within == "forward" or (call.within == "backward" and between_layers):
        return True
    return stages and call.name in POINT_TO_POINT


def _trained_numbers(rank: RankRecords) -> int:
    """Return how many numbers all parameters of a rank's optimisers have; each tensor once."""
    rows = [row for parameters in rank.of(Parameters) for row in parameters.rows]
    return sum({row.tensor: row.numel for row in rows}.values())


def exchanged_numbers(recording: Recording) -> int:
    """Return of how many numbers the gradients, or weights, are exchanged over all ranks.

    That is what DDP averages, or the most that calls of one kind exchange from one backward to the
    next: a gather and the scatter of its result count once.
    Calls that share out parts, as those of sharded weights do, count for nothing.
    """
    size = recording.size
    rank = recording.ranks[0]
    by_ddp = sum(ddp.numbers for ddp in rank.of(DdpBuilt) if len(ddp.ranks) == size)
    by_kind: Counter[tuple[int, str, str | None]] = Counter()
    backwards = 0
    after_backward = False
    for record in rank.records:
        if isinstance(record, Backward | Step):
            after_backward = isinstance(record, Backward)
            backwards += after_backward
        if isinstance(record, CollectiveCall) and record.size == size:
            kind = (backwards, record.name, record.content)
            by_kind[kind] += _exchanged(record, after_backward=after_backward)
    return max([by_ddp, *by_kind.values()])


def _exchanged(call: CollectiveCall, *, after_backward: bool) -> int:
    """Return of how many numbers a call over all ranks exchanges the gradients or the weights.

    after_backward : it lies between a backward and the update, where a copy of gradients is sent.
    """
    reduces = call.name.startswith(("all_reduce", "reduce")) and "scatter" not in call.name
    shares_out = "scatter" in call.name and call.content != "gradient"
    if shares_out or call.name.startswith("reduce_scatter") or call.name in POINT_TO_POINT:
        return 0
    of_copies = reduces and after_backward and call.within is None
    of_weights = reduces and call.content == "weights"
    if call.content == "gradient" or of_weights or of_copies:
        return call.nbytes // _ITEM_BYTES.get(call.dtype or "", 4)
    return 0


def _gets_exchanged(replicas: Replicas) -> bool:
    """Return whether all ranks get the same for each parameter, and compute something else for it.

    Parameters without a gradient say nothing.
    """
    received = np.zeros(len(replicas.names), dtype=bool)
    computed = np.zeros(len(replicas.names), dtype=bool)
    for step, own in replicas.own.items():
        got = replicas.got[step]
        if np.isfinite(own).all() and np.isfinite(got).all():
            computed |= norms(own, replicas.columns).any(axis=0)
            same = _apart(got, replicas.columns) <= _EQUAL
            received |= same & (_apart(own, replicas.columns) > _APART)
    return bool(computed.any() and received[computed].all())


def _apart(rows: Numbers, columns: list[slice]) -> Numbers:
    """Return by parameter how far the ranks' numbers are from rank 0's, relatively to a norm."""
    sizes = norms(rows, columns).max(axis=0)
    apart = norms(rows - rows[0], columns).max(axis=0)
    return np.divide(apart, sizes, out=np.zeros_like(apart), where=sizes > 0)


def _exchanges_before_backward(rank: RankRecords) -> bool:
    """Return whether a rank exchanges several numbers between an update and a backward."""
    before_backward = False
    for record in rank.records:
        if isinstance(record, Backward | Step):
            before_backward = isinstance(record, Step)
        elif isinstance(record, CollectiveCall) and before_backward:
            several = prod(record.shape or ()) > 1
            if several and record.content == "other" and record.within is None:
                return True
    return False


def _loss_values(rank: RankRecords) -> dict[tuple[int, int], float]:
    """Return by step and micro-batch the values from which a rank's backwards began."""
    return {
        (backward.step, backward.micro): backward.loss.value
        for backward in rank.of(Backward)
        if backward.loss is not None and backward.loss.value is not None
    }
