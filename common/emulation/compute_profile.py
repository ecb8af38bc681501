"""A compute profile: how long each layer of a model takes on one machine. Imports no torch.

lab/calibrate/layer_profile.py measures one, ``load_profile`` reads and checks it, and
common/emulation/emulated_model.py sleeps for these times.
"""

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.utils.paths import REPORTS
from common.utils.versioned_json import label, non_negative, non_negatives, read_versioned

FORMAT = 1
MEASURED = "measured"
_KIND = "compute profile"


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
    """One call of a layer: its seconds, and the parameters whose gradients its backward makes."""

    name: str
    forward: SectionTime
    backward: SectionTime
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """How long a model's step takes on a machine that runs nothing else.

    Parameters
    ----------
    name : as shown to a person.
    machine, device, threads : where it was measured: the CPU or the GPU, "cpu" or "cuda", CPU
        threads.
    made : date and time, ISO.
    model, image : the model's name, and (height, width) of the images.
    layers : in the order of their execution; backward goes through them from the last to the first.
    update_seconds : time of the optimiser's step.
    others_share : share of the cores that other processes took during the measurement.
    steps : how well the fitted lines match: (samples, measured seconds of forward and backward,
        seconds that the lines give).
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
        """Return the seconds of forward, loss included."""
        return math.fsum(layer.forward.at(samples) for layer in self.layers)

    def ready_seconds(self, samples: float) -> dict[str, float]:
        """Return the seconds of backward until each gradient is ready, earliest first."""
        passed = 0.0
        ready: dict[str, float] = {}
        for layer in reversed(self.layers):
            passed += layer.backward.at(samples)
            ready |= dict.fromkeys(layer.parameters, passed)
        return ready

    def as_json(self) -> dict[str, Any]:
        """Return the file's content."""
        return label(_KIND, FORMAT) | asdict(self)


def profile_path(choice: str, *, model: str) -> Path:
    """Return the path of a profile; "measured" is this machine's own profile of ``model``.

    Raises UserError if ``choice`` is not a name.
    """
    if choice.endswith(".json"):
        return Path(choice)
    if not re.fullmatch(r"\w[\w.+-]*", choice):
        raise UserError(
            f"--compute: got {choice!r}, give real, measured, the name of a profile in "
            "reports/profiles/, or a file that ends in .json"
        )
    name = f"{MEASURED}-{model}" if choice == MEASURED else choice
    return REPORTS / "profiles" / f"{name}.json"


def load_profile(
    choice: str, *, model: str, image: tuple[int, int] | None = None, machine: str | None = None
) -> Profile:
    """Read and check a profile of ``model`` on images of (height, width) ``image``.

    machine : this machine's processor; "measured" is refused if another machine made the profile.
    Raises UserError if the file is missing, cut, foreign, of another version, of another model or
    of other images.
    """
    path = profile_path(choice, model=model)
    again = how_to_make(choice, model)
    try:
        profile = read_versioned(
            path, _from_json, kind=_KIND, version=FORMAT, missing=f"there is no profile {path}"
        )
        if profile.model != model:
            raise UserError(
                f"the profile {path} was measured for {profile.model}, but the model is {model}"
            )
    except UserError as error:
        raise UserError(f"--compute {choice}: {error}: {again}") from error
    if image is not None and profile.image != image:
        its_size, size = ("x".join(map(str, pixels)) for pixels in (profile.image, image))
        raise UserError(
            f"--compute {choice}: the profile {path} was measured with images of {its_size}, but "
            f"the dataset has {size}: use a dataset or a profile of the same size"
        )
    if choice == MEASURED and machine is not None and profile.machine != machine:
        raise UserError(
            f"--compute {choice}: the profile {path} was measured on {profile.machine!r}, but this "
            f"machine is {machine!r}: {again}; to emulate that machine, give the file: --compute "
            f"{path}"
        )
    return profile


def how_to_make(choice: str, model: str) -> str:
    """Return a sentence that names the command which measures that profile."""
    named = "" if choice == MEASURED else f" --profile {Path(choice).stem}"
    of_model = "" if model == "vgg11" else f" --model {model}"
    return f"`lab calibrate{named}{of_model}` measures one"


def _from_json(content: dict[str, Any]) -> Profile:
    height, width = content["image"]
    parsed = {
        "image": (int(height), int(width)),
        "update_seconds": non_negative(content["update_seconds"]),
        "layers": tuple(
            Layer(
                str(layer["name"]),
                SectionTime(**non_negatives(layer["forward"])),
                SectionTime(**non_negatives(layer["backward"])),
                tuple(map(str, layer["parameters"])),
            )
            for layer in content["layers"]
        ),
        "steps": tuple(tuple(map(non_negative, step)) for step in content["steps"]),
    }
    profile = Profile(**content | parsed)
    if not any(layer.parameters for layer in profile.layers):
        raise ValueError("no layer with parameters")
    return profile
