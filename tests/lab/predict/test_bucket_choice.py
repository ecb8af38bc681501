"""``ddp-auto`` chooses what an exhaustive search by hand finds, and never a small gain."""

import pytest

from common.sync import STRATEGIES, build_message_plan_from
from common.sync.bucketing import MIB
from common.sync.plans.base import AUTO
from lab.predict.bucket_choice import LEAST_GAIN, has_buckets, with_best_buckets
from lab.predict.compute_model import StepCompute
from lab.predict.event_model import Network, step_seconds

GRADIENTS = {f"layer{index}": MIB for index in range(8)}
# Backward takes one second for each layer; the last layer's gradient is the first.
COMPUTE = StepCompute.of_layers(
    1.0, {f"layer{index}": 8.0 - index for index in range(8)}, 0.5, GRADIENTS
)


def best_plan(sync, network):
    plan = build_message_plan_from(sync, {"bucket_mb": AUTO})
    sizes = list(GRADIENTS.values())
    return with_best_buckets(plan, sizes, 2, network=network, compute=COMPUTE)


def step_by_hand(buckets, latency, mib_seconds):
    """Return the step's seconds if buckets of these MiB leave in turn.

    A bucket of M MiB takes ``latency`` + M ``mib_seconds``.
    """
    full, free = 0, 0.0
    for size in buckets:
        full += size  # seconds of backward until it is full
        free = max(float(full), free) + latency + size * mib_seconds
    return 1.5 + max(8.0, free)


BY_HAND = {
    None: [1, 7],  # 1 MiB, then 25
    1.0: [1] * 8,
    2.0: [2] * 4,
    4.0: [4] * 2,
    6.0: [6, 2],
    8.0: [8],
}


@pytest.mark.parametrize(
    ("latency", "mib_seconds", "bucket_mb", "seconds"),
    [
        (0.0, 0.5, 1.0, 1.5 + 8.5),  # only the last MiB is exposed
        (0.8, 0.5, 2.0, 1.5 + 9.8),
        (4.0, 0.25, None, 1.5 + 13.75),
        (10.0, 0.1, 8.0, 1.5 + 18.8),  # messages are so slow that one is best
        (0.0, 0.0, None, 1.5 + 8.0),  # nothing to gain
    ],
)
def test_the_best_of_an_exhaustive_search(latency, mib_seconds, bucket_mb, seconds):
    # Two ranks: an all_reduce of M bytes is two messages in a row, and M bytes pass each link.
    network = Network(latency / 2, mib_seconds / MIB)
    found = {size: step_by_hand(buckets, latency, mib_seconds) for size, buckets in BY_HAND.items()}
    assert min(found.values()) == pytest.approx(seconds)
    for sync in ("ddp", "overlapped"):
        best = best_plan(sync, network)
        assert best.bucket_mb == bucket_mb
        taken = step_seconds(best, list(GRADIENTS.values()), 2, network=network, compute=COMPUTE)
        assert taken == pytest.approx(seconds)


@pytest.mark.parametrize(("gain", "bucket_mb"), [(0.9 * LEAST_GAIN, None), (1.1 * LEAST_GAIN, 1.0)])
def test_the_default_stays_unless_the_gain_is_more_than_a_hundredth(gain, bucket_mb):
    # The default exposes 7 MiB, buckets of 1 MiB expose 1: gain = 6 t / (9.5 + 7 t).
    mib_seconds = 9.5 * gain / (6 - 7 * gain)
    network = Network(0.0, mib_seconds / MIB)
    assert best_plan("ddp", network).bucket_mb == bucket_mb


def test_which_strategies_have_buckets():
    found = {sync for sync in STRATEGIES if has_buckets(sync)}
    assert {"overlapped", "ddp", "ddp_fp16"} <= found
    assert not found & {"none", "all_reduce", "ring", "ddp_powersgd", "topk", "local_sgd"}
