"""What each layer of a model takes: a profile for emulated compute
(common/emulation/compute_profile.py), measured on this machine alone.

``measure_profile`` trains the real model on noise, in one process that has all cores, with several numbers of samples in turns;
hooks record when each layer ends. What lies between two layers (an addition, a reshape) counts to the layer after it, so
that the layers' times add up to the step's. ``save_profile`` writes the file.
"""

import json
import statistics
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from common.cost_model.calibration_file import QUIET_SHARE
from common.emulation.compute_profile import Layer, Profile, SectionTime
from common.errors import UserError
from common.models import MODELS
from common.profiling.layer_timer import Call, LayerTimer
from common.utils.atomic_files import write_atomically
from common.utils.environment import environment
from common.utils.system import tune_malloc, usable_cores
from lab.calibrate.fits import quiet
from lab.calibrate.trainer import Trainer
from lab.fitting import fit

SAMPLES = (16, 48, 112, 256)
_ROUNDS, _STEPS = 5, 2
_LEAST_SECONDS = 1e-9  # of a layer that does nothing


def measure_profile(
    name: str,
    *,
    model: str = "vgg11",
    image: tuple[int, int] = (32, 32),
    device: str = "cpu",
    samples: Sequence[int] = SAMPLES,
    rounds: int = _ROUNDS,
) -> Profile:
    """Measure the layers of ``model`` on ``device`` ("cpu" or "cuda") with these numbers of samples, and fit a line to each.

    Some 15 s for VGG-11 on two cores. The machine should have nothing else to do. Raises UserError on unknown values.
    """
    if model not in MODELS:
        raise UserError(f"--model: got {model!r}, choose one of {', '.join(MODELS)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: torch finds no GPU here: leave it out to measure the CPU, or measure where there is one"
        )
    threads = torch.get_num_threads()
    tune_malloc()
    torch.set_num_threads(usable_cores())
    try:
        trainer = Trainer(model, image, most_samples=max(samples), device=device)
        with LayerTimer(trainer.model, trainer.criterion, device=device) as timer:
            steps = [step for _ in range(rounds) for step in _timed_steps(trainer, timer, samples)]
        return _profile(name, model, image, device, steps)
    finally:
        torch.set_num_threads(threads)


def save_profile(profile: Profile, path: Path) -> None:
    """Write the file, whole or not at all."""
    write_atomically(path, json.dumps(profile.as_json(), indent=1, allow_nan=False).encode())


def describe_profile(profile: Profile) -> list[str]:
    """Return what was found as lines for a person."""
    worst = max(abs(fitted / measured - 1) for _, measured, fitted in profile.steps)
    samples, measured, _ = profile.steps[-1]
    lines = [
        f"profile {profile.name}: {profile.model} on {profile.machine} ({profile.device}, {profile.threads} threads), "
        f"{len(profile.layers)} layers; {samples:g} samples take {measured:.3f} s of forward and backward and "
        f"{profile.update_seconds:.3f} s of update; the lines are off by {worst:.0%} at most"
    ]
    if profile.others_share > QUIET_SHARE:
        lines.append(
            f"warning: other processes took {profile.others_share:.0%} of the cores meanwhile: end them, and measure "
            "again"
        )
    return lines


def _timed_steps(
    trainer: Trainer, timer: LayerTimer, samples: Sequence[int]
) -> list[dict[str, Any]]:
    """Return of each step samples, seconds of each layer and of the update; the first step of each number warms up."""
    layers: list[tuple[tuple[Call, ...], list[float], list[float]]] = []
    records = trainer.time_steps(
        samples, steps=_STEPS, after_step=lambda _: layers.append(timer.take())
    )
    steps_of_each = len(layers) // len(samples)
    timed = [step for index, step in enumerate(layers) if index % steps_of_each]
    return [
        record | {"calls": calls, "layer_forward": forward, "layer_backward": backward}
        for record, (calls, forward, backward) in zip(records, timed, strict=True)
    ]


def _profile(
    name: str, model: str, image: tuple[int, int], device: str, steps: Sequence[dict[str, Any]]
) -> Profile:
    calls = steps[0]["calls"]
    counts = sorted({step["samples"] for step in steps})
    noise: list[tuple[float, float]] = []
    by_count = [
        [
            step
            for (step,) in quiet(
                [(step,) for step in steps if step["samples"] == count],
                {"ranks_here": 1, "cores": usable_cores()},
                noise,
            )
        ]
        for count in counts
    ]

    def section_time(which: str, index: int) -> SectionTime:
        seconds = [
            max(_LEAST_SECONDS, statistics.median(step[which][index] for step in same))
            for same in by_count
        ]
        return SectionTime(*fit([[1.0] * len(counts), counts], seconds, varied=counts).values)

    layers = tuple(
        Layer(
            call.name,
            section_time("layer_forward", index),
            section_time("layer_backward", index),
            call.parameters,
        )
        for index, call in enumerate(calls)
    )
    machine = environment()
    measured = [
        (
            count,
            statistics.median(
                sum(step["layer_forward"]) + sum(step["layer_backward"]) for step in same
            ),
        )
        for count, same in zip(counts, by_count, strict=True)
    ]
    return Profile(
        name=name,
        machine=machine["gpus"][0] if device == "cuda" else machine["cpu"],
        device=device,
        threads=torch.get_num_threads(),
        made=datetime.now().isoformat(timespec="seconds"),
        model=model,
        image=image,
        layers=layers,
        update_seconds=statistics.median(step["update"] for same in by_count for step in same),
        others_share=statistics.fmean([share for _, share in noise], [clock for clock, _ in noise]),
        steps=tuple(
            (
                count,
                seconds,
                sum(layer.forward.at(count) + layer.backward.at(count) for layer in layers),
            )
            for count, seconds in measured
        ),
    )
