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
    name = f"Epoch_{epoch}.pt" if step is None else f"Epoch_{epoch}_Step_{step}.pt"
    return Path(folder) / name


def checkpoints_by_age(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, the most advanced one first."""
    found = []
    for path in Path(folder).glob("Epoch_*.pt"):
        match = _NAME.search(path.name)
        if match:
            step = float(match[2] or "inf")  # an epoch's end comes after its steps
            found.append((int(match[1]), step, path))
    return [path for _epoch, _step, path in sorted(found, reverse=True)]


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
            damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the CRC-32 of its part {damaged[:40]!r} is wrong")
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
    if not name:
        name = "(its bytes)" if isinstance(source, bytes) else str(source)
    try:
        content = source if isinstance(source, bytes) else read_regular(Path(source))
        entries = read_saved(content)
        msgspec.convert(entries, _Entries)
        saved_digest = entries.pop("sha256", None)
        # The digest also raises an error for tensors without data of their own, e.g. sparse ones.
        found_digest = digest(entries)
        # None: the user's own torch.save wrote the file
        if saved_digest is not None and saved_digest != found_digest:
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
        difference = " ".join(str(error).split())[:300]
        raise UserError(
            f"checkpoint {name} holds another model's weights ({difference}): give the --model and "
            "--dataset that it was trained with"
        ) from error


def load_optimizer_state(optimizer: Optimizer, entries: Mapping[str, Any], *, name: str) -> None:
    """Load a checkpoint's optimizer state. UserError if it belongs to another optimizer or model.

    torch checks the number of parameters only, and would fail in the first step.
    """
    own = optimizer.state_dict()["param_groups"]
    try:
        state = entries["optimizer_state_dict"]
        groups = []
        for saved, group in zip(state["param_groups"], own, strict=True):
            unknown = saved.keys() - group.keys() - _RATES
            absent = group.keys() - saved.keys()
            if unknown and absent:  # one alone: of another version of torch
                raise ValueError("it has other settings")
            kept = {key: value for key, value in saved.items() if key not in _KERNELS}
            groups.append(group | kept)
        optimizer.load_state_dict({**state, "param_groups": groups})
        for parameter, entry in optimizer.state.items():
            _lay_out_as(parameter, entry)
        fill_fused_momentum(optimizer)
    except Exception as error:  # plain values of any type can raise anything
        raise UserError(
            f"checkpoint {name} holds another optimizer's state ({first_line(error)[:100]}): give "
            "the --opt and --model that it was trained with"
        ) from error


def _lay_out_as(parameter: Tensor, entry: dict[str, Any]) -> None:
    """Give a parameter's state the parameter's strides, since fused kernels refuse others.

    A tensor of another size raises an error.
    """
    for key, value in entry.items():
        if key in _SHAPED or (isinstance(value, Tensor) and value.shape == parameter.shape):
            laid_out = torch.empty_like(parameter, dtype=value.dtype)
            entry[key] = laid_out.copy_(value.view_as(parameter))


def fill_fused_momentum(optimizer: Optimizer) -> None:
    """Give a fused SGD its momentum, zeros where it has none yet.

    A first step that fp16 skips would otherwise leave uninitialised memory as momentum.
    """
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        if not (group["fused"] and group["momentum"]):
            continue
        for parameter in group["params"]:
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
    values = [state.get(key) for key in _PLANNED]
    return values + [_planned(part) for part in state.get("_schedulers", ())]


def time_of_saving(path: Path) -> tuple[float, int]:
    """Return when a checkpoint was saved, in seconds since 1970, and its step; nothing is verified.

    A file that cannot be read counts as the newest: ``load_checkpoint`` says what is wrong with it.
    """
    try:
        file = regular_target(path)
        entries = torch.load(file, map_location="cpu", mmap=True, weights_only=True)  # no tensor
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
    found: list[Path] = []
    for folder in folders:
        found += [path for path in checkpoints_by_age(folder) if path.is_file()]
    # Sorting keeps the order of equal ones: the most advanced first.
    candidates = sorted(found, key=time_of_saving, reverse=True)
    if first is not None:
        candidates.insert(0, first)
    for path in candidates:
        try:
            load_checkpoint(path)
            return path, skipped
        except UserError as error:
            skipped.append(str(error))
    return None, skipped
