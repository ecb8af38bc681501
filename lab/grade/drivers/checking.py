"""Run the checks of a part in one rank, count its messages, and report what was found.

``run_part`` imports the student's file with ``load`` and runs each check, which yields each
``Flaw``. After each check a line on stdout, marked with ``MARK``, holds the ``Report`` so far:
the grader reads the last one, so what was found before a crash or a hang is not lost.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from .mark import MARK

_TIMEOUT = timedelta(seconds=60)
# What another rank's end makes of a message, and the use of a stand-in.
_CONSEQUENCE = re.compile(r"[Cc]onnection|[Tt]imed out|Socket|Broken pipe|MagicMock")
# Operators of torch.distributed that carry no data of their own.
_SILENT = ("barrier", "monitored_barrier_", "wait_tensor", "recv_", "recv_any_source_")

Place = tuple[str, int]  # a file of the submission, relative to its folder, and a line


@dataclass
class Flaw:
    """Something wrong: ``name`` is an entry of checks.toml, or of the audit's catalogue."""

    name: str
    evidence: str
    at: Place | None = None


@dataclass
class Check:
    """A check of a part.

    Parameters
    ----------
    title : what it looks at, to say that it passed or where the student's code stopped.
    run : gets the student's module; yields what is wrong.
    raises_as : the finding if the student's code raises an error although earlier checks passed.
    """

    title: str
    run: Callable[[Any], Iterator[Flaw]]
    raises_as: str = "raises"


@dataclass
class Report:
    """What one rank has seen so far.

    Parameters
    ----------
    passed : the titles of the checks that found nothing.
    end : "" while checks are being made; "done" after all; "fault" if one that was found ended
        them; "stopped" if an error did that nobody can judge from here.
    stopped : that error, on one line.
    """

    found: list[Flaw] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    end: str = ""
    stopped: str = ""

    def write(self) -> None:
        """Print it on a line of its own."""
        print(f"\n{MARK}{json.dumps(asdict(self))}", flush=True)


def run_part(checks: Sequence[Check], script: str, *, address: str, size: int, rank: int) -> int:
    """Join the group, import the student's file, run the checks; return 0 if all were made."""
    dist.init_process_group(
        "gloo", init_method=address, world_size=size, rank=rank, timeout=_TIMEOUT
    )
    report = Report()
    try:
        module = load(os.path.abspath(script))
        for check in checks:
            _run(check, module, report)
            report.write()
        report.end = "done"
    except Exception as error:
        traceback.print_exc()
        report.end = report.end or "stopped"
        report.stopped = report.stopped or f"{_told(error)}{_absent_text()}"
    report.write()
    if report.end != "done":
        return 1
    dist.barrier()
    return 0


def _run(check: Check, module: Any, report: Report) -> None:
    """Run a check; an error counts as found where it can only be the student's mistake."""
    found: list[Flaw] = []
    try:
        for wrong in check.run(module):  # those before an error are kept
            if wrong.name not in {earlier.name for earlier in found}:
                found.append(wrong)
    except Exception as error:
        report.stopped = f"{check.title}: {_told(error)}{_absent_text()}"
        if name := _finding_of(error, check, report):
            report.end = "fault"
            found.append(Flaw(name, report.stopped, student_place(error)))
        raise
    finally:
        report.found += found
    if not found:
        report.passed.append(check.title)


def _finding_of(error: Exception, check: Check, report: Report) -> str | None:
    """Return the finding that an error is; None if it may come from the machine or another rank."""
    if isinstance(error, NotImplementedError):
        return "not-implemented"
    # Once a check has run the same code, the environment has all that it needs.
    if not report.passed or _CONSEQUENCE.search(str(error)):
        return None
    return check.raises_as


def _told(error: BaseException) -> str:
    """Return an error on one line, with the student's line."""
    text = f"{type(error).__name__}: {error}".split("\n")[0][:200].rstrip(": ")
    place = student_place(error)
    return f"{text} ({place[0]}:{place[1]})" if place else text


# --- the student's file ---

_roots: list[str] = []


def load(script: str) -> Any:
    """Import the student's file as a module of the package that its folder is.

    Its folder and the one above are on the path, and so is ``cs336-basics``, where that course
    keeps a package of its own. Packages that are not installed are replaced by stand-ins: a kernel
    for GPUs in the same file needs not run here.
    """
    folder = os.path.dirname(script)
    above = os.path.dirname(folder)
    name = os.path.splitext(os.path.basename(script))[0]
    in_tests = os.path.basename(folder) == "tests"
    _roots.append(above if in_tests else folder)
    sys.path[:0] = [_roots[0], folder, os.path.join(_roots[0], "cs336-basics")]
    sys.meta_path.append(_Absent())
    if in_tests:
        package = sys.modules["tests"] = types.ModuleType("tests")
        package.__path__ = [folder]
        name = f"tests.{name}"
    spec = importlib.util.spec_from_file_location(name, script)
    if spec is None or spec.loader is None:
        raise ImportError(f"{script} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each package that the student's own files import and that is missing."""

    names: ClassVar[set[str]] = set()

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a stand-in, asked last of all finders."""
        top = fullname.split(".")[0]
        if top not in self.names and (path is not None or not _asked_by_student()):
            return None
        self.names.add(top)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return a module in which every name is a mock."""
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module is complete."""


class _StandIn(types.ModuleType):
    """A module in which every name can be called, used as a decorator, and derived from."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def _asked_by_student() -> bool:
    """Return whether the import that is going on stands in a file of the submission."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and _in_submission(frame.f_code.co_filename)


def _absent_text() -> str:
    if not _Absent.names:
        return ""
    return f"; these packages are not installed here: {', '.join(sorted(_Absent.names))}"


def _in_submission(file: str) -> bool:
    return any(file.startswith(root + os.sep) for root in _roots)


def student_place(error: BaseException) -> Place | None:
    """Return the innermost line of the submission that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [
        (os.path.relpath(frame.filename, _roots[0]), frame.lineno or 0)
        for frame in frames
        if _in_submission(frame.filename)
    ]
    return places[-1] if places else None


# --- messages ---


@dataclass
class Message:
    """A call of torch.distributed that sends something.

    Parameters
    ----------
    name : of its operator, for example ``allreduce_`` or ``send``.
    phase : in which part of a step it began, as set by the check.
    peer : the rank that a ``send`` goes to.
    at : the student's line.
    """

    name: str
    nbytes: int
    phase: str
    peer: int | None
    at: Place | None


class Messages(TorchDispatchMode):
    """Keeps the messages that begin while it is entered, however the student calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Message] = []
        self.phase = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Note a message, then let it begin."""
        space, _, name = func._schema.name.partition("::")
        if "c10d" in space and name not in _SILENT:
            peer = args[2] if name == "send" else None
            nbytes = _bytes_of(args[1] if name in _WITH_OUTPUT else args[0])
            self.sent.append(Message(name, nbytes, self.phase, peer, _calling_line()))
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Keep messages as those of a phase."""
        self.phase = phase
        try:
            with self:
                yield
        finally:
            self.phase = ""


# Operators whose first argument is what they receive into, and the second what they send.
_WITH_OUTPUT = (
    *("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_", "gather_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "scatter_", "alltoall_", "alltoall_base_"),
)


def _bytes_of(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    if isinstance(tensors, Iterable):
        return sum(_bytes_of(tensor) for tensor in tensors)
    return 0


def _calling_line() -> Place | None:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if _in_submission(frame.f_code.co_filename):
            return os.path.relpath(frame.f_code.co_filename, _roots[0]), frame.f_lineno
        frame = frame.f_back
    return None


def close(actual: torch.Tensor, expected: torch.Tensor, share: float = 1e-2) -> bool:
    """Return whether two tensors agree, up to a share of the largest element of ``expected``."""
    if actual.shape != expected.shape:
        return False
    limit = share * expected.abs().max().item() + 1e-7
    return bool((actual - expected).abs().max().item() <= limit)
