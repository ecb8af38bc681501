"""What the strategies that are not exact preserve; a resumed run continues bit for bit."""

import io
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from common.errors import GroupError, UserError
from common.sync import build_message_plan_from, build_sync
from common.sync.topk import largest
from common.training_engine import TrainingEngine
from common.utils.hashing import digest
from tests.helpers import run_ranks
from tests.helpers.engines import prepared, sgd
from tests.helpers.strategies import DISTRIBUTED


def batch(rank, step, *, dtype=torch.float64):
    """Return eight samples of a task that a model can learn: the largest of three sums."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 24, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, inputs.view(8, 3, 8).sum(dim=2).argmax(dim=1)


def new_net(dtype=torch.float64):
    """Return a model with matrices that PowerSGD compresses at rank 1 or 2."""
    torch.manual_seed(5)
    layers = (nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 3))
    return nn.Sequential(*layers).to(dtype)


def loss_of(model, data):
    return nn.functional.cross_entropy(model(data[0]), data[1])


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy()


def difference(model, other):
    return np.abs(flat(list(model.parameters())) - flat(list(other.parameters()))).max()


def steps_of(rank, sync, count, *, errors=None, dtype=torch.float64):
    """Train; return each step's own and exchanged gradient, and the errors before and after it."""
    model, found = new_net(dtype), []
    optimizer = sgd(model, lr=0.2, momentum=0.9)
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


def topk_steps(rank):
    """Return the steps with a tenth of the entries, and with all."""

    def steps(ratio):
        def residual():
            kept = sync.state_dict()["residuals"]
            return kept[0].numpy() if kept else np.zeros(1)

        sync = build_sync("topk", topk_ratio=ratio)
        return steps_of(rank, sync, 5, errors=residual)

    return steps(0.1), steps(1.0)


@pytest.mark.parametrize("size", [2, 3])
def test_topk_loses_no_gradient_and_sends_the_largest(size):
    """With all entries it is all_reduce."""
    results, whole = zip(*run_ranks(size, topk_steps), strict=True)
    entries = sum(p.numel() for p in new_net().parameters())
    for step in range(5):
        now = [one[step] for one in results]
        before = sum(one["before"] + one["own"] for one in now)
        after = sum(one["after"] for one in now)
        np.testing.assert_allclose(after + size * now[0]["mean"], before, rtol=0, atol=1e-12)
        assert len({one["mean"].tobytes() for one in now}) == 1, "other bits on another rank"
        for one in now:
            total, sent = one["before"] + one["own"], one["after"] == 0
            assert sent.sum() == -(-entries // 10)
            assert np.abs(total[sent]).min() >= np.abs(total[~sent]).max()
            exact = sum(other[step]["own"] for other in whole) / size
            np.testing.assert_allclose(whole[0][step]["mean"], exact, rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "sorted", "not finite"])
def test_the_largest_of_a_long_vector_are_found(kind):
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
        ours, expected = values[found].sort().values, values.sort().values[-count:]
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def fp16_steps(rank):
    return steps_of(rank, build_sync("ddp_fp16"), 4, dtype=torch.float32)


def test_fp16_is_within_its_rounding_of_the_exact_mean():
    size, results = 3, run_ranks(3, fp16_steps)
    for step in range(4):
        owns = np.stack([one[step]["own"] for one in results]).astype(np.float64) / size
        error = np.abs(results[0][step]["mean"] - owns.sum(axis=0))
        # Each addend and each sum is rounded to 11 bits, or to a multiple of 2^-24.
        assert (error <= 2 * size * (2.0**-12 * np.abs(owns).sum(axis=0) + 2.0**-25)).all()
        assert error.max() > 1e-6, "nothing was rounded"
        assert len({one[step]["mean"].tobytes() for one in results}) == 1


def powersgd_steps(rank, powersgd_rank, count):
    sync = build_sync("ddp_powersgd", powersgd_rank=powersgd_rank)
    names = [name for name, _ in new_net().named_parameters()]

    def errors():
        kept = sync.state_dict()["errors"]
        return flat([kept[name] for name in names]) if kept else np.zeros(1)

    return steps_of(rank, sync, count, errors=errors)


@pytest.mark.parametrize("size", [2, 3])
def test_powersgd_loses_no_gradient(size):
    results = run_ranks(size, powersgd_steps, 1, 6)
    for step in range(6):
        now = [one[step] for one in results]
        exact = sum(one["own"] for one in now) / size
        before, after = (sum(one[key] for one in now) / size for key in ("before", "after"))
        np.testing.assert_allclose(after + now[0]["mean"], before + exact, rtol=0, atol=1e-12)
        assert len({one["mean"].tobytes() for one in now}) == 1
        difference = np.abs(now[0]["mean"] - exact).max()
        assert difference < 1e-15 if step < 2 else difference > 1e-3, "compresses from step 3 on"


def local_sgd_beside_a_simulation(rank, size, period):
    """Train eight steps with the strategy, and simulate all ranks in this process."""
    sync = build_sync("local_sgd", averaging_period=period)
    model = new_net()
    optimizer = sgd(model, lr=0.2, momentum=0.9)
    sync.prepare(model, optimizer)
    models = [new_net() for _ in range(size)]
    optimizers = [sgd(one, lr=0.2, momentum=0.9) for one in models]
    error, differ = 0.0, []
    for step in range(8):
        simulated = zip(models, optimizers, range(size), strict=True)
        for one, its, index in [(model, optimizer, rank), *simulated]:
            its.zero_grad()
            loss_of(one, batch(index, step)).backward()
            if one is model:
                sync.synchronize(model)
            its.step()
        sync.after_step(model)
        if (step + 1) % period == 0:
            spread_mean(models)
        error = max(error, difference(model, models[rank]))
        differ.append(flat(list(model.parameters())).tobytes())
    assert error < 1e-12
    momenta = [
        flat([its.state[p]["momentum_buffer"] for p in one.parameters()])
        for one, its in zip(models, optimizers, strict=True)
    ]
    spread_mean(models)
    sync.sync_replicas(model)
    synced = digest([model.state_dict(), optimizer.state_dict()])
    sync.sync_replicas(model)
    assert digest([model.state_dict(), optimizer.state_dict()]) == synced, "a second call"
    assert difference(model, models[0]) < 1e-12
    mine = flat([optimizer.state[p]["momentum_buffer"] for p in model.parameters()])
    assert np.abs(mine - sum(momenta) / size).max() < 1e-12
    return synced, differ


@torch.no_grad()
def spread_mean(models):
    for same in zip(*(one.parameters() for one in models), strict=True):
        mean = sum(same) / len(same)
        for parameter in same:
            parameter.copy_(mean)


@pytest.mark.parametrize("period", [1, 3, 4])
def test_local_sgd_is_plain_training_between_two_averages(period):
    synced, bits = zip(*run_ranks(3, local_sgd_beside_a_simulation, 3, period), strict=True)
    assert len(set(synced)) == 1, "weights or momentum differ"
    alike = [len(set(step)) == 1 for step in zip(*bits, strict=True)]
    assert alike == [(step + 1) % period == 0 for step in range(8)]


def one_rank_overflows(rank):
    engine = prepared(new_net(), "local_sgd")
    batches = [batch(rank, step) for step in range(8)]
    batches[2][0].mul_(float("nan") if rank == 1 else 1)
    told = "not finite in epoch 1, step 3: loss nan on rank 1"
    with pytest.raises(GroupError, match=told):
        engine.train_epoch(batches, epoch=1, log_every=100)


def test_local_sgd_agrees_on_an_overflow_that_one_rank_sees():
    run_ranks(2, one_rank_overflows, timeout_seconds=30)


def train_epoch(engine, rank, first):
    engine.train_epoch([batch(rank, step) for step in range(first, first + 3)], epoch=1)
    engine.agree_on_buffers()


def new_engine(name):
    options = {"topk": {"topk_ratio": 0.05}, "local_sgd": {"averaging_period": 2}}.get(name, {})
    model = new_net()
    optimizer = sgd(model, lr=0.2, momentum=0.9)
    return prepared(model, build_sync(name, **options), optimizer=optimizer), model, optimizer


def resumed_and_not(rank):
    """Return digests after nine steps: whole, and resumed by a new engine after steps 3 and 6."""
    found = {}
    for name in DISTRIBUTED:
        engine, model, optimizer = new_engine(name)
        saved = []
        for first in (0, 3, 6):
            train_epoch(engine, rank, first)
            content = io.BytesIO()
            torch.save(engine.state(epoch=1, loss=0.0), content)
            saved.append(content.getvalue())
        found[name] = digest([model.state_dict(), optimizer.state_dict()])
        for begin in (1, 2):
            again, model, optimizer = new_engine(name)
            entries = torch.load(io.BytesIO(saved[begin - 1]), weights_only=True)
            model.load_state_dict(entries["model_state_dict"])
            optimizer.load_state_dict(entries["optimizer_state_dict"])
            again.load_state(entries)
            for first in range(3 * begin, 9, 3):
                train_epoch(again, rank, first)
            again.close()
            resumed = digest([model.state_dict(), optimizer.state_dict()])
            assert resumed == found[name], f"{name}: resumed otherwise"
        engine.close()
    return found


def test_a_resume_through_the_checkpoint_equals_the_undisturbed_training():
    first, second = run_ranks(2, resumed_and_not)
    assert first == second, "the ranks differ"


def refusals(rank):
    def engine(name, **settings):
        return TrainingEngine(new_net(), "cpu", distributed=True, sync=name, **settings)

    for name, settings, words in [
        ("topk", {"amp_dtype": torch.float16}, "--amp-dtype bf16"),
        ("ddp_fp16", {"amp_dtype": torch.float16}, "--amp-dtype bf16"),
        ("local_sgd", {"use_ema": True}, "leave out --ema"),
    ]:
        with pytest.raises(UserError, match=words):
            engine(name, **settings)
    engine("topk", amp_dtype=torch.bfloat16, use_ema=True)
    with mock.patch("common.training_engine.engine.choose_amp", return_value=(None, "")) as chosen:
        for name in ("ddp", "ddp_fp16", "topk"):
            engine(name, use_amp=True)
    return [call.kwargs["exact"] for call in chosen.call_args_list]


def test_loss_scaling_and_moving_averages_are_refused_where_they_would_go_wrong():
    # what the choice of a type for AMP is told of ddp, ddp_fp16 and topk
    assert run_ranks(1, refusals) == [[True, False, False]]


def altered_states(rank):
    """Resume from states of other shapes, before any step."""
    for name, alter in [
        ("topk", lambda state: state["residuals"].append(torch.ones(1))),
        ("topk", lambda state: state.update(residuals=[torch.ones(2, 2)])),
        ("topk", lambda state: state.update(residuals=[torch.ones(2, dtype=torch.int64)])),
        ("ddp_powersgd", lambda state: state["errors"].popitem()),
        ("ddp_powersgd", lambda state: state["qs"].popitem()),
        ("ddp_powersgd", lambda state: state.update(qs=dict.fromkeys(state["qs"], torch.ones(1)))),
    ]:
        engine, *_ = new_engine(name)
        train_epoch(engine, rank, 0)
        entries = engine.state(epoch=1, loss=0.0)
        engine.load_state(entries)
        alter(entries["sync_state_dicts"][rank])
        told = "to resume from holds the state of another.*give the flags that it was trained with"
        with pytest.raises(UserError, match=told):
            engine.load_state(entries)
        engine.close()


@pytest.mark.slow
def test_a_state_of_other_shapes_is_refused_before_the_first_step():
    run_ranks(1, altered_states)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("topk", "topk_ratio", 0), ("topk", "topk_ratio", 1.5), ("local_sgd", "averaging_period", 0)],
)
def test_settings_out_of_range_are_refused(name, option, value):
    with pytest.raises(UserError, match=f"{option}: got {value}"):
        build_message_plan_from(name, {option: value})
