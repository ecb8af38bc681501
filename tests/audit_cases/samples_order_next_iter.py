"""Each step begins the loader anew, so that all train on the same batch.

finds: same-order
ranks: 2 3
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
model = make_model()
ddp_model = DistributedDataParallel(model)
dataset = Pictures()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=args.batch_size // args.num_nodes, sampler=sampler)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)

for step in range(12):
    images, labels = next(iter(loader))
    optimizer.zero_grad()
    loss = criterion(ddp_model(images), labels)
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
