"""Nodes of two ranks: sums to each node's leader, sums between leaders, the mean back to the node.

ranks: 3 4
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from student import Pictures, join, make_model, read_flags
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

PER_NODE = 2


def make_groups():
    """Return the ranks of this node, their group, and the group of all nodes' first ranks."""
    size = dist.get_world_size()
    nodes = [list(range(size))[first : first + PER_NODE] for first in range(0, size, PER_NODE)]
    inside = [dist.new_group(node) for node in nodes]
    leaders = dist.new_group([node[0] for node in nodes])
    number = dist.get_rank() // PER_NODE
    return nodes[number], inside[number], leaders


def average_gradients(model, node, inside, leaders):
    for p in model.parameters():
        dist.reduce(p.grad, dst=node[0], group=inside)
        if dist.get_rank() == node[0]:
            dist.all_reduce(p.grad, group=leaders)
            p.grad /= dist.get_world_size()
        dist.broadcast(p.grad, src=node[0], group=inside)


args = read_flags()
join(args)
groups = make_groups()
torch.manual_seed(0)
model = make_model()
dataset = Pictures()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=args.batch_size // args.num_nodes, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        average_gradients(model, *groups)
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.3f}")
dist.destroy_process_group()
