"""Run a student's program on emulated nodes, undisturbed or not, or on ranks of this machine."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.cluster import Cluster
from lab.learn.student_file import Mistake, Namespace, StudentFile

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


def run_on_ranks(student: StudentFile, ranks: int) -> list[str]:
    """Return what the program prints on ranks of this machine, without links of a known rate."""
    return student.on_ranks(ranks, _run_here, student.path, limit_seconds=_LIMIT_SECONDS)


def _run_here(_names: Namespace, path: Path) -> str:
    import torch.distributed as dist

    from lab.learn.program import run_program

    arguments = ["127.0.0.1:0", str(dist.get_world_size()), str(dist.get_rank())]
    return run_program(path, arguments).printed
