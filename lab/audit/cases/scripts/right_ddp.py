"""Plain DDP."""

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

for epoch in range(2):
    sampler.set_epoch(epoch)
    running_loss = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        outputs = ddp_model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    print(f"epoch {epoch}: loss {running_loss / len(loader):.3f}")
dist.destroy_process_group()
