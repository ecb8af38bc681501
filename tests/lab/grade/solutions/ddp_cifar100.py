"""A right training script with gradient accumulation, for torchrun; small, on random images."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE = 2


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(960, 12), torch.randint(5, (960,)))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, sampler=sampler, batch_size=8)
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(loader, start=1):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            (loss / ACCUMULATE).backward()
            if number % ACCUMULATE == 0:
                average_gradients(model)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
