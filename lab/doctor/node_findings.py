"""Results of the nodes' exchange: missing nodes, pairs that cannot connect, and differences.

``own_facts`` returns what a node sends to the others. ``results_of`` turns what ``connect_nodes``
returns into results, the same on every node.
"""

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from common.distributed.gpus import Peer, compare_gpus
from common.utils.environment import git, package_version
from common.utils.grouping import grouped
from common.utils.system import usable_cores
from lab.doctor.check_result import FAILURE, OK, WARNING, CheckRequest, CheckResult
from lab.doctor.files import code_digest, dataset_fact
from lab.doctor.machine import torch_facts
from lab.doctor.reception import NodeReport

_FAR_SECONDS = 1.0  # clocks further apart: times in the logs of two nodes cannot be compared
_MOST_NAMED = 8


def own_facts(request: CheckRequest) -> dict[str, Any]:
    """Return what this node sends to the others, as plain values."""
    torch = torch_facts()
    return {
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "torchvision": package_version("torchvision"),
        "commit": git("rev-parse", "--short", "HEAD"),
        "code": code_digest(),
        "dataset": "not checked" if torch.error is not None else dataset_fact(request),
        "gpus": len(torch.gpus),
        "gpu_ids": " ".join(torch.gpu_ids),
        "cores": usable_cores(),
    }


def results_of(
    request: CheckRequest, nodes_by_rank: Mapping[int, NodeReport], problems: Sequence[str]
) -> list[CheckResult]:
    """Return the results of the checks between nodes, from what ``connect_nodes`` returned."""
    attendance = _attendance(request, nodes_by_rank, problems)
    nodes = [nodes_by_rank[rank] for rank in sorted(nodes_by_rank)]
    if len(nodes) < 2:
        return [attendance, *([_cores(nodes)] if nodes else [])]
    checks = (_connections, _clocks, _versions, _code, _dataset, _backend, _cores)
    return [attendance, *(check(nodes) for check in checks)]


def _attendance(
    request: CheckRequest, nodes: Mapping[int, NodeReport], problems: Sequence[str]
) -> CheckResult:
    """Check that all nodes connected."""
    if not nodes:
        text = "; ".join(problems)
        return CheckResult("nodes", FAILURE, text, _remedy_if_alone(request, text))
    missing = sorted({*range(request.num_nodes)} - nodes.keys())
    text = (
        f"{len(nodes)} of {request.num_nodes} nodes connected at "
        f"{request.master_ip}:{request.master_port}"
    )
    if not missing and not problems:
        return CheckResult("nodes", OK, text)
    if missing:
        text += f"; missing: {_ranks(missing)}"
    return CheckResult(
        "nodes",
        FAILURE,
        "; ".join([text, *problems]),
        "start lab doctor on every node within --timeout, with the same --master-ip and "
        "--num-nodes everywhere and a different --rank on each",
    )


def _remedy_if_alone(request: CheckRequest, problem: str) -> str:
    """Return what to do on a node that reached no other node, or that rank 0 refused."""
    if "started twice" in problem or "--num-nodes" in problem:
        return "give every node the same --num-nodes and a different --rank"
    if "connection refused" in problem:
        return (
            f"run lab doctor with --rank 0 on {request.master_ip} at the same time; if it already "
            "runs there, give both the same --master-port"
        )
    return f"check --master-ip, and open port {request.master_port} on rank 0's node"


def _connections(nodes: Sequence[NodeReport]) -> CheckResult:
    """Check every pair of nodes, in both directions."""
    directions = len(nodes) * (len(nodes) - 1)
    targets = [other for node in nodes for other, _ in node.unreached]
    if not targets:
        return CheckResult(
            "connections",
            OK,
            f"every node reaches every other one ({directions} connections, at free ports)",
        )
    addresses = {node.rank: node.address for node in nodes}
    broken = [
        f"rank {node.rank} ({node.address}) does not reach "
        f"rank {other} ({addresses.get(other, '?')}): {why}"
        for node in nodes
        for other, why in node.unreached
    ]
    more = f"; and {len(broken) - _MOST_NAMED} more" if len(broken) > _MOST_NAMED else ""
    worst = max(sorted(set(targets)), key=targets.count)
    return CheckResult(
        "connections",
        FAILURE,
        f"{len(broken)} of {directions} connections fail: {'; '.join(broken[:_MOST_NAMED])}{more}",
        f"on rank {worst}'s node, open all ports to the other nodes in the firewall (Gloo and NCCL "
        "use any free port)",
    )


def _clocks(nodes: Sequence[NodeReport]) -> CheckResult:
    measured = [(node.rank, *node.clock) for node in nodes if node.clock is not None]
    if not measured:
        return CheckResult("clocks", OK, "not compared")
    far = [
        f"rank {rank} by {ahead:+.2f} s (±{uncertainty:.3f} s)"
        for rank, ahead, uncertainty in measured
        if abs(ahead) - uncertainty > _FAR_SECONDS
    ]
    if far:
        return CheckResult(
            "clocks",
            WARNING,
            f"differ from rank 0's: {', '.join(far[:_MOST_NAMED])}; times in different nodes' logs "
            "cannot be compared (measured durations are right)",
            "synchronise the clocks on every node: timedatectl set-ntp true",
        )
    _, ahead, uncertainty = max(measured, key=lambda clock: abs(clock[1]))
    return CheckResult(
        "clocks",
        OK,
        f"within {abs(ahead) * 1e3:.2g} ms of rank 0's (±{uncertainty * 1e3:.2g} ms)",
    )


def _versions(nodes: Sequence[NodeReport]) -> CheckResult:
    differing = {
        name: f"{name} differs: {_values_text(values)}"
        for name in ("torch", "torchvision", "python")
        if len(values := _by_value(nodes, name)) > 1
    }
    text = "; ".join(differing.values())
    if differing.keys() & {"torch", "torchvision"}:
        return CheckResult(
            "versions",
            FAILURE,
            text,
            "install the same versions on every node: make setup, from the same commit",
        )
    if len({str(node.facts.get("python")).rpartition(".")[0] for node in nodes}) > 1:
        return CheckResult("versions", WARNING, text, "use the same Python on every node")
    same = ", ".join(f"{name} {nodes[0].facts.get(name)}" for name in ("torch", "torchvision"))
    return CheckResult("versions", OK, f"{same} on every node")


def _code(nodes: Sequence[NodeReport]) -> CheckResult:
    codes, commits = _by_value(nodes, "code"), _by_value(nodes, "commit")
    if len(codes) > 1:
        changes = f"changes to {next(iter(commits))}, files {_values_text(codes)}"
        difference = f"commits {_values_text(commits)}" if len(commits) > 1 else changes
        return CheckResult(
            "same code",
            FAILURE,
            f"the nodes have different code: {difference}",
            "check out the same commit on every node: git pull",
        )
    if len(commits) > 1:
        return CheckResult(
            "same code",
            OK,
            f"the training code is the same, the commits differ: {_values_text(commits)}",
        )
    commit = nodes[0].facts.get("commit")
    which = f"commit {commit}" if commit else f"no git commit; source hash {next(iter(codes))}"
    return CheckResult("same code", OK, f"{which} on every node")


def _dataset(nodes: Sequence[NodeReport]) -> CheckResult:
    values = _by_value(nodes, "dataset")
    if len(values) == 1:
        return CheckResult("same dataset", OK, f"{next(iter(values))} on every node")
    return CheckResult(
        "same dataset",
        FAILURE,
        f"the nodes differ: {_values_text(values)}",
        "copy the dataset from one node to all, and give the same --dataset",
    )


def _backend(nodes: Sequence[NodeReport]) -> CheckResult:
    gpus = _by_value(nodes, "gpus")
    if "0" not in gpus and (obstacle := _shared_gpus(nodes)):
        return CheckResult(
            "backend",
            WARNING,
            f"{obstacle}: all would use Gloo, on CPUs",
            "start one rank per GPU",
        )
    if "0" not in gpus:
        return CheckResult("backend", OK, "NCCL, one rank per GPU")
    if len(gpus) == 1:
        return CheckResult("backend", OK, "Gloo, on CPUs")
    return CheckResult(
        "backend",
        WARNING,
        f"some nodes have GPUs and some have none ({_values_text(gpus)}): all would use Gloo, "
        "on CPUs",
        "leave out the nodes without a GPU",
    )


def _shared_gpus(nodes: Sequence[NodeReport]) -> str:
    """Return which ranks share a GPU, as a run would find it; "" if none do."""
    ids = [str(node.facts.get("gpu_ids", "")).split() for node in nodes]
    hosts = [node.host for node in nodes]
    local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    peers = [Peer(host, 0, gpus) for host, gpus in zip(hosts, ids, strict=True)]
    return compare_gpus(peers, local_ranks).obstacle if all(ids) else ""


def _cores(nodes: Sequence[NodeReport]) -> CheckResult:
    """Compare the ranks that share a machine with its cores, from their facts."""
    by_host = Counter(node.host for node in nodes).items()
    crowded = [
        f"{host} has {ranks} ranks and {cores} core{'s' * (cores != 1)}"
        for host, ranks in by_host
        for cores in [min(one.facts.get("cores", ranks) for one in nodes if one.host == host)]
        if ranks > cores
    ]
    if not crowded:
        return CheckResult("cores", OK, "no more ranks than cores on any machine")
    return CheckResult(
        "cores",
        WARNING,
        f"{'; '.join(crowded)}: ranks wait for cores, so step times show the machine, not the "
        "strategy",
        "start at most one rank per core, or measure with --compute measured",
    )


def _by_value(nodes: Sequence[NodeReport], name: str) -> Mapping[str, list[int]]:
    """Return which ranks have each value of a fact."""
    return grouped((str(node.facts.get(name)), node.rank) for node in nodes)


def _values_text(values: Mapping[str, list[int]]) -> str:
    return ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.items())


def _ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 2", cut after eight."""
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"
