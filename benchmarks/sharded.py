"""Compare ``sharded`` with DistributedDataParallel on emulated nodes, in turns, step by step.

    lab calibrate                    # or lab calibrate --model resnet50: the time of each layer
    python benchmarks/sharded.py     # vgg11, 4 and 8 nodes, three rates: about 25 minutes

Each pair of a number of nodes and a rate is one cluster (``lab cluster``), in which all strategies
take turns in one process group: a block of steps of each one, in another order every round. The
layers sleep for the times of the profile (docs/emulation.md), the messages are real.

- step: wall time from the end of one step to the end of the next, on the slowest rank, the mean of
  a block after its warm-up; not the sum of sections. A block begins and ends with weights under
  way, so no step of it is missing a part.
- over ddp: the ratio to the block of ddp in the same round; median and range of the rounds.
- model: the event model with the links that were measured at the beginning of the same process
  group; ``step / model`` shows how far it is off. ``ddp-auto`` is DDP with the buckets that this
  model chooses.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loader import REPOSITORY, describe_machine, whole_number
from torch import nn

sys.path.insert(0, str(REPOSITORY))

from common.emulation.compute_profile import load_profile
from common.emulation.emulated_model import Emulation
from common.models import build_model
from common.sync import build_message_plan_from, build_sync
from common.sync.message_cost import GradientSize
from common.training_engine import TrainingEngine
from common.utils.system import tune_malloc
from lab.calibrate.link_measurements import measure_links, over_ranks
from lab.compare.prediction import emulated_compute
from lab.predict.bucket_choice import with_best_buckets
from lab.predict.event_model import predict_step
from lab.predict.measured_links import MeasuredLinks, network_from
from lab.units import AUTO

WARM_UP = 3  # steps of a block; DDP rearranges its buckets in its second step
CLASSES = 10


def measure_block(name: str, options: dict[str, Any], job: argparse.Namespace) -> float:
    """Return the seconds of a step: the mean of a block on the slowest rank."""
    torch.manual_seed(0)
    rank, samples = dist.get_rank(), job.batch_size // dist.get_world_size()
    model = build_model(job.model, CLASSES).to(memory_format=torch.channels_last)
    engine = TrainingEngine(
        model, "cpu", distributed=True, sync=build_sync(name, **options), sync_batchnorm=False
    )
    profile = load_profile(job.compute, model=job.model)
    engine.emulation = Emulation(model, profile, rank=rank, classes=CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    engine.prepare(optimizer, nn.CrossEntropyLoss())
    batch = (torch.zeros(samples, 3, 32, 32), torch.zeros(samples, dtype=torch.int64))
    for number in range(WARM_UP + job.steps):
        if number == WARM_UP:
            began = time.perf_counter()
        engine.train_step([batch], global_samples=job.batch_size)
        engine.timer.take()
    seconds = (time.perf_counter() - began) / job.steps
    engine.sync.sync_replicas(model)
    engine.close()
    return over_ranks(seconds, dist.ReduceOp.MAX)


def serve(job: argparse.Namespace) -> None:
    """Run one rank: measure the links, predict, then measure blocks in turns; rank 0 writes."""
    torch.set_num_threads(1)
    tune_malloc()  # as run() does
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{job.master}:{job.port}",
        rank=job.rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=300),
    )
    sizes = {
        name: GradientSize(p.shape, p.element_size())
        for name, p in build_model(job.model, CLASSES).named_parameters()
    }
    gradients = list(sizes.values())
    kinds = ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
    links = measure_links(job.rank, job.ranks, kinds=kinds, shaped=False, limit_seconds=1.0)
    network = network_from(MeasuredLinks(**links), rate_bits=None)
    profile = load_profile(job.compute, model=job.model)
    samples = job.batch_size // job.ranks
    compute = emulated_compute(profile, samples, list(sizes), gradients)
    ways: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in job.sync:
        strategy, _, buckets = name.partition("-")
        options = {"bucket_mb": float(buckets)} if buckets and buckets != AUTO else {}
        if buckets == AUTO:
            plan: Any = with_best_buckets(
                build_message_plan_from(strategy, {"bucket_mb": AUTO}),
                gradients,
                job.ranks,
                network=network,
                compute=compute,
            )
            options = {"bucket_mb": plan.bucket_mb}
        ways[name] = (strategy, options)
    model = {
        name: predict_step(
            build_message_plan_from(strategy, options),
            gradients,
            job.ranks,
            network=network,
            compute=compute,
        ).step_seconds
        for name, (strategy, options) in ways.items()
    }
    blocks: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(job.rounds):
        turn = number % len(ways)
        order = [*ways][turn:] + [*ways][:turn]
        for name in order if number % 2 == 0 else reversed(order):
            blocks[name].append(measure_block(*ways[name], job))
    if job.rank == 0:
        chosen = {name: options.get("bucket_mb") for name, (_, options) in ways.items()}
        found = {"model": model, "blocks": blocks, "buckets": chosen}
        Path(job.output).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run_cluster(nodes: int, rate: str, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what rank 0 of ``nodes`` emulated nodes measured."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        job = [
            *(sys.executable, __file__, "--serve", "--ranks", "{nodes}", "--rank", "{rank}"),
            *("--master", "{master}", "--port", "{port}", "--output", str(output)),
            *("--model", model, "--compute", arguments.compute),
            *("--steps", str(arguments.steps), "--rounds", str(arguments.rounds)),
            *("--batch-size", str(arguments.batch_size), "--sync", *arguments.sync),
        ]
        shaped = [] if rate == "unshaped" else ["--rate", rate]
        command = [sys.executable, "-m", "lab", "cluster", "run", "--nodes", str(nodes), *shaped]
        ended = subprocess.run(
            [*command, "--logs", folder, "--", *job],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            sys.exit(f"error: {nodes} nodes at {rate} failed:\n{ended.stdout}{ended.stderr}")
        return json.loads(output.read_text(encoding="utf-8"))


def shown(values: Sequence[float], form: str) -> str:
    """Return the median with the range as text."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def report(nodes: int, rate: str, model: str, found: dict[str, Any]) -> None:
    """Print one row per strategy."""
    for name, seconds in found["blocks"].items():
        ratios = [mine / ddp for mine, ddp in zip(seconds, found["blocks"]["ddp"], strict=True)]
        predicted = found["model"][name]
        buckets = "" if found["buckets"][name] is None else f"{found['buckets'][name]:g} MiB"
        print(
            f"{model:<9} {nodes:>5}  {rate:<9} {name:<11} {shown(seconds, '.3f'):<24} "
            f"{shown(ratios, '.3f'):<24} {predicted:7.3f}  "
            f"{statistics.median(seconds) / predicted:6.3f}  {buckets}",
            flush=True,
        )


def parse() -> argparse.Namespace:
    """Return the parsed flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=whole_number, nargs="+", default=[4, 8])
    parser.add_argument(
        "--rate", nargs="+", default=["200mbit", "1gbit", "unshaped"], help="of the links"
    )
    parser.add_argument("--model", nargs="+", default=["vgg11"], help="models (default: vgg11)")
    parser.add_argument("--compute", default="measured", help="profile of the layers' times")
    parser.add_argument(
        "--sync",
        nargs="+",
        default=["ddp", "ddp-auto", "overlapped", "sharded", "sharded-auto", "ddp_zero1"],
        help="strategies, ddp among them; -auto: with the buckets that the event model chooses; "
        "-9: of 9 MiB",
    )
    parser.add_argument("--batch-size", type=whole_number, default=256, help="global (default 256)")
    parser.add_argument("--steps", type=whole_number, default=5, help="of a block (default: 5)")
    parser.add_argument("--rounds", type=whole_number, default=3, help="blocks (default: 3)")
    for name in ("--serve", "--ranks", "--rank", "--master", "--port", "--output"):
        kind = {"action": "store_true"} if name == "--serve" else {}
        parser.add_argument(name, help=argparse.SUPPRESS, **kind)
    return parser.parse_args()


def main() -> None:
    """Measure and print; with --serve, be one rank."""
    arguments = parse()
    if arguments.serve:
        arguments.rank, arguments.ranks = int(arguments.rank), int(arguments.ranks)
        [arguments.model] = arguments.model
        serve(arguments)
        return
    print(describe_machine())
    print(
        f"compute: profile {arguments.compute}; global batch {arguments.batch_size}; "
        f"{arguments.rounds} rounds of {arguments.steps} steps after {WARM_UP}\n"
        f"{'model':<9} {'nodes':>5}  {'rate':<9} {'strategy':<11} {'step, s (range)':<24} "
        f"{'over ddp (range)':<24} model,s  step/m  buckets"
    )
    for model in arguments.model:
        for rate in arguments.rate:
            for nodes in arguments.nodes:
                report(nodes, rate, model, run_cluster(nodes, rate, model, arguments))


if __name__ == "__main__":
    main()
