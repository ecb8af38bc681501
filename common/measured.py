"""What every rank measured: ``ranks.json``, a row a rank, and ``timeline.json``, one step of all ranks.

``timed`` chooses the steps that count; ``gather_measurements`` puts the ranks' numbers together, for rank 0 to write.
"""

import socket
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from common.clock import clock_offset
from common.distributed import World, gather_objects
from common.records import RunFolder, peak_memory_bytes
from common.timeline import Timeline
from common.training_engine import StepRecord

FORMAT = 1


def timed(history: Sequence[StepRecord], untimed_steps: int, timeline: Timeline | None = None) -> list[StepRecord]:
    """Return the steps whose times count: not the first ``untimed_steps``, which warm up, nor those of the timeline; all of them
    where none would be left."""
    steps = [step for step in history[untimed_steps:] if timeline is None or step.step not in timeline]
    return steps or list(history)


def median_seconds(steps: Sequence[StepRecord]) -> dict[str, float] | None:
    """Return the median seconds of each section; None without steps."""
    if not steps:
        return None
    return {name: statistics.median(step.seconds[name] for step in steps) for name in steps[0].seconds}


def gather_measurements(world: World, folder: RunFolder, history: Sequence[StepRecord], *, sync: str, untimed_steps: int,
                        timeline: Timeline | None) -> None:
    """Have rank 0 write ``ranks.json``, and ``timeline.json`` where steps were recorded. Collective.

    ``history`` : this rank's own steps of this process.
    """
    steps = timed(history, untimed_steps, timeline)
    offset = clock_offset(world)
    rows = gather_objects(world, (_row(world, steps, timeline), timeline.busiest_step(offset) if timeline else None))
    if not world.is_root or not steps:
        return
    folder.write_json("ranks.json", {"format": FORMAT, "sync": sync, "world_size": world.size, "first_step": steps[0].step,
                                     "steps": len(steps), "ranks": [row for row, _ in rows]})
    lanes = [lane for _, lane in rows if lane is not None]
    if lanes:
        folder.write_json("timeline.json", {"format": FORMAT, "sync": sync, "step": lanes[0]["step"], "ranks": _from_zero(lanes)})


def _row(world: World, steps: Sequence[StepRecord], timeline: Timeline | None) -> dict[str, Any]:
    seconds = median_seconds(steps)
    if seconds is not None:
        seconds |= {"step": statistics.median(sum(step.seconds.values()) for step in steps),
                    "wait": statistics.median(step.wait_seconds for step in steps),
                    "wire": statistics.median(step.seconds["sync"] - step.wait_seconds for step in steps)}
    return {"rank": world.rank, "host": socket.gethostname(), "threads": torch.get_num_threads(), "seconds": seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            "bytes_sent": timeline.sent_bytes_a_step if timeline else None,
            "messages": timeline.messages_a_step if timeline else None}


def _from_zero(lanes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every rank's step with times counted from the first moment of any."""
    zero = min(begin for lane in lanes for spans in lane["sections"].values() for begin, _ in spans)
    return [{"rank": rank,
             "sections": {name: [[begin - zero, end - zero] for begin, end in spans] for name, spans in lane["sections"].items()},
             "messages": [message | {"begin": message["begin"] - zero, "end": message["end"] - zero}
                          for message in lane["messages"]]} for rank, lane in enumerate(lanes)]
