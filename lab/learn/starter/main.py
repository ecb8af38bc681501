"""Train VGG-11 on CIFAR-10 in one process, and on several ranks in three ways.

    python main.py
    python main.py --sync gather_scatter --master-ip 10.0.0.1 --num-nodes 4 --rank 0
    python main.py --sync all_reduce --master-ip 10.0.0.1 --num-nodes 4 --rank 0
    python main.py --sync ddp --master-ip 10.0.0.1 --num-nodes 4 --rank 0

On the other nodes --rank is 1, 2 and 3. Three functions are yours to write:
average_by_gather_scatter, average_by_all_reduce and in_ddp. All else is complete.
"""

import argparse
import time

import torch
import torch.distributed as dist
from model import VGG11
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_by_gather_scatter(model):
    """Make each gradient the mean over all ranks, through rank 0.

    For each parameter: rank 0 gathers the gradients of all ranks (dist.gather), computes their
    mean, and scatters it to all ranks (dist.scatter).
    """
    raise NotImplementedError("write average_by_gather_scatter")


def average_by_all_reduce(model):
    """Make each gradient the mean over all ranks: one dist.all_reduce for each parameter."""
    raise NotImplementedError("write average_by_all_reduce")


def in_ddp(model):
    """Return the model in DistributedDataParallel, which averages during backward."""
    raise NotImplementedError("write in_ddp")


def load_images(name, folder, train):
    """Return images of shape (N, 3, 32, 32), float32, and labels of shape (N,), int64."""
    if name == "cifar10":
        from torchvision.datasets import CIFAR10

        data = CIFAR10(folder, train=train, download=True)
        images = torch.tensor(data.data).permute(0, 3, 1, 2) / 255
        mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
        std = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
        return TensorDataset((images - mean) / std, torch.tensor(data.targets))
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = slice(0, 1437) if train else slice(1437, None)
    images = torch.tensor(images[rows] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    images = images.repeat_interleave(4, 2).repeat_interleave(4, 3).expand(-1, 3, -1, -1)
    return TensorDataset(images, torch.tensor(labels[rows]))


def batches(loader, sampler, steps):
    """Yield batches of as many steps, in another order in each epoch."""
    epoch = 0
    while steps > 0:
        sampler.set_epoch(epoch)
        for batch in loader:
            if steps > 0:
                yield batch
                steps -= 1
        epoch += 1


def train(args, average):
    """Train for args.steps steps; return the network and the seconds of each step.

    average : called between backward and the optimiser's step.
    """
    data = load_images(args.dataset, args.data_dir, train=True)
    sampler = DistributedSampler(data, args.num_nodes, args.rank, seed=0, drop_last=True)
    # The batch of 256 is that of all ranks together.
    share = args.batch_size // args.num_nodes
    if args.rank == 0:
        print(f"{args.num_nodes} x {share} = {args.num_nodes * share} images a step", flush=True)
    loader = DataLoader(data, share, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        raise SystemExit(
            f"{len(sampler)} images a rank make no batch of {share}: --batch-size less"
        )
    torch.manual_seed(0)  # all ranks begin with the same weights
    network = VGG11()
    model = in_ddp(network) if args.sync == "ddp" else network
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    seconds = []
    began = time.perf_counter()
    for images, labels in batches(loader, sampler, args.steps):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        average(network)
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        if len(seconds) % 20 == 0:
            print(f"rank {args.rank} step {len(seconds)} loss {loss.item():.3f}", flush=True)
    return network, seconds


def test(network, args):
    """Print loss and accuracy on the test set."""
    network.eval()
    correct, loss, samples = 0, 0.0, 0
    data = load_images(args.dataset, args.data_dir, train=False)
    with torch.no_grad():
        for images, labels in DataLoader(data, 250):
            logits = network(images)
            loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            correct += (logits.argmax(1) == labels).sum().item()
            samples += len(labels)
    print(f"test loss {loss / samples:.3f}, accuracy {correct / samples:.2%} of {samples} images")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--sync", choices=["none", "gather_scatter", "all_reduce", "ddp"], default="none"
    )
    parser.add_argument("--master-ip", default="127.0.0.1")
    parser.add_argument("--master-port", default="29512")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--dataset", choices=["cifar10", "digits"], default="cifar10")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--batch-size", type=int, default=256, help="of all ranks together")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    if (args.sync == "none") != (args.num_nodes == 1):
        parser.error("--sync gather_scatter, all_reduce and ddp go with --num-nodes 2 or more")
    if args.steps < 2 or args.batch_size < args.num_nodes:
        parser.error("give --steps 2 or more, and a --batch-size of --num-nodes or more")
    averages = {"gather_scatter": average_by_gather_scatter, "all_reduce": average_by_all_reduce}
    if args.num_nodes > 1:
        address = f"tcp://{args.master_ip}:{args.master_port}"
        dist.init_process_group("gloo", address, world_size=args.num_nodes, rank=args.rank)
    network, seconds = train(args, averages.get(args.sync, lambda network: None))
    mean = sum(seconds[1:]) / len(seconds[1:])
    print(f"rank {args.rank}: mean {mean:.3f} s a step, without the first")
    if args.rank == 0:
        test(network, args)
    if args.num_nodes > 1:
        dist.destroy_process_group()
