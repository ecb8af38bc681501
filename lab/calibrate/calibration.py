"""Calibrate: measure messages, memory and compute time, and fit them.

``calibrate`` starts ranks on this machine; ``calibrate_nodes`` is one of several ranks that the
user started. Neither runs the training that is predicted later: messages are timed separately, and
steps train on noise without messages.
"""

from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import process_group
from common.training_engine import launch_distributed_training
from common.utils.progress import console
from common.utils.system import usable_cores
from lab.calibrate.fits import fit_calibration
from lab.calibrate.rank_measurements import Measures, measure_rank
from lab.predict.calibration_file import Calibration

_MOST_RANKS = 8
_SIZES = (
    (1_024, 20),
    (8_192, 20),
    (65_536, 10),
    (300_000, 8),
    (1_000_000, 4),
    (2_500_000, 3),
    (9_500_000, 2),
    (20_000_000, 1),
    (38_000_000, 1),
)


def measures_for(model: str, *, quick: bool) -> Measures:
    """Return what a calibration measures.

    No number of samples is a common batch size, so no predicted cell is measured.
    """
    if quick:
        return Measures(
            model, _SIZES[::2], rounds=2, message_turns=2, samples=(24, 72, 140), steps=1
        )
    return Measures(model, _SIZES, rounds=3, message_turns=2, samples=(28, 100, 220), steps=2)


def default_ranks() -> int:
    """Return how many ranks measure on this machine: one per core, 2 to 8."""
    return min(_MOST_RANKS, max(2, usable_cores()))


def calibrate(
    *, ranks: int | None = None, model: str = "vgg11", quick: bool = False
) -> Calibration:
    """Measure with ``ranks`` processes on this machine.

    ranks : at least 2; by default one per core, 2 to 8. Raises WorkerError if a rank fails. Leaves
    no process behind.
    """
    ranks = ranks or default_ranks()
    measures = measures_for(model, quick=quick)
    console.print(
        f"calibrating with {ranks} ranks on this machine: {measures.rounds} rounds, usually "
        f"{'half a minute' if quick else 'one to two minutes'} if the machine is otherwise idle"
    )
    found = launch_distributed_training(
        measure_rank, ranks, "gloo", measures=measures, ranks_here=ranks
    )
    return fit_calibration(found, model=model, quick=quick)


def calibrate_nodes(
    launch: LaunchSpec, *, model: str = "vgg11", quick: bool = False, timeout_seconds: float = 60.0
) -> Calibration | None:
    """Measure as one rank of a group; return the calibration on rank 0.

    Raises GroupError and UserError as ``common.distributed.process_group.process_group`` does.
    """
    measures = measures_for(model, quick=quick)
    with process_group(launch, backend="gloo", timeout_seconds=timeout_seconds) as world:
        found = measure_rank(world.rank, world.size, measures=measures, ranks_here=world.local_size)
    return fit_calibration(found, model=model, quick=quick) if world.is_rank0 else None
