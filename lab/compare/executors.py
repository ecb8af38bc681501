"""Start a comparison's runs, over loopback or on emulated nodes whose links have a rate.

``Executors`` is a context manager; its ``run`` starts a command on some nodes and waits. The first
run at a rate makes a cluster, which is kept so that the nodes import torch only once.
"""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from common.distributed.spawn import rank_commands, run_local_ranks
from common.errors import GroupError
from common.utils.atomic_files import regular_target
from common.utils.system import free_port
from lab.cluster import Cluster
from lab.compare.outcomes import describe_failure

_NODE_FLAGS = ("--master-ip", "{master}", "--master-port", "{port}", "--rank", "{rank}")


class Executors(contextlib.ExitStack):
    """Keeps a cluster for each rate. All processes end with the ``with`` block.

    Parameters
    ----------
    most_nodes : the largest number of nodes of any run; each cluster has that many.
    rates : of the links; each has its own cluster. None: loopback.

    Raises UserError, before anything runs, if this machine allows no such cluster.
    """

    def __init__(self, most_nodes: int, rates: Sequence[str | None] = ()) -> None:
        super().__init__()
        self._most_nodes = most_nodes
        self._clusters: dict[str, Cluster] = {}
        for rate in filter(None, rates):
            Cluster(most_nodes, rate=rate)

    def run(
        self,
        command: Sequence[str],
        nodes: int,
        *,
        rate: str | None,
        logs: Path,
        limit_seconds: float,
    ) -> str | None:
        """Run ``python command`` on ``nodes`` nodes and wait for its end.

        rate : of their links; None: over loopback. logs : start of the names of the output files.
        Returns None if all nodes succeed, else the error message of the node that failed first.
        Raises GroupError if the cluster cannot be made.
        """
        if rate is None or nodes == 1:
            return _run_over_loopback(command, nodes, logs=logs, limit_seconds=limit_seconds)
        shutil.rmtree(logs, ignore_errors=True)  # of a run that was interrupted
        if rate not in self._clusters:
            new = Cluster(self._most_nodes, rate=rate, logs=logs)
            self._clusters[rate] = self.enter_context(new)
        cluster = self._clusters[rate]
        try:
            cluster.start(
                ["python", *command, *_NODE_FLAGS, "--num-nodes", str(nodes)],
                nodes=range(nodes),
                logs=logs,
            )
            ends = cluster.wait(limit_seconds=limit_seconds, stop_at_failure=True)
        except (GroupError, TimeoutError) as error:
            self._clusters.clear()  # the next run gets a new cluster
            with contextlib.suppress(GroupError):
                self.close()  # ends what still runs
            late = isinstance(error, TimeoutError)
            return f"stopped after {limit_seconds:g} s, the limit: {error}" if late else str(error)
        failed = {end.node: end.status for end in ends if end.status != 0}
        return describe_failure(failed, {node: cluster.log(node, logs) for node in failed})


def _run_over_loopback(
    command: Sequence[str], nodes: int, *, logs: Path, limit_seconds: float
) -> str | None:
    """As ``Executors.run``; the output of rank r goes to ``logs``-rank<r>.txt."""
    logs.parent.mkdir(parents=True, exist_ok=True)
    paths = {rank: logs.with_name(f"{logs.name}-rank{rank}.txt") for rank in range(nodes)}
    with contextlib.ExitStack() as files:
        exits = run_local_ranks(
            rank_commands(command, nodes, port=free_port(address="127.0.0.1")),
            outputs=[
                files.enter_context(regular_target(path).open("wb")) for path in paths.values()
            ],
            limit_seconds=limit_seconds,
        )
    if exits.timed_out:
        return f"stopped after {limit_seconds:g} s, the limit of a run"
    return describe_failure({rank: exits.statuses[rank] for rank in exits.failed}, paths)
