"""Compare each strategy's exchange with one raw all_reduce, and ``overlapped`` steps with DDP's.

    python benchmarks/sync.py --ranks 2 3 4
    lab cluster run --nodes 4 --rate 200mbit -- python benchmarks/sync.py --rate 200mbit \\
        --master-ip {master} --num-nodes {nodes} --rank {rank}

What is exchanged are VGG-11's 37 MB of gradients. Real ranks run on this machine, with Gloo over
loopback and one torch thread each; with ``--rank`` the program is one of the ranks of emulated
nodes, and measures exchanges alone. All strategies take turns in one process group:

- exchange: a backward pass that costs nothing delivers gradients of VGG-11's shapes and strides
  (each exists already, as new memory), and the strategy averages them. The time starts with that
  backward pass and ends when ``synchronize`` (and, for local_sgd, ``after_step``) returns, so
  strategies that send from hooks are measured like the others.
- raw: ``torch.distributed.all_reduce`` of one buffer with the same number of bytes, and nothing
  else. Each round measures it at the beginning and in the middle. ``raw again`` is the second over
  the first: it shows the machine's noise.
- none: the backward pass alone, which all except raw contain.
- over ideal, with ``--rate``: ideal is what the busiest link needs for its payload at that rate,
  2(N-1)M/B through a root and 2(N-1)/N M/B in a ring. This includes neither headers nor latency;
  the headers of TCP, IP and Ethernet alone make it 1.06 times as long.
- steps: whole training steps of VGG-11 (forward, loss, backward, SGD with momentum) with
  ``overlapped`` and ``ddp``, both with buckets of the same size, in the order A B B A. Each pair
  gives a ratio.

What keeps the comparison fair:

- All ranks wait at a barrier before each measurement; the time is the slowest rank's.
- Each round takes the strategies in another order, the same on all ranks. The output shows the
  median of the rounds' ratios with a 95 % interval (the median of 10,000 bootstrap samples).
- Warm-up rounds do not count: DDP rearranges its buckets after its first step, and PowerSGD
  compresses from its third step on.
"""

import argparse
import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from loader import SEED, describe_machine, parse_flags, whole_number
from torch import Tensor, nn

from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import process_group
from common.models import build_model
from common.sync import STRATEGIES, build_sync
from common.sync.message_cost import GradientSize
from common.utils.system import tune_malloc
from lab.proofs.ranks import run_ranks
from lab.units import parse_rate

_WARM_UP_ROUNDS = 4


class Given(torch.autograd.Function):
    """An autograd function whose backward pass returns a gradient that exists already."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, ready: list[Tensor]) -> Tensor:
        """Keep the one-element list ``ready``; the backward pass takes the tensor out of it."""
        ctx.ready = ready
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor, None]:
        """Return the ready gradient."""
        return ctx.ready.pop(), None


class GradientsOfVgg(nn.Module):
    """VGG-11's parameters in channels_last; forward and backward passes compute nothing."""

    def __init__(self, examples: Sequence[Tensor]) -> None:
        super().__init__()
        self.vgg = build_model("vgg11", 10).to(memory_format=torch.channels_last)
        self._examples = examples

    def forward(self) -> Tensor:
        """Return a scalar whose backward pass gives each parameter a new tensor as its gradient.

        The last parameter gets its gradient first.
        """
        return sum(
            Given.apply(p, [example.clone()])
            for p, example in zip(self.parameters(), self._examples, strict=True)
        )


def slowest(action: Callable[[], Any]) -> float:
    """Return the seconds of ``action`` on the slowest rank; all ranks begin together."""
    dist.barrier()
    began = time.perf_counter()
    action()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


class Exchange:
    """One strategy and its own model with ready gradients."""

    def __init__(self, name: str, examples: Sequence[Tensor]) -> None:
        self._sync = build_sync(name)
        self._model = GradientsOfVgg(examples)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.0)
        self._training = self._sync.prepare(self._model, self._optimizer)

    def measure(self) -> float:
        """Return the seconds of one exchange; for a periodic strategy, the mean over its period."""
        return sum(self._once() for _ in range(self._sync.plan.period)) / self._sync.plan.period

    def _once(self) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        total = self._training()

        def exchange() -> None:
            total.backward()
            self._sync.synchronize(self._model)
            self._sync.after_step(self._model)
            self._sync.wait_for_weights()

        return slowest(exchange)


class Raw:
    """One all_reduce of a buffer of the same size."""

    def __init__(self, nbytes: int) -> None:
        self._example = torch.randn(nbytes // 4) * 1e-3
        self._buffer = self._example.clone()

    def measure(self) -> float:
        """Return the seconds of one all_reduce."""
        self._buffer.copy_(self._example)
        return slowest(lambda: dist.all_reduce(self._buffer))


def measure_exchanges(names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Return each round's seconds by name: the strategies, "raw" and "raw again"."""
    found: dict[str, list[float]] = {}
    like = build_model("vgg11", 10).to(memory_format=torch.channels_last)
    examples = [torch.randn_like(p) * 1e-3 for p in like.parameters()]
    raw = Raw(sum(GradientSize.of(like.parameters())))
    names = ["none", *names]
    strategies = {name: Exchange(name, examples) for name in names}
    shuffled = random.Random(SEED)
    for number in range(_WARM_UP_ROUNDS + rounds):
        order = shuffled.sample(names, len(names))
        order.insert(len(order) // 2, "raw again")
        for name in ["raw", *order]:
            seconds = strategies.get(name, raw).measure()
            if number >= _WARM_UP_ROUNDS:
                found.setdefault(name, []).append(seconds)
    return {name: found[name] for name in ["raw", "raw again", *names]}


class Steps:
    """Training steps of VGG-11 with one strategy."""

    def __init__(self, name: str, *, batch_size: int, **options: Any) -> None:
        torch.manual_seed(SEED)
        self._sync = build_sync(name, **options)
        self._model = build_model("vgg11", 10).to(memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4
        )
        self._training = self._sync.prepare(self._model, self._optimizer)
        self._images = torch.randn(batch_size, 3, 32, 32).to(memory_format=torch.channels_last)
        self._labels = torch.randint(0, 10, (batch_size,))

    def measure(self) -> float:
        """Return the seconds of one step."""
        return slowest(self._step)

    def _step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self._training(self._images), self._labels).backward()
        self._sync.synchronize(self._model)
        self._optimizer.step()


def measure_steps(
    pairs: int, *, batch_size: int, bucket_mb: float | None
) -> dict[str, list[float]]:
    """Return the seconds of each step of both strategies, pair by pair."""
    strategies = {
        name: Steps(name, batch_size=batch_size, bucket_mb=bucket_mb)
        for name in ("overlapped", "ddp")
    }
    found: dict[str, list[float]] = {name: [] for name in strategies}
    for number in range(_WARM_UP_ROUNDS + pairs):
        for name in list(strategies) if number % 2 else list(strategies)[::-1]:
            seconds = strategies[name].measure()
            if number >= _WARM_UP_ROUNDS:
                found[name].append(seconds)
    return found


def measure(rank: int, arguments: argparse.Namespace) -> tuple[dict, dict]:
    """Return the exchanges and the steps, measured on one rank; see ``run_ranks``."""
    torch.manual_seed(SEED + rank)
    tune_malloc()  # as run() does
    return measure_exchanges(arguments.sync, arguments.rounds), measure_steps(
        arguments.pairs, batch_size=arguments.local_batch_size, bucket_mb=arguments.bucket_mb
    )


def measure_on_node(launch: LaunchSpec, arguments: argparse.Namespace) -> None:
    """Be one rank of emulated nodes; rank 0 prints the exchanges."""
    tune_malloc()
    torch.set_num_threads(1)
    with process_group(launch, backend="gloo", timeout_seconds=120):
        torch.manual_seed(SEED + launch.rank)
        found = measure_exchanges(arguments.sync, arguments.rounds)
    if launch.rank == 0:
        print(describe_machine())
        report_exchanges(launch.world_size, found, rate_bits=arguments.rate)


@functools.cache
def _draws(count: int) -> list[list[int]]:
    generator = random.Random(SEED)
    return [generator.choices(range(count), k=count) for _ in range(10_000)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    medians = sorted(statistics.median([values[i] for i in draw]) for draw in _draws(len(values)))
    return medians[len(medians) // 40], medians[-len(medians) // 40]


def shown(values: Sequence[float], form: str) -> str:
    """Return the median with its interval as text."""
    low, high = interval(values)
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"


def ideal_seconds(name: str, nbytes: int, ranks: int, rate_bits: float) -> float:
    """Return the seconds that the busiest link needs for its payload."""
    copies = 2 * (ranks - 1)
    if not name.startswith("gather_scatter"):
        copies /= ranks
    return 8 * copies * nbytes / rate_bits


def report_exchanges(
    size: int, found: dict[str, list[float]], *, rate_bits: float | None = None
) -> None:
    """Print one row per strategy."""
    sizes = GradientSize.of(build_model("vgg11", 10).parameters())
    print(f"\n{size} ranks, {len(found['raw'])} rounds: median (95 % interval)")
    print(
        f"{'':<21}{'ms':<26}{'over raw':<26}MB sent by rank 0, by the last rank"
        f"{'; over ideal' if rate_bits else ''}"
    )
    for name, seconds in found.items():
        ratios = [mine / raw for mine, raw in zip(seconds, found["raw"], strict=True)]
        sync = build_sync(name if name in STRATEGIES else "all_reduce_flat")
        sent = [
            float(sync.plan.bytes_sent(sizes, rank, size)) / sync.plan.period / 1e6
            for rank in (0, size - 1)
        ]
        of_ideal = ""
        if rate_bits and name != "none":
            ideal = ideal_seconds(name, sum(sizes), size, rate_bits)
            of_ideal = f"; {shown([s / ideal for s in seconds], '.2f')} of {1000 * ideal:.1f} ms"
        print(
            f"{name:<21}{shown([1000 * s for s in seconds], '.1f'):<26}{shown(ratios, '.2f'):<26}"
            f"{sent[0]:.1f}, {sent[1]:.1f}{of_ideal}",
            flush=True,
        )


def report_steps(
    size: int, found: dict[str, list[float]], *, batch_size: int, bucket_mb: float | None
) -> None:
    """Print the steps of both strategies and their ratio."""
    ratios = [ours / theirs for ours, theirs in zip(found["overlapped"], found["ddp"], strict=True)]
    buckets = "torch's default buckets" if bucket_mb is None else f"buckets of {bucket_mb:g} MiB"
    print(
        f"\n{size} ranks, {len(ratios)} pairs of steps, {batch_size} images per rank, {buckets}: "
        "median (95 % interval)"
    )
    for name, seconds in found.items():
        print(f"{name + ', ms':<21}{shown([1000 * s for s in seconds], '.1f')}")
    print(f"{'overlapped / ddp':<21}{shown(ratios, '.3f')}", flush=True)


# fsdp exchanges while the layers compute, and those of GradientsOfVgg do not.
NAMES = [name for name in STRATEGIES if name not in ("none", "fsdp")]
FLAGS: dict[str, dict[str, Any]] = {
    "--ranks": {
        "type": whole_number,
        "nargs": "+",
        "default": [2, 3, 4],
        "help": "numbers of ranks to measure (default: 2 3 4)",
    },
    "--sync": {
        "nargs": "+",
        "default": NAMES,
        "choices": NAMES,
        "help": "strategies (default: all)",
    },
    "--rounds": {
        "type": whole_number,
        "default": 20,
        "help": "rounds of exchanges (default: 20)",
    },
    "--pairs": {
        "type": whole_number,
        "default": 30,
        "help": "pairs of training steps (default: 30)",
    },
    "--local-batch-size": {
        "type": whole_number,
        "default": 64,
        "help": "images per rank and step (default: 64)",
    },
    "--bucket-mb": {
        "type": float,
        "help": "MiB per bucket, for both strategies (default: 1, then 25)",
    },
    "--master-ip": {"help": "address of rank 0, for a rank on a node"},
    "--num-nodes": {"type": whole_number, "help": "number of ranks, for a rank on a node"},
    "--rank": {"type": int, "help": "number of this rank on a node"},
    "--rate": {"type": parse_rate, "help": "rate of the nodes' links, for over ideal"},
}


def main() -> None:
    """Measure and print."""
    arguments = parse_flags(__doc__, FLAGS)
    if arguments.rank is not None:
        launch = LaunchSpec(arguments.rank, arguments.num_nodes, arguments.master_ip)
        measure_on_node(launch, arguments)
        return
    print(describe_machine())
    print(f"settings: one thread per rank, Gloo on lo; {_WARM_UP_ROUNDS} rounds to warm up")
    for size in arguments.ranks:
        (exchanges, steps), *_ = run_ranks(size, measure, arguments, timeout_seconds=3600)
        report_exchanges(size, exchanges)
        report_steps(
            size, steps, batch_size=arguments.local_batch_size, bucket_mb=arguments.bucket_mb
        )


if __name__ == "__main__":
    main()
