"""Message plans: each strategy has one, with its options; a custom strategy needs none."""

from itertools import accumulate

import pytest

from common.errors import UserError
from common.models import build_model
from common.sync import (
    STRATEGIES,
    Strategy,
    build_message_plan_from,
    build_sync,
    plan_class,
    strategy_class,
)
from common.sync.base import GradientSync
from common.sync.message_cost import GradientSize, Operation
from common.sync.plans.base import ReplicatedPlan
from common.sync.plans.lines import SIZE, PlanLine
from common.sync.plans.pieces import SentStep

SETTINGS = {"bucket_mb": 3, "topk_ratio": 0.5, "powersgd_rank": 3, "averaging_period": 7, "lr": 0.1}
OPTION = {"topk": "topk_ratio", "ddp_powersgd": "powersgd_rank", "local_sgd": "averaging_period"}
OPTION |= dict.fromkeys(("overlapped", "sharded", "ddp", "ddp_fp16", "ddp_zero1"), "bucket_mb")


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_has_its_plan_with_the_options_that_it_takes(name):
    plan = build_message_plan_from(name, SETTINGS)
    built = strategy_class(name)(plan)
    assert type(built) is strategy_class(name)
    assert type(built.plan) is type(plan) is plan_class(name)
    assert vars(built.plan) == vars(plan)
    if option := OPTION.get(name):
        assert vars(plan)[option] == SETTINGS[option]
        assert vars(build_message_plan_from(name, {option: None})) == vars(plan_class(name)())
    assert plan.period == (7 if name == "local_sgd" else 1)


def test_sharded_sends_padded_buckets_in_both_directions():
    """VGG-11 on 4 nodes: five buckets of 4 MiB or more, the last layers first.

    Only the first bucket needs padding: the classifier's 10 biases, with 8 bytes to 4 equal parts.
    """
    sizes = GradientSize.of(build_model("vgg11", 10).parameters())
    plan = build_message_plan_from("sharded", {"bucket_mb": 4})
    buckets = [9_463_848, 9_443_328, 9_443_328, 4_724_736, 3_849_216]
    padded, ready = [9_463_856, *buckets[1:]], list(accumulate(buckets))
    reduces, gathers = plan.operations(sizes, 4)[:5], plan.operations(sizes, 4)[5:]
    assert [one.kind for one in (*reduces, *gathers)] == ["reduce_scatter"] * 5 + ["all_gather"] * 5
    assert [one.nbytes for one in reduces] == padded
    assert [(one.copied_bytes, one.ready_bytes) for one in reduces] == list(
        zip(buckets, ready, strict=True)
    )
    # The next forward gets the first layers' bucket first, and uses it at once.
    assert [one.nbytes for one in reversed(gathers)] == [nbytes // 4 for nbytes in padded]
    assert [one.needed_bytes for one in reversed(gathers)] == [36_924_456 - one for one in ready]
    # 2(N-1)/N M, and as much of the padding
    assert plan.bytes_sent(sizes, 3, 4) == 1.5 * (36_924_456 + 8)
    assert (plan.update_share(4), build_message_plan_from("ddp", {}).update_share(4)) == (0.25, 1)


class OwnPlan(ReplicatedPlan):
    """What ``Own`` sends, with an option."""

    def __init__(self, *, averaging_period=1):
        self.period = averaging_period

    def operations(self, sizes, ranks):
        return [Operation("all_reduce", sum(sizes), count=2)]


class Own(GradientSync):
    """A strategy from elsewhere that says what it sends."""

    plan = OwnPlan()


class Silent(GradientSync):
    """One that does not, and does not call the base class, as users write it."""

    def __init__(self): ...


def test_an_own_strategy_has_a_plan_if_it_gives_one(monkeypatch):
    assert Own().plan.bytes_sent([100, 60], 1, 4) == 2 * 2 * 3 * 160 / 4
    record = Strategy(
        implementation=f"{__name__}:Own", plan=f"{__name__}:OwnPlan", part="PartTwo", label="own"
    )
    monkeypatch.setitem(STRATEGIES, "own", record)
    assert build_message_plan_from("own", SETTINGS).period == 7
    assert build_sync("own", averaging_period=7).plan.period == 7
    silent = Silent()
    with pytest.raises(UserError, match=r"MessagePlan lacks operations\(\)"):
        silent.plan.bytes_sent([100, 60], 1, 4)
    silent.close()
    assert silent.plan.period == silent.plan.update_share(4) == 1


def test_a_line_names_what_there_is():
    told = r"collective, got 'exchange': choose one of all_reduce,.*; .* into operations\(\)"
    with pytest.raises(UserError, match=told):
        PlanLine("exchange", SIZE)
    with pytest.raises(UserError, match="unknown condition 'several rank': did you mean several"):
        PlanLine("reduce", SIZE, only_if="several rank")


@pytest.mark.parametrize(
    ("each", "nbytes", "ready", "needed"),
    [
        ("gradient", [24, 12, 8, 20], [64, 40, 28, 20], [0, 24, 36, 44]),
        ("layer", [44, 20], [64, 20], [0, 44]),
        ("buffer", [56, 8], [64, 64], [0, 0]),
        ("bucket", [32, 8, 24], [40, 40, 64], [24, 24, 0]),
        ("model", [64], [64], [0]),
    ],
)
def test_pieces_are_what_their_names_say(each, nbytes, ready, needed):
    """A matrix with a vector and one of another type, and a kernel; buckets of 28 bytes."""
    sizes = [GradientSize((2, 3)), GradientSize((3,)), GradientSize((4,), 2), GradientSize((5, 1))]
    pieces = SentStep(sizes, 2, {"bucket_mb": 28 / 2**20}).pieces(each)
    assert [piece.nbytes for piece in pieces] == nbytes
    assert [piece.ready_bytes for piece in pieces] == ready
    assert [piece.needed_bytes for piece in pieces] == needed


def test_pieces_are_those_of_these_sizes_and_not_of_equal_numbers():
    """A matrix and a vector of as many bytes are equal as numbers."""
    matrix, vector = ([GradientSize(shape)] for shape in ((8, 8), (64,)))
    assert matrix == vector
    for sizes in (matrix, vector, matrix):
        (piece,) = SentStep(sizes, 2, {}).pieces("gradient")
        assert piece.gradients[0].shape == sizes[0].shape
