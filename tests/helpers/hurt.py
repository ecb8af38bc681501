"""Runs a part as it is, and hurts it at a moment that cannot be missed.

    python tests/helpers/hurt.py RANK MOMENT DEED PartTwo/main.py --rank 1 ...     # or under torchrun; RANK -1: nobody

On rank RANK alone, the DEED is done at the MOMENT, in the second epoch's first step or, of what happens once an epoch, with its
checkpoint. What runs before and after is the project's own code, which knows ``--model tiny`` and ``--model wide``, too. Deeds:
``kill`` sends this process SIGKILL, ``stop`` SIGSTOP, ``raise`` raises what a broken file raises, ``sleep`` works on for two
minutes, ``hold`` waits for a file ``go`` in the working folder, ``limit`` lets it write no file beyond 5 KB,
``pace`` takes the seconds that stand in the file $PACE, and follows it at once where they become fewer.
"""

import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS_AN_EPOCH = 2
_FIRST_BIG = 1_000_000
Act = Callable[..., None]


def _kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(*_: object) -> None:
    print("stopped now", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(*_: object) -> None:
    raise OSError(5, "Input/output error", "images/cat/003.png")


def _sleep(*_: object) -> None:
    print("loading now", flush=True)
    time.sleep(120)  # longer than any test waits: this stands for a slow disk


def _hold(*_: object) -> None:
    print("held now", flush=True)
    while not Path("go").exists():
        time.sleep(0.02)  # between two looks


def _pace(*_: object) -> None:
    began = time.monotonic()
    while time.monotonic() < began + float(Path(os.environ["PACE"]).read_text()):
        time.sleep(0.02)  # between two looks


def _limit(*_: object) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (5120, 5120))


def at_each_step(act: Act) -> None:
    """A step of the training begins, each one."""
    from common.training_engine import TrainingEngine

    train_step = TrainingEngine.train_step

    def hurt(engine: Any, *arguments: Any, **more: Any) -> Any:
        act()
        return train_step(engine, *arguments, **more)

    TrainingEngine.train_step = hurt


def while_loading(act: Act) -> None:
    """The dataset is being read, before the first epoch."""
    from common.experiment import setup

    load = setup.load_dataset

    def hurt(*arguments: Any, **more: Any) -> Any:
        act()
        return load(*arguments, **more)

    setup.load_dataset = hurt


def in_forward(act: Act) -> None:
    """Half of the layers have computed."""
    from common.training_engine import TrainingEngine

    train_step = TrainingEngine.train_step

    def hurt(engine: Any, *arguments: Any, **more: Any) -> Any:
        if engine.step == STEPS_AN_EPOCH:
            leaves = [module for module in engine.model.modules() if not list(module.children())]
            leaves[len(leaves) // 2].register_forward_hook(act)
        return train_step(engine, *arguments, **more)

    TrainingEngine.train_step = hurt


def in_a_collective(act: Act) -> None:
    """The first large gradient is on its way; of DistributedDataParallel, all buckets but the last."""
    import torch.distributed as dist

    from common.training_engine import TrainingEngine

    train_step, armed = TrainingEngine.train_step, []

    def hurt(engine: Any, *arguments: Any, **more: Any) -> Any:
        if engine.step == STEPS_AN_EPOCH:
            armed.append(True)
            if type(engine.sync).__name__ == "DDP":
                next(engine.model.parameters()).register_post_accumulate_grad_hook(act)
        return train_step(engine, *arguments, **more)

    def begin(collective: Callable[..., Any]) -> Callable[..., Any]:
        def begun(tensor: Any, *arguments: Any, **more: Any) -> Any:
            if armed and tensor.numel() > _FIRST_BIG:
                armed.clear()
                work = collective(tensor, *arguments, **more, async_op=True)
                act()
                return work.wait()
            return collective(tensor, *arguments, **more)

        return begun

    TrainingEngine.train_step = hurt
    dist.gather, dist.all_reduce = begin(dist.gather), begin(dist.all_reduce)


def in_evaluation(act: Act) -> None:
    """The model computes its first batch of the test set."""
    from common.experiment import validation

    predict = validation.predict

    def hurt(model: Any, *arguments: Any, **more: Any) -> Any:
        list(model.modules())[-1].register_forward_hook(act)
        return predict(model, *arguments, **more)

    validation.predict = hurt


def while_writing(act: Act) -> None:
    """Half of the second epoch's checkpoint is on the disk."""
    from common.utils import atomic_files as files

    open_unfinished = files._open_unfinished

    def hurt(path: Path) -> Any:
        file = open_unfinished(path)
        if path.name == "Epoch_2.pt":
            write = file.write

            def write_half(content: Any) -> None:
                write(content[: len(content) // 2])
                file.flush()
                act()

            file.write = write_half
        return file

    files._open_unfinished = hurt


def before_the_rename(act: Act) -> None:
    """The second epoch's checkpoint is whole on the disk, but has not its name yet."""
    replace = os.replace

    def hurt(source: Any, target: Any) -> None:
        if Path(target).name == "Epoch_2.pt":
            act()
        replace(source, target)

    os.replace = hurt


def after_the_rename(act: Act) -> None:
    """The second epoch's checkpoint has its name; nobody else knows yet."""
    replace = os.replace

    def hurt(source: Any, target: Any) -> None:
        replace(source, target)
        if Path(target).name == "Epoch_2.pt":
            act()

    os.replace = hurt


def while_another_writes(act: Act) -> None:
    """This rank waits for the one that writes the second epoch's checkpoint."""
    from common.training_engine import checkpoint_manager as saving

    run_on_all_ranks, calls = saving.run_on_all_ranks, []

    def hurt(*arguments: Any) -> Any:
        calls.append(True)
        if len(calls) == 2:
            act()
        return run_on_all_ranks(*arguments)

    saving.run_on_all_ranks = hurt


def in_its_data(act: Act) -> None:
    """The loader is asked for the second epoch's first batch."""
    from common.data.loaders import TrainLoader

    iterate = TrainLoader.__iter__

    def hurt(loader: Any) -> Any:
        if loader.sampler.epoch == 2:
            act()
        return iterate(loader)

    TrainLoader.__iter__ = hurt


MOMENTS = {
    "forward": in_forward,
    "collective": in_a_collective,
    "evaluation": in_evaluation,
    "writing": while_writing,
    "renaming": before_the_rename,
    "renamed": after_the_rename,
    "waiting": while_another_writes,
    "data": in_its_data,
    "loading": while_loading,
    "steps": at_each_step,
}
DEEDS = {
    "kill": _kill,
    "stop": _stop,
    "raise": _raise,
    "sleep": _sleep,
    "hold": _hold,
    "limit": _limit,
    "pace": _pace,
}


def main(rank: str, moment: str, deed: str, part: str, *arguments: str) -> None:
    """Install the hook on its rank, then become the part."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "common"]:
        del sys.modules[name]  # a fork's: perhaps another folder's, and without the models below
    sys.path.insert(0, str(Path(part).resolve().parents[1]))
    from common import models

    models.MODELS |= {
        name: f"tiny_model:{name}" for name in ("tiny", "wide")
    }  # before flags are read; beside this file
    mine = arguments[arguments.index("--rank") + 1] if "--rank" in arguments else os.environ["RANK"]
    if mine == rank:
        MOMENTS[moment](DEEDS[deed])
    sys.argv = [part, *arguments]
    runpy.run_path(part, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
