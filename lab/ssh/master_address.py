"""Which address of the first host all others reach: found by trying, since names differ from host to host.

A name may be known to the terminal alone, or stand for 127.0.1.1 on the host itself; a host may have several networks. So the
others are asked what the first host's names mean to them, and knock at each of its addresses, at the port of the run.
"""

import ipaddress
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import UserError
from lab.ssh.connections import HostConnections
from lab.ssh.hosts import Host
from lab.ssh.probe import Facts, refuse

_RESOLVE_SECONDS = 15.0
_KNOCK_SECONDS = 4.0


def find_master(nodes: HostConnections, facts: Sequence[Facts], *, port: int) -> str:
    """Return the address at which rank 0 is to wait for the others. UserError where its port is taken or all do not reach one
    address."""
    others = range(1, len(nodes.hosts))
    candidates = _candidates(nodes, facts, others)
    token = secrets.token_hex(16)
    taken = nodes.ask("listen", nodes=[0], limit_seconds=_RESOLVE_SECONDS, port=port, token=token)[
        0
    ]
    if "error" in taken:
        raise UserError(
            f"{nodes.hosts[0]}: its port {port} cannot be used ({taken['error'].lower()}): end what listens there, "
            "or give another --master-port"
        )
    answers = (
        nodes.ask(
            "knock",
            nodes=others,
            limit_seconds=3 * _KNOCK_SECONDS + _RESOLVE_SECONDS,
            addresses=candidates,
            port=port,
            token=token,
            seconds=_KNOCK_SECONDS,
        )
        if others
        else {}
    )
    nodes.ask("stop_listening", nodes=[0], limit_seconds=_RESOLVE_SECONDS)
    if not others:
        return candidates[0] if candidates else "127.0.0.1"
    if not candidates:
        raise UserError(
            f"{nodes.hosts[0]} has no IPv4 address but loopback: give --master-ip, the address at which the others "
            "reach it"
        )
    refuse(
        {
            nodes.hosts[node]: answer["error"]
            for node, answer in answers.items()
            if "error" in answer
        },
        of=len(nodes.hosts),
    )
    return _reached_by_all(nodes.hosts, candidates, answers, port)


def _candidates(nodes: HostConnections, facts: Sequence[Facts], others: Sequence[int]) -> list[str]:
    """Addresses to try, the likeliest first: what the first host's names mean to the others and is its own; its own ones, private
    networks before others; what its names mean beside that (an address that a router translates)."""
    names = [nodes.hosts[0].name, facts[0]["name"]]
    answers = (
        nodes.ask("resolve", nodes=others, limit_seconds=_RESOLVE_SECONDS, names=names)
        if others
        else {}
    )
    named = list(
        dict.fromkeys(
            address for node in sorted(answers) for address in answers[node].get("result", [])
        )
    )
    own = facts[0]["addresses"]
    private = sorted(own, key=lambda address: not ipaddress.ip_address(address).is_private)
    found = [*(address for address in named if address in own), *private, *named]
    return [
        address for address in dict.fromkeys(found) if not ipaddress.ip_address(address).is_loopback
    ]


def _reached_by_all(
    hosts: Sequence[Host],
    candidates: Sequence[str],
    answers: Mapping[int, Mapping[str, Any]],
    port: int,
) -> str:
    failures = {
        address: [node for node in sorted(answers) if answers[node]["result"].get(address)]
        for address in candidates
    }
    best = min(candidates, key=lambda address: len(failures[address]))  # of equal ones the first
    if not failures[best]:
        return best
    problems = {
        hosts[
            node
        ]: f"does not reach {hosts[0]} at {best}:{port} ({answers[node]['result'][best]}): open the port "
        "there, or give --master-ip, another address of that host, or another --master-port"
        for node in failures[best]
    }
    refuse(problems, of=len(hosts))
    raise AssertionError("refuse raises where there are problems")
