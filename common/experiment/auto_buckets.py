"""``--bucket-mb auto``: measure links and layers, then choose the buckets by the event model.

``auto_buckets`` comes before the strategy wraps the model: DistributedDataParallel fixes its
buckets then. The ranks agree on all that they measure, so all choose the same size.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from common.cost_model.bucket_choice import BucketChoice, choose_buckets, has_buckets
from common.cost_model.compute_model import StepCompute
from common.cost_model.event_model import Network
from common.cost_model.measured_links import MeasuredLinks, network_from
from common.data.loaders import TrainLoader
from common.distributed.process_group import World
from common.experiment.compute_trial import ComputeTrial
from common.experiment.setup import Setup
from common.profiling.link_measurements import measure_links
from common.reporting.console import say
from common.sync import build_message_plan_from
from common.sync.bucketing import AUTO
from common.sync.message_cost import GradientSize

_LINK_SECONDS = 1.0  # for each kind of message at each of three sizes


def auto_buckets(setup: Setup, model: nn.Module, loader: TrainLoader) -> BucketChoice | None:
    """Return the choice, the same on every rank; None if there is nothing to choose. Collective.

    A resumed run with as many ranks keeps the earlier choice, since other buckets round sums in
    another way. Weights, buffers and random streams stay as they are, bit for bit.
    """
    config, world = setup.config, setup.world
    if config.bucket_mb != AUTO or world.size == 1 or not has_buckets(config.sync):
        return None
    choice = _earlier_choice(setup)
    if choice is None:
        world.activity.enter("start")
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        sizes = dict(zip(parameters, GradientSize.of(parameters.values()), strict=True))
        network = _measure_network(config.sync, list(sizes.values()), world)
        if setup.profile is not None:
            compute = _emulated_compute(setup, sizes)
        else:
            trial = ComputeTrial(setup, model, loader)
            compute = trial.measure(sizes)
            cost = trial.overlap_cost(sum(sizes.values()))
            network = replace(network, overlap_cost=cost)
        choice = choose_buckets(
            config.sync, list(sizes.values()), world.size, network=network, compute=compute
        )
    if world.is_rank0:
        say(f"--bucket-mb auto: {choice}")
    return choice


def _earlier_choice(setup: Setup) -> BucketChoice | None:
    """Return what the run chose before it was resumed, if it had this strategy and these ranks."""
    saved, ranks = setup.entries.get("auto_buckets"), setup.entries.get("world_size")
    choice = BucketChoice(**saved) if saved else None
    same = choice is not None and (choice.sync, ranks) == (setup.config.sync, setup.world.size)
    return choice if same else None


def _measure_network(sync: str, sizes: list[GradientSize], world: World) -> Network:
    """Return what the strategy's messages cost between the ranks. Collective."""
    plan = build_message_plan_from(sync, {})
    kinds = dict.fromkeys(one.kind for one in plan.operations(sizes, world.size))
    links = measure_links(
        world.rank,
        world.size,
        kinds=list(kinds),
        shaped=False,
        device=world.device,
        limit_seconds=_LINK_SECONDS,
    )
    return network_from(MeasuredLinks(**links), rate_bits=None)


def _emulated_compute(setup: Setup, sizes: Mapping[str, int]) -> StepCompute:
    """Return the busiest rank's step by the profile; only its last micro-batch is overlapped."""
    profile, plan, ranks = setup.profile, setup.plan, setup.world.size
    assert profile is not None
    samples = -(-plan.batch_size // (plan.shards * plan.accumulation_steps))
    ready = profile.ready_seconds(samples)
    earlier = -(-plan.shards // ranks) * plan.accumulation_steps - 1
    forward = profile.forward_seconds(samples)
    return StepCompute.of_layers(
        forward + earlier * (forward + max(ready.values())),
        ready,
        profile.update_seconds,
        sizes,
        needed=profile.needed_seconds(samples),
    )
