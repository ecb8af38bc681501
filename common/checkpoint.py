"""Checkpoints: written atomically, verified when read, and unable to run code.

A checkpoint is one ``torch.save`` file with ``epoch``, ``model_state_dict``,
``optimizer_state_dict``, ``loss`` and whatever else an exact resume needs. Its entry ``sha256`` is
a digest of all other entries, since torch does not detect flipped bits.
"""

import io
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.errors import UserError, first_line, reason_of
from common.utils.atomic_files import write_atomically
from common.utils.hashing import digest

_REQUIRED = ("epoch", "model_state_dict", "optimizer_state_dict", "loss")
_NAME = re.compile(r"Epoch_(\d+)(?:_Step_(\d+))?\.pt$")


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
    """Write ``entries`` and their digest to ``path`` atomically.

    The content goes to a temporary file, which is synced and then renamed. Raises UserError if the
    disk is full or the folder cannot be written; the temporary file is then removed, and an
    existing file at ``path`` stays unchanged.
    """
    buffer = io.BytesIO()
    torch.save({**entries, "sha256": digest(entries)}, buffer)
    write_atomically(Path(path), buffer.getbuffer())


def load_checkpoint(source: Path | bytes, *, name: str | None = None) -> dict[str, Any]:
    """Read and verify a checkpoint, from a file or from a file's bytes; its tensors are on the CPU.

    Raises UserError if it is missing, truncated, altered, hostile (anything but tensors and plain
    values) or not a checkpoint of this kind. If DistributedDataParallel wrapped the model, the
    prefix ``module.`` is removed from the parameters' names.
    """
    name = name or ("(its bytes)" if isinstance(source, bytes) else str(source))
    try:
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
    except OSError as error:
        raise UserError(f"checkpoint {name} cannot be read ({reason_of(error)})") from error
    entries = _unpickle(content, name)
    if not isinstance(entries, dict) or any(key not in entries for key in _REQUIRED):
        raise UserError(
            f"{name} is not a training checkpoint: it needs the entries {', '.join(_REQUIRED)}"
        )
    state = entries["model_state_dict"]
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise UserError(
            f"{name} is not a training checkpoint: its model_state_dict holds no tensors by name"
        )
    kept = entries.pop("sha256", None)
    if kept is not None and kept != digest(entries):
        raise UserError(
            f"checkpoint {name} is damaged: its contents do not match its SHA-256; use an earlier "
            "one"
        )
    unwrapped = {key.removeprefix("module."): value for key, value in state.items()}
    return entries | {"model_state_dict": unwrapped}


def _unpickle(content: bytes, name: str) -> Any:
    """Return what ``torch.save`` wrote; UserError if it is damaged or could run code."""
    try:
        # torch ignores the CRC-32 of names and plain values.
        if zipfile.is_zipfile(io.BytesIO(content)):
            with zipfile.ZipFile(io.BytesIO(content)) as file:
                if (damaged := file.testzip()) is not None:
                    raise zipfile.BadZipFile(f"the CRC-32 of {damaged} is wrong")
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"checkpoint {name} is refused: it is damaged, or holds more than tensors and plain "
            "values, which could run code when loaded"
        ) from error
    except Exception as error:  # damaged bytes can raise anything: zlib.error, struct.error, ...
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


def newest_checkpoint(folders: list[Path]) -> tuple[Path | None, list[str]]:
    """Return the newest good checkpoint, the first folder's first, and why others were skipped."""
    skipped: list[str] = []
    for path in (path for folder in folders for path in checkpoints_by_age(folder)):
        try:
            load_checkpoint(path)
            return path, skipped
        except UserError as error:
            skipped.append(str(error))
    return None, skipped
