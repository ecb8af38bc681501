"""Show how much of a long task is done: a bar on a terminal, a line every ten seconds elsewhere.

``show_progress`` shows one task. All output that may appear next to a bar goes to ``console``, so
that lines appear above the bar.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from common.say import minutes_text

SECONDS_BETWEEN_LINES = 10.0


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich would end the process without a word


console = _Console(highlight=False, soft_wrap=True)


def progress_bar(*, visible: bool = True, transient: bool = True) -> Progress:
    """Return a bar, not yet started, which shows nothing off a terminal or if not ``visible``.

    transient : remove the bar at the end.
    """
    return Progress(
        "{task.description}",
        BarColumn(10),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        auto_refresh=False,  # no thread that draws while something is measured
        transient=transient,
        disable=not (visible and console.is_terminal),
    )


@contextmanager
def show_progress(
    title: str, *, total: int | None, unit: str, visible: bool = True, bar: Progress | None = None
) -> Iterator[Callable[[int], None]]:
    """Show a task; the context's value is a function that takes how much of it is done.

    Parameters
    ----------
    title : of the task, e.g. "evaluation".
    total : how much there is to do; None: unknown.
    unit : e.g. "images" or "MB".
    visible : False on all ranks that print nothing.
    bar : gets a task more; None: a bar of its own.
    """
    prints = visible and not console.is_terminal
    shown = bar
    running: AbstractContextManager = nullcontext()
    if shown is None:
        shown = running = progress_bar(visible=visible)
    began = printed = time.monotonic()

    def show(done: int) -> None:
        nonlocal printed
        shown.update(task, completed=done, refresh=True)
        now = time.monotonic()
        if prints and now - printed >= SECONDS_BETWEEN_LINES:
            printed = now
            text = f"{title}: {done:,} {unit}"
            if total and done:
                left = minutes_text((total - done) * (now - began) / done)
                text = f"{title}: {done:,} of {total:,} {unit}, {left} left"
            console.print(text, markup=False)

    with running:
        task = shown.add_task(f"{title}, {unit}", total=total)
        try:
            yield show
        finally:
            shown.remove_task(task)
