"""Turn the errors of the system's ``ssh`` into one line that says what to do.

For another error add an entry to REFUSALS: a pattern of OpenSSH's text, what is wrong, the remedy.
"""

import re
from collections.abc import Sequence

REFUSALS: tuple[tuple[str, str, str], ...] = (
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
        "keyword .* extra arguments|command-line line",
        "ssh rejects its configuration",
        "correct the file or --ssh-option that it names",
    ),
    (
        r"python3?: (command )?not found|python3: No such file|\.venv/bin/python: ",
        "no Python there",
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
_NO_REASON = "Permanently added|Could not chdir to home directory"


def explain(errors: Sequence[str], *, name: str, given: str) -> str:
    """Return why ``ssh`` failed and what to do; ssh's own last line where the error is unknown."""
    lines = [line.removeprefix("ssh: ") for line in errors if not re.search(_NO_REASON, line)]
    for pattern, what, remedy in REFUSALS:
        found = next((line for line in lines if re.search(pattern, line)), None)
        if found is not None:
            quoted = "" if found.startswith("@") else f" (ssh: {found[:200]})"
            return f"{what}{quoted}: {remedy.format(name=name, given=given)}"
    return f"ssh: {lines[-1][:300]}" if lines else f"ssh ended without a message: try ssh {given}"
