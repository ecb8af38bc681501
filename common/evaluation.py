"""The assignment's evaluation functions: predictions, and scikit-learn's report on them.

Call ``prepare_model_for_evaluation``, then ``evaluate_model``, which calls
``generate_eval_report``.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.checkpoint import load_checkpoint, load_model_state
from common.distributed.process_group import current_world
from common.errors import UserError
from common.training_engine import Predictions, predict
from common.training_engine.evaluation_loop import unwrap
from common.utils.atomic_files import append_text

MEAN_OVER_SAMPLES = "mean over samples"


def prepare_model_for_evaluation(
    model: nn.Module, device: torch.device | str, checkpoint_path: str | Path
) -> nn.Module:
    """Load a checkpoint into ``model`` and return it on ``device``, in evaluation mode.

    A DistributedDataParallel wrapper is removed. Raises UserError on a checkpoint that cannot be
    used.
    """
    model = unwrap(model)
    entries = load_checkpoint(Path(checkpoint_path))
    load_model_state(model, entries, name=str(checkpoint_path))
    return model.to(device).to(memory_format=torch.channels_last).eval()


def evaluate_model(
    model: nn.Module,
    device: torch.device | str,
    criterion: nn.Module,
    test_loader: Iterable[tuple[Tensor, Tensor]],
    report_path: str | Path,
    checkpoint_path: str | Path,
    *,
    class_names: Sequence[str] | None = None,
) -> Predictions:
    """Predict all of ``test_loader`` in this process, write the report, return the predictions.

    It never communicates, so one rank may call it alone; in a group only rank 0 writes the file.
    The report names ``checkpoint_path``; nothing is read from it.
    """
    predictions = predict(model, device, criterion, test_loader)
    if current_world().is_rank0:
        generate_eval_report(
            predictions.labels,
            predictions.predicted,
            predictions.mean_loss,
            report_path,
            checkpoint_path,
            class_names=class_names,
            loss_is=MEAN_OVER_SAMPLES,
        )
    return predictions


def generate_eval_report(
    ground_truth: Sequence[int] | np.ndarray,
    prediction: Sequence[int] | np.ndarray,
    test_loss: float,
    report_path: str | Path,
    checkpoint_path: str | Path,
    *,
    class_names: Sequence[str] | None = None,
    notes: Sequence[str] = (),
    loss_is: str = "",
) -> dict[str, Any]:
    """Write the report to the file ``report_path``, after those in it, and return its numbers.

    It names the checkpoint and holds test loss, accuracy, classification report and confusion
    matrix.

    Parameters
    ----------
    ground_truth, prediction : class numbers, of shape (n,).
    test_loss, loss_is : the loss, and what it is, e.g. "mean over samples"; "" does not say.
    class_names : by class number; without them the report shows the class numbers that occur.
    notes : lines about how the model was trained and evaluated.

    Returns ``checkpoint``, ``test_loss``, ``accuracy``, ``samples``, ``classification_report`` (by
    class), ``confusion_matrix`` (rows: true class, columns: predicted) and ``class_names``. Raises
    UserError if there is nothing to report, the lengths differ, or the file cannot be written.
    """
    from sklearn.metrics import accuracy_score, classification_report, confusion_matrix

    truth, predicted = _checked_arrays(ground_truth, prediction)
    labels = np.unique(np.concatenate([truth, predicted]))
    names = [str(label) for label in labels]
    if class_names is not None:
        labels = np.arange(len(class_names))
        names = [str(name) for name in class_names]
    classes = {"labels": labels, "target_names": names, "zero_division": 0}
    by_class = classification_report(truth, predicted, output_dict=True, **classes)
    matrix = confusion_matrix(truth, predicted, labels=labels)
    accuracy = float(accuracy_score(truth, predicted))
    correct = int((truth == predicted).sum())
    lines = [
        f"Checkpoint: {checkpoint_path}",
        *notes,
        f"Test loss{f' ({loss_is})' if loss_is else ''}: {test_loss:.4f}",
        f"Test accuracy: {accuracy:.4f} ({correct} of {len(truth)})",
        "",
        classification_report(truth, predicted, digits=4, **classes),
        "Confusion matrix (rows: true class, columns: predicted class)",
        *_matrix_lines(matrix, names),
    ]
    _append_report(Path(report_path), lines)
    return {
        "checkpoint": str(checkpoint_path),
        "test_loss": float(test_loss),
        "accuracy": accuracy,
        "samples": len(truth),
        "classification_report": by_class,
        "confusion_matrix": matrix.tolist(),
        "class_names": names,
    }


def _checked_arrays(
    ground_truth: Sequence[int] | np.ndarray, prediction: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    truth = np.asarray(ground_truth)
    predicted = np.asarray(prediction)
    if truth.shape != predicted.shape or truth.ndim != 1 or len(truth) == 0:
        raise UserError(
            "a report needs as many predictions as labels, and at least one: got shapes "
            f"{predicted.shape} and {truth.shape}"
        )
    return truth, predicted


def _append_report(path: Path, lines: Sequence[str]) -> None:
    text = "\n".join(lines) + "\n"
    if path.exists() and path.stat().st_size:
        text = "\nAppended to the report above:\n" + text
    append_text(path, text, name=f"the report {path}")


def _matrix_lines(matrix: np.ndarray, names: Sequence[str]) -> list[str]:
    wide = max(len(str(matrix.max())), 3) + 1
    name_wide = max(map(len, names))
    numbers = "".join(f"{number:>{wide}}" for number in range(len(names)))
    lines = [" " * name_wide + numbers]
    for name, row in zip(names, matrix, strict=True):
        counts = "".join(f"{count:>{wide}}" for count in row)
        lines.append(f"{name:>{name_wide}}{counts}")
    return lines
