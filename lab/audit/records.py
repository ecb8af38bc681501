"""What the probe writes, one struct for each kind of record.

probe/__init__.py describes the kinds. ``decode_record`` makes a record of a line: a field that the
probe always writes is required; a field with a default is left out in some records, as where a part
of the probe has failed. The probe's short keys get names here. What a script's own objects said
(indices, ``replicas``, an exit status) may be of any type.
"""

import json
from typing import Any, Literal

import msgspec

Samples = tuple[int, int]  # the place of the first of a process's numbers, and how many
Mode = Literal["train", "eval", "both"]
Index = Any  # as a sampler draws it: mostly an int, but anything that can be a key


class CodeLine(msgspec.Struct, frozen=True, array_like=True):
    """A line of the audited script."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}" if self.text else f"{self.file}:{self.line}"


class AnyRecord(msgspec.Struct, tag_field="k"):
    """What all records have: ``t``, in seconds of the machine's clock."""

    t: float


class LineRecord(AnyRecord):
    """What all records of a line of the script have: ``at``, None where it is not known."""

    at: CodeLine | None


class EpochRecord(AnyRecord):
    """What all records of one iteration over a loader have."""

    loader_number: int = msgspec.field(name="l")
    epoch: int


class OptimizerRecord(AnyRecord):
    """What all records of one step of an optimiser have."""

    optimizer_number: int = msgspec.field(name="o")
    step: int


# --- the process ---


class Start(AnyRecord, tag="start"):
    python: str
    executable: str | None
    variables: dict[str, str]
    hinted_rank: int | None = msgspec.field(name="hint")
    parent_pid: int | None = msgspec.field(name="ppid", default=None)


class TorchImported(AnyRecord, tag="torch"):
    version: str


class Trouble(AnyRecord, tag="trouble"):
    part: str
    text: str


class Cut(AnyRecord, tag="cut"):
    """The audit ends a script that goes on for too long."""

    step: int


class Error(LineRecord, tag="error"):
    type: str
    message: str
    after_cut: bool


class ProcessEnd(AnyRecord, tag="end"):
    """The process ends in good order; ``replaced``: functions of the probe that are replaced."""

    status: Any
    after_cut: bool
    replaced: list[str] = []


class Searched(LineRecord, tag="searched"):
    """The script looked through Python's memory."""

    what: str


# --- the group and its messages ---


class Group(LineRecord, tag="group"):
    rank: int
    world_size: int = msgspec.field(name="world")


class DeviceMesh(LineRecord, tag="mesh"):
    """A DeviceMesh was built."""


class Join(LineRecord, tag="join"):
    """The script entered torch.distributed's Join."""


class CallGroup(msgspec.Struct, array_like=True):
    """The group of a call, or the one that new_group makes; not that of all ranks."""

    name: str | None
    ranks: list[int]


class CollectiveCall(LineRecord, tag="call"):
    """A collective began; ``content`` is None where the probe could not read its arguments."""

    number: int = msgspec.field(name="c")
    name: str
    step: int
    content: Literal["gradient", "weights", "other"] | None = None
    parameter: int | None = None
    op: str | None = None
    size: int | None = None
    group: CallGroup | None = None
    nbytes: int = msgspec.field(name="bytes", default=0)
    dtype: str | None = None
    shape: list[int] | None = None
    peer: int | None = None
    is_async: bool = msgspec.field(name="async", default=False)
    within: Literal["forward", "backward"] | None = None
    wanted_world_size: int | None = msgspec.field(name="world", default=None)
    meets: str | None = None
    tensor: int | None = None
    values: list[float] | None = None


class Done(AnyRecord, tag="done"):
    call_number: int = msgspec.field(name="c")
    seconds: float
    own_thread: bool
    error: str | None
    wait_seconds: float | None = None


class Stands(LineRecord, tag="stands"):
    call_number: int | None = msgspec.field(name="c")
    name: str | None


class Stack(LineRecord, tag="stack"):
    """Where the main thread stood when the run had to be ended."""


# --- the model and its passes ---


class DdpBuilt(LineRecord, tag="ddp"):
    """DDP was built: it averages ``numbers`` gradient entries over these ranks."""

    nbytes: int = msgspec.field(name="bytes")
    numbers: int = 0
    ranks: list[int] = []


class DdpMissed(LineRecord, tag="missed"):
    """A backward gave other gradients than DDP averages; by the names of parameters."""

    step: int
    unused: list[str] = []
    late: list[str] = []
    converted: list[str] = []


class DdpHook(LineRecord, tag="hook"):
    """DistributedDataParallel got a communication hook."""

    name: str | None = None


class FsdpBuilt(LineRecord, tag="fsdp"):
    """FSDP shards a model."""


class Forward(msgspec.Struct, array_like=True):
    """A forward pass that a backward has reached; ``through`` is DDP, a bypass of it, or a module.

    samples, input_hash : of the first tensor that it got; None without any.
    mode : of the model; "both" if its parts differ.
    dtypes : of what its modules returned.
    """

    samples: int | None
    input_hash: int | None
    through: Literal["ddp", "bypass", "module"]
    mode: Mode | None = None
    dtypes: list[str] = []


class Loss(msgspec.Struct):
    """The loss from which a backward began; see probe/__init__.py."""

    node: str
    reduction: str | None
    arriving: float
    samples: int | None
    target_hash: int | None
    value: float | None = None
    counted: float | None = None


class Backward(LineRecord, tag="backward"):
    step: int
    micro: int
    forwards: list[Forward]
    loss: Loss | None
    synced: bool | None
    seconds: float
    exposed_seconds: float | None
    optimizers: list[int] | None = None


class Evaluation(LineRecord, tag="eval"):
    """The first forward that does not train after a step; ``drew``: it drew random numbers."""

    step: int
    buffers: list[tuple[str, list[float]]]
    batchnorm_layers: int = msgspec.field(name="batchnorm")
    mode: Mode | None = None
    dtypes: list[str] = []
    drew: bool = False


class Autocast(LineRecord, tag="autocast"):
    """The script has left autocast, switched on in training; ``model``: one ran within it."""

    dtype: str
    model: bool


class Load(LineRecord, tag="load"):
    """A module has loaded a state dict; the numbers count keys."""

    step: int
    matched: int
    missing: int
    unexpected: int
    names: list[str]


class RandomForward(AnyRecord, tag="random"):
    step: int
    state_hash: int | None = msgspec.field(name="hash")
    at: CodeLine | None = None


# --- the optimisers ---


class Parameter(msgspec.Struct, array_like=True):
    """A parameter of an optimiser. ``tensor`` is a number of its own, whoever holds it."""

    key: str
    name: str
    shape: list[int]
    dtype: str
    numel: int
    tensor: int


class Parameters(AnyRecord, tag="params"):
    optimizer_number: int = msgspec.field(name="o")
    optimizer: str
    built: int
    rows: list[Parameter]
    at: CodeLine | None = None
    model: CodeLine | None = None


class Weights(OptimizerRecord, tag="weights"):
    """The weights before a step; ``last``: with which the script ends, so no step follows."""

    values: Samples
    last: bool = False


class Clip(msgspec.Struct, array_like=True):
    """A call that clips gradients; ``limit`` and ``norm`` are None where they are no plain number.

    collectives : the calls that this step had before it.
    unscaled : GradScaler had divided the gradients by its scale.
    """

    kind: Literal["norm", "value"]
    limit: float | None
    norm: float | None
    collectives: int
    at: CodeLine | None
    unscaled: bool = False


class Step(OptimizerRecord, tag="step"):
    """An update of an optimiser; ``own`` and ``got`` are None where the probe has not sampled."""

    optimizer: str
    lr: list[float | None]
    settings: dict[str, Any]
    scale: float
    clips: list[Clip]
    at: CodeLine | None
    micro: int = 0
    kept: int = 0
    own: Samples | None = None
    got: Samples | None = None
    unclipped: Samples | None = None
    own_norm: float | None = None
    got_norm: float | None = None

    @property
    def sampled(self) -> bool:
        """Whether its gradients were sampled."""
        return self.own is not None and self.got is not None


class Stepped(OptimizerRecord, tag="stepped"):
    seconds: float
    state: int | None


class Unapplied(LineRecord, tag="unapplied"):
    """Parameters that get gradients and lie in no optimiser, of a model that one trains.

    numbers, every : how many numbers these parameters have, and all of the model.
    """

    names: list[str]
    steps: int
    numbers: int
    every: int


# --- the loaders ---


class Loader(LineRecord, tag="loader"):
    number: int = msgspec.field(name="l")
    dataset: str
    length: int | None
    batches: int | None
    sampler: str | None
    replicas: Any
    inner_length: int | None
    content: int | None
    made: CodeLine | None = None

    @property
    def line(self) -> CodeLine | None:
        """The line that made it, else one that iterates over it."""
        return self.made or self.at


class Draw(EpochRecord):
    """Samples that a loader gave in an epoch, or would still have given."""

    indices: list[Index] | None
    inner: list[Index] | None

    @property
    def innermost(self) -> list[Index]:
        """The indices in the innermost dataset, or where these are not known, the outer ones."""
        return self.inner or self.indices or []


class Batch(Draw, tag="batch"):
    contents: list[Any] | None


class Rest(Draw, tag="rest"):
    """What the script would still have been given after the cut."""


class Trained(EpochRecord, tag="trained"):
    """A backward or an update followed a batch of the iteration."""


class EpochOver(EpochRecord, tag="epoch"):
    batches: int
    cut: bool


class Drew(AnyRecord, tag="drew"):
    """A batch was made with random numbers; ``states``: hashes of the generators before it."""

    indices: list[Index]
    states: dict[str, int]


class FileRecord(LineRecord):
    """What the records of a file of tensors have."""

    step: int
    path: str


class Saved(FileRecord, tag="saved"):
    """The script calls torch.save; ``holds``: kinds of content."""

    holds: list[str] = []


class Loaded(FileRecord, tag="loaded"):
    """The script calls torch.load."""


# --- clocks ---


class Clock(LineRecord, tag="clock"):
    """A mean time that the script formed, or a loss that it printed, which has no numbers.

    probe/clocks.py says what the numbers mean.
    """

    event: Literal["mean", "loss_printed"]
    divisor: int | float = 1
    unit: int | float = 1
    intervals: int = 0
    scale: float = 0.0
    steps: float = 0.0
    backwards: float = 0.0
    first: bool = False
    before_update: int = 0
    update_timed: bool = False
    device_pending: int = 0
    after_cut: bool = False


Record = (
    Start
    | TorchImported
    | Trouble
    | Cut
    | Error
    | ProcessEnd
    | Searched
    | Group
    | DeviceMesh
    | Join
    | CollectiveCall
    | Done
    | Stands
    | Stack
    | DdpBuilt
    | DdpMissed
    | DdpHook
    | FsdpBuilt
    | Backward
    | Evaluation
    | Autocast
    | RandomForward
    | Load
    | Parameters
    | Weights
    | Step
    | Stepped
    | Unapplied
    | Loader
    | Batch
    | Rest
    | Trained
    | EpochOver
    | Drew
    | Saved
    | Loaded
    | Clock
)


def decode_record(line: bytes | str) -> Record:
    """Return the record in a line.

    Raises ValueError for a line that is not JSON, TypeError for JSON that is no record.
    """
    content = json.loads(line)  # which reads the NaN and Infinity that the probe writes
    try:
        return msgspec.convert(content, Record)
    except msgspec.ValidationError as error:
        raise TypeError(f"no record of the probe: {error}") from error
