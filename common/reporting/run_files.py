"""What rank 0 writes at the end of a run: ``summary.json``, ``ranks.json`` and ``timeline.json``.

A value that a run may not have (a loss with emulated compute) is null, and so is an entry that a
foreign file lacks. Imports no torch.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated

from msgspec import Meta, Struct

from common.distributed.node_identity import layout_of, nodes_text
from common.profiling.records import GradientClaim, RankTimeline, Section
from common.sync.memory_cost import Memory
from common.utils.typed_json import (
    Bytes,
    Count,
    Finite,
    Name,
    Rank,
    Ranks,
    Seconds,
    Share,
    Step,
    Text,
    shown,
)

FORMAT = 1  # of ranks.json and timeline.json

StepTime = Annotated[float, Meta(ge=1e-9, le=1e9)]  # seconds of a whole step, which takes some


class StepSeconds(Struct):
    """Seconds of a step: its sections, the whole, and the two parts of "sync".

    "step" is the sum of the sections in files whose run measured no more.
    """

    data: Seconds
    forward: Seconds
    backward: Seconds
    sync: Seconds
    update: Seconds
    step: StepTime
    wait: Seconds
    wire: Finite  # a difference: rounding may leave it below 0


class RankRow(Struct, kw_only=True):
    """What one rank measured; ``bytes_sent`` and ``messages`` of a step, if they were counted.

    node : the number of its node, see common/distributed/node_identity.py; null in older files.
    memory : null with emulated compute, which never updates. predicted_memory : null for a
    strategy without a closed form. link_sent_bytes, link_received_bytes : of a step, what passed
    the link of this rank's node, for all its ranks and with headers; null on loopback.
    """

    rank: Rank
    host: Text
    node: Rank | None = None
    threads: Ranks
    seconds: StepSeconds
    peak_memory_bytes: Count
    peak_gpu_memory_bytes: Count | None = None  # of the rank's GPU, if it has one
    memory: Memory | None = None
    predicted_memory: Memory | None = None
    bytes_sent: Bytes | None
    messages: Annotated[float, Meta(ge=0, le=1e9)] | None
    link_sent_bytes: Bytes | None = None
    link_received_bytes: Bytes | None = None


class RanksFile(Struct, kw_only=True):
    """``ranks.json``: a row for each rank, in order.

    claim : whether the optimisers got the mean; null with one rank, and in older files.
    """

    format: Count = FORMAT
    sync: Name = "none"
    world_size: Ranks | None = None
    first_step: Step = 1
    steps: Step | None = None
    claim: GradientClaim | None = None
    ranks: Annotated[list[RankRow], Meta(min_length=1, max_length=65_536)]

    def __post_init__(self) -> None:
        found = [row.rank for row in self.ranks]
        size = self.world_size or len(self.ranks)
        if found != list(range(size)):
            raise ValueError(
                f"ranks: got those of {shown(found)}, expected 0 to {size - 1} in order"
            )

    def mean_seconds(self) -> StepSeconds:
        """Return the mean over the ranks of each time, as the run's end and ``lab report`` show."""
        measured = [row.seconds for row in self.ranks]
        means = {
            name: fmean(getattr(seconds, name) for seconds in measured)
            for name in StepSeconds.__struct_fields__
        }
        return StepSeconds(**means)


def shared_nodes(rows: Sequence[RankRow]) -> str:
    """Return which ranks were on which node, if some shared one; "" if none did, or unknown."""
    nodes = [row.node for row in rows]
    layout = layout_of(nodes)
    if None in nodes or len(layout) == len(nodes):
        return ""
    return nodes_text(layout, [row.host for row in rows])


class TimelineFile(Struct):
    """``timeline.json``: one recorded step of every rank."""

    format: Count
    sync: Name
    step: Step
    ranks: Annotated[list[RankTimeline], Meta(max_length=65_536)]


class RunSummary(Struct, kw_only=True):
    """``summary.json``: what the run did and measured. All values are seconds and bytes.

    steps : of all parts of the run. step_seconds, section_seconds, wait_seconds : the mean over the
    ranks in ranks.json, each rank's a median over its timed steps; null if this process trained no
    step. mean_iteration_seconds : rank 0's, over all steps but the first. sync_share : of a step.
    ema : of the averaged weights.
    """

    part: Text
    recipe: Text | None
    sync: Name
    nodes: Ranks
    backend: Text | None
    device: Text
    emulated: bool
    compute: Text
    dataset: Text
    model: Text
    flip: Text
    cutout: Count
    tta: Text
    global_batch_size: Step
    steps: Count
    last_step: Count | None = None
    step_seconds: StepTime | None = None
    mean_iteration_seconds: Seconds | None = None
    section_seconds: dict[Section, Seconds] | None = None
    wait_seconds: Seconds | None = None
    sync_share: Finite | None = None
    samples_per_second: Finite | None = None
    train_loss_last_step: Finite | None = None
    test_loss: Finite | None = None
    test_accuracy: Share | None = None
    ema_test_loss: Finite | None = None
    ema_test_accuracy: Share | None = None
    load_per_core: Finite | None
    total_seconds: Seconds
    wall_seconds: Seconds
    resumed_from: Text | None
    peak_memory_bytes: Count
    peak_gpu_memory_bytes: Count | None
    compile_seconds: Seconds
    folder: Text
    ranks_hold_equal_weights: bool = True
    checkpoint: Text | None = None
