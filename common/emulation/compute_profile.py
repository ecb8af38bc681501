"""A compute profile: how long each layer of a model takes on one machine. Imports no torch.

lab/calibrate/layer_profile.py measures one, ``load_profile`` reads and checks it, and
common/emulation/emulated_model.py sleeps for these times.
"""

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

    def as_json(self) -> dict[str, Any]:
        """Return the file's content."""
        return label(_KIND, FORMAT) | asdict(self)

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises UserError if a number is out of its range."""
        write_json(path, self.as_json(), Profile)


def profile_path(choice: str, *, model: str) -> Path:
    """Return the path of a profile: a file that ends in .json, or a name in reports/profiles/.

    "measured" is this machine's own profile of ``model``.
    """
    if choice.endswith(".json"):
        return Path(choice)
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
        profile = read_versioned(path, Profile, kind=_KIND, version=FORMAT)
    except UserError as error:
        raise UserError(f"--compute {choice}: {error}: {again}") from error
    wrong = f"--compute {choice}: the profile {path} was measured"
    if profile.model != model:
        raise UserError(f"{wrong} for {profile.model}, but the model is {model}: {again}")
    if image is not None and image != profile.image:
        raise UserError(
            f"{wrong} with images of {_size(profile.image)}, but the dataset has {_size(image)}: "
            "use a dataset or a profile of the same size"
        )
    if choice == MEASURED and machine is not None and machine != profile.machine:
        raise UserError(
            f"{wrong} on {profile.machine!r}, but this machine is {machine!r}: {again}; to "
            f"emulate that machine, give the file: --compute {path}"
        )
    return profile


def _size(image: tuple[int, int]) -> str:
    return f"{image[0]}x{image[1]}"


def how_to_make(choice: str, model: str) -> str:
    """Return a sentence that names the command which measures that profile."""
    named = "" if choice == MEASURED else f" --profile {Path(choice).stem}"
    of_model = "" if model == "vgg11" else f" --model {model}"
    return f"`lab calibrate{named}{of_model}` measures one"
