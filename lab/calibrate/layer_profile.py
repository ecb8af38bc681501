"""Measure a compute profile: how long each layer of a model takes on this machine.

``measure_profile`` trains the real model on noise, in one process with all cores, with several
numbers of samples in turns; hooks record when each layer ends. Work between two layers (an
addition, a reshape) counts towards the second, so that the layers' times add up to the step's.
``Profile.save`` writes the file.
"""

import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime

import torch

from common.emulation.compute_profile import Layer, Profile, SectionTime
from common.errors import UserError
from common.say import count, percent
from common.utils.environment import environment
from common.utils.progress import console, show_progress
from common.utils.system import tune_malloc, usable_cores
from lab.calibrate.fits import fit_line, others_share, quiet
from lab.calibrate.layer_timer import Call, LayerTimer
from lab.calibrate.measurements import Sharing, StepTimes, UsesCpu
from lab.calibrate.trainer import IMAGE, Trainer
from lab.predict.calibration_file import noise_warning

SAMPLES = (16, 48, 112, 256)
_ROUNDS = 5
_STEPS = 2  # of each number of samples, in a round
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
        steps: list[_LayerStep] = []
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
        f"  largest error of the profile at a measured batch size: {percent(worst)}",
        *noise_warning(profile.others_share, "measure"),
    ]


class _LayerStep(UsesCpu):
    """One step, and the seconds of each of its layers' calls."""

    step: StepTimes
    calls: tuple[Call, ...]
    forward: list[float]
    backward: list[float]


def _timed_steps(trainer: Trainer, timer: LayerTimer, samples: int) -> list[_LayerStep]:
    """Return a few steps, each with its layers' calls and their seconds."""
    taken: list[tuple[tuple[Call, ...], list[float], list[float]]] = []
    steps = trainer.time_steps(
        [samples], steps=_STEPS, after_step=lambda _: taken.append(timer.take())
    )
    warm = taken[-len(steps) :]  # without the steps of the warm-up
    return [
        _LayerStep(step, *layers, cpu=step.cpu) for step, layers in zip(steps, warm, strict=True)
    ]


def _fit_profile(name: str, model: str, device: str, steps: Sequence[_LayerStep]) -> Profile:
    """Return the profile whose lines fit each layer's median seconds in the quiet ``steps``."""
    alone = Sharing(cores=usable_cores(), ranks_here=1)
    by_samples = {}
    for samples in sorted({step.step.samples for step in steps}):
        turns = [(step,) for step in steps if step.step.samples == samples]
        by_samples[samples] = [step for (step,) in quiet(turns, alone)]

    layers = tuple(_fit_layer(call, index, by_samples) for index, call in enumerate(steps[0].calls))
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
        update_seconds=statistics.median(
            step.step.update for same in by_samples.values() for step in same
        ),
        others_share=others_share([(step,) for step in steps], alone),
        steps=tuple(
            (samples, _median_seconds(same), _fitted_seconds(layers, samples))
            for samples, same in by_samples.items()
        ),
    )


def _fit_layer(call: Call, index: int, by_samples: Mapping[int, Sequence[_LayerStep]]) -> Layer:
    """Fit lines to the median seconds of a layer: the ``index``-th call of every step."""
    forward = []
    backward = []
    for steps in by_samples.values():
        forward.append(statistics.median(step.forward[index] for step in steps))
        backward.append(statistics.median(step.backward[index] for step in steps))
    samples = list(by_samples)
    return Layer(
        call.name, _fit_section(samples, forward), _fit_section(samples, backward), call.parameters
    )


def _fit_section(samples: Sequence[int], seconds: Sequence[float]) -> SectionTime:
    return SectionTime(*fit_line(samples, [max(_LEAST_SECONDS, s) for s in seconds]).values)


def _median_seconds(steps: Sequence[_LayerStep]) -> float:
    return statistics.median(sum(step.forward) + sum(step.backward) for step in steps)


def _fitted_seconds(layers: Sequence[Layer], samples: int) -> float:
    return sum(layer.forward.at(samples) + layer.backward.at(samples) for layer in layers)
