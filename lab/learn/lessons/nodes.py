"""Run a student's program on emulated nodes, undisturbed or not, or on ranks of this machine."""

import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import GroupError, UserError
from lab.cluster import Cluster
from lab.learn.student_file import Mistake, Namespace, NotMeasured, StudentFile
from lab.terminal import say

_LIMIT_SECONDS = 120.0
_GRACE_SECONDS = 3.0
# Of what the links need: less was not all sent or timed, and more is no longer the links' time.
_LEAST = 0.9
_MOST = 2.0


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


def check_limits(text: str, seconds: float, *, link_seconds: float, what: str) -> None:
    """Raise Mistake if a time is below what the links need, NotMeasured if it is twice as long.

    text : what rank 0 has printed. what : was measured, e.g. "an exchange".
    """
    if seconds < _LEAST * link_seconds:
        raise Mistake(
            f"{what} takes {link_seconds:.3g} s on these links, and {seconds:.3f} s were measured: "
            f"no link is faster than its rate, so not all was sent or not all was timed. Rank 0 "
            f"printed on 4 nodes:\n{text[-500:]}"
        )
    if seconds > _MOST * link_seconds:
        raise NotMeasured(
            f"{what} takes {link_seconds:.3g} s on these links, and {seconds:.3f} s were measured, "
            f"more than {_MOST:g} times that. The messages are right, so something else took the "
            "time: end other programs on this machine, and check again"
        )


def _run_here(_names: Namespace, path: Path) -> str:
    import torch.distributed as dist

    from lab.learn.program import run_program

    arguments = ["127.0.0.1:0", str(dist.get_world_size()), str(dist.get_rank())]
    return run_program(path, arguments).printed
