"""FSDP2: each layer is sharded with fully_shard.

verdict: cannot tell
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from student import Pictures, join, make_model, read_flags
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

args = read_flags()
join(args)
mesh = init_device_mesh("cpu", (args.num_nodes,))
torch.manual_seed(0)
model = make_model()
fully_shard(model[-1], mesh=mesh)
fully_shard(model, mesh=mesh)
dataset = Pictures()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=args.batch_size // args.num_nodes, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: {loss.item():.3f}")
dist.destroy_process_group()
