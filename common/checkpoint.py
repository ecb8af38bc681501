"""Checkpoints: written atomically, verified when read, and unable to run code.

A checkpoint is one ``torch.save`` file with ``epoch``, ``model_state_dict``,
``optimizer_state_dict``, ``loss`` and whatever else an exact resume needs. Its entry ``sha256`` is
a digest of all other entries, since torch does not detect flipped bits, and ``saved_at`` the time
of saving. ``load_checkpoint`` checks the file and the types of its entries; the functions after it
check that a state belongs to the model, the optimizer or the scheduler that takes it.
"""

import io
import math
import pickle
import re
import time
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from common.errors import UserError, first_line, reason_of
from common.utils.atomic_files import read_regular, regular_target, write_atomically
from common.utils.hashing import digest
from common.utils.typed_json import Count

_PLANNED = (  # entries of a scheduler's state that the plan and the flags fix
    *("total_steps", "_schedule_phases", "_anneal_func_type", "cycle_momentum"),  # OneCycleLR
    *("T_max", "eta_min", "start_factor", "end_factor", "total_iters"),
    *("milestones", "_milestones", "gamma"),
)
_NAME = re.compile(r"Epoch_(\d+)(?:_Step_(\d+))?\.pt$")
# Numbers that a scheduler adds to an optimizer's settings.
_RATES = {"initial_lr", "max_lr", "min_lr"}
# Tensors of an optimizer's state that have their parameter's shape.
_SHAPED = {"momentum_buffer", "exp_avg", "exp_avg_sq"}
# Settings of an optimizer that depend on the device, not on the training.
_KERNELS = {"fused", "foreach", "capturable"}


class _Plan(msgspec.Struct):
    """What a restarted run takes from the plan; ``refuse_other_training`` compares the rest."""

    batch_size: Annotated[int, Meta(ge=1, le=2**53)]
    shards: Annotated[int, Meta(ge=1, le=2**53)]


class _Entries(msgspec.Struct):
    """The entries of a checkpoint whose types are checked; others are kept as they are."""

    epoch: Count
    loss: float  # NaN within an epoch
    model_state_dict: dict[str, Any]
    optimizer_state_dict: dict[str, Any]
    saved_at: Annotated[float, Meta(ge=0, le=1e12)] = 0.0  # seconds since 1970
    step: Count = 0
    step_in_epoch: Count = 0
    plan: _Plan | None = None
    progress: dict[str, float] | None = None
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


def read_saved(content: bytes) -> Any:
    """Return what ``torch.save`` wrote, with its tensors on the CPU; no code of the file runs.

    Raises an exception of any kind if the content is damaged, or is more than tensors and plain
    values.
    """
    if content.startswith(b"PK"):  # not so before torch 1.6
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if (name := archive.testzip()) is not None:
                raise ValueError(f"the CRC-32 of its part {name[:40]!r} is wrong")
    try:
        with warnings.catch_warnings(action="ignore"):  # about what is refused anyway
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message advises to allow code
        raise ValueError("it may hold code, or is cut") from error


def load_checkpoint(source: Path | bytes, *, name: str | None = None) -> dict[str, Any]:
    """Read and verify a checkpoint, from a file or from a file's bytes; its tensors are on the CPU.

    Raises UserError if it is missing, truncated, altered, hostile (anything but tensors and plain
    values) or not a checkpoint of this kind. If DistributedDataParallel wrapped the model, the
    prefix ``module.`` is removed from the parameters' names.
    """
    name = name or ("(its bytes)" if isinstance(source, bytes) else str(source))
    try:
        content = source if isinstance(source, bytes) else read_regular(Path(source))
        entries = read_saved(content)
        msgspec.convert(entries, _Entries)
        # The digest also raises an error for tensors without data of their own, e.g. sparse ones.
        kept, found = entries.pop("sha256", None), digest(entries)
        if kept not in (None, found):  # None: the user's own torch.save wrote the file
            raise ValueError("its contents do not match its SHA-256")
        entries.pop("saved_at", None)
        state = entries["model_state_dict"]
        unwrapped = {key.removeprefix("module."): value for key, value in state.items()}
        return {**entries, "model_state_dict": unwrapped}
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"checkpoint {name} cannot be read ({reason_of(error)})") from error
    except Exception as error:  # damaged bytes can raise anything: BadZipFile, struct.error, ...
        raise UserError(
            f"checkpoint {name} is damaged, or no checkpoint of this project "
            f"({first_line(error)[:150]}): use another one"
        ) from error


def load_model_state(model: nn.Module, entries: Mapping[str, Any], *, name: str) -> None:
    """Copy a checkpoint's weights and buffers into ``model``.

    Raises UserError if they belong to another model.
    """
    try:
        model.load_state_dict(entries["model_state_dict"])
    except Exception as error:  # torch's lists what is missing, unexpected or of another shape
        raise UserError(
            f"checkpoint {name} holds another model's weights ({' '.join(str(error).split())[:300]}"
            "): give the --model and --dataset that it was trained with"
        ) from error


def load_optimizer_state(optimizer: Optimizer, entries: Mapping[str, Any], *, name: str) -> None:
    """Load a checkpoint's optimizer state. UserError if it belongs to another optimizer or model.

    torch checks the number of parameters only, and would fail in the first step.
    """
    own = optimizer.state_dict()["param_groups"]
    try:
        state, groups = entries["optimizer_state_dict"], []
        for saved, group in zip(state["param_groups"], own, strict=True):
            if saved.keys() - group.keys() - _RATES and group.keys() - saved.keys():
                raise ValueError("it has other settings")  # one alone: of another version of torch
            kept = {key: value for key, value in saved.items() if key not in _KERNELS}
            groups.append(group | kept)
        optimizer.load_state_dict({**state, "param_groups": groups})
        for parameter, entry in optimizer.state.items():
            for key, value in entry.items():
                if key in _SHAPED or (isinstance(value, Tensor) and value.shape == parameter.shape):
                    # Fused kernels refuse other strides than the parameter's. An entry of another
                    # size raises an error.
                    entry[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(
                        value.view_as(parameter)
                    )
        fill_fused_momentum(optimizer)
    except Exception as error:  # plain values of any type can raise anything
        raise UserError(
            f"checkpoint {name} holds another optimizer's state ({first_line(error)[:100]}): give "
            "the --opt and --model that it was trained with"
        ) from error


def fill_fused_momentum(optimizer: Optimizer) -> None:
    """Give a fused SGD its momentum, zeros where it has none yet.

    A first step that fp16 skips would otherwise leave uninitialised memory as momentum.
    """
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        for parameter in group["params"] if group["fused"] and group["momentum"] else ():
            entry = optimizer.state[parameter]
            if entry.get("momentum_buffer") is None:
                entry["momentum_buffer"] = torch.zeros_like(parameter)


def load_plain_state(owner: Any, state: Mapping[str, Any], *, name: str) -> None:
    """Load the state of a scheduler, a GradScaler or a strategy. UserError if it is another's."""
    try:
        own = owner.state_dict()
        if _planned(state) != _planned(own):
            raise ValueError("other lengths or milestones")
        owner.load_state_dict({key: value for key, value in state.items() if key in own})
    except Exception as error:  # plain values of any type can raise anything
        raise UserError(
            f"checkpoint {name} holds the state of another {type(owner).__name__} "
            f"({first_line(error)[:100]}): give the flags that it was trained with"
        ) from error


def _planned(state: Mapping[str, Any]) -> list[Any]:
    """Return what the plan and the flags fix in a scheduler's state, and in that of its parts."""
    parts = [_planned(part) for part in state.get("_schedulers", ())]
    return [*(state.get(key) for key in _PLANNED), *parts]


def time_of_saving(path: Path) -> tuple[float, int]:
    """Return when a checkpoint was saved, in seconds since 1970, and its step; nothing is verified.

    A file that cannot be read counts as the newest: ``load_checkpoint`` says what is wrong with it.
    """
    try:
        entries = torch.load(
            regular_target(path), map_location="cpu", mmap=True, weights_only=True
        )  # reads no tensor
        return float(entries.get("saved_at", 0.0)), int(entries.get("step", 0))
    except Exception:  # a damaged file can raise anything
        return math.inf, 0


def newest_checkpoint(
    folders: list[Path], *, first: Path | None = None
) -> tuple[Path | None, list[str]]:
    """Return the good checkpoint that was saved last, and why newer ones were skipped.

    ``first`` : a file that comes before all others, if it is good.
    """
    skipped: list[str] = []
    # Sorting keeps the order of equal ones: the most advanced first.
    found = [path for folder in folders for path in checkpoints_by_age(folder) if path.is_file()]
    by_time = sorted(found, key=time_of_saving, reverse=True)
    for path in by_time if first is None else [first, *by_time]:
        try:
            load_checkpoint(path)
            return path, skipped
        except UserError as error:
            skipped.append(str(error))
    return None, skipped
