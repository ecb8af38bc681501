"""Train VGG-11 with the assignment's functions: python docs/examples/my_training.py [TASK_FLAG]."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common.data import load_dataset
from common.evaluation import evaluate_model, prepare_model_for_evaluation
from common.models import build_model
from common.training import get_model_parameters, prepare_model_for_training, train_model

task_flag = sys.argv[1] if len(sys.argv) > 1 else ""
ranks = int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets it
if ranks > 1:
    dist.init_process_group("gloo")
rank = dist.get_rank() if ranks > 1 else 0

# 1. Data: any torch Dataset of (image, label) works, also torchvision's CIFAR10.
digits = load_dataset("digits", Path("data"))  # or "cifar10": a download of 170 MB
train_set, test_set = (
    TensorDataset(part.images.permute(0, 3, 1, 2) / 255.0, part.labels)
    for part in (digits.train, digits.test)
)
sampler = DistributedSampler(train_set, ranks, rank, seed=0)  # each rank gets its own samples
train_loader = DataLoader(train_set, batch_size=32 // ranks, sampler=sampler, drop_last=True)
test_loader = DataLoader(test_set, batch_size=100)

# 2. Model, loss and optimiser.
torch.manual_seed(0)
model, criterion, optimizer = prepare_model_for_training(
    build_model("vgg11", num_classes=10), "cpu", 0.01, 0.9, 1e-4, False
)
if rank == 0:
    print(f"{get_model_parameters(model):,} parameters")

# 3. Training: epochs 1 and 2. Every rank calls this.
folder = Path("reports/functions")
folder.mkdir(parents=True, exist_ok=True)
train_model(
    model, "cpu", criterion, optimizer, 1, 2, train_loader,
    folder / f"log_{rank}.txt", folder, False, task_flag,
)  # fmt: skip

# 4. Evaluation: rank 0 alone, since evaluate_model never communicates.
if rank == 0:
    checkpoint = folder / "Epoch_2.pt"
    model = prepare_model_for_evaluation(model, "cpu", checkpoint)
    report = folder / "report.txt"
    predictions = evaluate_model(model, "cpu", criterion, test_loader, report, checkpoint)
    correct = int((predictions.labels == predictions.predicted).sum())
    print(f"{correct} of {len(predictions.labels)} test images are right; see {report}")
if ranks > 1:
    dist.destroy_process_group()
