"""What the commands of ``lab`` say on the terminal: ``console``, and ``say`` for one message."""

from rich.console import Console

console = Console(highlight=False)


def say(text: str) -> None:
    """Print a message unchanged: no markup, no wrapping, so that paths can be copied."""
    console.print(text, markup=False, soft_wrap=True)
