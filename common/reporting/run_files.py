"""The schemas of the files in a run's folder: what rank 0 writes, and what ``lab report`` reads.

Rows that results of a comparison take over unchanged are TypedDicts, the rest are Structs. A value
that a run may not have (a loss with emulated compute) is null. Entries that earlier versions did
not write have defaults. Imports no torch.
"""

from typing import Annotated, Literal, NotRequired, TypedDict

from msgspec import Meta, Struct

from common.utils.typed_json import (
    Bytes,
    Count,
    Finite,
    Name,
    Rank,
    Ranks,
    Seconds,
    Seed,
    Share,
    Step,
    Text,
    shown,
)

FORMAT = 1  # of ranks.json and timeline.json

StepTime = Annotated[float, Meta(ge=1e-9, le=1e9)]  # seconds of a whole step, which takes some
_Moment = Annotated[float, Meta(ge=-1e9, le=1e9)]
_Spans = Annotated[list[tuple[_Moment, _Moment]], Meta(max_length=100_000)]


class SectionSeconds(TypedDict):
    """Seconds of a step by section."""

    data: Seconds
    forward: Seconds
    backward: Seconds
    sync: Seconds
    update: Seconds


_Section = Annotated[str, Meta(pattern=rf"^({'|'.join(SectionSeconds.__annotations__)})\Z")]


class StepSeconds(SectionSeconds):
    """The whole step, too, and the two parts of "sync": waiting, and on the wire.

    "step" is the sum of the sections in files whose run measured no more.
    """

    step: StepTime
    wait: Seconds
    wire: Finite  # a difference: rounding may leave it below 0


class MemoryRow(TypedDict):
    """Bytes of a rank's tensors by kind, see common/cost_model/memory_model.py."""

    parameters: Count
    gradients: Count
    optimizer_state: Count
    buckets: Count
    untrained: Count


class RankRow(TypedDict):
    """What one rank measured; ``bytes_sent`` and ``messages`` of a step, if they were counted.

    memory : null with emulated compute, which never updates. predicted_memory : null for a
    strategy without a closed form.
    """

    rank: Rank
    host: Text
    threads: Ranks
    seconds: StepSeconds
    peak_memory_bytes: Count
    peak_gpu_memory_bytes: NotRequired[Count | None]  # of the rank's GPU, if it has one
    memory: NotRequired[MemoryRow | None]
    predicted_memory: NotRequired[MemoryRow | None]
    bytes_sent: Bytes | None
    messages: Annotated[float, Meta(ge=0, le=1e9)] | None


class RanksFile(Struct, kw_only=True):
    """``ranks.json``: a row for each rank, in order."""

    format: Count = FORMAT
    sync: Name = "none"
    world_size: Ranks | None = None
    first_step: Step = 1
    steps: Step | None = None
    ranks: Annotated[list[RankRow], Meta(min_length=1, max_length=65_536)]

    def __post_init__(self) -> None:
        found, size = [row["rank"] for row in self.ranks], self.world_size or len(self.ranks)
        if found != list(range(size)):
            raise ValueError(
                f"ranks: got those of {shown(found)}, expected 0 to {size - 1} in order"
            )


class SentMessage(TypedDict):
    """A collective or a message: bytes of the rank's tensor, bytes that it sends, its times."""

    kind: Name
    bytes: Count
    sent_bytes: Bytes
    begin: _Moment
    end: _Moment


class RankTimeline(TypedDict):
    """One rank's recorded step, in seconds after the first rank began it.

    sections : begin and end of each part of each section.
    """

    rank: Rank
    sections: dict[_Section, _Spans]
    messages: Annotated[list[SentMessage], Meta(max_length=1_000_000)]


class TimelineFile(TypedDict):
    """``timeline.json``: one recorded step of every rank."""

    format: Count
    sync: Name
    step: Step
    ranks: Annotated[list[RankTimeline], Meta(max_length=65_536)]


class Summary(Struct, kw_only=True):
    """``summary.json``: what the run ended with."""

    part: Text = ""
    recipe: Text | None = None
    sync: Name = "none"
    nodes: Ranks = 1
    backend: Text | None = None
    device: Text = "cpu"
    emulated: bool = False
    compute: Text = "real"
    dataset: Text | None = None
    model: Text | None = None
    flip: Text = "random"
    cutout: Count = 0
    tta: Text = "none"
    global_batch_size: Step | None = None
    steps: Count = 0
    last_step: Step | None = None
    step_seconds: StepTime | None = None
    section_seconds: SectionSeconds | None = None
    wait_seconds: Seconds | None = None
    sync_share: Share | None = None
    samples_per_second: Annotated[float, Meta(ge=0, le=1e15)] | None = None
    train_loss_last_step: Finite | None = None
    test_loss: Finite | None = None
    test_accuracy: Share | None = None
    ema_test_loss: Finite | None = None
    ema_test_accuracy: Share | None = None
    total_seconds: Seconds = 0.0
    wall_seconds: Seconds = 0.0
    ranks_hold_equal_weights: bool = True
    checkpoint: Text | None = None
    resumed_from: Text | None = None
    peak_memory_bytes: Count = 0
    peak_gpu_memory_bytes: Count | None = None
    captured: bool = False
    not_captured: Text = ""
    compile_seconds: Seconds = 0.0
    folder: Text = ""


class TrainingFacts(Struct, kw_only=True):
    """The settings in ``config.json`` that must agree for two runs to be comparable."""

    dataset: Text | None = None
    training_images: Count | None = None
    model: Text | None = None
    batch_size: Step
    seed: Seed
    learning_rate: Finite | None = None
    schedule: Text | None = None
    warmup_steps: Count | None = None
    warmup_epochs: Finite | None = None
    milestones: Text | None = None
    step_factor: Finite | None = None
    scale_lr: bool | None = None
    total_steps: Count | None = None
    opt: Text | None = None
    momentum: Finite | None = None
    nesterov: bool | None = None
    weight_decay: Finite | None = None
    label_smoothing: Finite | None = None
    clip_norm: Finite | None = None
    accumulation_steps: Count | None = None
    amp: bool | None = None
    amp_dtype: Annotated[str, Meta(pattern=r"^(fp16|bf16)\Z")] | None = None
    sync_batchnorm: bool | None = None
    pretrained_weights: Text | None = None
    unfreeze: bool | None = None
    input_size: Count | None = None
    normalise: Text | None = None
    flip: Text = "random"
    cutout: Count = 0
    tta: Text = "none"
    untimed_steps: Count | None = None
    compute: Text = "real"


class RunConfig(TrainingFacts, kw_only=True):
    """The entries of ``config.json`` that are read again; a run writes all its settings there."""

    world_size: Ranks
    sync: Name
    bucket_mb: Annotated[float, Meta(gt=0, le=1e9)] | Literal["auto"] | None = None
    steps_per_epoch: Count = 0


class MachineFacts(TypedDict, total=False):
    """The entries of ``environment.json`` that are read again; any others may be there."""

    cpu: Text | None
    gpus: list[Text] | None
    torch: Text | None
    usable_cores: Ranks | None
    git_commit: Text | None


class StepLine(Struct, kw_only=True):
    """A line of ``metrics.jsonl``, as a StepRecord (common/training_engine/metrics.py) has it."""

    epoch: Count = 0
    step: Step
    loss: Finite | None
    accuracy: Share | None = None
    local_loss: Finite | None = None
    local_samples: Count = 0
    learning_rate: Finite = 0.0
    data_seconds: Seconds = 0.0
    forward_seconds: Seconds = 0.0
    backward_seconds: Seconds = 0.0
    sync_seconds: Seconds = 0.0
    update_seconds: Seconds = 0.0
    step_seconds: Seconds | None = None
    wait_seconds: Seconds = 0.0


class EpochLine(Struct, kw_only=True):
    """A line of ``epochs.jsonl``: the fields of EpochReport (training_engine/callbacks.py)."""

    epoch: Step
    train_loss: Finite | None = None
    train_accuracy: Share | None = None
    val_loss: Finite | None = None
    val_accuracy: Share | None
    ema_val_loss: Finite | None = None
    ema_val_accuracy: Share | None = None
    learning_rate: Finite = 0.0
    samples_per_second: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    seconds: Seconds
