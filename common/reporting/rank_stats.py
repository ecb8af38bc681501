"""What every rank measured: ``ranks.json``, one row per rank, and ``timeline.json``, one step.

``timed`` chooses the steps to average; ``gather_measurements`` collects the ranks' numbers.
"""

import socket
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, cast

import torch
from msgspec import Struct
from msgspec.structs import asdict

from common.cost_model.memory_model import Memory, MemoryCase, optimizer_cost, predict_memory
from common.distributed.clock_offset import clock_offset
from common.distributed.collectives import gather_objects
from common.profiling.comm_trace import Timeline
from common.reporting.run_files import (
    FORMAT,
    MemoryRow,
    RankRow,
    RanksFile,
    RankTimeline,
    SentMessage,
    StepSeconds,
    TimelineFile,
)
from common.sync.message_cost import GradientSize
from common.sync.none import NoSync
from common.training_engine import StepRecord, TrainingEngine
from common.utils.environment import peak_memory_bytes
from common.utils.typed_json import Step

if TYPE_CHECKING:
    from common.experiment.setup import Setup


class _RecordedStep(TypedDict):
    """A rank's part of ``timeline.json``; begins and ends in seconds."""

    step: Step
    sections: dict[str, list[tuple[float, float]]]
    messages: list[SentMessage]


class _Measured(Struct):
    """What a rank sends to rank 0; without steps it has no row, without --timeline no step."""

    row: RankRow | None
    recorded_step: _RecordedStep | None


def timed(
    history: Sequence[StepRecord], untimed_steps: int, timeline: Timeline | None = None
) -> list[StepRecord]:
    """Return the steps whose times count; all of them if none would be left.

    The first ``untimed_steps`` warm up, and recording slows the steps of the timeline.
    """
    steps = [
        step for step in history[untimed_steps:] if timeline is None or step.step not in timeline
    ]
    return steps or list(history)


def median_seconds(steps: Sequence[StepRecord], period: int = 1) -> dict[str, float] | None:
    """Return median seconds of each section, of the "step", and of "wait" and "wire"; or None.

    "sync" has two parts: "wait", in which the slowest rank still computed, and "wire". For a
    strategy that communicates once in ``period`` steps, medians are over means of ``period`` steps.
    """
    if not steps:
        return None
    rows = [
        step.seconds
        | {
            "step": step.step_seconds,
            "wait": step.wait_seconds,
            "wire": step.seconds["sync"] - step.wait_seconds,
        }
        for step in steps
    ]
    last = max(1, len(rows) - period + 1)
    windows = [rows[begin : begin + period] for begin in range(0, last, period)]
    return {
        name: statistics.median(statistics.fmean(row[name] for row in window) for window in windows)
        for name in rows[0]
    }


def peak_gpu_memory_bytes(device: torch.device) -> int | None:
    """Return the most memory that tensors took on a GPU so far; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def gather_measurements(
    setup: "Setup", engine: TrainingEngine, own_steps: Sequence[StepRecord], memory: Memory | None
) -> None:
    """Have rank 0 write ``ranks.json`` and, if steps were recorded, ``timeline.json``."""
    world, timeline = setup.world, engine.timeline
    steps = timed(own_steps, setup.config.untimed_steps, timeline)
    row = RankRow(
        rank=world.rank,
        host=socket.gethostname(),
        threads=torch.get_num_threads(),
        seconds=cast(StepSeconds, median_seconds(steps, engine.sync.period)),
        peak_memory_bytes=peak_memory_bytes(),
        peak_gpu_memory_bytes=peak_gpu_memory_bytes(world.device),
        memory=cast("MemoryRow | None", memory),
        predicted_memory=cast("MemoryRow | None", _predicted_memory(setup, engine)),
        bytes_sent=timeline.sent_bytes_a_step if timeline else None,
        messages=timeline.messages_a_step if timeline else None,
    )
    mine = _Measured(
        row if steps else None,
        cast(
            "_RecordedStep | None",
            timeline.busiest_step(clock_offset(world)) if timeline else None,
        ),
    )
    all_ranks = gather_objects(world, mine, schema=_Measured)
    if not world.is_rank0 or not steps:
        return
    measured = RanksFile(
        sync=setup.config.sync,
        world_size=world.size,
        first_step=steps[0].step,
        steps=len(steps),
        ranks=[one.row for one in all_ranks if one.row is not None],
    )
    setup.folder.write_json("ranks.json", asdict(measured))
    recorded = [one.recorded_step for one in all_ranks if one.recorded_step is not None]
    if recorded:
        step = TimelineFile(
            format=FORMAT,
            sync=setup.config.sync,
            step=recorded[0]["step"],
            ranks=_from_zero(recorded),
        )
        setup.folder.write_json("timeline.json", step)


def _predicted_memory(setup: "Setup", engine: TrainingEngine) -> Memory | None:
    config, world = setup.config, setup.world
    parameters = list(engine.model.parameters())
    frozen = [p for p in parameters if not p.requires_grad]
    case = MemoryCase(
        plan=engine.sync,
        sizes=GradientSize.of(parameters),
        rank=world.rank,
        ranks=world.size,
        optimizer=optimizer_cost(config.opt, config.momentum),
        untrained=sum(tensor.nbytes for tensor in [*frozen, *engine.model.buffers()]),
    )
    return predict_memory("none" if isinstance(engine.sync, NoSync) else config.sync, case)


def _from_zero(recorded: Sequence[_RecordedStep]) -> list[RankTimeline]:
    """Return every rank's step, with times from the earliest moment of any rank."""
    zero = min(
        begin
        for recorded_step in recorded
        for spans in recorded_step["sections"].values()
        for begin, _ in spans
    )
    return [
        RankTimeline(
            rank=rank,
            sections={
                name: [(begin - zero, end - zero) for begin, end in spans]
                for name, spans in recorded_step["sections"].items()
            },
            messages=[
                message | {"begin": message["begin"] - zero, "end": message["end"] - zero}
                for message in recorded_step["messages"]
            ],
        )
        for rank, recorded_step in enumerate(recorded)
    ]
