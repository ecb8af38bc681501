"""PyTorch's own ways to shard a training: ``fsdp`` and ``ddp_zero1``.

test_sync.py compares ``ddp_zero1`` with one process. ``fsdp`` is compared here, since every rank
must use the same layers.
"""

import functools
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.checkpoint import load_model_state, load_optimizer_state
from common.errors import UserError
from common.profiling.comm_trace import MessageRecorder
from common.sync import build_sync
from common.sync.built_in_plans import shares_of
from common.sync.fsdp import layers
from common.sync.message_cost import GradientSize
from common.training_engine import TrainingEngine
from common.training_engine.evaluation_loop import predict
from lab.proofs import Case, Equivalence, check_group
from lab.proofs.equivalence import proof_sync
from tests.helpers import RankError, run_ranks
from tests.helpers.strategies import Mixed

BOTH = ["fsdp", "ddp_zero1"]
CASES = {
    "float64": Case(unused=False),
    "float32": Case(unused=False, dtype=torch.float32, channels_last=True),
    "clipping": Case(unused=False, clip_norm=0.05),
    "accumulation": Case(unused=False, accumulation_steps=3),
}
SIZES = [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3, 4, 5, 6))]


@functools.cache
def compared(size: int) -> dict[str, Equivalence]:
    """Return the result of each case, computed once for all tests."""
    return check_group({kind: ("fsdp", case) for kind, case in CASES.items()}, size)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_fsdp_equals_one_process_after_every_step(size: int, kind: str) -> None:
    found = compared(size)[kind]
    assert len(found.steps) == 4
    assert found.first_wrong is None, str(found)


def test_fsdp_equals_one_process_on_three_ranks() -> None:
    found = check_group({"": ("fsdp", CASES["float64"])}, 3)[""]
    assert found.first_wrong is None, str(found)


# --- Evaluation, checkpoints, other strategies and numbers of ranks ---


class Small(nn.Module):
    """BatchNorm, a layer that no rank uses, a frozen one; (batch, 3, 4, 4) to (batch, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5)
        self.unused, self.frozen = nn.Linear(7, 7), nn.Linear(20, 20).requires_grad_(False)
        self.head = nn.Linear(20, 3)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.conv(images))).flatten(1)
        return self.head(torch.tanh(self.frozen(hidden)))


def batches(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 4, 3, 4, 4, generator=generator, dtype=torch.float64)
    return [(one, torch.tensor([0, 1, 2, 0])) for one in images]


def trained(rank: int, name: str, checkpoint: bytes) -> dict[str, Any]:
    """Resume if there is a checkpoint, train, evaluate, train; return losses and a checkpoint.

    Every rank evaluates another number of batches, as it may with shards of unequal size.
    """
    torch.manual_seed(rank)
    model, criterion = Small(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    entries = torch.load(io.BytesIO(checkpoint)) if checkpoint else {}
    if entries:
        load_model_state(model, entries, name="a test's")
        load_optimizer_state(optimizer, entries, name="a test's")
    sync = proof_sync(name)  # with the search for unused parameters, where there is one
    engine = TrainingEngine(model, "cpu", distributed=True, sync=sync, clip_norm=0.5, use_ema=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    engine.prepare(optimizer, criterion, scheduler)
    if entries:
        engine.load_state(entries)
    engine.train_epoch(batches(3, rank), epoch=1)
    engine.agree_on_buffers()
    found = {"loss": predict(engine.model, "cpu", criterion, batches(1, 9)).mean_loss}
    predict(engine.model, "cpu", criterion, batches(rank, 8))
    engine.train_epoch(batches(2, 50 + rank), epoch=2)
    engine.agree_on_buffers()
    buffer = io.BytesIO()
    torch.save(engine.state(epoch=2, loss=0.0), buffer)
    engine.close()
    optimizer.step()  # whole again: it steps without the strategy
    return {**found, "checkpoint": buffer.getvalue()}


def each_trained(rank: int, jobs: dict[str, tuple[str, bytes]]) -> dict[str, dict[str, Any]]:
    return {key: trained(rank, *job) for key, job in jobs.items()}


@functools.cache
def fresh() -> list[dict[str, dict[str, Any]]]:
    """Return what each strategy has found on two ranks from a fresh start, by rank."""
    return run_ranks(2, each_trained, {name: (name, b"") for name in ["all_reduce", *BOTH]})


@functools.cache
def resumed() -> list[dict[str, dict[str, Any]]]:
    """Return what three ranks have found from the checkpoints of two, by rank.

    The keys are the strategies that resume, and those that have saved.
    """
    pairs = [("all_reduce", "all_reduce")]
    pairs += [pair for name in BOTH for pair in ((name, "all_reduce"), ("all_reduce", name))]
    saved = {name: found["checkpoint"] for name, found in fresh()[0].items()}
    jobs = {f"{name} from {other}": (name, saved[other]) for name, other in pairs}
    return run_ranks(3, each_trained, jobs)


def assert_equal(one: Any, other: Any, path: str = "") -> None:
    """Compare nested values; tensors may differ by rounding."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path} {key}")
    elif isinstance(one, list | tuple):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_equal(left, right, f"{path} {index}")
    elif isinstance(one, Tensor):
        assert one.shape == other.shape, path
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12), path
    else:
        assert one == other, path


def assert_equal_results(ranks: list[dict[str, dict[str, Any]]], key: str, other: str) -> None:
    for found in ranks:
        assert math.isclose(found[key]["loss"], found[other]["loss"], rel_tol=1e-9)
        ours, theirs = (torch.load(io.BytesIO(found[one]["checkpoint"])) for one in (key, other))
        assert_equal(ours, theirs)


@pytest.mark.parametrize("name", BOTH)
def test_checkpoints_are_those_of_all_reduce(name: str) -> None:
    """AdamW's state, weights, averages; with clipping, and an evaluation within the training."""
    assert_equal_results(fresh(), name, "all_reduce")


@pytest.mark.parametrize("name", BOTH)
def test_three_ranks_resume_from_a_checkpoint_of_two(name: str) -> None:
    """Those of all_reduce with the strategy, and the strategy's with all_reduce."""
    for key in (f"{name} from all_reduce", f"all_reduce from {name}"):
        assert_equal_results(resumed(), key, "all_reduce from all_reduce")


# --- Memory and messages ---


def held(rank: int, name: str) -> dict[str, float]:
    """Return entries that this rank holds after a step, and whether unready weights read NaN."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = TrainingEngine(model, "cpu", distributed=True, sync=name)
    engine.prepare(optimizer, nn.CrossEntropyLoss())
    engine.train_step([(torch.randn(2, 64), torch.tensor([0, 1]))], global_samples=4)
    inner = optimizer if name == "fsdp" else engine.sync._zero.optim
    found = {
        "state": sum(one["exp_avg"].numel() for one in inner.state.values()),
        "own state": sum(one["exp_avg"].numel() for one in optimizer.state.values()),
        "weights": sum(p.untyped_storage().nbytes() // 4 for p in model.parameters()),
        "nan": all(bool(p.isnan().all()) for p in model.parameters()),
        "gradients": sum(p.grad is not None for p in model.parameters()),
    }
    engine.sync.sync_replicas(model)
    found["whole state"] = sum(one["exp_avg"].numel() for one in optimizer.state.values())
    found["finite"] = all(bool(p.isfinite().all()) for p in model.parameters())
    engine.close()
    return found


def test_a_rank_holds_its_part_only() -> None:
    entries = 64 * 32 + 32 + 32 * 16 + 16
    fsdp, zero1 = (run_ranks(2, held, name) for name in BOTH)
    for found in fsdp:
        assert found["state"] == found["own state"] == entries / 2
        assert found["weights"] == 4  # one NaN for each parameter
        assert found["nan"]
    shares = shares_of(GradientSize.of(nn.Linear(64, 32).parameters()), 2)
    assert shares == [[0], [1]]
    assert [found["state"] for found in zero1] == [64 * 32, entries - 64 * 32]
    for found in [*fsdp, *zero1]:
        assert found["whole state"] == entries
        assert found["finite"]
        assert not found["gradients"]
    assert not any(found["own state"] for found in zero1)


def messages(rank: int, name: str) -> list[tuple[str, int, float]]:
    """Return kind, bytes and sent bytes of the messages of a step, after three others."""
    model = nn.Sequential(nn.Conv2d(3, 37, 3), nn.BatchNorm2d(37), nn.Flatten(), nn.Linear(148, 3))
    engine = TrainingEngine(model, "cpu", distributed=True, sync=name)
    engine.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    batch = (torch.randn(4, 3, 4, 4), torch.tensor([0, 1, 2, 0]))
    recorder = MessageRecorder()
    for step in range(4):
        if step == 3:
            recorder.__enter__()
        engine.train_step([batch], global_samples=4 * engine.world.size)
    recorder.__exit__(None, None, None)
    recorder.finish()
    engine.close()
    return [(one.kind, one.nbytes, one.sent_bytes) for one in recorder.messages]


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("size", [2, 3])
def test_messages_are_those_of_the_plan(size: int, name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 37, 3), nn.BatchNorm2d(37), nn.Flatten(), nn.Linear(148, 3))
    sizes, sync = GradientSize.of(model.parameters()), build_sync(name)
    for rank, real in enumerate(run_ranks(size, messages, name)):
        assert [
            (kind.replace("reduce_scatter", "all_reduce"), nbytes) for kind, nbytes, _ in real
        ] == [(one.kind, int(one.nbytes)) for one in sync.operations(sizes, size)]
        assert sum(sent for *_, sent in real) == pytest.approx(
            float(sync.bytes_sent(sizes, rank, size))
        )
        assert "reduce_scatter" in [kind for kind, *_ in real] or name != "fsdp"


def test_the_docstrings_formulas() -> None:
    sizes = [GradientSize((1000, 10)), GradientSize((1000,))]  # M = 44,000
    assert build_sync("fsdp").bytes_sent(sizes, 0, 4) == 4 * 3 * 44_000 / 4
    whole = sum(build_sync("ddp_zero1").bytes_sent(sizes, rank, 4) for rank in range(4))
    # Two ranks own nothing, and broadcast 4 bytes each.
    assert whole == 4 * 2 * 3 * 44_000 / 4 + 3 * (44_000 + 8)


def test_a_layer_is_what_can_be_gathered_by_itself() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MultiheadAttention(4, 2), nn.Linear(4, 4)
    )
    model.tied = nn.Linear(4, 4)
    model.tied.weight = model[3].weight
    assert layers(model) == [[model[0], model[1]], [model[2]]]
    assert layers(model[0]) == []  # the whole model is gathered as one


def unstepped(rank: int) -> int:
    model = nn.Linear(4, 2)
    sync = build_sync("ddp_zero1")
    training = sync.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    training(torch.ones(1, 4)).sum().backward()
    before = model.weight.clone()
    with MessageRecorder() as recorder:
        sync.after_step(model)
    assert torch.equal(model.weight, before)
    return len(recorder.messages)


def test_zero1_sends_weights_also_if_the_update_is_emulated() -> None:
    assert run_ranks(2, unstepped) == [2, 2]


# --- What they refuse ---


class Branches(nn.Module):
    """Ranks use different layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.use_second = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.second(hidden) if self.use_second else hidden


def refused(rank: int, kind: str) -> None:
    model = {"branches": Branches, "mixed": Mixed}.get(kind, lambda: nn.Linear(4, 4))()
    if kind == "branches":
        model.use_second = rank == 0
    if kind == "scalar":
        model.scale = nn.Parameter(torch.tensor(1.0))
    if kind == "compiled":
        model.compile()
    maker = torch.optim.Adafactor if kind == "optimiser" else torch.optim.SGD
    name = "ddp_zero1" if kind == "mixed" else "fsdp"
    engine = TrainingEngine(model, "cpu", distributed=True, sync=name)
    engine.prepare(maker(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    engine.train_step([(torch.randn(2, 4), torch.tensor([0, 1]))], global_samples=4)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("branches", r"rank 0 is at layer 'second', but rank 1 at layer 'first'"),
        ("scalar", r"parameter 'scale' is a scalar"),
        ("compiled", "leave out --compile"),
        ("optimiser", "Adafactor"),
        ("mixed", r"types torch\.float32, torch\.float64, but ZeroRedundancyOptimizer wants one"),
    ],
)
def test_what_they_cannot_do_is_refused_by_name(kind: str, message: str) -> None:
    with pytest.raises(RankError, match=f"{UserError.__name__}: .*{message}"):
        run_ranks(2, refused, kind)
