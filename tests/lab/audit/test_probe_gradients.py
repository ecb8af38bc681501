"""What the probe records of gradients and weights, against the same computed by hand.

The own gradients come from a copy of the model, which no optimiser knows. And without the probe the
same script computes the same: weights, states and random streams are equal bit for bit.
"""

import copy
import json
import os
import random
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lab.audit import probe
from lab.audit.probe.coordinates import coordinates
from lab.audit.recording import RecordReader
from lab.audit.records import Step, Trouble, Weights
from lab.proofs.ranks import run_ranks

RANKS, STEPS, FEATURES, CLASSES, BATCH = 2, 3, 60, 5, 8


class Noisy(Dataset[tuple[Tensor, int]]):
    """Samples that draw from all three random streams whenever they are read."""

    def __len__(self):
        return 80

    def __getitem__(self, index):
        shift = random.random() + float(np.random.rand())
        return torch.randn(FEATURES) + shift, index % CLASSES


class Net(nn.Module):
    """A tied, a frozen and an unused parameter; some hold more numbers than the probe keeps."""

    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 40), nn.Linear(40, FEATURES)
        self.second.weight = nn.Parameter(torch.randn(FEATURES, 40) * 0.1)
        self.frozen, self.unused = nn.Linear(FEATURES, FEATURES), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.head, self.dropout = nn.Linear(FEATURES, CLASSES), nn.Dropout()
        self.again, self.checkpointed = self.head, checkpointed

    def forward(self, images):
        if self.checkpointed:
            hidden = checkpoint(self.first, images.requires_grad_(), use_reentrant=True)
        else:
            hidden = self.first(images)
        hidden = self.second(self.dropout(torch.relu(hidden)))
        return self.head(self.frozen(hidden)) + self.again(images)


def average(parameters):
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS


def clip_then_average(parameters):
    nn.utils.clip_grad_norm_(iter(parameters), 0.1)  # which can be read only once
    average(parameters)


class AveragingSGD(torch.optim.SGD):
    """Averages in its own step, as Horovod's optimiser does."""

    def step(self, closure=None):
        average(self.param_groups[0]["params"])
        return super().step(closure)


class OwnSGD(torch.optim.Optimizer):
    """A class of the script's own, as the AdamW of transformers: it calls no step of torch's."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        average(self.param_groups[0]["params"])
        for one in self.param_groups[0]["params"]:
            if one.grad is not None:
                one.data.add_(one.grad, alpha=-self.param_groups[0]["lr"])


def zero(parameters, lr):
    return ZeroRedundancyOptimizer(list(parameters), torch.optim.Adam, lr=lr)


SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
CASES = {
    "buckets": {"make": SGD, "ddp": {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}},
    "accumulation": {"make": SGD, "ddp": {}, "micro": 3},
    "checkpointed": {"make": AdamW, "checkpointed": True, "finish": average},
    "scaled": {"make": SGD, "scaler": torch.amp.GradScaler("cpu"), "finish": average},
    "clipped": {"make": SGD, "finish": clip_then_average},
    "zero": {"make": zero, "ddp": {}},
    "averaging": {"make": AveragingSGD},
    "own class": {"make": OwnSGD},
}


def train(rank, *, make, ddp=None, checkpointed=False, micro=1, scaler=None, finish=list):
    """Train; return what each step had (weights, own, got), and all that a probe could change.

    finish : called with the parameters before the step.
    """
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank)
    model = net = Net(checkpointed=checkpointed)
    if ddp is not None:
        net = DistributedDataParallel(model, find_unused_parameters=True, **ddp)
    optimizer = make(model.parameters(), lr=0.1)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    batches, truths = iter(DataLoader(Noisy(), BATCH, shuffle=True)), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        weights = [one.detach().clone() for one in parameters]
        twin = copy.deepcopy(model)
        scale = scaler.get_scale() if scaler else 1.0
        for part in range(micro):
            images, labels = next(batches)
            with torch.random.fork_rng():
                (cross_entropy(twin(images), labels) * scale).backward()
            last = part == micro - 1
            with nullcontext() if last or net is model else net.no_sync():
                loss = cross_entropy(net(images), labels)
                (scaler.scale(loss) if scaler else loss).backward()
        finish(parameters)
        if scaler:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        own, got = ([one.grad for one in several] for several in (twin.parameters(), parameters))
        truths.append([sampled(tensors, weights) for tensors in (weights, own, got)])
    states = [value for one in optimizer.state.values() for value in one.values()]
    tensors = [*model.state_dict().values(), *filter(torch.is_tensor, states)]
    streams = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    _, keys, position, *_ = np.random.get_state()
    return truths, [one.numpy().tobytes() for one in tensors], [*streams, keys.tobytes(), position]


def sampled(tensors, like):
    """Return the samples that the probe should have; zeros for None."""
    parts = []
    for tensor, other in zip(tensors, like, strict=True):
        full = torch.zeros_like(other) if tensor is None else tensor
        parts.append(full.detach().double().reshape(-1)[coordinates(full.numel())])
    return torch.cat(parts).numpy()


def _fail():
    raise ZeroDivisionError


def run_cases(rank, folder, probed):
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # as a library may, before it is watched
    if probed:
        settings = {"folder": str(folder), "script": str(Path(__file__).parent), "rank": rank}
        os.environ["LAB_AUDIT"] = json.dumps({**settings, "steps": 10**6})
        probe.install()
    with pytest.raises(ZeroDivisionError):  # a step that fails is none, and disturbs no other one
        torch.optim.SGD([nn.Parameter(torch.ones(1))]).step(_fail)
    return {name: train(rank, **options) for name, options in CASES.items()}


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    """Return the recording of all cases, and what each rank computed in them."""
    folder = tmp_path_factory.mktemp("probe")
    ends = run_ranks(RANKS, run_cases, folder, True)
    return RecordReader(folder).recording(), ends


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rank", range(RANKS))
def test_own_got_and_weights_are_those_computed_by_hand(proof, case, rank):
    recording, ends = proof
    process = recording.ranks[rank]
    assert not process.of(Trouble)
    numbers = list(dict.fromkeys(one.optimizer_number for one in process.of(Step)))
    number = numbers[list(CASES).index(case)]
    steps, weights = (
        [one for one in process.of(kind) if one.optimizer_number == number]
        for kind in (Step, Weights)
    )
    assert [record.step for record in steps] == list(range(STEPS))
    for step, before, truth in zip(steps, weights, ends[rank][case][0], strict=True):
        references = (before.values, step.own, step.got)
        for reference, expected, near in zip(references, truth, (0, 1e-4, 0), strict=True):
            np.testing.assert_allclose(process.numbers(reference), expected, near, near * 1e-3)


@pytest.mark.slow
def test_weights_states_and_random_streams_are_equal_bit_for_bit(proof, tmp_path):
    _, probed = proof
    unprobed = run_ranks(RANKS, run_cases, tmp_path, False)
    assert not list(tmp_path.iterdir())
    for rank, case in [(rank, case) for rank in range(RANKS) for case in CASES]:
        assert probed[rank][case][1:] == unprobed[rank][case][1:]
    assert probed[0]["buckets"][2] != probed[1]["buckets"][2]
