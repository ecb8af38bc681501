"""The run folder: which ranks write a log file into it."""

import os
from pathlib import Path

import pytest
import torch

from common.reporting.run_folder import RunFolder
from common.training import train_model


@pytest.mark.parametrize("rank", [63, 64])
def test_only_the_first_64_ranks_write_a_log(rank: int, tmp_path: Path) -> None:
    """Otherwise 1,000 machines would append to 1,000 files on one shared disk."""
    folder = RunFolder(tmp_path / "run")
    model = torch.nn.Linear(2, 2)
    batches = [(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_model(
        model,
        torch.device("cpu"),
        torch.nn.CrossEntropyLoss(),
        optimizer,
        1,
        1,
        batches,
        folder.log(rank),
        tmp_path / "checkpoints",
        False,
        rank=rank,
    )
    written = {path.name for path in folder.path.iterdir()}
    assert written == ({"logs_rank63.txt"} if rank == 63 else set())
    assert folder.log(64) == Path(os.devnull)
