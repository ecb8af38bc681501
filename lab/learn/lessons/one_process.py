"""Lesson 1: a step calls what it must, and each section times what its name says."""

import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock, patch

import torch
from torch import nn

from lab.learn.program import fault_of, on_watched_ranks, run_program
from lab.learn.student_file import Mistake, Namespace, Say, StudentFile

# The calls of a step that are noted, and the classes whose methods they are.
_OWNERS = {
    "forward": nn.Sequential,
    "backward": torch.Tensor,
    "step": torch.optim.SGD,
    "zero_grad": torch.optim.Optimizer,
}
# What each call takes by a false clock: a section's time tells which calls are in it.
_SECONDS = {"forward": 1, "backward": 10, "step": 100, "zero_grad": 1000}
# The seconds that are right: with zero_grad in the section, or without.
_SECTIONS = {"forward": (1,), "backward": (10, 1010), "update": (100, 1100)}


def check(student: StudentFile, say: Say) -> float:
    """Check lesson 1; return how many times as long as forward backward takes."""
    [calls] = student.on_ranks(1, _train_by_false_clock, limit_seconds=90)
    initials = "".join(name[0] for name in calls.names)
    if not re.fullmatch("(zfbs)+|(fzbs)+|(fbsz)+", initials):
        raise Mistake(
            f"the training begins with {', '.join(calls.names[:6])}: each step should call "
            "zero_grad, forward, backward and step, else gradients of several steps add up, or "
            "none is used"
        )
    for name, allowed in _SECTIONS.items():
        found = calls.false_seconds.get(name, 0)
        if found not in allowed:
            told = ", ".join(f"{call} takes {took} s" for call, took in _SECONDS.items())
            raise Mistake(
                f"by a clock on which {told}, section {name} takes {found:g} s a step and not "
                f"{allowed[0]} s"
            )
    [training], recording = on_watched_ranks(student, 1, _run, student.path, global_batch=64)
    problem = fault_of(recording)
    if problem is not None:
        raise Mistake(problem)
    losses = training.losses
    say(f"the loss falls from {losses[0]:.3f} to {losses[-1]:.3f}, and each section is timed")
    return training.seconds["backward"] / training.seconds["forward"]


class Training(NamedTuple):
    """What the student's program kept: the loss of each step, the seconds of each section."""

    losses: list[float]
    seconds: dict[str, float]


class Calls(NamedTuple):
    """The calls of an epoch by the false clock, and the seconds of each section of a step."""

    names: list[str]
    false_seconds: dict[str, float]


def _run(_names: Namespace, path: Path, records: Path) -> Training:
    """Run the program, watched."""
    names = run_program(path, records=records).names
    return Training(list(names["losses"]), dict(names["seconds"]))


def _train_by_false_clock(student: Namespace) -> Calls:
    """Return a training's calls, and by the false clock the seconds of each section of a step."""
    spy = Mock()
    with ExitStack() as patches:
        for name, owner in _OWNERS.items():
            right = getattr(owner, name)
            noted = patch.object(owner, name, autospec=True, side_effect=right)
            spy.attach_mock(patches.enter_context(noted), name)

        def false_clock() -> int:
            return sum(_SECONDS[name] for name, _, _ in spy.mock_calls)

        clock = Mock(side_effect=false_clock)
        patches.enter_context(patch.object(time, "perf_counter", clock))
        losses, seconds = student["train"](1)
    step_seconds = {section: total / len(losses) for section, total in seconds.items()}
    return Calls([name for name, _, _ in spy.mock_calls], step_seconds)
