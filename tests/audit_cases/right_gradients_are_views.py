"""Gradients are views of one flat buffer, which is averaged in place.

finds: nothing
ranks: 2 3
verdict: yes
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from student import Pictures, join, make_model, read_flags
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def make_flat_gradients(model):
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    offset = 0
    for p in model.parameters():
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    return flat


def train(args):
    torch.manual_seed(0)
    model = make_model()
    dataset = Pictures()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size // args.num_nodes, sampler=sampler)
    flat = make_flat_gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(loader):
            flat.zero_()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            optimizer.step()
            if i % 5 == 0:
                print(f"rank {args.rank} epoch {epoch} step {i} loss {loss.item():.3f}")


if __name__ == "__main__":
    args = read_flags()
    join(args)
    train(args)
    dist.destroy_process_group()
