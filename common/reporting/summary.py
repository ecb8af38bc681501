"""The end of a run, on rank 0: evaluation report, figures, ``summary.json`` and the card."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from common.errors import count
from common.evaluation import MEAN_OVER_SAMPLES, generate_eval_report
from common.profiling.records import KINDS, SECTIONS, Memory
from common.reporting.console import card, say
from common.reporting.header import unusual_methods
from common.reporting.rank_stats import median_seconds, peak_gpu_memory_bytes, timed
from common.reporting.run_files import StepSeconds
from common.reporting.run_logger import RunLogger
from common.training_engine import Predictions, TrainingEngine
from common.training_plan import Setup
from common.utils.environment import peak_memory_bytes

_NEAR_CHANCE = 1.5  # times the accuracy of guessing
_REPORTS = (("", ""), ("_ema", " (averaged weights)"))
"""Suffixes of the report's file and of the checkpoint's name: weights, then moving average."""


def report(
    setup: Setup,
    engine: TrainingEngine,
    run_logger: RunLogger,
    predictions: Sequence[Predictions],
    checkpoint: Path | str | None,
    *,
    ranks_equal: bool,
) -> None:
    """Write this run's report.txt, figures and summary, and print the card; on rank 0 alone.

    predictions : of the weights, then of their moving average; none if only times were measured.
    """
    notes = [f"{name.capitalize()}: {text}" for name, text in unusual_methods(setup).items()]
    results = [
        generate_eval_report(
            one.labels,
            one.predicted,
            one.mean_loss,
            run_logger.folder.path / f"report{stem}.txt",
            f"{checkpoint}{name}",
            class_names=setup.dataset.class_names,
            notes=notes,
            loss_is=MEAN_OVER_SAMPLES,
        )
        for one, (stem, name) in zip(predictions, _REPORTS, strict=False)
    ]
    if results:
        _draw(setup, run_logger, results[0])
    steps = timed(run_logger.history, setup.config.untimed_steps, engine.timeline)
    seconds = median_seconds(steps, engine.sync.plan.period)
    summary = _summary(setup, engine, run_logger, seconds, results) | {
        "ranks_hold_equal_weights": ranks_equal,
        "checkpoint": str(checkpoint) if checkpoint else None,
    }
    run_logger.folder.write_json("summary.json", summary)
    title = setup.config.recipe or f"{setup.config.part}: {setup.config.sync}"
    rows = _card_rows(setup, run_logger, summary, timed_steps=len(steps))
    card(f"{title}, EMULATED" if setup.config.emulated else title, rows)


def report_end_of_rank(setup: Setup, run_logger: RunLogger) -> None:
    """Print that this rank, not rank 0, has finished; call it after the last collective.

    Ranks that torchrun has started share their node's terminal: there the first one prints.
    """
    world = setup.world
    if setup.launch.local_rank is not None and world.local_rank > 0:
        return
    log = run_logger.folder.log(world.rank)
    say(
        f"rank {world.rank} of {world.size}: finished after "
        f"{count(len(run_logger.own_steps), 'step')} in "
        f"{time.perf_counter() - setup.began:.1f} s. Rank 0 writes the report"
        + (f"; this rank's log: {log}" if log.exists() else "")
    )


def _draw(setup: Setup, run_logger: RunLogger, result: Mapping[str, Any]) -> None:
    """Write the evaluation's numbers, and draw the confusion matrix and the loss."""
    from common.reporting.plots import (  # slow to import, and only rank 0 draws
        draw_confusion_matrix,
        draw_loss,
    )

    config, ranks, folder = setup.config, setup.world.size, run_logger.folder
    folder.write_json("report.json", result)
    way = f"{config.sync} on {ranks} ranks" if ranks > 1 else "one node"
    title = f"{config.model} on {config.dataset}, {way}"
    draw_confusion_matrix(
        folder.path / "confusion_matrix.png",
        matrix=result["confusion_matrix"],
        class_names=setup.dataset.class_names,
        title=f"{title}: accuracy {100 * result['accuracy']:.1f} %",
    )
    if history := run_logger.history:
        draw_loss(
            folder.path / "loss.png",
            steps=[record.step for record in history],
            losses=[record.loss for record in history],
            title=title,
        )


def _summary(
    setup: Setup,
    engine: TrainingEngine,
    run_logger: RunLogger,
    seconds: StepSeconds | None,
    results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the entries of ``summary.json``; ``results`` : of the weights, then their average."""
    config, world, batch_size = setup.config, setup.world, setup.plan.batch_size
    history = run_logger.history
    step = seconds.step if seconds else None
    iterations = [one.step_seconds for one in timed(history[1:], 0, engine.timeline)]
    nothing = {"test_loss": None, "accuracy": None}
    result, ema_result = [*results, nothing, nothing][:2]
    return {
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
        "flip": config.flip if setup.dataset.flip else "none",
        "cutout": config.cutout,
        "tta": config.tta,
        "global_batch_size": batch_size,
        "steps": len(history),
        "last_step": history[-1].step if history else None,
        "step_seconds": step,
        "mean_iteration_seconds": fmean(iterations) if iterations else None,  # without the first
        "section_seconds": {name: getattr(seconds, name) for name in SECTIONS} if seconds else None,
        "wait_seconds": seconds.wait if seconds else None,
        "sync_share": seconds.sync / step if seconds and step else None,
        "samples_per_second": batch_size / step if step else None,
        "train_loss_last_step": history[-1].loss if history else None,
        "test_loss": result["test_loss"],
        "test_accuracy": result["accuracy"],
        "ema_test_loss": ema_result["test_loss"],
        "ema_test_accuracy": ema_result["accuracy"],
        "load_per_core": run_logger.load_per_core,
        "total_seconds": run_logger.total_seconds,
        "wall_seconds": time.perf_counter() - setup.began,
        "resumed_from": setup.resumed_from,
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_gpu_memory_bytes": peak_gpu_memory_bytes(world.device),
        "captured": None,  # as not_captured: earlier versions recorded steps as CUDA graphs
        "not_captured": None,
        "compile_seconds": engine.compile_seconds,
        "folder": str(run_logger.folder.path),
    }


def _card_rows(
    setup: Setup, run_logger: RunLogger, summary: Mapping[str, Any], *, timed_steps: int
) -> dict[str, Any]:
    """Return the rows of the card by name."""
    world, folder = setup.world, run_logger.folder
    step, sections = summary["step_seconds"], summary["section_seconds"]
    mean = summary["mean_iteration_seconds"]
    accuracy, ema_accuracy = summary["test_accuracy"], summary["ema_test_accuracy"]
    step_row, sync_row = "none: nothing was left to train", "-"
    if step:
        within = min(sum(sections.values()), step)  # a sum of medians may exceed the median
        step_row = (
            f"{step:.3f} s (median of {count(timed_steps, 'step')}), of which {within:.3f} s in "
            "the five sections"
        )
        sync_row = (
            f"{sections['sync']:.3f} s ({100 * summary['sync_share']:.0f} % of a step), of which "
            f"{summary['wait_seconds']:.3f} s waiting for slower ranks"
        )
    speed = _throughput(run_logger)
    if setup.config.validates:
        speed = f"with validation, {speed} without"
    equal = "yes, on all ranks" if world.size > 1 else "only one rank"
    if not summary["ranks_hold_equal_weights"]:
        equal = "NO: the ranks hold different weights"
    gpu, chance = summary["peak_gpu_memory_bytes"], 1 / len(setup.dataset.class_names)
    rows = {
        "ranks": world.size,
        "step time": step_row,
        "mean iteration time": mean is not None and f"{mean:.3f} s, without the first iteration",
        "exposed communication": sync_row if world.size > 1 else "none: one rank",
        "training time": f"{run_logger.total_seconds:.1f} s, {speed}",
        "wall time": f"{summary['wall_seconds']:.1f} s, with start-up and evaluation",
        **unusual_methods(setup),
        "GPU memory": gpu and f"{gpu / 1e9:.2f} GB at most, on rank 0",
        "test accuracy": accuracy is not None
        and f"{100 * accuracy:.2f} % of {len(setup.dataset.test):,} images"
        + (f", near chance ({100 * chance:.0f} %)" if accuracy < _NEAR_CHANCE * chance else ""),
        "test loss": accuracy is not None and f"{summary['test_loss']:.3f}",
        "EMA accuracy": ema_accuracy is not None
        and f"{100 * ema_accuracy:.2f} %, averaged weights",
        "tensors": run_logger.memory and memory_text(run_logger.memory),
        "compile time": summary["compile_seconds"]
        and f"{summary['compile_seconds']:.1f} s, before the first step",
        "equal weights": equal,
        "report": accuracy is not None and folder.report,
        "folder": accuracy is None and folder.path,
    }
    return {name: value for name, value in rows.items() if value}


def memory_text(memory: Memory) -> str:
    """Return the bytes of rank 0's tensors by kind, for a person."""
    whole = sum(memory.values())
    parts = [
        f"{name} {memory[kind] / 1e6:.1f}"
        for kind, name in KINDS.items()
        if memory[kind] > whole / 1000
    ]
    return f"{whole / 1e6:.1f} MB on rank 0: {', '.join(parts)}"


def _throughput(run_logger: RunLogger) -> str:
    """Return the training throughput of all ranks together, over the complete epochs."""
    seconds = sum(report.seconds for report in run_logger.epochs)
    samples = sum(report.samples_per_second * report.seconds for report in run_logger.epochs)
    if not seconds:
        return "no epoch was completed"
    return f"{samples / seconds:,.0f} samples/s"
