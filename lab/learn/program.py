"""Run a student's whole program on a rank, as torchrun would, and let the audit's probe watch it.

``on_watched_ranks`` starts the ranks, on which ``run_program`` runs the program; then
``fault_of`` says what is wrong with the training that the probe recorded.
"""

import contextlib
import io
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from lab.audit import probe
from lab.audit.findings import Checked, run_checks
from lab.audit.findings.finding import FAULT
from lab.audit.findings.weights import Replicas
from lab.audit.recording import Recording, RecordReader
from lab.audit.records import Backward, CollectiveCall, Group, Step, Weights
from lab.evidence import near
from lab.learn.causes import told
from lab.learn.student_file import Namespace, StudentFile

# What ranks that do not average can do right, see lab/audit/findings/properties.py.
_WITHOUT_AVERAGE = ("samples", "coverage", "order", "batches", "updates", "global batch")
_BETWEEN = "Average in each step, after loss.backward() and before optimizer.step()."
# What must be seen of ranks that average.
_NEEDED = ("gradients", "updates", "weights")
_ROUNDED = 1e-6  # of weights in float32
_ALONE = (
    "Between backward() and step() the average alone changes the gradients, and step() alone "
    "changes the weights."
)
# What a lesson advises where the catalogue's cure speaks of DistributedDataParallel.
_CURES = {"group-unused": _BETWEEN, "own-gradient": f"{_BETWEEN} Leave the mean in parameter.grad."}


class Program(NamedTuple):
    """What a program left: the names that it defines, and what it printed."""

    names: Namespace
    printed: str


def on_watched_ranks(
    student: StudentFile,
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    global_batch: int,
    limit_seconds: float = 90.0,
) -> tuple[list[Any], Recording]:
    """Return what ``StudentFile.on_ranks`` does, and what the probe recorded.

    function : gets the folder of the records after its arguments, for ``run_program``.
    """
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder)
        found = student.on_ranks(size, function, *arguments, records, limit_seconds=limit_seconds)
        return found, RecordReader(records).recording(global_batch=global_batch)


def run_program(
    path: Path, arguments: Sequence[str] = (), *, records: Path | None = None
) -> Program:
    """Run the file as a program on this rank of the open process group; return what it left.

    arguments : what follows the file's name on the command line.
    records : the folder for what the probe sees, which watches this process from now on; None: it
        does not.
    """
    printed = io.StringIO()
    variables = _torchrun_environment()
    if records is not None:
        settings = {"folder": str(records), "script": str(path.parent), "whole": True}
        variables[probe.ENVIRONMENT] = json.dumps(settings | {"rank": dist.get_rank()})
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(patch.object(sys, "argv", [str(path), *arguments]))
        stack.enter_context(patch.dict(os.environ, variables))
        for owner in (dist, distributed_c10d):
            stack.enter_context(patch.object(owner, "init_process_group", init_process_group))
            stack.enter_context(patch.object(owner, "destroy_process_group", lambda *_: None))
        watching = probe.install()
        names = Namespace(runpy.run_path(str(path), run_name="__main__"))
    if watching is not None:
        watching.record_end(None)
    return Program(names, printed.getvalue())


def init_process_group(*_: Any, **__: Any) -> None:
    """Stand for torch's function, by its name: the group is open, and stays so for the check."""


def _torchrun_environment() -> dict[str, str]:
    """Return what torchrun tells a process."""
    rank = str(dist.get_rank())
    size = str(dist.get_world_size())
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def fault_of(recording: Recording, *, averages: bool = True) -> str | None:
    """Return what is wrong with the ranks' training, the first fault that the audit finds.

    averages : whether the ranks should average their gradients.
    """
    problem = _does_not_train(recording)
    if problem is not None:
        return problem
    checked = run_checks([recording])
    for finding in checked.findings:
        entry = finding.entry
        if entry.severity == FAULT and (averages or entry.broken in _WITHOUT_AVERAGE):
            title = f"{entry.title[0].lower()}{entry.title[1:]}"
            evidence = finding.evidence[0].replace(": ", ", ", 1)
            return told(finding.name, title, evidence, _CURES.get(finding.name))
    if not averages:
        return _other_steps(recording)
    return _not_seen(recording, checked) or _other_steps(recording) or _other_updates(recording)


def _not_seen(recording: Recording, checked: Checked) -> str | None:
    """Say what the audit could not look at, though ranks that average need it."""
    for row in checked.properties:
        if recording.size > 1 and row.state == "not seen" and row.name in _NEEDED:
            return f"{row.said[0]}. {_ALONE}"
    return None


def _other_updates(recording: Recording) -> str | None:
    """Say after which step the weights are not what SGD makes of the gradients that it gets."""
    updates = 0
    replicas = Replicas(recording, recording.ranks[0].of(Step)[0].optimizer_number)
    for step, records in replicas.steps.items():
        rate = _plain_rate(records[0])
        if rate is None:
            return (
                f"the optimizer is {records[0].optimizer} with settings, and not this lesson's SGD"
            )
        if not {step, step + 1} <= replicas.weights.keys() or step not in replicas.got:
            continue
        updates += 1
        before = replicas.weights[step]
        update = rate * replicas.got[step]
        off = np.linalg.norm(replicas.weights[step + 1] - (before - update))
        if off > _ROUNDED * np.linalg.norm(before) + 1e-3 * np.linalg.norm(update):
            return (
                f"after step {step + 1} the weights are not what optimizer.step() makes of the "
                f"gradients, by {off / np.linalg.norm(before):.1e} of their norm. {_ALONE}"
            )
    return None if updates else "no weights before and after an update were seen"


def _plain_rate(step: Step) -> float | None:
    """Return the learning rate of SGD without momentum or weight decay; None of others."""
    changes = ("momentum", "weight_decay", "maximize")
    if step.optimizer != "SGD" or len(step.lr) != 1 or any(map(step.settings.get, changes)):
        return None
    return step.lr[0]


def _does_not_train(recording: Recording) -> str | None:
    """Say what keeps the ranks from training at all."""
    for process in recording.processes:
        if not (process.of(Group) or len(recording.processes) == 1):
            return "the program never calls init_process_group: each rank must meet the others"
        if not process.of(Backward):
            return "the program computes no gradients: call loss.backward() in each step"
        if not process.of(Step):
            return "the weights never change: call optimizer.step() in each step"
        if not any(backward.optimizers for backward in process.of(Backward)):
            return "the optimizer gets other parameters than those of the model that computes"
        weights = [process.numbers(record.values) for record in process.of(Weights)]
        if len(weights) > 1 and all(np.array_equal(weights[0], after) for after in weights):
            return (
                f"rank {process.rank}'s weights never change: does zero_grad() come after "
                "backward() and before step()? Call it before backward()"
            )
    return None


def _other_steps(recording: Recording) -> str | None:
    """Say what one process would not do in a step, where the ranks agree."""
    for rank in recording.ranks:
        passes = rank.of(Backward)
        if len(passes) != len(rank.of(Step)):
            return (
                f"rank {rank.rank} calls backward() {len(passes)} times and optimizer.step() "
                f"{len(rank.of(Step))} times: each step calls both once"
            )
        loss = passes[0].loss
        if loss is not None and not (loss.reduction == "mean" and near(loss.arriving, 1)):
            return (
                f"backward computes {loss.arriving:.3f} times the gradient of a loss whose "
                f"reduction is {loss.reduction}: is the loss the mean over the batch?"
            )
    return None


def kinds_of(recording: Recording) -> list[set[str]]:
    """Return by rank the kinds of messages that the program sent, as "send" of isend."""
    return [
        {call.name.removeprefix("i") for call in rank.of(CollectiveCall) if call.nbytes}
        for rank in recording.ranks
    ]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return the numbers of tensors in one tensor of their own."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def flat_gradients(model: nn.Module, *, missing: float = 0.0) -> Tensor:
    """Return all gradients in one tensor; ``missing`` stands for each number of a None."""
    found: list[Tensor] = []
    for parameter in model.parameters():
        gradient = parameter.grad
        found.append(torch.full_like(parameter, missing) if gradient is None else gradient)
    return flat(found)


def from_all_ranks(row: Tensor) -> Tensor:
    """Return the rows of all ranks, of shape (ranks, n). Collective."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)
