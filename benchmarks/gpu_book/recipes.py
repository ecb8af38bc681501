"""Recipes on a GPU: trainings whose epochs fit in a given time; the accuracy of saved weights."""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.checkpoint import load_checkpoint, load_model_state
from common.data import load_dataset
from common.data.loaders import EvaluationLoader
from common.models import build_model
from common.training_engine import predict
from common.utils import paths
from gpu_book.measuring import choose_device, parser
from gpu_book.runner import REPOSITORY
from gpu_book.summaries import facts, show, text

_TRAINING_IMAGES = 50_000  # of CIFAR-10 and CIFAR-100
_SHARE = 0.95  # of the time, so that a slower minute does not cut the training off


def epochs_that_fit(seconds: float, *, step_seconds: float, batch_size: int, most: int) -> int:
    """Return the number of epochs, 1 to ``most``, whose steps take at most ``seconds``."""
    steps = math.ceil(_TRAINING_IMAGES / batch_size)
    return max(1, min(most, math.floor(_SHARE * seconds / (steps * step_seconds))))


def fit(arguments: argparse.Namespace) -> None:
    """Measure the recipe's step, choose the epochs, train, and show both."""
    began = time.perf_counter()
    short = ["--max-steps", "2", "--measure-only"] if arguments.dry_run else ["--max-steps", "60"]
    measured = _run(arguments, "measured", short)
    used = time.perf_counter() - began
    overhead = used - measured["total_seconds"]  # start, data and evaluation
    seconds = min(arguments.seconds, arguments.limit - used - overhead)
    settings = tomllib.loads((REPOSITORY / "recipes" / f"{arguments.recipe}.toml").read_text())
    epochs = epochs_that_fit(
        seconds,
        step_seconds=measured["step_seconds"],
        batch_size=measured["global_batch_size"],
        most=settings["epochs"],
    )
    chosen = (
        f"{epochs} of the recipe's {settings['epochs']} epochs, with a schedule of that length: a "
        f"step takes {1000 * measured['step_seconds']:.2f} ms, and the training has {seconds:.0f} s"
    )
    result = {"chosen_epochs": epochs, "measured": measured}
    show(result, chosen)
    whole = ["--epochs", str(epochs), "--save-every-epochs", str(epochs)]
    trained = _run(arguments, "trained", short if arguments.dry_run else whole)
    show(result | {"trained": trained}, chosen, text(trained))


def _run(arguments: argparse.Namespace, name: str, flags: list[str]) -> dict[str, Any]:
    """Run PartThree with the recipe; return the facts of its summary."""
    words = ["--recipe", arguments.recipe, *arguments.flags, *flags]
    words += ["--output-dir", str(arguments.work), "--run-name", name]
    subprocess.run([sys.executable, "PartThree/main.py", *words], cwd=REPOSITORY, check=True)
    return facts(arguments.work / arguments.recipe / name)


def accuracy(arguments: argparse.Namespace) -> None:
    """Show the accuracy of every run's weights, with and without flip, and the runs' means.

    Without AMP, while a run evaluates with its own. Float32 convolutions use TF32, torch's default.
    """
    device = choose_device(arguments.dry_run)
    summaries = sorted(arguments.work.glob("*/seed*/summary.json"))
    if not summaries:
        raise SystemExit(f"error: no run in {arguments.work} has ended: see the steps before")
    rows = []
    for path in summaries:
        summary = json.loads(path.read_text())
        row = {"training_seconds": summary["total_seconds"]}
        rows.append(row | _accuracies(summary, arguments.data_dir, device))
    lines = [_spread(name, [row[name] for row in rows]) for name in rows[0]]
    show({"runs": rows}, *lines)


def _accuracies(
    summary: dict[str, Any], data_dir: Path | None, device: torch.device
) -> dict[str, float]:
    """Return the test accuracy of a run's weights and of their average, by name."""
    dataset = load_dataset(summary["dataset"], data_dir or paths.DATA)
    loader = EvaluationLoader(dataset.test, mean=dataset.mean, std=dataset.std, device=device)
    entries = load_checkpoint(Path(summary["checkpoint"]))
    model, found = build_model(summary["model"], len(dataset.class_names)), {}
    model.to(device, memory_format=torch.channels_last)
    for key, name in (("model_state_dict", "weights"), ("ema_state_dict", "average")):
        if key in entries:
            load_model_state(model, {"model_state_dict": entries[key]}, name=key)
            for flip in (False, True) if dataset.flip else (False,):
                predictions = predict(model, device, nn.CrossEntropyLoss(), loader, flip=flip)
                found[name + " with flip" * flip] = predictions.accuracy
    return found


def _spread(name: str, values: list[float]) -> str:
    scale, unit = (1, "s") if name.endswith("seconds") else (100, "%")
    mean, deviation = scale * statistics.mean(values), scale * statistics.pstdev(values)
    return f"{name}: {mean:.2f} {unit}, mean of {len(values)} (standard deviation {deviation:.2f})"


def main() -> None:
    """Train, or evaluate, and print the result."""
    flags = parser(__doc__)
    flags.add_argument("action", choices=("fit", "accuracy"))
    flags.add_argument("--work", type=Path, required=True, help="folder of the runs")
    flags.add_argument("--data-dir", type=Path, help="folder of the datasets")
    flags.add_argument("--recipe", help="name of a recipe")
    flags.add_argument("--seconds", type=float, help="largest time of the training")
    flags.add_argument("--limit", type=float, help="largest time of both runs, in seconds")
    flags.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of PartThree, last")
    arguments = flags.parse_args()
    {"fit": fit, "accuracy": accuracy}[arguments.action](arguments)


if __name__ == "__main__":
    main()
