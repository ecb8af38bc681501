"""Apply the event model to the cells of a comparison: ``forecast_on_links``.

``kinds_of`` returns the kinds of messages that must be measured first, ``emulated_compute`` the
time of a step with emulated compute.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any

from common.emulation.compute_profile import Profile
from common.emulation.emulated_model import check_parameters
from common.models import build_model
from common.sync.message_cost import GradientSize
from common.sync.message_plans import MessagePlan
from lab.predict.bucket_choice import with_best_buckets
from lab.predict.compute_model import StepCompute, local_samples
from lab.predict.event_model import Network, Prediction, predict_step
from lab.predict.tables import message_plans
from lab.units import split_variant

_CLASSES = 10  # of the last layer, a thousandth of the gradients

Link = tuple[int, str | None]
"""Number of nodes, rate of their links as it was given."""


def forecast_on_links(
    results: Mapping[str, Any],
    networks: Mapping[Link, Network],
    compute_at: Callable[[int], StepCompute],
    gradients: Sequence[GradientSize],
    options: Mapping[str, Any],
    *,
    source: str,
    caveats: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Return the ``prediction`` of ``results`` by the event model.

    Parameters
    ----------
    networks : by nodes and rate of the cells.
    compute_at : returns a rank's step among that number of nodes.
    options : of the strategies.
    source : where the times of ``compute_at`` come from, for the reader.
    caveats : by number of nodes, why a prediction is out of scope; "" if it is not.
    """
    plans, cells = message_plans([cell["sync"] for cell in results["cells"]], options), {}
    for cell in results["cells"]:
        plan, nodes = plans[cell["sync"]], cell["nodes"]
        network = networks.get((nodes, cell["rate"]), Network(0.0, 0.0))  # one node sends nothing
        with contextlib.suppress(NotImplementedError):  # the plan does not say what it sends
            on_links: dict[str, Any] = {"network": network, "compute": compute_at(nodes)}
            plan = with_best_buckets(plan, gradients, nodes, **on_links)
            prediction = predict_step(plan, gradients, nodes, **on_links)
            cells[cell["id"]] = _entry(
                cell, prediction, plan, gradients, why=(caveats or {}).get(nodes, "")
            )
    rates = {
        f"{nodes} nodes{'' if rate is None else f', {rate}'}": network.rate("all_reduce")
        for (nodes, rate), network in networks.items()
    }
    return {
        "made": datetime.now().isoformat(timespec="seconds"),
        "cells": cells,
        "calibration": {
            "compute": source,
            "least time of an all_reduce": {
                link: f"{rate.floor_seconds * 1e3:.2g} ms" for link, rate in rates.items()
            },
        },
    }


def _entry(
    cell: Mapping[str, Any],
    prediction: Prediction,
    plan: MessagePlan,
    gradients: Sequence[GradientSize],
    *,
    why: str,
) -> dict[str, Any]:
    if not cell["exact"]:
        why = "lossy or periodic"
    elif cell["oversubscribed"]:
        why = "more ranks than cores"
    return {
        "step_seconds": prediction.step_seconds,
        "compute_seconds": prediction.compute_seconds,
        "sync_seconds": prediction.sync_seconds,
        "bound": prediction.bound,
        "in_scope": not why,
        "why": why,
        "bucket_mb": getattr(plan, "bucket_mb", None),
        "bytes_sent": [
            float(plan.bytes_sent(gradients, rank, cell["nodes"])) / plan.period
            for rank in range(cell["nodes"])
        ],
    }


def kinds_of(
    strategies: Sequence[str],
    options: Mapping[str, Any],
    gradients: Sequence[GradientSize],
    nodes: int,
) -> list[str]:
    """Return the kinds of operations of these strategies, for lab/calibrate/link_probe.py."""
    kinds: dict[str, None] = {}
    names = {split_variant(name)[0] for name in strategies}
    whatever_size = {name: value for name, value in options.items() if name != "bucket_mb"}
    for plan in message_plans(sorted(names), whatever_size).values():
        with contextlib.suppress(NotImplementedError):
            kinds |= dict.fromkeys(
                operation.kind for operation in plan.operations(gradients, nodes)
            )
    return list(kinds)


def emulated_compute(
    profile: Profile, samples: float, names: Sequence[str], gradients: Sequence[GradientSize]
) -> StepCompute:
    """Return the step of a rank whose compute is emulated.

    names, gradients : of the parameters that train, in their order.
    """
    layers, backwards = profile.layers, profile.layers[::-1]
    forward = [layer.forward.at(samples) for layer in layers]
    ready = accumulate(layer.backward.at(samples) for layer in backwards)
    return StepCompute.of_layers(
        math.fsum(forward),
        {
            name: end
            for layer, end in zip(backwards, ready, strict=True)
            for name in layer.parameters
        },
        profile.update_seconds,
        dict(zip(names, gradients, strict=True)),
        needed={
            name: begin
            for layer, begin in zip(layers, accumulate(forward, initial=0.0), strict=False)
            for name in layer.parameters
        },
    )


def emulated_compute_at(
    profile: Profile, *, batch_size: int, scaling: str
) -> tuple[Callable[[int], StepCompute], list[GradientSize]]:
    """Return a node's emulated step by the number of nodes, and the gradients' sizes.

    Raises UserError if the profile names other parameters than the model.
    """
    trained = {
        name: parameter
        for name, parameter in build_model(profile.model, _CLASSES).named_parameters()
        if parameter.requires_grad
    }
    check_parameters(profile, trained)
    gradients = GradientSize.of(trained.values())

    def compute_at(nodes: int) -> StepCompute:
        samples = local_samples(batch_size, nodes, scaling=scaling)
        return emulated_compute(profile, samples, list(trained), gradients)

    return compute_at, gradients
