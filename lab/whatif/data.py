"""What the page of ``lab whatif`` computes with, as JSON: ``page_data``.

engine.js has the formulas of ``lab predict``. Their constants, the priors with their draws, the
models, the strategies with their plans and the calibration come from here, so that none of them is
written twice.
"""

import tomllib
from collections.abc import Collection, Sequence
from dataclasses import asdict
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from common.config.schema import DEFAULT_GLOBAL_BATCH_SIZE
from common.errors import UserError
from common.models import MODELS
from common.sync import STRATEGIES, build_message_plan_from
from common.sync.plans.as_data import plan_data
from lab.predict import (
    calibrated_draws,
    calibration_file,
    cli,
    cluster,
    event_model,
    own_model,
    printing,
    priors,
    scenario,
    tables,
    validation,
)
from lab.predict.calibration_file import Calibration
from lab.strategy_style import color, marker

FORMAT = 1
_FAMILIES = {"gloo": "Gloo", "nccl": "NCCL"}


class State(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a reader of the page sets: the flags of ``lab predict``, and what is drawn.

    Parameters
    ----------
    model, parameters : a name, or "own" with a number of parameters.
    costs : "typical" of backend and transport, or "calibrated".
    inside_gbit, latency_us, bucket_mb : None: the typical value, or the strategy's own.
    step_ms, batch : a step of ``batch`` samples of one rank; None: the calibration's own step.
    batch_size, scaling : samples of all ranks together ("strong"), or of each rank ("weak").
    strategies : those that are drawn. focus : the one of the timeline and of the sentence.
    measured : id of a set of measured points.
    """

    model: str
    parameters: int = 25_000_000
    gradient_type: str = "fp32"
    costs: str = "typical"
    backend: str = "nccl"
    transport: str = "tcp"
    rate_gbit: float
    inside_gbit: float | None = None
    latency_us: float | None = None
    step_ms: float | None = None
    batch: int = DEFAULT_GLOBAL_BATCH_SIZE
    scaling: str = "strong"
    batch_size: int = DEFAULT_GLOBAL_BATCH_SIZE
    nodes: int
    ranks_per_node: int = 1
    bucket_mb: float | None = None
    strategies: list[str]
    focus: str = "ddp"
    measured: str | None = None


def page_data(
    calibration: Calibration,
    *,
    is_reference: bool = False,
    measured: Sequence[dict[str, Any]] = (),
    questions: Sequence[dict[str, Any]] = (),
    models: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return the page's data; it imports torch, for the shapes of this project's models.

    is_reference : the calibration is the one that comes with the project. measured, questions : of
    measured.py and questions.py. models : of this project, those that the page has beside those of
    its presets and measured sets; None: all. torchvision's take a second to import.
    """
    strategies, left_out = _strategies()
    presets = _presets(calibration)
    names = own_model.model_names()
    if models is not None:
        needed = {*models, *(entry["state"]["model"] for entry in (*presets, *measured))}
        names = [name for name in names if name in needed or name not in MODELS]
    return {
        "format": FORMAT,
        "constants": _constants(),
        "draws": _draws(),
        "priors": [asdict(prior) for prior in priors.load_priors()],
        "strategies": strategies,
        "left_out": left_out,
        "models": [
            _model(calibration, name) for name in dict.fromkeys([calibration.model, *names])
        ],
        "calibration": _calibration(calibration, is_reference=is_reference),
        "presets": presets,
        "families": _families(),
        "measured": measured,
        "questions": questions,
    }


def _constants() -> dict[str, Any]:
    """Return what stands as a number in the formulas of ``lab predict``."""
    return {
        "headers": event_model.HEADERS,
        "packet_bytes": event_model.PACKET_BYTES,
        "largest_nodes": event_model.LARGEST_NODES,
        "near_zero": event_model.NEAR_ZERO,
        "sampled_ranks": event_model.SAMPLED_RANKS,
        "high_z": priors.HIGH_Z,
        "latencies": [
            {"most_bits": min(most_bits, 1e300), "seconds": seconds}  # JSON has no infinity
            for most_bits, seconds in cluster.LATENCIES
        ],
        "rdma_latency": cluster.RDMA_LATENCY,
        "typical_inside_bits": scenario.TYPICAL_INSIDE_BITS,
        "remainder": calibrated_draws.REMAINDER,
        "large_step": calibration_file.LARGE_STEP,
        "tensors": own_model.TENSORS,
        "gradient_bytes": cli.GRADIENT_BYTES,
        "interval": tables.INTERVAL,
        "purchases": tables.PURCHASES,
        "decided": printing.DECIDED,
        "little": printing.LITTLE,
    }


def _draws() -> dict[str, Any]:
    """Return the normal values in rising order, and for each prior their places in its draws.

    The calibrated costs use the first rows, too, as ``normal_draws`` gives them the same.
    """
    rows = priors.normal_draws(len(priors.load_priors()))
    return {"values": np.sort(rows[0]).tolist(), "orders": rows.argsort().argsort().tolist()}


def _strategies() -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return the strategies with their plans, and those that the page cannot compute, with why."""
    found = []
    left_out = []
    for name, strategy in STRATEGIES.items():
        try:
            plan = plan_data(build_message_plan_from(name, {}))
        except UserError as error:
            left_out.append({"name": name, "why": str(error)})
            continue
        found.append(
            {
                "name": name,
                "label": strategy.label,
                "color": color(name),
                "marker": marker(name),
                "part": strategy.part,
                "plan": plan,
            }
        )
    return found, left_out


def _model(calibration: Calibration, name: str) -> dict[str, Any]:
    """Return a model's gradients, and after which share of backward they are ready.

    ``ready_bytes`` and ``ready_shares`` : None where they follow from the gradients: the bytes in
    the reverse order of the parameters, each byte as fast as another.
    """
    found = calibration
    if name != calibration.model:
        found = own_model.with_own_model(
            calibration, model=name, parameters=None, step_seconds=1.0, batch=1
        )
    gradients = [
        [len(list(alike)), gradient.shape, gradient.itemsize]
        for gradient, alike in groupby(found.gradients)
    ]
    sizes = [gradient.nbytes for gradient in found.gradients]
    compute = found.compute
    in_turn = tuple(accumulate(reversed(sizes)))
    evenly = tuple(nbytes / max(1, sum(sizes)) for nbytes in in_turn)
    return {
        "name": name,
        "gradients": gradients,
        "ready_bytes": None if compute.ready_bytes == in_turn else compute.ready_bytes,
        "ready_shares": None if compute.ready_shares == evenly else compute.ready_shares,
        "least_samples": _least_samples(found),
    }


def _least_samples(calibration: Calibration) -> int:
    one_rank = scenario.Scenario(
        calibration=calibration, batch_size=DEFAULT_GLOBAL_BATCH_SIZE, scaling="weak"
    )
    return one_rank.least_samples


def _calibration(calibration: Calibration, *, is_reference: bool) -> dict[str, Any]:
    return {
        "name": calibration.name,
        "made": calibration.made,
        "model": calibration.model,
        "cores": calibration.cores,
        "is_reference": is_reference,
        "ranks": calibration.ranks,
        "ranks_here": calibration.ranks_here,
        "network": asdict(calibration.network),
        "spreads": calibrated_draws.spreads(calibration),
        "profiles": [asdict(profile) for profile in calibration.compute.profiles],
    }


def _presets(calibration: Calibration) -> list[dict[str, Any]]:
    """Return the clusters of presets.toml, each with its whole state."""
    tables_by_id = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
    presets = []
    for name, entry in tables_by_id.items():
        state = msgspec.convert({"model": calibration.model} | entry["state"], State)
        presets.append(
            {
                "id": name,
                "title": entry["title"],
                "about": entry["about"],
                "state": msgspec.to_builtins(state),
            }
        )
    return presets


def _families() -> list[dict[str, Any]]:
    """Return how far predictions of measured steps were off, by backend."""
    found = validation.scores(validation.validate(validation.shipped_rows()))
    families = []
    for backend, label in _FAMILIES.items():
        score = found[backend]
        families.append(
            {
                "backend": backend,
                "label": label,
                "rows": score.rows,
                "median": score.median_error,
                "p90": score.p90_error,
                "inside": score.inside,
            }
        )
    return families
