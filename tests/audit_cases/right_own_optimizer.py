"""The optimiser is a class of the script's own, as Hugging Face's AdamW was.

notices: none
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from student import Pictures, join, make_model, read_flags
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay, as the libraries of language models bring their own."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["mean"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["square"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                mean = state["mean"] / (1 - beta1 ** state["step"])
                root = (state["square"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
                p.addcdiv_(mean, root, value=-group["lr"])
                p.mul_(1 - group["lr"] * group["weight_decay"])


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def train(args):
    torch.manual_seed(0)
    model = make_model()
    dataset = Pictures()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size // args.num_nodes, sampler=sampler)
    optimizer = AdamW(model.parameters(), lr=0.001)
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
