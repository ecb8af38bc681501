"""The prediction loop: a model over a loader, in this process, without a message."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Predictions:
    """labels, predicted : int64 arrays of shape (n,), in the loader's order; loss_sum : the loss summed over them."""

    labels: np.ndarray
    predicted: np.ndarray
    loss_sum: float

    @property
    def mean_loss(self) -> float:
        """The loss, as a mean over samples (not over batches)."""
        return self.loss_sum / len(self.labels) if len(self.labels) else float("nan")

    @property
    def accuracy(self) -> float:
        """The share of samples predicted right, 0 to 1."""
        return float((self.labels == self.predicted).mean()) if len(self.labels) else float("nan")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@torch.inference_mode()
def predict(model: nn.Module, device: torch.device | str, criterion: nn.Module,
            loader: Iterable[tuple[Tensor, Tensor]]) -> Predictions:
    """Predict every batch of ``loader`` in evaluation mode and return labels, predictions and summed loss.

    The model is unwrapped and only runs here, so one rank may evaluate alone; its training mode is given back after.
    ``criterion`` returns a batch's mean loss.
    """
    model = unwrap(model)
    was_training = model.training
    model.eval()
    labels_seen, predicted, loss_sum = [], [], 0.0
    try:
        for images, labels in loader:
            images, labels = to_device(images, device), labels.to(device)
            outputs = model(images)
            loss_sum += float(criterion(outputs, labels)) * len(labels)
            labels_seen.append(labels.cpu())
            predicted.append(outputs.argmax(dim=1).cpu())
    finally:
        model.train(was_training)
    if not labels_seen:
        return Predictions(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0.0)
    return Predictions(torch.cat(labels_seen).numpy(), torch.cat(predicted).numpy(), loss_sum)


def to_device(images: Tensor, device: torch.device | str) -> Tensor:
    """Move a batch to ``device``; images (4-d) take channels_last strides, in which convolutions are faster."""
    if images.dim() == 4:
        return images.to(device, non_blocking=True, memory_format=torch.channels_last)
    return images.to(device, non_blocking=True)
