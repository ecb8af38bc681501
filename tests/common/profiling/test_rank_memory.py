"""A rank holds what the closed forms predict: tensors of real ranks, counted to the byte."""

from functools import partial

import pytest
import torch

from common.profiling.rank_memory import rank_memory
from common.sync import STRATEGIES, build_message_plan_from, build_sync
from common.sync.memory_cost import KINDS, MemoryCase
from common.sync.message_cost import GradientSize
from tests.helpers import run_ranks
from tests.helpers.strategies import Odd

SGD = torch.optim.SGD
OPTIMIZERS = {
    ("sgd", 0.0): SGD,
    ("sgd", 0.9): partial(SGD, momentum=0.9, fused=True),
    ("adamw", 0.9): torch.optim.AdamW,
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


TRAINED = GradientSize.of(Odd().parameters())
UNTRAINED = 4 * 6 + 4 * 37 * 2 + 8  # frozen, BatchNorm's mean and variance, its int64 counter


def measured(name, options, optimizer_name):
    torch.manual_seed(0)
    sync, model = build_sync(name, **options), Odd()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[optimizer_name](trained, lr=0.01)
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


def predicted(name, sizes, rank, ranks, opt, **more):
    places = {"rank": rank, "ranks": ranks, "untrained": UNTRAINED}
    case = MemoryCase(sizes=sizes, opt=opt[0], momentum=opt[1], **places)
    return build_message_plan_from(name, more).memory(case)


def compare(cases, ranks):
    for rank, memories in enumerate(run_ranks(ranks, every_case, cases)):
        for (name, options, opt), memory in zip(cases, memories, strict=True):
            held = predicted(name, TRAINED, rank, ranks, opt, **options)
            assert memory == held, (name, opt, rank)


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
        held = predicted(name, [GradientSize((4, 10))] * 4, 3, 4, ("sgd", 0.9))
        whole = dict(zip(KINDS, (*kinds, UNTRAINED), strict=True))
        assert held == whole, name
