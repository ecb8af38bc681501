"""Show the output of several nodes on one terminal, each line with its node's number."""

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class PrefixedOutput:
    """Shows lines with their node's number, on a terminal in the node's colour.

    shown : whether the lines of a node are shown; ``show`` shows lines of any node.
    """

    def __init__(
        self, console: Console, nodes: int, *, shown: Callable[[int], bool] = lambda node: True
    ) -> None:
        self._console, self._width, self._shown = console, len(str(nodes - 1)), shown

    def __call__(self, node: int, line: str) -> None:
        if self._shown(node):
            self.show(node, line)

    def show(self, node: int, line: str) -> None:
        """Show a line of any node."""
        text = Text(f"node {node:>{self._width}} | ", style=_COLOURS[node % len(_COLOURS)])
        try:
            self._console.print(text.append(line, style="default"), soft_wrap=True)
        except (OSError, SystemExit):
            # Nobody reads the terminal's pipe any more, and rich exits. This thread must go on: it
            # also reads what the nodes write.
            self._shown = lambda node: False
