"""Compute the first two steps of a run again, in one process, as every exact strategy defines them.

``recompute`` trains the ranks' shards in turn, in a plain loop instead of the engine, and takes the
mean gradient over the global batch.
The loss of step 1, before any exchange, must be the run's: otherwise data or code differ, and
nothing can be said. The loss of step 2 then shows whether the run stepped with the mean gradient.
If it did not, ``recompute`` tries the multiples of it that the usual mistakes give, and each rank's
own gradient.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from msgspec import Struct

from common.config.schema import DATA, OPTIMIZER, TRAINING, Config, settings
from common.data import load_dataset
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World
from common.errors import UserError, file_errors
from common.models import PRETRAINED, build_model
from common.run_setup import Setup, prepare_model
from common.training_engine.batches import MicroBatch
from common.training_plan import make_plan
from common.utils.source_hash import step_digest
from common.utils.typed_json import convert, read_json
from lab.comparison.record import OneProcess, Repeat

_MOST_SECONDS = 60.0
# The differences, as a share of the loss, that rounding does not reach: on machines of one kind,
# as equality.START allows fp32, and on others.
_ROUNDING, _MACHINES = 1e-5, 1e-4
_DIVISORS = (4, 1, 2, 3, 8)  # in place of the world size; the commonest first


class _RunSettings(Struct):
    """The entries of ``config.json`` that decide whether one process can do the same."""

    dataset: str | None = None
    normalise: str | None = None
    model: str | None = None
    precision: str = "fp32"
    clip_norm: float | None = None


class _RunMachine(Struct):
    """The entries of ``environment.json`` that do."""

    gpus: list[str] = []
    step_code: str | None = None


def recompute(folder: Path, run: Repeat) -> OneProcess:
    """Compare ``run``, which wrote ``folder``, with what one process computes in its first steps.

    Returns whether the loss of step 2 ``agrees``, its ``difference``, the ``limit`` of rounding,
    the ``mistake`` that explains the run's loss ("" if none does); and, where ``agrees`` is None,
    ``why_not``: why this cannot be said.
    """
    threads = torch.get_num_threads()
    try:
        config = _config(folder, run)
        torch.set_num_threads(run.ranks[0].threads)  # which may decide how sums are rounded
        return _compare(config, run)
    except UserError as error:
        return OneProcess(agrees=None, why_not=str(error))
    finally:
        torch.set_num_threads(threads)


def _compare(config: Config, run: Repeat) -> OneProcess:
    """Compare the run's first two losses with those computed here.

    UserError if nothing can be said: step 1 differs, or step 2 differs by no more than another kind
    of machine explains.
    """
    first, second = (loss for _, loss in run.losses[:2])
    assert first is not None  # else there is no config
    assert second is not None
    first_here, second_loss = _first_step(config)
    second_here = second_loss(1.0)
    if not _equal(first_here, first):
        raise UserError(f"the loss of step 1 is {first_here:.7g} here, {first:.7g} in the run")
    agrees = _equal(second_here, second)
    mistake = ""
    if not agrees:
        mistake = _mistake(config, second, len(run.ranks))
        if not mistake and _equal(second_here, second, _MACHINES):
            raise UserError(
                f"the loss of step 2 is {second_here:.7g} here, {second:.7g} in the run"
            )
    return OneProcess(
        agrees=agrees,
        difference=abs(second_here - second),
        limit=_ROUNDING * abs(second_here),
        mistake=mistake,
    )


def _config(folder: Path, run: Repeat) -> Config:
    """Return the settings that decide the run's first steps. UserError if they are not enough."""
    with file_errors(f"{folder} cannot be read"):
        facts = read_json(folder / "config.json", dict[str, Any])
        known = convert(facts, _RunSettings, name=str(folder / "config.json"))
        machine = read_json(folder / "environment.json", _RunMachine)
    _check_that_one_process_can(run, known, machine)
    kept = {
        name: facts[name]
        for name, setting in settings().items()
        if setting.group in (DATA, TRAINING, OPTIMIZER) and facts.get(name) is not None
    }
    data_dir = None
    if "data_dir" in kept:
        data_dir = Path(str(kept["data_dir"]))
    # The plan's numbers stand in config.json in place of the settings that they follow from.
    kept |= {
        "sync": "none",
        "local_batch_size": None,
        "warmup_epochs": None,
        "mirror": None,
        "shards": facts.get("shards"),
        "data_dir": data_dir,
    }
    return Config(part="PartOne", **kept)


def _check_that_one_process_can(run: Repeat, known: _RunSettings, machine: _RunMachine) -> None:
    """Raise UserError, which says why not, unless the run's first steps can be computed again."""
    if machine.gpus:
        raise UserError("it computed on a GPU")
    if known.precision != "fp32":
        raise UserError(f"it computed in {known.precision}")
    if [step for step, loss in run.losses[:2] if loss is not None] != [1, 2]:
        raise UserError("its losses of steps 1 and 2 were not recorded, or are not finite")
    if known.model in PRETRAINED:
        raise UserError("it began with pretrained weights")
    if known.clip_norm:
        raise UserError("it clips its gradients")
    if known.normalise == "imagenet":
        raise UserError("its images are normalised as ImageNet's")
    if known.dataset == "folder":
        raise UserError("its images are a folder of your own")
    seconds = 2 * sum(rank.seconds.forward + rank.seconds.backward for rank in run.ranks)
    if seconds > _MOST_SECONDS:
        raise UserError(f"it would take about {seconds:.0f} s")
    if machine.step_code != step_digest():
        raise UserError("it ran other code, or another torch")


@cache
def _first_step(
    config: Config, rank: int = 0, ranks: int = 1
) -> tuple[float, Callable[[float], float]]:
    """Compute the gradients of step 1 on the shards of ``rank``, in a plain loop.

    Returns the loss of step 1, and a function that takes a factor and returns the loss of step 2
    after an update with that multiple of the gradients.
    """
    world = World(rank, ranks)
    launch = LaunchSpec()
    dataset = load_dataset(config.dataset, config.data_folder, mirror="")
    loader, plan = make_plan(config, launch, world, dataset, "", {})
    setup = Setup(config, launch, world, dataset, plan, None, {}, None, 0.0)
    torch.manual_seed(config.seed)
    model, criterion, optimizer, _ = prepare_model(
        setup, build_model(config.model, len(dataset.class_names))
    )
    batches = iter(loader)
    first = list(islice(batches, len(loader.micro_batches)))
    second = list(islice(batches, len(loader.micro_batches)))
    parameters = list(model.parameters())  # all of them train
    start = [parameter.detach().clone() for parameter in parameters]

    def loss_of(window: Sequence[MicroBatch]) -> torch.Tensor:
        samples = sum(len(labels) for _, labels in window)
        parts = [
            criterion(model(images), labels) * len(labels) / samples for images, labels in window
        ]
        return torch.stack(parts).sum()

    loss = loss_of(first)
    loss.backward()
    gradients = [each.grad for each in parameters if each.grad is not None]

    def second_loss(factor: float) -> float:
        for parameter, value, gradient in zip(parameters, start, gradients, strict=True):
            parameter.data = value.clone()
            parameter.grad = factor * gradient
        optimizer.state.clear()  # an earlier call has stepped
        optimizer.step()
        with torch.no_grad():
            return loss_of(second).item()

    return loss.item(), second_loss


def _mistake(config: Config, second: float, ranks: int) -> str:
    """Return what a strategy does instead if the loss of step 2 is ``second``; "" if unknown."""
    _, second_loss = _first_step(config)
    for divisor in (*_DIVISORS, ranks * ranks):
        factor = ranks / divisor  # the sum over this divisor, in means
        if divisor != ranks and _equal(second_loss(factor), second):
            return (
                f"its gradients are {factor:.2f} of the mean: divided by {divisor} on "
                f"{ranks} ranks?"
            )
    own = [_first_step(config, rank, ranks) for rank in range(ranks)]
    if _equal(fmean(own_second_loss(1.0) for _, own_second_loss in own), second):
        return "each rank steps with its own gradients?"
    return ""


def _equal(one: float, other: float, tolerance: float = _ROUNDING) -> bool:
    return math.isclose(one, other, rel_tol=tolerance)
