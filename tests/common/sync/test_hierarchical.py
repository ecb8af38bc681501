"""Who shares a node, by whatever says so; and the bytes that pass each node's link."""

import os
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn

import common.distributed.gpus as gpus
from common.distributed.node_groups import ranks_by_node
from common.errors import UserError
from common.profiling.comm_trace import MessageRecorder
from common.sync import STRATEGIES, build_message_plan_from, build_sync
from common.sync.message_cost import KINDS, GradientSize, Operation, sends_of
from common.sync.node_layout import NodeLayout
from common.sync.plans.base import MessagePlan
from common.sync.plans.links import link_bytes
from lab.proofs import Case
from lab.proofs.equivalence import combine, errors_on_this_rank
from tests.helpers import run_ranks
from tests.helpers.engines import sgd
from tests.helpers.strategies import DISTRIBUTED

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")


def timeout(group):
    return group._get_backend(torch.device("cpu")).options._timeout


def launched(rank, sizes, *, by="TORCHELASTIC_RUN_ID"):
    """Set what a launcher sets that starts so many ranks on each node; none: no launcher."""
    for name in TORCHRUN:
        os.environ.pop(name, None)
    if not sizes:
        return
    layout = NodeLayout(tuple(sizes))
    node = layout.node_of(rank)
    local_rank = rank - layout.leaders[node]
    values = (rank, layout.ranks, local_rank, sizes[node])
    os.environ |= {name: str(value) for name, value in zip(TORCHRUN, values, strict=False)}
    if by:
        os.environ[by] = "none"


def asked(ranks_per_node):
    """Return the ranks of each node, or the error."""
    try:
        return ranks_by_node(ranks_per_node)
    except UserError as error:
        return str(error)


def one_step(rank, sync):
    """Return the kind and scope of each message of the second step."""
    model = nn.Linear(5, 3)
    sync.prepare(model, sgd(model))
    sync.prepare(model, sgd(model))  # harmless
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
        with MessageRecorder(nodes=[0, 1, 0]) as recorder:
            sync.synchronize(model)
    open_groups = [sync._inside, sync._between]
    sync.close()
    assert all(timeout(group) == timeout(dist.group.WORLD) for group in open_groups if group)
    for group in filter(None, open_groups):
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.destroy_process_group(group)  # closed already
    return [(message.kind, message.scope) for message in recorder.messages]


def three_ranks(rank):
    """Return everything that three ranks show: ranks 0 and 2 share a node, rank 1 is alone."""
    gpus.node_identity = lambda: f"machine {rank % 2}"
    launched(rank, [])
    found = {
        "machines": asked(None),
        "option": asked(2),
        "too many": asked(4),
        "errors": errors_on_this_rank(rank, 3, build_sync("hierarchical"), Case()),
        "messages": one_step(rank, build_sync("hierarchical")),
    }
    launched(rank, [1, 2])
    found |= {"torchrun": asked(None), "contradiction": asked(2)}
    launched(rank, [2, 1])
    found["agreement"] = asked(2)
    launched(rank, [3], by=None)  # as --distributed, on which the option rehearses nodes
    found |= {"one machine": asked(None), "rehearsal": asked(2)}
    launched(rank, [2, 1])
    if rank == 2:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    found["launcher contradicts itself"] = asked(None)
    return found


def test_the_ranks_agree_on_who_shares_a_node():
    """By the option, else the launcher, else the machines, whose ranks need not be neighbours."""
    by_rank = run_ranks(3, three_ranks)
    first = by_rank[0]
    same = [name for name in first if name not in ("errors", "messages")]
    assert [{name: found[name] for name in same} for found in by_rank[1:]] == [
        {name: first[name] for name in same}
    ] * 2
    assert first["machines"] == first["launcher contradicts itself"] == [[0, 2], [1]]
    assert first["option"] == first["agreement"] == first["rehearsal"] == [[0, 1], [2]]
    assert first["torchrun"] == [[0], [1, 2]]
    assert first["one machine"] == [[0, 1, 2]]
    assert "got 4, but there are 3 ranks" in first["too many"]
    assert "got 2, but torchrun set LOCAL_WORLD_SIZE=1" in first["contradiction"]

    exact = combine(3, Case(), [found["errors"] for found in by_rank])
    assert exact.first_wrong is None, str(exact)
    leader, alone, other = (found["messages"] for found in by_rank)
    inside = [("reduce", "inside"), ("broadcast", "inside")]
    assert leader == [inside[0], ("all_reduce", "between"), inside[1]]
    assert alone == [("all_reduce", "between")]
    assert other == inside


def test_a_layout_knows_nodes_leaders_and_ranks():
    layout = NodeLayout.even(5, 2)
    assert layout == NodeLayout((2, 2, 1))
    assert (layout.ranks, layout.leaders) == (5, (0, 2, 4))
    assert [layout.node_of(rank) for rank in range(5)] == [0, 0, 1, 1, 2]
    assert [list(layout.ranks_of(node)) for node in range(3)] == [[0, 1], [2, 3], [4]]
    assert NodeLayout.even(3) == NodeLayout((1, 1, 1))
    assert NodeLayout.even(3, 4) == NodeLayout((3,))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "exchange"] + ["all_to_all"])
def test_every_rank_gets_what_a_collective_owes_it(kind, root, ranks):
    """In a tree, a gather or a scatter everyone gets each tensor once; a ring is a ring."""
    root %= ranks
    received = [Fraction(0)] * ranks
    for rank in range(ranks):
        for receivers, nbytes in sends_of(kind, 120, rank=rank, ranks=ranks, root=root):
            for receiver in receivers:
                assert receiver != rank or nbytes == 0
                received[receiver] += nbytes
    others = [nbytes for rank, nbytes in enumerate(received) if rank != root]
    part = Fraction(120, ranks)
    owed = {
        "all_reduce": (2 * (ranks - 1) * part,) * 2,
        "reduce": (2 * (ranks - 1) * part, (ranks - 1) * part),
        "broadcast": (0, 120),
        "gather": ((ranks - 1) * 120, 0),
        "scatter": (0, 120),
        "all_gather": ((ranks - 1) * 120,) * 2,
        "reduce_scatter": ((ranks - 1) * part,) * 2,
        "all_to_all": ((ranks - 1) * part,) * 2,
    }
    of_root, of_other = owed[kind]
    assert received[root] == of_root
    assert others == [of_other] * (ranks - 1)


SIZES = [GradientSize((40, 25)), GradientSize((60,))]
WHOLE = sum(SIZES)  # 4,240 bytes: divisible by 8
FOUR_BY_TWO = NodeLayout.even(8, 2)


def plan_of(name, ranks_per_node=2):
    return build_message_plan_from(name, {"ranks_per_node": ranks_per_node})


@pytest.mark.parametrize("name", STRATEGIES)
def test_links_carry_what_ranks_send_each_other(name):
    """With a rank on each node all that it sends; with all ranks on one node nothing."""
    for ranks in (2, 5, 8):
        plan = plan_of(name, 1)
        alone = link_bytes(plan, SIZES, NodeLayout.even(ranks))
        assert [sent for sent, _ in alone] == [
            plan.bytes_sent(SIZES, rank, ranks) for rank in range(ranks)
        ]
        for layout in (NodeLayout.even(ranks), NodeLayout.even(ranks, 2)):
            links = link_bytes(plan_of(name), SIZES, layout)
            assert sum(sent for sent, _ in links) == sum(received for _, received in links)
        assert link_bytes(plan, SIZES, NodeLayout((ranks,))) == [(0, 0)]


@pytest.mark.parametrize(("ranks", "nodes"), [(8, 4), (5, 3), (4, 2)])
def test_between_nodes_hierarchical_sends_a_ring_of_the_leaders(ranks, nodes):
    each = Fraction(2 * (nodes - 1) * WHOLE, nodes)
    links = link_bytes(plan_of("hierarchical"), SIZES, NodeLayout.even(ranks, 2))
    assert links == [(each, each)] * nodes
    # A ring over all ranks enters and leaves each node once.
    each = Fraction(2 * (ranks - 1) * WHOLE, ranks)
    links = link_bytes(plan_of("all_reduce_flat"), SIZES, NodeLayout.even(ranks, 2))
    assert links == [(each, each)] * nodes


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("ring", [(1.75, 1.75)] * 4),
        ("gather_scatter", [(6, 6), (2, 2), (2, 2), (2, 2)]),
        ("tree", [(2, 2), (1, 1), (2, 2), (1, 1)]),
        # ranks 4 and 2 apart exchange half, then a quarter, and the same back
        ("halving_doubling", [(3, 3)] * 4),
    ],
)
def test_links_of_four_nodes_with_two_ranks_each(name, links):
    found = link_bytes(plan_of(name), [GradientSize((800,))], FOUR_BY_TWO)
    assert [(sent / 3200, received / 3200) for sent, received in found] == links


def test_hierarchical_with_one_rank_on_each_node_is_all_reduce_flat():
    """On one node alone nothing passes a link; both are what the plan has without a node."""
    for ranks in (2, 4):
        flat = plan_of("all_reduce_flat").operations(SIZES, ranks)
        for plan in (plan_of("hierarchical", 1), build_message_plan_from("hierarchical", {})):
            ours = plan.operations(SIZES, ranks)
            assert [(one.kind, one.nbytes, one.copied_bytes) for one in ours] == [
                (one.kind, one.nbytes, one.copied_bytes) for one in flat
            ]
    together = plan_of("hierarchical", 4).operations(SIZES, 4)
    assert [(one.kind, one.among) for one in together] == [
        ("reduce", "node"),
        ("broadcast", "node"),
    ]
    assert plan_of("hierarchical").operations(SIZES, 1) == []


def test_what_the_plan_says_of_a_step_on_four_nodes_with_two_ranks():
    plan = plan_of("hierarchical")
    steps = plan.operations(SIZES, 8)
    assert [(one.kind, one.among, one.nbytes) for one in steps] == [
        ("reduce", "node", WHOLE),
        ("all_reduce", "leaders", WHOLE),
        ("broadcast", "node", WHOLE),
    ]
    assert sum(one.copied_bytes for one in steps) == WHOLE
    assert plan.bytes_sent(SIZES, 0, 8) == Fraction(WHOLE, 2) + Fraction(6 * WHOLE, 4) + WHOLE
    assert plan.bytes_sent(SIZES, 1, 8) == WHOLE


def test_only_hierarchical_has_operations_among_some_ranks():
    """So a model that ignores ``among`` is right for all others."""
    for name in DISTRIBUTED:
        found = {one.among for one in plan_of(name).operations(SIZES, 4)}
        assert found == {"node", "leaders"} if name == "hierarchical" else found == {"all"}


class ExchangePlan(MessagePlan):
    """A plan of point-to-point messages that does not say who receives them."""

    def operations(self, sizes, ranks):
        return [Operation("exchange", sum(sizes))]


def test_a_plan_that_does_not_say_who_receives_is_refused():
    with pytest.raises(UserError, match=r"ExchangePlan lacks sends\(\)"):
        link_bytes(ExchangePlan(), SIZES, FOUR_BY_TWO)


@pytest.mark.parametrize("given", [0, -1, 1.5])
def test_a_senseless_number_of_ranks_is_refused(given):
    with pytest.raises(
        UserError, match=r"ranks_per_node: got .* give a whole number of at least 1"
    ):
        build_sync("hierarchical", ranks_per_node=given)
