"""Lesson 1: a step calls what it must, and each section times what its name says."""

import re
import time
from contextlib import ExitStack
from unittest.mock import Mock, patch

import torch
from torch import nn

from lab.learn.student_file import Mistake, Namespace, Say, StudentFile

_OWNERS = {
    "forward": nn.Sequential,
    "backward": torch.Tensor,
    "step": torch.optim.SGD,
    "zero_grad": torch.optim.Optimizer,
}
# What each call takes by a false clock: a section's time tells which calls are in it.
_SECONDS = {"forward": 1, "backward": 10, "step": 100, "zero_grad": 1000}
_SECTIONS = {"forward": (1,), "backward": (10, 1010), "update": (100, 1100)}


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 1; return how many times as long as forward backward takes."""
    [(losses, real, calls, seconds)] = student.on_ranks(1, _train_by_two_clocks, limit_seconds=90)
    if not re.fullmatch("(zfbs)+|(fzbs)+|(fbsz)+", "".join(name[0] for name in calls)):
        raise Mistake(
            f"the training begins with {', '.join(calls[:6])}: each step should call zero_grad, "
            "forward, backward and step, else gradients of several steps add up, or none is used"
        )
    for name, allowed in _SECTIONS.items():
        if (found := seconds.get(name, 0)) not in allowed:
            told = ", ".join(f"{call} takes {took} s" for call, took in _SECONDS.items())
            raise Mistake(
                f"by a clock on which {told}, section {name} takes {found:g} s a step and not "
                f"{allowed[0]} s"
            )
    say(f"the loss falls from {losses[0]:.3f} to {losses[-1]:.3f}, and each section is timed")
    return real["backward"] / real["forward"]


def _train_by_two_clocks(
    student: Namespace,
) -> tuple[list[float], dict[str, float], list[str], dict[str, float]]:
    """Return a training's losses and seconds; then, by the false clock, calls and a step's time."""
    losses, real = student["train"]()
    spy = Mock()
    with ExitStack() as patches:
        for name, owner in _OWNERS.items():
            right = getattr(owner, name)
            noted = patch.object(owner, name, autospec=True, side_effect=right)
            spy.attach_mock(patches.enter_context(noted), name)
        clock = Mock(side_effect=lambda: sum(_SECONDS[call[0]] for call in spy.mock_calls))
        patches.enter_context(patch.object(time, "perf_counter", clock))
        steps, seconds = student["train"](1)
    sections = {name: total / len(steps) for name, total in seconds.items()}
    return losses, dict(real), [call[0] for call in spy.mock_calls], sections
