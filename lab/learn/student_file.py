"""A student's file: find its blanks, and run it on ranks of its own, with a limit.

Whatever is wrong with it becomes a ``Wrong``, with the student's own line.
"""

import ast
import faulthandler
import re
import runpy
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import count, file_errors

Say = Callable[[str], None]
_AFTER_SECONDS = 2.0  # from the stacks of a hang to the end of the ranks


class Wrong(Exception):  # noqa: N818 - the student's mistake
    """The student's code or answer is wrong; the message says what it does."""


class Namespace(dict):
    """The names that a student's file defines."""

    def __missing__(self, name: str) -> Any:
        raise Wrong(f"there is no {name} in the file any more: the check calls it")


@dataclass(frozen=True)
class StudentFile:
    """A student's file. ``blanks`` are the lines that still hold a ``...``."""

    path: Path

    def blanks(self) -> list[int]:
        """Return the lines whose ``...`` waits for code; an index as in x[..., 0] is none.

        The file's ANSWERS do not count. Raises Wrong if the file is no Python.
        """
        with file_errors(f"{self.path} cannot be read"):
            text = self.path.read_text(encoding="utf-8")
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise Wrong(f"line {error.lineno} is no Python: {error.msg}") from error
        skipped = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript)
            or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ANSWERS")
            for inner in ast.walk(node)
        }
        return sorted(
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value is ... and node not in skipped
        )

    def on_ranks(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        limit_seconds: float = 20.0,
    ) -> list[Any]:
        """Return ``function(student, *arguments)`` of each of ``size`` ranks of a Gloo group.

        student : what the file defines, by name. The function must be importable. A rank that is
        done waits for the others, so that a message too few is a hang, as in a training.
        Raises Wrong if a rank fails, or still runs after ``limit_seconds``: with each rank's line.
        """
        from lab.proofs import RankError, run_ranks

        with tempfile.TemporaryDirectory() as folder:
            deadline = time.monotonic() + limit_seconds
            try:
                return run_ranks(
                    size,
                    _on_rank,
                    *(self.path, Path(folder), deadline, function, arguments),
                    timeout_seconds=limit_seconds + _AFTER_SECONDS,
                )
            except RankError as error:
                if places := self._places_in_hang(size, Path(folder)):
                    raise Wrong(
                        f"{count(size, 'rank')} still ran after {limit_seconds:g} s. A collective "
                        f"must be called by every rank:\n{places}"
                    ) from None
                who, _, trace = str(error).partition(":\n")
                raise Wrong(f"{who}: {trace.rpartition('Wrong: ')[2].strip()}") from None

    def _places_in_hang(self, size: int, folder: Path) -> str:
        """Return where each rank was when the deadline passed; nothing if no rank got there."""
        places = {}
        for rank in range(size):
            stack = (folder / f"{rank}").read_text() if (folder / f"{rank}").exists() else ""
            match = re.search(rf'{re.escape(self.path.name)}", line (\d+) in (.+)', stack)
            places[rank] = self._place(int(match[1]), match[2]) if match else "is done"
            if not stack:
                places[rank] = "has ended"
        if set(places.values()) == {"has ended"}:
            return ""
        return "\n".join(f"  rank {rank}: {place}" for rank, place in places.items())

    def _place(self, line: int, function: str) -> str:
        return f"line {line}, in {function}: {self.path.read_text().splitlines()[line - 1].strip()}"

    def load(self) -> Namespace:
        """Run the file, not as a program, and return what it defines."""
        return Namespace(runpy.run_path(str(self.path), run_name="student"))

    def describe(self, error: BaseException) -> str:
        """Return an error with the student's line that led to it."""
        what = "".join(traceback.format_exception_only(error)).strip()
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).name == self.path.name
        ]
        return f"{self._place(frames[-1].lineno or 1, frames[-1].name)}: {what}" if frames else what


def _on_rank(
    rank: int, path: Path, folder: Path, deadline: float, function: Any, arguments: Any
) -> Any:
    import torch.distributed as dist

    student = StudentFile(path)
    with (folder / f"{rank}").open("w") as stacks:
        faulthandler.dump_traceback_later(max(0.1, deadline - time.monotonic()), file=stacks)
        try:
            found = function(student.load(), *arguments)
            dist.barrier()
            return found
        except Wrong:
            raise
        except BaseException as error:
            raise Wrong(student.describe(error)) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
