"""A run's folder: the types of its files, and the one reader of them.

Rank 0 writes ``config.json`` and ``environment.json`` before the first step, a line of
``metrics.jsonl`` for each step and of ``epochs.jsonl`` for each epoch, and at the end
``ranks.json``, ``timeline.json`` and ``summary.json``. ``read_run`` returns what a finished run
left, ``read_steps`` and ``read_epochs`` its records, which are many. Entries that an older or
foreign file lacks have defaults. Imports no torch.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from common.distributed.node_identity import layout_of, nodes_text
from common.errors import UserError, file_errors
from common.profiling.records import (
    EpochReport,
    GradientClaim,
    RankTimeline,
    Section,
    StepRecord,
)
from common.sync.memory_cost import Memory
from common.utils.typed_json import (
    Bytes,
    Count,
    Facts,
    Finite,
    Name,
    Rank,
    Ranks,
    Seconds,
    Seed,
    Share,
    Step,
    Text,
    check_facts,
    convert,
    read_json,
    read_lines,
    shown,
)

T = TypeVar("T")

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

    @property
    def place(self) -> int | str:
        """What ranks of one node have in common: its number, or in older files its host."""
        return self.host if self.node is None else self.node


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

    def ranks_of_nodes(self) -> Counter[int | str]:
        """Return the number of ranks on each node."""
        return Counter(row.place for row in self.ranks)


def mean_seconds(ranks: Sequence[RankRow]) -> StepSeconds:
    """Return the mean over the ranks of each time, as the run's end and ``lab report`` show."""
    measured = [rank.seconds for rank in ranks]
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

    part: Text = ""
    recipe: Text | None = None
    sync: Name = "none"
    nodes: Ranks = 1
    backend: Text | None = None
    device: Text = ""
    emulated: bool = False
    compute: Text = "real"
    dataset: Text = ""
    model: Text = ""
    flip: Text = ""
    cutout: Count = 0
    tta: Text = ""
    global_batch_size: Step | None = None
    steps: Count = 0
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
    load_per_core: Finite | None = None
    total_seconds: Seconds = 0.0
    wall_seconds: Seconds = 0.0
    resumed_from: Text | None = None
    peak_memory_bytes: Count = 0
    peak_gpu_memory_bytes: Count | None = None
    compile_seconds: Seconds = 0.0
    folder: Text = ""
    ranks_hold_equal_weights: bool = True
    checkpoint: Text | None = None


class RunConfig(Struct, kw_only=True):
    """The entries of ``config.json`` with which a reader computes; a run writes all its settings.

    batch_size : of all ranks together.
    """

    world_size: Ranks
    sync: Name
    batch_size: Step
    seed: Seed
    bucket_mb: Annotated[float, Meta(gt=0, le=1e9)] | Literal["auto"] | None = None
    dataset: Text | None = None
    model: Text | None = None
    backend: Text | None = None
    precision: Name | None = None
    steps_per_epoch: Count = 0
    total_steps: Count | None = None
    untimed_steps: Count | None = None
    compute: Text = "real"


class Machine(Struct, kw_only=True):
    """The entries of ``environment.json`` with which a reader computes; it has many more."""

    usable_cores: Ranks | None = None
    git_commit: Text | None = None


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run left in its folder.

    started : when rank 0 wrote ``config.json``, before the first step. settings : all entries of
    ``config.json``. environment : all of ``environment.json``; empty if an older run has none.
    """

    folder: Path
    started: datetime
    config: RunConfig
    settings: Facts
    machine: Machine
    environment: Facts
    summary: RunSummary
    ranks: RanksFile


def read_run(folder: Path) -> FinishedRun:
    """Return what a finished run left in ``folder``.

    Raises UserError that names the first file that is missing, or does not fit its type.
    """
    config, settings = read_config(folder)
    written = (folder / "config.json").stat().st_mtime
    machine = Machine()
    environment: Facts = {}
    if (folder / "environment.json").exists():
        machine, environment = _read_known(folder / "environment.json", Machine)
    return FinishedRun(
        folder=folder,
        started=datetime.fromtimestamp(written),
        config=config,
        settings=settings,
        machine=machine,
        environment=environment,
        summary=read_run_file(folder / "summary.json", RunSummary),
        ranks=read_run_file(folder / "ranks.json", RanksFile),
    )


def read_config(folder: Path) -> tuple[RunConfig, Facts]:
    """Return the settings with which a reader computes, and all of them, of any run.

    Errors as those of ``read_run``; also UserError if a setting is no plain value.
    """
    return _read_known(folder / "config.json", RunConfig)


def read_timeline(folder: Path) -> TimelineFile | None:
    """Return the recorded step of a run; None if none was recorded. Errors as in ``read_run``."""
    path = folder / "timeline.json"
    if not path.exists():
        return None
    return read_run_file(path, TimelineFile)


def read_steps(folder: Path) -> list[StepRecord]:
    """Return the steps that a run has recorded so far. Errors as those of ``read_run``."""
    return _read_lines(folder / "metrics.jsonl", StepRecord)


def read_epochs(folder: Path) -> list[EpochReport]:
    """Return the epochs that a run has recorded so far. Errors as those of ``read_run``."""
    return _read_lines(folder / "epochs.jsonl", EpochReport)


def read_run_file(path: Path, schema: type[T]) -> T:
    """Return a JSON file of a run. UserError if it is missing or does not fit its schema."""
    with _of_a_run(path):
        return read_json(path, schema)


def _read_lines(path: Path, schema: type[T]) -> list[T]:
    with _of_a_run(path):
        return read_lines(path, schema)


def _read_known(path: Path, schema: type[T]) -> tuple[T, Facts]:
    """Return what a reader computes with, and all facts of the same file."""
    with _of_a_run(path):
        facts = read_json(path, dict[str, Any])
        known = convert(facts, schema, name=str(path))
        check_facts(facts, name=str(path))
    return known, facts


@contextmanager
def _of_a_run(path: Path) -> Iterator[None]:
    """Say in each error about ``path`` why a run's file may be missing or incomplete."""
    try:
        with file_errors(f"{path} cannot be read"):
            yield
    except UserError as error:
        raise UserError(
            f"{error}: the run has not finished, or its folder was not copied completely"
        ) from error
