"""Fit what the ranks measured: each kind of message, memory, and a step's time over its samples."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import accumulate, chain
from typing import Any, cast

from common.errors import count
from common.sync.message_cost import KINDS
from lab.fitting import Fit, fit
from lab.predict.calibration_file import Calibration, FitRecord, GradientShape
from lab.predict.compute_model import ComputeModel, ComputeProfile
from lab.predict.event_model import Network, Rate, loads

_LEAST_TURNS = 2
_QUIET_SHARE = 0.04  # of the cores; the kernel's counters resolve no less in a quarter of a second

Turn = Sequence[Mapping[str, Any]]  # what every rank measured in one round, by rank


def fit_calibration(found: Mapping[str, Any], *, model: str, quick: bool) -> Calibration:
    """Return the calibration that fits what ``measure_rank`` returned."""
    ranks, cores = found["ranks"], found["cores"]
    every_turn = {name: _by_turn(ranks, name) for name in ("turns", "overlap", "alone", "together")}
    turns = quiet(every_turn["turns"], found)
    fits = {"gamma": _fit_memory("sum", turns), "copy": _fit_memory("copy", turns)}
    gamma = fits["gamma"].values[0]
    fits |= {kind: _fit_kind(kind, len(ranks), gamma, turns) for kind in KINDS}
    kinds = {kind: Rate(*fits[kind].values) for kind in KINDS}
    network = Network(
        kinds["exchange"].alpha_seconds,
        kinds["exchange"].beta_seconds_per_byte,
        gamma,
        fits["copy"].values[0],
        kinds,
        _overlap_cost(quiet(every_turn["overlap"], found)),
    )
    profiles = []
    cases = ((1, cores, "alone"), (found["ranks_here"], ranks[0]["threads"], "together"))
    for sharing, threads, steps in cases:
        if every_turn[steps]:
            profile, lines = _profile(sharing, threads, every_turn[steps], found)
            profiles.append(profile)
            fits |= lines
    shares = [
        statistics.median(of_all) for of_all in zip(*(rank["ready"] for rank in ranks), strict=True)
    ]
    return Calibration(
        name=f"{ranks[0]['environment']['cpu']}, {count(cores, 'core')}",
        made=datetime.now().isoformat(timespec="seconds"),
        quick=quick,
        ranks=len(ranks),
        ranks_here=found["ranks_here"],
        cores=cores,
        model=model,
        others_share=others_share([*chain(*every_turn.values())], found),
        gradients=tuple(GradientShape(size.shape, size.itemsize) for size in found["gradients"]),
        network=network,
        compute=ComputeModel(
            tuple(profiles),
            # backward makes the last parameter's gradient first
            tuple(accumulate(map(int, reversed(found["gradients"])))),
            tuple(accumulate(reversed(shares), max)),
        ),
        fits={name: cast(FitRecord, asdict(one)) for name, one in fits.items()},
        machine=ranks[0]["environment"],
    )


def quiet(turns: Sequence[Turn], found: Mapping[str, Any]) -> list[Turn]:
    """Return the turns that other processes hardly disturbed, at least the two quietest.

    found : "cores" and "ranks_here" of what ``measure_rank`` returned.
    """
    shares = [others_share([turn], found) for turn in turns]
    limit = max(_QUIET_SHARE, *sorted(shares)[:_LEAST_TURNS])
    return [turn for turn, share in zip(turns, shares, strict=True) if share <= limit]


def others_share(turns: Sequence[Turn], found: Mapping[str, Any]) -> float:
    """Return the share of rank 0's cores that other processes took in all these turns."""
    others = seconds = 0.0
    for turn in turns:
        cpu, here = [rank["cpu"] for rank in turn], found["ranks_here"]
        # If the ranks are on several machines, rank 0 stands for every rank of its machine.
        own = [rank["own"] for rank in cpu] if len(cpu) <= here else [cpu[0]["own"]] * here
        others += max(0.0, cpu[0]["all"] - sum(own))
        seconds += cpu[0]["clock"]
    return others / (seconds * found["cores"])


def fit_line(samples: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit a line: fixed seconds, and seconds per sample."""
    return fit([[1.0] * len(samples), samples], seconds, varied=samples)


def _by_turn(ranks: Sequence[Mapping[str, Any]], key: str) -> list[Turn]:
    """Return for each turn what every rank measured under ``key``.

    A rank that measured nothing is left out.
    """
    return list(zip(*(rank[key] for rank in ranks if rank[key]), strict=True))


def _fit_memory(action: str, turns: Sequence[Turn]) -> Fit:
    """Fit the seconds per byte of adding ("sum") or copying ("copy") in memory."""
    sizes, seconds = _medians(
        point for turn in turns for rank in turn for point in rank["memory"][action]
    )
    return fit([sizes], seconds, varied=sizes)


def _fit_kind(kind: str, size: int, gamma: float, turns: Sequence[Turn]) -> Fit:
    """Fit alpha and beta of a kind of message.

    Two parts of the measured time are known: what the message sums, and the tiny all_reduce that
    was timed with it.
    """
    rows = [
        row
        for turn in turns
        for row in zip(*(rank["messages"][kind] for rank in turn), strict=True)
    ]
    sizes, seconds = _medians((row[0][0], max(taken for _, taken, _ in row)) for row in rows)
    _, without = _medians((row[0][0], max(nothing for _, _, nothing in row)) for row in rows)
    messages, link_bytes, summed = zip(
        *(loads(kind, nbytes, size) for nbytes in sizes), strict=True
    )
    known = [nothing + gamma * nbytes for nothing, nbytes in zip(without, summed, strict=True)]
    return fit([messages, link_bytes], seconds, varied=sizes, known=known)


def _medians(points: Iterable[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Return the varied values in rising order, and the median measurement at each."""
    found: dict[float, list[float]] = {}
    for varied, measured in points:
        found.setdefault(varied, []).append(measured)
    return sorted(found), [statistics.median(found[varied]) for varied in sorted(found)]


def _overlap_cost(turns: Sequence[Turn]) -> float:
    costs = (
        (rank["both"] - rank["backward"]) / rank["messages"] for turn in turns for rank in turn
    )
    return min(1.0, max(0.0, statistics.median(costs)))


def _profile(
    sharing: int,
    threads: int,
    steps: Sequence[Turn],
    found: Mapping[str, Any],
) -> tuple[ComputeProfile, dict[str, Fit]]:
    """Fit the line of each section over the samples.

    Among ranks that compute together, the slowest one's step counts.
    """
    calm = [
        step
        for samples in dict.fromkeys(step[0]["samples"] for step in steps)
        for step in quiet([step for step in steps if step[0]["samples"] == samples], found)
    ]
    slowest = [max(step, key=lambda rank: rank["before"] + rank["backward"]) for step in calm]
    before, backward = (
        fit_line(*_medians((step["samples"], step[section]) for step in slowest))
        for section in ("before", "backward")
    )
    update = statistics.median(rank["update"] for step in calm for rank in step)
    profile = ComputeProfile(sharing, threads, *[*before.values, *backward.values, update])
    on = count(sharing, "rank")
    return profile, {f"before, {on}": before, f"backward, {on}": backward}
