"""Rank 0 gathers and averages; the others keep their own gradients.

finds: own-gradient
ranks: 2 3
verdict: no
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from student import Pictures, join, make_model, read_flags
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def average_gradients(model):
    for p in model.parameters():
        if dist.get_rank() == 0:
            parts = [torch.zeros_like(p.grad) for _ in range(dist.get_world_size())]
            dist.gather(p.grad, gather_list=parts)
            p.grad.copy_(torch.stack(parts).mean(0))
        else:
            dist.gather(p.grad)


def train(args):
    torch.manual_seed(0)
    model = make_model()
    dataset = Pictures()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size // args.num_nodes, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            average_gradients(model)
            optimizer.step()
            if i % 5 == 0:
                print(f"rank {args.rank} epoch {epoch} step {i} loss {loss.item():.3f}")


if __name__ == "__main__":
    args = read_flags()
    join(args)
    train(args)
    dist.destroy_process_group()
