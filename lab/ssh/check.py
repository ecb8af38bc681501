"""``lab launch --check``: ``lab doctor`` on every host at once, over the connections that the launch will use."""

import sys
from collections.abc import Sequence

from common.config.recipes import find_recipe, read_recipe
from common.errors import UserError
from lab.processes.prefixed_output import PrefixedOutput
from lab.ssh.command import NodeCommands
from lab.ssh.connections import HostConnections
from lab.ssh.probe import Facts

_LIMIT_SECONDS = 600.0
_PASSED_ON = ("--dataset", "--data-dir", "--output-dir", "--timeout")
_MOST_HOSTS = 8


def doctors_find_nothing(
    nodes: HostConnections,
    facts: Sequence[Facts],
    plan: NodeCommands,
    master: str,
    prefixed: PrefixedOutput,
) -> bool:
    """Run the doctors, show rank 0's findings and what each other host alone fails at; return whether no one found a failure."""
    nodes.on_line = lambda node, line: prefixed(node, line) if node == 0 else None
    flags = _flags(plan)
    for host, one in zip(nodes.hosts, facts, strict=True):
        nodes.start(
            host.rank,
            [
                one["python"],
                "-m",
                "lab",
                "doctor",
                "--master-ip",
                master,
                "--master-port",
                str(plan.meeting_port),
                "--num-nodes",
                str(len(nodes.hosts)),
                "--rank",
                str(host.rank),
                *flags,
            ],
            environment={"PYTHONUNBUFFERED": "1"},
            folder=one["folder"],
        )
    nodes.wait(lambda: not nodes.running, limit_seconds=_LIMIT_SECONDS)
    _show_others(nodes, prefixed)
    failed = [str(node.host) for node in nodes.nodes if node.status or node.running]
    nodes.ended.clear()
    if failed:
        more = f" and {len(failed) - _MOST_HOSTS} more" if len(failed) > _MOST_HOSTS else ""
        print(
            f"error: lab doctor found failures on {', '.join(failed[:_MOST_HOSTS])}{more}: nothing was started",
            file=sys.stderr,
        )
    return not failed


def _show_others(nodes: HostConnections, prefixed: PrefixedOutput) -> None:
    """Of the hosts but rank 0's the failures that it has not, since most findings are of all nodes together."""
    known, told = set(_failures(nodes.nodes[0].lines)), 0
    for node in nodes.nodes[1:]:
        failures = _failures(node.lines)
        own = [line for line in failures if line not in known]
        if not failures and (node.status or node.running):  # the doctor itself broke off
            own = list(node.lines)[-1:] or ["lab doctor ended without a word"]
        told += bool(own)
        for line in own if told <= _MOST_HOSTS else []:
            prefixed.show(node.host.rank, line)


def _failures(lines: Sequence[str]) -> list[str]:
    """The lines of failures, each with its remedy."""
    found, before = [], ""
    for line in lines:
        if line.startswith("failure ") or (
            line.lstrip().startswith("->") and before.startswith("failure ")
        ):
            found.append(line)
        before = line
    return found


def _flags(plan: NodeCommands) -> list[str]:
    """What the doctor has to know of the command: dataset and folders, as flags or recipe give them."""
    given = {name: plan.value(name) for name in _PASSED_ON}
    recipe = plan.value("--recipe")
    if recipe is not None:
        try:
            settings = read_recipe(find_recipe(recipe))
        except UserError:  # one of the hosts' own: they say what is wrong with it
            settings = {}
        given["--dataset"] = given["--dataset"] or settings.get("dataset")
    return [
        word for name, value in given.items() if value is not None for word in (name, str(value))
    ]
