"""Find an address of the first host that all other hosts can reach, by trying each.

A name may be known only on this machine, or resolve to 127.0.1.1 on the host itself; a host may
have several networks. So the other hosts resolve the first host's names and try to connect to each
of its addresses at the run's port.
"""

import ipaddress
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import UserError
from lab.ssh.connections import HostConnections
from lab.ssh.hosts import Host
from lab.ssh.probe import Facts, refuse, refuse_errors

_RESOLVE_SECONDS = 15.0
_CONNECT_SECONDS = 4.0


def find_master(connections: HostConnections, facts: Sequence[Facts], *, port: int) -> str:
    """Return the address at which rank 0 waits for the others.

    UserError if its port is taken, or if no address is reached by all.
    """
    others = range(1, len(connections.hosts))
    candidates = _candidates(connections, facts, others)
    token = secrets.token_hex(16)
    # A router that translates addresses forwards to one of these, too.
    own = facts[0]["addresses"] or ["127.0.0.1"]
    listening = connections.ask(
        "listen", nodes=[0], limit_seconds=_RESOLVE_SECONDS, addresses=own, port=port, token=token
    )[0]
    if "error" in listening:
        why = listening["error"].rpartition("] ")[2].lower()  # without [Errno 98]
        raise UserError(
            f"{connections.hosts[0]}: its port {port} cannot be used ({why}): end the program that "
            "listens there, or give another --master-port"
        )
    answers = connections.ask(
        "connect",
        nodes=others,
        limit_seconds=3 * _CONNECT_SECONDS + _RESOLVE_SECONDS,
        addresses=candidates,
        port=port,
        token=token,
        seconds=_CONNECT_SECONDS,
    )
    connections.ask("stop_listening", nodes=[0], limit_seconds=_RESOLVE_SECONDS)
    if not others:
        return candidates[0] if candidates else "127.0.0.1"
    if not candidates:
        raise UserError(
            f"{connections.hosts[0]} has no IPv4 address but loopback: give --master-ip, the "
            "address at which the others reach it"
        )
    refuse_errors(connections.hosts, answers)
    return _reached_by_all(connections.hosts, candidates, answers, port)


def _candidates(
    connections: HostConnections, facts: Sequence[Facts], others: Sequence[int]
) -> list[str]:
    """Return the addresses to try, the likeliest first.

    First the first host's own addresses to which the others resolve its names; then its other
    addresses, private networks before public ones. Last all other addresses of the names: a router
    may translate them.
    """
    names = [connections.hosts[0].name, facts[0]["name"]]
    answers = connections.ask("resolve", nodes=others, limit_seconds=_RESOLVE_SECONDS, names=names)
    named = [address for node in sorted(answers) for address in answers[node].get("result", [])]
    own = facts[0]["addresses"]
    private = sorted(own, key=lambda address: not ipaddress.ip_address(address).is_private)
    found = dict.fromkeys([*(address for address in named if address in own), *private, *named])
    return [address for address in found if not ipaddress.ip_address(address).is_loopback]


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
    problems = {
        hosts[node]: (
            f"cannot reach {hosts[0]} at {best}:{port} ({answers[node]['result'][best]}): open "
            "the port there, or give another address of that host with --master-ip, or another "
            "--master-port"
        )
        for node in failures[best]
    }
    refuse(problems, of=len(hosts))
    return best
