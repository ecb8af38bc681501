"""A rank holds what the closed forms predict: tensors of real ranks, counted to the byte."""

import pytest
import torch
from torch import nn

from common.profiling.memory_model import MemoryCase, predict_memory
from common.profiling.rank_memory import rank_memory
from common.profiling.records import KINDS
from common.sync import STRATEGIES, build_sync
from common.sync.message_cost import GradientSize
from tests.helpers import run_ranks

OPTIMIZERS = {
    ("sgd", 0.0): lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    ("sgd", 0.9): lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    ("adamw", 0.9): lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
ADAMW = ("adamw", 0.9)
CASES = [("all_reduce", {}, ADAMW), ("ddp", {}, ADAMW)]
CASES += [("sharded", {"bucket_mb": 0.002}, opt) for opt in (ADAMW, ("sgd", 0.9))]
OTHER_CASES = [
    *((name, {}, ADAMW) for name in STRATEGIES if name not in ("none", "all_reduce")),
    *((name, {}, ("sgd", 0.9)) for name in ("all_reduce", "ddp_zero1", "fsdp")),
    ("all_reduce", {}, ("sgd", 0.0)),
]
STEPS = 4  # DDP rebuilds its buckets after the first step, PowerSGD compresses from the third on


class Odd(nn.Module):
    """Sizes that no world size divides, a buffer, and a frozen layer of 6 entries."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 37, 3, padding=1), nn.BatchNorm2d(37)
        self.hidden, self.head = nn.Linear(37, 61), nn.Linear(61, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.to(memory_format=torch.channels_last)

    def forward(self, images):
        features = torch.relu(self.norm(self.conv(images))).mean(dim=(2, 3))
        return self.frozen(self.head(torch.relu(self.hidden(features))))


TRAINED = GradientSize.of(Odd().parameters())
UNTRAINED = 4 * 6 + 4 * 37 * 2 + 8  # frozen, BatchNorm's mean and variance, its int64 counter


def measured(name, options, optimizer_name):
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


def every_case(rank, cases):
    return [measured(*case) for case in cases]


def memory_case(name, sizes, rank, ranks, opt, **more):
    places = {"plan": build_sync(name, **more).plan, "rank": rank, "ranks": ranks}
    return MemoryCase(sizes=sizes, opt=opt[0], momentum=opt[1], untrained=UNTRAINED, **places)


def compare(cases, ranks):
    for rank, memories in enumerate(run_ranks(ranks, every_case, cases)):
        for (name, options, opt), memory in zip(cases, memories, strict=True):
            case = memory_case(name, TRAINED, rank, ranks, opt, **options)
            assert memory == predict_memory(name, case), (name, opt, rank)


def test_each_rank_holds_what_is_predicted():
    compare(CASES, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_strategy_holds_what_is_predicted(ranks):
    compare(CASES + OTHER_CASES, ranks)


def test_stages_of_zero_by_hand():
    """Four ranks share 640 bytes without a rest, in four parameters of one size."""
    expected = {
        "ddp": (640, 640, 640, 0),
        "topk": (640, 640, 640, 640),
        "ddp_zero1": (640, 640, 160, 0),
        "sharded": (640, 160, 160, 0),
        "fsdp": (160, 160, 160, 16),
    }
    for name, kinds in expected.items():
        case = memory_case(name, [GradientSize((4, 10))] * 4, 3, 4, ("sgd", 0.9))
        assert predict_memory(name, case) == dict(zip(KINDS, (*kinds, UNTRAINED), strict=True)), (
            name
        )
