"""Message plans: each strategy has one, with the same options.

A custom strategy needs no plan.
"""

import inspect

import pytest

from common.errors import UserError
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
