"""``lab doctor`` itself: run every check, then print the findings or give them as JSON.

To add a check, write a function in one of the other files and add it to CHECKS. Each runs in a
daemon thread and is abandoned after a time limit, so none can hang the command.
"""

import argparse
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pkgutil import resolve_name

from rich.console import Console
from rich.text import Text

from common.errors import UserError
from common.say import count
from common.utils.processes import in_thread
from common.utils.typed_json import calm
from lab.doctor.check_result import FAILURE, WARNING, CheckResult, failure

# By the names of their results. A check may return no result, or several by name.
CHECKS = {
    "python": "machine:check_python",
    "system": "machine:check_system",
    "torch": "machine:check_torch",
    "gpu": "machine:check_gpu",
    "cpu": "machine:check_cores",
    "memory": "machine:check_memory",
    "open files": "machine:check_open_files",
    "code": "machine:check_code",
    "dataset": "machine:check_dataset",
    "disk": "machine:check_disk",
    "host name": "network:check_host_name",
    "interface": "network:check_interface",
    "port": "network:check_port",
    "master": "network:check_master",
    "lab cluster": "machine:check_cluster_tools",
    "nodes": "nodes:check_nodes",
}
_CHECK_SECONDS = 120.0
_STYLES = {"ok": "green", WARNING: "yellow", FAILURE: "bold red"}


def check_flags(flags: argparse.Namespace) -> None:
    """Raise UserError if the flags don't go together."""
    size = flags.num_nodes
    rank = flags.rank
    incomplete = (size is None) != (rank is None)
    if incomplete or (rank is not None and flags.master_ip is None):
        raise UserError(
            "lab doctor: give --master-ip, --num-nodes and --rank together to test the network "
            "between the ranks, or --master-ip alone, or none of the three"
        )
    if rank is not None and not 0 <= rank < size:
        raise UserError(f"--rank: got {rank} of --num-nodes {size}; ranks count from 0")
    if not 1 <= flags.master_port <= 65535:
        raise UserError(f"--master-port: got {flags.master_port}, give 1 to 65535")
    if flags.timeout <= 0:
        raise UserError(f"--timeout: got {flags.timeout:g}, give seconds above 0")


def examine(flags: argparse.Namespace) -> Iterator[tuple[str, CheckResult]]:
    """Run every check, in order; yield the name and the result of each that applies."""
    for name, place in CHECKS.items():
        limit_seconds = _CHECK_SECONDS
        if name == "nodes":  # which wait for each other
            limit_seconds += 3 * flags.timeout
        try:
            check = resolve_name(f"{__package__}.{place}")
            found = in_thread(partial(check, flags)).result(limit_seconds)
        except TimeoutError:
            found = failure(
                f"no answer within {limit_seconds:g} s",
                "check whether a disk or the name server (DNS) hangs",
            )
        except Exception as error:  # one broken check must not hide the others
            found = failure(
                f"not checked ({type(error).__name__}: {error})",
                "if no line above says why, report this one to the authors",
            )
        if isinstance(found, CheckResult):
            found = {name: found}
        yield from (found or {}).items()


def as_json(flags: argparse.Namespace, found: Mapping[str, CheckResult]) -> dict:
    """Return the findings as docs/troubleshooting.md describes them."""
    counts = Counter(result.status for result in found.values())
    return {
        "format": 1,
        "what": "lab doctor",
        "host": socket.gethostname(),
        "rank": flags.rank,
        "num_nodes": flags.num_nodes,
        "ok": not counts[FAILURE],
        "failures": counts[FAILURE],
        "warnings": counts[WARNING],
        "findings": [{"name": name, **asdict(result)} for name, result in found.items()],
    }


def main_doctor(flags: argparse.Namespace) -> int:
    """Print the findings; return 1 if there is a failure, else 0.

    Raises UserError if the flags don't go together.
    """
    # torch reads it when imported: its C++ warnings repeat what the checks say, with stacks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    check_flags(flags)
    console = Console(highlight=False, soft_wrap=True)
    found = {}
    for name, result in examine(flags):
        found[name] = result
        if not flags.json:
            show(console, name, result)
    summary = as_json(flags, found)
    if flags.json:
        print(json.dumps(summary, indent=1))
    else:
        failures = count(summary["failures"], "failure")
        warnings = count(summary["warnings"], "warning")
        verdict = "ready to run" if summary["ok"] else "not ready"
        console.print(Text(f"{failures}, {warnings}: {verdict}", style="bold"))
    return 0 if summary["ok"] else 1


def show(console: Console, name: str, result: CheckResult) -> None:
    """Print a result and its remedy."""
    text, remedy = calm(result.text), calm(result.remedy)  # they may quote other nodes
    status = (f"{result.status:<8}", _STYLES[result.status])
    console.print(Text.assemble(status, f" {name:<13} {text}"))
    if remedy:
        style = "dim" if result.status == WARNING else ""
        console.print(Text(f"{'':<22} -> {remedy}", style=style))
