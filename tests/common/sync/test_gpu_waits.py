"""No strategy makes the host wait for the GPU in a step, seen without a GPU.

Tensors of the meta device have shapes but no values, so whatever needs a value (``item``,
``nonzero``, ``tolist``) raises, as it would wait on a GPU. The collectives do nothing here.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.sync import BY_HAND, build_sync

CALLS = ("all_reduce", "all_gather", "gather", "scatter", "reduce", "broadcast", "send", "recv")
RANKS = 4


@pytest.fixture(params=range(RANKS))
def rank(request, monkeypatch):
    """Be one of four ranks whose collectives return at once, as NCCL's do."""
    work = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)
    for name in (*CALLS, "P2POp"):
        monkeypatch.setattr(dist, name, lambda *_args, **_options: work)
    for called in ("optimizer_shards.all_gather_single", "sharded.reduce_scatter_single"):
        monkeypatch.setattr(f"common.sync.{called}", lambda *_args, **_options: work)
    monkeypatch.setattr(dist, "get_backend", lambda: dist.Backend.NCCL)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda _operations: [work])
    monkeypatch.setattr(dist, "get_rank", lambda: request.param)
    monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)


def steps(name):
    """Do five steps of a strategy, after the one in which the ranks agree and may wait."""
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 10)).to("meta")
    parameters = list(model.parameters())
    sync = build_sync(name)
    sync.prepare(model, torch.optim.SGD(parameters, lr=0.1))
    sync._first_pattern, sync._exchanged = [True] * len(parameters), parameters
    for _ in range(5):  # local_sgd averages in the fourth
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        sync.synchronize(model)
        sync.after_step(model)


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("name", BY_HAND)
def test_no_step_waits_for_the_gpu(name):
    steps(name)
