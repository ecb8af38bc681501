"""The end of a run: evaluation report, figures, ``summary.json`` and the card on the terminal, written by rank 0."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config.schema import Config
from common.data.dataset import Dataset
from common.distributed.process_group import World
from common.evaluation import generate_eval_report
from common.profiling.step_timer import SECTIONS
from common.reporting.console import card
from common.reporting.rank_stats import median_seconds, timed
from common.reporting.run_folder import RunFolder
from common.reporting.run_logger import RunLogger
from common.training_engine import Predictions
from common.utils.environment import peak_memory_bytes


def report(
    config: Config,
    world: World,
    folder: RunFolder,
    dataset: Dataset,
    run_logger: RunLogger,
    *,
    predictions: Predictions | None,
    ema_predictions: Predictions | None,
    checkpoint: Path | str | None,
    ranks_equal: bool,
    resumed_from: str | None,
    batch_size: int,
    total_seconds: float,
    extra: Mapping[str, Any],
) -> None:
    """Write report, figures and summary, and show the card; on rank 0 alone. Without ``predictions`` times alone."""
    result = ema_result = None
    if predictions is not None:
        result, ema_result = _report_accuracy(
            config, world, folder, dataset, run_logger, predictions, ema_predictions, checkpoint
        )
    history = run_logger.history
    steps = timed(history, config.untimed_steps, run_logger.timeline)
    seconds = median_seconds(steps, run_logger.period)
    step = seconds["step"] if seconds else None
    folder.write_json(
        "summary.json",
        {
            "part": config.part,
            "recipe": config.recipe,
            "sync": config.sync,
            "nodes": world.size,
            "backend": world.backend,
            "device": world.device.type,
            "emulated": config.emulated,
            "compute": config.compute,
            "dataset": config.dataset,
            "model": config.model,
            "global_batch_size": batch_size,
            "steps": len(history),
            "last_step": history[-1].step if history else None,
            "step_seconds": step,
            "section_seconds": {name: seconds[name] for name in SECTIONS} if seconds else None,
            "wait_seconds": seconds["wait"] if seconds else None,
            "sync_share": seconds["sync"] / step if seconds and step else None,
            "samples_per_second": batch_size / step if step else None,
            "total_seconds": total_seconds,
            "train_loss_last_step": history[-1].loss if history else None,
            "test_loss": result["test_loss"] if result else None,
            "test_accuracy": result["accuracy"] if result else None,
            "ema_test_loss": ema_result["test_loss"] if ema_result else None,
            "ema_test_accuracy": ema_result["accuracy"] if ema_result else None,
            "ranks_hold_equal_weights": ranks_equal,
            "checkpoint": str(checkpoint) if checkpoint else None,
            "resumed_from": resumed_from,
            "peak_memory_bytes": peak_memory_bytes(),
            "folder": str(folder.path),
            **extra,
        },
    )
    step_row, sync_row = "none: nothing was left to train", "-"
    if seconds and step:
        share = seconds["sync"] / step
        step_row = f"{step:.3f} (median of {len(steps)})"
        sync_row = f"{seconds['sync']:.3f} s, {share:.0%}, {seconds['wait']:.3f} s of it waiting"
    rows: dict[str, Any] = {
        "nodes": world.size,
        "seconds a step": step_row,
        "of it sync": sync_row,
        "total time": f"{total_seconds:.1f} s, {_throughput(run_logger)}",
    }
    if result is not None:
        rows |= {
            "test accuracy": f"{result['accuracy']:.2%} of {result['samples']:,} images",
            "test loss": f"{result['test_loss']:.3f}",
        }
    if ema_result is not None:
        rows["EMA accuracy"] = f"{ema_result['accuracy']:.2%}, of the averaged weights"
    rows["equal weights"] = "one rank"
    if world.size > 1:
        rows["equal weights"] = "yes, on all ranks" if ranks_equal else "NO: the ranks differ"
    if result is not None:
        rows["report"] = folder.report
    else:
        rows["folder"] = folder.path
    title = config.recipe or f"{config.part}: {config.sync}"
    card(f"{title}, EMULATED" if config.emulated else title, rows)


def _report_accuracy(
    config: Config,
    world: World,
    folder: RunFolder,
    dataset: Dataset,
    run_logger: RunLogger,
    predictions: Predictions,
    ema_predictions: Predictions | None,
    checkpoint: Path | str | None,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Write the evaluation's report and the figures; return its numbers, and those of the averaged weights."""
    from common.reporting.plots import (  # matplotlib: only the rank that draws pays for it
        draw_confusion_matrix,
        draw_loss,
    )

    history = run_logger.history
    result = generate_eval_report(
        predictions.labels,
        predictions.predicted,
        predictions.mean_loss,
        folder.report,
        str(checkpoint),
        class_names=dataset.class_names,
    )
    folder.write_json("report.json", result)
    ema_result = None
    if ema_predictions is not None:
        ema_result = generate_eval_report(
            ema_predictions.labels,
            ema_predictions.predicted,
            ema_predictions.mean_loss,
            folder.path / "report_ema.txt",
            f"{checkpoint} (averaged weights)",
            class_names=dataset.class_names,
        )
    way = f"{config.sync} on {world.size} ranks" if world.size > 1 else "one node"
    title = f"{config.model} on {config.dataset}, {way}"
    draw_confusion_matrix(
        folder.path / "confusion_matrix.png",
        matrix=result["confusion_matrix"],
        class_names=dataset.class_names,
        title=f"{title}: accuracy {result['accuracy']:.1%}",
    )
    if history:
        draw_loss(
            folder.path / "loss.png",
            steps=[record.step for record in history],
            losses=[record.loss for record in history],
            title=title,
        )
    return result, ema_result


def _throughput(run_logger: RunLogger) -> str:
    """Samples a second of all ranks while training, over the epochs that are done."""
    seconds = sum(report.seconds for report in run_logger.epochs)
    samples = sum(report.samples_per_second * report.seconds for report in run_logger.epochs)
    if not seconds:
        return "no epoch was left to train"
    return f"{samples / seconds:,.0f} samples/s in training"
