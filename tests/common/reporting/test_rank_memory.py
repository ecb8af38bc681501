"""A rank holds what the closed forms predict: tensors of real ranks, counted to the byte."""

import pytest
import torch
from torch import Tensor, nn

from common.cost_model.memory_model import (
    KINDS,
    Memory,
    MemoryCase,
    optimizer_cost,
    predict_memory,
)
from common.reporting.rank_memory import rank_memory
from common.sync import MESSAGE_PLANS, build_sync
from common.sync.message_cost import GradientSize
from tests.helpers import run_ranks

OPTIMIZERS = {
    ("sgd", 0.0): lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    ("sgd", 0.9): lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    ("adamw", 0.9): lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
ADAMW = ("adamw", 0.9)
CASES = [
    ("all_reduce", {}, ADAMW),
    ("ddp", {}, ADAMW),
    ("sharded", {"bucket_mb": 0.002}, ADAMW),
    ("sharded", {"bucket_mb": 0.002}, ("sgd", 0.9)),
]
OTHER_CASES = [
    (name, {}, ADAMW) for name in MESSAGE_PLANS if name not in ("none", "all_reduce")
] + [
    ("all_reduce", {}, ("sgd", 0.0)),
    ("all_reduce", {}, ("sgd", 0.9)),
    ("ddp_zero1", {}, ("sgd", 0.9)),
    ("fsdp", {}, ("sgd", 0.9)),
]
STEPS = 4  # DDP rebuilds its buckets after the first step, PowerSGD compresses from the third on


class Odd(nn.Module):
    """Sizes that no world size divides, a buffer, and a frozen layer of 6 entries."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 37, 3, padding=1), nn.BatchNorm2d(37)
        self.hidden, self.head = nn.Linear(37, 61), nn.Linear(61, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.conv(images))).mean(dim=(2, 3))
        return self.frozen(self.head(torch.relu(self.hidden(features))))


TRAINED = GradientSize.of(Odd().parameters())
UNTRAINED = 4 * 6 + 4 * 37 * 2 + 8  # frozen, BatchNorm's mean and variance, its int64 counter


def measured(name: str, options: dict, optimizer_name: tuple[str, float]) -> Memory:
    torch.manual_seed(0)
    sync, model = build_sync(name, **options), Odd()
    optimizer = OPTIMIZERS[optimizer_name]([p for p in model.parameters() if p.requires_grad])
    training = sync.prepare(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        training(torch.randn(4, 3, 5, 5)).square().sum().backward()
        sync.synchronize(training)
        optimizer.step()
        sync.after_step(training)
    memory = rank_memory(training, optimizer, sync)
    sync.sync_replicas(training)
    sync.close()
    return memory


def every_case(rank: int, cases: list) -> list[Memory]:
    return [measured(*case) for case in cases]


def compare(cases: list, ranks: int) -> None:
    by_rank = run_ranks(ranks, every_case, cases)
    for index, (name, options, (opt, momentum)) in enumerate(cases):
        for rank in range(ranks):
            case = MemoryCase(
                plan=build_sync(name, **options),
                sizes=TRAINED,
                rank=rank,
                ranks=ranks,
                optimizer=optimizer_cost(opt, momentum),
                untrained=UNTRAINED,
            )
            assert by_rank[rank][index] == predict_memory(name, case), (name, opt, momentum, rank)


def test_each_rank_holds_what_is_predicted() -> None:
    compare(CASES, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_strategy_holds_what_is_predicted(ranks: int) -> None:
    compare(CASES + OTHER_CASES, ranks)


def test_stages_of_zero_by_hand() -> None:
    """Four ranks share 640 bytes without a rest, in four parameters of one size."""
    expected = {
        "ddp": (640, 640, 640, 0),
        "topk": (640, 640, 640, 640),
        "ddp_zero1": (640, 640, 160, 0),
        "sharded": (640, 160, 160, 0),
        "fsdp": (160, 160, 160, 16),
    }
    for name, kinds in expected.items():
        case = MemoryCase(
            plan=build_sync(name),
            sizes=[GradientSize((4, 10))] * 4,
            rank=3,
            ranks=4,
            optimizer=optimizer_cost("sgd", 0.9),
        )
        assert predict_memory(name, case) == dict(zip(KINDS, (*kinds, 0), strict=True)), name


def test_no_prediction_for_a_strategy_without_a_closed_form() -> None:
    cost = optimizer_cost("sgd", 0.9)
    case = MemoryCase(plan=None, sizes=TRAINED, rank=0, ranks=2, optimizer=cost)
    assert predict_memory("my_own", case) is None
