"""One run from beginning to end. ``run`` is the walk; read it downward, and leave it only to go deeper."""

import statistics
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from common.checkpoint import digest, newest_checkpoint
from common.config import Config, Launch
from common.console import Progress, card, say
from common.data import load_dataset
from common.data.dataset import Dataset
from common.data.loaders import EvaluationLoader, TrainLoader
from common.data.sharding import GlobalBatchSampler
from common.distributed import World, agree, everyone, gather_objects, on_rank0, process_group, set_debug
from common.errors import UserError
from common.evaluation import generate_eval_report
from common.memory import keep_freed_memory
from common.models import build_model
from common.precision import choose_amp
from common.records import RunFolder, environment, new_run_name, peak_memory_bytes, usable_cores
from common.schedules import build_schedule
from common.training import get_model_parameters, prepare_model_for_training, read_checkpoint, train_model
from common.training_engine import EpochResult, Predictions, StepRecord, predict
from common.training_engine.prediction import unwrap


def run(config: Config, launch: Launch) -> None:
    """Train, evaluate and report as ``config`` says, at the place in the group that ``launch`` says.

    Raises UserError, GroupError, or torch's RuntimeError where a collective breaks.
    """
    if config.debug:
        set_debug()
    keep_freed_memory()
    with process_group(launch, backend=config.backend, timeout_seconds=config.timeout) as world, _spoken_warnings(world):
        agree(world, config.shared_settings(), what="their settings")
        torch.set_num_threads(config.threads or max(1, usable_cores() // world.local_size))
        torch.manual_seed(config.seed)
        name = on_rank0(world, lambda: new_run_name(_way_folder(config)))
        folder = everyone(world, lambda: RunFolder(_way_folder(config) / name))
        if world.is_root:
            folder.write_json("config.json", config.as_json() | {"world_size": world.size, "backend": world.backend})
            folder.write_json("environment.json", environment())

        dataset = everyone(world, lambda: load_dataset(config.dataset, config.data_folder, mirror=config.mirror),
                           patient=True)
        agree(world, _fingerprint(dataset), what="their dataset")
        batch_size = config.global_batch_size(world.size)
        sampler = GlobalBatchSampler(len(dataset.train), batch_size=batch_size, rank=world.rank,
                                     world_size=world.size, seed=config.seed)
        train_loader = TrainLoader(dataset, sampler, device=world.device)
        plan = _plan(config, batch_size=batch_size, steps_per_epoch=len(train_loader), dataset=dataset)

        resume_path, entries = _read_resume(config, world, plan)
        model = build_model(config.model, len(dataset.class_names))
        amp_dtype, notice = choose_amp(config.amp, config.amp_dtype, default=config.part == "PartThree",
                                       device=world.device)
        if world.is_root:
            _introduce(config, world, model, dataset, plan, folder, amp_dtype, notice)
        model, criterion, optimizer = prepare_model_for_training(
            model, world.device, config.peak_learning_rate, config.momentum, config.weight_decay, entries is not None,
            resume_path or "", config.sync == "ddp", opt=config.opt, nesterov=config.nesterov, checkpoint=entries)
        scheduler = build_schedule(optimizer, plan["schedule"], total_steps=plan["total_steps"],
                                   warmup_steps=plan["warmup_steps"])

        first_epoch, last_epoch = _epochs(config, plan, entries)
        with Progress(plan["total_steps"], done_steps=entries["step"] if entries else 0, global_batch_size=batch_size,
                      visible=world.is_root) as progress:
            recorder = _Recorder(world, folder, progress)
            model = train_model(
                model, world.device, criterion, optimizer, first_epoch, last_epoch, train_loader, folder.log(world.rank),
                folder.checkpoints, config.sync == "ddp", rank=world.rank if world.size > 1 else "", sync=config.sync,
                scheduler=scheduler, amp_dtype=amp_dtype, seed=config.seed, max_steps=config.max_steps, resume=entries,
                checkpoint_extra={"plan": plan}, log_every=config.log_every, on_steps=recorder.steps,
                on_epoch=recorder.epoch)

        predictions = _evaluate(model, criterion, dataset, world)
        equal = len(set(gather_objects(world, digest(unwrap(model).state_dict())))) == 1
    if world.is_root:  # the group is closed: nobody waits while rank 0 draws
        _report(config, world, folder, dataset, recorder, predictions, ranks_equal=equal, resumed_from=resume_path)


def _way_folder(config: Config) -> Path:
    return config.reports_folder / f"{config.part}-{config.sync}"


@contextmanager
def _spoken_warnings(world: World) -> Iterator[None]:
    """Show warnings meant for the user as one line, on rank 0; they are the same on every rank."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def speak(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if category is not UserWarning:
                show(message, category, *place, **more)
            elif world.is_root:
                say(f"warning: {message}")

        warnings.showwarning = speak
        yield


def _fingerprint(dataset: Dataset) -> dict[str, Any]:
    return {"classes": list(dataset.class_names), "training images": len(dataset.train),
            "test images": len(dataset.test),
            "contents (SHA-256)": digest([dataset.train.images, dataset.train.labels, dataset.test.images,
                                          dataset.test.labels])}


def _plan(config: Config, *, batch_size: int, steps_per_epoch: int, dataset: Dataset) -> dict[str, Any]:
    """What a resumed run must share with the one that it goes on with."""
    warmup = config.warmup_steps
    if config.warmup_epochs is not None:
        warmup = round(config.warmup_epochs * steps_per_epoch)
    return {"dataset": config.dataset, "training_images": len(dataset.train), "model": config.model, "opt": config.opt,
            "batch_size": batch_size, "seed": config.seed, "schedule": config.schedule,
            "total_steps": config.max_steps or config.epochs * steps_per_epoch, "warmup_steps": warmup,
            "steps_per_epoch": steps_per_epoch}


def _read_resume(config: Config, world: World, plan: Mapping[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
    """Return path and entries of the checkpoint to go on from, on every rank; (None, None) for a fresh start."""
    if on_rank0(world, lambda: config.resume) is None:
        return None, None
    path = on_rank0(world, lambda: _find_checkpoint(config))
    if path is None:
        return None, None
    entries = read_checkpoint(world, path)
    saved = entries.get("plan")
    if saved is None:
        raise UserError(f"checkpoint {path} was written by train_model alone and does not tell its schedule: go on with "
                        "prepare_model_for_training(continue_flag=True) and train_model")
    differing = [f"{name} {saved.get(name)} there, {value} here" for name, value in plan.items()
                 if saved.get(name) != value]
    if differing:
        raise UserError(f"checkpoint {path} belongs to another training: {'; '.join(differing)}. Give the same flags, and "
                        "stop early with --stop-after-epoch, not by a shorter training")
    return path, entries


def _find_checkpoint(config: Config) -> str | None:
    if config.resume != "auto":
        return config.resume
    runs = sorted((path / "checkpoints" for path in _way_folder(config).iterdir() if path.is_dir()), reverse=True)
    path, passed_over = newest_checkpoint(runs)
    for reason in passed_over:
        say(f"warning: {reason}")
    say(f"--resume auto: going on from {path}" if path else
        f"--resume auto: no checkpoint in {_way_folder(config)}; starting anew")
    return str(path) if path else None


def _epochs(config: Config, plan: Mapping[str, Any], entries: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the first and the last epoch to train, both included; none is left where the first is the later one."""
    last = -(-plan["total_steps"] // plan["steps_per_epoch"])
    return (entries["epoch"] + 1 if entries else 1), min(last, config.stop_after_epoch or last)


def _introduce(config: Config, world: World, model: nn.Module, dataset: Dataset, plan: Mapping[str, Any],
               folder: RunFolder, amp_dtype: torch.dtype | None, notice: str) -> None:
    if notice:
        say(f"notice: {notice}")
    local = plan["batch_size"] / world.size
    say(f"{config.part}: {config.model} ({get_model_parameters(model):,} parameters) on {config.dataset} "
        f"({len(dataset.train):,} training images), sync {config.sync}, {world.backend or 'one process'} on "
        f"{world.device.type}, {'fp32' if amp_dtype is None else str(amp_dtype).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads a rank")
    say(f"batch: {local:g} a rank x {world.size} rank{'s' if world.size > 1 else ''} = {plan['batch_size']} global; "
        f"{plan['total_steps']} steps, {plan['steps_per_epoch']} an epoch; {config.opt}, {plan['schedule']}, rate "
        f"{config.peak_learning_rate:g}")
    say(f"writing to {folder.path}")


class _Recorder:
    """Takes down the training on rank 0: metrics, progress, epochs."""

    def __init__(self, world: World, folder: RunFolder, progress: Progress) -> None:
        self._world, self._folder, self._progress = world, folder, progress
        self.history: list[StepRecord] = []
        self.checkpoint: Path | None = None

    def steps(self, records: list[StepRecord]) -> None:
        """Record steps that are done."""
        if self._world.is_root:
            self.history += records
            self._folder.append_metrics(records)
            self._progress.show(records)

    def epoch(self, epoch: int, result: EpochResult, checkpoint: Path) -> None:
        """Record an epoch that is done and saved."""
        self.checkpoint = checkpoint
        if self._world.is_root:
            say(f"epoch {epoch} done in {result.seconds:.1f} s, checkpoint {checkpoint}")


def _evaluate(model: nn.Module, criterion: nn.Module, dataset: Dataset, world: World) -> Predictions:
    """Share the test set out, without padding, and return the whole set's predictions, on every rank."""
    loader = EvaluationLoader(dataset.test, mean=dataset.mean, std=dataset.std, rank=world.rank, world_size=world.size,
                              device=world.device)
    mine = predict(model, world.device, criterion, loader)
    parts = gather_objects(world, (loader.ids.numpy(), mine))
    order = np.argsort(np.concatenate([ids for ids, _ in parts]))
    return Predictions(np.concatenate([part.labels for _, part in parts])[order],
                       np.concatenate([part.predicted for _, part in parts])[order],
                       sum(part.loss_sum for _, part in parts))


def _report(config: Config, world: World, folder: RunFolder, dataset: Dataset, recorder: _Recorder,
            predictions: Predictions, *, ranks_equal: bool, resumed_from: str | None) -> None:
    """Write report, figures and summary, and show the card."""
    from common.figures import draw_confusion_matrix, draw_loss  # matplotlib: only the rank that draws pays for it

    history = recorder.history
    checkpoint = str(recorder.checkpoint or resumed_from)
    report = generate_eval_report(predictions.labels, predictions.predicted, predictions.mean_loss, folder.report,
                                  checkpoint, class_names=dataset.class_names)
    folder.write_json("report.json", report)
    way = f"{config.sync} on {world.size} ranks" if world.size > 1 else "one node"
    title = f"{config.model} on {config.dataset}, {way}"
    draw_confusion_matrix(folder.path / "confusion_matrix.png", matrix=report["confusion_matrix"],
                          class_names=dataset.class_names, title=f"{title}: accuracy {report['accuracy']:.1%}")
    if history:
        draw_loss(folder.path / "loss.png", steps=[record.step for record in history],
                  losses=[record.loss for record in history], title=title)
    seconds = _median_seconds(history)
    step = sum(seconds.values()) if seconds else None
    summary = {
        "part": config.part, "sync": config.sync, "nodes": world.size, "backend": world.backend,
        "device": world.device.type, "dataset": config.dataset, "model": config.model,
        "global_batch_size": config.global_batch_size(world.size), "steps": len(history),
        "last_step": history[-1].step if history else None, "step_seconds": step, "section_seconds": seconds,
        "sync_share": seconds["sync"] / step if step else None,
        "samples_per_second": config.global_batch_size(world.size) / step if step else None,
        "train_loss_last_step": history[-1].loss if history else None, "test_loss": report["test_loss"],
        "test_accuracy": report["accuracy"], "ranks_hold_equal_weights": ranks_equal, "checkpoint": checkpoint,
        "resumed_from": resumed_from, "peak_memory_bytes": peak_memory_bytes(), "folder": str(folder.path)}
    folder.write_json("summary.json", summary)
    card(f"{config.part}: {config.sync}", {
        "nodes": world.size,
        "seconds a step": f"{step:.3f} (median of {max(1, len(history) - 1)})" if step else "none: nothing was left to train",
        "of it sync": f"{seconds['sync']:.3f} s, {seconds['sync'] / step:.0%}" if step else "-",
        "test accuracy": f"{report['accuracy']:.2%} of {report['samples']:,} images",
        "test loss": f"{report['test_loss']:.3f}",
        "equal weights": ("yes, on all ranks" if ranks_equal else "NO: the ranks differ") if world.size > 1 else "one rank",
        "report": folder.report})


def _median_seconds(history: list[StepRecord]) -> dict[str, float] | None:
    """Return the median seconds of each section over the steps but the first, which warms up."""
    steps = history[1:] or history
    if not steps:
        return None
    return {name: statistics.median(record.seconds[name] for record in steps) for name in steps[0].seconds}
