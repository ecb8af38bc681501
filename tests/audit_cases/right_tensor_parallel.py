"""Each rank holds a slice of the hidden layer, and all see the same samples: no replicas.

verdict: cannot tell
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from student import Pictures, join, read_flags
from torch.utils.data import DataLoader


class AddSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Sliced(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(192, width)
        self.down = nn.Linear(width, 10, bias=False)

    def forward(self, images):
        return AddSlices.apply(self.down(self.up(images.flatten(1)).relu()))


args = read_flags()
join(args)
torch.manual_seed(args.rank)
model = Sliced(24 // args.num_nodes)
order = torch.Generator().manual_seed(3)
loader = DataLoader(Pictures(), args.batch_size, shuffle=True, generator=order)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for _epoch in range(2):
    for images, labels in loader:
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
dist.destroy_process_group()
