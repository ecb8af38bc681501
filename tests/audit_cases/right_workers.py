"""The loader has a worker process, and the dataset augments.

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


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


class Augmented(Pictures):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return image + 0.1 * torch.randn(3, 8, 8), label


def train(args):
    torch.manual_seed(0)
    model = make_model()
    dataset = Augmented()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset, batch_size=args.batch_size // args.num_nodes, sampler=sampler, num_workers=1
    )
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
