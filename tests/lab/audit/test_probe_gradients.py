"""What the probe records of gradients, weights and losses, against the same computed by hand."""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lab.audit.probe.coordinates import coordinates
from lab.audit.recording import Recording, read_recording
from lab.proofs.ranks import context
from tests.lab.audit.gradient_cases import CASES, RANKS, Truth

HOOK = Path(__file__).parents[3] / "lab" / "audit" / "probe" / "hook" / "sitecustomize.py"


def run_probed(
    function: Callable[..., None], folder: Path, *arguments: Any, probed: bool = True
) -> None:
    """Run ``function(rank, *arguments)`` in a process for each rank, with the probe.

    Forked from a server that has never run autograd: after torch.compile, for example, this process
    can fork none that may call backward.
    """
    maker = context()
    workers = [
        maker.Process(target=_rank, args=(function, folder, rank, probed, arguments))
        for rank in range(RANKS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        if worker.is_alive():
            worker.kill()
    assert [worker.exitcode for worker in workers] == [0] * RANKS


def _rank(
    function: Callable[..., None], folder: Path, rank: int, probed: bool, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # as a library may, before it is watched
    if probed:
        settings = {"folder": str(folder), "script": str(Path(__file__).parent), "rank": rank}
        os.environ["LAB_AUDIT"] = json.dumps({**settings, "steps": 10**6, "size": RANKS})
        spec = importlib.util.spec_from_file_location("lab_audit_hook", HOOK)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    address = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    function(rank, *arguments)
    dist.destroy_process_group()


def _all_cases(rank: int, folder: Path) -> None:
    truths: dict[str, list[Truth]] = {}
    for case in CASES:
        torch.manual_seed(0)
        case(rank, truths.setdefault(case.__name__, []))
    torch.save(truths, folder / f"truth{rank}.pt")


class Proof:
    """The recording of all cases, and the truth of each: [rank][case][step]."""

    def __init__(self, folder: Path) -> None:
        self.recording: Recording = read_recording(folder)
        self.truths: list[dict[str, list[Truth]]] = [
            torch.load(folder / f"truth{rank}.pt", weights_only=False) for rank in range(RANKS)
        ]

    def records(self, kind: str, case: str, rank: int) -> list[dict[str, Any]]:
        """Return the records of the optimiser of a case."""
        number = [one.__name__ for one in CASES].index(case)
        found = self.recording.ranks[rank].by_kind[kind]
        return [record for record in found if record["o"] == number]

    def numbers(self, rank: int, reference: list[int]) -> Any:
        """Return the numbers of a reference."""
        return self.recording.ranks[rank].numbers(reference)


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Proof:
    folder = tmp_path_factory.mktemp("probe")
    run_probed(_all_cases, folder, folder)
    return Proof(folder)


def sampled(tensors: list[torch.Tensor | None], like: list[torch.Tensor]) -> Any:
    """Return the samples that the probe should have; zeros for None."""
    parts = []
    for tensor, other in zip(tensors, like, strict=True):
        full = torch.zeros_like(other) if tensor is None else tensor
        parts.append(full.detach().double().reshape(-1)[coordinates(full.numel())])
    return torch.cat(parts).numpy()


@pytest.mark.parametrize("case", [one.__name__ for one in CASES])
@pytest.mark.parametrize("rank", range(RANKS))
def test_own_got_and_weights_are_those_computed_by_hand(proof: Proof, case: str, rank: int) -> None:
    steps, truths = proof.records("step", case, rank), proof.truths[rank][case]
    assert [record["step"] for record in steps] == list(range(len(truths)))
    for record, truth in zip(steps, truths, strict=True):
        own, got = proof.numbers(rank, record["own"]), proof.numbers(rank, record["got"])
        np.testing.assert_allclose(own, sampled(truth.own, truth.weights), rtol=1e-4, atol=1e-7)
        np.testing.assert_array_equal(got, sampled(truth.got, truth.weights))
    for record, truth in zip(proof.records("weights", case, rank), truths, strict=True):
        values = proof.numbers(rank, record["values"])
        np.testing.assert_array_equal(values, sampled(list(truth.weights), truth.weights))


def test_no_part_of_the_probe_had_trouble(proof: Proof) -> None:
    for rank in proof.recording.ranks:
        assert rank.by_kind["trouble"] == []
