"""What a run records: steps, epochs, the claim that was checked, and one rank's timeline.

The training makes the first two (training_engine/metrics.py and callbacks.py). Each is a line of
metrics.jsonl or epochs.jsonl, which rank 0 writes (reporting/run_folder.py) and lab reads. Entries
that a foreign file lacks have defaults. Imports no torch.
"""

import math
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

from msgspec import Meta, Struct

from common.utils.typed_json import Bytes, Count, Finite, Name, Rank, Seconds, Share, Step, Text

Section = Literal["data", "forward", "backward", "sync", "update"]
SECTIONS: tuple[Section, ...] = get_args(Section)
Moment = Annotated[float, Meta(ge=-1e9, le=1e9)]  # in seconds
_Spans = Annotated[list[tuple[Moment, Moment]], Meta(max_length=100_000)]

if TYPE_CHECKING:
    Number: TypeAlias = float
    Part: TypeAlias = float
else:  # null in the file, NaN here: not measured
    Number, Part = Finite | None, Share | None


class _Line(Struct, kw_only=True):
    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) is None:
                setattr(self, name, math.nan)


class StepRecord(_Line, kw_only=True):
    """One step, counted from 1 over the whole training.

    loss, accuracy : over the global batch. local_loss, local_samples : this rank's. Losses and
    accuracy are NaN if compute was emulated. learning_rate : the one that the step used.
    step_seconds : of the whole step, with what lies between its sections. wait_seconds : the part
    of "sync" in which the slowest rank still computed; the rest is network time.
    """

    epoch: Count = 0
    step: Step
    loss: Number
    accuracy: Part = math.nan
    local_loss: Number = math.nan
    local_samples: Count = 0
    learning_rate: Finite = 0.0
    data_seconds: Seconds = 0.0
    forward_seconds: Seconds = 0.0
    backward_seconds: Seconds = 0.0
    sync_seconds: Seconds = 0.0
    update_seconds: Seconds = 0.0
    step_seconds: Seconds = 0.0
    wait_seconds: Seconds = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each section."""
        return {name: getattr(self, f"{name}_seconds") for name in SECTIONS}


def _learned(loss: float, accuracy: float) -> str:
    """Return loss and, if it is known, accuracy as text."""
    if math.isnan(accuracy):
        return f"loss {loss:.4f}"
    return f"loss {loss:.4f}, accuracy {accuracy:.4f}"


class EpochReport(_Line, kw_only=True):
    """One epoch over all ranks.

    Losses are means over samples, accuracies lie between 0 and 1; ``ema_*`` belong to the moving
    average of the weights. NaN: no validation, no average, unknown, or emulated compute.
    ``metrics`` are the user's own, e.g. "val_f1" and "ema_val_f1". ``samples_per_second`` is the
    training throughput of all ranks together.
    """

    epoch: Step
    train_loss: Number = math.nan
    train_accuracy: Part = math.nan
    val_loss: Number = math.nan
    val_accuracy: Part
    ema_val_loss: Number = math.nan
    ema_val_accuracy: Part = math.nan
    learning_rate: Finite = 0.0
    samples_per_second: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    seconds: Seconds
    metrics: dict[Name, Number] = {}

    @property
    def deciding_loss(self) -> float:
        """The loss that decides the best epoch where no accuracy is known."""
        return self.val_loss if math.isnan(self.ema_val_loss) else self.ema_val_loss

    @property
    def deciding_accuracy(self) -> float:
        """The accuracy that decides best epoch and stop: the moving average's, if there is one."""
        return self.val_accuracy if math.isnan(self.ema_val_accuracy) else self.ema_val_accuracy

    def line(self) -> str:
        """Return the numbers as one line of text."""
        learned = f"train {_learned(self.train_loss, self.train_accuracy)}"
        parts = [f"Epoch {self.epoch}: {'EMULATED' if math.isnan(self.train_loss) else learned}"]
        if not math.isnan(self.val_loss):
            parts.append(f"validation {_learned(self.val_loss, self.val_accuracy)}")
        if not math.isnan(self.ema_val_loss):
            parts.append(f"EMA validation {_learned(self.ema_val_loss, self.ema_val_accuracy)}")
        parts += [f"{name} {value:.4f}" for name, value in self.metrics.items()]
        parts.append(f"{self.seconds:.1f} s")
        return "; ".join(parts)


Scope = Literal["", "inside", "between"]
"""Whether a message stays inside a node; "" if no ranks share one, or all do, or it is unknown."""


class SentMessage(Struct):
    """A collective or a message: bytes of the rank's tensor, bytes that it sends, its times."""

    kind: Name
    bytes: Count
    sent_bytes: Bytes
    begin: Moment
    end: Moment
    scope: Scope = ""


class GradientClaim(Struct, kw_only=True):
    """What each rank's optimiser got in one step, as a sum of the ranks' gradients.

    weights : (ranks, ranks); row r says how often each rank's own gradient counts in what rank r
    got (1/N each: the mean), null where it is no such sum. residue : the greatest relative error of
    these sums in a parameter. rounded : whether a parameter has 16 bits, which allows a greater
    error. why_not : why there are no weights.
    """

    step: Count
    weights: list[list[Finite] | None] | None = None
    residue: Finite | None = None
    rounded: bool = False
    why_not: Text = ""


class RankTimeline(Struct):
    """One rank's recorded step; ``sections`` holds begin and end of each part of each section."""

    rank: Rank
    sections: dict[Section, _Spans]
    messages: Annotated[list[SentMessage], Meta(max_length=1_000_000)]
