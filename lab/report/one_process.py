"""Compute the first two steps of a run again, in one process, as every exact strategy defines them.

``recompute`` trains the ranks' shards in turn and takes the mean gradient over the global batch.
The loss of step 1, before any exchange, must be the run's: otherwise data or code differ, and
nothing can be said. The loss of step 2 then shows whether the run stepped with the mean gradient.
If it did not, ``recompute`` tries the multiples of it that the usual mistakes give, and each rank's
own gradient.
"""

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.config.schema import DATA, OPTIMIZER, TRAINING, Config, settings
from common.data import load_dataset
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World
from common.errors import UserError, file_errors
from common.models import PRETRAINED, build_model
from common.profiling.records import StepRecord
from common.sync.none import NoSync
from common.training_engine import TrainingEngine
from common.training_plan import Setup, make_plan, prepare_model
from common.utils.source_hash import step_digest
from common.utils.typed_json import read_json
from lab.report.view import Json

_MOST_SECONDS = 60.0
# The differences, as a share of the loss, that rounding does not reach: on machines of one kind,
# as equality.START allows fp32, and on others.
_ROUNDING, _MACHINES = 1e-5, 1e-4
_DIVISORS = (4, 1, 2, 3, 8)  # in place of the world size; the commonest first


class _Multiplied(NoSync):
    """Multiplies the mean gradient, as a strategy with a wrong divisor does."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def synchronize(self, model: nn.Module) -> None:
        """See the base class."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= self._factor


def recompute(folder: Path, run: Json) -> dict[str, Any]:
    """Return what one process computes in the first steps of ``run``, which wrote ``folder``.

    Returns the ``loss`` of step 2, whether it ``agrees`` with the run's and, if not, the
    ``mistake`` that explains the run's, "" if none does; or ``why_not``, why this cannot be said.
    """
    threads = torch.get_num_threads()
    try:
        config = _config(folder, run)
        torch.set_num_threads(run["ranks"][0]["threads"])  # which may decide how sums are rounded
        (_, first), (_, second) = run["losses"][:2]
        one, two = (line.loss for line in _train(config))
        if not _equal(one, first):
            raise UserError(f"the loss of step 1 is {one:.7g} here, {first:.7g} in the run")
        agrees = _equal(two, second)
        mistakes = () if agrees else _mistakes(config, len(run["ranks"]))
        mistake = next((text for text, loss in mistakes if _equal(loss, second)), "")
        if not agrees and not mistake and _equal(two, second, tolerance=_MACHINES):
            raise UserError(f"the loss of step 2 is {two:.7g} here, {second:.7g} in the run")
        return {"loss": two, "agrees": agrees, "mistake": mistake}
    except UserError as error:
        return {"why_not": str(error)}
    finally:
        torch.set_num_threads(threads)


def _config(folder: Path, run: Json) -> Config:
    """Return the settings that decide the run's first steps. UserError if they are not enough."""
    with file_errors(f"{folder} cannot be read"):
        config = read_json(folder / "config.json", dict[str, Any])
        environment = read_json(folder / "environment.json", dict[str, Any])
    begun = [step for step, loss in run["losses"][:2] if loss is not None]
    sections = [rank["seconds"] for rank in run["ranks"]]
    seconds = 2 * sum(times["forward"] + times["backward"] for times in sections)
    reasons = {
        "it computed on a GPU": environment.get("gpus"),
        f"it computed in {config.get('precision')}": config.get("precision", "fp32") != "fp32",
        "its losses of steps 1 and 2 were not recorded, or are not finite": begun != [1, 2],
        "it began with pretrained weights": config.get("model") in PRETRAINED,
        "its images are a folder of your own": config.get("dataset") == "folder",
        f"it would take about {seconds:.0f} s": seconds > _MOST_SECONDS,
        "it ran other code, or another torch": environment.get("step_code") != step_digest(),
    }
    if why := next((reason for reason, holds in reasons.items() if holds), ""):
        raise UserError(why)
    kept = {
        name: config[name]
        for name, rules in settings().items()
        if rules["group"] in (DATA, TRAINING, OPTIMIZER) and name in config
    }
    # The plan's numbers stand in config.json in place of the settings that they follow from.
    derived = {"sync": "none", "local_batch_size": None, "warmup_epochs": None, "mirror": None}
    own = {"shards": config["shards"], "data_dir": _path(config.get("data_dir"))}
    return Config(part="PartOne", **kept | derived | own)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


@cache
def _train(
    config: Config, factor: float = 1.0, *, rank: int = 0, ranks: int = 1
) -> list[StepRecord]:
    """Train two steps on the shards of ``rank`` with ``factor`` times their part of the mean."""
    world, launch = World(rank, ranks), LaunchSpec()
    dataset = load_dataset(config.dataset, config.data_folder, mirror="")
    if config.normalise == "imagenet":
        dataset = dataset.normalised_as_imagenet()
    loader, plan = make_plan(config, launch, world, dataset, "", {})
    setup = Setup(config, launch, world, dataset, plan, None, {}, None, 0.0)
    torch.manual_seed(config.seed)
    model = build_model(config.model, len(dataset.class_names))
    model, criterion, optimizer, scheduler = prepare_model(setup, model)
    engine = TrainingEngine(
        model, "cpu", distributed=True, sync=_Multiplied(factor), clip_norm=config.clip_norm
    )
    engine.prepare(optimizer, criterion, scheduler)
    records: list[StepRecord] = []
    engine.train_epoch(loader, epoch=1, seed=config.seed, max_steps=2, on_steps=records.extend)
    engine.close()
    return records


def _mistakes(config: Config, ranks: int) -> Iterator[tuple[str, float]]:
    """Yield what a strategy may do instead, and the loss of step 2 that it gives."""
    for divisor in (*_DIVISORS, ranks * ranks):
        if divisor != ranks:
            share = f"its gradients are {ranks / divisor:.2f} of the mean"
            text = f"{share}: divided by {divisor} on {ranks} ranks?"
            yield text, _train(config, ranks / divisor)[1].loss
    own = [_train(config, ranks, rank=rank, ranks=ranks)[1] for rank in range(ranks)]
    samples = sum(line.local_samples for line in own)
    loss = sum(line.loss * line.local_samples for line in own) / samples
    yield "each rank steps with its own gradients, which are never exchanged?", loss


def _equal(one: float, other: float, *, tolerance: float = _ROUNDING) -> bool:
    return math.isclose(one, other, rel_tol=tolerance)
