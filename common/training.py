"""The assignment's training functions, for your own scripts and notebooks.

Call ``prepare_model_for_training``, then ``train_model``, with any model and any loader. ``run``
prepares the same way, but calls the engine itself: it has flags for more than these functions.
"""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from common.checkpoint import fill_fused_momentum, load_model_state, load_optimizer_state
from common.distributed.collectives import broadcast_checkpoint
from common.distributed.process_group import check_open, current_world
from common.errors import UserError
from common.sync import STRATEGIES, build_sync
from common.training_engine import Callback, EpochEnd, EpochResult, TrainingEngine
from common.training_engine.batches import check_lengths
from common.training_engine.checkpoint_manager import CheckpointManager
from common.training_engine.evaluation_loop import unwrap
from common.utils.atomic_files import append_text

# The tasks of the assignment's Part Two, not this project's parts.
_STRATEGY_OF_TASK = {"": "none", "PartOne": "gather_scatter", "PartTwo": "all_reduce"}


def get_model_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters; 9,231,114 for VGG-11."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def prepare_model_for_training(
    model: nn.Module,
    device: torch.device | str,
    learning_rate: float,
    momentum: float,
    weight_decay: float,
    continue_flag: bool,
    continue_checkpoint_path: str | Path = "",
    distribute_flag: bool = False,
    *,
    opt: str = "sgd",
    nesterov: bool = False,
    label_smoothing: float = 0.0,
    checkpoint: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, nn.Module, Optimizer]:
    """Return (model, criterion, optimizer), ready for ``train_model``.

    The model moves to ``device``; its convolutions get channels_last strides. The criterion is
    CrossEntropyLoss.

    Parameters
    ----------
    continue_flag : load model and optimizer from ``continue_checkpoint_path``. In a process group
        every rank calls this; rank 0 reads the file and sends it to the others. The checkpoint's
        optimizer settings win over ``learning_rate``, ``momentum`` and ``weight_decay``; a warning
        names those that differ.
    distribute_flag : wrap the model in DistributedDataParallel; needs an open process group.
    opt : "sgd" or "adamw".
    nesterov : use Nesterov's momentum with sgd.
    label_smoothing : share of each label that is spread over all classes, 0 to 1.
    checkpoint : the checkpoint's entries, if they are loaded already.

    Raises UserError on a checkpoint that cannot be used.
    """
    model = model.to(device).to(memory_format=torch.channels_last)
    trained = [p for p in model.parameters() if p.requires_grad]
    # On a GPU one kernel for all parameters: a GradScaler need not ask the GPU for overflow.
    fused = torch.device(device).type == "cuda" or None
    if opt == "sgd":
        optimizer: Optimizer = SGD(
            trained,
            lr=learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov and momentum > 0,
            fused=fused,
        )
        fill_fused_momentum(optimizer)
    else:
        optimizer = AdamW(trained, lr=learning_rate, weight_decay=weight_decay, fused=fused)
    if continue_flag:
        name = str(continue_checkpoint_path)
        entries = checkpoint or broadcast_checkpoint(current_world(device), name)
        load_model_state(unwrap(model), entries, name=name)
        _load_optimizer(optimizer, entries, name)
    if distribute_flag:
        check_open(1, None)
        model = build_sync("ddp").prepare(model, optimizer)
    return model, nn.CrossEntropyLoss(label_smoothing=label_smoothing), optimizer


def _load_optimizer(optimizer: Optimizer, entries: Mapping[str, Any], name: str) -> None:
    """Load the optimizer's state; warn of each setting that the checkpoint has changed."""
    given = [dict(group) for group in optimizer.param_groups]
    load_optimizer_state(optimizer, entries, name=name)
    kept = []
    for asked, group in zip(given, optimizer.param_groups, strict=True):
        # A scheduler keeps the rate that it was given under another key, and changes "lr".
        given_rate = group.get("max_lr", group.get("initial_lr", group["lr"]))
        saved = group | {"lr": given_rate}
        for key in ("lr", "momentum", "weight_decay"):
            if key in asked and saved[key] != asked[key]:
                kept.append(f"{key} {saved[key]} (not {asked[key]})")
    if kept:
        warnings.warn(
            f"the optimizer uses the settings saved in checkpoint {name}: {', '.join(kept)}",
            stacklevel=3,
        )


def train_model(
    model: nn.Module,
    device: torch.device | str,
    criterion: nn.Module,
    optimizer: Optimizer,
    start_epoch: int,
    end_epoch: int,
    train_loader: Iterable[tuple[Tensor, Tensor]],
    logs_path: str | Path,
    checkpoint_dir: str | Path,
    distribute_flag: bool,
    task_flag: str = "",
    rank: str | int = "",
) -> nn.Module:
    """Train epochs ``start_epoch`` to ``end_epoch``, both included, and return the trained model.

    After each epoch every rank appends a line to its file ``logs_path``: its own loss, accuracy and
    times; the average batch duration leaves out the first batch. Rank 0 prints the line, and writes
    ``Epoch_{n}.pt`` to ``checkpoint_dir``.

    Parameters
    ----------
    train_loader : yields (inputs, labels) of this rank's share; in a group all ranks need the same
        number of batches. The ``set_epoch`` of its ``sampler``, if any, is called in each epoch.
    distribute_flag : average gradients by DistributedDataParallel (a wrapped model stays as it is).
    task_flag : without ``distribute_flag``, the strategy that averages: a name in
        ``common.sync.STRATEGIES``, or the assignment's "PartOne" (gather_scatter) and "PartTwo"
        (all_reduce). With "" no gradients are exchanged.
    rank : for the log line; if empty, the rank in the group.

    Raises UserError on settings that do not fit, GroupError if the loss is not finite, torch's
    RuntimeError if another rank is lost.
    """
    strategy = _strategy(distribute_flag, task_flag)
    engine = TrainingEngine(
        model, device, distributed=strategy != "none", sync=strategy, sync_batchnorm=False
    )
    check_lengths(engine.world, train_loader, epochs=f"{start_epoch} to {end_epoch}")
    log = EpochLog(Path(logs_path), rank, printed=True)
    saver = CheckpointManager(Path(checkpoint_dir))  # last, so that no line is lost
    try:
        engine.prepare(optimizer, criterion)
        engine.fit(train_loader, start_epoch, end_epoch, callbacks=[log, saver])
    finally:
        engine.close()
    return engine.model


class EpochLog(Callback):
    """Appends the assignment's line of each epoch to this rank's log file.

    rank : shown in the line; if empty, the rank in the group, and none without a group.
    printed : whether rank 0 prints the line, too.
    """

    def __init__(self, path: Path, rank: str | int = "", *, printed: bool = False) -> None:
        self._path = path
        self._rank = rank
        self._printed = printed

    def on_train_begin(self, engine: TrainingEngine, first_epoch: int) -> None:
        """Keep what the line says of the training."""
        self._world = engine.world
        self._emulated = engine.emulation is not None
        if self._rank == "" and self._world.size > 1:
            self._rank = self._world.rank

    def on_epoch_end(self, end: EpochEnd) -> None:
        """Append the line; UserError if the file cannot be written."""
        line = self._line(end.epoch, end.result)
        append_text(
            self._path,
            line + "\n",
            name=f"the log {self._path}",
            advice=": free some disk space, or allow writing there",
            sync=True,
        )
        if self._printed and self._world.is_rank0:
            print(line, flush=True)

    def _line(self, epoch: int, result: EpochResult) -> str:
        parts = []
        if self._emulated:
            parts.append("EMULATED")
        if self._rank != "":
            parts.append(f"Rank: {self._rank}")
        parts.append(f"Epoch: {epoch}")
        if not self._emulated:
            parts.append(f"Train Loss: {result.loss:.3f}")
            parts.append(f"Train Accuracy: {result.accuracy:.3f}")
        parts.append(f"Avg Batch Duration: {result.mean_step_seconds:.3f} seconds")
        parts.append(f"Epoch Duration: {result.seconds:.3f} seconds")
        return ", ".join(parts)


def _strategy(distribute_flag: bool, task_flag: str) -> str:
    """Return the name of the strategy that the assignment's two flags choose."""
    strategy = _STRATEGY_OF_TASK.get(task_flag, task_flag)
    if strategy not in STRATEGIES:
        raise UserError(
            f"task_flag: got {task_flag!r}, give a strategy's name ({', '.join(STRATEGIES)}), "
            "'PartOne' (gather_scatter), 'PartTwo' (all_reduce) or ''"
        )
    if distribute_flag:
        return "ddp"
    world = current_world()
    if strategy == "none" and world.size > 1:
        warnings.warn(
            f"{world.size} ranks train without averaging their gradients: set distribute_flag or "
            "task_flag",
            stacklevel=3,
        )
    return strategy
