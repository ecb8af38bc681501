"""A calibration: what one machine or one set of nodes was found to take, as a file. No torch here.

``load_calibration`` reads and checks one, ``find_calibration`` chooses the user's own or the one that comes with the project.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.cost_model.compute_model import ComputeModel, ComputeProfile
from common.cost_model.event_model import Network, Rate
from common.errors import UserError
from common.sync.message_cost import GradientSize
from common.utils.paths import REPORTS

FORMAT = 1
LARGE_STEP = 256
"""Samples of the step that ``describe`` tells."""

QUIET_SHARE = 0.1
"""Of the cores, that other processes may take without a warning."""
_WHAT = "calibration of data-parallel-lab"


@dataclass(frozen=True)
class Calibration:
    """What the cost model needs, and where it comes from.

    Parameters
    ----------
    name : of the machine, for a reader.
    made : date and time, ISO.
    ranks, ranks_here : ranks that measured, and how many of them shared a machine; where all did, messages went over loopback.
    model, gradients : the model whose steps were timed, and the sizes of its gradients in the order of the parameters.
    others_share : of the cores that other processes took meanwhile. The turns that they disturbed most are left out of the
        fits; more than a tenth spoils the numbers all the same.
    fits : by what was fitted: values, 95 % intervals, residuals and the worst relative error (lab/fitting.py).
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
        """The file's content."""
        gradients = [
            {"shape": list(size.shape), "itemsize": size.itemsize} for size in self.gradients
        ]
        return {"format": FORMAT, "what": _WHAT} | asdict(self) | {"gradients": gradients}


def calibration_path() -> Path:
    """Where ``lab calibrate`` writes and the others look."""
    return REPORTS / "calibration.json"


def reference_path() -> Path:
    """The calibration that comes with the project."""
    return Path(__file__).with_name("reference_calibration.json")


def find_calibration(path: Path | None = None) -> tuple[Calibration, bool]:
    """Return the calibration in ``path``, else this machine's own, else the reference, and whether it is the reference."""
    if path is None and not calibration_path().exists():
        return load_calibration(reference_path()), True
    return load_calibration(path or calibration_path()), False


def load_calibration(path: Path) -> Calibration:
    """Read and check a calibration; UserError where the file is missing, cut, foreign or of another version."""
    again = "run `lab calibrate`, which writes it anew"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"no calibration at {path}: {again}") from error
    except OSError as error:
        raise UserError(
            f"the calibration {path} cannot be read ({error.strerror}): {again}"
        ) from error
    except ValueError as error:  # JSON and UTF-8 both
        raise UserError(f"the calibration {path} is cut or no JSON ({error}): {again}") from error
    if not isinstance(content, dict) or content.get("what") != _WHAT:
        raise UserError(f"{path} is no calibration of this project: {again}")
    if content.get("format") != FORMAT:
        raise UserError(
            f"the calibration {path} has format {content.get('format')!r}, this version reads {FORMAT}: {again}"
        )
    try:
        return _from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"the calibration {path} is incomplete ({type(error).__name__}: {error}): {again}"
        ) from error


def describe(calibration: Calibration) -> list[str]:
    """Return what was found as lines for a person: each kind's alpha and bandwidth, how far off the fit is, compute times."""
    network, fits = calibration.network, calibration.fits
    lines = [
        f"{calibration.name}, {calibration.ranks} ranks "
        + (
            "over loopback"
            if calibration.over_loopback
            else f"on nodes, {calibration.ranks_here} on each"
        )
    ]
    for kind, rate in network.kinds.items():
        low, high = fits[kind]["intervals"][0]
        lines.append(
            f"  {kind:<10}  {rate.alpha_seconds * 1e3:.3f} ms a message ({low * 1e3:.3f} to {high * 1e3:.3f}), "
            f"{_gigabytes(rate.beta_seconds_per_byte)}; fit off by {fits[kind]['worst_relative_error']:.0%} at most"
        )
    lines.append(
        f"  adding {_gigabytes(network.gamma_seconds_per_byte)}, copying {_gigabytes(network.copy_seconds_per_byte)}; a "
        f"message takes {network.overlap_cost:.0%} of its time from a backward under way"
    )
    for profile in calibration.compute.profiles:
        step = calibration.compute.at(LARGE_STEP / profile.ranks, ranks_here=profile.ranks)
        lines.append(
            f"  {calibration.model}, {LARGE_STEP} samples on {profile.ranks} rank{'s' if profile.ranks > 1 else ''} of "
            f"{profile.threads} thread{'s' if profile.threads > 1 else ''}: {step.seconds:.3f} s of computing a step"
        )
    if calibration.others_share > QUIET_SHARE:
        lines.append(
            f"warning: other processes took {calibration.others_share:.0%} of the cores meanwhile: end them, and "
            "calibrate again"
        )
    return lines


def _gigabytes(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte else "no time a byte"


def _from_json(content: dict[str, Any]) -> Calibration:
    network, compute = content["network"], content["compute"]
    kinds = {kind: Rate(**_numbers(rate)) for kind, rate in network["kinds"].items()}
    profiles = tuple(ComputeProfile(**_numbers(profile)) for profile in compute["profiles"])
    if not profiles or not content["gradients"]:
        raise ValueError("no compute profile or no gradients")
    entries = {name: value for name, value in content.items() if name not in ("format", "what")}
    return Calibration(
        **entries
        | {
            "network": Network(
                **_numbers({name: value for name, value in network.items() if name != "kinds"}),
                kinds=kinds,
            ),
            "compute": ComputeModel(
                profiles, tuple(compute["ready_bytes"]), tuple(compute["ready_shares"])
            ),
            "gradients": tuple(
                GradientSize(
                    [int(_number(length)) for length in size["shape"]],
                    int(_number(size["itemsize"])),
                )
                for size in content["gradients"]
            ),
        }
    )


def _numbers(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in content.items()}


def _number(value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value < float("inf")
    ):
        raise ValueError(f"{value!r} where a number of 0 or more belongs")
    return value
