"""What ``PartX/main.py`` and the installed commands call: parse the flags, run, explain failures.

Status 0: done; 1: the run failed; 2: the command cannot be run as given; 75: stopped by a signal
after saving a checkpoint, resume with ``--resume auto``; 130: interrupted.
"""

import contextlib
import gc
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import NoReturn

from common.config.parser import parse_arguments
from common.config.recipes import print_recipe
from common.config.schema import Config
from common.distributed.launch_env import (
    LaunchSpec,
    choose_gpus,
    ranks_to_start,
    resolve_launch,
)
from common.distributed.spawn import launch_local_ranks
from common.errors import (
    INTERRUPTED,
    TO_BE_CONTINUED,
    Stopped,
    UserError,
    explain,
    print_to_stderr,
)
from common.sync import BUILT_IN, BY_HAND
from common.utils.environment import read_settings
from common.utils.processes import INTERRUPT, end_process
from common.utils.streams import standard_streams
from common.utils.typed_json import calm

_GRACE_SECONDS = 4.0
_OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory")
COMMANDS = {"PartOne": "part-one", "PartTwo": "part-two", "PartThree": "part-three"}
"""The commands that an installed package has in place of ``python PartX/main.py``."""

HOW_TO_START = """\
{part} trains on several ranks. To start two on this machine:

    {command} --distributed --world-size 2

or one on each machine; rank 0 runs on the machine that owns --master-ip:

    {command} --master-ip 10.0.0.1 --num-nodes 2 --rank 0     # on 10.0.0.1
    {command} --master-ip 10.0.0.1 --num-nodes 2 --rank 1     # on the other machine

or with torchrun:

    torchrun --nproc-per-node 2 {target}"""


def main(
    part: str,
    *,
    path: str | None,
    description: str,
    sync_choices: Sequence[str],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run one part from its command line and return the exit status.

    Parameters
    ----------
    part : the part's name, e.g. "PartTwo".
    path : the file that was started, for messages; None for the installed command, e.g. part-two.
    description : shown by ``--help``.
    sync_choices : the strategies that the part offers; the first is its default.
    arguments : the command line without the program's name (default: ``sys.argv[1:]``).
    """
    given = sys.argv[1:] if arguments is None else arguments
    with standard_streams():
        return _main(part, path, description, sync_choices, given)


def _main(
    part: str,
    path: str | None,
    description: str,
    sync_choices: Sequence[str],
    arguments: Sequence[str],
) -> int:
    if path is not None:
        program = None  # argparse names the file
        command = shlex.join(["python", path])
        target = child = [path]  # what a launcher starts
    else:
        program = command = COMMANDS[part]
        target = ["-m", "common.cli", part]
        child = ["-P", *target]  # without modules of the current folder
    gc.set_threshold(100_000, 50, 100)  # else collections take a fifth of importing torch
    try:
        config = parse_arguments(part, description, sync_choices, arguments, program=program)
        read_settings()
        if config.print_config:
            print(print_recipe(config))
            return 0
        choose_gpus(config.gpu_ids)
        if ranks := _ranks_to_start(config):
            for_a_rank = [argument for argument in arguments if argument != "--distributed"]
            # run() sets the threads
            environment = {"OMP_NUM_THREADS": "1"} | os.environ
            return launch_local_ranks([*child, *for_a_rank], ranks, environment)
        launch = _launch_of_part(config)
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        return _say(f"error: {explained}", 2)
    if launch is None:
        return _say(HOW_TO_START.format(part=part, command=command, target=shlex.join(target)), 2)
    # At once: on a busy machine an interpreter takes many seconds to shut torch down.
    return end_process(_run(config, launch))


def _ranks_to_start(config: Config) -> list[dict[str, str]]:
    """Return the variables of each rank that this process must start; none if it is a rank."""
    if config.sync == "none":
        return []
    return ranks_to_start(
        distributed=config.distributed,
        gpu_ids=config.gpu_ids,
        rank=config.rank,
        world_size=config.world_size,
        master_ip=config.master_ip,
        master_port=config.master_port,
        dist_url=config.dist_url,
    )


def _launch_of_part(config: Config) -> LaunchSpec | None:
    """Return this process's place among the ranks; None if the user must still say it."""
    launch = resolve_launch(
        rank=config.rank,
        world_size=config.world_size,
        local_rank=config.local_rank,
        master_ip=config.master_ip,
        master_port=config.master_port,
        dist_url=config.dist_url,
    )
    if config.sync == "none":
        if launch is not None and launch.world_size > 1:
            raise UserError(
                f"{config.part} trains on one process, but torchrun started {launch.world_size}: "
                "start one, or use PartTwo or PartThree"
            )
        return LaunchSpec()
    if launch is None and config.recipe is not None:
        return LaunchSpec()
    if launch is not None and config.run_token is not None:
        return replace(launch, token=config.run_token)
    return launch


def _run(config: Config, launch: LaunchSpec) -> int:
    """Train, print why the run ends early, if it does, and return the status."""
    _end_soon_after_interrupt()
    # torch reads it when imported. Its C++ warnings repeat this program's messages, with stacks.
    if not config.debug:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    rank = f" (rank {launch.rank})" if launch.world_size > 1 else ""
    begun = time.time()
    try:
        from common.experiment.run import run

        run(config, launch)
        status = 0
    except Stopped as stopped:
        status = _say(f"stopped{rank}: {stopped}", TO_BE_CONTINUED)
    except KeyboardInterrupt:
        status = _say(f"interrupted{rank}{_newest_checkpoint(config, begun)}", INTERRUPTED)
    except Exception as error:
        reason = _explain(error)
        message = f"error{rank}: {reason}" if reason else traceback.format_exc().rstrip()
        status = _say(message + _newest_checkpoint(config, begun), 1)
    return status


def _newest_checkpoint(config: Config, begun: float) -> str:
    """Return where this run, or one like it since ``begun``, saved its newest checkpoint, if any.

    ``begun`` is in seconds since 1970.
    """
    files = (config.reports_folder / config.experiment_name).glob("*/checkpoints/*.pt")
    with contextlib.suppress(OSError):  # another rank has just deleted an old one
        saved = [(path.stat().st_mtime, path) for path in files]
        since_begun = [(seconds, path) for seconds, path in saved if seconds >= begun]
        if since_begun:
            _, newest = max(since_begun)
            return f"\nThe newest checkpoint is {newest}. Continue from it with --resume auto."
    return ""


def _explain(error: Exception) -> str | None:
    """Return a message for the user; None if only the traceback can explain the error."""
    if explained := explain(error):
        return explained
    if not isinstance(error, RuntimeError | MemoryError):
        return None
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
        return f"out of memory: give a smaller --batch-size or fewer ranks per machine ({error})"
    from common.distributed.failures import explain_collective_failure

    # Only if no rank has published why: then process_group has raised GroupError with the reason.
    return explain_collective_failure(error)


def _say(message: str, status: int) -> int:
    print_to_stderr(calm(message))  # it may quote another rank
    return status


def _end_soon_after_interrupt() -> None:
    """Make Ctrl-C end the process even inside a collective, where Python does not see the signal.

    The interpreter's C handler writes the signal's number to a socket at once. A thread reads it,
    gives the main thread a few seconds to end cleanly, then ends the process. A second Ctrl-C
    changes nothing: it would end the cleaning up, with a traceback.
    """

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else SIGINT is ignored
        signal.signal(signal.SIGINT, interrupt)
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while reader.recv(1)[0] != signal.SIGINT:
            pass
        INTERRUPT.set()  # the other ranks are told
        time.sleep(_GRACE_SECONDS)
        os._exit(_say("interrupted: another rank did not answer", INTERRUPTED))

    # detach() keeps the writing end open: the interpreter knows only its number.
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()


# The installed commands: python PartX/main.py without a checkout.
_PARTS = {
    "PartOne": partial(
        main,
        "PartOne",
        path=None,
        description="Part One: train with one process.",
        sync_choices=("none",),
    ),
    "PartTwo": partial(
        main,
        "PartTwo",
        path=None,
        description="Part Two: train on several ranks that average their gradients by hand.",
        sync_choices=BY_HAND,
    ),
    "PartThree": partial(
        main,
        "PartThree",
        path=None,
        description="Part Three: train on several ranks with PyTorch's DistributedDataParallel.",
        sync_choices=BUILT_IN,
    ),
}
part_one, part_two, part_three = _PARTS.values()


if __name__ == "__main__":  # python -m common.cli PartTwo ...
    _part = sys.argv.pop(1) if len(sys.argv) > 1 else "nothing"
    if _part not in _PARTS:
        _choices = ", ".join(_PARTS)
        sys.exit(_say(f"error: python -m common.cli: got {_part}, give one of {_choices}", 2))
    sys.exit(_PARTS[_part]())
