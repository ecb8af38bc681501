"""Print for a person: a progress bar on a terminal, plain lines elsewhere.

Only rank 0 prints: ``say`` at any time, ``Progress`` around the training, ``card`` at the end.
"""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from common.training_engine import StepRecord

_console = Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a line, above the progress bar if there is one."""
    _console.print(text, markup=False)


class Progress:
    """Shows loss, samples per second and time left of ``total_steps`` steps; a context manager.

    Parameters
    ----------
    global_batch_size : samples of a step over all ranks.
    visible : False on all ranks but 0.
    log_every : steps between plain lines.
    emulated : compute is emulated, so there are no losses to show.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        done_steps: int,
        global_batch_size: int,
        visible: bool,
        log_every: int = 1,
        emulated: bool = False,
    ) -> None:
        self._log_every, self._emulated = log_every, emulated
        self._total, self._done = total_steps, done_steps
        self._batch, self._visible = global_batch_size, visible
        self._bar: Bar | None = None
        self._began, self._began_at = time.perf_counter(), done_steps
        if visible and _console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=_console,
            )
            self._task = self._bar.add_task(
                "training", total=total_steps, completed=done_steps, numbers=""
            )

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, records: list[StepRecord]) -> None:
        """Show the steps of ``records``."""
        if not self._visible or not records:
            return
        last = records[-1]
        self._done = last.step
        elapsed = time.perf_counter() - self._began
        steps = max(1, self._done - self._began_at)
        rate = steps * self._batch / elapsed
        learned = f"loss {last.loss:.3f}  accuracy {last.accuracy:.3f}"
        if self._emulated:
            learned = "EMULATED"
        numbers = f"{learned}  {rate:,.0f} samples/s"
        due = any(
            record.step % self._log_every == 0 or record.step == self._total for record in records
        )
        if self._bar is not None:
            self._bar.update(
                self._task, completed=last.step, description=f"epoch {last.epoch}", numbers=numbers
            )
        elif due:
            left = _duration((self._total - self._done) * elapsed / steps)
            say(f"epoch {last.epoch}  step {last.step}/{self._total}  {numbers}  {left} left")


def card(title: str, rows: Mapping[str, Any]) -> None:
    """Print the run's result as one card."""
    if not _console.is_terminal:
        wide = max(map(len, rows))
        lines = [f"{name:<{wide}}  {value}" for name, value in rows.items()]
        say("\n".join([f"--- {title} ---", *lines]))
        return
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", str(value).replace("[", r"\["))
    _console.print(Panel(table, title=title, expand=False))


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
