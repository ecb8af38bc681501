"""A node's output: on the terminal each line with the node's number, and a log."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from rich.text import Text

from common.errors import UserError
from common.utils.atomic_files import append_text
from common.utils.typed_json import calm
from lab.terminal import console

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def log_name(rank: int, ranks_per_node: int = 1) -> str:
    """Return the name of the file for a rank's output; with one rank a node that is its node."""
    if ranks_per_node == 1:
        return f"node{rank}.log"
    return f"node{rank // ranks_per_node}-rank{rank}.log"


def write_log(log: Path, line: str) -> None:
    """Append a line to a node's log, unless the disk is full: that must not end the run."""
    with contextlib.suppress(UserError):
        append_text(log, f"{line}\n", name="the log")


class PrefixedOutput:
    """Print lines with their node's number, on a terminal in a colour of its own.

    shown : whether a call prints a node's lines; kept as ``shows``. ``show`` prints them always.
    ranks_per_node : with several, the numbers of calls are ranks, and each line names both.
    """

    def __init__(
        self,
        nodes: int,
        *,
        ranks_per_node: int = 1,
        shown: Callable[[int], bool] = lambda node: True,
    ) -> None:
        self._width = len(str(nodes - 1))
        self._rank_width = len(str(nodes * ranks_per_node - 1))
        self._ranks_per_node = ranks_per_node
        self.shows = shown

    def __call__(self, node: int, line: str) -> None:
        if self.shows(node):
            self.show(node, line)

    def show(self, node: int, line: str) -> None:
        """Print a line of any node."""
        prefix = f"node {node // self._ranks_per_node:>{self._width}}"
        if self._ranks_per_node > 1:
            prefix += f" rank {node:>{self._rank_width}}"
        text = Text(f"{prefix} | ", style=_COLOURS[node % len(_COLOURS)])
        try:
            console.print(text.append(calm(line), style="default"), soft_wrap=True)
        except (OSError, SystemExit):
            # Nobody reads this process's output any more, and rich exits. This thread must go on:
            # it also reads what the nodes write.
            self.shows = lambda node: False
