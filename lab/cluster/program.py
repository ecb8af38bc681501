"""What a rank on a node runs: a command with its placeholders filled in.

A Python command runs in a fork of the supervisor, which has already imported torch. This saves
seconds and memory on each node. ``parse_python`` decides which commands can run this way.
"""

import gc
import importlib
import io
import os
import re
import runpy
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

from common.errors import INTERRUPTED, UserError
from common.utils.paths import REPOSITORY
from common.utils.processes import end_process
from common.utils.system import usable_cores

# Exit status of a command that does not exist, as in a shell.
NOT_FOUND = 127
_PLACEHOLDERS = ("{master}", "{nodes}", "{rank}", "{node}", "{local_rank}", "{port}")
_PLACEHOLDER = re.compile(r"\{[a-z_]+\}")
_INTERPRETERS = ("python", "python3")
_OWN_PACKAGES = ("common", "lab")
_PRELOADED = ("common.experiment.run", "common.models.vgg", "sklearn.datasets", "torch._dynamo")


@dataclass(frozen=True)
class PythonProgram:
    """A Python command: its arguments, and a file as ``target``, or a module if ``module``.

    safe_path : the interpreter's -P, without the current folder.
    """

    target: str
    arguments: tuple[str, ...]
    module: bool
    safe_path: bool = False

    def run(self) -> NoReturn:
        """Run the program as a new interpreter would, and end this process with its exit status."""
        for stream in (sys.stdout, sys.stderr):
            cast(io.TextIOWrapper, stream).reconfigure(line_buffering=True)
        sys.argv = [self.target, *self.arguments]
        if not self.safe_path:
            script_folder = str(Path(self.target).resolve().parent)
            sys.path.insert(0, os.getcwd() if self.module else script_folder)
        status = 0
        try:
            if self.module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.target, run_name="__main__")
        except BaseException as error:
            status = _report(error)
        # An interpreter would also clear all modules, which takes seconds for memory shared since
        # the fork. There is no public function that joins all threads.
        threading._shutdown()  # type: ignore[attr-defined]  # private, so without a type
        end_process(status)


def _report(error: BaseException) -> int:
    """Print the error that ended the program, as an interpreter does; return the exit status."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frames = frames.tb_next  # leave out the frames above the program's own
    traceback.print_exception(type(error), error, frames or error.__traceback__)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def parse_python(command: Sequence[str]) -> PythonProgram | None:
    """Return the command as a program that a fork can run; None if no fork can.

    That is a command of another interpreter, or one with options for the interpreter, except -u and
    -P before -m.
    """
    if not _is_this_interpreter(command[0]):
        return None
    words = command[1:]
    if words[:1] == ["-u"]:
        words = words[1:]
    match words:
        case ["-m", module, *arguments]:
            return PythonProgram(module, tuple(arguments), module=True)
        case ["-P", "-m", module, *arguments]:
            return PythonProgram(module, tuple(arguments), module=True, safe_path=True)
        case [script, *arguments] if not script.startswith("-") and Path(script).is_file():
            return PythonProgram(script, tuple(arguments), module=False)
    return None


def _is_this_interpreter(word: str) -> bool:
    """Return whether the word names the interpreter that runs this.

    Compares folders, not resolved links: a virtual environment's python is often a link to an
    interpreter without the environment's packages.
    """
    return word in _INTERPRETERS or (
        os.path.basename(word).startswith("python")
        and os.path.dirname(os.path.abspath(word)) == os.path.dirname(sys.executable)
    )


def preload_modules() -> None:
    """Import what a run needs. Nothing may compute here: threads do not survive a fork."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in common/cli.py, before torch
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # a node's garbage collector would write to, and so copy, the shared memory


def reset_forked_state(environment: Mapping[str, str], target: Path) -> None:
    """Set in a fork what a new interpreter takes from its environment or draws at random.

    A target outside this repository must not find the repository's modules: it may have its own
    with the same names.
    """
    import numpy as np
    import torch

    # Else its end removes the supervisor's temporary folders, and clears torch, which takes longer.
    for inherited in weakref.finalize._registry:  # type: ignore[attr-defined]  # private
        inherited.atexit = False
    np.random.seed(None)  # all forks of one process would draw the same numbers
    torch.seed()
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if str(REPOSITORY) in sys.path:
        sys.path.remove(str(REPOSITORY))  # the supervisor put it there
    if not target.resolve().is_relative_to(REPOSITORY):
        for name in [name for name in sys.modules if name.partition(".")[0] in _OWN_PACKAGES]:
            del sys.modules[name]


def fill_in(
    command: Sequence[str],
    *,
    master: str,
    nodes: int,
    rank: int,
    port: int,
    ranks_per_node: int = 1,
) -> list[str]:
    """Return the command with its placeholders replaced by their values.

    nodes : the number of ranks, as ``--num-nodes`` of the parts takes it. {node} and {local_rank}
    follow from ``rank`` and ``ranks_per_node``.

    Raises UserError for another name in braces.
    """
    check_placeholders(command)
    node, local_rank = divmod(rank, ranks_per_node)
    numbers = (master, nodes, rank, node, local_rank, port)
    values = dict(zip(_PLACEHOLDERS, numbers, strict=True))
    return [_PLACEHOLDER.sub(lambda match: str(values[match[0]]), word) for word in command]


def check_placeholders(command: Sequence[str]) -> None:
    """Raise UserError for a name in braces that is no placeholder."""
    for name in _PLACEHOLDER.findall(" ".join(command)):
        if name not in _PLACEHOLDERS:
            raise UserError(
                f"unknown placeholder {name} in the command: choose from {', '.join(_PLACEHOLDERS)}"
            )


def node_environment(
    environment: Mapping[str, str], *, ranks: int, interface: str | None
) -> dict[str, str]:
    """Return the environment of the program of one of ``ranks`` ranks.

    The folder of this interpreter comes first in PATH. What ``environment`` does not set gets a
    default: unbuffered output, the rank's share of the cores, and ``interface`` for Gloo.
    """
    defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks))}
    gloo = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
    path = f"{os.path.dirname(sys.executable)}:{environment.get('PATH', os.defpath)}"
    return {**defaults, **gloo, **environment, "PATH": path}
