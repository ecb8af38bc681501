"""Facts about every host before anything starts, and why a host cannot take part.

``ask_facts`` asks all hosts at once; ``problems_of`` compares their answers. A launch starts only
if no host has a problem.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import UserError
from lab.ssh.command import NodeCommands
from lab.ssh.connection import HostConnection
from lab.ssh.connections import HostConnections
from lab.ssh.hosts import CONNECT_SECONDS, Host, SSHOptions, first_of
from lab.ssh.refusals import explain

OLDEST_PYTHON = (3, 11)
_READY_SECONDS = CONNECT_SECONDS + 30.0
_FACTS_SECONDS = 60.0
_MOST_NAMED = 16
Facts = Mapping[str, Any]


def ask_facts(
    connections: HostConnections, options: SSHOptions, *, script: str | None
) -> list[Facts]:
    """Return the facts about each host, see remote_handlers.facts.

    UserError, with a line for each host that does not answer.
    """
    refuse(unreached_hosts(connections), of=len(connections.hosts))
    answers = connections.ask(
        "facts",
        nodes=range(len(connections.hosts)),
        limit_seconds=_FACTS_SECONDS,
        folder=options.workdir,
        script=script,
    )
    refuse_errors(connections.hosts, answers)
    return [answers[node]["result"] for node in sorted(answers)]


def unreached_hosts(connections: HostConnections) -> dict[Host, str]:
    """Wait for all hosts; return why some cannot be reached."""
    connections.wait(
        lambda: not any(one.connecting for one in connections.by_rank),
        limit_seconds=_READY_SECONDS,
    )
    return {one.host: _why_unreached(one) for one in connections.by_rank if not one.ready}


def _why_unreached(connection: HostConnection) -> str:
    given = connection.host.given
    if not connection.closed:
        return f"no answer within {_READY_SECONDS:g} s: try ssh {shlex.quote(given)} true"
    return explain(connection.error_lines, name=connection.host.name, given=given)


def refuse_errors(hosts: Sequence[Host], answers: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise UserError with the error of each host that answered with one."""
    errors = {hosts[node]: one["error"] for node, one in answers.items() if "error" in one}
    refuse(errors, of=len(hosts))


def refuse(
    problems: Mapping[Host, str], *, of: int, what: str = "cannot take part; nothing was started"
) -> None:
    """Raise UserError with a line for each host that has a problem, if any has."""
    if not problems:
        return
    lines = [f"  {host}: {problem}" for host, problem in list(problems.items())[:_MOST_NAMED]]
    more = [f"  and {len(problems) - _MOST_NAMED} more"] if len(problems) > _MOST_NAMED else []
    raise UserError(
        "\n".join([f"{len(problems)} of {of} host{'s' * (of > 1)} {what}", *lines, *more])
    )


def problems_of(
    hosts: Sequence[Host], facts: Sequence[Facts], commands: NodeCommands, *, shares_a_port: bool
) -> dict[Host, str]:
    """Return the first problem of each host that cannot run its command."""
    problems = {
        host: _own_problem(mine, commands)
        or _difference(hosts[0], facts[0], mine, commands)
        or (None if shares_a_port else _same_machine(mine, hosts[: host.rank], facts))
        for host, mine in zip(hosts, facts, strict=True)
    }
    return {host: problem for host, problem in problems.items() if problem is not None}


def _own_problem(mine: Facts, commands: NodeCommands) -> str | None:
    is_part = commands.part is not None
    problems = (
        (
            not mine["folder_there"],
            f"there is no folder {mine['folder']}: clone the project there, or give --workdir, the "
            "project's folder on the hosts",
        ),
        (
            not mine["script_there"],
            f"{mine['folder']} has no {commands.script}: give --workdir, the project's folder on "
            "the hosts",
        ),
        (
            is_part and _numbers(mine["version"]) < OLDEST_PYTHON,
            f"{mine['python']} is Python {mine['version']}, and this project needs "
            f"{'.'.join(map(str, OLDEST_PYTHON))}: run make setup there, or give --python",
        ),
        (
            is_part and mine["torch"] is None,
            f"{mine['python']} has no torch: run make setup in {mine['folder']}, or give --python, "
            "an interpreter that has it",
        ),
    )
    return next((problem for found, problem in problems if found), None)


def _difference(first_host: Host, first: Facts, mine: Facts, commands: NodeCommands) -> str | None:
    """Return the first difference from rank 0's host, in Python, torch or code.

    Only PartOne, PartTwo and PartThree need them to be equal.
    """
    if commands.part is None:
        return None
    ours, theirs = ((one["code"] or {}).items() for one in (mine, first))
    files = sorted({name for name, _ in ours ^ theirs})
    differences = (
        (
            _numbers(mine["version"]) != _numbers(first["version"]),
            f"Python {mine['version']} ({mine['python']}), but {first_host} has "
            f"{first['version']}: run make setup with the same version on all hosts, or give "
            "--python",
        ),
        (
            first["torch"] and mine["torch"].split("+")[0] != first["torch"].split("+")[0],
            f"torch {mine['torch']}, but {first_host} has {first['torch']}: run make setup on "
            "both, from the same commit",
        ),
        (
            files,
            f"its code differs from {first_host}: {first_of(files, 3, noun=' files')}: check out "
            "the same commit on all hosts (git pull)",
        ),
    )
    return next((problem for found, problem in differences if found), None)


def _same_machine(mine: Facts, others: Sequence[Host], facts: Sequence[Facts]) -> str | None:
    """Return the problem of a host that is the same machine as an earlier one.

    Two machines never have all their addresses in common.
    """
    for other, theirs in zip(others, facts, strict=False):
        if mine["addresses"] and sorted(mine["addresses"]) == sorted(theirs["addresses"]):
            return (
                f"the same machine as {other}, so two ranks would share it: name it once, or give "
                "--master-port if you want that"
            )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return (3, 11) for "3.11.7"."""
    return tuple(int(number) for number in version.split(".")[:2])
