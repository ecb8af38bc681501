"""What every rank measured: ``ranks.json``, one row per rank, and ``timeline.json``, one step.

``timed`` chooses the steps to average; ``gather_measurements`` collects the ranks' numbers.
"""

import socket
import statistics
from collections.abc import Container, Sequence

import torch
from msgspec import Struct
from msgspec.structs import asdict, replace

from common.distributed.clock_offset import clock_offset
from common.distributed.collectives import gather_objects
from common.profiling.records import SECTIONS, Moment, RankTimeline, StepRecord
from common.reporting.run_logger import RunLogger
from common.run_setup import Setup
from common.runs import (
    FORMAT,
    RankRow,
    RanksFile,
    StepSeconds,
    TimelineFile,
)
from common.sync.memory_cost import Memory, MemoryCase
from common.sync.message_cost import GradientSize
from common.training_engine import TrainingEngine
from common.utils.environment import peak_memory_bytes


class _Measured(Struct):
    """What a rank sends to rank 0; without steps it has no row, without --timeline no lane.

    lane : the recorded step, on this rank's clock.
    """

    row: RankRow | None
    lane: RankTimeline | None = None
    clock_offset: Moment = 0.0


def timed(
    history: Sequence[StepRecord], untimed_steps: int, recorded: Container[int] = ()
) -> list[StepRecord]:
    """Return the steps whose times count; all of them if none would be left.

    The first ``untimed_steps`` warm up, and recording slows those of the timeline, ``recorded``.
    """
    warm = [step for step in history[untimed_steps:] if step.step not in recorded]
    return list(warm or history)


def median_seconds(steps: Sequence[StepRecord], period: int = 1) -> StepSeconds | None:
    """Return the median seconds of each section and of the whole step; None without steps.

    "sync" has two parts: "wait", in which the slowest rank still computed, and "wire". For a
    strategy that communicates once in ``period`` steps, medians are over means of ``period`` steps.
    """
    if not steps:
        return None
    columns: dict[str, list[float]] = {
        name: [getattr(step, f"{name}_seconds") for step in steps] for name in SECTIONS
    }
    columns["step"] = [step.step_seconds for step in steps]
    columns["wait"] = [step.wait_seconds for step in steps]
    columns["wire"] = [step.sync_seconds - step.wait_seconds for step in steps]
    last = max(1, len(steps) - period + 1)
    medians = {}
    for name, column in columns.items():
        windows = [column[begin : begin + period] for begin in range(0, last, period)]
        medians[name] = statistics.median(map(statistics.fmean, windows))
    return StepSeconds(**medians)


def peak_gpu_memory_bytes(device: torch.device) -> int | None:
    """Return the most memory that tensors took on a GPU so far; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def gather_measurements(
    setup: Setup, engine: TrainingEngine, logger: RunLogger
) -> RanksFile | None:
    """Have rank 0 write ``ranks.json`` and, if steps were recorded, ``timeline.json``. Collective.

    Returns the content of ``ranks.json``; None on the other ranks, or if no step was trained.
    """
    world = setup.world
    timeline = engine.timeline
    slowed = timeline.to_record if timeline else ()
    steps = timed(logger.own_steps, setup.config.untimed_steps, slowed)
    mine = _Measured(_rank_row(setup, engine, logger, steps))
    if timeline:
        mine.lane = timeline.steps.get(timeline.busiest_step)
        mine.clock_offset = clock_offset(world)
    all_ranks = gather_objects(world, mine, schema=_Measured)
    if not world.is_rank0 or not steps:
        return None
    rows = RanksFile(
        sync=setup.config.sync,
        world_size=world.size,
        first_step=steps[0].step,
        steps=len(steps),
        claim=None if engine.claim is None else engine.claim.result(),
        ranks=[measured.row for measured in all_ranks if measured.row is not None],
    )
    logger.folder.write_json("ranks.json", asdict(rows))
    if timeline and timeline.steps:
        recorded = TimelineFile(
            format=FORMAT,
            sync=setup.config.sync,
            step=timeline.busiest_step,
            ranks=_on_one_clock(all_ranks),
        )
        logger.folder.write_json("timeline.json", asdict(recorded))
    return rows


def _rank_row(
    setup: Setup, engine: TrainingEngine, logger: RunLogger, steps: Sequence[StepRecord]
) -> RankRow | None:
    """Return what this rank measured in ``steps``; None without steps."""
    seconds = median_seconds(steps, engine.sync.plan.period)
    if seconds is None:
        return None
    row = RankRow(
        rank=setup.world.rank,
        host=socket.gethostname(),
        node=setup.world.node,
        threads=torch.get_num_threads(),
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes(),
        peak_gpu_memory_bytes=peak_gpu_memory_bytes(setup.world.device),
        memory=logger.memory,
        predicted_memory=_predicted_memory(setup, engine),
        bytes_sent=None,
        messages=None,
    )
    if engine.timeline:
        row.bytes_sent, row.messages = engine.timeline.sent_a_step()
    before = logger.own_steps[0].step - 1
    counted = logger.link.a_step(steps[0].step - before, steps[-1].step - before)
    if counted is not None:
        row.link_sent_bytes, row.link_received_bytes = counted
    return row


def _predicted_memory(setup: Setup, engine: TrainingEngine) -> Memory:
    config = setup.config
    world = setup.world
    parameters = list(engine.model.parameters())
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    case = MemoryCase(
        sizes=GradientSize.of(parameters),
        rank=world.rank,
        ranks=world.size,
        opt=config.opt,
        momentum=config.momentum,
        untrained=sum(tensor.nbytes for tensor in [*frozen, *engine.model.buffers()]),
    )
    return engine.sync.plan.memory(case)


def _on_one_clock(measured: Sequence[_Measured]) -> list[RankTimeline]:
    """Return every rank's recorded step, in seconds after the first rank began it."""
    recorded = [(rank.lane, rank.clock_offset) for rank in measured if rank.lane is not None]
    zero = min(
        begin - offset
        for lane, offset in recorded
        for spans in lane.sections.values()
        for begin, _ in spans
    )
    return [_earlier(lane, offset + zero) for lane, offset in recorded]


def _earlier(lane: RankTimeline, shift: Moment) -> RankTimeline:
    """Return a rank's step with all its times ``shift`` seconds earlier."""
    sections = {
        name: [(begin - shift, end - shift) for begin, end in spans]
        for name, spans in lane.sections.items()
    }
    messages = [
        replace(message, begin=message.begin - shift, end=message.end - shift)
        for message in lane.messages
    ]
    return RankTimeline(rank=lane.rank, sections=sections, messages=messages)
