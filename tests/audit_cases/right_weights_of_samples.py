"""Variable batches: each rank divides the sum of its losses by the samples of all ranks.

finds: nothing
ranks: 2 3
verdict: yes
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
criterion = nn.CrossEntropyLoss(reduction="none")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        kept = (labels != args.rank).float()  # another share of the samples on each rank
        samples = kept.sum()
        dist.all_reduce(samples)
        optimizer.zero_grad()
        ((criterion(model(images), labels) * kept).sum() / samples).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
dist.destroy_process_group()
