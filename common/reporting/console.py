"""Print for a person: a progress bar on a terminal, plain lines elsewhere.

Only rank 0 prints: ``say`` at any time, ``Progress`` around the training, ``card`` at the end.
"""

import time
from collections.abc import Mapping
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
    """Shows loss, samples per second and time left of ``total_steps`` steps.

    Enter the attribute ``bar`` around the training; it is None where plain lines are printed.

    Parameters
    ----------
    done_steps : steps of an earlier part of the run.
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
        self._total, self._done_before = total_steps, done_steps
        self._batch, self._began = global_batch_size, time.perf_counter()
        self.bar: Bar | None = None
        if visible and _console.is_terminal:
            self.bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=_console,
            )
            self._task = self.bar.add_task(
                "training", total=total_steps, completed=done_steps, numbers=""
            )

    def show(self, records: list[StepRecord]) -> None:
        """Show that these steps, one or more, are done; on rank 0 alone."""
        last = records[-1]
        elapsed = time.perf_counter() - self._began
        steps = max(1, last.step - self._done_before)
        losses = f"loss {last.loss:.3f}  accuracy {last.accuracy:.3f}"
        learned = "EMULATED" if self._emulated else losses
        numbers = f"{learned}  {steps * self._batch / elapsed:,.0f} samples/s"
        if self.bar is not None:
            self.bar.update(
                self._task, completed=last.step, description=f"epoch {last.epoch}", numbers=numbers
            )
        elif any(one.step % self._log_every == 0 or one.step == self._total for one in records):
            left = _duration((self._total - last.step) * elapsed / steps)
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
