"""What the reader's own links pass, for ``lab predict --links``: the output of a benchmark.

``read_links`` reads a table of nccl-tests or of Gloo's benchmark, or what iperf3 printed.
``fit_links`` moves the priors of a scenario's cluster to where they explain it. Imports no torch.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from common.errors import UserError, file_errors
from common.say import bytes_text, count, rate_text
from common.sync.plans.rings import AllReduceFlatPlan
from common.utils.atomic_files import read_regular
from lab.predict.common_models import evenly
from lab.predict.event_model import loads
from lab.predict.fitting import MeasuredStep
from lab.predict.observed import ClusterFit, fit_cells
from lab.predict.own_model import with_own_step
from lab.predict.priors import Beliefs
from lab.predict.scenario import Scenario

_MOST_BYTES = 10_000_000
_MOST = 1e9  # microseconds of a message, or Gbit/s
_NO_COMPUTING = 1e-8  # seconds of the step that stands for none
_FLOAT_BYTES = 4  # of an entry in Gloo's tables
_MOST_SIZES = 8  # to fit, which takes a moment each
_MOST_OF_A_LINK = 0.75  # of its usual payload: from there on the link is the limit
_EITHER_WAY = 1.5  # how far a node's payload may be from the one that a table shows first
_TAG = re.compile(r"^\s*(?:\[[^\]]*\]<std\w+>:|\d+: ?)")  # what mpirun and srun put before a line
_UNIT = re.compile(r" (?=\((?:us|ns|B|GB/s)\))")
_RATE = re.compile(r"(?<![\d.])([\d.]+) ([KMGT]?)(bits|Bytes)/sec")
_COUNTED = {"bits": 1, "Bytes": 8}
_GBITS = {"": 1e-9, "K": 1e-6, "M": 1e-3, "G": 1.0, "T": 1e3}


@dataclass(frozen=True)
class LinkFile:
    """What a benchmark printed.

    backend : whose messages it timed; "" of iperf3. gbit : payload a second that a node passes, as
    low, typical and high. seconds : of an all_reduce over ``nodes`` x ``ranks_per_node`` ranks, by
    bytes; empty of iperf3.
    """

    name: str
    tool: str
    backend: str
    gbit: tuple[float, float, float]
    nodes: int = 2
    ranks_per_node: int = 1
    seconds: Mapping[int, float] = field(default_factory=dict)


def read_links(path: Path) -> LinkFile:
    """Read what a benchmark printed. Raises UserError if the file holds none of the three."""
    with file_errors(f"--links: {path} cannot be read"):
        text = read_regular(path, most_bytes=_MOST_BYTES).decode("utf-8", "replace")
    lines = [_TAG.sub("", line) for line in text.splitlines()]
    for read in (_nccl_tests, _gloo_benchmark, _iperf3):
        try:
            found = read(path.name, lines)
        except UserError as error:
            raise UserError(f"--links: {path}: {error}") from error
        except (ValueError, LookupError, TypeError, RecursionError):  # it was cut
            continue
        if found is not None:
            return found
    raise UserError(
        f"--links: {path} holds no table of nccl-tests (all_reduce_perf) or of Gloo's benchmark "
        "(allreduce_ring_chunked), and no result of iperf3: give the whole output of one"
    )


def _rows(lines: Sequence[str], *names: str) -> list[dict[str, str]]:
    """Return the rows below the header that has these names; of two columns the first."""
    header: list[str] = []
    rows = []
    for line in lines:
        words = _UNIT.sub("", line).replace("#", " ").split()
        if set(names) <= set(words):
            header = words
        elif header and words and words[0].isdigit():
            rows.append(dict(zip(header[::-1], words[len(header) - 1 :: -1], strict=True)))
    return rows


def _table(
    file: tuple[str, str, str], hosts: tuple[int, int], microseconds: Mapping[int, float]
) -> LinkFile:
    """Return a table of an all_reduce; ``file`` : name, tool and backend."""
    seconds = {}
    for nbytes, taken in sorted(microseconds.items()):
        if nbytes > 0 and 0 < taken < _MOST:
            seconds[nbytes] = 1e-6 * taken
    nodes, ranks_per_node = hosts
    if nodes < 2 or not seconds:
        raise UserError(
            f"{count(nodes, 'node')} and {count(len(seconds), 'size')} with a time say nothing "
            "about links: give a run on two nodes or more, with its header"
        )
    ranks = nodes * ranks_per_node
    most = max(loads("all_reduce", size, ranks)[1] / seconds[size] for size in seconds) * 8e-9
    gbit = (most / _EITHER_WAY, most, most * _EITHER_WAY)
    return LinkFile(*file, gbit, nodes, ranks_per_node, seconds)


def _nccl_tests(name: str, lines: Sequence[str]) -> LinkFile | None:
    rows = _rows(lines, "size", "count", "redop", "time", "busbw")
    if not rows:
        return None
    ranks = [placed for line in lines if (placed := _rank_and_host(line))]
    on_hosts = Counter(host for _, host in ranks)
    if len({rank for rank, _ in ranks}) != len(ranks) or len({*on_hosts.values()}) != 1:
        raise UserError(
            "its header does not name each rank once, with as many on each host: build nccl-tests "
            "with MPI=1, and give the whole output of one run"
        )
    share = 2 * (len(ranks) - 1) / len(ranks)
    algorithm, bus = (float(rows[-1][name]) for name in ("algbw", "busbw"))
    if not math.isclose(bus, share * algorithm, rel_tol=0.03, abs_tol=0.02):
        raise UserError(
            f"busbw is not {share:.3g} times algbw, as of an all_reduce over "
            f"{count(len(ranks), 'rank')}: give the output of all_reduce_perf"
        )
    nodes = len(on_hosts)
    microseconds = {int(row["size"]): float(row["time"]) for row in rows}
    return _table((name, "nccl-tests", "nccl"), (nodes, len(ranks) // nodes), microseconds)


def _rank_and_host(line: str) -> tuple[str, str] | None:
    """Return what a line of the header says: #  Rank  0 Group  0 Pid  71 on  node0 device  0 ..."""
    words = line.replace("#", " ").split()
    if words[:1] != ["Rank"] or not {"on", "device"} <= set(words[2:-1]):
        return None
    return words[1], words[words.index("on") + 1]


def _gloo_benchmark(name: str, lines: Sequence[str]) -> LinkFile | None:
    rows = _rows(lines, "elements", "p50(us)")
    if not rows:
        return None
    about = dict(line.split(":", 1) for line in lines if line.startswith(("Algorithm", "Options")))
    if "allreduce_ring" not in about["Algorithm"]:
        raise UserError(f"it ran {about['Algorithm'].strip()}: give allreduce_ring_chunked")
    [ranks] = re.findall(r"processes=(\d+)", about["Options"])
    microseconds = {_FLOAT_BYTES * int(row["elements"]): float(row["p50(us)"]) for row in rows}
    return _table((name, "Gloo's benchmark", "gloo"), (int(ranks), 1), microseconds)


def _iperf3(name: str, lines: Sequence[str]) -> LinkFile | None:
    if lines[0].lstrip().startswith("{"):
        content = json.loads("\n".join(lines))
        gbits = [interval["sum"]["bits_per_second"] / 1e9 for interval in content["intervals"]]
        received = content["end"]["sum_received"]["bits_per_second"] / 1e9
    else:
        # Of several streams their sum counts.
        counted = [line for line in lines if "[SUM]" in line] or lines
        *_, received = _gbits([line for line in counted if "receiver" in line])
        intervals = [line for line in counted if not re.search("sender|receiver|omitted", line)]
        gbits = _gbits(intervals)
    low, high = np.quantile(gbits, (0.1, 0.9)).tolist()
    if not 0 < min(low, received) <= max(high, received) < _MOST:
        return None
    return LinkFile(name, "iperf3", "", (min(low, received), received, max(high, received)))


def _gbits(lines: Sequence[str]) -> list[float]:
    """Return the Gbit/s of each line of iperf3 that has a rate."""
    found = []
    for rate in filter(None, map(_RATE.search, lines)):
        number, unit, counted = rate.groups()
        found.append(float(number) * _GBITS[unit] * _COUNTED[counted])
    return found


def fit_links(found: LinkFile, scenario: Scenario) -> ClusterFit:
    """Return what the file says about the cluster of ``scenario``, on links of its rate.

    Raises UserError if it measured something else.
    """
    cluster = scenario.cluster
    assert cluster is not None
    by_tcp = cluster.transport.startswith("tcp")
    if found.backend not in ("", cluster.backend) or not (found.seconds or by_tcp):
        raise UserError(
            f"--links: {found.name}: {found.tool} does not measure {cluster.name}: change "
            "--backend or --transport, or give another file"
        )
    sizes = [*found.seconds]
    places = np.linspace(0, len(sizes) - 1, min(_MOST_SIZES, len(sizes)))
    steps = []
    for nbytes in [sizes[round(place)] for place in places.tolist()]:
        message = f"all_reduce of {bytes_text(nbytes)}"
        steps.append((message, {"bytes": nbytes}, _cell(found, nbytes, scenario)))
    passed = f"TCP passes {rate_text(1e9 * found.gbit[1])}"
    if steps:
        ranks = f"{found.nodes} x {found.ranks_per_node} ranks"
        passed = f"all_reduce of {count(len(sizes), 'size')} over {ranks}, {len(steps)} fitted"
    about = f"--links {found.name}, {found.tool}: {passed}"
    return fit_cells(about, steps, cluster.beliefs, start=_beliefs(found, scenario))


def _beliefs(found: LinkFile, scenario: Scenario) -> Beliefs:
    """Return the cluster's beliefs with what the file's links pass in place of a prior.

    Where they pass most of their rate, the links are the limit, else the nodes' software is. What
    iperf3 passed is the links' alone.
    """
    cluster = scenario.cluster
    assert cluster is not None
    assert scenario.rate_bits is not None
    kind = (cluster.backend, cluster.transport)
    known = {prior.short_name: prior for prior in cluster.beliefs.priors if prior.holds(*kind)}
    priors = {prior.name: prior for prior in cluster.beliefs.priors}
    limit = known["line_share"]
    unit = scenario.rate_bits / 1e9
    if found.seconds and "most_gbit" in known:
        software = known["most_gbit"]
        if found.gbit[1] > _MOST_OF_A_LINK * limit.typical * unit:
            del priors[software.name]
        else:
            limit = software
            unit = cluster.adapters
    low, typical, high = (gbit / unit for gbit in found.gbit)
    priors[limit.name] = replace(limit, low=low, typical=typical, high=high)
    return Beliefs.of(tuple(priors.values()))


def _cell(found: LinkFile, nbytes: int, scenario: Scenario) -> MeasuredStep:
    """Return an all_reduce as the step of a rank that computes nothing."""
    alone = with_own_step(scenario.calibration, _NO_COMPUTING, 1)
    message = replace(
        scenario,
        calibration=evenly(nbytes / _FLOAT_BYTES, 1).of(alone),
        scaling="weak",
        batch_size=1,
        step_seconds=_NO_COMPUTING,
        step_samples=1,
        node_step_seconds=None,
        accumulation_steps=1,
        sync_batchnorm=False,
        own_nodes=True,
        ranks_per_node=found.ranks_per_node,
        inside_bits=scenario.inside_bits if found.ranks_per_node > 1 else None,
    )
    return MeasuredStep(message, AllReduceFlatPlan(), found.nodes, found.seconds[nbytes])
