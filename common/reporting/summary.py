"""The end of a run, on rank 0: evaluation report, figures, ``summary.json`` and the card."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import asdict

from common.cost_model.calibration_file import count
from common.cost_model.memory_model import KINDS, Memory, total
from common.evaluation import generate_eval_report
from common.profiling.step_timer import SECTIONS
from common.reporting.console import card, say
from common.reporting.header import unusual_methods
from common.reporting.rank_stats import median_seconds, peak_gpu_memory_bytes, timed
from common.reporting.run_files import SectionSeconds, Summary
from common.reporting.run_logger import RunLogger
from common.training_engine import Predictions, StepRecord, TrainingEngine
from common.utils.environment import peak_memory_bytes

if TYPE_CHECKING:
    from common.experiment.setup import Setup

_NEAR_CHANCE = 1.5  # times the accuracy of guessing
_REPORTS = (("", ""), ("_ema", " (averaged weights)"))
"""Suffixes of the report's file and of the checkpoint's name: weights, then moving average."""


def report(
    setup: "Setup",
    engine: TrainingEngine,
    run_logger: RunLogger,
    predictions: Sequence[Predictions],
    checkpoint: Path | str | None,
    *,
    ranks_equal: bool,
    extra: Mapping[str, Any],
) -> None:
    """Write this run's report.txt, figures and summary, and print the card; on rank 0 alone.

    predictions : of the weights, then of their moving average; none if only times were measured.
    extra : further entries of the summary.
    """
    notes = [f"{name.capitalize()}: {text}" for name, text in unusual_methods(setup).items()]
    results = [
        generate_eval_report(
            one.labels,
            one.predicted,
            one.mean_loss,
            setup.folder.path / f"report{stem}.txt",
            f"{checkpoint}{name}",
            class_names=setup.dataset.class_names,
            notes=notes,
        )
        for one, (stem, name) in zip(predictions, _REPORTS, strict=False)
    ]
    history = run_logger.history
    if results:
        _draw(setup, history, results[0])
    steps = timed(history, setup.config.untimed_steps, engine.timeline)
    seconds = median_seconds(steps, engine.sync.period)
    summary = _summary(
        setup, engine, run_logger, seconds, results, checkpoint=checkpoint, ranks_equal=ranks_equal
    )
    setup.folder.write_json("summary.json", asdict(summary) | dict(extra))
    title = setup.config.recipe or f"{setup.config.part}: {setup.config.sync}"
    rows = _card_rows(setup, run_logger, summary, timed_steps=len(steps))
    card(f"{title}, EMULATED" if setup.config.emulated else title, rows)


def report_end_of_rank(setup: "Setup", *, steps: int) -> None:
    """Print that this rank, not rank 0, has finished; call it after the last collective.

    Ranks that torchrun has started share their node's terminal: there the first one prints.
    """
    world = setup.world
    if setup.launch.local_rank is not None and world.local_rank > 0:
        return
    log = setup.folder.log(world.rank)
    own = f"; this rank's log: {log}" if log.exists() and log != Path(os.devnull) else ""
    say(
        f"rank {world.rank} of {world.size}: finished after {count(steps, 'step')} in "
        f"{time.perf_counter() - setup.began:.1f} s. Rank 0 writes the report{own}"
    )


def _draw(setup: "Setup", history: Sequence[StepRecord], result: Mapping[str, Any]) -> None:
    """Write the evaluation's numbers, and draw the confusion matrix and the loss."""
    from common.reporting.plots import (  # slow to import, and only rank 0 draws
        draw_confusion_matrix,
        draw_loss,
    )

    config, ranks, folder = setup.config, setup.world.size, setup.folder
    folder.write_json("report.json", result)
    way = f"{config.sync} on {ranks} ranks" if ranks > 1 else "one node"
    title = f"{config.model} on {config.dataset}, {way}"
    draw_confusion_matrix(
        folder.path / "confusion_matrix.png",
        matrix=result["confusion_matrix"],
        class_names=setup.dataset.class_names,
        title=f"{title}: accuracy {100 * result['accuracy']:.1f} %",
    )
    if history:
        draw_loss(
            folder.path / "loss.png",
            steps=[record.step for record in history],
            losses=[record.loss for record in history],
            title=title,
        )


def _summary(
    setup: "Setup",
    engine: TrainingEngine,
    run_logger: RunLogger,
    seconds: Mapping[str, float] | None,
    results: Sequence[Mapping[str, Any]],
    *,
    checkpoint: Path | str | None,
    ranks_equal: bool,
) -> Summary:
    config, world, batch_size = setup.config, setup.world, setup.plan.batch_size
    history = run_logger.history
    step = seconds["step"] if seconds else None
    nothing = {"test_loss": None, "accuracy": None}
    result, ema_result = [*results, nothing, nothing][:2]
    return Summary(
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
        global_batch_size=batch_size,
        steps=len(history),
        last_step=history[-1].step if history else None,
        step_seconds=step,
        section_seconds=cast(SectionSeconds, {name: seconds[name] for name in SECTIONS})
        if seconds
        else None,
        wait_seconds=seconds["wait"] if seconds else None,
        sync_share=seconds["sync"] / step if seconds and step else None,
        samples_per_second=batch_size / step if step else None,
        train_loss_last_step=history[-1].loss if history else None,
        test_loss=result["test_loss"],
        test_accuracy=result["accuracy"],
        ema_test_loss=ema_result["test_loss"],
        ema_test_accuracy=ema_result["accuracy"],
        total_seconds=run_logger.total_seconds,
        wall_seconds=time.perf_counter() - setup.began,
        ranks_hold_equal_weights=ranks_equal,
        checkpoint=str(checkpoint) if checkpoint else None,
        resumed_from=setup.checkpoint.path if setup.checkpoint is not None else None,
        peak_memory_bytes=peak_memory_bytes(),
        peak_gpu_memory_bytes=peak_gpu_memory_bytes(world.device),
        captured=world.device.type == "cuda" and not engine.not_captured,
        not_captured=engine.not_captured,
        compile_seconds=engine.compile_seconds,
        folder=str(setup.folder.path),
    )


def _card_rows(
    setup: "Setup", run_logger: RunLogger, summary: Summary, *, timed_steps: int
) -> dict[str, Any]:
    """Return the rows of the card by name."""
    step_row, sync_row = "none: nothing was left to train", "-"
    if summary.step_seconds and summary.section_seconds:
        step_row = (
            f"{summary.step_seconds:.3f} s (median of {count(timed_steps, 'step')}), "
            + section_text(summary.section_seconds, summary.step_seconds)
        )
        share = 100 * (summary.sync_share or 0.0)
        sync_row = (
            f"{summary.section_seconds['sync']:.3f} s ({share:.0f} % of a step), of which "
            f"{summary.wait_seconds:.3f} s waiting for slower ranks"
        )
    if setup.world.size == 1:
        sync_row = "none: one rank"
    speed = _throughput(run_logger)
    if setup.config.validates:
        speed = f"with validation, {speed} without"
    rows: dict[str, Any] = {
        "ranks": setup.world.size,
        "step time": step_row,
        "exposed communication": sync_row,
        "training time": f"{run_logger.total_seconds:.1f} s, {speed}",
        "wall time": f"{summary.wall_seconds:.1f} s, with start-up and evaluation",
    } | unusual_methods(setup)
    if summary.peak_gpu_memory_bytes is not None:
        rows["GPU memory"] = f"{summary.peak_gpu_memory_bytes / 1e9:.2f} GB at most, on rank 0"
    if summary.test_accuracy is not None:
        images = len(setup.dataset.test)
        chance = 1 / len(setup.dataset.class_names)
        guessing = f", near chance ({100 * chance:.0f} %)"
        rows["test accuracy"] = f"{100 * summary.test_accuracy:.2f} % of {images:,} images" + (
            guessing if summary.test_accuracy < _NEAR_CHANCE * chance else ""
        )
        rows["test loss"] = f"{summary.test_loss:.3f}"
    if summary.ema_test_accuracy is not None:
        rows["EMA accuracy"] = f"{100 * summary.ema_test_accuracy:.2f} %, averaged weights"
    if run_logger.memory:
        rows["tensors"] = memory_text(run_logger.memory)
    rows |= graph_rows(summary)
    rows["equal weights"] = "only one rank"
    if setup.world.size > 1:
        equal = summary.ranks_hold_equal_weights
        rows["equal weights"] = (
            "yes, on all ranks" if equal else "NO: the ranks hold different weights"
        )
    tested, folder = summary.test_accuracy is not None, setup.folder
    return rows | ({"report": folder.report} if tested else {"folder": folder.path})


def memory_text(memory: Memory) -> str:
    """Return the bytes of rank 0's tensors by kind, for a person."""
    whole = total(memory)
    parts = [
        f"{name} {memory[kind] / 1e6:.1f}"
        for kind, name in KINDS.items()
        if memory[kind] > whole / 1000
    ]
    return f"{whole / 1e6:.1f} MB on rank 0: {', '.join(parts)}"


def section_text(sections: SectionSeconds, step_seconds: float) -> str:
    """Return how much of a step its sections take, both medians, for a person."""
    if not sections["forward"]:  # only a graph has no time for it
        return "forward, backward and update in one CUDA graph: not timed apart"
    within = min(sum(sections[name] for name in SECTIONS), step_seconds)  # sums exceed medians
    return f"of which {within:.3f} s in the five sections"


def graph_rows(summary: Summary) -> dict[str, str]:
    """Return, for a run on a GPU, whether it was captured, and how long compiling took."""
    rows = {}
    if summary.device == "cuda":
        rows["CUDA graph"] = "yes" if summary.captured else f"no: {summary.not_captured}"
    if summary.compile_seconds:
        rows["compile time"] = f"{summary.compile_seconds:.1f} s, before the first step"
    return rows


def _throughput(run_logger: RunLogger) -> str:
    """Return the training throughput of all ranks together, over the complete epochs."""
    seconds = sum(report.seconds for report in run_logger.epochs)
    samples = sum(report.samples_per_second * report.seconds for report in run_logger.epochs)
    if not seconds:
        return "no epoch was completed"
    return f"{samples / seconds:,.0f} samples/s"
