"""Two models with an optimiser each, both averaged by hand.

verdict: any
"""

import torch
import torch.distributed as dist
from student import Pictures, join, read_flags
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


args = read_flags()
join(args)
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 192))
discriminator = nn.Sequential(nn.Linear(192, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
criterion = nn.BCEWithLogitsLoss()
torch.manual_seed(100 + args.rank)
dataset = Pictures()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=args.batch_size // args.num_nodes, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, _ in loader:
        real, fake = images.flatten(1), generator(torch.randn(len(images), 16))
        ones, zeros = torch.ones(len(images), 1), torch.zeros(len(images), 1)
        discriminator.zero_grad()
        loss_d = criterion(discriminator(real), ones) + criterion(
            discriminator(fake.detach()), zeros
        )
        loss_d.backward()
        average_gradients(discriminator)
        optimizer_d.step()

        generator.zero_grad()
        loss_g = criterion(discriminator(fake), ones)
        loss_g.backward()
        average_gradients(generator)
        optimizer_g.step()
    print(f"epoch {epoch}: {loss_d.item():.3f} {loss_g.item():.3f}")
dist.destroy_process_group()
