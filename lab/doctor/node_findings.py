"""What the nodes' exchange shows: who is missing, which pairs cannot connect, whose clock, versions, code or data differ.

``own_facts`` is what a node sends to the others; ``results_of`` turns a NodeExchange into results, the same ones on every node.
"""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

from common.utils.system import usable_cores
from lab.doctor.check_result import CheckRequest, CheckResult, failure, ok, warning
from lab.doctor.files import code_digest, dataset_fact, git
from lab.doctor.machine import package_version, torch_facts
from lab.doctor.node_exchange import NodeExchange, NodeReport

FAR_SECONDS = 1.0
"""Clocks that differ by more make the logs of different nodes incomparable."""

_MOST_NAMED = 8


def own_facts(request: CheckRequest) -> dict[str, Any]:
    """Return what this node sends to the others: versions, code, dataset, GPUs, cores. Plain values."""
    torch = torch_facts()
    return {
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "torchvision": package_version("torchvision"),
        "commit": git("rev-parse", "--short", "HEAD"),
        "code": code_digest(),
        "dataset": "not looked at" if torch.error is not None else dataset_fact(request),
        "gpus": len(torch.gpus),
        "cores": usable_cores(),
    }


def results_of(exchange: NodeExchange) -> list[CheckResult]:
    """Return what the exchange showed."""
    found = [_attendance(exchange)]
    if len(exchange.nodes) > 1:
        nodes = [exchange.nodes[rank] for rank in sorted(exchange.nodes)]
        found += [
            _connections(nodes),
            _clocks(nodes),
            _versions(nodes),
            _code(nodes),
            _dataset(nodes),
            _backend(nodes),
        ]
    if exchange.nodes:
        found.append(_cores(list(exchange.nodes.values())))
    return found


def _attendance(exchange: NodeExchange) -> CheckResult:
    """Which of the nodes took part."""
    own = exchange.own
    where = f"{own.master_ip}:{own.master_port}"
    if not exchange.nodes:
        return failure(
            "nodes", "; ".join(exchange.problems), _remedy_of_failed_connection(exchange)
        )
    text = f"{len(exchange.nodes)} of {own.num_nodes} nodes met at {where}"
    missing = exchange.missing
    if missing or exchange.problems:
        if missing:
            text += f"; missing: rank{'s' if len(missing) > 1 else ''} {_ranks(missing)}"
        return failure(
            "nodes",
            "; ".join([text, *exchange.problems]),
            "run lab doctor on every node within --timeout, with the same --master-ip and --num-nodes and a --rank of "
            "its own",
        )
    return ok("nodes", text)


def _remedy_of_failed_connection(exchange: NodeExchange) -> str:
    problem = exchange.problems[0] if exchange.problems else ""
    if "started twice" in problem or "--num-nodes" in problem:
        return "give every node the same --num-nodes and a --rank of its own"
    if "connection refused" in problem:
        return f"run lab doctor with --rank 0 on {exchange.own.master_ip} at the same time; where it runs, the port differs"
    return f"check --master-ip, and open port {exchange.own.master_port} on rank 0's node"


def _connections(nodes: Sequence[NodeReport]) -> CheckResult:
    """Every pair, both directions."""
    broken = [
        f"rank {node.rank} ({node.address}) does not reach rank {other} ({_address(nodes, other)}): {why}"
        for node in nodes
        for other, why in sorted(node.unreached.items())
    ]
    directions = len(nodes) * (len(nodes) - 1)
    if not broken:
        return ok(
            "connections",
            f"each node reaches each, {directions} directions, at ports that the system chose",
        )
    more = f"; and {len(broken) - _MOST_NAMED} more" if len(broken) > _MOST_NAMED else ""
    targets = [other for node in nodes for other in node.unreached]
    worst = max(sorted(set(targets)), key=targets.count)
    return failure(
        "connections",
        f"{len(broken)} of {directions} directions fail: {'; '.join(broken[:_MOST_NAMED])}{more}",
        f"on rank {worst}'s node, let the firewall pass every port from the other nodes (Gloo and NCCL choose theirs)",
    )


def _clocks(nodes: Sequence[NodeReport]) -> CheckResult:
    measured = [
        (node.rank, node.clock_seconds, node.uncertainty_seconds)
        for node in nodes
        if node.clock_seconds is not None and node.uncertainty_seconds is not None
    ]
    far = [clock for clock in measured if abs(clock[1]) - clock[2] > FAR_SECONDS]
    if far:
        clocks = ", ".join(
            f"rank {rank}'s by {ahead:+.2f} s (±{uncertainty:.3f} s)"
            for rank, ahead, uncertainty in far[:_MOST_NAMED]
        )
        return warning(
            "clocks",
            f"off rank 0's: {clocks}; times in the nodes' logs cannot be compared (measured durations don't "
            "depend on it)",
            "synchronise the clocks on every node: timedatectl set-ntp true",
        )
    if not measured:
        return ok("clocks", "not compared")
    _, ahead, uncertainty = max(measured, key=lambda clock: abs(clock[1]))
    return ok(
        "clocks",
        f"within {abs(ahead) * 1e3:.2g} ms of rank 0's (±{uncertainty * 1e3:.2g} ms)",
    )


def _versions(nodes: Sequence[NodeReport]) -> CheckResult:
    values = {name: _by_value(nodes, name) for name in ("torch", "torchvision", "python")}
    text = "; ".join(
        f"{name} differs: {_values_text(who)}" for name, who in values.items() if len(who) > 1
    )
    if len(values["torch"]) > 1 or len(values["torchvision"]) > 1:
        return failure(
            "versions", text, "install the same on every node: make setup, from one checkout"
        )
    if len({version.rpartition(".")[0] for version in values["python"]}) > 1:
        return warning("versions", text, "use the same Python on every node")
    return ok(
        "versions",
        f"torch {nodes[0].facts.get('torch')}, torchvision {nodes[0].facts.get('torchvision')} on every node",
    )


def _code(nodes: Sequence[NodeReport]) -> CheckResult:
    codes, commits = _by_value(nodes, "code"), _by_value(nodes, "commit")
    if len(codes) > 1:
        difference = (
            f"commits {_values_text(commits)}"
            if len(commits) > 1
            else f"changes to {next(iter(commits))}, files {_values_text(codes)}"
        )
        return failure(
            "same code",
            f"the nodes have other code: {difference}",
            "check out the same commit on every node: git pull",
        )
    if len(commits) > 1:
        return ok(
            "same code", f"the same files that train, from other commits: {_values_text(commits)}"
        )
    which = (
        f"commit {next(iter(commits))}"
        if nodes[0].facts.get("commit")
        else f"no git commit; code {next(iter(codes))}"
    )
    return ok("same code", f"{which} on every node")


def _dataset(nodes: Sequence[NodeReport]) -> CheckResult:
    values = _by_value(nodes, "dataset")
    if len(values) > 1:
        return failure(
            "same dataset",
            f"the nodes differ: {_values_text(values)}",
            "copy the dataset from one node to all, and give the same --dataset",
        )
    return ok("same dataset", f"{next(iter(values))} on every node")


def _backend(nodes: Sequence[NodeReport]) -> CheckResult:
    gpus = _by_value(nodes, "gpus")
    if "0" in gpus and len(gpus) > 1:
        return warning(
            "backend",
            f"some nodes have GPUs and some have none ({_values_text(gpus)}): all would use Gloo, on CPUs",
            "leave out the nodes without a GPU",
        )
    return ok("backend", "Gloo, on CPUs" if "0" in gpus else "NCCL, a rank a GPU")


def _cores(nodes: Sequence[NodeReport]) -> CheckResult:
    """Ranks that share a machine, against its cores. Without GPUs alone: with them, ranks are a GPU each."""
    crowded = []
    for host in dict.fromkeys(node.host for node in nodes):
        here = [node for node in nodes if node.host == host]
        cores = min(node.facts.get("cores", len(here)) for node in here)
        if len(here) > cores:
            crowded.append(f"{host} has {len(here)} ranks and {cores} cores")
    if crowded:
        return warning(
            "cores",
            f"{'; '.join(crowded)}: they take turns, and step times show the machine, not the strategy",
            "start as many ranks a machine as it has cores, or measure with --compute measured",
        )
    return ok("cores", "no more ranks than cores on any machine")


def _by_value(nodes: Sequence[NodeReport], name: str) -> Mapping[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for node in nodes:
        ranks.setdefault(str(node.facts.get(name)), []).append(node.rank)
    return ranks


def _values_text(values: Mapping[str, list[int]]) -> str:
    return ", ".join(
        f"{value} on rank{'s' if len(who) > 1 else ''} {_ranks(who)}"
        for value, who in values.items()
    )


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return ", ".join(map(str, ranks[:_MOST_NAMED])) + more


def _address(nodes: Sequence[NodeReport], rank: int) -> str:
    return next((node.address for node in nodes if node.rank == rank), "?")
