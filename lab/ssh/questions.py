"""What ``lab launch`` asks the hosts before it starts anything.

``refuse_differences`` compares the hosts, ``find_master`` finds the address at which rank 0 waits,
and ``doctor_passes`` runs ``lab doctor`` on all (``--check``).
"""

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.config.recipes import find_recipe, read_recipe
from common.errors import UserError
from common.say import listed
from common.utils.environment import RUN_TOKEN, with_run_token
from common.utils.source_hash import code_differences
from lab.fleet.prefixed_output import PrefixedOutput
from lab.ssh.command import NodeCommand
from lab.ssh.hosts import Host, SSHOptions, refuse_hosts
from lab.ssh.node import HostFacts
from lab.ssh.remote import Remote, ask, running, served, wait

_LISTEN_SECONDS = 30.0
_DOCTOR_SECONDS = 600.0
_DOCTOR = (
    *("python", "-m", "lab", "doctor", "--master-ip", "{master}", "--master-port", "{port}"),
    *("--num-nodes", "{nodes}", "--rank", "{rank}"),
)
# The flags of a command that lab doctor takes, too.
_OF_DOCTOR = ("--dataset", "--data-dir", "--output-dir", "--timeout")
_MOST_HOSTS = 8  # whose failures are shown
# Of each rank's command, beside the token of the run.
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    # Else workers that torchrun restarts under Gloo read the addresses of their predecessors.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def refuse_differences(
    hosts: Sequence[Host], facts: Sequence[HostFacts], command: NodeCommand, *, shares_a_port: bool
) -> None:
    """Raise UserError with a problem of each host that cannot run the command with the others.

    Only the parts need the same code, torch and Python. Two machines never have all their addresses
    in common.
    """
    problems = {}
    for host, own in zip(hosts, facts, strict=True):
        other = code_differences(own.code, facts[0].code)
        # The first host with the same addresses: the host itself, unless it is named twice.
        twin = next(twin for twin in hosts if facts[twin.rank].addresses == own.addresses)
        if not own.script_there:
            problems[host] = (
                f"{own.folder} has no {command.script}: give --workdir, the project's folder "
                "on the hosts"
            )
        elif command.script is not None and other:
            problems[host] = (
                f"its code differs from {hosts[0]}: {other}: check out the same commit on all "
                "hosts (git pull), and run make setup there"
            )
        elif twin != host and not shares_a_port:
            problems[host] = (
                f"the same machine as {twin}, so two ranks would share it: name it once, or give "
                "--master-port if you want that"
            )
    refuse_hosts(problems, of=len(hosts))


def find_master(
    hosts: Sequence[Host], facts: Sequence[HostFacts], options: SSHOptions, *, port: int
) -> str:
    """Return an address of the first host that all others reach, while it listens at the port.

    A name may be known only on this machine, or resolve to 127.0.1.1 on the host itself, and a host
    may have several networks. UserError if the port is taken, or if no address is reached by all.
    """
    first = hosts[0]
    own = facts[0].addresses
    question = {"do": "connect", "names": [first.name, facts[0].name, *own], "port": port}
    with served(hosts[:1], [{"do": "listen", "port": port}], options) as listening:
        wait(listening, lambda: listening[0].lines or not running(listening), _LISTEN_SECONDS)
        if not listening[0].lines:
            raise UserError(
                f"{first}: its port {port} cannot be used ({listening[0].errors[-1]}): end the "
                "program that listens there, or give another --master-port"
            )
        answers = ask(hosts[1:], question, options, schema=dict[str, str])
    best = _best_address(answers, own)
    problems = {}
    for host, answer in zip(hosts[1:], answers, strict=True):
        if answer.get(best) != "":
            problems[host] = (
                f"cannot reach {first} at {best}:{port} ({answer.get(best, 'unknown')}): open the "
                "port there, or give another address of that host with --master-ip, or another "
                "--master-port"
            )
    refuse_hosts(problems, of=len(hosts))
    return best


def _best_address(answers: Sequence[Mapping[str, str]], own: Sequence[str]) -> str:
    """Return the address that most hosts reach, if possible one of the first host's ``own``.

    A router may translate an address that is not the host's own. answers : of the other hosts, by
    address why they do not reach it, "" if they do.
    """
    candidates = [address for answer in answers for address in answer] or own

    def badness(address: str) -> tuple[int, bool]:
        unreached = [answer for answer in answers if answer.get(address) != ""]
        return len(unreached), address not in own

    return min(candidates, key=badness, default="127.0.0.1")


def doctor_passes(
    hosts: Sequence[Host],
    facts: Sequence[HostFacts],
    options: SSHOptions,
    command: NodeCommand,
    master: str | None,
) -> bool:
    """Run ``lab doctor`` on all hosts; return whether none of them finds a failure.

    Shows the whole output of rank 0, and of the other hosts the failures that rank 0 does not have.
    """
    words = [*_DOCTOR, *_doctor_flags(command)]
    requests = run_requests(replace(command, words=words), facts, master, options)
    prefixed = PrefixedOutput(len(hosts), shown=lambda node: node == 0)
    with served(hosts, requests, options, prefixed) as doctors:
        wait(doctors, lambda: not running(doctors), _DOCTOR_SECONDS)
    failed = [doctor for doctor in doctors if doctor.poll() != 0]
    for doctor in failed[:_MOST_HOSTS]:
        for line in _failure_lines(doctor):
            if line not in doctors[0].lines:
                prefixed.show(doctor.host.rank, line)
    if failed:
        names = listed([doctor.host for doctor in failed])
        print(f"error: lab doctor found failures on {names}: nothing was started", file=sys.stderr)
    return not failed


def _doctor_flags(command: NodeCommand) -> list[str]:
    """Return the flags of the command that lab doctor takes, too."""
    values = dict(command.flags)
    if recipe := values.get("--recipe"):
        with contextlib.suppress(UserError):  # the doctor there reports what is wrong
            values.setdefault("--dataset", read_recipe(find_recipe(recipe)).get("dataset"))
    words: list[str] = []
    for name in _OF_DOCTOR:
        if value := values.get(name):
            words += [name, value]
    return words


def _failure_lines(doctor: Remote) -> list[str]:
    """Return the failures that lab doctor printed, with their remedies; else its last line."""
    failures = re.findall(r"^failure .*(?:\n +-> .*)?", "\n".join(doctor.lines), re.MULTILINE)
    return "\n".join(failures).splitlines() or list(doctor.lines)[-1:]


def run_requests(
    command: NodeCommand, facts: Sequence[HostFacts], master: str | None, options: SSHOptions
) -> list[dict[str, Any]]:
    """Return a request for each host to run its command.

    The hosts get the token through ssh, where no process list and no file shows it.
    """
    environment = {**ENVIRONMENT, RUN_TOKEN: with_run_token(os.environ)[RUN_TOKEN]}
    return [
        {
            "do": "run",
            "command": command.fill(
                master=master or "", nodes=len(facts), rank=rank, python=own.python
            ),
            "environment": environment,
            "silence_seconds": options.silence_seconds,
        }
        for rank, own in enumerate(facts)
    ]
