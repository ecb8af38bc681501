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


def doctor_passes(
    connections: HostConnections,
    facts: Sequence[Facts],
    commands: NodeCommands,
    master: str,
    prefixed: PrefixedOutput,
) -> bool:
    """Run ``lab doctor`` on all hosts; return whether none of them found a failure.

    Shows what it prints on rank 0, and of each other host the failures that rank 0 does not have.
    """
    connections.on_line = lambda node, line: prefixed(node, line) if node == 0 else None
    address = ["--master-ip", master, "--master-port", str(commands.master_port)]
    flags = [*address, "--num-nodes", str(len(facts)), *_passed_flags(commands)]
    for host, own in zip(connections.hosts, facts, strict=True):
        connections.start(
            host.rank,
            [own["python"], "-m", "lab", "doctor", *flags, "--rank", str(host.rank)],
            environment={"PYTHONUNBUFFERED": "1"},
            folder=own["folder"],
        )
    connections.wait(lambda: not connections.running, limit_seconds=_LIMIT_SECONDS)
    _show_others(connections, prefixed)
    failed = [
        str(connection.host)
        for connection in connections.by_rank
        if connection.status or connection.running
    ]
    connections.ended.clear()
    if failed:
        more = f" and {len(failed) - _MOST_HOSTS} more" if len(failed) > _MOST_HOSTS else ""
        print(
            f"error: lab doctor found failures on {', '.join(failed[:_MOST_HOSTS])}{more}: nothing was started",
            file=sys.stderr,
        )
    return not failed


def _show_others(connections: HostConnections, prefixed: PrefixedOutput) -> None:
    """Show the failures of the other hosts that rank 0 does not have, since most findings are the same on all nodes."""
    known, shown_hosts = set(_failures(connections.by_rank[0].lines)), 0
    for connection in connections.by_rank[1:]:
        failures = _failures(connection.lines)
        own = [line for line in failures if line not in known]
        if not failures and (
            connection.status or connection.running
        ):  # the doctor itself broke off
            own = list(connection.lines)[-1:] or ["lab doctor ended without a word"]
        shown_hosts += bool(own)
        for line in own if shown_hosts <= _MOST_HOSTS else []:
            prefixed.show(connection.host.rank, line)


def _failures(lines: Sequence[str]) -> list[str]:
    """The lines of failures, each with its remedy."""
    found, before = [], ""
    for line in lines:
        is_remedy = line.lstrip().startswith("->") and before.startswith("failure ")
        if line.startswith("failure ") or is_remedy:
            found.append(line)
        before = line
    return found


def _passed_flags(commands: NodeCommands) -> list[str]:
    """What the doctor has to know of the command: dataset and folders, as flags or recipe give them."""
    given = {name: commands.value(name) for name in _PASSED_ON}
    recipe = commands.value("--recipe")
    if recipe is not None:
        try:
            settings = read_recipe(find_recipe(recipe))
        except (
            UserError
        ):  # a recipe that only the hosts have: the doctor there reports what is wrong
            settings = {}
        given["--dataset"] = given["--dataset"] or settings.get("dataset")
    return [
        word for name, value in given.items() if value is not None for word in (name, str(value))
    ]
