"""The student's file: its import, stand-ins for what it lacks, and lines of it in the stack."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Sequence
from typing import Any, ClassVar
from unittest.mock import MagicMock

# A file of the submission, relative to its folder, and a line.
Place = tuple[str, int]

_roots: list[str] = []


def load(script: str, paths: Sequence[str]) -> Any:
    """Import the student's file as a module of the package that its folder is.

    Its folder is on the path; where that is ``tests``, so is the one above. Packages that are not
    installed are replaced by stand-ins: a kernel for GPUs in the same file needs not run here.

    paths : more folders of the submission in which imports are found.
    """
    folder = os.path.dirname(script)
    above = os.path.dirname(folder)
    name = os.path.splitext(os.path.basename(script))[0]
    in_tests = os.path.basename(folder) == "tests"
    _roots.append(above if in_tests else folder)
    sys.path[:0] = [_roots[0], folder, *(os.path.join(_roots[0], path) for path in paths)]
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

    def find_distributions(self, context: Any) -> list[importlib.metadata.Distribution]:
        """Return one for a package that is not installed, if the student's file asks for it."""
        return [_Unversioned()] if context.name and _asked_by_student() else []

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return a module in which every name is a mock."""
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module is complete."""


class _Unversioned(importlib.metadata.Distribution):
    """What a package says of itself that was copied, not installed."""

    def read_text(self, filename: str) -> str:
        """Return its metadata."""
        return "Version: 0\n"

    def locate_file(self, path: Any) -> Any:
        """Return the path, of which nothing is asked."""
        return path


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


def absent_text() -> str:
    """Return which packages have stand-ins, to end a sentence; "" if none has."""
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
    if not places:
        return None
    return places[-1]


def calling_line() -> Place | None:
    """Return the innermost line of the submission that is being run."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if _in_submission(frame.f_code.co_filename):
            return os.path.relpath(frame.f_code.co_filename, _roots[0]), frame.f_lineno
        frame = frame.f_back
    return None
