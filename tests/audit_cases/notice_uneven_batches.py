"""Rank r has batches of 8 * (r + 1) samples, and all ranks' means weigh alike.

finds: nothing
notices: uneven-batches
ranks: 2 3
verdict: yes
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from student import Pictures, join, make_model, read_flags
from torch.utils.data import DataLoader, random_split


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def train(args):
    torch.manual_seed(0)
    model = make_model()
    parts = [80 * (rank + 1) for rank in range(args.num_nodes)]
    dataset = random_split(Pictures(sum(parts)), parts)[args.rank]
    loader = DataLoader(dataset, batch_size=8 * (args.rank + 1), shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
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
