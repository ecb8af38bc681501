"""An IterableDataset gives each rank every n-th sample.

finds: nothing
ranks: 2 3
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from student import Pictures, join, make_model, read_flags
from torch.utils.data import DataLoader, IterableDataset


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


class Share(IterableDataset):
    def __init__(self, rank, ranks):
        self.pictures, self.rank, self.ranks, self.epoch = Pictures(), rank, ranks, 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        order = torch.randperm(len(self.pictures), generator=generator).tolist()
        return (self.pictures[index] for index in order[self.rank :: self.ranks])


def train(args):
    torch.manual_seed(0)
    model = make_model()
    dataset = Share(args.rank, args.num_nodes)
    loader = DataLoader(dataset, batch_size=args.batch_size // args.num_nodes)
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
