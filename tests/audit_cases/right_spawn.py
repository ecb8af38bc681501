"""mp.spawn starts the ranks of a DDP script.

command: python {script} --world_size {nodes} --port {port}
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def setup(rank, args):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = args.port
    dist.init_process_group("gloo", rank=rank, world_size=args.world_size)


def run(rank, args):
    setup(rank, args)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4)))
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 32, generator=generator)
    targets = torch.randint(4, (96,), generator=generator)
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    sampler = torch.utils.data.DistributedSampler(dataset, args.world_size, rank)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"rank {rank}: {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world_size", type=int, default=2)
    parser.add_argument("--port", default="29511")
    args = parser.parse_args()
    mp.spawn(run, args=(args,), nprocs=args.world_size, join=True)
