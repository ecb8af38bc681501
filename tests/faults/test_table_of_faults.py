"""Every fault in every phase of a run, alone and on two ranks: the table of what is promised.

Few rows run in ``make test``, those that differ most in ```make test-slow```, all in ``make
test-long``.
"""

import functools
import signal

import pytest

from tests.faults.harness import ACTIONS, WAYS, Fault, Promise, run_trial, train
from tests.helpers import make_image_folder
from tests.helpers.full_disk import why_no_small_disk

PHASES = ("start", "meeting", "data", "training", "epoch", "checkpoint", "evaluation", "end")
PLACES = ((1, 0), (2, 0), (2, 1))
"""Number of ranks, and the one that is hit."""

FINE = (0, "")
NOT_WRITTEN = r"could not be written \((No space left on device|File too large)\)"


def promise(fault):
    """Return what must hold after a fault: the table."""
    early = fault.phase in ("start", "meeting")
    kept = {"start": 0, "meeting": 0, "data": 0, "renamed": 2, "evaluation": 3, "end": 3}
    epochs = kept.get(fault.phase, 1)
    # What the other rank says if this one is lost without a word.
    missing = r"missing: rank 1" if fault.victim else r"(could not reach|lost) rank 0 at \S+"
    named = rf"error \(rank \d\): rank {fault.victim} \([\d.]+\)"
    ended = f"{named} ended or was kill"
    if fault.way == "gather_scatter":  # Gloo may notice it only at the group's timeout
        ended = f"{named} (ended or was kill|has not moved since)"
    lost = FINE if fault.phase == "end" else (1, missing if early else ended)
    in_training = fault.phase in ("training", "epoch", "checkpoint")
    match fault.action:
        case "kill":
            ends = (-signal.SIGKILL, ""), lost
        case "interrupt" | "interrupt twice":
            told = (1, rf"error \(rank \d\): rank {fault.victim} was interrupted \(Ctrl-C\)")
            ends = (130, "interrupted"), lost if early or fault.phase == "end" else told
        case "terminate" if in_training:
            ends = ((75, r"stopped.*resume with --resume auto"),) * 2
        case "terminate":
            ends = (-signal.SIGTERM, ""), lost
        case "stop" if fault.ranks > 1 and fault.phase != "end":
            moved = f"{named} has not moved since"
            ends = (1, "rank" if early else named), (1, missing if early else moved)
        case "stop" | "pause":
            ends, epochs = (FINE, FINE), 3
        case "full disk" | "small files":
            in_report = fault.phase in ("evaluation", "end")  # which rank 0 writes alone
            ends = (1, NOT_WRITTEN), FINE if in_report else (1, NOT_WRITTEN)
    return Promise(*ends, kept=tuple(range(1, epochs + 1)))


def is_possible(fault):
    """Return whether the phase and the fault exist: one rank meets nobody, rank 0 writes."""
    if fault.phase == "meeting" and fault.ranks == 1:
        return False
    return fault.victim == 0 or fault.action not in ("full disk", "small files")


FAULTS = [
    *(
        fault
        for action in ACTIONS
        for phase in PHASES
        for ranks, victim in PLACES
        if is_possible(fault := Fault(action, phase, ranks, victim))
    ),
    *(Fault("kill", phase, 2, 0) for phase in ("rename", "renamed")),
    *(Fault("kill", "collective", 2, victim, way) for way in WAYS for victim in (0, 1)),
]
FAST = {
    "kill-checkpoint-rank0of2",
    "interrupt-twice-training-alone",
    "terminate-checkpoint-rank1of2",
    "small-files-evaluation-alone",
}
SLOW = {"training", "checkpoint", "evaluation", "collective", "rename", "renamed"}


def marked(number, fault):
    """Return the row with its mark: ``make test-slow`` runs an action in a phase in one place."""
    if str(fault) in FAST:
        return fault
    if fault.phase == "collective":
        here = fault.victim == (fault.way == "gather_scatter")
    else:
        here = (fault.ranks, fault.victim) == PLACES[number // 3 % 3] or fault.phase not in PHASES
    slow = fault.phase in SLOW and here
    return pytest.param(fault, marks=pytest.mark.slow if slow else pytest.mark.long)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, images):
    """Return a function that trains a fault's run undisturbed, each kind once."""

    @functools.cache
    def trained(ranks, way, phase):
        fault = Fault("", phase, ranks, 0, way)
        return train(tmp_path_factory.mktemp("undisturbed"), images, fault)

    def of(fault):
        return trained(fault.ranks, fault.way, "collective" if fault.phase == "collective" else "")

    return of


@pytest.mark.parametrize("fault", [marked(*row) for row in enumerate(FAULTS)], ids=str)
def test_a_fault_in_a_phase(fault, tmp_path, images, undisturbed):
    if fault.action == "full disk" and (reason := why_no_small_disk()):
        pytest.skip(f"no small disk can be mounted here: {reason}")
    run_trial(fault, promise(fault), tmp_path, images, undisturbed(fault))
