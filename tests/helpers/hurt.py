"""Run a part and disturb one of its ranks at an exact moment.

    python tests/helpers/hurt.py RANK MOMENT DEED PartTwo/main.py --rank 1 ...

torchrun can start it, too. With RANK -1 no rank is disturbed.

Rank RANK does the DEED at the MOMENT: in the first step of the second epoch or, for what happens
once per epoch, at that epoch's checkpoint. All other code is the project's own, which here also
knows ``--model tiny`` and ``--model wide``. The deeds:

- ``hold`` waits until the working folder contains a file ``go``, so that a test can disturb this
  process from outside, and waits once more where an interrupted run looks for its checkpoints.
- ``swallow`` does the same within a callback, where Python drops what is raised. It also starts a
  thread for whose end an interpreter would wait before it ends.
- ``raise`` raises the OSError of a broken file.
- ``sleep`` sleeps for two minutes.
- ``kill`` sends this process SIGKILL, ``stop`` sends SIGSTOP.
- ``detour`` calls a collective that the other ranks do not call.
- ``pace`` waits for the number of seconds in the file $PACE. It reads the file repeatedly, so a
  smaller number takes effect at once.
"""

import functools
import itertools
import os
import runpy
import signal
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

STEPS_AN_EPOCH = 2
_FIRST_BIG = 1_000_000


def _stop(*_):
    print("stopped now", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(*_):
    raise OSError(5, "Input/output error", "images/cat/003.png")


def _sleep(*_):
    print("loading now", flush=True)
    time.sleep(120)  # longer than any test waits: simulates a slow disk


def _detour(*_):
    import torch.distributed as dist

    dist.all_gather_object([None] * dist.get_world_size(), "not called by the others")


def _hold(*_, said="held now", until="go"):
    print(said, flush=True)
    while not Path(until).exists():
        time.sleep(0.02)  # between two checks


def _swallow(*_):
    class Collected:
        __del__ = _hold

    threading.Thread(target=time.sleep, args=(600,)).start()
    Collected()


def _pace(*_):
    began = time.monotonic()
    while time.monotonic() < began + float(Path(os.environ["PACE"]).read_text()):
        time.sleep(0.02)  # between two checks


def before(place, when=lambda *_: True):
    """Return a moment: the function at ``place`` is called, and its arguments fit ``when``."""

    def install(act):
        module, path = place.split(":")
        *outer, name = path.split(".")
        owner = functools.reduce(getattr, outer, import_module(module))
        function = getattr(owner, name)

        def hurt(*arguments, **more):
            if when(*arguments):
                act(*arguments)
            return function(*arguments, **more)

        setattr(owner, name, hurt)

    return install


at_each_step = before("common.training_engine:TrainingEngine.train_step")
at_second_epoch = before(
    "common.training_engine:TrainingEngine.train_step",
    lambda engine, *_: engine.step == STEPS_AN_EPOCH,
)


def while_importing(act):
    """Act when the program begins to import what it runs."""

    class Finder:
        @staticmethod
        def find_spec(name, *_):
            if name == "common.experiment.run":
                act()

    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]


def in_forward(act):
    """Act when half of the layers have computed."""

    def watch(engine, *_):
        leaves = [module for module in engine.model.modules() if not list(module.children())]
        leaves[len(leaves) // 2].register_forward_hook(act)

    at_second_epoch(watch)


def in_a_collective(act):
    """Act while the first large gradient is exchanged; with DDP, all buckets but the last."""
    import torch.distributed as dist

    armed = []

    def arm(engine, *_):
        armed.append(True)
        if type(engine.sync).__name__ == "DDP":
            next(engine.model.parameters()).register_post_accumulate_grad_hook(act)

    def begin(collective):
        def begun(tensor, *arguments, **more):
            if armed and tensor.numel() > _FIRST_BIG:
                armed.clear()
                work = collective(tensor, *arguments, **more, async_op=True)
                act()
                return work.wait()
            return collective(tensor, *arguments, **more)

        return begun

    at_second_epoch(arm)
    dist.gather, dist.all_reduce = begin(dist.gather), begin(dist.all_reduce)


def in_evaluation(act):
    """Act when the model computes its first batch of the test set."""
    before("common.experiment.validation:predict")(
        lambda model, *_: list(model.modules())[-1].register_forward_hook(act)
    )


def while_writing(act):
    """Act when half of the second epoch's checkpoint is on disk."""
    from common.utils import atomic_files as files

    open_unfinished = files._open_unfinished

    def hurt(path):
        file = open_unfinished(path)
        if path.name == "Epoch_2.pt":
            write = file.write

            def write_half(content):
                half = len(content) // 2
                write(content[:half])
                file.flush()
                act()
                write(content[half:])

            file.write = write_half
        return file

    files._open_unfinished = hurt


def at_the_end(act):
    """Act when the group is closed: rank 0 writes the report next, the others end."""
    for name in ("report", "report_end_of_rank"):
        before(f"common.experiment.run:{name}")(act)


def at_a_rename(name, *, done):
    """Return a moment: a file whose name begins with ``name`` is complete, and is renamed next.

    With ``done`` it has its final name, but other ranks do not know that yet.
    """

    def install(act):
        replace = os.replace

        def hurt(source, target):
            found = Path(target).name.startswith(name)
            if found and not done:
                act()
            replace(source, target)
            if found and done:
                act()

        os.replace = hurt

    return install


_saves = itertools.count(1)
MOMENTS = {
    "importing": while_importing,
    # its main thread waits for the other ranks meanwhile
    "meeting": before("common.distributed.meeting:_join"),
    "loading": before("common.experiment.setup:load_dataset"),
    "data": before(
        "common.data.loaders:TrainLoader.__iter__", lambda loader: loader.sampler.epoch == 2
    ),
    "steps": at_each_step,
    "forward": in_forward,
    "collective": in_a_collective,
    # before the ranks average their buffers; nothing is written about the epoch yet
    "epoch": before(
        "common.training_engine:TrainingEngine.agree_on_buffers",
        lambda engine: engine.step == 2 * STEPS_AN_EPOCH,
    ),
    "writing": while_writing,
    "renaming": at_a_rename("Epoch_2.pt", done=False),
    "renamed": at_a_rename("Epoch_2.pt", done=True),
    "within": at_a_rename("Epoch_2_Step_", done=True),
    # this rank waits for the rank that writes the second epoch's checkpoint
    "waiting": before(
        "common.training_engine.checkpoint_manager:run_on_all_ranks", lambda *_: next(_saves) == 2
    ),
    "evaluation": in_evaluation,
    "end": at_the_end,
}
DEEDS = {
    "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "stop": _stop,
    "raise": _raise,
    "sleep": _sleep,
    "detour": _detour,
    "hold": _hold,
    "swallow": _swallow,
    "pace": _pace,
}


def main(rank, moment, deed, part, *arguments):
    """Install the hook on its rank, then run the part in this process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "common"]:
        # A fork inherits modules, perhaps from another folder, and without the models below.
        del sys.modules[name]
    sys.path.insert(0, str(Path(part).resolve().parents[1]))
    from common import models

    # before flags are read; tiny_model.py is in this file's folder
    models.MODELS |= {name: f"tiny_model:{name}" for name in ("tiny", "wide")}
    alone = os.environ.get("RANK", "0")
    mine = arguments[arguments.index("--rank") + 1] if "--rank" in arguments else alone
    if mine == rank:
        MOMENTS[moment](DEEDS[deed])
        if deed == "hold":
            before(
                "common.cli:_newest_checkpoint",
                lambda *_: sys.exc_info()[0] is KeyboardInterrupt,
            )(lambda *_: _hold(said="held again", until="go again"))
    sys.argv = [part, *arguments]
    runpy.run_path(part, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
