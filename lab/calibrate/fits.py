"""Fit what the ranks measured: latency and bandwidth of each kind of message, memory, and the time of a step over its samples."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any

from common.cost_model.calibration_file import Calibration
from common.cost_model.compute_model import ComputeModel, ComputeProfile
from common.cost_model.event_model import Network, Rate, loads
from common.sync.message_cost import KINDS
from lab.fitting import Fit, fit

_LEAST_TURNS = 2
_QUIET_SHARE = 0.04  # of the cores; of a quarter of a second the kernel counts no less


def fit_calibration(found: Mapping[str, Any], *, model: str, quick: bool) -> Calibration:
    """Return the calibration that fits what ``measure_rank`` returned."""
    ranks, here = found["ranks"], found["ranks_here"]
    noise: list[tuple[float, float]] = []
    turns = quiet(zip(*(rank["turns"] for rank in ranks), strict=True), found, noise)
    fits: dict[str, Fit] = {}
    for name, column in (("gamma", "sum"), ("copy", "copy")):
        sizes, seconds = _medians(
            point for turn in turns for rank in turn for point in rank["memory"][column]
        )
        fits[name] = fit([sizes], seconds, varied=sizes)
    gamma = fits["gamma"].values[0]
    fits |= {kind: _fit_kind(kind, len(ranks), gamma, turns) for kind in KINDS}
    kinds = {kind: Rate(*fits[kind].values) for kind in KINDS}
    network = Network(
        kinds["exchange"].alpha_seconds,
        kinds["exchange"].beta_seconds_per_byte,
        gamma,
        fits["copy"].values[0],
        kinds,
        _overlap_cost(quiet(zip(*(rank["overlap"] for rank in ranks), strict=True), found, noise)),
    )
    cases = [
        (here, ranks[0]["threads"], list(zip(*(rank["together"] for rank in ranks), strict=True)))
    ]
    if ranks[0]["alone"]:
        cases.insert(0, (1, found["cores"], [(step,) for step in ranks[0]["alone"]]))
    profiles = []
    for sharing, threads, steps in cases:
        profile, own = _profile(sharing, threads, steps, found, noise)
        profiles.append(profile)
        fits |= own
    machine = ranks[0]["environment"]
    return Calibration(
        name=f"{machine['cpu']}, {found['cores']} core{'s' if found['cores'] > 1 else ''}",
        made=datetime.now().isoformat(timespec="seconds"),
        quick=quick,
        ranks=len(ranks),
        ranks_here=here,
        cores=found["cores"],
        model=model,
        others_share=statistics.fmean([share for _, share in noise], [clock for clock, _ in noise]),
        gradients=tuple(found["gradients"]),
        network=network,
        compute=ComputeModel(
            tuple(profiles), *_ready(found["gradients"], [rank["ready"] for rank in ranks])
        ),
        fits={name: one.as_json() for name, one in fits.items()},
        machine=machine,
    )


def others_share(spent: Sequence[Mapping[str, float]], found: Mapping[str, Any]) -> float:
    """Return the share of rank 0's cores that processes other than the ranks took, from what each rank ``spent`` meanwhile."""
    first = spent[0]
    own = (
        sum(cpu["own"] for cpu in spent)
        if len(spent) <= found["ranks_here"]
        else first["own"] * found["ranks_here"]
    )
    return max(0.0, first["all"] - own) / (first["clock"] * found["cores"])


def quiet(
    turns: Iterable[Sequence[Mapping[str, Any]]],
    found: Mapping[str, Any],
    noise: list[tuple[float, float]],
) -> list[Sequence[Mapping[str, Any]]]:
    """Return the turns (of each, what every rank measured) in which other processes took next to nothing, or else the
    quietest ones; ``noise`` receives the length of every turn and the share that they took."""
    by_noise = sorted(
        (
            (others_share([rank["cpu"] for rank in turn], found), index, turn)
            for index, turn in enumerate(turns)
        )
    )
    noise += [(turn[0]["cpu"]["clock"], share) for share, _, turn in by_noise]
    return [
        turn
        for position, (share, _, turn) in enumerate(by_noise)
        if share <= _QUIET_SHARE or position < _LEAST_TURNS
    ]


def _fit_kind(
    kind: str, size: int, gamma: float, turns: Sequence[Sequence[Mapping[str, Any]]]
) -> Fit:
    """Alpha and beta of a kind. Known beside them: what it sums by itself, and the tiny all_reduce that was timed with it."""
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
    return fit(
        [messages, link_bytes],
        seconds,
        varied=sizes,
        known=[nothing + gamma * nbytes for nothing, nbytes in zip(without, summed, strict=True)],
    )


def _medians(points: Iterable[Sequence[float]]) -> tuple[list[float], list[float]]:
    """What was varied, rising, and the median of what was measured there."""
    found: dict[float, list[float]] = {}
    for varied, measured in points:
        found.setdefault(varied, []).append(measured)
    return sorted(found), [statistics.median(found[varied]) for varied in sorted(found)]


def _overlap_cost(turns: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    costs = [
        (rank["both"] - rank["backward"]) / rank["messages"] for turn in turns for rank in turn
    ]
    return min(1.0, max(0.0, statistics.median(costs)))


def _profile(
    sharing: int,
    threads: int,
    steps: Sequence[Sequence[Mapping[str, Any]]],
    found: Mapping[str, Any],
    noise: list[tuple[float, float]],
) -> tuple[ComputeProfile, dict[str, Fit]]:
    """The line of each section over the samples; of ranks that compute together a step counts as the slowest one's."""
    by_samples = {
        step[0]["samples"]: [one for one in steps if one[0]["samples"] == step[0]["samples"]]
        for step in steps
    }
    calm = [step for same in by_samples.values() for step in quiet(same, found, noise)]
    slowest = [max(step, key=lambda rank: rank["before"] + rank["backward"]) for step in calm]
    fits = {}
    for section in ("before", "backward"):
        samples, seconds = _medians((step["samples"], step[section]) for step in slowest)
        fits[f"{section}, {sharing} rank{'s' if sharing > 1 else ''}"] = fit(
            [[1.0] * len(samples), samples], seconds, varied=samples
        )
    before, backward = (line.values for line in fits.values())
    update = statistics.median(rank["update"] for step in calm for rank in step)
    profile = ComputeProfile(
        sharing, threads, before[0], before[1], backward[0], backward[1], update
    )
    return profile, fits


def _ready(
    sizes: Sequence[int], shares: Sequence[Sequence[float]]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Bytes of gradients made, from the last parameter to the first, and the share of backward after which they are."""
    median = [statistics.median(column) for column in zip(*shares, strict=True)]
    return (tuple(accumulate(reversed(sizes))), tuple(accumulate(reversed(median), max)))
