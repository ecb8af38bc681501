"""A calibration file: what messages, memory and computing cost. Imports no torch.

``find_calibration`` chooses the user's own file or the one that comes with the project,
``load_calibration`` reads and checks it, ``describe`` returns its content as text for a person.
"""

import math
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from common.errors import UserError
from common.models import MODELS
from common.say import bandwidth_text, count, percent
from common.sync.message_cost import GradientSize
from common.sync.plans.batchnorm import BatchNormLayer
from common.utils.paths import REPORTS
from common.utils.typed_json import (
    Facts,
    Finite,
    LocalTime,
    Ranks,
    Seconds,
    Text,
    check_facts,
    label,
    read_versioned,
    write_json,
)
from lab.predict.compute_model import ComputeModel
from lab.predict.event_model import Network, Rate

FORMAT = 1
LARGE_STEP = 256  # samples of the step whose time ``describe`` shows
QUIET_SHARE = 0.1  # of the cores, that other processes may take without a warning
_KIND = "calibration"
_MOST_ENTRIES = 2**40


_Interval = tuple[Finite, Finite]


@dataclass(frozen=True)
class FitRecord:
    """What lab/fitting.py found: values, their 95 % intervals, and the points it fitted."""

    values: Annotated[list[Finite], Meta(min_length=1, max_length=10)]
    intervals: Annotated[list[_Interval], Meta(min_length=1, max_length=10)]
    worst_relative_error: Annotated[float, Meta(ge=0, le=1e9)]
    points: Annotated[list[tuple[Finite, Seconds, Finite]], Meta(max_length=10_000)]


@dataclass(frozen=True)
class GradientShape:
    """A gradient's shape, and the bytes of one of its entries."""

    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31)], ...], Meta(max_length=8)]
    itemsize: int

    def __post_init__(self) -> None:
        if self.itemsize not in (1, 2, 4, 8):
            raise ValueError(f"itemsize: got {self.itemsize}, expected 1, 2, 4 or 8 bytes")
        if math.prod(self.shape) > _MOST_ENTRIES:
            raise ValueError(f"shape: got {self.shape}, expected at most {_MOST_ENTRIES:,} entries")

    @property
    def nbytes(self) -> int:
        """The bytes of the gradient."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Calibration:
    """The numbers that the cost model needs, and where they come from.

    Parameters
    ----------
    name : name of the machine, as shown to a person.
    made : date and time, ISO.
    ranks, ranks_here : ranks that measured, and how many of them shared a machine. If all did,
        messages went over loopback.
    model, gradients : the model whose steps were timed, and the sizes of its gradients in the order
        of the parameters.
    batchnorm : the model's BatchNorm layers that train; None: unknown, since the file is older than
        this field, or since only the model's size is known.
    others_share : share of the cores that other processes used during the measurement. The fits
        leave out the most disturbed rounds, but a share above a tenth still spoils the numbers.
    fits : for each fitted quantity, its values, 95 % intervals, residuals and worst relative error
        (lab/fitting.py).
    machine : common.utils.environment.environment of rank 0.
    """

    name: Text
    made: LocalTime
    quick: bool
    ranks: Ranks
    ranks_here: Ranks
    cores: Ranks
    others_share: Annotated[float, Meta(ge=0, le=100)]
    model: Text
    gradients: Annotated[tuple[GradientShape, ...], Meta(min_length=1, max_length=100_000)]
    network: Network
    compute: ComputeModel
    fits: dict[Text, FitRecord]
    machine: Facts
    batchnorm: Annotated[tuple[BatchNormLayer, ...], Meta(max_length=100_000)] | None = None

    def __post_init__(self) -> None:
        check_facts(self.machine, name="machine")
        datetime.fromisoformat(self.made)  # ValueError: no such day
        if self.ranks_here > self.ranks:
            raise ValueError(
                f"ranks_here: got {self.ranks_here}, expected at most ranks, {self.ranks}"
            )
        places = [layer.parameters_before for layer in self.batchnorm or ()]
        if max(places, default=0) > len(self.gradients):
            raise ValueError(
                f"batchnorm: got a layer after {max(places)} parameters, expected at most the "
                f"{len(self.gradients)} of gradients"
            )
        if missing := self.network.kinds.keys() - self.fits.keys():
            raise ValueError(f"fits.{min(missing)} is missing: network.kinds has it")

    @cached_property
    def gradient_sizes(self) -> list[GradientSize]:
        """The gradients' bytes, in the order of the parameters."""
        return [GradientSize(gradient.shape, gradient.itemsize) for gradient in self.gradients]

    @property
    def trains_batchnorm(self) -> bool:
        """Whether the model has BatchNorm layers that train; all models of this project do.

        It tells by the name where the layers are unknown.
        """
        if self.batchnorm is None:
            return self.model in MODELS
        return bool(self.batchnorm)

    @property
    def over_loopback(self) -> bool:
        """Whether all ranks shared one machine."""
        return self.ranks == self.ranks_here

    def as_json(self) -> dict[str, Any]:
        """Return the file's content."""
        return label(_KIND, FORMAT) | asdict(self)

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises UserError if a number is out of its range."""
        write_json(path, self.as_json(), Calibration)


def calibration_path() -> Path:
    """Return the file that ``lab calibrate`` writes and other commands read by default."""
    return REPORTS / "calibration.json"


def reference_path() -> Path:
    """Return the calibration that comes with the project."""
    return Path(__file__).with_name("reference_calibration.json")


def find_calibration(path: Path | None = None) -> tuple[Calibration, bool]:
    """Return the calibration in ``path``, else this machine's own, else the reference.

    The second value says whether it is the reference.
    """
    if path is None and not calibration_path().exists():
        return load_calibration(reference_path()), True
    return load_calibration(path or calibration_path()), False


def load_calibration(path: Path) -> Calibration:
    """Read and check a calibration.

    Raises UserError if the file is missing, cut, foreign or of a newer version, or if it holds an
    impossible number.
    """
    try:
        return read_versioned(path, Calibration, kind=_KIND, version=FORMAT)
    except UserError as error:
        raise UserError(f"{error}: run `lab calibrate` to write a new one") from error


def describe(calibration: Calibration) -> list[str]:
    """Return lines for a person: each kind's alpha, bandwidth and error, compute times."""
    network = calibration.network
    where = "over loopback"
    if not calibration.over_loopback:
        where = f"on several nodes, {calibration.ranks_here} on each"
    lines = [f"{calibration.name}, {count(calibration.ranks, 'rank')} {where}"]
    for kind, rate in network.kinds.items():
        lines.append(_describe_rate(kind, rate, calibration.fits[kind]))
    lines.append(
        f"  in memory: adding {bandwidth_text(network.gamma_seconds_per_byte)}, copying "
        f"{bandwidth_text(network.copy_seconds_per_byte)}; a message delays a concurrent backward "
        f"by {percent(network.overlap_cost)} of its time"
    )
    for profile in calibration.compute.profiles:
        samples = LARGE_STEP / profile.ranks
        step = calibration.compute.at(samples, ranks_here=profile.ranks)
        threads = count(profile.threads, "thread")
        if profile.ranks > 1:
            threads += " each"
        lines.append(
            f"  {calibration.model}, {LARGE_STEP} samples on {count(profile.ranks, 'rank')} with "
            f"{threads}: {step.seconds:.3f} s to compute a step"
        )
    return [*lines, *noise_warning(calibration.others_share, "calibrate")]


def noise_warning(others_share: float, command: str) -> list[str]:
    """Return a warning if other processes took more than ``QUIET_SHARE`` of the cores, else none.

    command : what the user should do again.
    """
    if others_share <= QUIET_SHARE:
        return []
    return [
        f"warning: other processes used {percent(others_share)} of the cores during the "
        f"measurement: end them, and {command} again"
    ]


def _describe_rate(kind: str, rate: Rate, fit: FitRecord) -> str:
    """Return a kind's line: alpha with its interval, bandwidth, and the fit's largest error."""
    low, high = fit.intervals[0]
    return (
        f"  {kind:<10}  {rate.alpha_seconds * 1e3:.3f} ms per message ({low * 1e3:.3f} to "
        f"{high * 1e3:.3f}), {bandwidth_text(rate.beta_seconds_per_byte)}; largest error of the "
        f"fit {percent(fit.worst_relative_error)}"
    )
