"""What many cases share, like an assignment's starter code: flags, the group, data and a model."""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

torch.set_num_threads(1)


def read_flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--master-ip", default="127.0.0.1")
    parser.add_argument("--port", default="29500")
    parser.add_argument("--num-nodes", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=24)
    return parser.parse_args()


def join(args):
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{args.master_ip}:{args.port}",
        rank=args.rank,
        world_size=args.num_nodes,
    )


class Pictures(Dataset[tuple[Tensor, int]]):
    """Seeded noise: images of shape (3, 8, 8) with labels 0 to 9."""

    def __init__(self, samples=240):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(samples, 3, 8, 8, generator=generator)
        self.labels = torch.randint(10, (samples,), generator=generator).tolist()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def make_model(*extra):
    """Return a small network; ``extra`` layers follow the convolution."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *extra, nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    )
