"""A student's file: find its blanks, and run it on ranks of its own, with a limit.

Whatever is wrong with it becomes a ``Mistake``, with the student's own line.
"""

import ast
import faulthandler
import re
import reprlib
import runpy
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from common.errors import file_errors

Say = Callable[[str], None]
_LOOK_SECONDS = 0.01
_AFTER_SECONDS = 2.0  # from the stacks of a hang to the end of the ranks


class Mistake(Exception):  # noqa: N818 - the student's mistake
    """The student's code or answer is wrong; the message says what it does."""


class NotMeasured(Exception):  # noqa: N818 - nobody's mistake
    """What this machine measured proves nothing; the message says why."""


class Namespace(dict):
    """The names that a student's file defines."""

    def __missing__(self, name: str) -> Any:
        raise Mistake(f"there is no {name} in the file any more: the check calls it")

    def call_for_number(self, name: str, *inputs: Any) -> float:
        """Call a function of the student's. Raises Mistake unless it returns a number."""
        returned = self[name](*inputs)
        if isinstance(returned, bool) or not isinstance(returned, int | float):
            raise Mistake(
                f"{shown_call(name, *inputs)} returns {shown(returned)}, and must return a number"
            )
        return returned


def shown_call(name: str, *inputs: Any, **options: Any) -> str:
    """Return a call as a message shows it, e.g. "exchange_seconds(4, 36.92, 1.0)"."""
    told = [shown(value) for value in inputs]
    told += [f"{key}={shown(value)}" for key, value in options.items()]
    return f"{name}({', '.join(told)})"


def shown(value: object) -> str:
    """Return a value as a message shows it; of a model or a function only what it is."""
    if value is None or isinstance(value, int | float | str | list | tuple):
        return reprlib.repr(value)
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"a tensor of shape {tuple(shape)}"
    return f"a {type(value).__name__}"


@dataclass(frozen=True)
class StudentFile:
    """A student's file."""

    path: Path

    def blanks(self, *, outside: Sequence[str] = ()) -> list[int]:
        """Return the lines whose ``...`` waits for code; an index as in x[..., 0] is none.

        outside : functions that do not count, nor do the file's ANSWERS.

        Raises Mistake if the file is not valid Python.
        """
        with file_errors(f"{self.path} cannot be read"):
            text = self.path.read_text(encoding="utf-8")
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise Mistake(f"line {error.lineno} is not valid Python: {error.msg}") from error
        skipped: set[ast.AST] = set()
        for node in ast.walk(tree):
            ignored = isinstance(node, ast.FunctionDef) and node.name in outside
            if ignored or isinstance(node, ast.Subscript) or _is_answers(node):
                skipped.update(ast.walk(node))
        blanks = [node for node in ast.walk(tree) if _is_ellipsis(node) and node not in skipped]
        return sorted(blank.lineno for blank in blanks)

    def load(self) -> Namespace:
        """Run the file, not as a program, and return what it defines."""
        return Namespace(runpy.run_path(str(self.path), run_name="student"))

    def on_ranks(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        limit_seconds: float = 30.0,
    ) -> list[Any]:
        """Return ``function(student, *arguments)`` of each of ``size`` ranks of a Gloo group.

        student : what the file defines, by name. A rank that is done waits for the others, so that
        a message too few is a hang, as in a training.
        Raises Mistake, with each rank's line, if a rank fails or exceeds ``limit_seconds``.
        """
        from lab.proofs import RankError, run_ranks

        deadline = time.monotonic() + limit_seconds
        with tempfile.TemporaryDirectory() as folder:
            try:
                return run_ranks(
                    size,
                    _on_rank,
                    *(self, Path(folder), deadline, function, arguments),
                    timeout_seconds=limit_seconds + _AFTER_SECONDS,
                )
            except RankError as error:
                stacks = {path.name: path.read_text() for path in Path(folder).glob("rank *")}
                text = str(error).strip()
                failed = re.match(r"(rank \d+) of \d+:\n", text)
                in_time = failed is not None and not stacks.get(failed[1])
                hangs = any(stacks.values()) and not in_time  # else others wait for that rank
                message = self._hang(stacks) if hangs else self._failure(text)
                raise Mistake(message) from None

    def _hang(self, stacks: Mapping[str, str]) -> str:
        """Return where each rank was when the time was over.

        stacks : each rank's stack then, "" if the rank had already failed.
        """
        lines = ["the ranks hang. A collective needs every rank:"]
        for rank, stack in sorted(stacks.items()):
            places = self._places(stack)
            if places:
                state = places[0]
            elif stack:  # it waits in ``_on_rank``
                state = "is done"
            else:
                state = "has failed"
            lines.append(f"  {rank}: {state}")
        return "\n".join(lines)

    def _failure(self, error: str) -> str:
        """Return which rank failed, where and why, from the text of a RankError."""
        who, _, trace = error.partition(":\n")
        *_, last_line = ["", *trace.splitlines()]
        places = self._places(trace)[-1:]
        mistake = re.search(r"^lab\S+Mistake: (.*)", trace, re.MULTILINE | re.DOTALL)
        if mistake:  # it says by itself what is wrong, and where
            places = []
            last_line = mistake[1]
        told = [who.removesuffix("rank 0 of 1"), *places, last_line]
        return ": ".join(text for text in told if text)

    def _places(self, stack: str) -> list[str]:
        """Return the student's lines in a traceback or a dump of faulthandler, in its order.

        Files beside this one are the student's, too: lesson 5 trains with lesson 3's.
        """
        folder = re.escape(self.path.parent.name)
        pattern = rf'[/"]{folder}/([^/"]+\.py)", line (\d+),? in (\S+)'
        places: list[str] = []
        for file, number, function in re.findall(pattern, stack):
            path = self.path.with_name(file)
            if not path.exists():
                continue
            line = path.read_text(encoding="utf-8").splitlines()[int(number) - 1].strip()
            prefix = "" if file == self.path.name else f"{file}, "
            places.append(f"{prefix}line {number}, in {function}: {line}")
        return places


def _in_words(error: Exception, folder: Path) -> str | None:
    """Return which call of the student's fails, with its inputs and its line; None without one.

    folder : of the student's files.
    """
    call: str | None = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        path = Path(code.co_filename)
        in_comprehension = code.co_name.startswith("<") and code.co_name != "<module>"
        if path.parent.name != folder.name or not path.exists() or in_comprehension:
            continue
        names = code.co_varnames[: code.co_argcount]
        inputs = [frame.f_locals.get(name) for name in names if name != "self"]
        told = "the program" if code.co_name == "<module>" else shown_call(code.co_name, *inputs)
        line = path.read_text(encoding="utf-8").splitlines()[number - 1].strip()
        call = f"{told} fails in line {number} of {path.name} ({line})"
    if call is None:
        return None
    return f"{call}: {type(error).__name__}: {error}{_meaning(error)}"


def _meaning(error: Exception) -> str:
    """Return what Python's words mean here, where they do not say it; else ""."""
    if "NoneType" in str(error):
        return (
            ". Something is None there, such as a gradient that backward() has not computed yet, "
            "or what dist.all_reduce returns: it changes its tensor"
        )
    return ""


def _is_answers(node: ast.AST) -> bool:
    """Return whether a statement sets ANSWERS."""
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ANSWERS"


def _is_ellipsis(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and node.value is ...


def _on_rank(
    rank: int,
    student: StudentFile,
    folder: Path,
    deadline: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    """Run the file and the function on this rank, and wait for the others.

    At the deadline the file "rank R" in ``folder`` gets this rank's stack; it stays empty if the
    rank ends before. A file "done R" says that the function has returned.
    """
    import torch.distributed as dist

    with (folder / f"rank {rank}").open("w") as stacks:
        faulthandler.dump_traceback_later(max(0.1, deadline - time.monotonic()), file=stacks)
        try:
            found = _run_function(student, function, arguments)
            (folder / f"done {rank}").touch()
            while len([*folder.glob("done *")]) < dist.get_world_size():
                time.sleep(_LOOK_SECONDS)  # a collective would go with one too many of another rank
            return found
        finally:
            faulthandler.cancel_dump_traceback_later()


def _run_function(
    student: StudentFile, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """Run the file and the function. Raises Mistake with the student's line if that fails."""
    try:
        return function(student.load(), *arguments)
    except Mistake:
        raise
    except Exception as error:
        sentence = _in_words(error, student.path.parent)
        if sentence is None:
            raise
        raise Mistake(sentence) from error
