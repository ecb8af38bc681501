"""The gradients and BatchNorm layers of this project's models, without building them.

project_models.json has them, so that a prediction needs no torch. `python -m
lab.predict.project_models` writes it; a test builds each model and compares.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from common.models import MODELS
from common.sync.plans.batchnorm import BatchNormLayer
from common.utils.atomic_files import write_atomically
from lab.predict.calibration_file import GradientShape

CLASSES = 100


class ModelParts(Struct):
    """What a prediction knows of a model with ``CLASSES`` outputs.

    gradients : in the order of the parameters. batchnorm : the layers that train.
    """

    gradients: tuple[GradientShape, ...]
    batchnorm: Annotated[tuple[BatchNormLayer, ...], Meta(max_length=100_000)]


def parts_of(model: str) -> ModelParts:
    """Return the parts of a model in ``common.models``; one that the file lacks is built."""
    known = msgspec.json.decode(_path().read_bytes(), type=dict[str, ModelParts])
    return known.get(model) or built_parts(model)


def built_parts(model: str) -> ModelParts:
    """Build a model without its values, and return its parts. Imports torch."""
    import torch

    from common.models import build_model
    from common.training_engine.batchnorm import synchronised_layers

    with torch.device("meta"):
        built = build_model(model, CLASSES)
    gradients = tuple(GradientShape(tuple(p.shape), p.itemsize) for p in built.parameters())
    return ModelParts(gradients, tuple(synchronised_layers(built)))


def _path() -> Path:
    return Path(__file__).with_name("project_models.json")


def main() -> None:
    """Write the file."""
    parts = {model: built_parts(model) for model in MODELS}
    write_atomically(_path(), msgspec.json.encode(parts) + b"\n")


if __name__ == "__main__":
    main()
