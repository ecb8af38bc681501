"""The output of several nodes on one terminal: each line has its node's number in front."""

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class PrefixedOutput:
    """Shows each line with its node's number in front, on a terminal in the node's colour.

    It shows nothing more once nobody reads the output.

    shown : whether a node's lines are shown.
    """

    def __init__(
        self, console: Console, nodes: int, *, shown: Callable[[int], bool] = lambda node: True
    ) -> None:
        self._console, self._width, self._shown = console, len(str(nodes - 1)), shown

    def __call__(self, node: int, line: str) -> None:
        if self._shown(node):
            self.show(node, line)

    def show(self, node: int, line: str) -> None:
        """Show a line of any node, also of one that is not ``shown``."""
        text = Text(f"node {node:>{self._width}} | ", style=_COLOURS[node % len(_COLOURS)])
        try:
            self._console.print(text.append(line, style="default"), soft_wrap=True)
        except (OSError, SystemExit):
            # The pipe is closed. rich would end this thread, which must keep reading.
            self._shown = lambda node: False
