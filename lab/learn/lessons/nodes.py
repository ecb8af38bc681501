"""Run a student's program on emulated nodes, undisturbed or not, or on ranks of this machine."""

import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import GroupError, UserError
from lab.cluster import Cluster
from lab.learn.student_file import Mistake, Namespace, StudentFile
from lab.terminal import say

_LIMIT_SECONDS = 120.0
_GRACE_SECONDS = 3.0


def run_on_nodes(
    program: Path,
    nodes: int,
    arguments: Sequence[str] = (),
    *,
    disturb: Callable[[Cluster], object] = lambda cluster: None,
    **options: Any,
) -> list[str]:
    """Return what each node's program prints; where one fails, the others have 3 s to do so, too.

    arguments : after address, nodes and rank.
    disturb : called once the programs run.
    options : of ``Cluster``.

    Raises UserError or GroupError without an emulated cluster, Mistake if a program does not end.
    """
    places = ("{master}:{port}", "{nodes}", "{rank}")
    command = [sys.executable, str(program), *places, *arguments]
    with tempfile.TemporaryDirectory() as logs, Cluster(nodes, **options) as cluster:
        cluster.start(command, logs=Path(logs))
        disturb(cluster)
        try:
            cluster.wait(limit_seconds=_LIMIT_SECONDS, grace_seconds=_GRACE_SECONDS)
        except TimeoutError as error:
            raise Mistake(f"{error}. Has every wait a limit, and do the ranks agree?") from error
        return [cluster.output(node) for node in range(nodes)]


class Printed(NamedTuple):
    """What rank 0 has printed.

    seconds : those that it has measured.
    emulated : whether the links had a known rate, so that they mean something.
    """

    text: str
    seconds: list[float]
    emulated: bool


def print_seconds(student: StudentFile, pattern: str) -> Printed:
    """Run the program on 4 nodes at 1 Gbit/s; without an emulated cluster on 2 ranks here.

    pattern : of a measured time in what it prints. Raises Mistake if rank 0 prints none.
    """
    emulated = True
    try:
        text, *_ = run_on_nodes(student.path, 4, rate="1gbit")
    except (UserError, GroupError) as error:
        say(f"not measured here, but on another machine: {error}")
        emulated = False
        text, *_ = student.on_ranks(2, _run_here, student.path, limit_seconds=_LIMIT_SECONDS)
    seconds = [float(found) for found in re.findall(pattern, text)]
    if not seconds:
        raise Mistake(f"rank 0 printed no measured time, but:\n{text[-1000:]}")
    return Printed(text, seconds, emulated)


def _run_here(_names: Namespace, path: Path) -> str:
    import torch.distributed as dist

    from lab.learn.program import run_program

    arguments = ["127.0.0.1:0", str(dist.get_world_size()), str(dist.get_rank())]
    return run_program(path, arguments).printed
