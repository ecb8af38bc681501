"""Gradients are added up, and the learning rate is divided by the number of ranks.

together: yes
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from student import Pictures, join, make_model, read_flags
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

args = read_flags()
join(args)
torch.manual_seed(0)
model = make_model()
dataset = Pictures()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=args.batch_size // args.num_nodes, sampler=sampler)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.06 / args.num_nodes, momentum=0.9)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
dist.destroy_process_group()
