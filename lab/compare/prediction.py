"""Predict a comparison before its first run, from measurements of this machine or its nodes.

``predict`` finds out how long nodes compute and how fast their links are, and ``forecast`` applies
the event model to each cell.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from common.emulation.compute_profile import Profile, load_profile
from common.emulation.emulated_model import check_parameters
from common.errors import GroupError, UserError, count
from common.models import build_model
from common.sync.message_cost import GradientSize
from common.utils.environment import environment
from common.utils.progress import console, duration
from common.utils.typed_json import read_json
from lab.calibrate.calibration import calibrate, default_ranks
from lab.compare.cells import PROFILE, cell_suffix
from lab.compare.executors import Executors
from lab.compare.outcomes import MACHINE_FACTS
from lab.compare.settings import Settings
from lab.flags import first_that_holds
from lab.predict.bucket_choice import with_best_buckets
from lab.predict.calibration_file import (
    QUIET_SHARE,
    Calibration,
    calibration_path,
    describe,
    load_calibration,
)
from lab.predict.compute_model import StepCompute, local_samples
from lab.predict.event_model import Network, predict_step
from lab.predict.measured_links import MeasuredLinks, network_from
from lab.predict.tables import compute_of, message_plans
from lab.units import parse_rate, split_variant

_LIMIT_SECONDS = 300.0
_NEW_ENOUGH = timedelta(days=1)
_CLASSES = 10  # of the last layer, a thousandth of the gradients

# Number of nodes, rate of their links as it was given.
Link = tuple[int, str | None]


def predict(
    results: dict[str, Any], settings: Settings, folder: Path, executors: Executors | None
) -> None:
    """Set the ``prediction`` of ``results``; raises GroupError if it cannot be measured.

    executors : start what is measured now, unless there is a calibration of today: a machine's
    speed varies from day to day. Messages of emulated nodes are always measured. None: the runs
    will be on other machines, so an earlier calibration serves, whose ranks were there.
    """
    if executors is not None:
        calibration = None if settings.emulated else _calibrate(results, settings, folder)
    else:
        calibration = load_calibration(calibration_path())
    compute_at, gradients, source = compute_on_nodes(
        settings, folder, calibration, own_machines=executors is None
    )
    cells = results["cells"]
    links = dict.fromkeys((cell["nodes"], cell["rate"]) for cell in cells if cell["nodes"] > 1)
    if executors is None or not (settings.emulated or any(settings.rates)):
        assert calibration is not None
        networks = dict.fromkeys(links, calibration.network)
        ring = calibration.network.rate("all_reduce")
        facts = {
            "name": calibration.name,
            "made": calibration.made,
            "cpu": str(calibration.machine.get("cpu")),
            "quick": calibration.quick,
            "model": calibration.model,
            "alpha": ring.alpha_seconds,
            "beta": ring.beta_seconds_per_byte,
            "gamma": calibration.network.gamma_seconds_per_byte,
        }
    else:
        console.print(
            f"measuring messages between the nodes for the predictions: "
            f"{count(len(links), 'measurement')}, up to a minute each (--no-predict leaves them "
            "out)"
        )
        # Messages slow down a backward pass that computes, not one that sleeps.
        overlap_cost = 0.0 if calibration is None else calibration.network.overlap_cost
        networks = {
            (nodes, rate): replace(
                _measure_network(nodes, rate, settings, gradients, folder, executors),
                overlap_cost=overlap_cost,
            )
            for nodes, rate in links
        }
        facts = {
            "least time of an all_reduce": {
                f"{nodes} nodes{'' if rate is None else f', {rate}'}": (
                    f"{network.rate('all_reduce').floor_seconds * 1e3:.2g} ms"
                )
                for (nodes, rate), network in networks.items()
            }
        }
    measured = None if settings.emulated or calibration is None else calibration.model
    results["prediction"] = {
        "made": datetime.now().isoformat(timespec="seconds"),
        "cells": forecast(
            cells,
            networks,
            compute_at,
            gradients,
            settings.strategy_options,
            other_model=measured if measured != settings.model else None,
            no_network=executors is None and calibration is not None and calibration.over_loopback,
        ),
        "calibration": {"compute": source, **facts},
    }


def forecast(
    cells: Sequence[Mapping[str, Any]],
    networks: Mapping[Link, Network],
    compute_at: Callable[[int], StepCompute],
    gradients: Sequence[GradientSize],
    options: Mapping[str, Any],
    *,
    other_model: str | None = None,
    no_network: bool = False,
) -> dict[str, Any]:
    """Return what the event model predicts for each cell, by its id.

    In scope are the cells that the model predicts to within 20 %: exact strategies with no more
    ranks than cores, on a network and with a model that were measured.

    Parameters
    ----------
    networks : by nodes and rate of the cells.
    compute_at : returns a rank's step among that number of nodes.
    options : of the strategies.
    other_model : the model whose compute was measured, unless it is the right one.
    no_network : messages were measured over loopback, but the nodes are machines.
    """
    plans, found = message_plans([cell["sync"] for cell in cells], options), {}
    for cell in cells:
        nodes = cell["nodes"]
        why = first_that_holds(
            {
                "lossy or periodic": not cell["exact"],
                "more ranks than cores": cell["oversubscribed"],
                "calibrated over loopback, no network": no_network and nodes > 1,
                f"calibrated with {other_model}": other_model is not None,
            }
        )
        network = networks.get((nodes, cell["rate"]), Network(0.0, 0.0))  # one node sends nothing
        on_links: dict[str, Any] = {"network": network, "compute": compute_at(nodes)}
        plan = with_best_buckets(plans[cell["sync"]], gradients, nodes, **on_links)
        step = predict_step(plan, gradients, nodes, **on_links)
        found[cell["id"]] = {
            "step_seconds": step.step_seconds,
            "compute_seconds": step.compute_seconds,
            "sync_seconds": step.sync_seconds,
            "in_scope": not why,
            "why": why,
            "bucket_mb": getattr(plan, "bucket_mb", None),
            "bytes_sent": [
                float(plan.bytes_sent(gradients, rank, nodes)) / plan.period
                for rank in range(nodes)
            ],
        }
    return found


def compute_on_nodes(
    settings: Settings, folder: Path, calibration: Calibration | None, *, own_machines: bool
) -> tuple[Callable[[int], StepCompute], Sequence[GradientSize], str]:
    """Return a rank's step by number of nodes, the gradients' sizes, and the source of the times.

    calibration : None only if compute is emulated, by the profile in ``folder``. Raises UserError
    if the profile names other parameters than the model.
    """
    asked: dict[str, Any] = {"batch_size": settings.batch_size, "scaling": settings.scaling}
    if calibration is not None and not settings.emulated:
        return (
            partial(compute_of, calibration, own_machines=own_machines, **asked),
            calibration.gradient_sizes,
            f"calibrated on {calibration.name}, {calibration.made}",
        )
    profile = load_profile(str(folder / PROFILE), model=settings.model)
    named = build_model(profile.model, _CLASSES).named_parameters()
    trained = {name: parameter for name, parameter in named if parameter.requires_grad}
    check_parameters(profile, trained)
    sizes = dict(zip(trained, GradientSize.of(trained.values()), strict=True))
    return (
        lambda nodes: emulated_compute(profile, local_samples(nodes=nodes, **asked), sizes),
        list(sizes.values()),
        f"EMULATED by profile {profile.name} of {profile.machine}, {profile.made}",
    )


def emulated_compute(
    profile: Profile, samples: float, gradients: Mapping[str, GradientSize]
) -> StepCompute:
    """Return the step of a rank whose compute is emulated.

    gradients : of the parameters that train, by their names and in their order.
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
        gradients,
        needed={
            name: begin
            for layer, begin in zip(layers, accumulate(forward, initial=0.0), strict=False)
            for name in layer.parameters
        },
    )


def kinds_of(
    strategies: Sequence[str],
    options: Mapping[str, Any],
    gradients: Sequence[GradientSize],
    nodes: int,
) -> list[str]:
    """Return the kinds of operations of these strategies, for lab/calibrate/link_probe.py."""
    names = [split_variant(name)[0] for name in strategies]
    plans = message_plans(names, {**options, "bucket_mb": None}).values()
    return sorted({one.kind for plan in plans for one in plan.operations(gradients, nodes)})


def _measure_network(
    nodes: int,
    rate: str | None,
    settings: Settings,
    gradients: Sequence[GradientSize],
    folder: Path,
    executors: Executors,
) -> Network:
    """Measure the network of ``nodes`` nodes now (lab/calibrate/link_probe.py)."""
    name = f"links-{cell_suffix(nodes, rate)}"
    output = folder / f"{name}.json"
    kinds = kinds_of(settings.sync, settings.strategy_options, gradients, nodes)
    message = executors.run(
        [
            *("-m", "lab.calibrate.link_probe", "--output", str(output)),
            *([] if rate is None else ["--shaped"]),
            *("--kinds", *kinds),
        ],
        nodes,
        rate=rate,
        logs=folder / "logs" / name,
        limit_seconds=_LIMIT_SECONDS,
    )
    if message is not None:
        raise GroupError(f"the messages of {nodes} nodes could not be measured: {message}")
    return network_from(read_json(output, MeasuredLinks), rate_bits=parse_rate(rate))


def _calibrate(results: dict[str, Any], settings: Settings, folder: Path) -> Calibration:
    """Return today's calibration of this machine or a new one, print it, and keep a copy."""
    path, copy, now = calibration_path(), folder / "calibration.json", datetime.now()
    try:
        calibration = load_calibration(path)
        why = reason_to_calibrate(calibration, model=settings.model, here=environment(), now=now)
    except UserError:
        why = "cannot be used"
    if why:
        reason = f"{path} {why}" if path.exists() else "`lab calibrate` has not measured it yet"
        console.print(
            f"calibrating this machine first, for the predictions ({reason}; --no-predict leaves "
            "them out)"
        )
        calibration = calibrate(model=settings.model)
    else:
        age = duration((now - datetime.fromisoformat(calibration.made)).total_seconds())
        console.print(
            f"predictions use {path}, measured {age} ago (`lab calibrate` measures again, "
            "--no-predict leaves the predictions out)"
        )
    calibration.save(copy)
    lines = describe(calibration)
    console.print("\n".join(lines), markup=False)
    results["warnings"] += [
        line.replace("warning: ", "calibration: ") for line in lines if line.startswith("warning: ")
    ]
    return calibration


def reason_to_calibrate(
    calibration: Calibration, *, model: str, here: Mapping[str, Any], now: datetime
) -> str:
    """Return why ``calibration`` does not describe this machine today; "" if it does.

    here : what ``common.utils.environment.environment`` returns.
    """
    age = now - datetime.fromisoformat(calibration.made)
    other = [name for name in MACHINE_FACTS if calibration.machine.get(name) != here.get(name)]
    reasons = {
        "is quick, so its intervals are wide": calibration.quick,
        "was measured on several nodes": not calibration.over_loopback,
        f"was measured with {count(calibration.ranks, 'rank')}": (
            calibration.ranks != default_ranks()
        ),
        f"timed {calibration.model}, not {model}": calibration.model != model,
        f"was measured with another {', '.join(other)}": bool(other),
        "is older than a day": not timedelta(0) <= age <= _NEW_ENOUGH,
        "was disturbed by other processes": calibration.others_share > QUIET_SHARE,
    }
    return first_that_holds(reasons)
