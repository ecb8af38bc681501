"""Train VGG-11 in four ways, with the loop and the gradients in plain sight. Read it downward.

    python docs/examples/four_ways.py --dataset digits     # one process, no download
    python docs/examples/four_ways.py --sync all_reduce    # two ranks on this machine, CIFAR-10
    python docs/examples/four_ways.py --sync ddp --master-ip 10.0.0.1 --num-nodes 4 --rank 0

It is for CPUs. The weights equal those of PartOne, PartTwo or PartThree with --schedule constant.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.data import load_dataset
from common.data.loaders import TrainLoader
from common.data.sharding import GlobalBatchSampler
from common.distributed.launch_env import ranks_to_start
from common.distributed.process_group import cleanup_distributed, setup_distributed
from common.distributed.spawn import launch_local_ranks
from common.models import build_model

WAYS = ["none", "gather_scatter", "all_reduce", "ddp"]
parser = argparse.ArgumentParser()
parser.add_argument("--sync", choices=WAYS, default="none")
parser.add_argument("--dataset", default="cifar10")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--num-nodes", type=int, default=os.environ.get("WORLD_SIZE", 2))
parser.add_argument("--master-ip", default="127.0.0.1")
parser.add_argument("--rank", type=int, default=os.environ.get("RANK"))
args = parser.parse_args()

# Processes: without --rank, this one starts all ranks with torchrun's variables, RANK and others.
rank = args.rank
ranks = args.num_nodes
if args.sync == "none":
    rank = 0
    ranks = 1
if rank is None:
    variables = ranks_to_start(distributed=True, world_size=ranks)
    sys.exit(launch_local_ranks(sys.argv, variables, {"OMP_NUM_THREADS": "1"} | os.environ))
if ranks > 1:
    os.environ.setdefault("MASTER_ADDR", args.master_ip)
    setup_distributed(rank, ranks, "gloo")

# Data: every rank computes the same order of samples, and takes its part of each global batch.
data = load_dataset(args.dataset, Path("data"))
sampler = GlobalBatchSampler(len(data.train), batch_size=256, rank=rank, world_size=ranks)
loader = TrainLoader(data, sampler)  # images, of shape (share, 3, 32, 32), and labels

# Model: with the same seed every rank begins with the same weights.
torch.manual_seed(0)
network = build_model("vgg11", len(data.class_names))
model = DistributedDataParallel(network) if args.sync == "ddp" else network
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4
)

for epoch in range(1, args.epochs + 1):
    sampler.set_epoch(epoch)  # another order
    for (images, labels), samples in zip(loader, sampler.global_batch_sizes, strict=True):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        # If the ranks' shares differ in size, the mean of their means is not the batch's.
        weight = len(labels) * ranks / samples
        (loss * weight).backward()  # DistributedDataParallel averages the gradients meanwhile
        for parameter in model.parameters():
            gradient = parameter.grad
            if args.sync == "gather_scatter":  # rank 0 gathers, averages, and scatters the mean
                gathered = means = None
                if rank == 0:
                    gathered = [torch.empty_like(gradient) for _ in range(ranks)]
                dist.gather(gradient, gathered)
                if rank == 0:
                    means = [sum(gathered) / ranks] * ranks
                dist.scatter(gradient, means)
            elif args.sync == "all_reduce":  # every rank gets the sum
                dist.all_reduce(gradient)
                gradient /= ranks
        optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
cleanup_distributed()
