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

from common.config.schema import DATA, OPTIMIZER, TRAINING, Config, settings
from common.data import load_dataset
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World
from common.errors import UserError, file_errors
from common.models import PRETRAINED, build_model
from common.training_engine.batches import MicroBatch
from common.training_plan import Setup, make_plan, prepare_model
from common.utils.source_hash import step_digest
from common.utils.typed_json import read_json
from lab.report.view import Json

_MOST_SECONDS = 60.0
# The differences, as a share of the loss, that rounding does not reach: on machines of one kind,
# as equality.START allows fp32, and on others.
_ROUNDING, _MACHINES = 1e-5, 1e-4
_NOTHING = {"agrees": None, "difference": 0.0, "limit": 0.0, "mistake": "", "why_not": ""}
_DIVISORS = (4, 1, 2, 3, 8)  # in place of the world size; the commonest first


def recompute(folder: Path, run: Json) -> dict[str, Any]:
    """Compare ``run``, which wrote ``folder``, with what one process computes in its first steps.

    Returns whether the loss of step 2 ``agrees``, its ``difference``, the ``limit`` of rounding,
    the ``mistake`` that explains the run's loss ("" if none does); and, where ``agrees`` is None,
    ``why_not``: why this cannot be said.
    """
    threads = torch.get_num_threads()
    try:
        config = _config(folder, run)
        torch.set_num_threads(run["ranks"][0]["threads"])  # which may decide how sums are rounded
        (_, first), (_, second) = run["losses"][:2]
        one, second_loss = _first_step(config)
        two = second_loss(1.0)
        if not _equal(one, first):
            raise UserError(f"the loss of step 1 is {one:.7g} here, {first:.7g} in the run")
        agrees = _equal(two, second)
        mistake = "" if agrees else _mistake(config, second, len(run["ranks"]))
        if not agrees and not mistake and _equal(two, second, _MACHINES):
            raise UserError(f"the loss of step 2 is {two:.7g} here, {second:.7g} in the run")
        numbers = {"difference": abs(two - second), "limit": _ROUNDING * abs(two)}
        return _NOTHING | numbers | {"agrees": agrees, "mistake": mistake}
    except UserError as error:
        return _NOTHING | {"why_not": str(error)}
    finally:
        torch.set_num_threads(threads)


def _config(folder: Path, run: Json) -> Config:
    """Return the settings that decide the run's first steps. UserError if they are not enough."""
    with file_errors(f"{folder} cannot be read"):
        config = read_json(folder / "config.json", dict[str, Any])
        environment = read_json(folder / "environment.json", dict[str, Any])
    begun = [step for step, loss in run["losses"][:2] if loss is not None]
    seconds = 2 * sum(
        rank["seconds"]["forward"] + rank["seconds"]["backward"] for rank in run["ranks"]
    )
    reasons = {
        "it computed on a GPU": environment.get("gpus"),
        f"it computed in {config.get('precision')}": config.get("precision", "fp32") != "fp32",
        "its losses of steps 1 and 2 were not recorded, or are not finite": begun != [1, 2],
        "it began with pretrained weights": config.get("model") in PRETRAINED,
        "it clips its gradients": config.get("clip_norm"),
        "its images are normalised as ImageNet's": config.get("normalise") == "imagenet",
        "its images are a folder of your own": config.get("dataset") == "folder",
        f"it would take about {seconds:.0f} s": seconds > _MOST_SECONDS,
        "it ran other code, or another torch": environment.get("step_code") != step_digest(),
    }
    if why := next((reason for reason, holds in reasons.items() if holds), ""):
        raise UserError(why)
    kept = {
        name: config[name]
        for name, known in settings().items()
        if known.group in (DATA, TRAINING, OPTIMIZER) and config.get(name) is not None
    }
    # The plan's numbers stand in config.json in place of the settings that they follow from.
    derived = {
        **{"sync": "none", "local_batch_size": None, "warmup_epochs": None, "mirror": None},
        "shards": config.get("shards"),
        "data_dir": Path(str(kept["data_dir"])) if "data_dir" in kept else None,
    }
    return Config(part="PartOne", **kept | derived)


@cache
def _first_step(
    config: Config, rank: int = 0, ranks: int = 1
) -> tuple[float, Callable[[float], float]]:
    """Compute the gradients of step 1 on the shards of ``rank``, in a plain loop.

    Returns the loss of step 1, and a function that takes a factor and returns the loss of step 2
    after an update with that multiple of the gradients.
    """
    world, launch = World(rank, ranks), LaunchSpec()
    dataset = load_dataset(config.dataset, config.data_folder, mirror="")
    loader, plan = make_plan(config, launch, world, dataset, "", {})
    setup = Setup(config, launch, world, dataset, plan, None, {}, None, 0.0)
    torch.manual_seed(config.seed)
    model, criterion, optimizer, _ = prepare_model(
        setup, build_model(config.model, len(dataset.class_names))
    )
    batches = iter(loader)
    first, second = (list(islice(batches, len(loader.micro_batches))) for _ in (1, 2))
    parameters = list(model.parameters())  # all of them train
    start = [parameter.detach().clone() for parameter in parameters]

    def loss_of(window: Sequence[MicroBatch]) -> torch.Tensor:
        samples = sum(len(labels) for _, labels in window)
        parts = [
            criterion(model(images), labels) * len(labels) / samples for images, labels in window
        ]
        return torch.stack(parts).sum()

    def second_loss(factor: float) -> float:
        for parameter, value, gradient in zip(parameters, start, gradients, strict=True):
            parameter.data, parameter.grad = value.clone(), factor * gradient
        optimizer.state.clear()
        optimizer.step()
        with torch.no_grad():
            return loss_of(second).item()

    loss = loss_of(first)
    loss.backward()
    gradients = [each.grad for each in parameters if each.grad is not None]
    return loss.item(), second_loss


def _mistake(config: Config, second: float, ranks: int) -> str:
    """Return what a strategy does instead if the loss of step 2 is ``second``; "" if unknown."""
    _, second_loss = _first_step(config)
    for divisor in (*_DIVISORS, ranks * ranks):
        if divisor != ranks and _equal(second_loss(ranks / divisor), second):
            return (
                f"its gradients are {ranks / divisor:.2f} of the mean: divided by {divisor} on "
                f"{ranks} ranks?"
            )
    loss = fmean(_first_step(config, rank, ranks)[1](1.0) for rank in range(ranks))
    return "each rank steps with its own gradients?" if _equal(loss, second) else ""


def _equal(one: float, other: float, tolerance: float = _ROUNDING) -> bool:
    return math.isclose(one, other, rel_tol=tolerance)
