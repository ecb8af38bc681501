"""What several nodes write, on one terminal: each line behind its node's number."""

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class PrefixedOutput:
    """Shows a node's lines behind its number, in a colour of its own on a terminal; nothing more once nobody reads them.

    shown : says of which nodes; the others' lines are left out.
    """

    def __init__(
        self, console: Console, nodes: int, *, shown: Callable[[int], bool] = lambda node: True
    ) -> None:
        self._console, self._width, self._shown = console, len(str(nodes - 1)), shown

    def __call__(self, node: int, line: str) -> None:
        if self._shown(node):
            self.show(node, line)

    def show(self, node: int, line: str) -> None:
        """Show a line, whatever node it is of."""
        text = Text(f"node {node:>{self._width}} | ", style=_COLOURS[node % len(_COLOURS)])
        try:
            self._console.print(text.append(line, style="default"), soft_wrap=True)
        except (
            OSError,
            SystemExit,
        ):  # rich ends the thread that finds the pipe closed, and this one has the nodes to read from
            self._shown = lambda node: False
