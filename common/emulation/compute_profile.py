"""A compute profile: how long each layer of a model takes on one machine. Imports no torch.

lab/calibrate/layer_profile.py measures one, ``load_profile`` reads and checks it, and
common/emulation/emulated_model.py sleeps for these times.
"""

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from common.errors import UserError
from common.utils.paths import REPORTS
from common.utils.typed_json import (
    LocalTime,
    Ranks,
    Seconds,
    Text,
    label,
    read_versioned,
    write_json,
)

FORMAT = 1
MEASURED = "measured"
_KIND = "compute profile"


LayerSeconds = Annotated[float, Meta(ge=0, le=1e4)]
_Pixels = Annotated[int, Meta(ge=1, le=65_536)]
_LEAST = 1e-9  # seconds of a whole pass


@dataclass(frozen=True)
class SectionTime:
    """Seconds over samples: ``fixed_seconds`` + ``sample_seconds`` x samples."""

    fixed_seconds: LayerSeconds
    sample_seconds: LayerSeconds

    def at(self, samples: float) -> float:
        """Return the seconds for that number of samples."""
        return self.fixed_seconds + self.sample_seconds * samples


@dataclass(frozen=True)
class Layer:
    """One call of a layer: its seconds, and the parameters whose gradients its backward makes."""

    name: Text
    forward: SectionTime
    backward: SectionTime
    parameters: Annotated[tuple[Text, ...], Meta(max_length=100_000)] = ()


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

    name: Text
    machine: Text
    device: Text
    threads: Ranks
    made: LocalTime
    model: Text
    image: tuple[_Pixels, _Pixels]
    layers: Annotated[tuple[Layer, ...], Meta(min_length=1, max_length=100_000)]
    update_seconds: LayerSeconds
    others_share: Annotated[float, Meta(ge=0, le=100)] = 0.0
    steps: Annotated[tuple[tuple[Seconds, Seconds, Seconds], ...], Meta(max_length=1000)] = ()

    def __post_init__(self) -> None:
        if not any(layer.parameters for layer in self.layers):
            raise ValueError("no layer has parameters")
        for way in ("forward", "backward"):
            times = [getattr(layer, way) for layer in self.layers]
            if math.fsum(time.fixed_seconds + time.sample_seconds for time in times) < _LEAST:
                raise ValueError(f"{way} takes no time, expected at least {_LEAST} s")

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

    def needed_seconds(self, samples: float) -> dict[str, float]:
        """Return the seconds of forward until each parameter is used, earliest first."""
        passed = 0.0
        needed: dict[str, float] = {}
        for layer in self.layers:
            needed |= dict.fromkeys(layer.parameters, passed)
            passed += layer.forward.at(samples)
        return needed

    def as_json(self) -> dict[str, Any]:
        """Return the file's content."""
        return label(_KIND, FORMAT) | asdict(self)

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises UserError if a number is out of its range."""
        write_json(path, self.as_json(), Profile)


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
    Raises UserError if the file is missing, cut, foreign, of a newer version, of another model or
    of other images, or if a number in it is impossible.
    """
    path = profile_path(choice, model=model)
    again = how_to_make(choice, model)
    try:
        profile = read_versioned(
            path, Profile, kind=_KIND, version=FORMAT, missing=f"there is no profile {path}"
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
