"""Print for a person: a progress bar on a terminal, plain lines elsewhere.

Only rank 0 prints: ``say`` at any time, ``Progress`` around the training, ``card`` at the end.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.panel import Panel
from rich.progress import Progress as Bar
from rich.table import Table
from torch import Tensor

from common.errors import UserError, reason_of
from common.training_engine import StepRecord
from common.utils.progress import Clock, Counter, console, duration, progress_bar
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

    Enter the attribute ``bar`` around the training; it is None where plain lines are printed: for
    the first step, every ``log_every`` steps, every ten seconds, and for the last step.

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
        self._log_every, self._emulated, self._visible = log_every, emulated, visible
        self._total, self._done_before = total_steps, done_steps
        self._batch, self._began = global_batch_size, time.perf_counter()
        self._clock, self._last, self._shown = Clock(), "", False
        self.bar: Bar | None = None
        if visible and console.is_terminal:
            self.bar = progress_bar(transient=False)
            self._task = self.bar.add_task(
                "training", total=total_steps, completed=done_steps, numbers=""
            )

    def begin(self) -> None:
        """Start the clock, right before the first step."""
        self._began = time.perf_counter()
        self._clock.restart()

    def show(self, records: list[StepRecord]) -> None:
        """Show that these steps, one or more, are done; on rank 0 alone."""
        last = records[-1]
        elapsed = time.perf_counter() - self._began
        steps = max(1, last.step - self._done_before)
        losses = f"loss {last.loss:.3f}  accuracy {last.accuracy:.3f}"
        learned = "EMULATED" if self._emulated else losses
        numbers = f"{learned}  {steps * self._batch / elapsed:,.0f} samples/s"
        if last.step < self._total:
            numbers += f"  {duration((self._total - last.step) * elapsed / steps)} left"
        if self.bar is not None:
            self.bar.update(
                self._task,
                completed=last.step,
                description=f"epoch {last.epoch}",
                numbers=numbers,
                refresh=True,
            )
            return
        self._last = f"epoch {last.epoch}  step {last.step}/{self._total}  {numbers}"
        first = records[0].step == self._done_before + 1
        by_number = any(
            one.step % self._log_every == 0 or one.step == self._total for one in records
        )
        self._shown = by_number or first or self._clock.due()
        if self._shown:
            self._clock.restart()
            say(self._last)

    def finish(self) -> None:
        """Show the last step, unless it has been shown."""
        if self._last and not self._shown:
            say(self._last)
        self._shown = True

    def counted(
        self, loader: Iterable[tuple[Tensor, Tensor]], *, title: str, images: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the loader's batches of images and labels, and show how many images are done."""
        bar = self.bar if self.bar is not None and self.bar.live.is_started else None
        done = 0
        with Counter(title, total=images, unit="images", visible=self._visible, bar=bar) as counter:
            for batch, labels in loader:
                yield batch, labels
                done += len(labels)
                counter.show(done)


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
