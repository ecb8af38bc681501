"""39 intervals without the first are averaged; the loss is averaged over the ranks.

flags: --clocks
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from student import Pictures, join, make_model, read_flags
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def train(args):
    torch.manual_seed(0)
    model = make_model()
    dataset = Pictures(1200)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size // args.num_nodes, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    times = []
    for i, (images, labels) in enumerate(loader):
        if i == 40:
            break
        begin = time.time()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        average_gradients(model)
        optimizer.step()
        end = time.time()
        if i > 0:
            times.append(end - begin)
        if i % 20 == 19:
            mean_loss = loss.detach().clone()
            dist.all_reduce(mean_loss)
            print(f"step {i + 1}: loss {mean_loss.item() / dist.get_world_size():.3f}")
    print(f"average time per iteration: {sum(times) / len(times):.4f} s")


if __name__ == "__main__":
    args = read_flags()
    join(args)
    train(args)
    dist.destroy_process_group()
