"""A calibration file: what messages, memory and computing cost. Imports no torch.

``find_calibration`` chooses the user's own file or the one that comes with the project,
``load_calibration`` reads and checks it, ``describe`` returns its content as text for a person.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.cost_model.compute_model import ComputeModel, ComputeProfile
from common.cost_model.event_model import Network, Rate
from common.errors import UserError
from common.sync.message_cost import GradientSize
from common.utils.paths import REPORTS
from common.utils.versioned_json import label, non_negative, non_negatives, read_versioned

FORMAT = 1
LARGE_STEP = 256  # samples of the step whose time ``describe`` shows
QUIET_SHARE = 0.1  # of the cores, that other processes may take without a warning
_KIND = "calibration"


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
    others_share : share of the cores that other processes used during the measurement. The fits
        leave out the most disturbed rounds, but a share above a tenth still spoils the numbers.
    fits : for each fitted quantity, its values, 95 % intervals, residuals and worst relative error
        (lab/fitting.py).
    machine : common.utils.environment.environment of rank 0.
    """

    name: str
    made: str
    quick: bool
    ranks: int
    ranks_here: int
    cores: int
    others_share: float
    model: str
    gradients: tuple[GradientSize, ...]
    network: Network
    compute: ComputeModel
    fits: Mapping[str, Any]
    machine: Mapping[str, Any]

    @property
    def over_loopback(self) -> bool:
        """Whether all ranks shared one machine."""
        return self.ranks == self.ranks_here

    def as_json(self) -> dict[str, Any]:
        """Return the file's content."""
        gradients = [
            {"shape": list(size.shape), "itemsize": size.itemsize} for size in self.gradients
        ]
        return label(_KIND, FORMAT) | asdict(self) | {"gradients": gradients}


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

    Raises UserError if the file is missing, cut, foreign or of another version.
    """
    try:
        return read_versioned(
            path, _from_json, kind=_KIND, version=FORMAT, missing=f"no calibration at {path}"
        )
    except UserError as error:
        raise UserError(f"{error}: run `lab calibrate` to write a new one") from error


def describe(calibration: Calibration) -> list[str]:
    """Return lines for a person: each kind's alpha, bandwidth and error, compute times."""
    network, compute = calibration.network, calibration.compute
    where = (
        "over loopback"
        if calibration.over_loopback
        else f"on several nodes, {calibration.ranks_here} on each"
    )
    steps = [
        compute.at(LARGE_STEP / profile.ranks, ranks_here=profile.ranks)
        for profile in compute.profiles
    ]
    return [
        f"{calibration.name}, {count(calibration.ranks, 'rank')} {where}",
        *(
            _describe_rate(kind, rate, calibration.fits[kind])
            for kind, rate in network.kinds.items()
        ),
        f"  in memory: adding {_gigabytes(network.gamma_seconds_per_byte)}, copying "
        f"{_gigabytes(network.copy_seconds_per_byte)}; a message delays a concurrent backward by "
        f"{100 * network.overlap_cost:.0f} % of its time",
        *(
            f"  {calibration.model}, {LARGE_STEP} samples on {count(profile.ranks, 'rank')} with "
            f"{count(profile.threads, 'thread')}{' each' * (profile.ranks > 1)}: "
            f"{step.seconds:.3f} s to compute a step"
            for profile, step in zip(compute.profiles, steps, strict=True)
        ),
        *noise_warning(calibration.others_share, "calibrate"),
    ]


def noise_warning(others_share: float, command: str) -> list[str]:
    """Return a warning if other processes took more than ``QUIET_SHARE`` of the cores, else none.

    command : what the user should do again.
    """
    warning = (
        f"warning: other processes used {100 * others_share:.0f} % of the cores during the "
        f"measurement: end them, and {command} again"
    )
    return [warning] if others_share > QUIET_SHARE else []


def count(number: int, noun: str) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _describe_rate(kind: str, rate: Rate, fit: Mapping[str, Any]) -> str:
    low, high = fit["intervals"][0]
    return (
        f"  {kind:<10}  {rate.alpha_seconds * 1e3:.3f} ms per message ({low * 1e3:.3f} to "
        f"{high * 1e3:.3f}), {_gigabytes(rate.beta_seconds_per_byte)}; largest error of the fit "
        f"{100 * fit['worst_relative_error']:.0f} %"
    )


def _gigabytes(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte else "no time per byte"


def _from_json(content: dict[str, Any]) -> Calibration:
    network, compute = content["network"], content["compute"]
    if not compute["profiles"] or not content["gradients"]:
        raise ValueError("no compute profile or no gradients")
    kinds = {kind: Rate(**non_negatives(rate)) for kind, rate in network["kinds"].items()}
    costs = non_negatives({name: value for name, value in network.items() if name != "kinds"})
    parsed = {
        "network": Network(**costs, kinds=kinds),
        "compute": ComputeModel(
            tuple(ComputeProfile(**non_negatives(profile)) for profile in compute["profiles"]),
            tuple(compute["ready_bytes"]),
            tuple(compute["ready_shares"]),
        ),
        "gradients": tuple(
            GradientSize(
                [int(non_negative(length)) for length in size["shape"]],
                int(non_negative(size["itemsize"])),
            )
            for size in content["gradients"]
        ),
    }
    return Calibration(**content | parsed)
