"""Show how much of a long task is done: a bar on a terminal, a line every ten seconds elsewhere.

``Counter`` shows one task. All output that may appear next to a bar goes to ``console``, so that
lines appear above the bar.
"""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_UPDATES = 0.1
_BAR_WIDTH = 20

console = Console(highlight=False, soft_wrap=True)


def progress_bar(*, transient: bool = True) -> Progress:
    """Return a bar, not yet started; each of its tasks needs the field ``numbers``.

    transient : remove the bar at the end.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(_BAR_WIDTH),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=console,
        auto_refresh=False,  # no thread that draws while something is measured
        transient=transient,
    )


class Clock:
    """Tells when the next plain line is due, ten seconds after the last one."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def due(self) -> bool:
        """Return whether a line is due; if so, count ten seconds from now."""
        now = time.monotonic()
        if now - self._last < SECONDS_BETWEEN_LINES:
            return False
        self._last = now
        return True

    def restart(self) -> None:
        """Count ten seconds from now: a line was printed for another reason."""
        self._last = time.monotonic()


class Counter:
    """Shows a task whose end is known; a context manager.

    Parameters
    ----------
    title : of the task, e.g. "evaluation".
    total : how much there is to do; None: unknown.
    unit : e.g. "images" or "MB".
    visible : False on all ranks that print nothing.
    bar : a started bar, which gets a task more; None: a bar of its own, on a terminal.
    """

    def __init__(
        self,
        title: str,
        *,
        total: int | None,
        unit: str,
        visible: bool = True,
        bar: Progress | None = None,
    ) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._visible, self._clock = visible, Clock()
        self._began = self._updated = time.monotonic()
        self._own_bar = progress_bar() if visible and bar is None and console.is_terminal else None
        self._bar = bar if visible and bar is not None else self._own_bar
        self._task: Any = None

    def __enter__(self) -> "Counter":
        if self._own_bar is not None:
            self._own_bar.start()
        if self._bar is not None:
            self._task = self._bar.add_task(self._title, total=self._total, numbers=self._unit)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._bar is not None:
            self._bar.remove_task(self._task)
        if self._own_bar is not None:
            self._own_bar.stop()

    def show(self, done: int, *, note: str = "", share: float | None = None) -> None:
        """Show that ``done`` of the total is done.

        note : what comes next, for the reader. share : of the time, 0 to 1, if the parts of the
        task take different times.
        """
        now = time.monotonic()
        words = self._words(done, now - self._began, note=note, share=share)
        if self._bar is not None:
            if now - self._updated >= _SECONDS_BETWEEN_UPDATES or done == self._total:
                self._updated = now
                self._bar.update(self._task, completed=done, numbers=words, refresh=True)
        elif self._visible and self._clock.due():
            of = f" of {self._total:,}" if self._total is not None else ""
            console.print(f"{self._title}: {done:,}{of} {words}", markup=False)

    def _words(self, done: int, elapsed: float, *, note: str, share: float | None) -> str:
        """Return what follows the numbers, e.g. "images, about 31 s left"."""
        parts = [self._unit]
        if share is None and self._total:
            share = done / self._total
        if share and share < 1:
            parts.append(f"about {duration((1 - share) * elapsed / share)} left")
        return ", ".join([*parts, note] if note else parts)


def duration(seconds: float) -> str:
    """Return a time for a person: "4 s", "2 min 05 s", "3 h 12 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
