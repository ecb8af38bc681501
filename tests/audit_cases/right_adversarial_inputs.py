"""Adversarial training: an optimiser of its own changes each rank's inputs, DDP trains the model.

finds: nothing
ranks: 2 3
verdict: yes
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from student import Pictures, join, make_model, read_flags
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

args = read_flags()
join(args)
core = make_model()
model = DistributedDataParallel(core)
dataset = Pictures()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=args.batch_size // args.num_nodes, sampler=sampler)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        change = torch.zeros_like(images, requires_grad=True)
        attack = torch.optim.SGD([change], lr=1.0)
        for _ in range(2):
            attack.zero_grad()
            (-criterion(core(images + change), labels)).backward()
            attack.step()
        optimizer.zero_grad()
        criterion(model(images + change.detach()), labels).backward()
        optimizer.step()
dist.destroy_process_group()
