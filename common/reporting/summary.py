"""The end of a run, on rank 0: evaluation report, figures, ``summary.json`` and the card."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec.structs import asdict

from common.evaluation import MEAN_OVER_SAMPLES, generate_eval_report
from common.profiling.records import SECTIONS, GradientClaim
from common.reporting.console import card, say
from common.reporting.header import unusual_methods
from common.reporting.rank_stats import peak_gpu_memory_bytes
from common.reporting.run_logger import RunLogger
from common.run_setup import Setup
from common.runs import RanksFile, RunSummary, mean_seconds, shared_nodes
from common.say import bytes_text, count, percent
from common.sync.memory_cost import KINDS, Memory
from common.training_engine import Predictions, TrainingEngine
from common.utils.environment import peak_memory_bytes
from common.utils.gradient_fit import as_matrix, is_mean

_NEAR_CHANCE = 1.5  # times the accuracy of guessing
_REPORTS = (("", ""), ("_ema", " (averaged weights)"))
"""Suffixes of the report's file and of the checkpoint's name: weights, then moving average."""


def report(
    setup: Setup,
    engine: TrainingEngine,
    run_logger: RunLogger,
    measured: RanksFile | None,
    predictions: Sequence[Predictions],
    checkpoint: Path | str | None,
    *,
    ranks_equal: bool,
) -> None:
    """Write this run's report.txt, figures and summary, and print the card; on rank 0 alone.

    measured : what ``gather_measurements`` returned.
    predictions : of the weights, then of their moving average; none if only times were measured.
    """
    notes = [f"{name.capitalize()}: {text}" for name, text in unusual_methods(setup).items()]
    results = [
        generate_eval_report(
            found.labels,
            found.predicted,
            found.mean_loss,
            run_logger.folder.path / f"report{stem}.txt",
            f"{checkpoint}{name}",
            class_names=setup.dataset.class_names,
            notes=notes,
            loss_is=MEAN_OVER_SAMPLES,
        )
        for found, (stem, name) in zip(predictions, _REPORTS, strict=False)
    ]
    if results:
        _draw(setup, run_logger, results[0])
    summary = _summary(setup, engine, run_logger, measured)
    summary.ranks_hold_equal_weights = ranks_equal
    summary.checkpoint = str(checkpoint) if checkpoint else None
    if results:
        summary.test_loss = results[0]["test_loss"]
        summary.test_accuracy = results[0]["accuracy"]
    if len(results) > 1:
        summary.ema_test_loss = results[1]["test_loss"]
        summary.ema_test_accuracy = results[1]["accuracy"]
    run_logger.folder.write_json("summary.json", asdict(summary))
    title = setup.config.recipe or f"{setup.config.part}: {setup.config.sync}"
    if setup.config.emulated:
        title += ", EMULATED"
    card(title, _card_rows(setup, engine, run_logger, measured, summary))


def report_end_of_rank(setup: Setup, run_logger: RunLogger) -> None:
    """Print that this rank, not rank 0, has finished; call it after the last collective.

    Ranks that torchrun has started share their node's terminal: there the first one prints.
    """
    world = setup.world
    if setup.launch.local_rank is not None and world.local_rank > 0:
        return
    line = (
        f"rank {world.rank} of {world.size}: finished after "
        f"{count(len(run_logger.own_steps), 'step')} in "
        f"{time.perf_counter() - setup.began:.1f} s. Rank 0 writes the report"
    )
    log = run_logger.folder.log(world.rank)
    if log.exists():
        line += f"; this rank's log: {log}"
    say(line)


def _draw(setup: Setup, run_logger: RunLogger, result: Mapping[str, Any]) -> None:
    """Write the evaluation's numbers, and draw the confusion matrix and the loss."""
    from common.reporting.plots import (  # slow to import, and only rank 0 draws
        draw_confusion_matrix,
        draw_loss,
    )

    config = setup.config
    folder = run_logger.folder
    folder.write_json("report.json", result)
    ranks = setup.world.size
    way = f"{config.sync} on {ranks} ranks" if ranks > 1 else "one process"
    title = f"{config.model} on {config.dataset}, {way}"
    draw_confusion_matrix(
        folder.path / "confusion_matrix.png",
        matrix=result["confusion_matrix"],
        class_names=setup.dataset.class_names,
        title=f"{title}: accuracy {percent(result['accuracy'], 1)}",
    )
    if run_logger.history:
        draw_loss(
            folder.path / "loss.png",
            steps=[record.step for record in run_logger.history],
            losses=[record.loss for record in run_logger.history],
            title=title,
        )


def _summary(
    setup: Setup, engine: TrainingEngine, run_logger: RunLogger, measured: RanksFile | None
) -> RunSummary:
    """Return the summary of a run without test results."""
    config = setup.config
    world = setup.world
    history = run_logger.history
    summary = RunSummary(
        part=config.part,
        recipe=config.recipe,
        sync=config.sync,
        nodes=world.size,
        backend=world.backend,
        device=world.device.type,
        emulated=config.emulated,
        compute=config.compute,
        dataset=config.dataset,
        model=config.model,
        flip=config.flip if setup.dataset.flip else "none",
        cutout=config.cutout,
        tta=config.tta,
        global_batch_size=setup.plan.batch_size,
        steps=len(history),
        load_per_core=run_logger.load_per_core,
        total_seconds=run_logger.total_seconds,
        wall_seconds=time.perf_counter() - setup.began,
        resumed_from=setup.resumed_from,
        peak_memory_bytes=peak_memory_bytes(),
        peak_gpu_memory_bytes=peak_gpu_memory_bytes(world.device),
        compile_seconds=engine.compile_seconds,
        folder=str(run_logger.folder.path),
    )
    if history:
        summary.last_step = history[-1].step
        summary.train_loss_last_step = history[-1].loss
    iterations = [step.step_seconds for step in history[1:]]
    if iterations:
        summary.mean_iteration_seconds = fmean(iterations)
    if measured is not None:
        seconds = mean_seconds(measured.ranks)
        summary.step_seconds = seconds.step
        summary.section_seconds = {name: getattr(seconds, name) for name in SECTIONS}
        summary.wait_seconds = seconds.wait
        summary.sync_share = seconds.sync / seconds.step
        step_seconds = summary.mean_iteration_seconds or seconds.step
        summary.samples_per_second = setup.plan.batch_size / step_seconds
    return summary


def _card_rows(
    setup: Setup,
    engine: TrainingEngine,
    run_logger: RunLogger,
    measured: RanksFile | None,
    summary: RunSummary,
) -> dict[str, Any]:
    """Return the rows of the card by name."""
    rows: dict[str, Any] = {"ranks": summary.nodes}
    if measured is not None and (shared := shared_nodes(measured.ranks)):
        rows["ranks"] = f"{summary.nodes} on {shared}"
    rows["step time"] = _step_text(summary)
    if engine.timeline and engine.timeline.steps:
        recorded = ", ".join(map(str, engine.timeline.steps))
        rows["recorded"] = (
            f"step {recorded}, for --timeline: counts in the step time, and recording slows a step "
            "a little"
        )
    rows["exposed communication"] = _sync_text(summary)
    if summary.samples_per_second is not None:
        rows["throughput"] = (
            f"{summary.samples_per_second:,.0f} samples/s: global batch / step time"
        )
    with_validation = ", with validation" if setup.config.validates else ""
    rows["training time"] = f"{run_logger.total_seconds:.1f} s{with_validation}"
    rows["wall time"] = f"{summary.wall_seconds:.1f} s, with start-up and evaluation"
    rows |= unusual_methods(setup)
    if summary.peak_gpu_memory_bytes:
        rows["GPU memory"] = f"{bytes_text(summary.peak_gpu_memory_bytes)} at most, on rank 0"
    if summary.test_accuracy is not None:
        rows["test accuracy"] = _accuracy_text(setup, summary.test_accuracy)
        rows["test loss"] = f"{summary.test_loss:.3f}"
    if summary.ema_test_accuracy is not None:
        rows["EMA accuracy"] = f"{percent(summary.ema_test_accuracy, 2)}, averaged weights"
    if run_logger.memory:
        rows["tensors"] = memory_text(run_logger.memory)
    if summary.compile_seconds:
        rows["compile time"] = f"{summary.compile_seconds:.1f} s, before the first step"
    rows |= _agreement_rows(summary, measured)
    if summary.test_accuracy is None:
        rows["folder"] = run_logger.folder.path
    else:
        rows["report"] = run_logger.folder.report
    return rows


def _agreement_rows(summary: RunSummary, measured: RanksFile | None) -> dict[str, str]:
    """Return whether the ranks ended with equal weights, and began with the mean gradient."""
    rows = {"equal weights": "only one rank"}
    if summary.nodes > 1:
        rows["equal weights"] = "yes, on all ranks"
    if not summary.ranks_hold_equal_weights:
        rows["equal weights"] = "NO: the ranks hold different weights"
    if measured is not None and measured.claim is not None:
        rows["gradients"] = claim_text(measured.claim)
    return rows


def _step_text(summary: RunSummary) -> str:
    if summary.mean_iteration_seconds is not None:
        over = f"mean of {count(summary.steps - 1, 'step')}"
        if summary.nodes > 1:
            over += " on rank 0"
        return f"{summary.mean_iteration_seconds:.3f} s: {over}, without the first"
    if summary.step_seconds is not None:
        return f"{summary.step_seconds:.3f} s: the only step"
    return "none: nothing was left to train"


def _sync_text(summary: RunSummary) -> str:
    if summary.nodes == 1:
        return "none: one rank"
    if summary.section_seconds is None or summary.sync_share is None:
        return "-"
    return (
        f"{summary.section_seconds['sync']:.3f} s ({percent(summary.sync_share)} of a step), of "
        f"which {summary.wait_seconds:.3f} s waiting for slower ranks"
    )


def claim_text(claim: GradientClaim) -> str:
    """Return what the watched step showed of what the optimisers got."""
    if claim.weights is None:
        return f"not checked for the mean: {claim.why_not}"
    weights = as_matrix(claim.weights)
    if is_mean(weights, claim.residue or 0.0, rounded=claim.rounded):
        return f"every rank got the mean over all ranks, seen in step {claim.step}"
    return f"NOT the mean over all ranks in step {claim.step}: ranks.json has the weights"


def _accuracy_text(setup: Setup, accuracy: float) -> str:
    text = f"{percent(accuracy, 2)} of {len(setup.dataset.test):,} images"
    chance = 1 / len(setup.dataset.class_names)
    if accuracy < _NEAR_CHANCE * chance:
        text += f", near chance ({percent(chance)})"
    return text


def memory_text(memory: Memory) -> str:
    """Return the bytes of rank 0's tensors by kind, for a person."""
    whole = sum(memory.values())
    parts = [
        f"{name} {memory[kind] / 1e6:.1f}"
        for kind, name in KINDS.items()
        if memory[kind] > whole / 1000
    ]
    return f"{whole / 1e6:.1f} MB on rank 0: {', '.join(parts)}"
