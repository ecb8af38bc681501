"""Each finding, with numbers that make it true and numbers that make it false.

A case changes a few numbers of a comparison of ring and ddp on two nodes, and names a phrase of the
finding. The phrase must appear with the first change and must not appear with the second.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from lab.report.findings import equal_results, findings, limits, prediction, speed, training
from lab.report.sentences import ReportFinding
from lab.report.view import ComparisonGroup, blocks
from tests.helpers.report_samples import cell, predicted, timeline

MODULES = (limits, equal_results, speed, training, prediction)


class Sample:
    """A comparison of none, ring and ddp that a case changes before it becomes a block."""

    def __init__(self):
        self.ring, self.ddp, self.none = cell("ring", 2), cell("ddp", 2), cell("none", 1)
        self.settings: dict[str, Any] = {"dataset": "cifar10", "scaling": "strong"}
        self.prediction: dict[str, Any] | None = None
        self.timelines: dict[str, Any] = {}
        self.emulated = False

    def predict(self, **errors):
        """Add predictions with these errors, made at noon."""
        entries = {"ring": self.ring, "ddp": self.ddp}
        cells = {entries[name]["id"]: predicted(entries[name], errors[name]) for name in errors}
        self.prediction = {"made": "2026-11-21T12:00:00", "cells": cells}

    def say(self, find):
        """Return what a finding says about the changed numbers."""
        [block] = blocks(
            {
                "cells": [self.none, self.ring, self.ddp],
                "settings": self.settings,
                "prediction": self.prediction,
                "emulated": self.emulated,
            }
        )
        more = (self.timelines,) if find is speed.overlaps else ()
        return " ".join(finding.text for finding in find(block, *more))


Change = Callable[[Sample], None]


class Case(NamedTuple):
    """A finding, a phrase of it, numbers that make it true and numbers that make it false."""

    find: Callable[..., Iterator[ReportFinding]]
    phrase: str
    true: Change
    false: Change


def medians(entry, **numbers):
    return lambda sample: getattr(sample, entry)["median"].update(numbers)


def intervals(entry, **ends):
    return lambda sample: getattr(sample, entry)["interval"].update(ends)


def both(*changes):
    def change(sample):
        for one in changes:
            one(sample)

    return change


def set_cell(entry, **values):
    return lambda sample: getattr(sample, entry).update(values)


def repeats(entry, **values):
    def change(sample):
        for repeat in getattr(sample, entry)["repeats"]:
            repeat.update(values)

    return change


def second_loss(by):
    def change(sample):
        for repeat in sample.ring["repeats"]:
            repeat["losses"][1][1] += by

    return change


def settings(**values):
    return lambda sample: sample.settings.update(values)


def emulated(compute):
    def change(sample):
        sample.emulated = True
        sample.settings["compute"] = compute

    return change


def errors(**values):
    return lambda sample: sample.predict(**values)


def started(at):
    """Predict, and let ring start at this time and the others at 13:00."""
    later = (repeats(name, started="2026-11-21T13:00:00") for name in ("none", "ddp"))
    return both(errors(ring=0.1), repeats("ring", started=f"2026-11-21T{at}"), *later)


def counted(change):
    """Predict the bytes of ring wrong by ``change`` on rank 1."""

    def apply(sample):
        sample.predict(ring=0.1)
        assert sample.prediction
        sample.prediction["cells"]["ring-n2"]["bytes_sent"][1] += change

    return apply


def recorded(overlapped):
    return lambda sample: sample.timelines.update(
        {"ring-n2": timeline("ring", 2, overlapped=overlapped)}
    )


def unchanged(_):
    """Leave the numbers as they are."""


SLOW = both(medians("ring", step=2.0), intervals("ring", step=[1.9, 2.1]))
UNSURE = both(medians("ring", step=1.01), intervals("ring", step=[0.9, 1.1]))
NEAR = both(medians("ddp", step=0.55), intervals("ddp", step=[0.53, 0.56]))

CASES = (
    Case(
        equal_results.equal_results,
        "ring is not equal to ddp, PyTorch's own, from step 2 on",
        second_loss(0.01),
        second_loss(1e-6),
    ),
    Case(
        equal_results.equal_results,
        "ring and ddp compute the same",
        unchanged,
        second_loss(0.01),
    ),
    Case(
        equal_results.equal_results,
        "a literal 2 is right by chance",
        unchanged,
        second_loss(0.01),
    ),
    Case(
        equal_results.equal_results,
        "not comparable: the seeds differ (0 and 7)",
        repeats("ring", seed=7),
        unchanged,
    ),
    Case(
        equal_results.equal_results,
        "the ranks of ring ended with different weights",
        repeats("ring", equal_weights=False),
        repeats("ring", equal_weights=True),
    ),
    Case(speed.fastest, "ddp is fastest", unchanged, NEAR),
    Case(speed.fastest, "but the 95 % intervals overlap: ring may be as fast", NEAR, SLOW),
    Case(
        speed.fastest,
        "only ddp has been measured",
        set_cell("ring", median=None),
        unchanged,
    ),
    # a strategy that does not compute the same takes no part
    Case(
        speed.fastest,
        "only ddp has been measured",
        both(second_loss(0.01), medians("ring", step=0.1)),
        both(second_loss(0.0), medians("ring", step=0.1)),
    ),
    Case(
        speed.slower_than_one,
        "ring is slower than one node, even at the favourable ends of both 95 % intervals",
        SLOW,
        UNSURE,
    ),
    Case(
        speed.slower_than_one,
        "ring is slower than one node by the medians, but the 95 % intervals overlap",
        UNSURE,
        unchanged,
    ),
    Case(
        speed.above_ideal,
        "the efficiency is above the ideal 100 % (ring 135 %). The run on one node was disturbed",
        medians("ring", step=1 / 2.7),
        medians("ring", step=1 / 2.02),
    ),
    Case(
        speed.bounds,
        "communication on the wire with ring",
        medians("ring", wire=1.0),
        medians("ring", wire=0.1),
    ),
    Case(
        speed.stragglers,
        "ring: ranks wait longer for slower ranks than sending takes. A faster",
        both(medians("ring", wait=0.2, wire=0.1), intervals("ring", wait=[0.19, 0.21])),
        both(medians("ring", wait=0.2, wire=0.1), intervals("ring", wait=[0.05, 0.35])),
    ),
    Case(
        speed.stragglers,
        "no strategy waits longer",
        unchanged,
        medians("ring", wait=None),
    ),
    Case(
        speed.stragglers,
        "none of the strategies that measured it (ddp) waits longer",
        medians("ring", wait=None),
        unchanged,
    ),
    Case(
        speed.root_share,
        "rank 0 sends more than its share with ring",
        medians("ring", root_bytes_sent=3e6, others_bytes_sent=1e6),
        medians("ring", root_bytes_sent=1.1e6, others_bytes_sent=1e6),
    ),
    Case(
        speed.root_share,
        "rank 0 does not send much more than the others with any strategy",
        unchanged,
        medians("ring", root_bytes_sent=None),
    ),
    Case(
        speed.root_share,
        "with ddp: at most 50.0 % of all bytes; an equal share would be 50.0 %. The bytes of ring "
        "were not counted",
        medians("ring", root_bytes_sent=None),
        unchanged,
    ),
    Case(
        speed.root_share,
        "On 2 nodes the bytes of ring and ddp were not counted",
        both(medians("ring", root_bytes_sent=None), medians("ddp", root_bytes_sent=None)),
        medians("ring", root_bytes_sent=None),
    ),
    Case(
        speed.overlaps,
        "communication overlaps backward with ring (",
        recorded(True),
        recorded(False),
    ),
    Case(
        speed.overlaps,
        "ring sends nothing during backward",
        recorded(False),
        recorded(True),
    ),
    Case(
        training.accuracies,
        "is near chance",
        repeats("ring", test_accuracy=0.13),
        repeats("ring", test_accuracy=0.17),
    ),
    Case(
        training.accuracies,
        "the number of classes is unknown",
        both(repeats("ring", test_accuracy=0.5), settings(dataset="folder")),
        both(repeats("ring", test_accuracy=0.5), settings(dataset="folder", num_classes=3)),
    ),
    Case(
        training.time_to_accuracy,
        "ring reached 60 % after 3.0 s of training",
        both(repeats("ring", seconds_to_accuracy=3.0), settings(until_accuracy=0.6)),
        both(repeats("ring", seconds_to_accuracy=None), settings(until_accuracy=0.6)),
    ),
    Case(
        prediction.predictions,
        "2 of 2 predictions in scope lie within 20 %",
        errors(ring=0.19, ddp=-0.19),
        errors(ring=0.21, ddp=-0.19),
    ),
    Case(
        prediction.predictions,
        "Outside: ring, 2 nodes (+21.0 %)",
        errors(ring=0.21),
        errors(ring=0.19),
    ),
    Case(
        prediction.made_in_time,
        "made before the first run started",
        started("12:00:05"),
        started("11:59:00"),
    ),
    Case(
        prediction.made_in_time,
        "made before the first run started",
        started("12:00:05"),
        both(started("12:00:05"), repeats("ddp", started=None)),  # it may have been the first
    ),
    Case(
        prediction.made_in_time,
        "made after the first run had started (2026-11-21 11:59:00, then 2026-11-21 12:00:00)",
        started("11:59:00"),
        started("12:00:05"),
    ),
    Case(
        prediction.bytes_as_predicted,
        "Every rank sent as many bytes as the formulas say",
        counted(0),
        counted(4),
    ),
    Case(
        prediction.bytes_as_predicted,
        "The counted bytes differ from the formulas with ring, 2 nodes",
        counted(4),
        counted(0),
    ),
    Case(
        limits.unfinished,
        "ring on 2 nodes failed and is left out",
        set_cell("ring", status="failed"),
        unchanged,
    ),
    Case(
        limits.unfinished,
        "ring on 2 nodes is only partly done",
        set_cell("ring", status="partial"),
        unchanged,
    ),
    Case(limits.emulation, "Compute is EMULATED", emulated("laptop"), emulated("real")),
    Case(
        limits.noisy,
        "The repeats of ring on 2 nodes differ so much",
        intervals("ring", step=[0.3, 0.8]),
        intervals("ring", step=[0.4, 0.6]),
    ),
    Case(
        limits.oversubscription,
        "On 2 nodes the ranks share cores",
        set_cell("ring", oversubscribed=True),
        set_cell("ring", oversubscribed=False),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.find.__name__}: {case.phrase}")
def test_a_finding_appears_with_its_numbers_only(case):
    said = []
    for change in (case.true, case.false):
        sample = Sample()
        change(sample)
        said.append(sample.say(case.find))
    assert case.phrase in said[0]
    assert case.phrase not in said[1]


def test_every_finding_has_cases():
    def finders(module):
        return {
            name
            for name, function in inspect.getmembers(module, inspect.isfunction)
            if function.__module__ == module.__name__
            and not name.startswith("_")
            and inspect.signature(function).return_annotation == Iterator[ReportFinding]
        }

    assert set().union(*map(finders, MODULES)) == {case.find.__name__ for case in CASES}


def test_findings_ask_every_finder():
    """A finder that ``findings`` forgets would never be seen."""
    source = inspect.getsource(findings)
    assert all(f"{case.find.__name__}(block" in source for case in CASES)


def test_findings_of_nothing():
    empty = ComparisonGroup(0, None, "", "", (), "strong", False, {})
    assert [finding.text for finding in findings(empty)] == [
        "No run has ended yet, so there is nothing to report."
    ]
