"""What the probe records of gradients, weights and losses, against the same computed by hand."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lab.audit.probe.coordinates import coordinates
from lab.audit.recording import read_recording
from lab.proofs.ranks import context
from tests.lab.audit.gradient_cases import CASES, RANKS, train

HOOK = Path(__file__).parents[3] / "lab" / "audit" / "probe" / "hook" / "sitecustomize.py"


def run_probed(function, folder, *arguments, probed=True):
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


def _rank(function, folder, rank, probed, arguments):
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # as a library may, before it is watched
    if probed:
        settings = {"folder": str(folder), "script": str(Path(__file__).parent), "rank": rank}
        os.environ["LAB_AUDIT"] = json.dumps({**settings, "steps": 10**6})
        spec = importlib.util.spec_from_file_location("lab_audit_hook", HOOK)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    address = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    function(rank, *arguments)
    dist.destroy_process_group()


def _fail():
    raise ZeroDivisionError


def _all_cases(rank, folder):
    truths = {}
    with pytest.raises(ZeroDivisionError):  # a step that fails is none, and disturbs no other one
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step(_fail)
    for name, options in CASES.items():
        torch.manual_seed(0)
        train(rank, truths.setdefault(name, []), **options)
    torch.save([{k: [tuple(t) for t in v] for k, v in truths.items()}], folder / f"truth{rank}.pt")


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    """Return the recording of all cases, and the truth of each: [rank][case][step]."""
    folder = tmp_path_factory.mktemp("probe")
    run_probed(_all_cases, folder, folder)
    return read_recording(folder), [torch.load(folder / f"truth{r}.pt")[0] for r in range(RANKS)]


def sampled(tensors, like):
    """Return the samples that the probe should have; zeros for None."""
    parts = []
    for tensor, other in zip(tensors, like, strict=True):
        full = torch.zeros_like(other) if tensor is None else tensor
        parts.append(full.detach().double().reshape(-1)[coordinates(full.numel())])
    return torch.cat(parts).numpy()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rank", range(RANKS))
def test_own_got_and_weights_are_those_computed_by_hand(proof, case, rank):
    recording, truths = proof
    process = recording.ranks[rank]
    numbers = list(dict.fromkeys(one["o"] for one in process.by_kind["step"]))
    number = numbers[list(CASES).index(case)]
    steps, weights = (
        [one for one in process.by_kind[kind] if one["o"] == number] for kind in ("step", "weights")
    )
    assert [record["step"] for record in steps] == list(range(3))
    for step, before, (start, own, got) in zip(steps, weights, truths[rank][case], strict=True):
        for reference, truth in ((step["own"], own), (step["got"], got), (before["values"], start)):
            near = 1e-4 if truth is own else 0
            expected = sampled(truth, start)
            np.testing.assert_allclose(process.numbers(reference), expected, near, near * 1e-3)


def test_no_part_of_the_probe_had_trouble(proof):
    assert not [one for rank in proof[0].ranks for one in rank.by_kind["trouble"]]
