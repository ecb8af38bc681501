"""A finding (a sentence, its evidence, its limits), and the wording that all findings share."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lab.report.view import CellRow, interval_text, seconds_text

SPEED, EQUAL = "Which is fastest", "Do they compute the same"
BOUND, REACH = "What takes the time", "Limits"


@dataclass(frozen=True)
class ReportFinding:
    """A sentence and the numbers it rests on.

    caution : a limit of what the numbers show; the page folds these into "Limits".
    wrong : the numbers contradict what a strategy claims; shown in red, before everything else.
    """

    topic: str  # the page groups findings by it
    text: str
    evidence: str = ""
    caution: bool = False
    wrong: bool = False


def merged(found: Sequence[ReportFinding]) -> list[ReportFinding]:
    """Join the findings of a topic whose sentences differ only in "On N nodes"."""
    groups: dict[tuple[str, str], list[tuple[str, ReportFinding]]] = {}
    for finding in found:
        match = re.match(r"On (\d+) nodes\b", finding.text)
        nodes, rest = (match[1], finding.text[match.end() :]) if match else ("", finding.text)
        groups.setdefault((finding.topic, rest), []).append((nodes, finding))
    return [_joined(members, rest) for (_, rest), members in groups.items()]


def _joined(members: Sequence[tuple[str, ReportFinding]], rest: str) -> ReportFinding:
    first = members[0][1]
    if len(members) == 1:
        return first
    return replace(
        first,
        text=f"On {listed([nodes for nodes, _ in members])} nodes{rest}",
        evidence="; ".join(f"on {nodes} nodes: {finding.evidence}" for nodes, finding in members),
    )


def listed(names: Sequence[str], *, limit: int = 20) -> str:
    """Return ``a, b and c``; of more than ``limit`` names, the number of the others."""
    names = list(names) if len(names) <= limit else [*names[:limit], f"{len(names) - limit} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def strategies(names: Sequence[str], *, of: int) -> str:
    """Return the names as a list; ``all 5 strategies`` if these are all of more than two."""
    return f"all {of} strategies" if len(names) == of > 2 else listed(names)


def on_nodes(nodes: int) -> str:
    return f"On {nodes} nodes" if nodes > 1 else "On one node"


def timed(row: CellRow) -> str:
    """Return the step's median with its interval: ``0.421 s [0.415, 0.427]``."""
    return f"{seconds_text(row.step, row.step)} s{interval_text(row)}"
