"""Predict a comparison before its first run, from measurements of this machine or its nodes.

``predict`` finds out how long nodes compute and how fast their links are, and ``forecast`` applies
the event model to each cell.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, get_args

from common.emulation.compute_profile import Profile, load_profile
from common.emulation.emulated_model import check_parameters
from common.errors import GroupError, UserError
from common.models import build_model
from common.say import count, minutes_text
from common.sync import STRATEGIES
from common.sync.message_cost import Among, GradientSize
from common.sync.node_layout import NodeLayout
from common.sync.plans.base import MessagePlan
from common.sync.plans.batchnorm import SyncBatchNormPlan
from common.sync.plans.links import link_bytes
from common.training_engine.batchnorm import synchronised_layers
from common.utils.environment import environment
from common.utils.paths import REPOSITORY
from common.utils.progress import console
from common.utils.typed_json import Facts, read_json
from lab.calibrate.calibration import calibrate, default_ranks
from lab.compare.cells import PROFILE
from lab.compare.executors import Executors
from lab.compare.outcomes import MACHINE_FACTS
from lab.compare.settings import Settings
from lab.comparison.cell import cell_suffix
from lab.comparison.record import Cell, Comparison, PredictedCell, Prediction
from lab.predict.bucket_choice import with_best_buckets
from lab.predict.calibration_file import (
    QUIET_SHARE,
    Calibration,
    calibration_path,
    describe,
    load_calibration,
)
from lab.predict.cluster import with_compression
from lab.predict.compute_model import StepCompute, local_samples
from lab.predict.event_model import Network, predict_step, with_waits
from lab.predict.measured_links import (
    ProbedLinks,
    SharedLinks,
    network_from,
    shared_links_from,
)
from lab.predict.scenario import compute_of
from lab.predict.tables import message_plans
from lab.predict.variants import split_variant
from lab.units import parse_rate

_NEW_ENOUGH = timedelta(days=1)
_CLASSES = 10  # of the last layer, a thousandth of the gradients

# Number of nodes, rate of their links as it was given.
Link = tuple[int, str | None]


def predict(
    comparison: Comparison, settings: Settings, folder: Path, executors: Executors | None
) -> None:
    """Set the ``prediction`` of a comparison; raises GroupError if it cannot be measured.

    executors : start what is measured now, unless there is a calibration of today: a machine's
    speed varies from day to day. Messages of emulated nodes are always measured. None: the runs
    will be on other machines, so an earlier calibration serves, whose ranks were there.
    """
    calibration = None  # stays None if compute is emulated on this machine
    if executors is None:
        calibration = load_calibration(calibration_path())
    elif not settings.emulated:
        calibration = _calibrate(comparison, settings, folder)
    compute_at, gradients, source = compute_on_nodes(
        settings, folder, calibration, own_machines=executors is None
    )
    links = list(dict.fromkeys(_link(cell) for cell in comparison.cells if cell.nodes > 1))
    grouped: dict[Link, Network] = {}
    # Emulated nodes or links are measured themselves; else the calibration has their network.
    if executors is not None and (settings.emulated or any(settings.rates)):
        networks, grouped = _measure_networks(
            links, settings, gradients, folder, executors, calibration
        )
        facts = _facts_of_networks(networks)
    else:
        assert calibration is not None  # loaded, or made since compute is real
        networks = dict.fromkeys(links, calibration.network)
        facts = _facts_of_calibration(calibration)
    other_model = None
    if calibration is not None and not settings.emulated and calibration.model != settings.model:
        other_model = calibration.model
    no_network = executors is None and calibration is not None and calibration.over_loopback
    predicted = forecast(
        comparison.cells,
        networks,
        compute_at,
        gradients,
        settings.strategy_options,
        batchnorm=_batchnorm_plan(settings.model, synchronised=settings.sync_batchnorm),
        other_model=other_model,
        no_network=no_network,
        grouped=grouped,
    )
    comparison.prediction = Prediction(
        made=datetime.now().isoformat(timespec="seconds"),
        cells=predicted,
        calibration={"compute": source, **facts},
    )


def _link(cell: Cell) -> Link:
    assert cell.rate is None or isinstance(cell.rate, str)  # a comparison's own, as it was asked
    return cell.nodes, cell.rate


def _facts_of_calibration(calibration: Calibration) -> Facts:
    """Return what a report says of a calibration."""
    ring = calibration.network.rate("all_reduce")
    return {
        "name": calibration.name,
        "made": calibration.made,
        "cpu": str(calibration.machine.get("cpu")),
        "quick": calibration.quick,
        "model": calibration.model,
        "alpha": ring.alpha_seconds,
        "beta": ring.beta_seconds_per_byte,
        "gamma": calibration.network.gamma_seconds_per_byte,
    }


def _facts_of_networks(networks: Mapping[Link, Network]) -> Facts:
    """Return what a report says of networks that were measured for this comparison."""
    least = {}
    for (nodes, rate), network in networks.items():
        place = f"{nodes} ranks" if rate is None else f"{nodes} nodes, {rate}"
        least[place] = f"{network.rate('all_reduce').floor_seconds * 1e3:.2g} ms"
    return {"least time of an all_reduce": least}


def forecast(
    cells: Sequence[Cell],
    networks: Mapping[Link, Network],
    compute_at: Callable[[int], StepCompute],
    gradients: Sequence[GradientSize],
    options: Mapping[str, Any],
    *,
    batchnorm: MessagePlan | None = None,
    other_model: str | None = None,
    no_network: bool = False,
    grouped: Mapping[Link, Network] | None = None,
) -> dict[str, PredictedCell]:
    """Return what the event model predicts for each cell, by its id.

    In scope are the cells that the model predicts to within 20 %: exact strategies with no more
    ranks than cores, on a network and with a model that were measured.

    Parameters
    ----------
    networks : by nodes and rate of the cells.
    compute_at : returns a rank's step among that number of ranks.
    options : of the strategies.
    batchnorm : the messages for which layers wait; None: there are none.
    other_model : the model whose compute was measured, unless it is the right one.
    no_network : messages were measured over loopback, but the nodes are machines.
    grouped : like ``networks``, for strategies whose operations are not among all ranks.
    """
    plans = message_plans([cell.sync for cell in cells], options)
    nothing_sent = Network(0.0, 0.0)  # the network of one node
    found = {}
    for cell in cells:
        why = _out_of_scope(cell, other_model=other_model, no_network=no_network)
        network = networks.get(_link(cell), nothing_sent)
        compute = compute_at(cell.ranks)
        if batchnorm is not None:
            compute = with_waits(compute, batchnorm, gradients, cell.ranks, network=network)
        if kinds_of([cell.sync], options, gradients, cell.ranks, among=("node", "leaders")):
            network = (grouped or {}).get(_link(cell), network)
        network = with_compression(network)
        plan = with_best_buckets(
            plans[cell.sync], gradients, cell.ranks, network=network, compute=compute
        )
        step = predict_step(plan, gradients, cell.ranks, network=network, compute=compute)
        sending = [plan] if batchnorm is None else [plan, batchnorm]
        found[cell.id] = PredictedCell(
            step_seconds=step.step_seconds,
            compute_seconds=step.compute_seconds,
            sync_seconds=step.sync_seconds,
            in_scope=not why,
            why=why,
            bucket_mb=getattr(plan, "bucket_mb", None),
            bytes_sent=_bytes_sent(sending, gradients, cell.ranks),
            link_bytes=_link_bytes(sending, gradients, cell),
        )
    return found


def _batchnorm_plan(model: str, *, synchronised: bool) -> MessagePlan | None:
    """Return the messages for which the model's layers wait; None unless they are synchronised."""
    if not synchronised:
        return None
    return SyncBatchNormPlan(layers=synchronised_layers(build_model(model, _CLASSES)))


def _bytes_sent(
    sending: Sequence[MessagePlan], gradients: Sequence[GradientSize], ranks: int
) -> list[float]:
    """Return the bytes of a step that each rank sends."""
    return [
        sum(float(plan.bytes_sent(gradients, rank, ranks) / plan.period) for plan in sending)
        for rank in range(ranks)
    ]


def _link_bytes(
    sending: Sequence[MessagePlan], gradients: Sequence[GradientSize], cell: Cell
) -> list[tuple[float, float]]:
    """Return the bytes of a step that each emulated node sends and receives over its link.

    Empty for a plan that does not say who receives its messages, and without emulated links.
    """
    if cell.rate is None or cell.nodes == 1:
        return []
    layout = NodeLayout.even(cell.ranks, cell.ranks_per_node)
    totals = [(0.0, 0.0)] * cell.nodes
    try:
        for plan in sending:
            for node, (sent, received) in enumerate(link_bytes(plan, gradients, layout)):
                so_far = totals[node]
                totals[node] = (
                    so_far[0] + float(sent / plan.period),
                    so_far[1] + float(received / plan.period),
                )
    except UserError:
        return []
    return totals


def _out_of_scope(cell: Cell, *, other_model: str | None, no_network: bool) -> str:
    """Return why the event model may be wrong about a cell by more than 20 %; "" if it is not."""
    if not cell.exact:
        return "lossy or periodic"
    if cell.oversubscribed:
        return "more ranks than cores"
    if no_network and cell.nodes > 1:
        return "calibrated over loopback, no network"
    if other_model is not None:
        return f"calibrated with {other_model}"
    return ""


def compute_on_nodes(
    settings: Settings, folder: Path, calibration: Calibration | None, *, own_machines: bool
) -> tuple[Callable[[int], StepCompute], Sequence[GradientSize], str]:
    """Return how long a rank computes, the gradients' sizes, and the source of the times.

    The first is a function: it takes the number of ranks, which decides a rank's samples, and
    returns the rank's step.

    calibration : the source of the times, unless compute is emulated: then it is not used, may be
    None, and the times are those of the profile in ``folder``. own_machines : see ``compute_of``.
    Raises UserError if the profile names other parameters than the model.
    """
    if calibration is not None and not settings.emulated:
        calibrated = partial(
            compute_of,
            calibration,
            batch_size=settings.batch_size,
            scaling=settings.scaling,
            own_machines=own_machines,
        )
        source = f"calibrated on {calibration.name}, {calibration.made}"
        return calibrated, calibration.gradient_sizes, source
    profile = load_profile(str(folder / PROFILE), model=settings.model)
    named = build_model(profile.model, _CLASSES).named_parameters()
    trained = {name: parameter for name, parameter in named if parameter.requires_grad}
    check_parameters(profile, trained)
    sizes = dict(zip(trained, GradientSize.of(trained.values()), strict=True))

    def emulated(ranks: int) -> StepCompute:
        samples = local_samples(settings.batch_size, ranks, scaling=settings.scaling)
        return emulated_compute(profile, samples, sizes)

    source = f"EMULATED by profile {profile.name} of {profile.machine}, {profile.made}"
    return emulated, list(sizes.values()), source


def emulated_compute(
    profile: Profile, samples: float, gradients: Mapping[str, GradientSize]
) -> StepCompute:
    """Return the step of a rank whose compute is emulated.

    gradients : of the parameters that train, by their names and in their order.
    """
    forward = [layer.forward.at(samples) for layer in profile.layers]
    begins = {}  # of each parameter's forward
    for layer, begin in zip(profile.layers, accumulate(forward, initial=0.0), strict=False):
        begins.update(dict.fromkeys(layer.parameters, begin))
    ends = {}  # of each parameter's backward, which goes through the layers in reverse
    end = 0.0
    for layer in reversed(profile.layers):
        end += layer.backward.at(samples)
        ends.update(dict.fromkeys(layer.parameters, end))
    return StepCompute.of_layers(
        math.fsum(forward), ends, profile.update_seconds, gradients, needed=begins
    )


def kinds_of(
    strategies: Sequence[str],
    options: Mapping[str, Any],
    gradients: Sequence[GradientSize],
    ranks: int,
    *,
    among: Sequence[Among] = get_args(Among),
) -> list[str]:
    """Return the kinds of operations of these strategies, for lab/calibrate/link_probe.py."""
    names = [split_variant(name)[0] for name in strategies]
    plans = message_plans(names, {**options, "bucket_mb": None}).values()
    operations = [plan.operations(gradients, ranks) for plan in plans]
    return sorted({each.kind for each in chain.from_iterable(operations) if each.among in among})


def _measure_networks(
    links: Sequence[Link],
    settings: Settings,
    gradients: Sequence[GradientSize],
    folder: Path,
    executors: Executors,
    calibration: Calibration | None,
) -> tuple[dict[Link, Network], dict[Link, Network]]:
    """Measure each of the networks now; return them as ``forecast`` takes them.

    calibration : None if compute is emulated.
    """
    console.print(
        f"measuring messages between the ranks for the predictions: "
        f"{count(len(links), 'measurement')}, up to a minute each (--no-predict leaves them "
        "out)"
    )
    # Messages slow down a backward pass that computes, not one that sleeps.
    overlap_cost = 0.0 if calibration is None else calibration.network.overlap_cost
    networks = {}
    grouped = {}
    for link in links:
        measured = _measure_network(link, settings, gradients, folder, executors)
        if measured.flat is not None:
            networks[link] = replace(measured.flat, overlap_cost=overlap_cost)
        if measured.grouped is not None:
            grouped[link] = replace(measured.grouped, overlap_cost=overlap_cost)
    return networks, grouped


def _measure_network(
    link: Link,
    settings: Settings,
    gradients: Sequence[GradientSize],
    folder: Path,
    executors: Executors,
) -> SharedLinks:
    """Measure the network of some nodes now (lab/calibrate/link_probe.py)."""
    nodes, rate = link
    ranks = settings.ranks_on(nodes)
    name = f"links-{cell_suffix(nodes, rate, settings.ranks_per_node)}"
    output = folder / f"{name}.json"
    command = ["-m", "lab.calibrate.link_probe", "--output", str(output.absolute())]
    if rate is not None:
        command.append("--shaped")
    options = settings.strategy_options
    command += ["--ranks-per-node", str(settings.ranks_per_node)]
    for among in get_args(Among):
        kinds = kinds_of(settings.sync, options, gradients, ranks, among=[among])
        if among == "all" and settings.sync_batchnorm:
            kinds = sorted({*kinds, "all_reduce"})
        command += [f"--{among}", *kinds]
    # Python looks for modules where it starts: there are the project's.
    logs = folder / "logs" / name
    message = executors.run(command, ranks, rate=rate, logs=logs, cwd=REPOSITORY)
    if message is not None:
        raise GroupError(f"the messages of {ranks} ranks could not be measured: {message}")
    found = read_json(output, ProbedLinks)
    rate_bits = parse_rate(rate)
    if settings.ranks_per_node == 1:
        assert found.all is not None
        return SharedLinks(network_from(found.all, rate_bits=rate_bits), None)
    assert rate_bits is not None  # the settings ask for it
    return shared_links_from(found, rate_bits=rate_bits, ranks_per_node=settings.ranks_per_node)


def predict_imported(comparison: Comparison) -> None:
    """Set the prediction of runs that were started by hand, from an earlier calibration.

    It is the file that ``lab calibrate`` writes; without it, or if none of the runs were on that
    machine with that model in fp32, there is no prediction.
    """
    path = calibration_path()
    if not path.exists():
        return
    try:
        calibration = load_calibration(path)
    except UserError as error:
        comparison.warnings.append(f"no prediction: {error}")
        return
    predicted: dict[str, PredictedCell] = {}
    for cell in comparison.cells:
        facts = comparison.groups.get(str(cell.group), {})
        if _calibrated_for(facts, calibration):
            synchronised = facts.get("sync_batchnorm", "off") not in ("off", False)
            predicted |= _forecast_imported(cell, calibration, synchronised=synchronised)
    if predicted:
        source = f"calibrated on {calibration.name}, {calibration.made}"
        comparison.prediction = Prediction(
            made=calibration.made,
            cells=predicted,
            calibration={"compute": source, **_facts_of_calibration(calibration)},
        )
        comparison.warnings += _warnings_of(calibration)


def _calibrated_for(facts: Facts, calibration: Calibration) -> bool:
    """Return whether runs with these facts computed what was timed, on the same machine."""
    here = all(facts.get(name) == calibration.machine.get(name) for name in MACHINE_FACTS)
    plain = facts.get("compute") == "real" and not facts.get("amp")
    plain = plain and facts.get("accumulation_steps") in (None, 1)
    return here and plain and facts.get("model") == calibration.model


def _forecast_imported(
    cell: Cell, calibration: Calibration, *, synchronised: bool
) -> dict[str, PredictedCell]:
    """Return the prediction of a cell whose runs have ended; {} for an unknown strategy."""
    strategy, _ = split_variant(cell.sync)
    if strategy not in STRATEGIES or cell.batch_size is None:
        return {}
    hosts = {rank.host for run in cell.runs for rank in run.ranks}
    apart = len(hosts) > 1
    compute_at = partial(
        compute_of,
        calibration,
        batch_size=int(cell.batch_size),
        scaling="strong",  # the cell's batch is the global one
        own_machines=apart,
    )
    return forecast(
        [cell],
        {_link(cell): calibration.network},
        compute_at,
        calibration.gradient_sizes,
        {},
        batchnorm=_batchnorm_plan(calibration.model, synchronised=synchronised),
        no_network=apart and calibration.over_loopback,
    )


def _calibrate(comparison: Comparison, settings: Settings, folder: Path) -> Calibration:
    """Return today's calibration of this machine or a new one, print it, and keep a copy.

    Its warnings become those of the comparison.
    """
    calibration = _calibration_of_today(settings.model)
    calibration.save(folder / "calibration.json")
    console.print("\n".join(describe(calibration)), markup=False)
    comparison.warnings += _warnings_of(calibration)
    return calibration


def _warnings_of(calibration: Calibration) -> list[str]:
    """Return what a reader of predictions from this calibration must know."""
    lines = describe(calibration)
    return [
        line.replace("warning: ", "calibration: ") for line in lines if line.startswith("warning: ")
    ]


def _calibration_of_today(model: str) -> Calibration:
    """Return the calibration of this machine if it describes it today; else calibrate it now."""
    path = calibration_path()
    now = datetime.now()
    calibration = None
    try:
        calibration = load_calibration(path)
        why = reason_to_calibrate(calibration, model=model, here=environment(), now=now)
    except UserError:
        why = "cannot be used"
    if calibration is None or why:
        reason = f"{path} {why}" if path.exists() else "`lab calibrate` has not measured it yet"
        console.print(
            f"calibrating this machine first, for the predictions ({reason}; --no-predict leaves "
            "them out)"
        )
        return calibrate(model=model)
    age = minutes_text((now - datetime.fromisoformat(calibration.made)).total_seconds())
    console.print(
        f"predictions use {path}, measured {age} ago (`lab calibrate` measures again, "
        "--no-predict leaves the predictions out)"
    )
    return calibration


def reason_to_calibrate(
    calibration: Calibration, *, model: str, here: Mapping[str, Any], now: datetime
) -> str:
    """Return why ``calibration`` does not describe this machine today; "" if it does.

    here : what ``common.utils.environment.environment`` returns.
    """
    if calibration.quick:
        return "is quick, so its intervals are wide"
    if not calibration.over_loopback:
        return "was measured on several nodes"
    if calibration.ranks != default_ranks():
        return f"was measured with {count(calibration.ranks, 'rank')}"
    if calibration.model != model:
        return f"timed {calibration.model}, not {model}"
    other = [name for name in MACHINE_FACTS if calibration.machine.get(name) != here.get(name)]
    if other:
        return f"was measured with another {', '.join(other)}"
    age = now - datetime.fromisoformat(calibration.made)
    if not timedelta(0) <= age <= _NEW_ENOUGH:
        return "is older than a day"
    if calibration.others_share > QUIET_SHARE:
        return "was disturbed by other processes"
    return ""
