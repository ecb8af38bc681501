"""``lab launch --check``: ``lab doctor`` on all hosts, over the connections of the launch."""

import contextlib
import sys
from collections.abc import Collection, Sequence

from common.config.recipes import find_recipe, read_recipe
from common.errors import UserError
from lab.processes.prefixed_output import PrefixedOutput
from lab.ssh.command import NodeCommands
from lab.ssh.connections import HostConnections
from lab.ssh.hosts import first_of
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

    Shows the whole output of rank 0. From the other hosts it shows only failures that rank 0 does
    not have.
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
    failed = [str(host) for host in connections.hosts if _failed(connections, host.rank)]
    if failed:
        print(
            f"error: lab doctor found failures on {first_of(failed, _MOST_HOSTS)}: nothing was "
            "started",
            file=sys.stderr,
        )
    return not failed


def _show_others(connections: HostConnections, prefixed: PrefixedOutput) -> None:
    """Show the other hosts' failures that rank 0 lacks: most are the same on all nodes."""
    known, shown_hosts = set(_failures(connections.by_rank[0].lines)), 0
    for connection in connections.by_rank[1:]:
        failures = _failures(connection.lines)
        own = [line for line in failures if line not in known]
        if not failures and _failed(connections, connection.host.rank):  # the doctor itself failed
            own = list(connection.lines)[-1:] or ["lab doctor ended without a message"]
        shown_hosts += bool(own)
        for line in own if shown_hosts <= _MOST_HOSTS else []:
            prefixed.show(connection.host.rank, line)


def _failed(connections: HostConnections, node: int) -> bool:
    return connections.ended.get(node) != 0  # None: it still runs


def _failures(lines: Collection[str]) -> list[str]:
    """Return the lines of failures, each with its remedy."""
    return [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if line.startswith("failure ")
        or (line.lstrip().startswith("->") and before.startswith("failure "))
    ]


def _passed_flags(commands: NodeCommands) -> list[str]:
    """Return the command's dataset, folders and timeout as flags of the doctor."""
    given = {name: commands.value(name) for name in _PASSED_ON}
    recipe = commands.value("--recipe")
    if recipe is not None:
        # Only the hosts may have the recipe: the doctor there reports what is wrong.
        with contextlib.suppress(UserError):
            dataset = read_recipe(find_recipe(recipe)).get("dataset")
            given["--dataset"] = given["--dataset"] or dataset
    return [
        word for name, value in given.items() if value is not None for word in (name, str(value))
    ]
