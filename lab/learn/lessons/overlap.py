"""Lesson 6: buckets that leave while backward computes, tested on ranks and on emulated nodes."""

import re
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from common.errors import GroupError, UserError
from common.profiling.comm_trace import MessageRecorder
from lab.learn.lessons.averaging import diagnose
from lab.learn.lessons.nodes import run_on_nodes
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile

SIZES, LAYERS, _LENGTH = (2, 3), 4, 50
# One bucket of 100 MB on 4 nodes at 1 Gbit/s: by the formula, and measured (AMD EPYC, 2 virtual
# cores, torch 2.14).
LINK_SECONDS, RECORDED_SECONDS = 0.442, 0.52


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 6; return the exposed seconds of one bucket on 4 emulated nodes."""
    for size in SIZES:
        for rank, (problem, early, sent) in enumerate(student.on_ranks(size, _average)):
            if problem:
                raise Mistake(f"rank {rank} of {size} ends {problem}")
            if sent != 2 * LAYERS or (rank == 0 and early != LAYERS - 1):
                raise Mistake(
                    f"{LAYERS} buckets need {2 * LAYERS} messages in 2 steps, and {LAYERS - 1} of "
                    f"a step's are under way at its last gradient. Rank {rank} of {size} sent "
                    f"{sent}, and {early} were under way: does `ready` wait for a message?"
                )
        say(f"on {size} ranks the gradients become means, and all buckets but the last leave early")
    try:
        printed = run_on_nodes(student.path, 4, rate="1gbit")[0]
    except (UserError, GroupError) as error:
        say(f"nothing can be measured here ({error}), but on another machine")
        return RECORDED_SECONDS
    exposed = [float(one) for one in re.findall(r"(\d+\.\d+) s exposed", printed)]
    if not exposed or exposed[-1] < 0.9 * LINK_SECONDS:
        raise Mistake(
            f"one bucket's message takes {LINK_SECONDS} s, all of them after backward, and the "
            f"last row must show as much. Rank 0 printed on 4 nodes:\n{printed[-500:]}"
        )
    say(f"on 4 nodes at 1 Gbit/s:\n{printed}")
    return exposed[-1]


def _average(student: Namespace) -> tuple[str | None, int, int]:
    """Return what is wrong with two steps' gradients, a step's early messages, and all messages.

    The other ranks begin when rank 0 has its last gradient, so that none of its messages can end
    before: a `ready` that waits holds up rank 0's backward, until the others have lost patience.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    weights = nn.ParameterList(torch.zeros(LAYERS, _LENGTH, dtype=torch.float64).unbind())
    buckets = student["Buckets"](weights, 1e-4)  # smaller than a layer
    recorder, early = MessageRecorder(), list[int]()  # under way at each step's last gradient
    weights[0].register_hook(
        lambda _: early.append(sum(message.end is None for message in recorder.messages))
    )
    weights[0].register_hook(lambda _: store.set(f"step {len(early)} of rank {rank}", ""))
    for step in (1, 2):
        torch.manual_seed(step)
        given = torch.randn(size, LAYERS * _LENGTH, dtype=torch.float64)
        weights.zero_grad()
        with recorder:
            parts = zip(weights, given[rank].split(_LENGTH), strict=True)
            if rank > 0:
                with suppress(RuntimeError):
                    store.wait([f"step {step} of rank 0"], timedelta(seconds=3))
                time.sleep(0.2)  # so that what does not wait for rank 1 misses its gradient
            torch.stack([(weight * part).sum() for weight, part in parts]).sum().backward()
            buckets.finish()
        if problem := diagnose(
            torch.cat([weight.grad for weight in weights]),
            given,
            dict.fromkeys(map(str, range(LAYERS)), _LENGTH),
        ):
            return f"step {step} with {problem}", 0, 0
    return None, min(early), len(recorder.messages)
