"""``lab doctor`` itself: run every check, then print the findings or give them as JSON.

``request_of`` reads the flags, ``examine`` runs the checks, ``main_doctor`` prints. To add a check,
write a function in one of the other files and add it to CHECKS. Each check runs in a daemon thread
and is abandoned after a time limit, so none can hang the command.
"""

import argparse
import functools
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from common.errors import UserError
from common.utils.processes import in_thread
from common.utils.typed_json import calm
from lab.doctor import files, machine, network
from lab.doctor.check_result import FAILURE, WARNING, CheckRequest, CheckResult, reason
from lab.doctor.node_exchange import connect_nodes
from lab.doctor.node_findings import own_facts, results_of

T = TypeVar("T")
CHECKS: tuple[Callable[[CheckRequest], CheckResult | None], ...] = (
    machine.check_python,
    machine.check_system,
    machine.check_torch,
    machine.check_gpus,
    machine.check_cores,
    machine.check_memory,
    machine.check_open_files,
    files.check_code,
    files.check_dataset,
    files.check_disk,
    network.check_host_name,
    network.check_interface,
    network.check_port,
    network.check_master,
    machine.check_cluster_tools,
)
_CHECK_SECONDS = 120.0
_STYLES = {"ok": "green", WARNING: "yellow", FAILURE: "bold red"}


def request_of(args: argparse.Namespace) -> CheckRequest:
    """Return what the flags ask for. Raises UserError if they don't go together."""
    if (args.num_nodes is None) != (args.rank is None) or (
        args.rank is not None and args.master_ip is None
    ):
        raise UserError(
            "lab doctor: give --master-ip, --num-nodes and --rank together to test the network "
            "between the nodes, or --master-ip alone, or none of the three"
        )
    if args.rank is not None and not 0 <= args.rank < args.num_nodes:
        raise UserError(
            f"--rank: got {args.rank} of --num-nodes {args.num_nodes}; ranks count from 0, so give "
            f"0 to {args.num_nodes - 1}"
        )
    if not 1 <= args.master_port <= 65535:
        raise UserError(f"--master-port: got {args.master_port}, give 1 to 65535")
    if args.timeout <= 0:
        raise UserError(f"--timeout: got {args.timeout:g}, give seconds above 0")
    return CheckRequest(
        args.master_ip or "",
        args.master_port,
        args.num_nodes or 0,
        args.rank or 0,
        args.dataset,
        args.data_dir,
        args.output_dir.absolute(),
        args.timeout,
    )


def examine(request: CheckRequest) -> Iterator[CheckResult]:
    """Run every check, in order, then exchange findings with the other nodes, if any."""
    found = []
    for check in CHECKS:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        result = _limited(name, functools.partial(check, request), _CHECK_SECONDS)
        if result is not None:
            found.append(result)
            yield result
    if not request.num_nodes:
        return
    blocked = [one for one in found if one.name in ("port", "interface") and one.status == FAILURE]
    if blocked:
        yield CheckResult(
            "nodes", FAILURE, f"not tested: the {blocked[0].name} check failed", blocked[0].remedy
        )
        return
    results = _limited(
        "nodes",
        functools.partial(_connect_nodes, request),
        3 * request.timeout_seconds + _CHECK_SECONDS,
    )
    yield from [results] if isinstance(results, CheckResult) else results


def _connect_nodes(request: CheckRequest) -> list[CheckResult]:
    try:
        nodes, problems = connect_nodes(request, own_facts(request))
    except OSError as error:
        remedy = "see the lines about port and interface above"
        return [CheckResult("nodes", FAILURE, f"no connection ({reason(error)})", remedy)]
    return results_of(request, nodes, problems)


def _limited(name: str, ask: Callable[[], T], seconds: float) -> T | CheckResult:
    """Return the result of ``ask``; a failure named ``name`` if it raises or takes too long."""
    try:
        return in_thread(ask).result(seconds)
    except TimeoutError:
        return CheckResult(
            name,
            FAILURE,
            f"no answer within {seconds:g} s",
            "check whether a disk or the name server (DNS) hangs",
        )
    except Exception as error:  # one broken check must not hide the others
        return CheckResult(
            name,
            FAILURE,
            f"this check itself failed ({type(error).__name__}: {error})",
            "report this line to the authors",
        )


def as_json(request: CheckRequest, results: Sequence[CheckResult]) -> dict[str, Any]:
    """Return the findings as docs/troubleshooting.md describes them."""
    counts = Counter(result.status for result in results)
    return {
        "format": 1,
        "what": "lab doctor",
        "host": socket.gethostname(),
        "rank": request.rank if request.num_nodes else None,
        "num_nodes": request.num_nodes or None,
        "ok": not counts[FAILURE],
        "failures": counts[FAILURE],
        "warnings": counts[WARNING],
        "findings": [asdict(result) for result in results],
    }


def main_doctor(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if there is a failure, else 0.

    Raises UserError if the flags don't go together.
    """
    request = request_of(args)
    console = Console(highlight=False, soft_wrap=True)
    results = []
    for result in examine(request):
        results.append(result)
        if not args.json:
            _print(console, result)
    found = as_json(request, results)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        failures, warnings = found["failures"], found["warnings"]
        counts = (
            f"{failures} failure{'s' * (failures != 1)}, {warnings} warning{'s' * (warnings != 1)}"
        )
        console.print(
            Text(f"{counts}: {'ready to run' if found['ok'] else 'not ready'}", style="bold")
        )
    return 0 if found["ok"] else 1


def _print(console: Console, result: CheckResult) -> None:
    style = _STYLES[result.status]
    text, remedy = calm(result.text), calm(result.remedy)  # they may quote other nodes
    console.print(Text.assemble((f"{result.status:<8}", style), f" {result.name:<13} {text}"))
    if remedy:
        console.print(
            Text(f"{'':<22} -> {remedy}", style="dim" if result.status == WARNING else "")
        )
