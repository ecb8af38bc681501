"""Rank 0 alone has a loader, and scatters slices of each batch.

finds: nothing
ranks: 2 3
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from student import Pictures, join, make_model, read_flags
from torch.utils.data import DataLoader


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def receive(batches, args):
    local = args.batch_size // args.num_nodes
    images, labels = torch.empty(local, 3, 8, 8), torch.empty(local, dtype=torch.int64)
    if args.rank == 0:
        for mine, whole in zip((images, labels), next(batches), strict=True):
            dist.scatter(mine, [part.contiguous() for part in whole.chunk(args.num_nodes)], src=0)
    else:
        dist.scatter(images, src=0)
        dist.scatter(labels, src=0)
    return images, labels


def train(args):
    torch.manual_seed(0)
    model = make_model()
    dataset = Pictures()
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        for i in range(10):
            if i == 0:
                batches = iter(loader) if args.rank == 0 else None
            images, labels = receive(batches, args)
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
