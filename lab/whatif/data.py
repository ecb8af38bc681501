"""What the page of ``lab whatif`` computes with, as JSON: ``page_data``.

engine.js has the formulas of ``lab predict``. Their constants, the priors with their draws, the
models, the strategies with their plans and the calibration come from here, so that none of them is
written twice.
"""

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from common.config.schema import DEFAULT_GLOBAL_BATCH_SIZE
from common.errors import UserError
from common.sync import STRATEGIES, build_message_plan_from
from common.sync.plans.as_data import plan_data
from lab.predict import (
    calibrated_draws,
    calibration_file,
    cli,
    cluster,
    common_models,
    compute_model,
    event_model,
    own_model,
    printing,
    priors,
    scaling,
    scenario,
    tables,
)
from lab.predict.calibration_file import Calibration
from lab.predict.sentences import templates
from lab.strategy_style import color, marker_outline

FORMAT = 1
MOST_NODES = 4096  # that a reader can give
_LARGEST = sys.float_info.max  # JSON has no infinity
# How far predictions of published steps were off; benchmarks/predictions.py --write makes it.
FAMILIES = Path(__file__).with_name("families.json")


class State(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a reader of the page sets: the flags of ``lab predict``, and what is drawn.

    Parameters
    ----------
    model, parameters : a name, or "own" with a number of parameters.
    costs : "typical" of backend and transport, or "calibrated".
    transport : with its generation of nodes, as ``cluster.GENERATIONS`` has it.
    adapters, software_gbit, inside_gbit, latency_us, bucket_mb : None: the typical value, or the
        strategy's own.
    step_ms, batch : a step of ``batch`` samples of one rank; None: the calibration's own step.
    batch_size, scaling : samples of all ranks together ("strong"), or of each rank ("weak").
    strategies : those that are drawn. focus : the one of the timeline and of the sentence.
    least_efficiency, most_step_ms : the reader's targets, in percent and milliseconds; None: none.
    measured : id of a set of measured points.
    """

    model: str
    parameters: int = 25_000_000
    gradient_type: str = "fp32"
    costs: str = "typical"
    backend: str = "nccl"
    transport: str = "tcp-vm"
    adapters: int | None = None
    software_gbit: float | None = None
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
    least_efficiency: float | None = None
    most_step_ms: float | None = None
    measured: str | None = None


@dataclass(frozen=True)
class MeasuredPoint:
    """The measured step of a strategy on a number of nodes; ``note`` as published."""

    strategy: str
    nodes: int
    seconds: float
    note: str


@dataclass(frozen=True, kw_only=True)
class MeasuredSet:
    """Steps that differ in strategy and number of nodes alone.

    about : sentences. family : "gloo" or "nccl"; "" if both are possible. is_published : by others.
    state : of the page; names that it lacks stay as the reader has them.
    """

    id: str
    title: str
    about: str
    family: str
    is_published: bool
    state: State | Mapping[str, Any]
    points: Sequence[MeasuredPoint]


class Preset(Struct):
    """A cluster to begin with."""

    id: str
    title: str
    about: str
    state: State


def page_data(
    calibration: Calibration,
    *,
    is_reference: bool = False,
    measured: Sequence[MeasuredSet] = (),
    questions: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return the page's data, ready for JSON.

    is_reference : the calibration is the one that comes with the project. measured : of measured.py
    and own_steps.py. questions : of questions.py.
    """
    strategies, left_out = _strategies()
    names = dict.fromkeys([calibration.model, *own_model.model_names()])
    data = {
        "format": FORMAT,
        "constants": _constants(),
        "draws": _draws(),
        "priors": _priors(),
        "transports": cluster.TRANSPORT_NAMES,
        "generations": cluster.GENERATIONS,
        "later_from": {" ".join(key): bits for key, bits in cluster.LATER_FROM_BITS.items()},
        "strategies": strategies,
        "left_out": left_out,
        "models": [_model(calibration, name) for name in names],
        "calibration": _calibration(calibration, is_reference=is_reference),
        "presets": _presets(calibration),
        "sentences": templates(),
        "families": json.loads(FAMILIES.read_bytes()),
        "fields": _rows("fields"),
        "examples": _rows("examples"),
        **_rows("limits"),
        "measured": measured,
        "questions": questions,
    }
    content: dict[str, Any] = msgspec.to_builtins(data)
    return content


def _constants() -> dict[str, Any]:
    """Return what stands as a number in the formulas of ``lab predict``.

    Each is looked up in its module now, so that the page has the value that Python computes with.
    """
    latencies = []
    for most_bits, seconds in cluster.LATENCIES:
        latencies.append({"most_bits": min(most_bits, _LARGEST), "seconds": seconds})
    return {
        "headers": event_model.HEADERS,
        "packet_bytes": event_model.PACKET_BYTES,
        "largest_nodes": event_model.LARGEST_NODES,
        "nodes_tried": scaling.numbers_of_nodes(MOST_NODES),
        "few_samples": scaling.FEWEST_SAMPLES_TRIED,
        "near_zero": event_model.NEAR_ZERO,
        "sampled_ranks": event_model.SAMPLED_RANKS,
        "high_z": priors.HIGH_Z,
        "latencies": latencies,
        "rdma_latency": cluster.RDMA_LATENCY,
        "bits_of_adapter": cluster.BITS_OF_ADAPTER,
        "typical_inside_bits": scenario.TYPICAL_INSIDE_BITS,
        "remainder": calibrated_draws.REMAINDER,
        "large_step": calibration_file.LARGE_STEP,
        "tensors": common_models.TENSORS,
        "update_bytes": compute_model.OPTIMIZERS["momentum"],
        "most_update": compute_model.MOST_UPDATE,
        "gradient_bytes": cli.GRADIENT_BYTES,
        "interval": tables.INTERVAL,
        "purchases": tables.PURCHASES,
        "decided": printing.DECIDED,
        "little": printing.LITTLE,
    }


def _rows(name: str) -> dict[str, Any]:
    """Return the tables of a TOML file of this package."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


def _priors() -> list[dict[str, Any]]:
    """Return the priors in the file's order, each with the largest value that makes sense."""
    found = []
    for prior in priors.load_priors():
        found.append(asdict(prior) | {"most": min(prior.most, _LARGEST)})
    return found


def _draws() -> dict[str, Any]:
    """Return the normal values in rising order, and for each prior their places in its draws.

    The draws of calibrated costs are the first rows of these (``normal_draws``).
    """
    rows = priors.normal_draws(len(priors.load_priors()))
    places = rows.argsort().argsort()
    return {"values": np.sort(rows[0]).tolist(), "orders": places.tolist()}


def drawn_names() -> list[str]:
    """Return the strategies that the page can compute."""
    found, _ = _strategies()
    return [strategy["name"] for strategy in found]


def _strategies() -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return the strategies whose plan is data (``plan_data``), and why others are left out.

    marker : an SVG path around (0, 0).
    """
    found = []
    left_out = []
    for name, strategy in STRATEGIES.items():
        try:
            plan = plan_data(build_message_plan_from(name, {}))
        except UserError as error:
            left_out.append({"name": name, "why": str(error)})
            continue
        shown = {
            "name": name,
            "label": strategy.label,
            "color": color(name),
            "marker": marker_outline(name),
            "per_tensor": name == "all_reduce",  # which the bare name does not say
            "plan": plan,
        }
        found.append(shown)
    return found, left_out


def _model(calibration: Calibration, name: str) -> dict[str, Any]:
    """Return a model's gradients, and after which share of backward they are ready.

    gradients : equal ones in a row as (how many, shape, bytes of an entry). ready_bytes,
    ready_shares : of ``ComputeModel``; None where they follow from the gradients: the bytes in the
    reverse order of the parameters, each made as fast as another. least_samples : of a rank's step.
    """
    if name != calibration.model:
        calibration = own_model.with_own_model(
            calibration, model=name, parameters=None, step_seconds=1.0, batch=1
        )
    gradients = []
    for gradient, alike in groupby(calibration.gradients):
        gradients.append((len(list(alike)), gradient.shape, gradient.itemsize))
    sizes = [gradient.nbytes for gradient in calibration.gradients]
    in_turn = tuple(accumulate(reversed(sizes)))
    evenly = tuple(nbytes / max(1, in_turn[-1]) for nbytes in in_turn)
    compute = calibration.compute
    return {
        "name": name,
        "gradients": gradients,
        "ready_bytes": None if compute.ready_bytes == in_turn else compute.ready_bytes,
        "ready_shares": None if compute.ready_shares == evenly else compute.ready_shares,
        "least_samples": _least_samples(calibration),
        "update_bytes": compute_model.OPTIMIZERS[own_model.usual_optimizer(name)],
    }


def _least_samples(calibration: Calibration) -> int:
    step = scenario.Scenario(
        calibration=calibration, batch_size=DEFAULT_GLOBAL_BATCH_SIZE, scaling="weak"
    )
    return step.least_samples


def _calibration(calibration: Calibration, *, is_reference: bool) -> dict[str, Any]:
    """Return where the numbers come from, and the network and the profiles as in the file."""
    return {
        "name": calibration.name,
        "made": calibration.made,
        "model": calibration.model,
        "cores": calibration.cores,
        "is_reference": is_reference,
        "ranks": calibration.ranks,
        "ranks_here": calibration.ranks_here,
        "network": asdict(calibration.network),  # with the defaults that the file leaves out
        "spreads": calibrated_draws.spreads(calibration),
        "profiles": calibration.compute.profiles,
    }


def _presets(calibration: Calibration) -> list[Preset]:
    """Return the clusters of presets.toml; one without a model has that of the calibration."""
    presets = []
    for name, entry in _rows("presets").items():
        entry["state"] = {"model": calibration.model} | entry["state"]
        presets.append(msgspec.convert({"id": name} | entry, Preset))
    return presets
