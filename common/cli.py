"""What ``PartX/main.py`` calls: parse the flags, run, and turn each failure into one message and an exit status.

Status 0: done; 1: the run failed; 2: the command cannot be run as given; 75: stopped by a signal, saved, to be gone on with;
130: interrupted.
"""

import os
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from common.config.parser import parse_arguments
from common.config.recipes import print_recipe
from common.config.schema import Config
from common.distributed.launch_env import (
    LaunchSpec,
    choose_gpus,
    launcher_command,
    processes_to_start,
    resolve_launch,
)
from common.errors import INTERRUPTED, TO_BE_CONTINUED, GroupError, Stopped, UserError
from common.utils.processes import end_process

_GRACE_SECONDS = 3.0

HOW_TO_START = """\
{part} trains on several ranks, so it must know its place among them. Start it on every node, for example

    python {path} --master-ip 10.0.0.1 --num-nodes 2 --rank 0      # on the first node, whose address is 10.0.0.1
    python {path} --master-ip 10.0.0.1 --num-nodes 2 --rank 1      # on the second

or two ranks on this machine, in two terminals or with a '&' behind the first:

    python {path} --master-ip 127.0.0.1 --num-nodes 2 --rank 0 &
    python {path} --master-ip 127.0.0.1 --num-nodes 2 --rank 1

or let torchrun start them:

    torchrun --nproc-per-node 2 {path}
"""


def main(
    part: str,
    *,
    path: str,
    description: str,
    sync_choices: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Run one part from its command line and return the exit status.

    Parameters
    ----------
    part : the part's name, e.g. "PartTwo".
    path : the file that was started, for the examples in messages.
    description : shown by ``--help``.
    sync_choices : the strategies that the part offers; the first is its default.
    defaults : settings in which the part differs from ``Config``.
    arguments : the command line without the program's name (default: ``sys.argv[1:]``).
    """
    rank, arguments = "", list(sys.argv[1:] if arguments is None else arguments)
    try:
        config = parse_arguments(part, description, defaults or {}, sync_choices, arguments)
        if config.print_config:
            print(print_recipe(config))
            return 0
        choose_gpus(config.gpu_ids)
        if processes := processes_to_start(config.launch_flags):
            _become_launcher(config, processes, [path, *arguments])
        launch = _launch_or_explain(config, path)
        if launch is None:
            return 2
        rank = f" (rank {launch.rank})" if launch.size > 1 else ""
    except UserError as error:
        return _say(f"error: {error}", 2)

    _end_soon_after_interrupt()
    if (
        not config.debug
    ):  # read when torch is imported: its C++ warnings repeat, with stack frames, what is told here
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        from common.experiment.run import run

        run(config, launch)
        return _end(launch, "", 0)
    except Stopped as stopped:
        return _end(launch, f"stopped{rank}: {stopped}", TO_BE_CONTINUED)
    except (UserError, GroupError) as error:
        return _end(launch, f"error{rank}: {error}", 1)
    except KeyboardInterrupt:
        return _end(
            launch, f"interrupted{rank}: finished checkpoints and metrics are kept", INTERRUPTED
        )
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or re.search(
            "out of memory|can't allocate memory", str(error)
        ):
            return _end(
                launch,
                f"error{rank}: out of memory: give a smaller --batch-size or fewer ranks a machine ({error})",
                1,
            )
        from common.distributed.failures import explain_collective_failure

        explanation = explain_collective_failure(error)
        return _end(
            launch,
            f"error{rank}: {explanation}" if explanation else traceback.format_exc().rstrip(),
            1,
        )
    except Exception:
        return _end(launch, traceback.format_exc().rstrip(), 1)


def _end(launch: LaunchSpec, message: str, status: int) -> int:
    """Say why the run ends early, if it does, and return the status; of a group, end the process with it."""
    if message:
        _say(message, status)
    if launch.size > 1:
        end_process(status)
    return status


def _launch_or_explain(config: Config, path: str) -> LaunchSpec | None:
    launch = resolve_launch(config.launch_flags)
    if config.sync == "none":
        if launch is not None and launch.size > 1:
            raise UserError(
                f"{config.part} trains on one process, but torchrun started {launch.size}: use one, or "
                "PartTwo or PartThree"
            )
        return LaunchSpec()
    if launch is None and config.recipe is not None:
        return LaunchSpec()
    if launch is None:
        print(HOW_TO_START.format(part=config.part, path=path), file=sys.stderr, end="")
    return launch


def _become_launcher(config: Config, processes: int, command: list[str]) -> NoReturn:
    """Replace this process by torchrun, which starts the ranks; they have RANK set, so none of them comes here again."""
    environment = os.environ | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")
    }  # run() sets the threads
    os.execve(
        sys.executable,
        [sys.executable, *launcher_command(config.launch_flags, processes, command)],
        environment,
    )


def _say(message: str, status: int) -> int:
    print(message, file=sys.stderr, flush=True)
    return status


def _end_soon_after_interrupt() -> None:
    """Make Ctrl-C end the process also while it waits inside a collective, where Python sees no signal.

    The signal's number is written to a socket at once, by the interpreter's C handler; a thread that reads it gives
    the main thread a few seconds for its own clean end, then ends the process.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while reader.recv(1)[0] != signal.SIGINT:
            pass
        threading.Event().wait(_GRACE_SECONDS)
        os._exit(_say("interrupted: another rank did not answer", INTERRUPTED))

    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
    # Keeps the writing end open: only its number is known to the interpreter.
    watch.writer = writer
