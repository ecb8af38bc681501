"""Numbers for the pictures of ``lab whatif``: steps and clusters of many kinds.

Their shapes are those of lab/whatif/pictures.js; the numbers obey simple laws, so that a test can
compute them, too.
"""

from typing import Any

from common.sync import STRATEGIES
from lab.strategy_style import color, marker_outline

NODES = [2**exponent for exponent in range(13)]

Picture = dict[str, Any]


def strategies() -> list[dict[str, str]]:
    """Return how the page states the project's strategies."""
    return [
        {"name": name, "color": color(name), "marker": marker_outline(name)} for name in STRATEGIES
    ]


def timeline(
    messages: int,
    *,
    seconds: float = 0.1,
    wire: float = 1.0,
    forward_waits: bool = False,
    strategy: str = "ddp",
) -> Picture:
    """Return one step whose forward, backward and update take 3, 6 and 1 tenths of ``seconds``.

    wire : how long all messages take, relative to backward. forward_waits : a message must
    end before forward begins.
    """
    exposed = []
    sent = []
    begin_forward = 0.0
    if forward_waits:
        begin_forward = 0.1 * seconds
        exposed.append([0.0, begin_forward])
        sent.append(_message(0.0, begin_forward, 0.0, [[0.0, begin_forward]], "all_gather"))
    begin_backward = begin_forward + 0.3 * seconds
    end_backward = begin_backward + 0.6 * seconds
    now = begin_backward
    for index in range(messages):
        ready = begin_backward + 0.6 * seconds * (index + 1) / messages
        begin = max(now, ready)
        now = begin + wire * 0.6 * seconds * (0.5 if index % 3 else 2.0) / messages
        own = [[max(begin, end_backward), now]] if now > end_backward else []
        sent.append(_message(begin, now, ready, own, "all_reduce"))
    end_sync = max(now, end_backward)
    if end_sync > end_backward:
        exposed.append([end_backward, end_sync])
    total = end_sync + 0.1 * seconds
    passes = [
        {"name": "forward", "begin": begin_forward, "end": begin_backward},
        {"name": "backward", "begin": begin_backward, "end": end_backward},
        {"name": "update", "begin": end_sync, "end": total},
    ]
    step = {
        "total_seconds": total,
        "about": "",
        "passes": passes,
        "messages": sent,
        "exposed": exposed,
    }
    return {"strategy": strategy, "nodes": 4, "timeline": step}


def _message(
    begin: float, end: float, ready: float, exposed: list[list[float]], kind: str
) -> Picture:
    return {
        "kind": kind,
        "nbytes": 26214400.0 * (end - begin),
        "count": 1,
        "begin": begin,
        "end": end,
        "ready": ready,
        "exposed": exposed,
    }


def scaling(
    names: list[str], nodes: int, *, seconds: float = 0.1, bands: int = 4, measured: bool = True
) -> Picture:
    """Return curves of a step that falls with the nodes and messages that grow with them."""
    curves = []
    for index, name in enumerate(names):
        counts = sorted({*NODES, nodes})
        points = [_point(count, index, seconds, index < bands) for count in counts]
        curves.append({"strategy": name, "points": points})
    found = []
    if measured:
        for index, name in enumerate(names[:3]):
            for count in (1, 2, 4, 8):
                point = _point(count, index, seconds, False)
                note = "median of 3 repeats"
                found.append(
                    {
                        "strategy": name,
                        "nodes": count,
                        "seconds": 1.04 * point["step_seconds"],
                        "efficiency": point["efficiency"] / 1.04,
                        "note": note,
                    }
                )
    return {"nodes": nodes, "focus": names[0], "curves": curves, "measured": found}


def _point(nodes: int, index: int, seconds: float, band: bool) -> Picture:
    """Return a step of ``seconds`` divided by the nodes, and messages a little apart."""
    messages = 0.0 if nodes == 1 else seconds * (0.1 + 0.07 * index) * (1 + 0.002 * index * nodes)
    step = seconds / nodes + messages
    efficiency = seconds / nodes / step
    point = {"nodes": nodes, "step_seconds": step, "efficiency": efficiency}
    if band:
        point["low_seconds"] = step - 0.3 * messages
        point["high_seconds"] = step + 0.4 * messages
        point["low_efficiency"] = seconds / nodes / point["high_seconds"]
        point["high_efficiency"] = seconds / nodes / point["low_seconds"]
    return point


def cases() -> dict[str, dict[str, Picture]]:
    """Return samples of all pictures, by what is special about them."""
    everything = list(STRATEGIES)
    few = ["ddp", "gather_scatter", "all_reduce", "overlapped"]
    flat = "gather_scatter_flat"
    steps = {
        "four nodes": timeline(7, wire=1.3),
        "one node": {**timeline(0, strategy="none"), "nodes": 1},
        "most nodes": timeline(30, wire=12.0, strategy=flat),
        "all strategies": timeline(8, wire=1.4, strategy="hierarchical"),
        "microseconds": timeline(3, seconds=4e-6),
        "hours": timeline(12, seconds=9000.0, forward_waits=True, strategy="sharded"),
        "one message": timeline(1, wire=0.4, strategy=flat),
        "400 messages": timeline(400, wire=1.5, strategy="all_reduce"),
    }
    curves = {
        "four nodes": scaling(few, 4),
        "one node": scaling(few, 1),
        "most nodes": scaling(few, 4096, measured=False),
        "all strategies": scaling(everything, 16),
        "microseconds": scaling([flat], 2, seconds=4e-6),
        "hours": scaling(few, 3000, seconds=9e4),
        "one message": scaling(["ddp"], 64, bands=0),
        "400 messages": scaling(everything[1:10], 8, seconds=2.0),
    }
    return {name: {"timeline": steps[name], "curves": curves[name]} for name in steps}
