"""Measure where a rank's memory goes, beside the closed forms: the tables of memory.md.

    python benchmarks/memory.py                          # minutes
    python benchmarks/memory.py --models vgg11 --ranks 2 --sync ddp sharded

Real ranks on this machine, with Gloo over loopback, train each model for three steps on two images
a rank; then every tensor that the rank holds is counted, by kind, each storage once. Counted are
bytes, so neither the batch nor the load of the machine matters. A row shows the rank that holds
most. Its last column is the peak within a step: what it holds after ``zero_grad``, and the most
that torch's allocator hands out from then on, which includes gathered layers, gradients before they
are in a bucket, and the activations of two images. Not in it: Gloo's own buffers, and what the
threads of ``sharded`` receive in.

Activations depend on the batch: they are the tensors that autograd keeps for backward, counted on
the meta device, which knows shapes and holds no data. ``lab.proofs.ranks`` starts the ranks.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from loader import parse_flags, whole_number
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from common.models import build_model
from common.profiling.rank_memory import rank_memory
from common.sync import STRATEGIES, build_message_plan_from, build_sync
from common.sync.memory_cost import KINDS, MemoryCase
from common.sync.message_cost import GradientSize
from lab.proofs.ranks import run_ranks

CLASSES = {"vgg11": 10, "resnet50": 100}
DEFAULTS = [name for name in ("ddp", "ddp_zero1", "sharded", "fsdp") if name in STRATEGIES]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.001),
}
_PEAK = "peak"
_STEPS = 3  # DDP rebuilds its buckets after the first
_GLOBAL_BATCH = 256


def build(model: str) -> nn.Module:
    """Return a model for images of 32x32."""
    return build_model(model, CLASSES.get(model, 10))


def measure(rank: int, cases: Sequence[tuple[str, str, str]]) -> list[dict[str, int]]:
    """Return this rank's memory for each (model, optimiser, strategy)."""
    return [_after_some_steps(*case) for case in cases]


def _after_some_steps(model_name: str, opt: str, sync_name: str) -> dict[str, int]:
    torch.manual_seed(0)
    sync, model = build_sync(sync_name), build(model_name)
    optimizer = OPTIMIZERS[opt](model.parameters())
    training = sync.prepare(model, optimizer)

    def step() -> None:
        training(torch.randn(2, 3, 32, 32)).square().mean().backward()
        sync.synchronize(training)
        optimizer.step()
        sync.after_step(training)

    for _ in range(_STEPS):
        optimizer.zero_grad(set_to_none=True)
        step()
    memory = rank_memory(training, optimizer, sync)
    optimizer.zero_grad(set_to_none=True)
    left = sum(rank_memory(training, optimizer, sync).values())
    memory[_PEAK] = left + most_allocated(step)
    sync.sync_replicas(training)
    sync.close()
    return memory


def most_allocated(action: Callable[[], None]) -> int:
    """Return the most bytes that torch's allocator has handed out at a time since the begin."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        action()
        dist.barrier()  # messages under way would report to a profiler that is gone, and crash
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = [one for one in recorded.profiler.kineto_results.events() if one.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def predict(model_name: str, opt: str, sync_name: str, *, rank: int, ranks: int) -> dict[str, int]:
    """Return the closed form for this case."""
    model = build(model_name)
    case = MemoryCase(
        sizes=GradientSize.of(model.parameters()),
        rank=rank,
        ranks=ranks,
        opt=opt,
        momentum=0.9,
        untrained=sum(buffer.nbytes for buffer in model.buffers()),
    )
    return build_message_plan_from(sync_name, {}).memory(case)


def print_tensors(models: Sequence[str], sizes: Sequence[int], syncs: Sequence[str]) -> None:
    """Print a Markdown table of the rank that holds most, in MB."""
    heads = ["model", "optimiser", "strategy", "ranks", *KINDS.values(), "all", "predicted", _PEAK]
    print(_line(heads), _line(["---"] * 3 + ["---:"] * (len(heads) - 3)), sep="\n")
    for size in sizes:
        names = ["none"] if size == 1 else syncs
        cases = [(model, opt, sync) for model in models for opt in OPTIMIZERS for sync in names]
        by_rank = run_ranks(size, measure, cases, timeout_seconds=1800)
        for index, case in enumerate(cases):
            held = [{kind: memories[index][kind] for kind in KINDS} for memories in by_rank]
            rank = max(range(size), key=lambda one: sum(held[one].values()))
            predicted = predict(*case, rank=rank, ranks=size)
            sums = [sum(held[rank].values()), sum(predicted.values()), by_rank[rank][index][_PEAK]]
            numbers = [f"{number / 1e6:.2f}" for number in [*held[rank].values(), *sums]]
            print(_line([*case, size, *numbers]), flush=True)


def print_activations(models: Sequence[str], sizes: Sequence[int]) -> None:
    """Print a Markdown table of what autograd keeps for backward, in MB a rank."""
    print(_line(["model", *(f"{_GLOBAL_BATCH // size} images" for size in sizes)]))
    print(_line(["---", *["---:"] * len(sizes)]))
    for model in models:
        counts = [activation_bytes(model, _GLOBAL_BATCH // size) for size in sizes]
        print(_line([model, *(f"{count / 1e6:,.0f}" for count in counts)]))


def activation_bytes(model_name: str, batch_size: int) -> int:
    """Return the bytes of tensors that a forward pass saves for backward, without weights."""
    with torch.device("meta"):
        model, images = build(model_name), torch.zeros(batch_size, 3, 32, 32)
        labels = torch.zeros(batch_size, dtype=torch.long)
    held = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no two have the same address

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        nn.functional.cross_entropy(model(images), labels)
    return sum(storage.nbytes() for storage in storages.values())


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print both tables."""
    flags = {
        "--models": {"nargs": "+", "default": list(CLASSES)},
        "--ranks": {"nargs": "+", "type": whole_number, "default": [1, 2, 4]},
        "--sync": {"nargs": "+", "default": DEFAULTS, "help": "strategies"},
    }
    arguments = parse_flags(__doc__, flags)
    torch.set_num_threads(1)
    print("Tensors of the rank that holds most, between two steps, in MB (10^6 bytes):\n")
    print_tensors(arguments.models, arguments.ranks, arguments.sync)
    print(f"\nActivations of a rank, in MB, for a global batch of {_GLOBAL_BATCH}:\n")
    print_activations(arguments.models, arguments.ranks)


if __name__ == "__main__":
    main()
