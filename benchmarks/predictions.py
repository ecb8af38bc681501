"""Score predictions of steps that others measured: the table of predictions.md.

    python benchmarks/predictions.py               # 62 steps of 14 groups
    python benchmarks/predictions.py FILE --json   # a CSV file with the columns of published.csv
    python benchmarks/predictions.py --leave-one-out   # each group by priors fitted to the others

``validate`` predicts each row of a file by priors.toml, and ``scores`` says how good that is.
``--write`` keeps the scores of published.csv for the page of ``lab whatif``.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import UserError
from common.say import count
from common.utils.atomic_files import write_atomically
from common.utils.grouping import grouped
from lab.predict.cluster import typical_latency
from lab.predict.event_model import Network, loads, step_seconds
from lab.predict.fitting import MeasuredStep, fit
from lab.predict.priors import Beliefs, load_priors
from lab.predict.published import PublishedStep, published_path, read_published
from lab.predict.tables import interval
from lab.whatif.data import FAMILIES

_COMMON_GBIT = 7.0  # of a link whose rate is not stated: what groups on CloudLab measured
_WIDTH = 100
_BACKENDS = {"gloo": "Gloo", "nccl": "NCCL"}
_HEADINGS = (
    "rows",
    "median\nerror",
    "90th\nperc.",
    "in-\nside",
    "perfect\nscaling",
    "no\noverlap",
    "over-\nlap",
    "pairs in\norder",
)


@dataclass(frozen=True)
class Scored:
    """A row with its prediction: seconds of the step, and of its 80 % interval.

    baselines : what simpler rules predict, by name.
    """

    row: PublishedStep
    predicted: float
    low: float
    high: float
    baselines: Mapping[str, float]

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.row.measured_step_s - 1

    def as_json(self) -> dict[str, Any]:
        """Return the row's columns and the prediction."""
        row = asdict(self.row)
        columns = row.pop("columns")
        return {
            **columns,
            **row,
            "predicted_step_s": self.predicted,
            "low_s": self.low,
            "high_s": self.high,
            "error": self.error,
        }


class Errors(Struct):
    """Errors of some predictions: fractions."""

    median_error: float
    p90_error: float


class Score(Errors):
    """Scores of some rows; errors and shares are fractions.

    inside : share of rows in their interval. pairs : of strategies measured in one setting.
    pairs_in_order : the share of them in the right order; None: no pairs. baselines : by name of
    the simpler rule.
    """

    rows: int
    inside: float
    pairs: int
    pairs_in_order: float | None
    baselines: Mapping[str, Errors]


def validate(rows: Sequence[PublishedStep], beliefs: Beliefs | None = None) -> list[Scored]:
    """Predict each row, in order; ``beliefs`` None: those of priors.toml."""
    if beliefs is None:
        beliefs = Beliefs.of(load_priors())
    scored = []
    for row in rows:
        cell = row.cell(beliefs)
        drawn = cell.scenario.drawn()
        low, high = interval(cell.predicted(drawn) * drawn.remainder)
        predicted = float(cell.predicted(cell.scenario))
        scored.append(Scored(row, predicted, low, high, _baselines(row, cell)))
    return scored


def score(scored: Sequence[Scored]) -> Score:
    """Return the scores of these rows."""
    measured = np.array([row.row.measured_step_s for row in scored])
    inside = [row.low <= row.row.measured_step_s <= row.high for row in scored]
    of_all = _errors(np.array([row.predicted for row in scored]) / measured)
    baselines = {}
    for name in scored[0].baselines:
        baselines[name] = _errors(np.array([row.baselines[name] for row in scored]) / measured)
    in_order = _pairs_in_order(scored)
    return Score(
        of_all.median_error,
        of_all.p90_error,
        rows=len(scored),
        inside=float(np.mean(inside)),
        pairs=len(in_order),
        pairs_in_order=float(np.mean(in_order)) if in_order else None,
        baselines=baselines,
    )


def scores(scored: Sequence[Scored]) -> dict[str, Score]:
    """Return the scores of all rows, of each backend, and of each group in the file's order."""
    found = {"all": score(scored)}
    for backend in _BACKENDS:
        of_backend = [row for row in scored if row.row.backend == backend]
        if of_backend:
            found[backend] = score(of_backend)
    for group, of_group in grouped((row.row.group, row) for row in scored).items():
        name = f"group {group}" if group in found else group
        found[name] = score(of_group)
    return found


def leave_one_out(rows: Sequence[PublishedStep]) -> list[tuple[Scored, Scored]]:
    """Return each row by priors.toml, and by priors fitted to the other groups.

    A fit moves the typical values. How far clusters differ from them stays as priors.toml says.
    """
    beliefs = Beliefs.of(load_priors())
    found = []
    for group, own in grouped((row.group, row) for row in rows).items():
        others = [row.cell(beliefs) for row in rows if row.group != group]
        fitted = replace(beliefs, mean=fit(beliefs, others).mean)
        found += zip(validate(own), validate(own, fitted), strict=True)
    return found


def families() -> list[dict[str, Any]]:
    """Return how far predictions of the published steps were off, by backend, for the page."""
    found = scores(validate(read_published(published_path())))
    kept = []
    for backend, label in _BACKENDS.items():
        of_backend = found[backend]
        family = {
            "backend": backend,
            "label": label,
            "rows": of_backend.rows,
            "median": of_backend.median_error,
            "p90": of_backend.p90_error,
            "inside": of_backend.inside,
        }
        kept.append(family)
    return kept


def _errors(predicted_over_measured: Any) -> Errors:
    off = np.abs(predicted_over_measured - 1)
    return Errors(float(np.median(off)), float(np.quantile(off, 0.9)))


def _pairs_in_order(scored: Sequence[Scored]) -> list[bool]:
    """Return whether the order is right, of each pair of strategies in one setting."""
    in_order = []
    for of_setting in grouped((row.row.setting, row) for row in scored).values():
        for first, second in combinations(of_setting, 2):
            if first.row.strategy == second.row.strategy:
                continue
            measured = first.row.measured_step_s < second.row.measured_step_s
            in_order.append(measured == (first.predicted < second.predicted))
    return in_order


def _baselines(row: PublishedStep, cell: MeasuredStep) -> dict[str, float]:
    """Return the step by simpler rules: perfect scaling, an envelope's back, and links alone."""
    rate_bits = 1e9 * (row.rate_gbit or _COMMON_GBIT)
    beta = 8 / rate_bits
    nbytes = 1e6 * row.grad_megabytes
    kinds = ["all_reduce"]
    if row.strategy.startswith("gather_scatter"):
        kinds = ["gather", "scatter"]
    link_bytes = sum(loads(kind, nbytes, row.ranks)[1] for kind in kinds)
    latency = typical_latency(rate_bits)
    alone = replace(cell.scenario, cluster=None, latency_seconds=latency)
    links = step_seconds(
        cell.plan,
        alone.calibration.gradient_sizes,
        row.ranks,
        network=Network(latency, beta),
        compute=alone.compute_at(row.nodes),
    )
    return {
        "perfect_scaling": row.own_seconds,
        "no_overlap_line_rate": row.own_seconds + link_bytes * beta,
        "overlap_line_rate": links,
    }


def print_scores(path: Path) -> None:
    """Score the file's rows and print a table by group."""
    scored = validate(read_published(path))
    console = Console(highlight=False, width=_WIDTH)
    groups = {row.row.group for row in scored}
    console.print(
        f"{path.name}: {count(len(scored), 'measured step')} of {count(len(groups), 'group')}, "
        "predicted by priors.toml",
        "inside: share of steps in their 80 % interval. Simple rules (median error): perfect "
        "scaling; no overlap: all bytes at the nominal rate, after computing; overlap: beside "
        "backward",
        sep="\n",
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("group", overflow="fold")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, of_group in scores(scored).items():
        table.add_row(Text(_BACKENDS.get(name, name)), *_cells(of_group))
    console.print(table)


def _cells(found: Score) -> list[str]:
    shares = [f"{found.median_error:.1%}", f"{found.p90_error:.1%}", f"{found.inside:.0%}"]
    baselines = [f"{errors.median_error:.1%}" for errors in found.baselines.values()]
    order = "-"
    if found.pairs_in_order is not None:
        order = f"{found.pairs_in_order * found.pairs:.0f}/{found.pairs}"
    return [str(found.rows), *shares, *baselines, order]


def print_leave_one_out(path: Path) -> None:
    """Print each group's errors by priors.toml, and by priors fitted to all other groups."""
    pairs = leave_one_out(read_published(path))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("group", "year", "kind", "software", "link"):
        table.add_column(heading)
    for heading in ("rows", "not\nfitted", "90th\nperc.", "fitted to\nthe others", "90th\nperc."):
        table.add_column(heading, justify="right", no_wrap=True)
    errors = _errors_before_and_after(pairs)
    table.add_row("all", "", "", "", "", str(len(pairs)), *errors)
    for group, own in grouped((pair[0].row.group, pair) for pair in pairs).items():
        row = own[0][0].row
        facts = [row.columns.get(name) or "-" for name in ("year", "kind")]
        link = {(True, True): "both", (True, False): "RDMA", (False, True): "TCP"}
        by_rdma = {pair[0].row.by_rdma for pair in own}
        words = [*facts, _BACKENDS[row.backend], link[True in by_rdma, False in by_rdma]]
        errors = _errors_before_and_after(own)
        table.add_row(Text(group), *map(Text, words), str(len(own)), *errors)
    Console(highlight=False, width=_WIDTH).print(table)


def _errors_before_and_after(pairs: Sequence[tuple[Scored, Scored]]) -> list[str]:
    """Return medians and 90th percentiles, not fitted and fitted."""
    cells = []
    for scored in zip(*pairs, strict=True):
        of_all = score(scored)
        cells += [f"{of_all.median_error:.1%}", f"{of_all.p90_error:.1%}"]
    return cells


def print_json(path: Path) -> None:
    """Score the file's rows and print scores and rows as JSON."""
    scored = validate(read_published(path))
    rows = [row.as_json() for row in scored]
    print(json.dumps(msgspec.to_builtins({"summary": scores(scored), "rows": rows}), indent=1))


def main(words: Sequence[str] | None = None) -> None:
    """Print scores, or write those that the page has."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", default=published_path(), metavar="FILE")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--json", action="store_true", help="print scores and rows as JSON")
    instead.add_argument(
        "--leave-one-out",
        action="store_true",
        help="print each group's errors by priors fitted to the other groups",
    )
    instead.add_argument("--write", action="store_true", help=f"write {FAMILIES.name} for the page")
    args = parser.parse_args(words)
    if args.write and args.file != published_path():
        parser.error("--write is of published.csv alone: leave out FILE")
    try:
        if args.write:
            write_atomically(FAMILIES, json.dumps(families(), indent=1).encode() + b"\n")
        elif args.json:
            print_json(args.file)
        elif args.leave_one_out:
            print_leave_one_out(args.file)
        else:
            print_scores(args.file)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
