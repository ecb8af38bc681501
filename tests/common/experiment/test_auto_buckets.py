"""``--bucket-mb auto``: what it measures, that it changes nothing else, and that ranks agree."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.checkpoint import load_checkpoint, save_checkpoint
from common.config.schema import Config
from common.cost_model.bucket_choice import BucketChoice
from common.data.dataset import Dataset, ImageSet
from common.data.loaders import TrainLoader
from common.data.sharding import GlobalBatchSampler
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World, current_world
from common.emulation.compute_profile import Layer, Profile, SectionTime
from common.errors import UserError
from common.experiment import auto_buckets, run
from common.experiment.compute_trial import ComputeTrial
from common.utils.hashing import digest
from tests.helpers import free_port, run_ranks

FAST, SLOW = 0.005, 0.02  # seconds that a layer sleeps, on rank 0 and on rank 1


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class SleepyLinear(nn.Linear):
    """Sleeps in forward, and twice as long in backward before its gradients are ready."""

    seconds = FAST

    def forward(self, inputs: Tensor) -> Tensor:
        return _Sleep.apply(super().forward(inputs), self.seconds)


def sleepy_model() -> nn.Module:
    """Return three layers that sleep, with BatchNorm and dropout between them."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        SleepyLinear(192, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.5),
        SleepyLinear(8, 8),
        SleepyLinear(8, 10),
    )


def setup_of(world: World) -> Any:
    """Return the part of a Setup that ``ComputeTrial`` reads."""
    return SimpleNamespace(
        config=Config("PartTwo", sync="overlapped"),
        world=world,
        learning_rate=0.1,
        amp=(None, ""),
    )


def state_of(model: nn.Module, loader: TrainLoader) -> list[str]:
    """Return digests of weights, statistics, random stream, and the loader's next batch."""
    flags = [[p.requires_grad, p.grad is None] for p in model.parameters()]
    return [
        digest(model.state_dict()),
        digest([torch.get_rng_state()]),
        digest(list(next(iter(loader)))),
        json.dumps([flags, model.training]),
    ]


def _try_out(rank: int) -> dict[str, Any]:
    SleepyLinear.seconds = (FAST, SLOW)[rank]
    images = ImageSet(torch.zeros((16, 8, 8, 3), dtype=torch.uint8), torch.arange(16) % 10)
    noise = Dataset("noise", images, images, tuple("abcdefghij"), (0.5,) * 3, (0.5,) * 3)
    sampler = GlobalBatchSampler(16, batch_size=8, rank=rank, world_size=2)
    loader, model = TrainLoader(noise, sampler), sleepy_model()
    before = state_of(model, loader)
    trial = ComputeTrial(setup_of(current_world()), model, loader)
    sizes = {name: p.numel() * 4 for name, p in model.named_parameters()}
    compute = trial.measure(sizes)
    cost = trial.overlap_cost(sum(sizes.values()))
    return {
        "compute": compute,
        "ready": {name: compute.ready_shares[-1 - i] for i, name in enumerate(sizes)},
        "needed": {name: compute.needed_shares[-1 - i] for i, name in enumerate(sizes)},
        "cost": cost,
        "same": state_of(model, loader) == before,
    }


def test_a_trial_times_the_slowest_ranks_layers_and_changes_nothing() -> None:
    found = run_ranks(2, _try_out)
    assert found[0]["compute"] == found[1]["compute"]
    assert found[0]["cost"] == found[1]["cost"]
    assert 0 <= found[0]["cost"] <= 1
    assert all(one["same"] for one in found)
    compute, ready, needed = (found[0][name] for name in ("compute", "ready", "needed"))
    assert 3 * SLOW <= compute.before_seconds < 9 * SLOW
    assert 6 * SLOW <= compute.backward_seconds < 12 * SLOW
    # A linear layer's gradient is ready after its own sleep; forward needs its weight before.
    assert [ready[f"{layer}.weight"] for layer in (5, 4, 1)] == pytest.approx(
        [1 / 3, 2 / 3, 1], abs=0.15
    )
    assert [needed[f"{layer}.weight"] for layer in (1, 4, 5)] == pytest.approx(
        [0, 1 / 3, 2 / 3], abs=0.15
    )


def test_emulated_compute_is_the_profiles_with_all_micro_batches() -> None:
    layers = (
        Layer("a", SectionTime(0.0, 0.1), SectionTime(0.0, 0.2), ("a",)),
        Layer("b", SectionTime(0.0, 0.3), SectionTime(0.0, 0.6), ("b",)),
    )
    profile = Profile("p", "m", "cpu", 1, "2026-11-23T12:00:00", "vgg11", (32, 32), layers, 0.5)
    setup: Any = SimpleNamespace(
        profile=profile,
        plan=SimpleNamespace(batch_size=63, shards=4, accumulation_steps=2),
        world=SimpleNamespace(size=4),
    )
    compute = auto_buckets._emulated_compute(setup, {"a": 100, "b": 300})
    # Two micro-batches of 8 samples: 3.2 s forward, 6.4 s backward. Only the last one overlaps.
    assert compute.before_seconds == pytest.approx(3.2 + 6.4 + 3.2)
    assert compute.backward_seconds == pytest.approx(6.4)
    assert compute.ready_seconds(300) == pytest.approx(4.8)
    assert compute.needed_seconds(100) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("sync", "ranks", "kept"),
    [("ddp", 4, True), ("ddp", 3, False), ("overlapped", 4, False)],
)
def test_a_resumed_run_keeps_the_choice_of_the_same_strategy_and_ranks(
    sync: str, ranks: int, kept: bool
) -> None:
    choice = BucketChoice("ddp", 9.0, 0.5, 0.6)
    setup: Any = SimpleNamespace(
        entries={"auto_buckets": asdict(choice), "world_size": 4},
        config=SimpleNamespace(sync=sync),
        world=SimpleNamespace(size=ranks),
    )
    assert auto_buckets._earlier_choice(setup) == (choice if kept else None)
    setup.entries = {"world_size": ranks}
    assert auto_buckets._earlier_choice(setup) is None


@pytest.mark.parametrize("change", [{"bucket_mb": -1.0}, {"bucket_mb": "9"}, {"more": 1}])
def test_an_impossible_choice_in_a_checkpoint_is_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    entries: dict[str, Any] = {
        "epoch": 1,
        "loss": 0.5,
        "model_state_dict": {},
        "optimizer_state_dict": {},
        "auto_buckets": asdict(BucketChoice("ddp", 9.0, 0.5, 0.6)),
    }
    save_checkpoint(tmp_path / "good.pt", entries)
    assert load_checkpoint(tmp_path / "good.pt")["auto_buckets"] == entries["auto_buckets"]
    save_checkpoint(
        tmp_path / "bad.pt", entries | {"auto_buckets": entries["auto_buckets"] | change}
    )
    with pytest.raises(UserError, match="is not a training checkpoint of this project"):
        load_checkpoint(tmp_path / "bad.pt")


def _train(rank: int, ports: list[int], folder: str) -> list[Any]:
    """Train with auto buckets, with the same size given, and with the default; then resume."""
    dist.destroy_process_group()
    found: list[Any] = []

    def choose(sync: str, sizes: Any, ranks: int, **measured: Any) -> BucketChoice:
        found.append((sync, [int(size) for size in sizes], ranks, measured))
        return BucketChoice(sync, 0.25, 1.0, 2.0)

    def refuse(*_: Any, **__: Any) -> BucketChoice:
        raise AssertionError("a resumed run chooses again")

    def train(name: str, bucket_mb: float | str | None, **more: Any) -> None:
        config = Config(
            "PartTwo",
            sync="overlapped",
            model="wide",
            dataset="digits",
            batch_size=360,
            epochs=2,
            threads=1,
            bucket_mb=bucket_mb,
            output_dir=Path(folder),
            run_name=name,
            **more,
        )
        launch = LaunchSpec(rank=rank, size=3, master_ip="127.0.0.1", master_port=ports.pop())
        run.run(config, launch)

    auto_buckets.choose_buckets = choose
    train("auto", "auto", stop_after_epoch=1)
    auto_buckets.choose_buckets = refuse
    train("auto", "auto", resume="auto")
    train("given", 0.25)
    train("default", None)
    return found


@pytest.mark.slow
def test_auto_trains_bit_for_bit_as_with_the_same_size_given(tmp_path: Path) -> None:
    """All ranks choose from the same numbers; a resumed run keeps the choice."""
    ranks = run_ranks(3, _train, [free_port() for _ in range(4)], str(tmp_path))
    assert ranks[0] == ranks[1] == ranks[2]
    [(sync, sizes, size, measured)] = ranks[0]
    assert (sync, size, sum(sizes)) == ("overlapped", 3, 4_555_752)
    assert measured["compute"].backward_seconds > 0
    assert measured["network"].kinds["all_reduce"].beta_seconds_per_byte > 0
    folder = tmp_path / "PartTwo-overlapped"
    weights = {
        name: torch.load(folder / name / "checkpoints" / "Epoch_2.pt")["model_state_dict"]
        for name in ("auto", "given", "default")
    }
    assert digest(weights["auto"]) == digest(weights["given"])
    # With three ranks, buckets change the order of sums: otherwise equal bits would show nothing.
    assert digest(weights["default"]) != digest(weights["given"])
    config = json.loads((folder / "auto" / "config.json").read_text())
    assert config["bucket_mb"] == "auto"
    assert config["auto_buckets"] == {
        "sync": "overlapped",
        "bucket_mb": 0.25,
        "expected_step_seconds": 1.0,
        "default_step_seconds": 2.0,
    }
    assert json.loads((folder / "given" / "config.json").read_text())["auto_buckets"] is None
