"""A script for torchrun: ranks from the environment, no flags.

command: torchrun --nproc-per-node {nodes} --master-port {port} {script}
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


class Trainer:
    def __init__(self, model, dataset):
        self.rank = int(os.environ["LOCAL_RANK"])
        self.model = nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        sampler = DistributedSampler(dataset, shuffle=True)
        self.loader = DataLoader(dataset, batch_size=8, shuffle=False, sampler=sampler)

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for source, targets in self.loader:
            loss = self.run_batch(source, targets)
        print(f"[{self.rank}] epoch {epoch} | last loss {loss:.4f}")


def main():
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(3)
    dataset = TensorDataset(
        torch.randn(144, 20, generator=generator), torch.randn(144, 1, generator=generator)
    )
    trainer = Trainer(nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1)), dataset)
    for epoch in range(3):
        trainer.run_epoch(epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
