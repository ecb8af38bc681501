"""Run the checks of a part in one rank, and print what they returned.

``run_part`` imports the student's file and runs each check. After each one a line on stdout, marked
with ``MARK``, holds its ``CheckRecord``. Nothing here says whether the student is right: judge.py
does, in another process, since the student's code can print such a line as well.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import traceback
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .checks import Check, Rank
from .mark import MARK
from .student import Place, absent_text, load, student_place
from .values import encoded

_TIMEOUT = timedelta(seconds=60)
# What another rank's end makes of a message, and the use of a stand-in.
_CONSEQUENCE = re.compile(r"[Cc]onnection|[Tt]imed out|Socket|Broken pipe|MagicMock")


@dataclass
class StudentError:
    """An error of the student's code.

    Parameters
    ----------
    text : the error on one line, with the check and the student's line.
    unfinished : whether it says that the function is not implemented.
    follows : whether it may come from the machine, from another rank, or from a stand-in.
    """

    text: str
    at: Place | None
    unfinished: bool = False
    follows: bool = False


@dataclass
class CheckRecord:
    """What a check returned on this rank, or the error that ended it.

    check : its place in the part's list; 0 also for an error of the import.
    values : as ``encoded``.
    """

    check: int
    values: list[Any] | None = None
    error: StudentError | None = None

    def write(self) -> None:
        """Print it on a line of its own."""
        print(f"\n{MARK}{json.dumps(asdict(self))}", flush=True)


def read_rank(number: int, size: int) -> Rank:
    """Return this rank with its secret numbers, which come through stdin, to its end."""
    secret = json.loads(sys.stdin.buffer.read())
    return Rank(number, size, secret["seed"], secret["common"])


def load_driver(file: str) -> types.ModuleType:
    """Import a course's driver. Raises ImportError for what is not a Python file."""
    spec = importlib.util.spec_from_file_location("_lab_course_driver", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file: give the driver an ending .py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_part(driver: Any, part: str, script: str, *, address: str, rank: Rank) -> int:
    """Join the group, import the student's file, run the checks; return 0 if all were run.

    driver : its module; see checks.py.
    """
    checks: Sequence[Check] = driver.PARTS[part]
    dist.init_process_group(
        "gloo", init_method=address, world_size=rank.size, rank=rank.number, timeout=_TIMEOUT
    )
    record = CheckRecord(0)
    try:
        module = load(os.path.abspath(script), getattr(driver, "PATHS", ()))
    except Exception as error:
        traceback.print_exc()
        record.error = StudentError(f"{_told(error)}{absent_text()}", None, follows=True)
        record.write()
        return 1
    for number, check in enumerate(checks):
        record = CheckRecord(number)
        try:
            record.values = encoded(check.run(module, rank))
        except Exception as error:
            traceback.print_exc()
            record.error = StudentError(
                text=f"{check.title}: {_told(error)}{absent_text()}",
                at=student_place(error),
                unfinished=isinstance(error, NotImplementedError),
                follows=_CONSEQUENCE.search(str(error)) is not None,
            )
        record.write()
        if record.error:
            return 1
    dist.barrier()
    return 0


def _told(error: BaseException) -> str:
    """Return an error on one line, with the student's line."""
    text = f"{type(error).__name__}: {error}".split("\n")[0][:200].rstrip(": ")
    place = student_place(error)
    return f"{text} ({place[0]}:{place[1]})" if place else text
