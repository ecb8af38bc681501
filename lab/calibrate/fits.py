"""Fit what the ranks measured: each kind of message, memory, and a step's time over its samples."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import accumulate, chain
from typing import Any, TypeVar

from common.say import count
from common.sync.message_cost import KINDS
from common.utils.grouping import grouped
from lab.calibrate.measurements import (
    GroupMeasurements,
    MessageRound,
    OverlapTimes,
    Sharing,
    StepTimes,
    UsesCpu,
)
from lab.fitting import Fit, fit
from lab.predict.calibration_file import Calibration, FitRecord, GradientShape
from lab.predict.compute_model import ComputeModel, ComputeProfile
from lab.predict.event_model import Network, Rate, loads

_LEAST_TURNS = 2
_QUIET_SHARE = 0.04  # of the cores; the kernel's counters resolve no less in a quarter of a second

Measured = TypeVar("Measured", bound=UsesCpu)
Turn = Sequence[Measured]  # what every rank measured in one round, by rank


def fit_calibration(found: GroupMeasurements, *, model: str, quick: bool) -> Calibration:
    """Return the calibration that fits what ``measure_rank`` returned."""
    ranks = found.ranks
    sharing = found.sharing
    messages = _by_turn([rank.turns for rank in ranks])
    overlap = _by_turn([rank.overlap for rank in ranks])
    alone = _by_turn([rank.alone for rank in ranks])
    together = _by_turn([rank.together for rank in ranks])

    network, fits = _fit_network(quiet(messages, sharing), quiet(overlap, sharing))
    profiles = []
    if alone:
        profile, lines = _fit_profile(1, sharing.cores, alone, sharing)
        profiles.append(profile)
        fits |= lines
    if together:
        profile, lines = _fit_profile(sharing.ranks_here, ranks[0].threads, together, sharing)
        profiles.append(profile)
        fits |= lines

    machine = ranks[0].environment
    every_turn: list[Turn] = [*messages, *overlap, *alone, *together]
    return Calibration(
        name=f"{machine['cpu']}, {count(sharing.cores, 'core')}",
        made=datetime.now().isoformat(timespec="seconds"),
        quick=quick,
        ranks=len(ranks),
        ranks_here=sharing.ranks_here,
        cores=sharing.cores,
        model=model,
        others_share=others_share(every_turn, sharing),
        gradients=tuple(GradientShape(size.shape, size.itemsize) for size in found.gradients),
        network=network,
        compute=_compute_model(found, profiles),
        fits={name: FitRecord(**asdict(line)) for name, line in fits.items()},
        machine=machine,
        batchnorm=tuple(found.batchnorm),
    )


def quiet(turns: Sequence[Turn], sharing: Sharing) -> list[Any]:
    """Return the turns that other processes hardly disturbed, at least the two quietest."""
    shares = [others_share([turn], sharing) for turn in turns]
    limit = max(_QUIET_SHARE, *sorted(shares)[:_LEAST_TURNS])
    return [turn for turn, share in zip(turns, shares, strict=True) if share <= limit]


def others_share(turns: Sequence[Turn], sharing: Sharing) -> float:
    """Return the share of rank 0's cores that other processes took in all these turns."""
    others = 0.0
    seconds = 0.0
    for turn in turns:
        first = turn[0].cpu
        if len(turn) <= sharing.ranks_here:  # all of them ran on rank 0's machine
            own = sum(rank.cpu.own for rank in turn)
        else:  # on several machines, rank 0 stands for every rank of its machine
            own = first.own * sharing.ranks_here
        others += max(0.0, first.all - own)
        seconds += first.clock
    return others / (seconds * sharing.cores)


def fit_line(samples: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit a line: fixed seconds, and seconds per sample."""
    return fit([[1.0] * len(samples), samples], seconds, varied=samples)


def _by_turn(of_ranks: Sequence[Sequence[Measured]]) -> list[Turn[Measured]]:
    """Return for each turn what every rank measured; leave out a rank that measured nothing."""
    measured = [turns for turns in of_ranks if turns]
    return list(zip(*measured, strict=True))


def _fit_network(
    turns: Sequence[Turn[MessageRound]], overlap: Sequence[Turn[OverlapTimes]]
) -> tuple[Network, dict[str, Fit]]:
    """Return the network that fits these turns, and each fit by the name of its quantity."""
    added = _fit_memory("sum", turns)
    copied = _fit_memory("copy", turns)
    gamma = added.values[0]
    of_kinds = {kind: _fit_kind(kind, gamma, turns) for kind in KINDS}
    kinds = {kind: Rate(*line.values) for kind, line in of_kinds.items()}
    network = Network(
        kinds["exchange"].alpha_seconds,
        kinds["exchange"].beta_seconds_per_byte,
        gamma,
        copied.values[0],
        kinds,
        _overlap_cost(overlap),
    )
    return network, {"gamma": added, "copy": copied, **of_kinds}


def _fit_memory(action: str, turns: Sequence[Turn[MessageRound]]) -> Fit:
    """Fit the seconds per byte of adding ("sum") or copying ("copy") in memory."""
    rows = chain.from_iterable(rank.memory[action] for turn in turns for rank in turn)
    sizes, seconds = _medians((row.nbytes, row.seconds) for row in rows)
    return fit([sizes], seconds, varied=sizes)


def _fit_kind(kind: str, gamma: float, turns: Sequence[Turn[MessageRound]]) -> Fit:
    """Fit alpha and beta of a kind of message; the slowest rank's time counts.

    Two parts of the measured time are known: what the message sums, and the tiny all_reduce that
    was timed with it.
    """
    taken = []
    taken_without = []
    for turn in turns:
        for rows in zip(*(rank.messages[kind] for rank in turn), strict=True):
            nbytes = rows[0].nbytes
            taken.append((nbytes, max(row.seconds for row in rows)))
            taken_without.append((nbytes, max(row.seconds_without for row in rows)))
    sizes, seconds = _medians(taken)
    _, seconds_without = _medians(taken_without)

    ranks = len(turns[0])
    of_sizes = [loads(kind, nbytes, ranks) for nbytes in sizes]
    messages, link_bytes, summed_bytes = zip(*of_sizes, strict=True)
    known = [
        without + gamma * summed
        for without, summed in zip(seconds_without, summed_bytes, strict=True)
    ]
    return fit([messages, link_bytes], seconds, varied=sizes, known=known)


def _medians(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the varied values in rising order, and the median measurement at each."""
    found = grouped(points)
    in_order = sorted(found)
    return in_order, [statistics.median(found[varied]) for varied in in_order]


def _overlap_cost(turns: Sequence[Turn[OverlapTimes]]) -> float:
    """Return by what share of the messages' time they lengthen a backward pass, 0 to 1."""
    ranks = chain.from_iterable(turns)
    cost = statistics.median((rank.both - rank.backward) / rank.messages for rank in ranks)
    return min(1.0, max(0.0, cost))


def _fit_profile(
    ranks: int, threads: int, turns: Sequence[Turn[StepTimes]], sharing: Sharing
) -> tuple[ComputeProfile, dict[str, Fit]]:
    """Fit the line of each section over the samples; return both lines also by their names.

    Among ranks that compute together, the slowest one's step counts.
    """
    calm: list[Turn[StepTimes]] = []
    for samples in dict.fromkeys(turn[0].samples for turn in turns):
        calm += quiet([turn for turn in turns if turn[0].samples == samples], sharing)
    slowest = [max(turn, key=lambda rank: rank.before + rank.backward) for turn in calm]
    before = fit_line(*_medians((step.samples, step.before) for step in slowest))
    backward = fit_line(*_medians((step.samples, step.backward) for step in slowest))
    update = statistics.median(rank.update for rank in chain.from_iterable(calm))
    profile = ComputeProfile(
        ranks,
        threads,
        before_fixed_seconds=before.values[0],
        before_sample_seconds=before.values[1],
        backward_fixed_seconds=backward.values[0],
        backward_sample_seconds=backward.values[1],
        update_seconds=update,
    )
    on_ranks = count(ranks, "rank")
    return profile, {f"before, {on_ranks}": before, f"backward, {on_ranks}": backward}


def _compute_model(found: GroupMeasurements, profiles: Sequence[ComputeProfile]) -> ComputeModel:
    """Return the profiles with the order in which backward makes gradients, the last one first."""
    ready = zip(*(rank.ready for rank in found.ranks), strict=True)
    shares = [statistics.median(of_ranks) for of_ranks in ready]
    return ComputeModel(
        tuple(profiles),
        ready_bytes=tuple(accumulate(map(int, reversed(found.gradients)))),
        ready_shares=tuple(accumulate(reversed(shares), max)),
    )
