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

from common.errors import UserError, reason_of
from common.training_engine import StepRecord
from common.utils.progress import (
    SECONDS_BETWEEN_LINES,
    console,
    duration,
    progress_bar,
    show_progress,
)
from common.utils.typed_json import calm


def say(text: str) -> None:
    """Print a line, above the progress bar if there is one.

    Raises UserError if the output goes to a file that cannot be written.
    """
    try:
        console.print(calm(text), markup=False)  # it may quote a file
    except OSError as error:
        raise UserError(
            f"the output could not be written ({reason_of(error)}): make room where it goes, or "
            "send it elsewhere"
        ) from error


class Progress:
    """Shows loss, samples per second and time left of ``total_steps`` steps.

    Enter the attribute ``bar`` around the training. Off a terminal a line is printed for the first
    step, every ``log_every`` steps, every ten seconds, and for the last step.

    Parameters
    ----------
    done_steps : steps of an earlier part of the run.
    global_batch_size : samples of a step over all ranks.
    visible : False on all ranks but 0.
    log_every : steps between plain lines.
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
        scores = f"loss {last.loss:.3f}  accuracy {last.accuracy:.3f}"
        learned = "EMULATED" if math.isnan(last.local_loss) else scores
        numbers = f"{learned}  {self._batch / max(pace, 1e-9):,.0f} samples/s"
        self.bar.update(
            self._task,
            completed=last.step,
            description=f"epoch {last.epoch}  {numbers}",
            refresh=True,
        )
        due = now - self._printed >= SECONDS_BETWEEN_LINES
        if self.bar.disable and (due or any(self._wants_line(record.step) for record in records)):
            self._printed = now
            left = duration((self._total - last.step) * pace)
            say(f"epoch {last.epoch}  step {last.step}/{self._total}  {numbers}  {left} left")

    def _wants_line(self, step: int) -> bool:
        return step in (self._done_before + 1, self._total) or step % self._log_every == 0

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
