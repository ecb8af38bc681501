"""Under the probe a script computes the same: weights and random streams are equal bit for bit."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tests.lab.audit.gradient_cases import CLASSES, FEATURES, RANKS, average
from tests.lab.audit.test_probe_gradients import run_probed

STEPS = 6


class Noisy(Dataset[tuple[Tensor, int]]):
    """Samples that draw from all three random streams whenever they are read."""

    def __len__(self):
        """Return more than ``STEPS`` batches."""
        return 80

    def __getitem__(self, index):
        """Return features of shape (FEATURES,) and a label."""
        shift = random.random() + float(np.random.rand())
        return torch.randn(FEATURES) + shift, index % CLASSES


def _train(rank, folder):
    """Train with DDP, then with an exchange by hand; save all that a probe could change."""
    found = {}
    for name in ("ddp", "by hand"):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(rank)
        model = nn.Sequential(nn.Linear(FEATURES, 40), nn.Dropout(), nn.Linear(40, CLASSES))
        net = DistributedDataParallel(model) if name == "ddp" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(Noisy(), batch_size=8, shuffle=True)
        for (images, labels), _ in zip(loader, range(STEPS), strict=False):
            optimizer.zero_grad()
            cross_entropy(net(images), labels).backward()
            if name == "by hand":
                average(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        random_states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        found[name] = (model.state_dict(), state, random_states)
    torch.save(found, folder / f"end{rank}.pt")


def _equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, (Tensor, np.ndarray)):
        return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    return bool(one == other)


@pytest.mark.slow
def test_weights_states_and_random_streams_are_equal_bit_for_bit(tmp_path):
    ends = {}
    for probed in (True, False):
        folder = tmp_path / str(probed)
        folder.mkdir()
        run_probed(_train, folder, folder, probed=probed)
        ends[probed] = [
            torch.load(folder / f"end{rank}.pt", weights_only=False) for rank in range(RANKS)
        ]
        steps = [
            line for one in folder.glob("*.jsonl") for line in one.open() if '"stepped"' in line
        ]
        assert len(steps) == (2 * RANKS * STEPS if probed else 0)
    assert _equal(ends[True], ends[False])
    first, second = (one["ddp"][2] for one in ends[True])
    assert not _equal(first, second)
