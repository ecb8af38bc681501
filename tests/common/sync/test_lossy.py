"""Strategies that send less than every step's exact gradient: what they preserve.

A resumed run continues bit for bit.
"""

import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common.errors import GroupError, UserError
from common.sync import build_sync
from common.sync.base import GradientSync
from common.sync.topk import largest
from common.training_engine import TrainingEngine
from common.training_engine.amp import choose_amp
from common.utils.hashing import digest
from lab.proofs import Case, check_equivalence
from tests.helpers import run_ranks
from tests.helpers.strategies import DISTRIBUTED


class Net(nn.Module):
    """(batch, 24) to (batch, 3), with matrices that PowerSGD compresses at rank 1 or 2."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 3)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)


def batch(rank: int, step: int, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return eight samples of a task that a model can learn: the largest of three sums."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 24, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, inputs.view(8, 3, 8).sum(dim=2).argmax(dim=1)


def new_net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(5)
    return Net().to(dtype)


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1])


def flat(tensors: list[Tensor]) -> np.ndarray:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy()


def steps_of(
    rank: int,
    sync: GradientSync,
    count: int,
    *,
    errors: Callable[[], np.ndarray] | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[dict[str, np.ndarray]]:
    """Train; return the gradients and errors of each step.

    These are this rank's own gradient, the gradient after the exchange, and the strategy's errors
    before and after.
    """
    model, found = new_net(dtype), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    training = sync.prepare(model, optimizer)
    for step in range(count):
        data = batch(rank, step, dtype=dtype)
        own = torch.autograd.grad(loss_of(model, data), list(model.parameters()))
        before = errors() if errors else None
        optimizer.zero_grad(set_to_none=True)
        loss_of(training, data).backward()
        sync.synchronize(model)
        found.append(
            {
                "own": flat(list(own)),
                "mean": flat([p.grad for p in model.parameters()]),
                "before": before,
                "after": errors() if errors else None,
            }
        )
        optimizer.step()
        sync.after_step(model)
    return found


# --- topk ---


def topk_steps(rank: int, ratio: float) -> list[dict[str, np.ndarray]]:
    sync = build_sync("topk", topk_ratio=ratio)

    def residual() -> np.ndarray:
        kept = sync.state_dict()["residuals"]
        return kept[0].numpy() if kept else np.zeros(1)

    return steps_of(rank, sync, 5, errors=residual)


@pytest.mark.parametrize("size", [2, 3])
def test_topk_loses_no_gradient_and_sends_the_largest(size: int) -> None:
    results = run_ranks(size, topk_steps, 0.1)
    entries = sum(p.numel() for p in Net().parameters())
    for step in range(5):
        now = [one[step] for one in results]
        before, after = (
            sum(one["before"] + one["own"] for one in now),
            sum(one["after"] for one in now),
        )
        np.testing.assert_allclose(after + size * now[0]["mean"], before, rtol=0, atol=1e-12)
        assert all(one["mean"].tobytes() == now[0]["mean"].tobytes() for one in now), (
            "other bits on another rank"
        )
        for one in now:
            total, sent = one["before"] + one["own"], one["after"] == 0
            assert sent.sum() == -(-entries // 10)
            assert np.abs(total[sent]).min() >= np.abs(total[~sent]).max()


@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "sorted", "not finite"])
def test_the_largest_of_a_long_vector_are_found(kind: str) -> None:
    values = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    values = {
        "random": values,
        "ties": (values * 10).floor(),
        "zeros": values * (values > 0.999),
        "sorted": values.sort().values,
        "not finite": values.index_fill(0, torch.arange(0, 200_000, 301), float("nan")),
    }[kind]
    for count in (1, 2000, 199_999, 200_000):
        found = largest(values, count)
        assert len(found.unique()) == count
        torch.testing.assert_close(
            values[found].sort().values,
            values.sort().values[-count:],
            rtol=0,
            atol=0,
            equal_nan=True,
        )


def test_topk_of_all_entries_is_all_reduce() -> None:
    for one in (results := run_ranks(3, topk_steps, 1.0)):
        for step, mean in enumerate(row["mean"] for row in one):
            np.testing.assert_allclose(
                mean, sum(other[step]["own"] for other in results) / 3, rtol=0, atol=1e-15
            )


# --- DDP's hooks ---


def fp16_steps(rank: int) -> list[dict[str, np.ndarray]]:
    return steps_of(rank, build_sync("ddp_fp16"), 4, dtype=torch.float32)


def test_fp16_is_within_its_rounding_of_the_exact_mean() -> None:
    size, results = 3, run_ranks(3, fp16_steps)
    for step in range(4):
        owns = np.stack([one[step]["own"] for one in results]).astype(np.float64) / size
        error = np.abs(results[0][step]["mean"] - owns.sum(axis=0))
        # Each addend and each sum is rounded to 11 bits, or to a multiple of 2^-24.
        assert (error <= 2 * size * (2.0**-12 * np.abs(owns).sum(axis=0) + 2.0**-25)).all()
        assert error.max() > 1e-6, "nothing was rounded"
        assert len({one[step]["mean"].tobytes() for one in results}) == 1


def powersgd_steps(rank: int, powersgd_rank: int, count: int) -> list[dict[str, np.ndarray]]:
    sync, names = (
        build_sync("ddp_powersgd", powersgd_rank=powersgd_rank),
        [name for name, _ in Net().named_parameters()],
    )

    def errors() -> np.ndarray:
        kept = sync.state_dict()["errors"]
        return flat([kept[name] for name in names]) if kept else np.zeros(1)

    return steps_of(rank, sync, count, errors=errors)


@pytest.mark.parametrize("size", [2, 3])
def test_powersgd_loses_no_gradient(size: int) -> None:
    results = run_ranks(size, powersgd_steps, 1, 6)
    for step in range(6):
        now = [one[step] for one in results]
        exact = sum(one["own"] for one in now) / size
        before, after = (sum(one[key] for one in now) / size for key in ("before", "after"))
        np.testing.assert_allclose(after + now[0]["mean"], before + exact, rtol=0, atol=1e-12)
        assert len({one["mean"].tobytes() for one in now}) == 1
        difference = np.abs(now[0]["mean"] - exact).max()
        assert difference < 1e-15 if step < 2 else difference > 1e-3, (
            "compresses from the third step on"
        )


def final_loss(rank: int, name: str, options: dict) -> float:
    sync, model = build_sync(name, **options), new_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = sync.prepare(model, optimizer)
    for step in range(180):
        optimizer.zero_grad()
        loss_of(training, batch(rank, step)).backward()
        sync.synchronize(model)
        optimizer.step()
        sync.after_step(model)
    sync.sync_replicas(model)
    return float(np.mean([loss_of(model, batch(9, step)).item() for step in range(100, 120)]))


def final_losses(rank: int) -> dict[str, float]:
    cases = [
        ("all_reduce", {}),
        ("ddp_fp16", {}),
        ("ddp_powersgd", {"powersgd_rank": 1}),
        ("topk", {"topk_ratio": 0.05}),
        ("local_sgd", {"averaging_period": 4}),
    ]
    return {name: final_loss(rank, name, options) for name, options in cases}


@pytest.mark.slow
def test_all_learn_about_as_well_as_the_exact_way() -> None:
    losses = run_ranks(2, final_losses)[0]
    assert losses["all_reduce"] < 0.35, losses  # guessing gives 1.1
    assert all(loss < losses["all_reduce"] + 0.1 for loss in losses.values()), losses


# --- local_sgd ---


def test_local_sgd_of_one_step_is_all_reduce_for_plain_sgd() -> None:
    for found in check_equivalence(
        build_sync("local_sgd", averaging_period=1), sizes=(2, 3), case=Case(momentum=0.0)
    ):
        assert found.greatest.error <= 1e-12, str(found)
        assert found.first_wrong is None, str(found)


def local_sgd_beside_a_simulation(rank: int, size: int, period: int) -> dict:
    """Train eight steps with the strategy, and simulate all ranks in this process.

    Return the differences, the weights after each step, and digests.
    """
    sync = build_sync("local_sgd", averaging_period=period)
    model = new_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    sync.prepare(model, optimizer)
    models = [new_net() for _ in range(size)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.2, momentum=0.9) for one in models]
    error, differ = 0.0, []
    for step in range(8):
        for one, its, index in [
            (model, optimizer, rank),
            *zip(models, optimizers, range(size), strict=True),
        ]:
            its.zero_grad()
            loss_of(one, batch(index, step)).backward()
            if one is model:
                sync.synchronize(model)
            its.step()
        sync.after_step(model)
        if (step + 1) % period == 0:
            spread_mean(models)
        error = max(
            error,
            np.abs(flat(list(model.parameters())) - flat(list(models[rank].parameters()))).max(),
        )
        differ.append(flat(list(model.parameters())).tobytes())
    momenta = [
        flat([its.state[p]["momentum_buffer"] for p in one.parameters()])
        for one, its in zip(models, optimizers, strict=True)
    ]
    spread_mean(models)
    sync.sync_replicas(model)
    settled = digest([model.state_dict(), optimizer.state_dict()])
    sync.sync_replicas(model)
    mine = flat([optimizer.state[p]["momentum_buffer"] for p in model.parameters()])
    return {
        "error": error,
        "bits": differ,
        "settled": settled,
        "again": digest([model.state_dict(), optimizer.state_dict()]),
        "weights": np.abs(
            flat(list(model.parameters())) - flat(list(models[0].parameters()))
        ).max(),
        "momentum": np.abs(mine - sum(momenta) / size).max(),
    }


@torch.no_grad()
def spread_mean(models: list[nn.Module]) -> None:
    for same in zip(*(one.parameters() for one in models), strict=True):
        mean = sum(same) / len(same)
        for parameter in same:
            parameter.copy_(mean)


@pytest.mark.parametrize("period", [3, 4])
def test_local_sgd_is_plain_training_between_two_averages(period: int) -> None:
    results = run_ranks(3, local_sgd_beside_a_simulation, 3, period)
    assert max(max(one["error"], one["weights"], one["momentum"]) for one in results) < 1e-12
    assert len({one["settled"] for one in results}) == 1, (
        "settle leaves weights or momentum that differ"
    )
    assert all(one["again"] == one["settled"] for one in results), "settle twice is not settle once"
    alike = [len({one["bits"][step] for one in results}) == 1 for step in range(8)]
    assert alike == [(step + 1) % period == 0 for step in range(8)]


def one_rank_overflows(rank: int) -> str:
    engine = TrainingEngine(
        model := new_net(), "cpu", distributed=True, sync=build_sync("local_sgd")
    )
    engine.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    batches = [batch(rank, step) for step in range(8)]
    batches[2][0].mul_(float("nan") if rank == 1 else 1)
    try:
        engine.train_epoch(batches, epoch=1, log_every=100)
    except GroupError as error:
        return str(error)
    return "went on"


def test_local_sgd_agrees_on_an_overflow_that_one_rank_sees() -> None:
    told = run_ranks(2, one_rank_overflows, timeout_seconds=30)
    assert all("not finite in epoch 1, step 3: loss nan on rank 1" in one for one in told), told


# --- All strategies ---


def train_epoch(engine: TrainingEngine, rank: int, first: int) -> None:
    engine.train_epoch([batch(rank, step) for step in range(first, first + 3)], epoch=1)
    engine.agree_on_buffers()


def new_engine(name: str) -> tuple[TrainingEngine, nn.Module, torch.optim.Optimizer]:
    options = {"topk": {"topk_ratio": 0.05}, "local_sgd": {"averaging_period": 2}}.get(name, {})
    engine = TrainingEngine(
        model := new_net(), "cpu", distributed=True, sync=build_sync(name, **options)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    engine.prepare(optimizer, nn.CrossEntropyLoss())
    return engine, model, optimizer


def resumed_and_not(rank: int) -> dict[str, tuple[str, str]]:
    """Return digests after nine steps: without a break, and resumed after steps 3 and 6.

    A new engine resumes each time.
    """
    found = {}
    for name in DISTRIBUTED:
        engine, model, optimizer = new_engine(name)
        saved = []
        for first in (0, 3, 6):
            train_epoch(engine, rank, first)
            content = io.BytesIO()
            torch.save(engine.state(epoch=1, loss=0.0), content)
            saved.append(content.getvalue())
        whole = digest([model.state_dict(), optimizer.state_dict()])
        ends = []
        for begin in (1, 2):
            again, model, optimizer = new_engine(name)
            entries = torch.load(io.BytesIO(saved[begin - 1]), weights_only=True)
            model.load_state_dict(entries["model_state_dict"])
            optimizer.load_state_dict(entries["optimizer_state_dict"])
            again.load_state(entries)
            for first in range(3 * begin, 9, 3):
                train_epoch(again, rank, first)
            again.close()
            ends.append(digest([model.state_dict(), optimizer.state_dict()]))
        engine.close()
        found[name] = (whole, *ends)
    return found


def test_a_resume_through_the_checkpoint_equals_the_undisturbed_training() -> None:
    results = run_ranks(2, resumed_and_not)
    for name in DISTRIBUTED:
        assert len(set(results[0][name])) == 1, f"{name}: resumed otherwise"
        assert results[0][name] == results[1][name], f"{name}: the ranks differ"


def refusals(rank: int) -> list[str]:
    told = []
    for name, settings in [
        ("topk", {"amp_dtype": torch.float16}),
        ("ddp_fp16", {"amp_dtype": torch.float16}),
        ("local_sgd", {"use_ema": True}),
    ]:
        with pytest.raises(UserError) as error:
            TrainingEngine(new_net(), "cpu", distributed=True, sync=name, **settings)
        told.append(str(error.value))
    TrainingEngine(
        new_net(), "cpu", distributed=True, sync="topk", amp_dtype=torch.bfloat16, use_ema=True
    )

    def choose_for_a_gpu(*wanted: Any, **more: Any) -> Any:
        return choose_amp(*wanted, **more | {"device": torch.device("cuda")})

    with (
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
        mock.patch("common.training_engine.engine.choose_amp", choose_for_a_gpu),
    ):
        for name in ("ddp", "ddp_fp16", "topk"):
            engine = TrainingEngine(new_net(), "cpu", distributed=True, sync=name, use_amp=True)
            told.append(str(engine.amp_dtype))
    return told


def test_loss_scaling_and_moving_averages_are_refused_where_they_would_go_wrong() -> None:
    told = run_ranks(1, refusals)[0]
    assert all("--amp-dtype bf16" in one for one in told[:2])
    assert told[3:] == ["torch.float16", "torch.bfloat16", "torch.bfloat16"]  # chosen by the engine
    assert "leave out --ema" in told[2]


def altered_states(rank: int) -> list[str]:
    """Return what resuming from states of other shapes says, before any step."""
    told = []
    for name, alter in {
        "topk": lambda state: state["residuals"].append(torch.ones(1)),
        "topk ": lambda state: state.update(residuals=[torch.ones(2, 2)]),
        "topk  ": lambda state: state.update(residuals=[torch.ones(2, dtype=torch.int64)]),
        "ddp_powersgd": lambda state: state["errors"].popitem(),
        "ddp_powersgd ": lambda state: state["qs"].popitem(),
        "ddp_powersgd  ": lambda state: state["qs"].update(
            dict.fromkeys(state["qs"], torch.ones(1))
        ),
    }.items():
        engine, *_ = new_engine(name.strip())
        train_epoch(engine, rank, 0)
        entries = engine.state(epoch=1, loss=0.0)
        engine.close()
        again, *_ = new_engine(name.strip())
        again.load_state(entries)
        again.close()
        alter(entries["sync_state_dicts"][rank])
        again, *_ = new_engine(name.strip())
        with pytest.raises(UserError) as error:
            again.load_state(entries)
        told.append(str(error.value))
        again.close()
    return told


@pytest.mark.slow
def test_a_state_of_other_shapes_is_refused_before_the_first_step() -> None:
    for told in run_ranks(1, altered_states)[0]:
        assert "to resume from holds the state of another" in told
        assert "give the flags that it was trained with" in told


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("topk", {"topk_ratio": 0}),
        ("topk", {"topk_ratio": 1.5}),
        ("local_sgd", {"averaging_period": 0}),
    ],
)
def test_settings_out_of_range_are_refused(name: str, options: dict) -> None:
    with pytest.raises(
        UserError, match=f"{next(iter(options))}: got {next(iter(options.values()))}"
    ):
        build_sync(name, **options)
