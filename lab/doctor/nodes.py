"""What a Meeting shows: who is missing, which pairs cannot connect, whose clock, versions, code or data differ.

``results_of`` turns a Meeting into findings, the same ones on every node; ``own_facts`` is what a node tells the others.
"""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

from common.utils.system import usable_cores
from lab.doctor.check_result import CheckRequest, CheckResult, failure, ok, warning
from lab.doctor.files import code_digest, dataset_fact, git
from lab.doctor.machine import package_version, torch_facts
from lab.doctor.meeting import Meeting, NodeReport

FAR_SECONDS = 1.0
"""Clocks that differ by more make the logs of different nodes incomparable."""

_MOST_NAMED = 8


def own_facts(request: CheckRequest) -> dict[str, Any]:
    """Return what this node tells the others: versions, code, dataset, GPUs, cores. Plain values."""
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


def results_of(meeting: Meeting) -> list[CheckResult]:
    """Return what the meeting showed."""
    found = [_meeting(meeting)]
    if len(meeting.nodes) > 1:
        nodes = [meeting.nodes[rank] for rank in sorted(meeting.nodes)]
        found += [
            _connections(nodes),
            _clocks(nodes),
            _versions(nodes),
            _code(nodes),
            _dataset(nodes),
            _backend(nodes),
        ]
    if meeting.nodes:
        found.append(_cores(list(meeting.nodes.values())))
    return found


def _meeting(meeting: Meeting) -> CheckResult:
    place = meeting.place
    where = f"{place.master_ip}:{place.master_port}"
    if not meeting.nodes:
        return failure("nodes", "; ".join(meeting.problems), _remedy_of_not_met(meeting))
    told = f"{len(meeting.nodes)} of {place.num_nodes} nodes met at {where}"
    if meeting.missing or meeting.problems:
        missing = (
            f"; missing: rank{'s' if len(meeting.missing) > 1 else ''} {_ranks(meeting.missing)}"
            if meeting.missing
            else ""
        )
        return failure(
            "nodes",
            "; ".join([told + missing, *meeting.problems]),
            "run lab doctor on every node within --timeout, with the same --master-ip and --num-nodes and a --rank of "
            "its own",
        )
    return ok("nodes", told)


def _remedy_of_not_met(meeting: Meeting) -> str:
    problem = meeting.problems[0] if meeting.problems else ""
    if "started twice" in problem or "--num-nodes" in problem:
        return "give every node the same --num-nodes and a --rank of its own"
    if "connection refused" in problem:
        return f"run lab doctor with --rank 0 on {meeting.place.master_ip} at the same time; where it runs, the port differs"
    return f"check --master-ip, and open port {meeting.place.master_port} on rank 0's node"


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
    measured = [node for node in nodes if node.clock_seconds is not None]
    far = [
        node
        for node in measured
        if abs(node.clock_seconds) - node.uncertainty_seconds > FAR_SECONDS
    ]
    if far:
        told = ", ".join(
            f"rank {node.rank}'s by {node.clock_seconds:+.2f} s (±{node.uncertainty_seconds:.3f} s)"
            for node in far[:_MOST_NAMED]
        )
        return warning(
            "clocks",
            f"off rank 0's: {told}; times in the nodes' logs cannot be compared (measured durations don't "
            "depend on it)",
            "synchronise the clocks on every node: timedatectl set-ntp true",
        )
    widest = max(measured, key=lambda node: abs(node.clock_seconds), default=None)
    if widest is None:
        return ok("clocks", "not compared")
    return ok(
        "clocks",
        f"within {abs(widest.clock_seconds) * 1e3:.2g} ms of rank 0's "
        f"(±{widest.uncertainty_seconds * 1e3:.2g} ms)",
    )


def _versions(nodes: Sequence[NodeReport]) -> CheckResult:
    values = {name: _by_value(nodes, name) for name in ("torch", "torchvision", "python")}
    told = "; ".join(
        f"{name} differs: {_told(who)}" for name, who in values.items() if len(who) > 1
    )
    if len(values["torch"]) > 1 or len(values["torchvision"]) > 1:
        return failure(
            "versions", told, "install the same on every node: make setup, from one checkout"
        )
    if len({version.rpartition(".")[0] for version in values["python"]}) > 1:
        return warning("versions", told, "use the same Python on every node")
    return ok(
        "versions",
        f"torch {nodes[0].facts.get('torch')}, torchvision {nodes[0].facts.get('torchvision')} on every node",
    )


def _code(nodes: Sequence[NodeReport]) -> CheckResult:
    codes, commits = _by_value(nodes, "code"), _by_value(nodes, "commit")
    if len(codes) > 1:
        told = (
            f"commits {_told(commits)}"
            if len(commits) > 1
            else f"changes to {next(iter(commits))}, files {_told(codes)}"
        )
        return failure(
            "same code",
            f"the nodes have other code: {told}",
            "check out the same commit on every node: git pull",
        )
    if len(commits) > 1:
        return ok("same code", f"the same files that train, from other commits: {_told(commits)}")
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
            f"the nodes differ: {_told(values)}",
            "copy the dataset from one node to all, and give the same --dataset",
        )
    return ok("same dataset", f"{next(iter(values))} on every node")


def _backend(nodes: Sequence[NodeReport]) -> CheckResult:
    gpus = _by_value(nodes, "gpus")
    if "0" in gpus and len(gpus) > 1:
        return warning(
            "backend",
            f"some nodes have GPUs and some have none ({_told(gpus)}): all would use Gloo, on CPUs",
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


def _told(values: Mapping[str, list[int]]) -> str:
    return ", ".join(
        f"{value} on rank{'s' if len(who) > 1 else ''} {_ranks(who)}"
        for value, who in values.items()
    )


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return ", ".join(map(str, ranks[:_MOST_NAMED])) + more


def _address(nodes: Sequence[NodeReport], rank: int) -> str:
    return next((node.address for node in nodes if node.rank == rank), "?")
