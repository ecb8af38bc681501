"""Each step waits for the exchange that the step before began.

finds: stale-gradient
ranks: 2 3
verdict: no
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from student import Pictures, join, make_model, read_flags
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

under_way = []


def average_gradients(model):
    begun = [p.grad / dist.get_world_size() for p in model.parameters()]
    works = [dist.all_reduce(one, async_op=True) for one in begun]
    under_way.append((begun, works))
    begun, works = under_way[0] if len(under_way) == 1 else under_way.pop(0)
    for p, one, work in zip(model.parameters(), begun, works, strict=True):
        work.wait()
        p.grad.copy_(one)


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
