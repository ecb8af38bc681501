"""The hosts of a launch, the ssh command that reaches each, and what ssh's errors mean.

``ssh`` is the system's own, so that ~/.ssh/config, agents and jump hosts work as at the prompt.
"""

import argparse
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from common.errors import UserError
from common.say import count
from common.utils.paths import BASE
from common.utils.typed_json import shown

CONNECT_SECONDS = 10
# user@name, ssh://user@name:port, [address%interface]. A dash would begin an option of ssh, and
# ProxyCommand and Match of ~/.ssh/config pass a name to a shell.
USER = r"[\w.+][\w.+-]*"
HOST = rf"^(?:ssh://)?(?:{USER}@)?[\w.:\[][\w.:%\[\]-]*/?\Z"
# Without control characters, which a terminal would obey.
Plain = Annotated[str, Meta(max_length=10_000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
# For sh -c: $0 is the project's folder, $1 the interpreter, if the user has given one.
_START_NODE = (
    'cd -- "$0" || exit; test -x .venv/bin/python && set -- "${1:-.venv/bin/python}"; '
    'exec "${1:-python3}" -m lab.ssh'
)
_MOST_NAMED = 16

# A pattern of OpenSSH's or the shell's text, what is wrong, and the remedy.
REFUSALS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key has changed",
        "if the host was reinstalled: ssh-keygen -R {name}, then connect once by hand: ssh {given}",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "its host key is unknown here",
        "connect once by hand and compare the fingerprint: ssh {given}",
    ),
    (
        r"Permission denied \(",
        "it refuses your ssh key",
        "copy your key there: ssh-copy-id {given}; or give --user",
    ),
    (
        "Too many authentication failures",
        "your ssh agent offered too many keys",
        "name the right key in ~/.ssh/config: IdentityFile and IdentitiesOnly yes",
    ),
    (
        "Could not resolve hostname",
        "unknown host",
        "check the name, or give it an address in ~/.ssh/config or /etc/hosts",
    ),
    (
        "Connection refused",
        "it refuses connections on ssh's port",
        "start sshd there, or give the port: --ssh-option Port=2222",
    ),
    (
        r"timed out|No route to host|Network is unreachable|Host is down",
        "no answer",
        "check that it is switched on and can be reached from here: ssh {given}",
    ),
    (
        r"Bad owner or permissions|Bad configuration option|unknown option|Can't open user config|"
        "extra arguments at end of line|command-line line",
        "ssh rejects its configuration",
        "correct the file or --ssh-option that it names",
    ),
    (
        r"\bcd: ",
        "there is no folder of the project",
        "clone the project there, or give --workdir, the project's folder on the hosts",
    ),
    (
        "No module named '?lab",
        "the folder has no checkout of this version",
        "check out the same commit there (git pull), or give --workdir, the project's folder on "
        "the hosts",
    ),
    (
        r"python3?: (command )?not found|python3: No such file|\.venv/bin/python: |"
        "error: this Python",
        "no Python there that runs the project",
        "run make setup in the project's folder there, or give --python, an interpreter on the "
        "hosts",
    ),
    (
        r"not found|No such file or directory|Permission denied",
        "the interpreter cannot be started there",
        "give --python, an interpreter on the hosts",
    ),
    (
        r"kex_exchange_identification|Connection (closed|reset)",
        "it closed the connection before the login",
        "read sshd's log there (the cause may be MaxStartups, MaxSessions or a firewall)",
    ),
)
# Lines of ssh that are never the reason of a failure.
_NO_REASON = "Permanently added|Could not chdir to home directory"


@dataclass(frozen=True)
class Host:
    """One host, for one of its ranks.

    given : as ssh gets it: a name, an alias of ~/.ssh/config, user@name, ssh://user@name:port.
    shared : whether the host has other ranks, too.
    """

    rank: int
    given: str
    shared: bool = False

    @property
    def name(self) -> str:
        """Without user and port."""
        url = re.fullmatch(r"ssh://(?:[^@]*@)?([^@]*?)(?::\d+)?/?", self.given)
        if url is not None:
            return url[1]
        _, _, name = self.given.rpartition("@")
        return name

    def __str__(self) -> str:
        return f"{'rank' if self.shared else 'node'} {self.rank} ({self.name})"


def parse_hosts(text: str, *, shares_a_port: bool) -> list[Host]:
    """Return the hosts of ``--hosts``, rank 0 first.

    UserError if a name is empty or impossible, or if a host is named twice. ``shares_a_port``
    allows that: the user has given a port for the ranks that share a host.
    """
    hosts: list[Host] = []
    for name in text.split(","):
        host = Host(len(hosts), name.strip())
        if re.search(HOST, host.given) is None:
            raise UserError(
                f"--hosts: got {shown(text)}, and {shown(host.given)} is not a host name: give "
                "names as ssh knows them, separated by commas: --hosts node0,node1"
            )
        hosts.append(host)
    if not shares_a_port:
        _refuse_twins(hosts)
    return hosts


def share_hosts(hosts: Sequence[Host], ranks_per_node: int) -> list[Host]:
    """Return each host as many times, for consecutive ranks. UserError for a number below 1."""
    if ranks_per_node < 1:
        raise UserError(f"--ranks-per-node: got {ranks_per_node}, give at least 1")
    ranks = range(len(hosts) * ranks_per_node)
    shared = ranks_per_node > 1
    return [Host(rank, hosts[rank // ranks_per_node].given, shared) for rank in ranks]


def _refuse_twins(hosts: Sequence[Host]) -> None:
    """Raise UserError if a host is named twice."""
    [(name, times)] = Counter(host.given for host in hosts).most_common(1)
    if times > 1:
        raise UserError(
            f"--hosts: {name} is named twice, so two ranks would share one host: if you want that, "
            "give --master-port, the port that they share; otherwise name each host once and let "
            "torchrun start several ranks on each: "
            "-- torchrun --nproc-per-node 2 PartThree/main.py"
        )


class SSHOptions(msgspec.Struct, kw_only=True):
    """How hosts are reached, the same for all of them.

    workdir : the project's folder there, relative to the home folder unless absolute.
    user : on hosts that are given without one.
    python : the interpreter there; None: WORKDIR/.venv/bin/python if it exists, else python3.
    ssh_config, ssh_options : of ssh (-F, -o).
    silence_seconds : after so long without a sign of life a host ends what runs on it.
    """

    user: Annotated[str, Meta(pattern=rf"^{USER}\Z")] | None = None
    workdir: Plain = str(BASE)
    python: Plain | None = None
    ssh_options: Annotated[list[Plain], Meta(max_length=1000)] = []
    ssh_config: Plain | None = None
    silence_seconds: float = 30.0

    @classmethod
    def of(cls, args: argparse.Namespace) -> "SSHOptions":
        """Return what the flags say. UserError on impossible values."""
        if args.silence < 1:
            raise UserError(f"--silence: got {args.silence:g}, give seconds, 1 or more")
        folder = str(BASE)
        if args.workdir is not None:
            # "~" is the home folder, where the login shell starts.
            folder = re.sub(r"^~/?", "", args.workdir) or "."
        return cls(
            user=args.user,
            workdir=folder,
            python=args.python,
            ssh_options=args.ssh_option,
            ssh_config=str(args.ssh_config.absolute()) if args.ssh_config else None,
            silence_seconds=args.silence,
        )


def ssh_command(host: Host, options: SSHOptions) -> list[str]:
    """Return the command that starts ``lab.ssh`` on a host, in the project's folder.

    It never asks for a password, since nobody can type passwords for many hosts at once.
    """
    defaults = [
        "BatchMode=yes",
        f"ConnectTimeout={CONNECT_SECONDS}",
        f"ServerAliveInterval={max(1, round(options.silence_seconds / 3))}",
        "ServerAliveCountMax=2",
        "LogLevel=INFO",
        "ClearAllForwardings=yes",
        "RemoteCommand=none",
        "EscapeChar=none",
    ]
    command = ["ssh", "-T"]
    if options.ssh_config is not None:
        command += ["-F", options.ssh_config]
    # The user's options come first: if an option is given twice, ssh takes the first.
    for option in [*options.ssh_options, *defaults]:
        command += ["-o", option]
    if options.user is not None and "@" not in host.given:
        command += ["-l", options.user]
    remote = ["exec", "sh", "-c", _START_NODE, options.workdir]
    if options.python is not None:
        remote.append(options.python)
    return [*command, "--", host.given, shlex.join(remote)]


def explain(errors: Sequence[str], host: Host) -> str:
    """Return why a host does not answer and what to do; the last line if the error is unknown."""
    lines = [line.removeprefix("ssh: ") for line in errors if not re.search(_NO_REASON, line)]
    for pattern, what, remedy in REFUSALS:
        found = next((line for line in lines if re.search(pattern, line)), None)
        if found is not None:
            advice = remedy.format(name=host.name, given=host.given)
            if found.startswith("@"):  # a frame around a warning
                return f"{what}: {advice}"
            return f"{what} (ssh: {found[:200]}): {advice}"
    if lines:
        return f"ssh: {lines[-1][:300]}"
    return f"ssh ended without a message: try ssh {host.given}"


def refuse_hosts(
    problems: Mapping[Host, str], *, of: int, what: str = "cannot take part; nothing was started"
) -> None:
    """Raise UserError with a line for each host that has a problem, if any has."""
    if not problems:
        return
    lines = [f"{len(problems):,} of {count(of, 'host')} {what}"]
    lines += [f"  {host}: {problem}" for host, problem in list(problems.items())[:_MOST_NAMED]]
    if len(problems) > _MOST_NAMED:
        lines.append(f"  and {len(problems) - _MOST_NAMED} more")
    raise UserError("\n".join(lines))
