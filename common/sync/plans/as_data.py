"""A plan as plain data for a program in another language: lab/whatif/plans.js. Imports no torch."""

from dataclasses import asdict
from typing import Any

from common.errors import UserError
from common.sync.plans.base import MessagePlan
from common.sync.plans.rings import RoundsPlan

_FOLLOW_FROM_LINES = ("operations", "sends", "members", "layout", "bytes_sent", "update_share")


def plan_data(plan: MessagePlan) -> dict[str, Any]:
    """Return what a plan sends: its lines, and what else decides a step, ready for JSON.

    "options" are the plan's by name, "groups" its lines for each piece (``LineGroup``). Raises
    UserError if the plan has no lines, or says by hand what would follow from them.
    """
    written = [name for name in _FOLLOW_FROM_LINES if not _follows_from_lines(type(plan), name)]
    if written or not plan.messages:
        method = written[0] if written else "operations"
        raise UserError(
            f"{type(plan).__name__} writes {method}() by hand, so only Python knows what it sends: "
            "state its messages as lines (CONTRIBUTING.md says how)"
        )
    return {
        "period": plan.period,
        "shards_update": plan.shards_update,
        "caveat": plan.caveat,
        "options": {name: value for name, value in vars(plan).items() if _is_plain(value)},
        "groups": [asdict(group) for group in plan.messages],
    }


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str)


def _follows_from_lines(plan: type[MessagePlan], method: str) -> bool:
    stated = getattr(plan, method)
    return stated in (getattr(MessagePlan, method), getattr(RoundsPlan, method))
