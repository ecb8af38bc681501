"""Every fault in every phase of a run, alone and on two ranks: the table of what is promised.

Few rows run in ``make test``, those that differ most in ``make test-slow``, all in ``make
test-long``.
"""

import functools
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.harness import ACTIONS, Fault, Promise, run_trial, train
from tests.helpers import make_image_folder

PHASES = ("start", "meeting", "data", "training", "epoch", "checkpoint", "evaluation", "end")
PLACES = ((1, 0), (2, 0), (2, 1))
"""Number of ranks, and the one that is hit."""

FINE = (0, "")
BROKEN = r"broke: another rank has ended|has not moved"
NOT_WRITTEN = r"could not be written \((No space left on device|File too large)\)"


def promise(fault: Fault) -> Promise:
    """Return what must hold after a fault: the table."""
    early = fault.phase in ("start", "meeting")
    kept = {"start": 0, "meeting": 0, "data": 0, "evaluation": 3, "end": 3, "renamed": 2}
    epochs = kept.get(fault.phase, 1)
    # What the other rank says if this one is lost without a word.
    lost = (1, r"missing: rank 1" if fault.victim else r"rank 0 at \S+ ") if early else (1, BROKEN)
    if fault.phase == "end":
        lost = FINE
    in_training = fault.phase in ("training", "collective", "epoch", "checkpoint")
    match fault.action:
        case "kill":
            ends = (-signal.SIGKILL, ""), lost
        case "interrupt" | "interrupt twice":
            ends = (130, "interrupted"), lost
        case "terminate" if in_training:
            ends = ((75, r"stopped.*resume with --resume auto"),) * 2
        case "terminate":
            ends = (-signal.SIGTERM, ""), lost
        case "stop" if fault.ranks > 1 and fault.phase != "end":
            ends = (1, "rank" if early else BROKEN), lost
        case "stop" | "pause":
            ends, epochs = (FINE, FINE), 3
        case "full disk" | "small files":
            other = FINE if fault.phase == "end" else (1, NOT_WRITTEN)
            ends = (1, NOT_WRITTEN), other
    return Promise(*ends, kept=tuple(range(1, epochs + 1)))


def possible(fault: Fault) -> bool:
    """A single rank meets nobody, and only rank 0 writes what fills a disk."""
    if fault.phase == "meeting" and fault.ranks == 1:
        return False
    return fault.victim == 0 or fault.action not in ("full disk", "small files")


FAULTS = [
    fault
    for action in ACTIONS
    for phase in PHASES
    for ranks, victim in PLACES
    if possible(fault := Fault(action, phase, ranks, victim))
]

@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, images: Path
) -> Callable[[Fault], Path]:
    """Return a function that trains a fault's run undisturbed, each kind once."""

    @functools.cache
    def trained(ranks: int, way: str, phase: str) -> Path:
        fault = Fault("", phase, ranks, 0, way)
        return train(tmp_path_factory.mktemp("undisturbed"), images, fault)

    def of(fault: Fault) -> Path:
        return trained(fault.ranks, fault.way, "collective" if fault.phase == "collective" else "")

    return of


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_in_a_phase(
    fault: Fault, tmp_path: Path, images: Path, undisturbed: Callable[[Fault], Path]
) -> None:
    run_trial(fault, promise(fault), tmp_path, images, undisturbed(fault))
