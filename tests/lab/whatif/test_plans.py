"""plans.js sends what the plans send: the same operations, in order, and the same bytes a rank."""

import random
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest

from common.errors import UserError
from common.sync import STRATEGIES, build_message_plan_from
from common.sync.message_cost import COPIES_PER_PARAMETER, GradientSize, Operation
from common.sync.plans.as_data import plan_data
from common.sync.plans.base import MessagePlan, ReplicatedPlan, option
from common.sync.plans.lines import (
    ENTRIES,
    GRADIENTS,
    ITEMSIZE,
    OTHER_RANKS,
    PART,
    SIZE,
    PlanLine,
    for_each,
)
from common.sync.plans.patterns import PATTERNS
from common.sync.plans.pieces import CONDITIONS, VALUES, Each
from common.sync.plans.rings import AllReduceFlatPlan, RoundsPlan
from common.utils.limits import AboveZero
from tests.helpers import own_strategy
from tests.helpers.node import needs_node, run_scripts

OPERATIONS_AND_BYTES = """given.map((asked) => {
  const of = [asked.plan, asked.gradients];
  const how = [asked.ranks, asked.ranks_per_node, asked.bucket_mb];
  const ranks = [...Array(asked.ranks).keys()];
  const operations = Plans.operations(...of, ...how).map((found) => ({
    ...found, partner: found.partner && ranks.map(found.partner),
  }));
  return {operations, sent: ranks.map((rank) => Plans.sender(...of, ...how)(rank))};
})"""


def as_gradients(sizes):
    """Return gradients as plans.js takes them."""
    return [
        {
            "shape": size.shape,
            "itemsize": size.itemsize,
            "entries": size.entries,
            "nbytes": int(size),
        }
        for size in sizes
    ]


def as_found(operation: Operation, ranks: int) -> dict[str, Any]:
    """Return an operation as plans.js names its fields, with the partner of each rank."""
    partner = operation.partner
    return {
        "kind": operation.kind,
        "nbytes": operation.nbytes,
        "count": operation.count,
        "summed": operation.summed_bytes,
        "copied": operation.copied_bytes,
        "compressor": operation.compressor,
        "compressed": operation.compressed_bytes,
        "ready": operation.ready_bytes,
        "needed": operation.needed_bytes,
        "among": operation.among,
        "partner": partner and [partner(rank) for rank in range(ranks)],
    }


@dataclass
class PlanCase:
    """A plan with what it is asked for."""

    plan: MessagePlan
    sizes: list[GradientSize]
    ranks: int
    ranks_per_node: int = 1
    bucket_mb: float | None = None

    def given(self):
        """Return the case for plans.js; the plan's own buckets and nodes are not told."""
        return {
            "plan": plan_data(type(self.plan)(**self.other_options())),
            "gradients": as_gradients(self.sizes),
            "ranks": self.ranks,
            "ranks_per_node": self.ranks_per_node,
            "bucket_mb": self.bucket_mb,
        }

    def other_options(self):
        """Return the options that the page does not set."""
        given = ("bucket_mb", "ranks_per_node", "period")
        return {name: value for name, value in vars(self.plan).items() if name not in given}

    def check(self, found):
        """Compare what plans.js has found with the plan."""
        operations = self.plan.operations(self.sizes, self.ranks)
        assert found["operations"] == [as_found(each, self.ranks) for each in operations], self
        sent = [
            float(self.plan.bytes_sent(self.sizes, rank, self.ranks)) for rank in range(self.ranks)
        ]
        assert found["sent"] == pytest.approx(sent, rel=1e-15), self


def check_all(cases):
    """Compare plans.js with the plans of all cases."""
    found = run_scripts(OPERATIONS_AND_BYTES, [case.given() for case in cases])
    for case, of_case in zip(cases, found, strict=True):
        case.check(of_case)


def random_sizes(chance):
    """Return up to 40 gradients: vectors, matrices and kernels, of one itemsize or of several."""
    itemsizes = chance.choice([(4,), (4,), (2,), (2, 4), (2, 4, 8)])
    shapes = [
        lambda: (chance.randint(1, 600),),
        lambda: (chance.randint(1, 300), chance.randint(1, 300)),
        lambda: (chance.randint(1, 128), chance.randint(1, 64), 3, 3),
    ]
    return [
        GradientSize(chance.choice(shapes)(), chance.choice(itemsizes))
        for _ in range(chance.choice([1, 2, 5, 40]))
    ]


@needs_node
def test_operations_and_bytes_are_those_of_the_plans():
    chance = random.Random(7)
    cases = []
    for name in [*STRATEGIES] * 30:
        ranks_per_node = chance.choice([1, 2, 3, 8])
        bucket_mb = chance.choice([None, 0.001, 0.1, 4.5, 25])
        options = {
            "bucket_mb": bucket_mb,
            "ranks_per_node": ranks_per_node,
            "accumulation_steps": chance.choice([1, 1, 2, 5]),
            "topk_ratio": chance.choice([0.01, 0.3, 1, chance.random()]),
            "powersgd_rank": chance.choice([1, 2, 4, 50]),
            "averaging_period": chance.choice([1, 8]),
            "find_unused_parameters": chance.random() < 0.2,
        }
        cases.append(
            PlanCase(
                build_message_plan_from(name, options),
                random_sizes(chance),
                chance.choice([1, 2, 3, 4, chance.randint(1, 70)]),
                ranks_per_node,
                bucket_mb,
            )
        )
    check_all(cases)


@needs_node
def test_buckets_close_exactly_at_their_limits():
    """25 MiB after the first; of 0.001 MiB the whole bytes, 1,048."""
    of_a_mib = [GradientSize((2**18,))] * 60
    plan = build_message_plan_from("ddp", {})
    sizes = [operation.nbytes / 2**20 for operation in plan.operations(of_a_mib, 2)]
    assert sizes == [1, 25, 25, 9]
    small = build_message_plan_from("ddp", {"bucket_mb": 0.001})
    check_all(
        [PlanCase(plan, of_a_mib, 2), PlanCase(small, [GradientSize((262,))] * 3, 2, 1, 0.001)]
    )


@needs_node
def test_plans_js_knows_every_name_that_a_line_may_use():
    """So no strategy of lines fails in the page: add a new name's function there, too."""
    known = run_scripts("Object.values(Plans.known).map(Object.keys)", None)
    assert known == [list(table) for table in (VALUES, CONDITIONS, get_args(Each), PATTERNS)]


@dataclass(kw_only=True)
class SketchedPlan(ReplicatedPlan):
    """What no strategy sends: lines of each kind, in each order."""

    bucket_mb: AboveZero | None = option(0.001, "MiB of a bucket", auto=True)

    messages = (
        for_each(
            "bucket",
            PlanLine("reduce", SIZE, copied=2 * SIZE, when="in backward"),
            PlanLine("broadcast", 3 * PART, count=OTHER_RANKS, ahead=True),
        )
        + for_each("layer", PlanLine("all_gather", PART, when="in forward"), reverse=True)
        + for_each("gradient", PlanLine("gather", ENTRIES * ITEMSIZE, when="in backward"))
        + for_each("model", PlanLine("scatter", GRADIENTS, only_if="several ranks"))
    )


@dataclass(kw_only=True)
class BucketsInRingsPlan(RoundsPlan):
    """A ring for each bucket."""

    bucket_mb: AboveZero | None = option(None, "MiB of a bucket", auto=True)

    messages = for_each("bucket", pattern="ring", reverse=True)


@needs_node
@pytest.mark.parametrize("plan", ["SketchedPlan", "BucketsInRingsPlan"])
def test_a_new_strategy_of_lines_needs_no_javascript(monkeypatch, plan):
    record = replace(own_strategy.RECORD, plan=f"{__name__}:{plan}")
    monkeypatch.setitem(STRATEGIES, own_strategy.NAME, record)
    chance = random.Random(3)
    cases = []
    for ranks in (1, 2, 3, 8, 13):
        for bucket_mb in (None, 0.01):
            own = build_message_plan_from(own_strategy.NAME, {"bucket_mb": bucket_mb})
            cases.append(PlanCase(own, random_sizes(chance), ranks, 1, bucket_mb))
    check_all(cases)


def test_a_plan_as_data_says_what_a_step_sends():
    found = plan_data(build_message_plan_from("gather_scatter", {}))
    assert (found["period"], found["shards_update"], found["options"]) == (1, False, {})
    [group] = found["groups"]
    assert group["each"] == "gradient"
    gather, scatter = group["lines"]
    assert (gather["kind"], scatter["kind"]) == ("gather", "scatter")
    assert gather["summed"] == {"factor": 1, "of": ("other ranks", "size")}
    assert gather["copied"] == {"factor": COPIES_PER_PARAMETER, "of": ("size",)}
    assert plan_data(build_message_plan_from("local_sgd", {"averaging_period": 8}))["period"] == 8
    assert plan_data(build_message_plan_from("fsdp", {}))["shards_update"]


class OwnBytes(AllReduceFlatPlan):
    """Lines, but the bytes by hand."""

    def bytes_sent(self, sizes, rank, ranks):
        return 0


@pytest.mark.parametrize(
    ("plan", "method"),
    [
        (own_strategy.PiecesPlan(), "operations"),
        (MessagePlan(), "operations"),
        (OwnBytes(), "bytes_sent"),
    ],
)
def test_a_plan_written_by_hand_is_no_data(plan, method):
    expected = rf"{type(plan).__name__} .*{method}\(\).*state its messages as lines"
    with pytest.raises(UserError, match=expected):
        plan_data(plan)
