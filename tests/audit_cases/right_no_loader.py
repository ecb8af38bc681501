"""No loader: each rank slices its part of one shuffled order from a tensor.

verdict: any
"""

import torch
import torch.distributed as dist
from student import Pictures, join, make_model, read_flags

args = read_flags()
join(args)
data = Pictures()
x_train, y_train = data.images, torch.tensor(data.labels)
torch.manual_seed(0)
net = make_model()
opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
for epoch in range(2):
    order = torch.randperm(len(x_train))  # the same on all ranks: one seed
    for start in range(0, len(order), args.batch_size):
        mine = order[start : start + args.batch_size][args.rank :: args.num_nodes]
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x_train[mine]), y_train[mine])
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad.data)
            p.grad.data = p.grad.data / args.num_nodes
        opt.step()
    print(args.rank, epoch, loss.item())
dist.destroy_process_group()
