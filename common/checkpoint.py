"""Checkpoints: written atomically, verified when read, and unable to run code.

A checkpoint is one ``torch.save`` file with ``epoch``, ``model_state_dict``,
``optimizer_state_dict``, ``loss`` and whatever else an exact resume needs. Its entry ``sha256`` is
a digest of all other entries, since torch does not detect flipped bits, and ``saved_at`` the time
of saving.
"""

import io
import math
import os
import pickle
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from common.errors import UserError, first_line, reason_of
from common.tensor_archive import read_archive, read_plain_values
from common.utils.atomic_files import read_regular, write_atomically
from common.utils.hashing import digest
from common.utils.typed_json import Count

_REQUIRED = ("epoch", "model_state_dict", "optimizer_state_dict", "loss")
_MOST_NUMBER = 1e30  # far from what overflows a 32-bit float
_PLANNED = (  # entries of a scheduler's state that the plan and the flags fix
    *("total_steps", "_schedule_phases", "_anneal_func_type", "cycle_momentum"),  # OneCycleLR
    *("T_max", "eta_min", "start_factor", "end_factor", "total_iters"),
    *("milestones", "_milestones", "gamma"),
)
_NAME = re.compile(r"Epoch_(\d+)(?:_Step_(\d+))?\.pt$")


class _Plan(msgspec.Struct):
    """What a restarted run takes from the plan; ``refuse_other_training`` compares the rest."""

    batch_size: Annotated[int, Meta(ge=1, le=2**53)]
    shards: Annotated[int, Meta(ge=1, le=2**53)]


class _Progress(msgspec.Struct):
    best_accuracy: float = -1.0
    in_a_row: Count = 0


class _Buckets(msgspec.Struct, forbid_unknown_fields=True):
    """A ``BucketChoice`` (common/cost_model/bucket_choice.py)."""

    sync: str
    bucket_mb: Annotated[float, Meta(gt=0, le=1e9)] | None
    expected_step_seconds: Annotated[float, Meta(ge=0, le=1e9)]
    default_step_seconds: Annotated[float, Meta(ge=0, le=1e9)]


_Moment = Annotated[float, Meta(ge=0, le=1e12)]  # seconds since 1970


class _Order(msgspec.Struct):
    saved_at: _Moment | None = None
    step: Count = 0


class _Entries(msgspec.Struct):
    """The entries of a checkpoint whose types are checked; others are kept as they are."""

    epoch: Count
    loss: float  # NaN within an epoch
    model_state_dict: dict[str, Any]
    optimizer_state_dict: dict[str, Any]
    saved_at: _Moment = 0.0
    step: Count = 0
    step_in_epoch: Count = 0
    plan: _Plan | None = None
    progress: _Progress | None = None
    auto_buckets: _Buckets | None = None
    scheduler_state_dict: dict[str, Any] | None = None
    scaler_state_dict: dict[str, Any] | None = None
    sync_state_dicts: list[dict[str, Any]] | None = None
    ema_state_dict: dict[str, Any] | None = None
    ema_updates: Count = 0


def checkpoint_path(folder: Path, epoch: int, step: int | None = None) -> Path:
    """Return the path of an epoch's checkpoint, or of the one after ``step`` steps of the epoch."""
    return Path(folder) / (f"Epoch_{epoch}.pt" if step is None else f"Epoch_{epoch}_Step_{step}.pt")


def checkpoints_by_age(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, the most advanced one first."""
    found = [
        (int(match[1]), float(match[2] or "inf"), path)  # an epoch's end comes after its steps
        for path in Path(folder).glob("Epoch_*.pt")
        if (match := _NAME.search(path.name))
    ]
    return [path for *_, path in sorted(found, reverse=True)]


def save_checkpoint(path: Path, entries: Mapping[str, Any]) -> None:
    """Write ``entries``, the time and their digest to ``path`` atomically.

    The content goes to a temporary file, which is synced and then renamed. Raises UserError if the
    disk is full or the folder cannot be written; the temporary file is then removed, and an
    existing file at ``path`` stays unchanged.
    """
    content = {"saved_at": time.time(), **entries}
    buffer = io.BytesIO()
    torch.save({**content, "sha256": digest(content)}, buffer)
    write_atomically(Path(path), buffer.getbuffer())


def load_checkpoint(source: Path | bytes, *, name: str | None = None) -> dict[str, Any]:
    """Read and verify a checkpoint, from a file or from a file's bytes; its tensors are on the CPU.

    Raises UserError if it is missing, truncated, altered, hostile (anything but tensors and plain
    values), larger than half of the memory or not a checkpoint of this kind. It takes at most twice
    the file's size in memory, and 300 MB. If DistributedDataParallel wrapped the model, the prefix
    ``module.`` is removed from the parameters' names.
    """
    name = name or ("(its bytes)" if isinstance(source, bytes) else str(source))
    entries = _read(source, name)
    if not isinstance(entries, dict) or any(key not in entries for key in _REQUIRED):
        raise UserError(
            f"{name} is not a training checkpoint: it needs the entries {', '.join(_REQUIRED)}"
        )
    kept = entries.pop("sha256", None)
    if kept is not None and kept != digest(entries):
        raise UserError(
            f"checkpoint {name} is damaged: its contents do not match its SHA-256; use an earlier "
            "one"
        )
    try:
        msgspec.convert(entries, _Entries)
    except msgspec.ValidationError as error:
        raise UserError(
            f"{name} is not a training checkpoint of this project: {first_line(error)}; use "
            "another one"
        ) from error
    entries.pop("saved_at", None)
    state = entries["model_state_dict"]
    unwrapped = {key.removeprefix("module."): value for key, value in state.items()}
    return entries | {"model_state_dict": unwrapped}


def _read(source: Path | bytes, name: str) -> Any:
    """Return what ``torch.save`` wrote; UserError if it is damaged or could run code."""
    try:
        most_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        if not isinstance(source, bytes):
            source = read_regular(Path(source), most_bytes=most_bytes)
        return read_archive(source)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"checkpoint {name} cannot be read ({reason_of(error)})") from error
    except pickle.UnpicklingError as error:
        raise UserError(
            f"checkpoint {name} is refused: it is damaged, or holds more than tensors and plain "
            f"values, which could run code when loaded ({first_line(error)[:100]})"
        ) from error
    except MemoryError as error:
        raise UserError(
            f"checkpoint {name} does not fit into memory: free twice its size, or use another one"
        ) from error
    except Exception as error:  # damaged bytes can raise anything: BadZipFile, struct.error, ...
        raise UserError(
            f"checkpoint {name} is cut or damaged ({first_line(error)[:100]}): use an earlier one"
        ) from error


def load_model_state(model: nn.Module, entries: Mapping[str, Any], *, name: str) -> None:
    """Copy a checkpoint's weights and buffers into ``model``.

    Raises UserError if they belong to another model.
    """
    state, own = entries["model_state_dict"], model.state_dict()
    differing = [key for key in own if getattr(state.get(key), "shape", None) != own[key].shape]
    differing += [key for key in state if key not in own]
    if differing:
        raise UserError(
            f"checkpoint {name} holds another model's weights: {len(differing)} entries differ, "
            f"first {differing[0]!r}; give the --model and --dataset that it was trained with"
        )
    model.load_state_dict(state)


_KERNELS = {"fused", "foreach", "capturable"}
"""Settings of an optimiser that depend on the device, not on the training."""


def load_optimizer_state(optimizer: Optimizer, entries: Mapping[str, Any], *, name: str) -> None:
    """Load a checkpoint's optimizer state. UserError if it belongs to another optimizer or model.

    torch checks the number of parameters only, and would fail in the first step.
    """
    state, own = entries["optimizer_state_dict"], optimizer.state_dict()
    kernels = [
        {key: group[key] for key in _KERNELS & group.keys()} for group in own["param_groups"]
    ]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = {"momentum_buffer"}
    if isinstance(optimizer, AdamW):
        names = {"step", "exp_avg", "exp_avg_sq"}
    try:
        for saved, group in zip(state["param_groups"], own["param_groups"], strict=True):
            keys = (saved.keys() & group) - _KERNELS
            differing = [key for key in keys if not fits(saved[key], group[key])]
            if differing:
                raise ValueError(f"{differing[0]} is {saved[differing[0]]!r}")
        for index, entry in state["state"].items():
            scalars = {"step": torch.tensor(0.0)}
            like = {key: scalars.get(key, parameters[index]) for key in names}
            if entry.keys() != names or not all(
                value is None or fits(value, like[key]) for key, value in entry.items()
            ):
                raise ValueError(f"the state of parameter {index} has other names or shapes")
        groups = [
            saved | own_kernels
            for saved, own_kernels in zip(state["param_groups"], kernels, strict=True)
        ]
        optimizer.load_state_dict({**state, "param_groups": groups})
        _adopt_strides(optimizer)
        fill_fused_momentum(optimizer)
    except Exception as error:  # plain values of any type can raise anything
        raise UserError(
            f"checkpoint {name} holds another optimizer's state ({first_line(error)[:100]}): give "
            "the --opt and --model that it was trained with"
        ) from error


def _adopt_strides(optimizer: Optimizer) -> None:
    """Give the state the strides of its parameters: fused kernels refuse others."""
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                entry[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def fill_fused_momentum(optimizer: Optimizer) -> None:
    """Give a fused SGD its momentum, zeros where it has none yet.

    A first step that fp16 skips would otherwise leave uninitialised memory as momentum.
    """
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["fused"] and group["momentum"] else ():
            entry = optimizer.state[parameter]
            if entry.get("momentum_buffer") is None:
                entry["momentum_buffer"] = torch.zeros_like(parameter)


def load_plain_state(
    owner: Any, state: Mapping[str, Any], *, name: str, signed: bool = False
) -> None:
    """Load the state of a scheduler, a GradScaler or a strategy. UserError if it is another's.

    signed : whether its numbers may be negative.
    """
    try:
        own = owner.state_dict()
        differing = [
            key
            for key, value in state.items()
            if not fits({key: value}, own, signed=signed)
            or (key not in own and hasattr(type(owner), key))
        ]
        if not differing and state.get("last_epoch", 0) >= own.get(
            "total_steps", math.inf
        ):  # of a OneCycleLR
            differing.append("last_epoch")
        if differing:
            raise ValueError(f"{differing[0]} is {str(state[differing[0]])[:40]}")
        owner.load_state_dict(state)
    except Exception as error:  # plain values of any type can raise anything
        raise UserError(
            f"checkpoint {name} holds the state of another {type(owner).__name__} "
            f"({first_line(error)[:100]}): give the flags that it was trained with"
        ) from error


def fits(value: Any, like: Any, *, signed: bool = False) -> bool:
    """Whether a saved value can replace one of this program's: it has the type and the shape.

    None and an empty list may stand for what is set only during training, but no number is None or
    so large that a step overflows; none is negative unless ``signed``. What the plan fixes is
    equal.
    """
    if like is None or (value is None and not isinstance(like, int | float)):
        return True
    if isinstance(like, Tensor):
        return isinstance(value, Tensor) and value.shape == like.shape
    if isinstance(like, list | tuple):
        same = isinstance(value, list | tuple) and len(like) in (0, len(value))
        return same and all(
            fits(one, other, signed=signed) for one, other in zip(value, like, strict=False)
        )
    if isinstance(like, Mapping):
        return isinstance(value, Mapping) and all(
            fits(value[key], like[key], signed=signed)
            and (key not in _PLANNED or value[key] == like[key])
            for key in value.keys() & like
        )
    if isinstance(like, bool | str):
        return isinstance(value, type(like))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (-_MOST_NUMBER if signed else 0) <= value <= _MOST_NUMBER


def time_of_saving(path: Path) -> tuple[float, int]:
    """Return when a checkpoint was saved, in seconds since 1970, and its step; nothing is verified.

    Without a record, or where it cannot be read, the file's time of change counts, and step 0.
    """
    try:
        entries = msgspec.convert(read_plain_values(path), _Order)
    except Exception:  # a damaged file can raise anything; load_checkpoint says what it is
        entries = _Order()
    if entries.saved_at is not None:
        return entries.saved_at, entries.step
    try:
        return path.stat().st_mtime, entries.step
    except OSError:  # another process has just deleted it
        return 0.0, 0


def newest_checkpoint(folders: list[Path]) -> tuple[Path | None, list[str]]:
    """Return the good checkpoint that was saved last, and why newer ones were skipped."""
    skipped: list[str] = []
    # Sorting keeps the order of equal ones: the most advanced first.
    found = [path for folder in folders for path in checkpoints_by_age(folder) if path.is_file()]
    for path in sorted(found, key=time_of_saving, reverse=True):
        try:
            load_checkpoint(path)
            return path, skipped
        except UserError as error:
            skipped.append(str(error))
    return None, skipped
