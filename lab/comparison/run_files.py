"""Read the folder of one run: summary, settings, machine and ranks, as far as lab needs them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from common.errors import UserError, file_errors
from common.reporting.run_files import StepTime
from common.utils.typed_json import (
    Count,
    Facts,
    Finite,
    Name,
    Ranks,
    Seed,
    Share,
    Step,
    Text,
    check_facts,
    convert,
    read_json,
    read_lines,
)

T = TypeVar("T")

# The facts of ``environment.json`` that must agree for times to be comparable.
MACHINE_FACTS = ("cpu", "gpus", "torch", "usable_cores")

# The settings in ``config.json`` that must agree for two runs to be comparable.
TRAINING_FACTS = (
    *("dataset", "training_images", "model", "batch_size", "seed", "learning_rate", "schedule"),
    *("warmup_steps", "warmup_epochs", "milestones", "step_factor", "scale_lr", "total_steps"),
    *("opt", "momentum", "nesterov", "weight_decay", "label_smoothing", "clip_norm"),
    *("accumulation_steps", "amp", "amp_dtype", "sync_batchnorm", "pretrained_weights"),
    *("unfreeze", "input_size", "normalise", "flip", "cutout", "tta", "untimed_steps"),
)


class Summary(Struct, kw_only=True):
    """The entries of ``summary.json`` that are read again; a run writes more (summary.py)."""

    test_accuracy: Share | None = None
    test_loss: Finite | None = None
    ranks_hold_equal_weights: bool = True
    mean_iteration_seconds: StepTime | None = None
    load_per_core: Finite | None = None


class RunConfig(Struct, kw_only=True):
    """The entries of ``config.json`` with which a reader computes.

    A run writes all its settings; ``TRAINING_FACTS`` names those that must agree.
    """

    world_size: Ranks
    sync: Name
    batch_size: Step
    seed: Seed
    bucket_mb: Annotated[float, Meta(gt=0, le=1e9)] | Literal["auto"] | None = None
    dataset: Text | None = None
    precision: Name | None = None
    steps_per_epoch: Count = 0
    total_steps: Count | None = None
    untimed_steps: Count | None = None
    compute: Text = "real"


class Machine(Struct, kw_only=True):
    """The entries of ``environment.json`` with which a reader computes; it has many more."""

    usable_cores: Ranks | None = None
    git_commit: Text | None = None


def read_run_file(path: Path, schema: type[T]) -> T:
    """Return a JSON file of a run. UserError if it is missing or does not fit its schema."""
    with _of_a_run(path):
        return read_json(path, schema)


def read_run_lines(path: Path, schema: type[T]) -> list[T]:
    """Return the lines of a run's records; errors as those of ``read_run_file``."""
    with _of_a_run(path):
        return read_lines(path, schema)


def read_known(path: Path, schema: type[T]) -> tuple[T, Facts]:
    """Return what a reader computes with, and all facts of the same file.

    schema : ``RunConfig`` or ``Machine``. Errors as those of ``read_run_file``; also UserError if a
    fact is no plain value.
    """
    with _of_a_run(path):
        facts = read_json(path, dict[str, Any])
        known = convert(facts, schema, name=str(path))
        check_facts(facts, name=str(path))
    return known, facts


@contextmanager
def _of_a_run(path: Path) -> Iterator[None]:
    """Say in each error about ``path`` why a run's file may be missing or incomplete."""
    try:
        with file_errors(f"{path} cannot be read"):
            yield
    except UserError as error:
        raise UserError(
            f"{error}: the run has not finished, or its folder was not copied completely"
        ) from error
