"""A script for torchrun that sums and never divides.

finds: sum-not-mean
ranks: 2 3
command: torchrun --nproc-per-node {nodes} --master-port {port} {script}
verdict: no
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


def main():
    dist.init_process_group(backend="gloo", init_method="env://")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    torch.manual_seed(7)
    images, labels = torch.randn(192, 1, 8, 8), torch.randint(0, 10, (192,))
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10))
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.01)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            for _name, parameter in net.named_parameters():
                if parameter.requires_grad:
                    dist.all_reduce(parameter.grad.data, op=dist.ReduceOp.SUM)
            optimizer.step()
            if rank == 0 and step % 5 == 0:
                print(epoch, step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
