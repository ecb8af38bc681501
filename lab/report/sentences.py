"""A finding: a sentence, its evidence and how far it goes; and the words that all findings share.

``findings`` lists them, ``speed_findings``, ``training_findings`` and ``prediction_findings`` write them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lab.report.view import CellRow, interval_text, seconds_text

REACH, SPEED, BOUND = "How far this carries", "Which is fastest", "What bounds a step"


@dataclass(frozen=True)
class Finding:
    """A sentence and the numbers that it rests on; ``topic`` groups it, ``caution`` marks a limit of what is shown."""

    topic: str
    text: str
    evidence: str = ""
    caution: bool = False


def merged(found: Sequence[Finding]) -> list[Finding]:
    """Say once what holds on several numbers of nodes: sentences of a topic that differ in "On N nodes" alone become one."""
    groups: dict[tuple[str, str], list[tuple[str, Finding]]] = {}
    for finding in found:
        match = re.match(r"On (\d+) nodes\b", finding.text)
        nodes, rest = (match[1], finding.text[match.end() :]) if match else ("", finding.text)
        groups.setdefault((finding.topic, rest), []).append((nodes, finding))
    return [_as_one(members, rest) for (_, rest), members in groups.items()]


def _as_one(members: Sequence[tuple[str, Finding]], rest: str) -> Finding:
    first = members[0][1]
    if len(members) == 1:
        return first
    text = f"On {listed([nodes for nodes, _ in members])} nodes{rest}"
    evidence = "; ".join(f"on {nodes} nodes: {finding.evidence}" for nodes, finding in members)
    return Finding(first.topic, text, evidence, first.caution)


def listed(names: Sequence[str], *, limit: int = 20) -> str:
    """``a, b and c``; what lies beyond ``limit`` is counted."""
    names = list(names) if len(names) <= limit else [*names[:limit], f"{len(names) - limit} more"]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def on_nodes(nodes: int) -> str:
    return f"On {nodes} nodes" if nodes > 1 else "On one node"


def timed(row: CellRow) -> str:
    """``0.421 s [0.415, 0.427]``."""
    return f"{seconds_text(row.step, row.step)} s{interval_text(row)}"
