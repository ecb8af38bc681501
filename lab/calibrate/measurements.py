"""What the ranks of a calibration measured, as records that they send to each other.

rank_measurements.py and trainer.py fill them, fits.py reads them. Sizes are in bytes, times in
seconds. Imports no torch.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from common.sync.message_cost import GradientSize
from common.sync.plans.batchnorm import BatchNormLayer


class CpuSeconds(Struct):
    """Seconds of the clock, CPU seconds of this process, and those of all processes."""

    clock: float
    own: float
    all: float


class UsesCpu(Struct, kw_only=True):
    """A measurement, with what the CPU did meanwhile."""

    cpu: CpuSeconds


class MessageRow(Struct, array_like=True):
    """A kind of message at one size: its time, and that of the barrier that follows it alone."""

    nbytes: int
    seconds: float
    seconds_without: float


class MemoryRow(Struct, array_like=True):
    """An operation in memory at one size."""

    nbytes: int
    seconds: float


class MessageRound(UsesCpu):
    """A round of messages; ``memory`` has rows of "sum" and "copy"."""

    messages: dict[str, list[MessageRow]]
    memory: dict[str, list[MemoryRow]]


class StepTimes(UsesCpu):
    """A training step. ``before`` is data and forward."""

    samples: int
    before: float
    backward: float
    update: float


class OverlapTimes(UsesCpu):
    """Backward alone, messages alone, and backward during messages."""

    backward: float
    messages: float
    both: float


class RankMeasurements(Struct):
    """What one rank measured.

    ready : see ``Trainer.time_gradients``. together, alone : steps, see ``Trainer.time_steps``;
    rank 0 alone computes ``alone``. environment : as in a run's ``environment.json``.
    """

    turns: list[MessageRound]
    ready: list[float]
    threads: int
    environment: dict[str, Any]
    together: list[StepTimes] = []
    overlap: list[OverlapTimes] = []
    alone: list[StepTimes] = []


class Sharing(Struct):
    """The cores of rank 0's machine, and the ranks that share them."""

    cores: int
    ranks_here: int


class GroupMeasurements(Struct):
    """What all ranks measured, by rank, and the model that they trained: gradients, BatchNorm."""

    ranks: list[RankMeasurements]
    gradients: Sequence[GradientSize]
    sharing: Sharing
    batchnorm: Sequence[BatchNormLayer]
