"""Print for a person: a progress bar on a terminal, plain lines elsewhere.

Only rank 0 prints: ``say`` at any time, ``Progress`` around the training, ``card`` at the end.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.panel import Panel
from rich.table import Table
from torch import Tensor

from common.errors import UserError
from common.say import minutes_text
from common.training_engine import StepRecord
from common.utils.progress import (
    SECONDS_BETWEEN_LINES,
    console,
    progress_bar,
    show_progress,
)
from common.utils.streams import output_message
from common.utils.typed_json import calm


def say(text: str) -> None:
    """Print a line, above the progress bar if there is one.

    Raises UserError if the output goes to a file that cannot be written.
    """
    try:
        console.print(calm(text), markup=False)  # it may quote a file
    except OSError as error:
        raise UserError(output_message(error)) from error


class Progress:
    """Shows loss, samples per second and time left of ``total_steps`` steps.

    Enter the attribute ``bar`` around the training. A line with the loss is printed for every step
    that ``log_every`` divides, and for the last one. Off a terminal, where there is no bar, ten
    seconds without a line are followed by one with the progress alone.

    Parameters
    ----------
    done_steps : steps of an earlier part of the run.
    global_batch_size : samples of a step over all ranks.
    visible : False on all ranks but 0.
    log_every : steps between two lines with the loss.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        done_steps: int,
        global_batch_size: int,
        visible: bool,
        log_every: int = 1,
    ) -> None:
        self._total = total_steps
        self._done_before = done_steps
        self._batch = global_batch_size
        self._log_every = log_every
        self._visible = visible
        self.bar = progress_bar(visible=visible, transient=False)
        self._task = self.bar.add_task("training", total=total_steps, completed=done_steps)

    def begin(self) -> None:
        """Start the clock, right before the first step."""
        self._began = self._printed = time.monotonic()

    def show(self, records: list[StepRecord]) -> None:
        """Show that these steps, one or more, are done; on rank 0 alone."""
        last = records[-1]
        now = time.monotonic()
        pace = (now - self._began) / max(1, last.step - self._done_before)
        speed = f"{self._batch / max(pace, 1e-9):,.0f} samples/s"
        self.bar.update(
            self._task,
            completed=last.step,
            description=f"epoch {last.epoch}  {_learned(last)}  {speed}",
            refresh=True,
        )
        logged = [record for record in records if self._has_line(record.step)]
        for record in logged:
            self._say(record, f"{_learned(record)}  {speed}", pace)
        is_silent = now - self._printed >= SECONDS_BETWEEN_LINES
        if self.bar.disable and is_silent and not logged:
            self._say(last, speed, pace)
        if logged or is_silent:
            self._printed = now

    def _say(self, record: StepRecord, numbers: str, pace: float) -> None:
        """Print the line of a step. pace : seconds of a step."""
        left = minutes_text((self._total - record.step) * pace)
        say(f"epoch {record.epoch}  step {record.step}/{self._total}  {numbers}  {left} left")

    def _has_line(self, step: int) -> bool:
        return step == self._total or step % self._log_every == 0

    def counted(
        self, loader: Iterable[tuple[Tensor, Tensor]], *, title: str, images: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the loader's batches of images and labels, and show how many images are done."""
        bar = self.bar if self.bar.live.is_started else None
        done = 0
        with show_progress(
            title, total=images, unit="images", visible=self._visible, bar=bar
        ) as show:
            for batch, labels in loader:
                yield batch, labels
                done += len(labels)
                show(done)


def _learned(record: StepRecord) -> str:
    if math.isnan(record.local_loss):
        return "EMULATED"
    return f"loss {record.loss:.3f}  accuracy {record.accuracy:.3f}"


def card(title: str, rows: Mapping[str, Any]) -> None:
    """Print the run's result as one card."""
    if not console.is_terminal:
        wide = max(map(len, rows))
        lines = [f"{name:<{wide}}  {value}" for name, value in rows.items()]
        say("\n".join([f"--- {title} ---", *lines]))
        return
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", str(value).replace("[", r"\["))
    console.print(Panel(table, title=title, expand=False))
