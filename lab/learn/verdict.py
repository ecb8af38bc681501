"""Judge a training on several ranks: does it do what one process does on the whole batch?

Each rank calls ``judge_ranks`` after ``run_program``; rank 0 compares what all ranks recorded.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.distributed.collectives import gather_objects, gather_states
from common.distributed.process_group import current_world
from common.utils.gradient_fit import EXACT, side_by_side
from lab.evidence import explain, near
from lab.learn.causes import MEAN_IN_A_COPY, cause_of, parts_of, told
from lab.learn.program import ProgramRecording, ProgramStep, flat, flat_gradients

# What rank 0 gets of each rank's recording.
_COMPARED = ("joined", "batches", "updates", "foreign", "end")
Ranks = Sequence[ProgramRecording]


def judge_ranks(
    recording: ProgramRecording, *, global_batch: int, averages: bool = True
) -> str | None:
    """Return on every rank what is wrong with their training; None if nothing is. Collective.

    averages : whether the ranks should average their gradients.
    """
    own: dict[str, Any] = {name: getattr(recording, name) for name in _COMPARED}
    own["steps"] = [vars(step) for step in recording.steps]
    world = current_world(torch.device("cpu"))
    ranks = []
    for state in gather_states(world, own):
        steps = [ProgramStep(**step) for step in state.pop("steps")]
        ranks.append(ProgramRecording(**state, steps=steps))
    verdict = None
    if world.is_rank0:
        verdict = _judge(ranks, recording, global_batch, averages)
    return gather_objects(world, verdict or "", schema=str)[0] or None


def _judge(
    ranks: Ranks, recording: ProgramRecording, global_batch: int, averages: bool
) -> str | None:
    problem = (
        _before_training(ranks)
        or _cleared(ranks)
        or _wrong_samples(ranks, global_batch)
        or _wrong_start(ranks)
        or _added_up(ranks)
    )
    if problem is None and averages:
        problem = _wrong_exchange(ranks, recording) or _weights_apart(ranks)
    problem = problem or _same_order(ranks)
    if problem is None and averages:
        problem = _unlike_one_process(ranks, recording)
    return problem


def _before_training(ranks: Ranks) -> str | None:
    """Say what keeps the ranks from training at all."""
    for number, rank in enumerate(ranks):
        if len(ranks) > 1 and not rank.joined:
            return f"rank {number} never calls init_process_group: it must meet the other ranks"
        if not rank.batches:
            return f"rank {number} computes no batch: does the program call train()?"
        if not rank.steps:
            return f"rank {number} computes no gradients: call loss.backward() in each step"
        if not rank.updates:
            return f"rank {number}'s weights never change: call optimizer.step() in each step"
        if rank.foreign:
            return "the optimizer gets other parameters than those of the model that computes"
    return None


def _is_cleared(step: ProgramStep) -> bool:
    return step.used is not None and bool(step.own.any()) and not step.used.any()


def _cleared(ranks: Ranks) -> str | None:
    """Say whether an optimiser gets zeros in place of what backward has computed."""
    for number, rank in enumerate(ranks):
        if all(map(_is_cleared, rank.steps)):
            return (
                f"rank {number}'s optimizer gets zeros, so the weights never change: zero_grad() "
                "comes after backward() and before step(). Call it before backward()"
            )
    return None


def _wrong_samples(ranks: Ranks, global_batch: int) -> str | None:
    """Say which ranks train on the same samples, or how many samples a step has."""
    size = len(ranks)
    for number, rank in enumerate(ranks):
        if number and rank.batches[0] == ranks[0].batches[0]:
            evidence = f"on {size} ranks, rank {number}'s first batch is rank 0's"
            return told("same-samples", "the ranks train on the same samples", evidence)
    samples = sum(len(rank.steps[0].images) for rank in ranks)
    if samples > global_batch or samples <= global_batch - size:
        evidence = f"on {size} ranks a step has {samples} samples in all, not {global_batch}"
        return told(
            "wrong-global-batch",
            "the global batch is wrong",
            evidence,
            "Each rank's batch is the global batch divided by the number of ranks.",
        )
    return None


def _wrong_start(ranks: Ranks) -> str | None:
    """Say which rank begins with other weights."""
    right = ranks[0].steps[0].start
    for number, rank in enumerate(ranks):
        if not torch.equal(rank.steps[0].start, right):
            apart = _apart(rank.steps[0].start, right)
            evidence = f"rank {number}'s first weights differ from rank 0's by {apart:.0%}"
            return told("different-start", "the ranks start from different weights", evidence)
    return None


def _added_up(ranks: Ranks) -> str | None:
    """Say whether gradients of several steps add up."""
    for step in ranks[0].steps:
        if step.stale.any():
            return (
                "the gradients of several steps add up: backward() adds to what is in .grad. Call "
                "optimizer.zero_grad() in each step, before backward()"
            )
    return None


def _wrong_exchange(ranks: Ranks, recording: ProgramRecording) -> str | None:
    """Say what the optimisers get in place of the mean."""
    columns = side_by_side(recording.lengths.values())
    previous = None
    for number, _ in enumerate(ranks[0].steps):
        steps = [rank.steps[number] for rank in ranks]
        own = torch.stack([step.own for step in steps]).double()
        used = torch.stack([step.own if step.used is None else step.used for step in steps])
        used = used.double()
        evidence = explain(own.numpy(), used.numpy(), columns=columns)
        if evidence.right:
            previous = own
            continue
        where = f"step {number + 1} on {len(ranks)} ranks"
        if {source.text for source in evidence.sources} == {"its own gradient"}:
            return _own_gradients(ranks, number, where=where)
        if previous is not None and explain(previous.numpy(), used.numpy(), columns=columns).right:
            return told("stale-gradient", "the optimiser gets the mean of the step before", where)
        parts = parts_of(used, own, recording.lengths)
        return cause_of(parts, exchanged=any(step.sent for step in steps))
    return None


def _own_gradients(ranks: Ranks, number: int, *, where: str) -> str:
    """Say why each rank's optimiser gets its own gradient in a step."""
    evidence = f"in {where} each optimiser gets its own rank's gradient"
    steps = [rank.steps[number] for rank in ranks]
    later = [rank.steps[number + 1].start for rank in ranks if number + 1 < len(rank.steps)]
    between = "Average after loss.backward() and before optimizer.step()."
    if later and all(_apart(start, later[0]) < EXACT for start in later):
        return told(
            "weights-averaged",
            "the weights are averaged in place of the gradients",
            f"{evidence}, and afterwards all weights are equal again",
        )
    if any(step.sent_late for step in steps):
        return told(
            "own-gradient",
            "the ranks' weights differ, since the average comes after the step",
            f"{evidence}, and messages follow when optimizer.step() is over",
            between,
        )
    if any(step.sent for step in steps):
        return told("own-gradient", MEAN_IN_A_COPY, evidence)
    if any(step.sent_early for step in steps):
        sentence = "the average comes before backward(), which computes the gradients"
        return told("own-gradient", sentence, evidence, between)
    return told(
        "group-unused",
        "the training never averages: between backward() and step() nothing is exchanged",
        evidence,
        "Call average(model) in each step, after loss.backward() and before optimizer.step().",
    )


def _weights_apart(ranks: Ranks) -> str | None:
    """Say when the ranks' weights begin to differ."""
    size = len(ranks)
    for number in range(1, len(ranks[0].steps)):
        starts = [rank.steps[number].start for rank in ranks]
        worst = max(_apart(start, starts[0]) for start in starts)
        if worst > EXACT:
            evidence = (
                f"after step {number} on {size} ranks they are {worst:.1e} of their norm apart"
            )
            return told("weights-diverge", "the ranks' weights differ", evidence)
    ends = [rank.end for rank in ranks]
    if ends[0] is None:
        return None
    worst = max(_apart(end, ends[0]) for end in ends if end is not None)
    if worst > EXACT:
        evidence = f"at the end, on {size} ranks, they are {worst:.1e} of their norm apart"
        return told("weights-diverge", "the ranks' weights differ", evidence)
    return None


def _same_order(ranks: Ranks) -> str | None:
    """Say whether a rank computes with a batch again, as if an epoch had an earlier one's order."""
    cure = None if len(ranks) > 1 else "Let the loader shuffle anew in each epoch."
    for number, rank in enumerate(ranks):
        first_steps: dict[float, int] = {}
        for step, batch in enumerate(rank.batches, 1):
            first = first_steps.setdefault(batch, step)
            if first < step:
                evidence = f"on rank {number}, step {step} has the samples of step {first}"
                return told("same-order", "an epoch has the same order again", evidence, cure)
    return None


def _unlike_one_process(ranks: Ranks, recording: ProgramRecording) -> str | None:
    """Say where the weights leave those of one process that takes the whole batches."""
    if recording.model is None or recording.optimizer is None:
        return None
    kind, settings = recording.optimizer
    model = recording.model
    optimizer = kind(model.parameters(), **settings)
    for number, _ in enumerate(ranks[0].steps):
        steps = [rank.steps[number] for rank in ranks]
        images = torch.cat([step.images for step in steps])
        labels = torch.cat([step.labels for step in steps])
        if len(labels) != len(images):  # another loss
            return None
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        whole = flat_gradients(model)
        mean = torch.stack([step.own for step in steps]).mean(0)
        if _apart(mean, whole) > EXACT:
            return _wrong_loss(mean, whole, len(ranks))
        optimizer.step()
        after = flat(model.parameters())
        found = _weights_after(ranks[0], number)
        if found is not None and _apart(found, after) > EXACT:
            return (
                f"after step {number + 1} the weights differ from one process's by "
                f"{_apart(found, after):.1e} of their norm, although the gradients are right: does "
                "optimizer.step() come once a step, and does nothing else change the weights?"
            )
    return None


def _weights_after(rank: ProgramRecording, number: int) -> Tensor | None:
    """Return the weights after a kept step; None if they were not kept."""
    if number + 1 < len(rank.steps):
        return rank.steps[number + 1].start
    return rank.end if rank.updates == len(rank.steps) else None


def _wrong_loss(mean: Tensor, whole: Tensor, size: int) -> str:
    """Say how the ranks' gradients differ from the whole batch's."""
    times = explain(whole[None].double().numpy(), mean[None].double().numpy()).factor
    if near(times * size, 1):
        evidence = f"backward computes {times:.3f} times the gradient on {size} ranks"
        return told(
            "scaled-in-loss", "the loss is divided by the number of ranks as well", evidence
        )
    what = f"{times:.3f} times the gradient of" if np.isfinite(times) else "another gradient than"
    return f"backward computes {what} the mean loss over the batch: is the loss the mean?"


def _apart(found: Tensor, right: Tensor) -> float:
    """Return the norm of the difference over the norm of ``right``."""
    return float((found - right).norm() / right.norm().clamp_min(1e-30))
