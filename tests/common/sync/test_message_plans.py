"""Message plans: each strategy has one, with the same options.

A custom strategy needs no plan.
"""

import inspect

import pytest

from common.errors import UserError
from common.models import build_model
from common.sync import MESSAGE_PLANS, STRATEGIES, build_message_plan_from, build_sync_from
from common.sync.base import GradientSync
from common.sync.message_cost import GradientSize, Operation
from common.sync.message_plans import MessagePlan
from common.utils import registry

SETTINGS = {"bucket_mb": 1, "topk_ratio": 0.5, "powersgd_rank": 3, "averaging_period": 7, "lr": 0.1}
SIZES = [GradientSize((64, 64, 3, 3)), GradientSize((1_000_000,)), GradientSize((5,), 2)]


def test_every_strategy_has_a_plan() -> None:
    assert list(MESSAGE_PLANS) == list(STRATEGIES)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_sends_what_its_plan_says_with_the_same_options(name: str) -> None:
    strategy = registry.load(STRATEGIES, name, kind="strategy")
    plan = registry.load(MESSAGE_PLANS, name, kind="plan")
    assert strategy.__mro__[1] is plan
    for formula in ("operations", "bytes_sent"):
        assert formula not in vars(strategy)
    assert inspect.signature(strategy).parameters == inspect.signature(plan).parameters

    built, alone = build_sync_from(name, SETTINGS), build_message_plan_from(name, SETTINGS)
    assert not isinstance(alone, GradientSync)
    assert alone.operations(SIZES, 6) == built.operations(SIZES, 6)
    assert alone.bytes_sent(SIZES, 1, 6) == built.bytes_sent(SIZES, 1, 6)
    assert alone.period == built.period == (7 if name == "local_sgd" else 1)


@pytest.mark.parametrize(
    "options", [{"topk_ratio": 0}, {"topk_ratio": 1.1}, {"averaging_period": 0}]
)
def test_plan_and_strategy_refuse_the_same_options(options: dict[str, float]) -> None:
    name = "topk" if "topk_ratio" in options else "local_sgd"
    for build in (build_message_plan_from, build_sync_from):
        with pytest.raises(UserError, match=next(iter(options))):
            build(name, options)


def test_sharded_sends_padded_buckets_in_both_directions() -> None:
    """VGG-11 on 4 nodes: five buckets of 4 MiB or more, the last layers first.

    Only the first bucket needs padding: the classifier's 10 biases, with 8 bytes to 4 equal parts.
    """
    sizes = GradientSize.of(build_model("vgg11", 10).parameters())
    plan = build_message_plan_from("sharded", {"bucket_mb": 4})
    *reduces, a, b, c, d, e = plan.operations(sizes, 4)
    assert {one.kind for one in reduces} == {"reduce_scatter"}
    assert {one.ready_bytes: (one.copied_bytes, one.nbytes) for one in reduces} == {
        9_463_848: (9_463_848, 9_463_856),
        18_907_176: (9_443_328, 9_443_328),
        28_350_504: (9_443_328, 9_443_328),
        33_075_240: (4_724_736, 4_724_736),
        36_924_456: (3_849_216, 3_849_216),
    }
    # The next forward gets the first layers' bucket first, and uses it at once.
    assert [(one.kind, one.nbytes, one.needed_bytes) for one in (a, b, c, d, e)] == [
        ("all_gather", 3_849_216 // 4, 0),
        ("all_gather", 4_724_736 // 4, 36_924_456 - 33_075_240),
        ("all_gather", 9_443_328 // 4, 36_924_456 - 28_350_504),
        ("all_gather", 9_443_328 // 4, 36_924_456 - 18_907_176),
        ("all_gather", 9_463_856 // 4, 36_924_456 - 9_463_848),
    ]
    # 2(N-1)/N M, and as much of the padding
    assert plan.bytes_sent(sizes, 3, 4) == 1.5 * (36_924_456 + 8)
    assert (plan.update_share(4), build_message_plan_from("ddp", {}).update_share(4)) == (0.25, 1)


def test_sharded_pads_in_entries_of_each_type() -> None:
    """On 4 ranks 5 entries become 8, of 8 bytes each, and 3 entries of 2 bytes become 4."""
    sizes = [GradientSize((5,), 8), GradientSize((3,), 2)]
    reduces, gathers = [], []
    for one in build_message_plan_from("sharded", {}).operations(sizes, 4):
        (gathers if one.kind == "all_gather" else reduces).append(one)
    assert sorted(one.nbytes for one in reduces) == [8, 64]
    assert sorted(one.nbytes for one in gathers) == [2, 16]
    # In the order of backward, and each gather waits for what the reduces before it hold.
    assert [one.ready_bytes for one in reduces] == [6, 46]
    assert [one.needed_bytes for one in gathers] == [0, 40]


def test_an_unknown_name_is_told_the_choices() -> None:
    with pytest.raises(
        UserError, match=r"unknown strategy 'pigeon': choose one of none, .*local_sgd"
    ):
        build_message_plan_from("pigeon", {})


class Own(GradientSync):
    """Defines its messages itself."""

    def operations(self, sizes, ranks):
        return [Operation("all_reduce", sum(sizes), count=2)]


class Silent(GradientSync):
    """Does not say what it sends."""


@pytest.mark.parametrize("kind", [Own, Silent])
def test_a_strategy_without_a_plan_speaks_for_itself(
    kind: type[GradientSync], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STRATEGIES, "own", f"{__name__}:{kind.__name__}")
    plan: MessagePlan = build_message_plan_from("own", SETTINGS)
    if kind is Own:
        assert plan.bytes_sent([100, 60], 1, 4) == 2 * 2 * 3 * 160 / 4
    else:
        with pytest.raises(NotImplementedError, match=r"Silent does not define operations\(\)"):
            plan.bytes_sent([100, 60], 1, 4)
