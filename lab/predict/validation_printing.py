"""What ``lab predict --validate`` prints: how good predictions of measured steps are.

validation.py computes the numbers.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.say import count
from lab.predict.published import read_published
from lab.predict.validation import Score, Scored, scores, shipped_rows, validate

_WIDTH = 100  # of a file or a pipe
_NAMES = {"gloo": "Gloo", "nccl": "NCCL"}
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


def print_scores(path: Path) -> None:
    """Score the file's rows and print a table by group.

    Raises UserError if it is not a file of measurements.
    """
    scored = validate(read_published(path))
    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console = Console(highlight=False, width=_WIDTH)
    console.print(*_about(scored, path), sep="\n", markup=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("group", overflow="fold")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, score in scores(scored).items():
        table.add_row(Text(_NAMES.get(name, name)), *_cells(score))
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
    how = "by the priors of priors.toml, which were fitted to none of them"
    if known == groups:
        how = "each group by priors fitted to the other groups"
    elif known:
        how = (
            f"{len(known)} of them, which priors.toml is fitted to, by priors fitted without the "
            "group; the others by priors.toml"
        )
    steps = count(len(scored), "measured step")
    return [
        f"{path.name}: {steps} of {count(len(groups), 'group')}, predicted {how}",
        "inside: share of steps in their 80 % interval. Simple rules (median error): perfect "
        "scaling; no overlap: all bytes at the nominal rate, after computing; overlap: beside "
        "backward",
    ]


def _cells(score: Score) -> list[str]:
    baselines = [f"{median:.1%}" for median, _ in score.baselines.values()]
    order = f"{score.in_order}/{score.pairs}" if score.pairs else "-"
    errors = [f"{score.median_error:.1%}", f"{score.p90_error:.1%}", f"{score.inside:.0%}"]
    return [str(score.rows), *errors, *baselines, order]
