"""The bytes that a step puts on the link of each node, by a strategy's plan. No torch."""

from collections.abc import Sequence
from fractions import Fraction

from common.sync.node_layout import NodeLayout
from common.sync.plans.base import MessagePlan


def link_bytes(
    plan: MessagePlan, sizes: Sequence[int], layout: NodeLayout
) -> list[tuple[Fraction, Fraction]]:
    """Return the payload bytes that each node sends and receives in ``period`` steps.

    Messages between ranks of one node do not pass its link.

    sizes : as for ``plan.operations``. layout : which ranks share a link. Raises UserError if a
    plan with point-to-point messages does not say who receives them.
    """
    sent = [Fraction(0)] * len(layout.sizes)
    received = [Fraction(0)] * len(layout.sizes)
    for rank in range(layout.ranks):
        sender = layout.node_of(rank)
        for receivers, nbytes in plan.sends(sizes, rank, layout.ranks):
            for receiver in map(layout.node_of, receivers):
                if receiver != sender:
                    sent[sender] += nbytes
                    received[receiver] += nbytes
    return list(zip(sent, received, strict=True))
