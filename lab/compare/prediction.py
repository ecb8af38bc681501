"""Predict a comparison before its first run, from measurements of this machine or its nodes.

``predict_comparison`` measures and predicts; ``predict_plan`` uses an earlier calibration, since a
plan's runs are on other machines. forecast.py has the arithmetic of both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from common.emulation.compute_profile import load_profile
from common.errors import GroupError, UserError, count
from common.sync.message_cost import GradientSize
from common.utils.environment import environment
from common.utils.grouping import grouped
from common.utils.progress import duration
from common.utils.typed_json import read_json
from lab.calibrate.calibration import calibrate, default_ranks, save_calibration
from lab.compare.cells import cell_suffix, profile_file
from lab.compare.executors import Executors
from lab.compare.forecast import Link, emulated_compute_at, forecast_on_links, kinds_of
from lab.compare.outcomes import MACHINE_FACTS
from lab.compare.settings import Settings
from lab.predict.calibration_file import (
    QUIET_SHARE,
    Calibration,
    calibration_path,
    describe,
    load_calibration,
)
from lab.predict.compute_model import StepCompute
from lab.predict.event_model import Network
from lab.predict.measured_links import MeasuredLinks, network_from
from lab.predict.tables import compute_of
from lab.units import parse_rate

_LIMIT_SECONDS = 300.0
_NEW_ENOUGH = timedelta(days=1)

console = Console(highlight=False)


def predict_comparison(
    results: dict[str, Any], settings: Settings, folder: Path, executors: Executors
) -> None:
    """Measure, or use today's calibration, and set the ``prediction`` of ``results``.

    A machine's speed varies from day to day, so an older calibration is not used, nor a quick or a
    disturbed one (``reason_to_calibrate``). Messages of emulated nodes are always measured now.

    Raises GroupError if the messages of emulated nodes cannot be measured.
    """
    calibration = None if settings.emulated else _calibrate(results, settings, folder)
    if calibration is not None and not settings.rates:
        results["prediction"] = _predict_over_loopback(results, settings, folder, calibration)
        return
    compute_at, gradients, source = _compute(settings, folder, calibration, own_machines=False)
    strategies = grouped(
        ((cell["nodes"], cell["rate"]), cell["sync"])
        for cell in results["cells"]
        if cell["nodes"] > 1
    )
    console.print(
        f"measuring messages between the nodes for the predictions: "
        f"{count(len(strategies), 'measurement')}, up to a minute each (--no-predict leaves them "
        "out)",
        soft_wrap=True,
    )
    networks: dict[Link, Network] = {}
    for (nodes, rate), names in strategies.items():
        kinds = kinds_of(names, settings.strategy_options, gradients, nodes)
        network = _measure_network(nodes, rate, kinds, folder, executors)
        if calibration is not None:  # messages slow down a backward pass that computes
            network = replace(network, overlap_cost=calibration.network.overlap_cost)
        networks[nodes, rate] = network
    results["prediction"] = forecast_on_links(
        results, networks, compute_at, gradients, settings.strategy_options, source=source
    )


def predict_plan(
    results: Mapping[str, Any], settings: Settings, folder: Path, calibration: Calibration
) -> dict[str, Any]:
    """Return the prediction for runs in which each node is a separate machine.

    Cells of several nodes are out of scope if messages were measured over loopback, all cells if
    the calibration timed another model.
    """
    compute_at, gradients, _ = _compute(settings, folder, calibration, own_machines=True)
    caveats = {} if settings.emulated else _other_model(settings, calibration)
    several = [nodes for nodes in settings.nodes if nodes > 1]
    if calibration.over_loopback:
        caveats |= dict.fromkeys(several, "calibrated over loopback, no network")
    prediction = forecast_on_links(
        results,
        {(nodes, None): calibration.network for nodes in several},
        compute_at,
        gradients,
        settings.strategy_options,
        source=f"calibrated on {calibration.name}, {calibration.made}",
        caveats=caveats,
    )
    prediction["calibration"]["cpu"] = str(calibration.machine.get("cpu"))
    return prediction


def _predict_over_loopback(
    results: Mapping[str, Any], settings: Settings, folder: Path, calibration: Calibration
) -> dict[str, Any]:
    """Return the prediction for ranks that share this machine.

    In scope are the cells that the model predicts to within 20 %: exact strategies with no more
    ranks than cores.
    """
    compute_at, gradients, source = _compute(settings, folder, calibration, own_machines=False)
    prediction = forecast_on_links(
        results,
        {(nodes, None): calibration.network for nodes in settings.nodes},
        compute_at,
        gradients,
        settings.strategy_options,
        source=source,
        caveats=_other_model(settings, calibration),
    )
    ring = calibration.network.rate("all_reduce")
    prediction["calibration"] = {
        "name": calibration.name,
        "made": calibration.made,
        "quick": calibration.quick,
        "model": calibration.model,
        "alpha": ring.alpha_seconds,
        "beta": ring.beta_seconds_per_byte,
        "gamma": calibration.network.gamma_seconds_per_byte,
    }
    return prediction


def _other_model(settings: Settings, calibration: Calibration) -> dict[int, str]:
    """Return why each number of nodes is out of scope if the calibration timed another model."""
    same = calibration.model == settings.model
    return dict.fromkeys(settings.nodes, "" if same else f"calibrated with {calibration.model}")


def _compute(
    settings: Settings, folder: Path, calibration: Calibration | None, *, own_machines: bool
) -> tuple[Callable[[int], StepCompute], Sequence[GradientSize], str]:
    """Return a rank's step by number of nodes, the gradients' sizes, and the source of the times.

    calibration : None only if compute is emulated, by the profile in ``folder``.
    """
    if calibration is None or settings.emulated:
        profile = load_profile(str(profile_file(folder)), model=settings.model)
        source = f"EMULATED by profile {profile.name} of {profile.machine}, {profile.made}"
        return *emulated_compute_at(
            profile, batch_size=settings.batch_size, scaling=settings.scaling
        ), source
    compute_at = partial(
        compute_of,
        calibration,
        batch_size=settings.batch_size,
        scaling=settings.scaling,
        own_machines=own_machines,
    )
    source = f"calibrated on {calibration.name}, {calibration.made}"
    return compute_at, calibration.gradient_sizes, source


def _calibrate(results: dict[str, Any], settings: Settings, folder: Path) -> Calibration:
    """Return today's calibration of this machine or a new one, print it, and keep a copy."""
    earlier, reason = _todays_calibration(settings.model)
    if earlier is not None:
        console.print(
            f"predictions use {calibration_path()}, measured {_age(earlier)} ago (`lab calibrate` "
            "measures again, --no-predict leaves the predictions out)",
            soft_wrap=True,
        )
        calibration = save_calibration(earlier, folder / "calibration.json")
    else:
        console.print(
            f"calibrating this machine first, for the predictions ({reason}; --no-predict leaves "
            "them out)",
            soft_wrap=True,
        )
        calibration = calibrate(model=settings.model, path=folder / "calibration.json")
    for line in describe(calibration):
        console.print(line, markup=False, soft_wrap=True)
        if line.startswith("warning: "):
            results["warnings"].append(f"calibration: {line.removeprefix('warning: ')}")
    return calibration


def _todays_calibration(model: str) -> tuple[Calibration | None, str]:
    """Return the user's calibration if it fits, else None and why a new one is needed."""
    path = calibration_path()
    if not path.exists():
        return None, "`lab calibrate` has not measured it yet"
    try:
        calibration = load_calibration(path)
    except UserError:
        return None, f"{path} cannot be used"
    reason = reason_to_calibrate(calibration, model=model, here=environment(), now=datetime.now())
    return (None, f"{path} {reason}") if reason else (calibration, "")


def reason_to_calibrate(
    calibration: Calibration, *, model: str, here: Mapping[str, Any], now: datetime
) -> str:
    """Return why ``calibration`` does not describe this machine today; "" if it does.

    here : what ``common.utils.environment.environment`` returns.
    """
    age = now - datetime.fromisoformat(calibration.made)
    there = calibration.machine
    other = [name for name in MACHINE_FACTS if there.get(name) != here.get(name)]
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
    return next((reason for reason, holds in reasons.items() if holds), "")


def _age(calibration: Calibration) -> str:
    return duration((datetime.now() - datetime.fromisoformat(calibration.made)).total_seconds())


def _measure_network(
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
    return network_from(read_json(output, MeasuredLinks), rate_bits=parse_rate(rate))
