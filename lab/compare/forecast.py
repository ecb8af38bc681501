"""What a comparison predicts of its own cells, before it measures them.

``forecast`` is for ranks that compute on this machine, over loopback; ``forecast_on_links`` for nodes whose messages were
measured just before (lab/calibrate/link_probe.py), with real or with emulated compute.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from common.cost_model.calibration_file import Calibration
from common.cost_model.compute_model import StepCompute, local_samples
from common.cost_model.event_model import Network, Prediction, predict_step
from common.emulation.compute_profile import Profile, load_profile
from common.errors import GroupError
from common.models import build_model
from common.sync.message_cost import GradientSize
from lab.calibrate.link_probe import network_from
from lab.compare.cells import Settings, cell_suffix, profile_file
from lab.compare.executors import Executors
from lab.compare.results import read_json
from lab.predict.tables import compute_of, message_plans, predict_table
from lab.units import parse_rate

_LIMIT_SECONDS = 300.0
_CLASSES = 10  # of the last layer, a thousandth of the gradients

Link = tuple[int, str | None]
"""Number of nodes, rate of their links as it was given."""


def forecast(
    results: dict[str, Any], calibration: Calibration, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the ``prediction`` of a comparison's ``results``, for nodes that share this machine.

    ``options`` : of the strategies. In scope is what the model claims to within 20 %: exact strategies with no more ranks than
    cores.
    """
    settings, cells = results["settings"], {}
    strategies = message_plans([cell["sync"] for cell in results["cells"]], options)
    for cell in results["cells"]:
        sync, nodes = cell["sync"], cell["nodes"]
        row = predict_table(
            [nodes],
            None,
            None,
            {sync: strategies[sync]},
            settings["batch_size"],
            settings["scaling"],
            calibration,
        )[0]
        if row.prediction is None:
            continue
        why = (
            "" if calibration.model == settings["model"] else f"calibrated with {calibration.model}"
        )
        cells[cell["id"]] = _entry(
            cell, row.prediction, strategies[sync], calibration.gradients, why=why
        )
    ring = calibration.network.rate("all_reduce")
    return {
        "made": _now(),
        "cells": cells,
        "calibration": {
            "name": calibration.name,
            "made": calibration.made,
            "quick": calibration.quick,
            "model": calibration.model,
            "alpha": ring.alpha_seconds,
            "beta": ring.beta_seconds_per_byte,
            "gamma": calibration.network.gamma_seconds_per_byte,
        },
    }


def forecast_on_links(
    results: Mapping[str, Any],
    networks: Mapping[Link, Network],
    compute_at: Callable[[int], StepCompute],
    gradients: Sequence[GradientSize],
    options: Mapping[str, Any],
    *,
    source: str,
) -> dict[str, Any]:
    """Return the ``prediction`` of ``results`` by the event model, from messages measured on the same nodes.

    networks : by nodes and rate of the cells. compute_at : a rank's step among so many nodes. source : of its times.
    """
    strategies, cells = message_plans([cell["sync"] for cell in results["cells"]], options), {}
    for cell in results["cells"]:
        plan, nodes = strategies[cell["sync"]], cell["nodes"]
        network = networks.get((nodes, cell["rate"]), Network(0.0, 0.0))  # one node sends nothing
        try:
            prediction = predict_step(
                plan, gradients, nodes, network=network, compute=compute_at(nodes)
            )
        except NotImplementedError:
            continue
        cells[cell["id"]] = _entry(cell, prediction, plan, gradients, why="")
    floors = {
        f"{nodes} nodes{'' if rate is None else f', {rate}'}": f"{network.rate('all_reduce').floor_seconds * 1e3:.2g} ms"
        for (nodes, rate), network in networks.items()
    }
    return {
        "made": _now(),
        "cells": cells,
        "calibration": {"compute": source, "least time of an all_reduce": floors},
    }


def _now() -> str:
    return datetime.now().isoformat(timespec="seconds")


def _entry(
    cell: Mapping[str, Any],
    prediction: Prediction,
    plan: Any,
    gradients: Sequence[int],
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
        "bytes_sent": [
            float(plan.bytes_sent(gradients, rank, cell["nodes"])) / plan.period
            for rank in range(cell["nodes"])
        ],
    }


def forecast_on_nodes(
    results: Mapping[str, Any],
    settings: Settings,
    folder: Path,
    executors: Executors,
    options: Mapping[str, Any],
    calibration: Calibration | None,
) -> dict[str, Any]:
    """Measure the messages of each of the comparison's numbers of nodes and rates there, and predict.

    calibration : of the machine that computes; None where compute is emulated by the profile in ``folder``. Raises GroupError
    where the nodes could not be measured.
    """
    gradients: Sequence[GradientSize]
    if calibration is None:
        profile = load_profile(str(profile_file(folder)), model=settings.model)
        compute_at, gradients = emulated_compute_at(
            profile, batch_size=settings.batch_size, scaling=settings.scaling
        )
        source = f"EMULATED by profile {profile.name} of {profile.machine}, {profile.made}"
    else:
        gradients = calibration.gradients
        source = f"calibrated on {calibration.name}, {calibration.made}"

        def compute_at(nodes: int) -> StepCompute:
            return compute_of(
                calibration,
                nodes,
                batch_size=settings.batch_size,
                scaling=settings.scaling,
                own_machines=False,
            )

    cells = [cell for cell in results["cells"] if cell["nodes"] > 1]
    networks: dict[Link, Network] = {}
    for nodes, rate in dict.fromkeys((cell["nodes"], cell["rate"]) for cell in cells):
        strategies = [
            cell["sync"] for cell in cells if (cell["nodes"], cell["rate"]) == (nodes, rate)
        ]
        kinds = kinds_of(strategies, options, gradients, nodes)
        network = _measured(nodes, rate, kinds, folder, executors)
        if calibration is not None:  # messages slow down a backward pass that computes
            network = replace(network, overlap_cost=calibration.network.overlap_cost)
        networks[nodes, rate] = network
    return forecast_on_links(results, networks, compute_at, gradients, options, source=source)


def _measured(
    nodes: int, rate: str | None, kinds: Sequence[str], folder: Path, executors: Executors
) -> Network:
    """Measure the network of ``nodes`` nodes now (lab/calibrate/link_probe.py)."""
    name = f"links-{cell_suffix(nodes, rate)}"
    output = folder / f"{name}.json"
    shaped = () if rate is None else ("--shaped",)
    message = executors.run(
        ["-m", "lab.calibrate.link_probe", "--output", str(output), *shaped, "--kinds", *kinds],
        nodes,
        rate=rate,
        logs=folder / "logs" / name,
        limit_seconds=_LIMIT_SECONDS,
    )
    if message is not None:
        raise GroupError(f"the messages of {nodes} nodes could not be measured: {message}")
    return network_from(read_json(output), rate_bits=parse_rate(rate))


def kinds_of(
    strategies: Sequence[str],
    options: Mapping[str, Any],
    gradients: Sequence[GradientSize],
    nodes: int,
) -> list[str]:
    """Return the kinds of operations that these strategies use among ``nodes`` nodes, for lab/calibrate/link_probe.py."""
    kinds: dict[str, None] = {}
    for plan in message_plans(strategies, options).values():
        try:
            kinds |= dict.fromkeys(
                operation.kind for operation in plan.operations(gradients, nodes)
            )
        except NotImplementedError:
            continue
    return list(kinds)


def emulated_compute(
    profile: Profile, samples: float, names: Sequence[str], gradients: Sequence[GradientSize]
) -> StepCompute:
    """Return the step of a rank whose compute is emulated.

    names, gradients : of the parameters that train, in their order.
    """
    ready = profile.ready_seconds(samples)
    backward = max(ready.values())
    in_turn = [ready[name] / backward for name in reversed(names)]
    return StepCompute(
        profile.forward_seconds(samples),
        backward,
        profile.update_seconds,
        tuple(accumulate(reversed(gradients))),
        tuple(accumulate(in_turn, max)),
    )


def emulated_compute_at(
    profile: Profile, *, batch_size: int, scaling: str
) -> tuple[Callable[[int], StepCompute], list[GradientSize]]:
    """Return a node's emulated step by the number of nodes, and the gradients' sizes."""
    trained = {
        name: p
        for name, p in build_model(profile.model, _CLASSES).named_parameters()
        if p.requires_grad
    }
    gradients = GradientSize.of(trained.values())

    def at(nodes: int) -> StepCompute:
        return emulated_compute(
            profile, local_samples(batch_size, nodes, scaling=scaling), list(trained), gradients
        )

    return at, gradients
