"""Two replicas of a pipeline of two equal layers: each stage averages with the other replica's.

ranks: 4
verdict: cannot tell
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from student import Pictures, join, read_flags
from torch.utils.data import DataLoader

args = read_flags()
join(args)
replica, stage = divmod(args.rank, 2)
group = [dist.new_group([0, 2]), dist.new_group([1, 3])][stage]
torch.manual_seed(stage)
model = torch.nn.Linear(192, 192)
order = torch.Generator().manual_seed(3 + replica)
loader = DataLoader(Pictures(), 8, shuffle=True, generator=order)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _epoch in range(2):
    for images, labels in loader:
        optimizer.zero_grad()
        if stage == 0:
            features = model(images.flatten(1))
            dist.send(features.detach(), args.rank + 1)
            arrived = torch.empty_like(features)
            dist.recv(arrived, args.rank + 1)
            features.backward(arrived)
        else:
            features = torch.empty(len(images), 192)
            dist.recv(features, args.rank - 1)
            features.requires_grad_()
            F.cross_entropy(model(features), labels).backward()
            dist.send(features.grad, args.rank - 1)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)
        optimizer.step()
dist.destroy_process_group()
