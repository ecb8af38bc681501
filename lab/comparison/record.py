"""The types of ``results.json``, which holds what a comparison measured; read, check and write it.

A comparison has cells (a strategy on a number of nodes), a cell has repeats (runs), a repeat has a
row for each rank. The fields' names are the keys of the file. docs/comparing.md explains it for
readers. All values are seconds and bytes. A median is over the repeats of the mean over the ranks.
An interval is the 95 % interval of the mean over repeats by Student's t, [null, null] for a single
repeat. Cells of different ``group`` are not comparable.
"""

from collections import Counter
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field, to_builtins

from common.errors import UserError
from common.profiling.records import GradientClaim
from common.runs import Machine, RankRow, StepSeconds, StepTime, TimelineFile
from common.utils.atomic_files import write_atomically
from common.utils.typed_json import (
    Bytes,
    Count,
    Facts,
    Finite,
    LocalTime,
    Name,
    Ranks,
    Seconds,
    Seed,
    Share,
    Step,
    Text,
    check_facts,
    check_version,
    convert,
    encode,
    read_json,
    shown,
)

FORMAT = 1

# Bits per second, or what was given as --rate.
LinkRate = Annotated[str, Meta(pattern=r"^[\w. /]{1,40}\Z")] | Annotated[float, Meta(gt=0, le=1e18)]
BatchSize = Annotated[int, Meta(ge=1, le=2**40)] | Annotated[float, Meta(gt=0, le=2**40)]
BucketSize = Annotated[float, Meta(gt=0, le=1e9)]  # MiB
Status = Literal["done", "partial", "failed", "pending"]
_Texts = Annotated[list[Text], Meta(max_length=100_000)]


class Repeat(Struct, kw_only=True):
    """A run of a cell. One that failed has a message, and measured nothing.

    folder : relative to the comparison's, or absolute in a report on runs started by hand.
    losses : step and loss; None with emulated compute. step_seconds : step and its whole time on
    rank 0, the first and the recorded ones too. train_accuracy : of the last step's batch.
    machine : ``MACHINE_FACTS`` of the run. claim : what each rank's optimiser got; None with one
    rank, with emulated compute, and in older files.
    """

    repeat: Count = 0
    folder: Text
    seed: Seed
    status: Literal["done", "failed"]
    message: Text | None = None
    started: LocalTime | None = None
    ranks: Annotated[list[RankRow], Meta(max_length=65_536)]
    timed_steps: Step | None = None
    losses: Annotated[list[tuple[Step, Finite | None]], Meta(max_length=10_000_000)] = []
    step_seconds: Annotated[list[tuple[Step, Seconds]], Meta(max_length=10_000_000)] = []
    test_accuracy: Share | None = None
    test_loss: Finite | None = None
    train_accuracy: Share | None = None
    precision: Text | None = None
    mean_iteration_seconds: StepTime | None = None
    load_per_core: Finite | None = None
    seconds_to_accuracy: Seconds | None = None
    steps_to_accuracy: Count | None = None
    equal_weights: bool = True
    machine: Facts | None = None
    crowded: bool = False
    claim: GradientClaim | None = None

    @property
    def done(self) -> bool:
        return self.status == "done"


class Medians(StepSeconds, kw_only=True):
    """Medians over the repeats of the mean over the ranks; None if unknown.

    root_bytes_sent, others_bytes_sent : of rank 0, and of the mean of the other ranks.
    """

    peak_memory_bytes: Bytes | None = None
    root_bytes_sent: Bytes | None = None
    others_bytes_sent: Bytes | None = None


class Cell(Struct, kw_only=True):
    """A strategy on a number of nodes, each with ``ranks_per_node`` ranks.

    bucket_mb : only of "ddp-auto" and its like: the MiB of a bucket that the prediction chose; None
    for the default sizes.
    """

    id: Name
    sync: Name
    nodes: Ranks
    ranks_per_node: Ranks = 1
    rate: LinkRate | None
    batch_size: BatchSize | None
    exact: bool
    group: Annotated[int, Meta(ge=0, le=100_000)] = 0
    oversubscribed: bool = False
    status: Status = "pending"
    message: Text | None = None
    repeats: Annotated[list[Repeat], Meta(max_length=100_000)] = []
    medians: Medians | None = field(name="median", default=None)
    intervals: dict[Name, tuple[Finite | None, Finite | None]] | None = field(
        name="interval", default=None
    )
    bucket_mb: BucketSize | UnsetType | None = UNSET

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes together."""
        return self.nodes * self.ranks_per_node

    @property
    def runs(self) -> list[Repeat]:
        """The successful repeats."""
        return [repeat for repeat in self.repeats if repeat.done]


class PredictedCell(Struct, kw_only=True):
    """What the event model says about a cell.

    in_scope : whether the model promises 20 %, else ``why`` not. bytes_sent : of each rank, a step.
    link_bytes : sent and received over each emulated node's link, a step, without headers.
    """

    step_seconds: StepTime
    compute_seconds: Seconds = 0.0
    sync_seconds: Seconds = 0.0
    in_scope: bool = False
    why: Text = ""
    bucket_mb: BucketSize | None = None
    bytes_sent: Annotated[list[Bytes], Meta(max_length=65_536)] = []
    link_bytes: Annotated[list[tuple[Bytes, Bytes]], Meta(max_length=65_536)] = []


class Prediction(Struct, kw_only=True):
    """What was predicted before the first run; ``cells`` by their ids."""

    made: LocalTime
    cells: dict[Name, PredictedCell]
    calibration: Facts = {}


class Plan(Struct, kw_only=True):
    """What nodes must agree on in a comparison whose runs others start (lab/compare/jobs.py).

    code : digests by file. to_do : numbers of the missing runs. What each run does follows from the
    comparison's settings.
    """

    code: dict[Text, Text]
    to_do: list[Count] | UnsetType = UNSET


class GroupSettings(Struct, kw_only=True):
    """The settings of all runs, or of a group, with which a reader computes; a file has more."""

    dataset: Text | None = None
    model: Text | None = None
    compute: Text | None = None
    scaling: Literal["strong", "weak"] | None = None
    batch_size: BatchSize | None = None
    num_classes: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    until_accuracy: Share | None = None
    rates: list[LinkRate | None] | None = None
    usable_cores: Ranks | None = None
    git_commit: Text | None = None


class _Known(Struct):
    """The facts of a comparison with which a reader computes, all at once."""

    settings: GroupSettings
    environment: Machine
    groups: dict[Text, GroupSettings]


class Comparison(Struct, kw_only=True):
    """The whole file.

    settings : what was asked for, environment : of the machine, and groups : of each group by its
    number, where others started the runs, may hold facts that are only shown. ``known`` reads those
    with which a reader computes.
    warnings : what a reader must know first. differences : why runs cannot be compared. skipped :
    folders without a run to report, and why. prediction : made without these runs, if any. plan :
    if other programs start the runs. timelines : by cell, one step.
    """

    format: Count = FORMAT
    kind: Literal["compare", "report"]
    created: LocalTime
    finished: bool
    emulated: bool = False
    settings: Facts
    environment: Facts
    warnings: _Texts
    differences: _Texts = []
    skipped: _Texts = []
    prediction: Prediction | None = None
    groups: dict[Text, Facts] = {}
    cells: Annotated[list[Cell], Meta(max_length=100_000)]
    timelines: dict[Name, TimelineFile]
    plan: Plan | UnsetType = UNSET

    def known(self, group: int) -> GroupSettings:
        """Return the settings of a group with which a reader computes: the shared and its own."""
        own = self.groups.get(str(group), {})
        return convert(self.settings | own, GroupSettings, name="settings")


def read_comparison(path: Path) -> Comparison:
    """Return the content of a ``results.json``.

    Raises UserError with the file's name if it is cut, of another program or of a newer format, or
    if a value in it is impossible.
    """
    try:
        entries = read_json(path, dict[str, Any])
        check_version(entries.get("format"), FORMAT, name=str(path))
        comparison = convert(entries, Comparison, name=str(path))
        check(comparison, name=str(path))
    except UserError as error:
        raise UserError(f"{error}; the file is unchanged") from error
    return comparison


def write_comparison(path: Path, comparison: Comparison) -> None:
    """Write ``results.json`` completely or not at all.

    Raises UserError, and leaves the file as it is, if a value does not fit the schema.
    """
    name = f"{path} cannot be written"
    check(convert(to_builtins(comparison), Comparison, name=name), name=name)
    write_atomically(path, encode(comparison, indent=1) + b"\n")


def check(comparison: Comparison, *, name: str) -> None:
    """Raise UserError if a fact is impossible, or entries do not fit each other.

    name : of the file, with which the message begins.
    """
    ids = Counter(cell.id for cell in comparison.cells)
    for cell_id, count in ids.items():
        if count > 1:
            raise UserError(f"{name}: two cells have the id {cell_id}")
    for cell in comparison.cells:
        for repeat in cell.repeats:
            _check_repeat(repeat, cell, comparison.kind, name)
    facts = {
        "settings": comparison.settings,
        "environment": comparison.environment,
        "groups": comparison.groups,
    }
    convert(facts, _Known, name=name)
    check_facts(comparison.environment, name=f"{name}: environment")
    check_facts(comparison.settings, name=f"{name}: settings")
    if comparison.prediction is not None:
        check_facts(comparison.prediction.calibration, name=f"{name}: prediction.calibration")
    for key, group in comparison.groups.items():
        check_facts(group, name=f"{name}: groups[{shown(key)}]")


def _check_repeat(repeat: Repeat, cell: Cell, kind: str, name: str) -> None:
    """Raise UserError if a repeat's folder may be outside of its comparison, or a rank is missing.

    kind : of the comparison; a report's runs may be anywhere.
    """
    path = PurePath(repeat.folder)
    if kind == "compare" and (path.is_absolute() or ".." in path.parts):
        raise UserError(
            f"{name}: cell {cell.id} has a repeat in {shown(repeat.folder)}, expected a folder in "
            "the comparison's own"
        )
    if repeat.done and len(repeat.ranks) != cell.ranks:
        raise UserError(
            f"{name}: a repeat of cell {cell.id} has {len(repeat.ranks)} ranks, expected "
            f"{cell.ranks}"
        )
    if repeat.claim is not None and not _is_of_ranks(repeat.claim, cell.ranks):
        raise UserError(
            f"{name}: a repeat of cell {cell.id} has a claim that is not a weight of each "
            f"rank's gradient in what each of {cell.ranks} ranks got, with their residue"
        )


def _is_of_ranks(claim: GradientClaim, ranks: int) -> bool:
    """Return whether a claim has no weights, or those of so many ranks and their residue."""
    if claim.weights is None:
        return True
    sizes = {len(row) for row in claim.weights if row is not None}
    return len(claim.weights) == ranks and sizes <= {ranks} and claim.residue is not None
