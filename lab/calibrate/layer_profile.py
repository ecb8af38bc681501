"""Measure a compute profile: how long each layer of a model takes on this machine.

``measure_profile`` trains the real model on noise, in one process with all cores, with several
numbers of samples in turns; hooks record when each layer ends. Work between two layers (an
addition, a reshape) counts towards the second, so that the layers' times add up to the step's.
``Profile.save`` writes the file.
"""

import statistics
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import torch

from common.emulation.compute_profile import Layer, Profile, SectionTime
from common.errors import UserError, count
from common.utils.environment import environment
from common.utils.progress import console, show_progress
from common.utils.system import tune_malloc, usable_cores
from lab.calibrate.fits import fit_line, others_share, quiet
from lab.calibrate.layer_timer import Call, LayerTimer
from lab.calibrate.trainer import IMAGE, Trainer
from lab.predict.calibration_file import noise_warning

SAMPLES = (16, 48, 112, 256)
_ROUNDS, _STEPS = 5, 2
_LEAST_SECONDS = 1e-9  # of a layer that does nothing


def measure_profile(
    name: str,
    *,
    model: str = "vgg11",
    device: str = "cpu",
    samples: Sequence[int] = SAMPLES,
    rounds: int = _ROUNDS,
) -> Profile:
    """Measure the layers of ``model`` on "cpu" or "cuda", and fit a line over the samples to each.

    Takes about 15 s for VGG-11 on two cores; the machine should be otherwise idle. Raises
    UserError if the model is unknown or there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: torch finds no GPU here: leave it out to measure the CPU, or measure "
            "where there is one"
        )
    threads = torch.get_num_threads()
    tune_malloc()
    torch.set_num_threads(usable_cores())
    try:
        trainer = Trainer(model, most_samples=max(samples), device=device)
        steps: list[dict[str, Any]] = []
        turns = [batch for _ in range(rounds) for batch in samples]
        console.print(
            f"measuring each layer of {model} with {len(turns)} batches, usually about "
            f"{3 * rounds} s if the machine is otherwise idle"
        )
        with (
            LayerTimer(trainer.model, trainer.criterion, device=device) as timer,
            show_progress("layers", total=sum(turns), unit="samples") as show,
        ):
            for done, batch in enumerate(turns):
                show(sum(turns[:done]))
                steps += _timed_steps(trainer, timer, batch)
        return _fit_profile(name, model, device, steps)
    finally:
        torch.set_num_threads(threads)


def describe_profile(profile: Profile) -> list[str]:
    """Return the profile as lines for a person."""
    worst = max(abs(fitted / measured - 1) for _, measured, fitted in profile.steps)
    samples, measured, _ = profile.steps[-1]
    return [
        f"profile {profile.name}: {profile.model} on {profile.machine} ({profile.device}, "
        f"{count(profile.threads, 'thread')}), {count(len(profile.layers), 'layer')}",
        f"  {samples:g} samples: {measured:.3f} s of forward and backward, "
        f"{profile.update_seconds:.3f} s of update",
        f"  largest error of the profile at a measured batch size: {100 * worst:.0f} %",
        *noise_warning(profile.others_share, "measure"),
    ]


def _timed_steps(trainer: Trainer, timer: LayerTimer, samples: int) -> list[dict[str, Any]]:
    """Return the records of a few steps, each with its layers' calls and their seconds."""
    taken: list[tuple[tuple[Call, ...], list[float], list[float]]] = []
    records = trainer.time_steps(
        [samples], steps=_STEPS, after_step=lambda _: taken.append(timer.take())
    )
    warm = taken[-len(records) :]
    return [
        record | {"layers": {"calls": calls, "forward": forward, "backward": backward}}
        for record, (calls, forward, backward) in zip(records, warm, strict=True)
    ]


def _fit_profile(name: str, model: str, device: str, steps: Sequence[dict[str, Any]]) -> Profile:
    """Return the profile whose lines fit each layer's median seconds in the quiet ``steps``."""
    counts = sorted({step["samples"] for step in steps})
    turns, here = [(step,) for step in steps], {"ranks_here": 1, "cores": usable_cores()}
    by_count = [
        [step for (step,) in quiet([turn for turn in turns if turn[0]["samples"] == count], here)]
        for count in counts
    ]

    def line(way: str, index: int) -> SectionTime:
        seconds = [
            statistics.median(step["layers"][way][index] for step in same) for same in by_count
        ]
        return SectionTime(*fit_line(counts, [max(_LEAST_SECONDS, s) for s in seconds]).values)

    layers = tuple(
        Layer(call.name, line("forward", index), line("backward", index), call.parameters)
        for index, call in enumerate(steps[0]["layers"]["calls"])
    )
    machine = environment()
    return Profile(
        name=name,
        machine=machine["gpus"][0] if device == "cuda" else machine["cpu"],
        device=device,
        threads=torch.get_num_threads(),
        made=datetime.now().isoformat(timespec="seconds"),
        model=model,
        image=IMAGE,
        layers=layers,
        update_seconds=statistics.median(step["update"] for same in by_count for step in same),
        others_share=others_share(turns, here),
        steps=tuple(
            (
                count,
                statistics.median(
                    sum(step["layers"]["forward"]) + sum(step["layers"]["backward"])
                    for step in same
                ),
                sum(layer.forward.at(count) + layer.backward.at(count) for layer in layers),
            )
            for count, same in zip(counts, by_count, strict=True)
        ),
    )
