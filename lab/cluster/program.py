"""What a node runs: a command with its placeholders filled in, in a fork of an interpreter that has torch, or started anew.

``fill_in`` fills the placeholders, ``parse_python`` tells whether a command can be forked, ``preload_modules`` imports what all
forks share, ``reset_forked_state`` undoes in a fork what a fresh interpreter would not have, ``PythonProgram.run`` runs it.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from common.errors import UserError
from common.utils.paths import REPOSITORY
from common.utils.processes import end_process
from common.utils.system import usable_cores

PLACEHOLDERS = ("master", "nodes", "rank", "port")
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_INTERPRETERS = ("python", "python3")
_INTERRUPTED = 130
_OWN_PACKAGES = ("common", "lab")
_PRELOADED = ("common.experiment.run", "common.models.vgg", "sklearn.datasets", "torch._dynamo")


@dataclass(frozen=True)
class PythonProgram:
    """A python command: a file, or a ``module``, and its arguments."""

    target: str
    arguments: tuple[str, ...]
    module: bool

    def run(self) -> NoReturn:
        """Become this program, as if the interpreter had been started with it, and end the process with its status."""
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)  # nothing replaces them in a fork
            stream.reconfigure(line_buffering=True)
        sys.argv = [self.target, *self.arguments]
        sys.path.insert(0, os.getcwd() if self.module else str(Path(self.target).resolve().parent))
        status = 0
        try:
            if self.module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.target, run_name="__main__")
        except BaseException as error:
            status = _status(error)
        # As at an interpreter's end, but without clearing all modules: with memory shared since a fork that takes seconds.
        threading._shutdown()  # type: ignore[attr-defined]  # private: joins all threads, and there is no public call
        end_process(status)


def _status(error: BaseException) -> int:
    """Print what an interpreter prints when this error ends its program, and return the interpreter's exit status."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frames = frames.tb_next  # those above the program's own
    traceback.print_exception(type(error), error, frames or error.__traceback__)
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def parse_python(command: Sequence[str]) -> PythonProgram | None:
    """Return the command as a program that a forked interpreter can become; None where it is another interpreter's, or has
    options of the interpreter's own."""
    if not _is_this_interpreter(command[0]):
        return None
    arguments = list(command[1:])
    if arguments[:1] == ["-u"]:
        arguments = arguments[1:]
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        return PythonProgram(arguments[1], tuple(arguments[2:]), module=True)
    if arguments and not arguments[0].startswith("-") and Path(arguments[0]).is_file():
        return PythonProgram(arguments[0], tuple(arguments[1:]), module=False)
    return None


def _is_this_interpreter(word: str) -> bool:
    """Not by resolving links: an environment's python is a link to another interpreter that has none of its packages."""
    return word in _INTERPRETERS or (
        os.path.basename(word).startswith("python")
        and os.path.dirname(os.path.abspath(word)) == os.path.dirname(sys.executable)
    )


def preload_modules() -> None:
    """Import what every node of a python command would; nothing may compute here, since threads do not survive a fork."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in common/cli.py, before torch
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # so that no node's collector touches, and thereby copies, memory that all share


def reset_forked_state(environment: Mapping[str, str], target: Path) -> None:
    """Set what a new interpreter would take from its environment or draw at random. A program outside this repository must not
    find the repository's modules: it may have others of the same name."""
    import numpy as np
    import torch

    np.random.seed(None)  # forks of one process would all draw the same
    torch.seed()
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if str(REPOSITORY) in sys.path:
        sys.path.remove(str(REPOSITORY))  # the supervisor put it there
    if not target.resolve().is_relative_to(REPOSITORY):
        for name in [name for name in sys.modules if name.partition(".")[0] in _OWN_PACKAGES]:
            del sys.modules[name]


def fill_in(command: Sequence[str], *, master: str, nodes: int, rank: int, port: int) -> list[str]:
    """Return the command with {master}, {nodes}, {rank} and {port} filled in. UserError on another word in braces."""
    check_placeholders(command)
    values = {"master": master, "nodes": nodes, "rank": rank, "port": port}
    return [_PLACEHOLDER.sub(lambda match: str(values[match[1]]), word) for word in command]


def check_placeholders(command: Sequence[str]) -> None:
    """UserError on a word in braces that nothing can be filled in for."""
    for name in (name for word in command for name in _PLACEHOLDER.findall(word)):
        if name not in PLACEHOLDERS:
            raise UserError(
                f"{{{name}}} in the command: choose from {', '.join(f'{{{one}}}' for one in PLACEHOLDERS)}"
            )


def node_environment(
    environment: dict[str, str], *, nodes: int, interface: str | None
) -> dict[str, str]:
    """Return what a node's program finds: the interpreter's own programs first in PATH, output at once, threads that don't fight
    for the cores, and for Gloo the interface of the cluster, unless the user has said otherwise."""
    defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(max(1, usable_cores() // nodes))}
    if interface is not None:
        defaults["GLOO_SOCKET_IFNAME"] = interface
    path = f"{os.path.dirname(sys.executable)}:{environment.get('PATH', os.defpath)}"
    return defaults | environment | {"PATH": path}
