"""Start a comparison's runs on emulated nodes: over loopback, or over links that have a rate.

``Executors`` is a context manager; its ``run`` starts a command on some nodes and waits. Clusters
are kept for later runs: at a rate, the nodes import torch only once.
"""

import contextlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import GroupError
from common.utils.processes import GRACE_SECONDS
from lab.cluster import Cluster
from lab.compare.outcomes import describe_failure

_NODE_FLAGS = ("--master-ip", "{master}", "--master-port", "{port}", "--rank", "{rank}")


class Executors(contextlib.ExitStack):
    """Keeps the clusters of a comparison. All processes end with the ``with`` block.

    Parameters
    ----------
    most_nodes : the largest number of nodes of any run; the cluster of a rate has that many, each
        with ``ranks_per_node`` ranks.
    rates : of the links. None: loopback.

    Raises UserError, before anything runs, if this machine allows no such cluster.
    """

    def __init__(
        self, most_nodes: int, rates: Sequence[str | None] = (), *, ranks_per_node: int = 1
    ) -> None:
        super().__init__()
        self._most_nodes = most_nodes
        self._ranks_per_node = ranks_per_node
        self._clusters: dict[tuple[int, str | None], Cluster] = {}
        for rate in filter(None, rates):
            Cluster(
                most_nodes, ranks_per_node=ranks_per_node, rate=rate
            )  # starts nothing, but checks that it could

    def run(
        self,
        command: Sequence[str],
        ranks: int,
        *,
        rate: str | None,
        logs: Path,
        cwd: Path | None = None,
    ) -> str | None:
        """Run ``python command`` for that many ranks, on the first nodes, and wait for its end.

        No run is too long: ranks that wait for a silent one fail by themselves after their
        ``--timeout``, and then the others are ended.

        rate : of the nodes' links; None: over loopback. logs : the folder of the ranks' output.
        cwd : where they start; None: in the current folder.
        Returns None if all ranks succeed, else the error message of the rank that failed first.
        Raises GroupError if the cluster cannot be made.
        """
        shutil.rmtree(logs, ignore_errors=True)  # of a run that was interrupted
        # At a rate, runs on fewer nodes use a part of the largest cluster.
        size = ranks if rate is None else self._most_nodes
        if (size, rate) not in self._clusters:
            # Over loopback each rank is a new interpreter, as if a user had started it by hand.
            new = Cluster(
                size,
                ranks_per_node=1 if rate is None else self._ranks_per_node,
                rate=rate,
                loopback=rate is None,
                fresh=rate is None,
            )
            self._clusters[size, rate] = self.enter_context(new)
        cluster = self._clusters[size, rate]
        program = [sys.executable, *command]
        if ranks > 1:
            program += [*_NODE_FLAGS, "--num-nodes", str(ranks)]
        try:
            cluster.start(program, ranks=range(ranks), logs=logs, cwd=cwd)
            ends = cluster.wait(grace_seconds=GRACE_SECONDS)
        except GroupError as error:
            self._end_clusters()
            return str(error)
        failed = {end.rank: end.status for end in ends if end.status}
        return describe_failure(failed, {rank: cluster.log(rank, logs) for rank in failed})

    def _end_clusters(self) -> None:
        """End what still runs; the next run gets a new cluster."""
        self._clusters.clear()
        with contextlib.suppress(GroupError):
            self.close()
