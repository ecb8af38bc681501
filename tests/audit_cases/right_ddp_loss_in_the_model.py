"""The model returns its loss.

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


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_model()

    def forward(self, images, labels):
        return nn.functional.cross_entropy(self.net(images), labels)


model = WithLoss()
ddp_model = DistributedDataParallel(model)
dataset = Pictures()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=args.batch_size // args.num_nodes, sampler=sampler)
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(2):
    sampler.set_epoch(epoch)
    running_loss = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = ddp_model(images, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    print(f"epoch {epoch}: loss {running_loss / len(loader):.3f}")
dist.destroy_process_group()
