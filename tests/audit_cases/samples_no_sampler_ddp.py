"""DDP without a sampler, and one seed for all.

finds: same-samples
ranks: 2 3
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from student import Pictures, join, make_model, read_flags
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

args = read_flags()
join(args)
torch.manual_seed(0)
model = make_model()
ddp_model = DistributedDataParallel(model)
dataset = Pictures()
loader = DataLoader(dataset, batch_size=args.batch_size // args.num_nodes, shuffle=True)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(2):
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
