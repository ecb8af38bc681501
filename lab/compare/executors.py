"""Start a comparison's runs: over loopback, or on emulated nodes with links of a rate (lab/cluster).

``Executors`` is a context manager; ``run`` starts a command on some nodes and waits. The cluster of
a rate is made when it is first needed and kept, so that torch is imported once for all runs on it.
"""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import GroupError
from common.utils.processes import find_root_failure
from lab.cluster import Cluster
from lab.processes.local_ranks import run_nodes

_NODE_FLAGS = ("--master-ip", "{master}", "--master-port", "{port}", "--rank", "{rank}")


class Executors:
    """Keeps a cluster for each rate. All processes end with the ``with``.

    Parameters
    ----------
    most_nodes : the largest number of nodes of any run; each cluster has that many.
    rates : of the links, one cluster for each.

    Raises UserError, before anything runs, where this machine allows no such cluster.
    """

    def __init__(self, most_nodes: int, rates: Sequence[str] = ()) -> None:
        self._most_nodes = most_nodes
        for rate in rates:
            Cluster(most_nodes, rate=rate)
        self._clusters: dict[str, Any] = {}

    def __enter__(self) -> "Executors":
        return self

    def __exit__(self, *_error: object) -> None:
        for rate in list(self._clusters):
            self._close(rate)

    def run(
        self,
        command: Sequence[str],
        nodes: int,
        *,
        rate: str | None,
        logs: Path,
        limit_seconds: float,
    ) -> str | None:
        """Run ``python command`` on ``nodes`` nodes whose links have this ``rate`` (None: over loopback).

        logs : start of the names of the output files. Returns None where all ended well, else the error message of the node
        that failed first. Raises GroupError where the cluster cannot be made.
        """
        if rate is None or nodes == 1:
            return run_nodes(command, nodes, logs=logs, limit_seconds=limit_seconds)
        shutil.rmtree(logs, ignore_errors=True)  # of a run that was interrupted
        cluster = self._cluster(rate, logs)
        try:
            cluster.start(
                ["python", *command, *_NODE_FLAGS, "--num-nodes", str(nodes)],
                nodes=range(nodes),
                logs=logs,
            )
            ends = cluster.wait(limit_seconds=limit_seconds, stop_at_failure=True)
        except (GroupError, TimeoutError) as error:
            self._close(rate)  # ends what still runs; the next run gets a new cluster
            if isinstance(error, GroupError):
                return str(error)
            return f"not done within {limit_seconds:g} s: {error}"
        failed = {end.node: end.status for end in ends if end.status != 0}
        if not failed:
            return None
        texts = {
            node: cluster.log(node, logs).read_text(encoding="utf-8", errors="replace")
            for node in failed
        }
        culprit, message = find_root_failure(list(failed), failed, texts, name="rank")
        return f"{message} (its output: {cluster.log(culprit, logs)})"

    def _cluster(self, rate: str, logs: Path) -> Cluster:
        if rate not in self._clusters:
            self._clusters[rate] = Cluster(self._most_nodes, rate=rate, logs=logs).__enter__()
        return self._clusters[rate]

    def _close(self, rate: str) -> None:
        with contextlib.suppress(GroupError):
            self._clusters.pop(rate).close()
