"""What a run reports while it trains, on the terminal and in its folder."""

import time

from common.distributed.process_group import World
from common.profiling.link_counter import LinkCounter
from common.profiling.rank_memory import rank_memory
from common.reporting.console import Progress, say
from common.reporting.run_folder import RunFolder
from common.sync.memory_cost import Memory
from common.training_engine import Callback, EpochEnd, StepRecord, TrainingEngine
from common.utils.environment import load_per_core

_STEPS_UNTIL_FINAL = 4  # DDP rebuilds its buckets, PowerSGD compresses from its third step on


class RunLogger(Callback):
    """Records the training: metrics, progress, epochs. All ranks keep the records; rank 0 writes.

    ``history`` holds the steps of this process, on rank 0 after those of earlier parts of the run.
    ``own_steps`` holds those of this process alone. ``total_seconds`` includes evaluations and
    checkpoints. ``memory`` : of this rank's tensors between two of its first steps; None if compute
    is emulated. ``link`` : what passed this node's link in ``own_steps``. ``load_per_core`` : of
    rank 0's machine in the training's last minute.
    """

    def __init__(
        self,
        world: World,
        folder: RunFolder,
        progress: Progress,
        history: list[StepRecord],
    ) -> None:
        self._world = world
        self.folder = folder
        self._progress = progress
        self.history = history
        self.own_steps: list[StepRecord] = []
        self.total_seconds = 0.0
        self.memory: Memory | None = None
        self.link = LinkCounter()
        self.load_per_core: float | None = None

    def on_train_begin(self, engine: TrainingEngine, first_epoch: int) -> None:
        """Keep the engine, which counts the steps, and start the clock of the progress."""
        self._engine = engine
        self._began = time.perf_counter()
        self._progress.begin()
        self.link.count()

    def on_step_end(self, step_in_epoch: int) -> None:
        """Count what has passed the link."""
        self.link.count()

    def on_steps(self, records: list[StepRecord]) -> None:
        """Record the steps; write and show them on rank 0."""
        engine = self._engine
        if engine.emulation is None and len(self.own_steps) < _STEPS_UNTIL_FINAL:
            self.memory = rank_memory(engine.model, engine.optimizer, engine.sync)
        self.history += records
        self.own_steps += records
        if not self._world.is_rank0:
            return
        self.folder.append(records)
        self._progress.show(records)

    def on_epoch_end(self, end: EpochEnd) -> None:
        """Record the epoch, unless a request to stop ended it early."""
        if not end.result.complete:
            return
        report = end.report
        assert report is not None  # the Validator comes first
        if self._world.is_rank0:
            self.folder.append([report])
            for line in end.lines():
                say(line)

    def sync(self) -> None:
        """Put the records so far on the disk, on rank 0; called before a checkpoint is written."""
        if self._world.is_rank0:
            self.folder.sync()

    def on_train_end(self) -> None:
        """Stop the clock, before an evaluation loads the machine in another way."""
        self.load_per_core = load_per_core()
        self.total_seconds = time.perf_counter() - self._began
