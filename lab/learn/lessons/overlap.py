"""Lesson 6: buckets that leave while backward computes, tested on ranks and on emulated nodes."""

import re
import time

import torch
import torch.distributed as dist
from torch import nn

from common.errors import GroupError, UserError
from common.profiling.comm_trace import MessageRecorder
from lab.learn.lessons.averaging import diagnose
from lab.learn.lessons.nodes import run_on_nodes
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile

SIZES, LAYERS, _LENGTH = (2, 3), 4, 50
RECORDED_SECONDS = 0.49
"""One bucket of 100 MB on 4 nodes at 1 Gbit/s (AMD EPYC, 2 virtual cores, torch 2.14)."""


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 6; return the exposed seconds of one bucket on 4 emulated nodes."""
    for size in SIZES:
        for rank, (problem, early, sent) in enumerate(student.on_ranks(size, _average)):
            if problem:
                raise Mistake(f"rank {rank} of {size} ends a step with {problem}")
            if (early, sent) != (LAYERS - 1, LAYERS):
                raise Mistake(
                    f"{LAYERS} buckets need {LAYERS} messages, and {LAYERS - 1} of them begin "
                    f"during backward. Rank {rank} of {size} sent {sent}, {early} during backward"
                )
        say(f"on {size} ranks the gradients become means, and all buckets but the last leave early")
    try:
        printed = run_on_nodes(student.path, 4, rate="1gbit")[0]
    except (UserError, GroupError) as error:
        say(f"nothing can be measured here ({error}), but on another machine")
        return RECORDED_SECONDS
    say(f"on 4 nodes at 1 Gbit/s:\n{printed}")
    if not (exposed := re.findall(r"(\d+\.\d+) s exposed", printed)):
        raise Mistake(f"rank 0 printed no exposed time on 4 nodes, but:\n{printed[-500:]}")
    return float(exposed[-1])


def _average(student: Namespace) -> tuple[str | None, int, int]:
    """Return what is wrong with two steps' gradients, and the second's messages: early, and all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weights = [nn.Parameter(torch.zeros(_LENGTH, dtype=torch.float64)) for _ in range(LAYERS)]
    buckets, moments = student["Buckets"](weights, 1e-4), [0.0]  # smaller than a layer
    weights[0].register_hook(lambda _: moments.append(time.perf_counter()))
    problems = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        given = torch.randn(size, LAYERS * _LENGTH, dtype=torch.float64, generator=generator)
        for weight in weights:
            weight.grad = None
        with MessageRecorder() as recorder:
            parts = zip(weights, given[rank].split(_LENGTH), strict=True)
            time.sleep(0.2 * rank)  # so that what does not wait for rank 1 misses its gradient
            torch.stack([(weight * part).sum() for weight, part in parts]).sum().backward()
            buckets.finish()
        after = torch.cat([weight.grad for weight in weights])  # type: ignore[misc]  # backward sets it
        problems.append(diagnose(after, given, dict.fromkeys(map(str, range(LAYERS)), _LENGTH)))
    early = [message for message in recorder.messages if message["begin"] < moments[-1]]
    return next(filter(None, problems), None), len(early), len(recorder.messages)
