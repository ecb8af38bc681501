"""Profiles of emulated compute: the seconds of each layer of a model that has a machine for itself, as a file. Imports no torch.

lab/calibrate/layer_profile.py measures one, ``load_profile`` reads and checks it,
common/emulation/emulated_model.py sleeps by it.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.utils.paths import REPORTS

FORMAT = 1
MEASURED = "measured"
_WHAT = "compute profile of data-parallel-lab"


@dataclass(frozen=True)
class SectionTime:
    """Seconds over samples: ``fixed_seconds`` + ``sample_seconds`` x samples."""

    fixed_seconds: float
    sample_seconds: float

    def at(self, samples: float) -> float:
        """Return the seconds for that number of samples."""
        return self.fixed_seconds + self.sample_seconds * samples


@dataclass(frozen=True)
class Layer:
    """One call of a layer: what it takes, and the names of the parameters whose gradients its backward makes."""

    name: str
    forward: SectionTime
    backward: SectionTime
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """What a model's step takes where it has a machine for itself.

    Parameters
    ----------
    name : for a reader.
    machine, device, threads : where it was measured: the CPU or the GPU, "cpu" or "cuda", CPU threads.
    made : date and time, ISO.
    model, image : the model's name, and (height, width) of the images.
    layers : in the order of their execution; backward goes through them from the last to the first.
    update_seconds : of the optimiser's step.
    others_share : of the cores that other processes took meanwhile.
    steps : how good the lines are: (samples, seconds of forward and backward measured, seconds by the lines).
    """

    name: str
    machine: str
    device: str
    threads: int
    made: str
    model: str
    image: tuple[int, int]
    layers: tuple[Layer, ...]
    update_seconds: float
    others_share: float = 0.0
    steps: tuple[tuple[float, float, float], ...] = ()

    def forward_seconds(self, samples: float) -> float:
        """Return what forward takes, the loss included."""
        return math.fsum(layer.forward.at(samples) for layer in self.layers)

    def ready_seconds(self, samples: float) -> dict[str, float]:
        """Return after how many seconds of backward each parameter's gradient is ready, in the order in which they are."""
        passed = 0.0
        ready: dict[str, float] = {}
        for layer in reversed(self.layers):
            passed += layer.backward.at(samples)
            ready |= dict.fromkeys(layer.parameters, passed)
        return ready

    def as_json(self) -> dict[str, Any]:
        """The file's content."""
        return {"format": FORMAT, "what": _WHAT} | asdict(self)


def profile_path(choice: str, *, model: str) -> Path:
    """Return where the profile of that name lies; "measured" is this machine's own, one a model. UserError on no name."""
    if choice.endswith(".json"):
        return Path(choice)
    if not re.fullmatch(r"\w[\w.+-]*", choice):
        raise UserError(
            f"--compute: got {choice!r}, give real, measured, the name of a profile in reports/profiles/, or a file "
            "that ends in .json"
        )
    name = f"{MEASURED}-{model}" if choice == MEASURED else choice
    return REPORTS / "profiles" / f"{name}.json"


def load_profile(
    choice: str, *, model: str, image: tuple[int, int] | None = None, machine: str | None = None
) -> Profile:
    """Read and check a profile of ``model`` on images of (height, width) ``image``.

    machine : this one's processor; "measured" is refused where another machine made the profile. Raises UserError where the
    file is missing, cut, foreign, of another version, of another model or other images.
    """
    path = profile_path(choice, model=model)
    again = how_to_make(choice, model)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"--compute {choice}: there is no profile {path}: {again}") from error
    except OSError as error:
        raise UserError(
            f"--compute {choice}: the profile {path} cannot be read ({error.strerror}): {again}"
        ) from error
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 both
        raise UserError(
            f"--compute {choice}: the profile {path} is cut or no JSON ({error}): {again}"
        ) from error
    if not isinstance(content, dict) or content.get("what") != _WHAT:
        raise UserError(
            f"--compute {choice}: {path} is no compute profile of this project: {again}"
        )
    if content.get("format") != FORMAT:
        raise UserError(
            f"--compute {choice}: the profile {path} has format {content.get('format')!r}, this version reads "
            f"{FORMAT}: {again}"
        )
    try:
        profile = _from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"--compute {choice}: the profile {path} is incomplete ({type(error).__name__}: {error}): "
            f"{again}"
        ) from error
    if profile.model != model:
        raise UserError(
            f"--compute {choice}: the profile {path} is of {profile.model}, the model is {model}: {again}"
        )
    if image is not None and profile.image != image:
        raise UserError(
            f"--compute {choice}: the profile {path} is of images of {_size(profile.image)}, the dataset has "
            f"{_size(image)}: take a dataset or a profile of the same size"
        )
    if choice == MEASURED and machine is not None and profile.machine != machine:
        raise UserError(
            f"--compute {choice}: the profile {path} was measured on {profile.machine!r}, this machine is "
            f"{machine!r}: {again}; to emulate that machine give the file, --compute {path}"
        )
    return profile


def _size(image: tuple[int, int]) -> str:
    return "x".join(map(str, image))


def how_to_make(choice: str, model: str) -> str:
    """Return which command measures that profile."""
    named = "" if choice == MEASURED else f" --profile {Path(choice).stem}"
    of_model = "" if model == "vgg11" else f" --model {model}"
    return f"`lab calibrate{named}{of_model}` measures one"


def _from_json(content: Mapping[str, Any]) -> Profile:
    entries = {name: value for name, value in content.items() if name not in ("format", "what")}
    height, width = entries["image"]
    layers = tuple(
        Layer(
            str(layer["name"]),
            _section_time(layer["forward"]),
            _section_time(layer["backward"]),
            tuple(map(str, layer["parameters"])),
        )
        for layer in entries["layers"]
    )
    parsed = {
        "image": (int(height), int(width)),
        "update_seconds": _seconds(entries["update_seconds"]),
        "layers": layers,
        "steps": tuple(tuple(map(_seconds, step)) for step in entries["steps"]),
    }
    profile = Profile(**(entries | parsed))
    if not any(layer.parameters for layer in profile.layers):
        raise ValueError("no layer with parameters")
    return profile


def _section_time(content: Mapping[str, Any]) -> SectionTime:
    return SectionTime(_seconds(content["fixed_seconds"]), _seconds(content["sample_seconds"]))


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} where a number of 0 or more belongs")
    return float(value)
