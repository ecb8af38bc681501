"""What ``lab predict --validate`` prints: how good predictions of measured steps are.

validation.py computes the numbers.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from common.errors import count
from lab.predict.published import read_published
from lab.predict.validation import Score, Scored, scores, shipped_rows, validate

_WIDTH = 110  # of a file or a pipe
_NAMES = {"gloo": "Gloo", "nccl": "NCCL"}
_HEADINGS = (
    "\n",
    "\nrows",
    "median\nerror",
    "\np90",
    "in-\nside",
    "perfect\nscaling",
    "no\noverlap",
    "overlap,\nline rate",
    "pairs in\norder",
)


def print_scores(path: Path) -> None:
    """Score the file's rows and print a table by group.

    Raises UserError if the file is none of measurements.
    """
    scored = validate(read_published(path))
    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console = Console(highlight=False, width=_WIDTH)
    console.print(*_about(scored, path), sep="\n", markup=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in _HEADINGS:
        is_name = heading == _HEADINGS[0]
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=True)
    for name, score in scores(scored).items():
        table.add_row(_NAMES.get(name, name), *_cells(score))
    console.print(table)


def print_scores_json(path: Path) -> None:
    """Score the file's rows and print scores and rows as JSON."""
    scored = validate(read_published(path))
    content = {
        "summary": {name: score.as_json() for name, score in scores(scored).items()},
        "rows": [row.as_json() for row in scored],
    }
    print(json.dumps(content, indent=1))


def _about(scored: Sequence[Scored], path: Path) -> list[str]:
    """Return what was predicted, and how."""
    groups = {row.row.group for row in scored}
    known = groups & {row.group for row in shipped_rows()}
    lines = [f"{count(len(scored), 'measured step')} of {count(len(groups), 'group')}: {path.name}"]
    if known:
        lines.append(
            f"{len(known)} of these came with the project: each is predicted by priors that are "
            "fitted to the other groups alone."
        )
    if groups - known:
        lines.append(
            f"{count(len(groups - known), 'group')} never seen before: predicted by the priors of "
            "lab/predict/priors.toml."
        )
    lines.append(
        "error: predicted over measured, less 1. inside: steps in their 80 % interval. Three simple "
        "rules, median error: perfect scaling; a step, then all its bytes at line rate; the same, "
        "with overlap. pairs in order: of two strategies, the faster one is the predicted one."
    )
    return lines


def _cells(score: Score) -> list[str]:
    baselines = [f"{median:.1%}" for median, _ in score.baselines.values()]
    order = f"{score.in_order} of {score.pairs}" if score.pairs else "-"
    errors = [f"{score.median_error:.1%}", f"{score.p90_error:.1%}", f"{score.inside:.0%}"]
    return [str(score.rows), *errors, *baselines, order]
