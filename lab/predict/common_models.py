"""Common models: their size, and when backward has made which gradients. Imports no torch.

common_models.toml holds them, with sources.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from lab.predict.calibration_file import Calibration, GradientShape
from lab.predict.compute_model import ComputeModel

# Shares of backward at which common_models.toml tells the share of gradients that are ready.
_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
TENSORS = 50  # square matrices of a model of which only the number of parameters is known
_BYTES_OF_AN_ENTRY = (2, 4)


@dataclass(frozen=True)
class CommonModel:
    """A model of ``tensors`` gradients, taken to be equal matrices.

    ready : shares of the gradients that backward has made after ``_SHARES`` of its time.
    optimizer : that it is usually trained with, of ``OPTIMIZERS``.
    """

    name: str
    parameters: int
    tensors: int
    ready: tuple[float, ...]
    optimizer: str = "momentum"

    def gradients(self, nbytes: float | None = None) -> tuple[GradientShape, ...]:
        """Return the gradients in fp32, or such that they have about ``nbytes`` together."""
        entries = self.parameters if nbytes is None else nbytes / 4
        of_a_tensor = max(1.0, entries / self.tensors)
        rows = max(1, round(of_a_tensor**0.5))
        columns = max(1, round(of_a_tensor / rows))
        return (GradientShape((rows, columns), itemsize=4),) * self.tensors

    def of(self, calibration: Calibration, nbytes: float | None = None) -> Calibration:
        """Return the calibration with this model's gradients, of about ``nbytes`` together."""
        gradients = self.gradients(nbytes)
        return replace(
            calibration,
            model=self.name,
            gradients=gradients,
            compute=spread(calibration.compute, gradients, self.ready),
            batchnorm=None,
        )


def spread(
    compute: ComputeModel, gradients: tuple[GradientShape, ...], ready: Sequence[float] = _SHARES
) -> ComputeModel:
    """Return the compute whose backward makes ``gradients`` as ``ready`` says: see CommonModel."""
    ready_bytes = tuple(accumulate(gradient.nbytes for gradient in reversed(gradients)))
    made = np.array(ready_bytes) / ready_bytes[-1]
    shares = np.interp(made, ready, _SHARES)
    return ComputeModel(compute.profiles, ready_bytes, tuple(shares.tolist()))


def evenly(parameters: float, tensors: int) -> CommonModel:
    """Return a model of which only the size is known: backward makes all bytes equally fast.

    tensors : at most so many.
    """
    whole = max(1, round(parameters))
    name = f"a model of {parameters:,.0f} parameters"
    return CommonModel(name, whole, min(tensors, whole), _SHARES)


@cache
def common_models() -> Mapping[str, CommonModel]:
    """Return the models of common_models.toml by name."""
    path = Path(__file__).with_name("common_models.toml")
    tables: dict[str, dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))
    models = {}
    for name, entry in tables.items():
        ready = (0.0, *entry["ready"])
        optimizer = entry.get("optimizer", "momentum")
        models[name] = CommonModel(name, entry["parameters"], entry["tensors"], ready, optimizer)
    return models


def model_called(text: str, nbytes: float) -> CommonModel | None:
    """Return the common model that somebody calls ``text``, whose gradients have ``nbytes``.

    Of several ("VGG-11" is one for ImageNet and one for CIFAR-10) it is the one of most nearly that
    size, in fp32 or fp16. None if the name says none, or if the size is of none.
    """
    written = _plain(text)
    found = []
    for name, model in common_models().items():
        family = _plain(name.removesuffix("_cifar10").removesuffix("_imagenet"))
        if written.startswith(family):
            off = min(abs(log(nbytes / (size * model.parameters))) for size in _BYTES_OF_AN_ENTRY)
            found.append((-len(family), off, name))
    if not found:
        return None
    _, off, name = min(found)
    return common_models()[name] if off < log(1.5) else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
