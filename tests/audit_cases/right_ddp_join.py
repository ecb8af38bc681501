"""DDP with Join: a rank with fewer batches waits for the others."""

import torch
import torch.distributed as dist
import torch.nn as nn
from student import Pictures, join, make_model, read_flags
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, random_split

args = read_flags()
join(args)
torch.manual_seed(0)
ddp_model = DistributedDataParallel(make_model())
parts = [120 + 40 * rank for rank in range(args.num_nodes)]
dataset = random_split(Pictures(sum(parts)), parts)[args.rank]
loader = DataLoader(dataset, batch_size=args.batch_size // args.num_nodes, shuffle=True)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(2):
    with Join([ddp_model]):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(ddp_model(images), labels)
            loss.backward()
            optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")
dist.destroy_process_group()
