"""Which GPU a rank uses, which backend connects the ranks, and the line that says why.

The GPUs are invented: here is none. The processes, their rendezvous and its messages are real.
"""

import io
import os
import socket
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common.distributed.gpus import (
    JobGPUs,
    Peer,
    choose_backend,
    compare_gpus,
    gpu_of,
    visible_gpus,
)
from common.distributed.launch_env import LaunchSpec
from common.distributed.meeting import place_ranks
from common.distributed.process_group import current_world, open_group, own_device
from common.errors import UserError
from common.training_engine import distributed_train_worker
from tests.helpers import run_ranks

A, B, C = (letter * 8 + "-0000-0000-0000-000000000000" for letter in "abc")


class Case(NamedTuple):
    """A job of two ranks: the UUIDs that each sees, and what is asked for."""

    gpus: tuple[tuple[str, ...], tuple[str, ...]]
    wanted: str | None = None
    host_ids: tuple[str, str] = ("", "")
    by_torchrun: bool = False


def see(*uuids):
    """Make torch see GPUs of these UUIDs."""
    return mock.patch.multiple(
        torch.cuda,
        device_count=lambda: len(uuids),
        get_device_properties=lambda index: SimpleNamespace(uuid=uuids[index]),
        set_device=lambda device: None,
        current_device=lambda: 0,
    )


@contextmanager
def reserved_ports(count):
    """Return ports that differ, and that until the end only a program that asks for one gets.

    A bound socket that does not listen keeps no listener away that reuses addresses, as stores do.
    """
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield [one.getsockname()[1] for one in sockets]


KEPT = []


def meet(rank, case, port):
    """Open the group; return what rank ``rank`` uses, and what it prints or why it ends.

    Gloo connects the ranks in place of NCCL.
    """
    open_real_group, asked_for = dist.init_process_group, []

    def init(backend, *, device_id, **more):
        asked_for.append(f"{backend} on {device_id}")
        open_real_group("gloo", **more)

    launch = LaunchSpec(rank, 2, "127.0.0.1", port, token="")
    if case.by_torchrun:
        launch = replace(launch, local_rank=rank, local_size=2, agent="an agent")
    with ExitStack() as patches:
        patches.enter_context(see(*case.gpus[rank]))
        patches.enter_context(mock.patch.dict(os.environ, NCCL_HOSTID=case.host_ids[rank]))
        patches.enter_context(mock.patch.object(dist, "init_process_group", init))
        printed = patches.enter_context(redirect_stderr(io.StringIO()))
        try:
            world, store = open_group(launch, backend=case.wanted, timeout_seconds=30)
        except UserError as error:
            KEPT.append(error)  # and with it rank 0's store, from which rank 1 may still read
            return "none", str(error)
        dist.barrier()
        dist.destroy_process_group()
        assert world.backend == asked_for[0].split()[0]
        assert world.local_size == 2
        assert (store is None) == case.by_torchrun
    return f"{world.backend} on {world.device}", printed.getvalue()


def meet_in_all(rank, cases, ports):
    dist.destroy_process_group()
    return [meet(rank, case, port) for case, port in zip(cases, ports, strict=True)]


def test_two_ranks_choose_alike_and_rank_0_says_why():
    apart, host = ("one", "two"), os.uname().nodename
    refused = f"--backend nccl needs a GPU for each rank, but ranks 0 and 1 share one GPU (GPU-{A})"
    # By case: what both ranks use (of NCCL, each rank's GPU), and what rank 0 prints.
    expected = {
        Case(((A, B), (A, B))): ("01", "NCCL: each of the 2 ranks has its own GPU"),
        # Each sees one GPU only, as under Slurm's --gpus-per-task=1.
        Case(((A,), (B,))): ("00", "NCCL: each of the 2 ranks has its own GPU"),
        Case(((A,), (B,)), by_torchrun=True): ("00", "NCCL: each of the 2 ranks has its own GPU"),
        Case(((A,), (A,))): ("none", f"2 ranks for 1 GPU: ranks 0 and 1 share one GPU (GPU-{A})"),
        Case(((A,), (A,)), by_torchrun=True): ("none", "2 ranks for 1 GPU: ranks 0 and 1 share"),
        Case(((A,), ())): ("none", f"2 ranks for 1 GPU: rank 1 ({host}) sees no GPU"),
        Case(((A, B), (A, B)), "gloo"): (
            "gloo",
            "--backend gloo trains on the CPU: 2 GPUs stay idle",
        ),
        Case(((), ())): ("gloo", ""),
        Case(((A,), (A,)), "nccl"): ("none", refused),
        Case(((A,), (A,)), "nccl", apart): ("00", "for correctness tests only"),
    }
    with reserved_ports(len(expected)) as ports:
        ranks = run_ranks(2, meet_in_all, list(expected), ports)
    for (case, (uses, says)), *found in zip(expected.items(), *ranks, strict=True):
        devices = [f"cuda:{uses[rank]}" if uses.isdigit() else "cpu" for rank in range(2)]
        backend = "nccl" if uses.isdigit() else "gloo"
        for rank, (used, printed) in enumerate(found):
            expected_use = "none" if uses == "none" else f"{backend} on {devices[rank]}"
            assert used == expected_use, (case, printed)
            assert uses == "none" or printed.count("\n") == (bool(says) if rank == 0 else 0), case
            assert rank == 1 or says in printed, case
            assert uses != "none" or says in printed, case


def peers(*gpus, host="node"):
    hosts = [f"{host}{rank}" for rank in range(len(gpus))]
    return [
        Peer(name, rank, list(names), name, name)
        for rank, (name, names) in enumerate(zip(hosts, gpus, strict=True))
    ]


def test_many_ranks_are_named_in_a_short_line():
    crowd = compare_gpus(peers(*[(A, B)] * 12), [rank % 4 for rank in range(12)])
    assert crowd == JobGPUs(
        2, f"ranks 0, 2, 4, 6, 8 and 10 share one GPU ({A}); 1 more GPU is shared"
    )
    everyone = compare_gpus(peers(*[(A,)] * 12), [0] * 12)
    assert everyone.obstacle == f"ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more share one GPU ({A})"
    assert compare_gpus(peers((A,), (), ()), [0, 0, 0]).obstacle == "ranks 1 and 2 see no GPU"


def test_host_ids_must_differ_wherever_a_gpu_is_shared():
    ranks = [
        replace(peer, nccl_host=name)
        for peer, name in zip(peers((A,), (A,), (B,), (B,)), "xyxx", strict=True)
    ]
    assert not compare_gpus(ranks, [0] * 4).told_apart
    ranks[3] = replace(ranks[3], nccl_host="")
    assert not compare_gpus(ranks, [0] * 4).told_apart
    ranks[3] = replace(ranks[3], nccl_host="z")
    assert compare_gpus(ranks, [0] * 4).told_apart


def test_a_gpu_has_the_name_of_nvidia_smi_and_without_a_uuid_one_of_its_host():
    with see(A, None):
        first, second = visible_gpus()
    assert first == f"GPU-{A}"
    assert second.endswith("-1")


def test_what_nccl_cannot_do_is_refused_or_not_chosen(monkeypatch):
    shared = JobGPUs(1, "ranks 0 and 1 share one GPU (A)", told_apart=True)
    assert choose_backend("nccl", shared, 2)[0] == "nccl"
    with pytest.raises(UserError, match="2 ranks for 1 GPU"):  # unless it is asked for
        choose_backend(None, shared, 2)
    with pytest.raises(UserError, match="but ranks 0 and 1 see no GPU"):
        choose_backend("nccl", compare_gpus(peers((), ()), [0, 1]), 2)
    with pytest.raises(UserError, match="but rank 1 \\(node1\\) sees no GPU"):
        choose_backend("nccl", compare_gpus(peers((A,), ()), [0, 1]), 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert choose_backend(None, JobGPUs(2), 2) == (
        "gloo",
        "Gloo on the CPU: this torch has no NCCL; install one that has",
    )


def test_a_launchers_local_ranks_win():
    """Two agents of torchrun on one machine both start a local rank 0."""
    ranks = [Peer("a", 1, [A, B], "a", "a", local_rank=local) for local in (0, 0, None)]
    outcome = place_ranks(ranks)
    assert outcome.places == [(0, 3), (0, 3), (2, 3)]
    assert "ranks 0, 1 and 2 share" in outcome.gpus.obstacle


def test_cuda_means_the_ranks_own_gpu_in_a_group():
    with see(A, B):
        assert gpu_of(3) == torch.device("cuda", 1)
        assert own_device("cuda", 2, distributed=True) == torch.device("cuda", 0)
        assert own_device("cuda:1", 2, distributed=True) == torch.device("cuda", 1)
        assert own_device("cuda", 2, distributed=False) == torch.device("cuda")


def test_a_worker_trains_on_the_gpu_of_its_group(monkeypatch):
    """Not on the one that its rank in the whole job points to."""
    built = []

    class EngineSeenError(Exception):
        pass

    def engine(_model, device, **_):
        built.append(torch.device(device))
        raise EngineSeenError

    monkeypatch.setattr("common.training_engine.launch.TrainingEngine", engine)
    engine.setup_distributed = lambda rank, size: None
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    for backend, current, expected in (("nccl", 1, "cuda:1"), ("gloo", 1, "cpu")):
        monkeypatch.setattr(dist, "get_backend", lambda name=backend: name)
        with see(A, B, C), mock.patch("torch.cuda.current_device", lambda gpu=current: gpu):
            assert current_world().device == torch.device(expected)
            functions = dict.fromkeys(("train_dataset", "optimizer_fn", "criterion_fn"))
            with pytest.raises(EngineSeenError):
                distributed_train_worker(5, 8, model_fn=lambda: None, batch_size=1, **functions)
    assert built == [torch.device("cuda:1"), torch.device("cpu")]
