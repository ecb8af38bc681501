"""Lesson 9: twelve scripts of the audit's cases without their names, and what is wrong in each."""

import shutil
from pathlib import Path

from lab.audit.cases import STARTER_CODE, read_scripts
from lab.learn.student_file import Say, StudentFile

# The audit's findings, by script, in the order of their numbers.
BLIND = {
    "own_scatter_of_the_wrong_list": "own-gradient",
    "literal_2": "literal-divisor",
    "clip_norm_by_hand": "clipped-before-averaging",
    "samples_no_sampler_ddp": "same-samples",
    "sum_flat_buffer": "sum-not-mean",
    "samples_order_without_set_epoch_ddp": "same-order",
    "start_rank_0_seeded": "different-start",
    "some_weights_only": "some-parameters",
    "weights_averaged_gather_scatter": "weights-averaged",
    "ddp_bypassed_raw": "ddp-bypassed",
    "scaled_in_loss_ddp": "scaled-in-loss",
    "stale_by_one_step": "stale-gradient",
}
_STEPS = 20


def write_scripts(folder: Path) -> None:
    """Write the scripts as 01.py to 12.py, with the starter code that they import."""
    scripts = read_scripts()
    folder.mkdir(exist_ok=True)
    shutil.copy(STARTER_CODE, folder)
    for number, name in enumerate(BLIND, 1):
        (folder / f"{number:02}.py").write_text(scripts[name].body, encoding="utf-8")
    print(f"Wrote {folder}/01.py to {len(BLIND)}.py")


def check(student: StudentFile, say: Say) -> float:
    """Return how many of the scripts lower the test loss on digits; their faults are answers."""
    from lab.learn.script_runs import train

    learning = 0
    for rank_0, *_ in train(list(BLIND), steps=_STEPS).values():
        first = rank_0.tests[0]
        last = rank_0.tests[-1]
        if last.loss < first.loss:
            learning += 1
    return learning
