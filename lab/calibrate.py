"""``lab calibrate``: measures alpha, beta, gamma and the compute time, fits them, and writes reports/calibration.json.

``calibrate`` starts ranks on this machine; ``calibrate_nodes`` is one rank of several that were started by hand. Neither
trains what is to be predicted: messages are timed by themselves, steps on noise without messages.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from common.distributed import process_group
from common.errors import UserError
from common.files import write_atomically
from common.models import MODELS
from common.place import Launch
from common.records import usable_cores
from common.sync.traffic import KINDS
from common.training_engine import launch_distributed_training
from lab.calibration import Calibration, calibration_path
from lab.compute import ComputeModel, ComputeProfile
from lab.cost_model import Network, Rate, loads
from lab.fitting import Fit, fit
from lab.measure import Measures, measure_rank

_MOST_RANKS = 8
_LIMIT_SECONDS = 600.0
_SIZES = ((1_024, 20), (8_192, 20), (65_536, 10), (300_000, 8), (1_000_000, 4), (2_500_000, 3), (9_500_000, 2), (20_000_000, 1),
          (38_000_000, 1))


def measures_for(model: str, image: tuple[int, int], *, quick: bool) -> Measures:
    """Return what a calibration measures; the samples are no common batch sizes, so that no cell to predict is among them."""
    if quick:
        return Measures(model, image, _SIZES[::2], rounds=3, step_rounds=1, samples=(24, 72, 140), steps=2,
                        limit_seconds=_LIMIT_SECONDS)
    return Measures(model, image, _SIZES, rounds=5, step_rounds=2, samples=(28, 100, 220), steps=2,
                    limit_seconds=_LIMIT_SECONDS)


def calibrate(*, ranks: int | None = None, model: str = "vgg11", image: tuple[int, int] = (32, 32), quick: bool = False,
              path: Path | None = None, measures: Measures | None = None) -> Calibration:
    """Measure with ``ranks`` processes on this machine (default: one a core, 2 to 8) over loopback, and write the file.

    path : instead of ``calibration_path()``. Raises UserError on wrong values, WorkerError where a rank fails. No process is
    left behind.
    """
    ranks = ranks if ranks is not None else min(_MOST_RANKS, max(2, usable_cores()))
    if ranks < 2:
        raise UserError(f"--ranks: got {ranks}, give 2 or more: one rank sends no messages")
    if model not in MODELS:
        raise UserError(f"--model: got {model!r}, choose one of {', '.join(MODELS)}")
    found = launch_distributed_training(measure_rank, ranks, "gloo", measures=measures or measures_for(model, image, quick=quick),
                                        ranks_here=ranks)
    calibration = fit_calibration(found, model=model, quick=quick)
    save_calibration(calibration, path or calibration_path())
    return calibration


def calibrate_nodes(launch: Launch, *, model: str = "vgg11", image: tuple[int, int] = (32, 32), quick: bool = False,
                    path: Path | None = None, timeout_seconds: float = 60.0,
                    measures: Measures | None = None) -> Calibration | None:
    """Measure as one rank of a group, each node having started one; rank 0 writes the file and returns what is in it.

    Raises GroupError and UserError as ``common.distributed.process_group`` does.
    """
    if launch.size < 2:
        raise UserError(f"--num-nodes: got {launch.size}, give 2 or more: one node sends no messages")
    with process_group(launch, backend="gloo", timeout_seconds=timeout_seconds) as world:
        found = measure_rank(world.rank, world.size, measures=measures or measures_for(model, image, quick=quick),
                             ranks_here=world.local_size)
    if not world.is_root:
        return None
    calibration = fit_calibration(found, model=model, quick=quick)
    save_calibration(calibration, path or calibration_path())
    return calibration


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write the file, whole or not at all."""
    import json

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(calibration.as_json(), indent=1, allow_nan=False).encode())


def fit_calibration(found: Mapping[str, Any], *, model: str, quick: bool) -> Calibration:
    """Return the calibration that fits what ``measure_rank`` returned."""
    ranks, size = found["ranks"], len(found["ranks"])
    fits: dict[str, Fit] = {}
    for name, column in (("gamma", "sum"), ("copy", "copy")):
        sizes, seconds = _medians(point for rank in ranks for point in rank["memory"][column])
        fits[name] = fit([sizes], seconds, varied=sizes)
    gamma = fits["gamma"].values[0]
    for kind in KINDS:
        fits[kind] = _fit_kind(kind, size, gamma, ranks)
    kinds = {kind: Rate(*fits[kind].values) for kind in KINDS}
    network = Network(kinds["exchange"].alpha_seconds, kinds["exchange"].beta_seconds_per_byte, gamma, fits["copy"].values[0],
                      kinds, _overlap_cost(ranks))
    profiles = []
    together = [rank["together"] for rank in ranks]
    cases = [(found["ranks_here"], ranks[0]["threads"], together)]
    if "alone" in ranks[0]:
        cases.insert(0, (1, found["cores"], [ranks[0]["alone"]]))
    for here, threads, steps in cases:
        profile, own = _profile(here, threads, steps)
        profiles.append(profile)
        fits |= own
    ready_bytes, ready_shares = _ready(found["gradients"], [rank["ready"] for rank in ranks])
    machine = ranks[0]["environment"]
    return Calibration(
        name=f"{machine['cpu']}, {found['cores']} core{'s' if found['cores'] > 1 else ''}",
        made=datetime.now().isoformat(timespec="seconds"), quick=quick, ranks=size, ranks_here=found["ranks_here"],
        cores=found["cores"], others_share=_others_share(found), model=model, gradients=tuple(found["gradients"]),
        network=network, compute=ComputeModel(tuple(profiles), ready_bytes, ready_shares),
        fits={name: one.as_json() for name, one in fits.items()}, machine=machine)


def _fit_kind(kind: str, size: int, gamma: float, ranks: Sequence[Mapping[str, Any]]) -> Fit:
    """Alpha and beta of a kind. Known beside them: what it sums by itself, and the tiny all_reduce that was timed with it."""
    turns = list(zip(*(rank["messages"][kind] for rank in ranks), strict=True))  # of each: a row a rank
    sizes, seconds = _medians((turn[0][0], max(taken for _, taken, _ in turn)) for turn in turns)
    _, without = _medians((turn[0][0], max(nothing for _, _, nothing in turn)) for turn in turns)
    messages, link_bytes, summed = zip(*(loads(kind, nbytes, size) for nbytes in sizes), strict=True)
    return fit([messages, link_bytes], seconds, varied=sizes,
               known=[nothing + gamma * nbytes for nothing, nbytes in zip(without, summed, strict=True)])


def _medians(points: Iterable[Sequence[float]]) -> tuple[list[float], list[float]]:
    """What was varied, rising, and the median of what was measured there."""
    found: dict[float, list[float]] = {}
    for varied, measured in points:
        found.setdefault(varied, []).append(measured)
    return sorted(found), [statistics.median(found[varied]) for varied in sorted(found)]


def _overlap_cost(ranks: Sequence[Mapping[str, Any]]) -> float:
    costs = [(turn["both"] - turn["backward"]) / turn["messages"] for rank in ranks for turn in rank["overlap"]]
    return min(1.0, max(0.0, statistics.median(costs)))


def _others_share(found: Mapping[str, Any]) -> float:
    """The share of the cores that processes other than the ranks took while these measured (of rank 0's machine)."""
    first = found["ranks"][0]["cpu"]
    own = sum(rank["cpu"]["own"] for rank in found["ranks"]) if len(found["ranks"]) == found["ranks_here"] else (
        first["own"] * found["ranks_here"])
    return max(0.0, first["all"] - own) / (first["clock"] * found["cores"])


def _profile(here: int, threads: int, steps: Sequence[Sequence[Mapping[str, float]]]) -> tuple[ComputeProfile, dict[str, Fit]]:
    """The line of each section over the samples; of ranks that compute together a step counts as the slowest one's."""
    slowest = [max(turn, key=lambda step: step["before"] + step["backward"]) for turn in zip(*steps, strict=True)]
    fits = {}
    for section in ("before", "backward"):
        samples, seconds = _medians((step["samples"], step[section]) for step in slowest)
        fits[f"{section}, {here} ranks"] = fit([[1.0] * len(samples), samples], seconds, varied=samples)
    before, backward = fits.values()
    update = statistics.median(step["update"] for rank in steps for step in rank)
    return ComputeProfile(here, threads, *before.values, *backward.values, update), fits


def _ready(sizes: Sequence[int], shares: Sequence[Sequence[float]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Bytes of gradients made, from the last parameter to the first, and the share of backward after which they are."""
    median = [statistics.median(column) for column in zip(*shares, strict=True)]
    return (tuple(accumulate(reversed(sizes))), tuple(accumulate(reversed(median), max)))
