"""``--bucket-mb auto`` chooses what an exhaustive search by hand finds, and never a small gain."""

import pytest

from common.cost_model.bucket_choice import LEAST_GAIN, choose_buckets, has_buckets
from common.cost_model.compute_model import StepCompute
from common.cost_model.event_model import Network
from common.sync import STRATEGIES
from common.sync.bucketing import MIB

GRADIENTS = {f"layer{index}": MIB for index in range(8)}
# Backward takes one second for each layer; the last layer's gradient is the first.
COMPUTE = StepCompute.of_layers(
    1.0, {f"layer{index}": 8.0 - index for index in range(8)}, 0.5, GRADIENTS
)


def step_by_hand(buckets: list[int], latency: float, mib_seconds: float) -> float:
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
def test_the_best_of_an_exhaustive_search(
    latency: float, mib_seconds: float, bucket_mb: float | None, seconds: float
) -> None:
    # Two ranks: an all_reduce of M bytes is two messages in a row, and M bytes pass each link.
    network = Network(latency / 2, mib_seconds / MIB)
    found = {size: step_by_hand(buckets, latency, mib_seconds) for size, buckets in BY_HAND.items()}
    assert min(found.values()) == pytest.approx(seconds)
    for sync in ("ddp", "overlapped"):
        choice = choose_buckets(sync, list(GRADIENTS.values()), 2, network=network, compute=COMPUTE)
        assert (choice.sync, choice.bucket_mb) == (sync, bucket_mb)
        assert choice.expected_step_seconds == pytest.approx(seconds)
        assert choice.default_step_seconds == pytest.approx(found[None])


@pytest.mark.parametrize(("gain", "bucket_mb"), [(0.9 * LEAST_GAIN, None), (1.1 * LEAST_GAIN, 1.0)])
def test_the_default_stays_unless_the_gain_is_more_than_a_hundredth(
    gain: float, bucket_mb: float | None
) -> None:
    # The default exposes 7 MiB, buckets of 1 MiB expose 1: gain = 6 t / (9.5 + 7 t).
    mib_seconds = 9.5 * gain / (6 - 7 * gain)
    network = Network(0.0, mib_seconds / MIB)
    sizes = list(GRADIENTS.values())
    choice = choose_buckets("ddp", sizes, 2, network=network, compute=COMPUTE)
    assert choice.bucket_mb == bucket_mb
    best = choice.expected_step_seconds / choice.default_step_seconds
    assert best == pytest.approx(1.0 if bucket_mb is None else 1 - gain)
    text = "the default, expected step" if bucket_mb is None else "1 MiB, expected step 9.5"
    assert str(choice).startswith(text)


def test_which_strategies_have_buckets() -> None:
    found = {sync for sync in STRATEGIES if has_buckets(sync)}
    assert {"overlapped", "ddp", "ddp_fp16"} <= found
    assert not found & {"none", "all_reduce", "ring", "ddp_powersgd", "topk", "local_sgd"}
