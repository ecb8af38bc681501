"""A report names communication as a cause only where it explains most of a difference."""

import pytest

from lab.report import tables
from lab.report.causes import Gap, why
from lab.report.findings import findings
from lab.report.verdict import verdict
from lab.report.view import blocks
from tests.helpers.report_samples import cell, predicted, results, set_times


def timed(sync, compute, sync_seconds, *, wait=0.0, repeats=1, load=0.5, threads=1):
    """Return a cell on 2 ranks of one machine whose step has these parts, in seconds."""
    entry = cell(sync, 2, repeats=repeats, load=load)
    step = compute + sync_seconds
    parts = {
        **{"step": step, "sync": sync_seconds, "wait": wait, "wire": sync_seconds - wait},
        **{"forward": compute / 3, "backward": 2 * compute / 3, "data": 0.0, "update": 0.0},
    }
    for name, seconds in parts.items():
        setattr(entry.medians, name, seconds)
    set_times(entry, step, *((0.98 * step, 1.02 * step) if repeats > 1 else ()))
    for run in entry.repeats:
        for rank in run.ranks:
            rank.host = "laptop"
            rank.threads = threads
    return entry


def block(*cells):
    data = results(predict=False)
    data.cells = [cell("none", 1), *cells]
    data.timelines = {}
    (found,) = blocks(data)
    return found


def answer(*cells):
    found = block(*cells)
    return verdict(found, findings(found))


QUIET = timed("gather_scatter", 5.6, 0.2)


def test_compute_that_a_busy_machine_slows_has_no_cause():
    """The messages are 0.8 of 12.2 s; gather_scatter sends more of them in 0.2 s."""
    found = answer(QUIET, timed("all_reduce", 11.4, 0.8))
    assert "Why" not in found.why
    assert "91 %" in found.why
    assert "compute" in found.why
    assert "noise" in found.why
    assert "0.800 s" in found.why
    assert "times as fast" not in found.text
    assert "2.1" not in found.text
    [_, exposed, ratio] = found.numbers
    assert exposed[1].startswith("0.200 s")
    assert "not communication" in ratio[2]
    lines = tables.lines(block(QUIET, timed("all_reduce", 11.4, 0.8)))
    assert not any("step_seconds" in line.best for line in lines)


@pytest.mark.parametrize(
    ("communication", "given"), [(0.2, False), (0.45, False), (0.55, True), (0.9, True)]
)
def test_a_cause_needs_half_of_the_difference(communication, given):
    slow = timed("ring", 1 + 0.5 * (1 - communication), 0.1 + 0.5 * communication)
    gap = Gap(*block(timed("tree", 1.0, 0.1), slow).at(2))
    assert gap.communication == pytest.approx(communication)
    assert ("Why: " in why(gap)) == given
    share = communication if given else 1 - communication
    assert f"{100 * share:.0f} %" in why(gap)


@pytest.mark.parametrize(
    ("slow", "said", "unsaid"),
    [
        # it waits for a rank that the machine slows: the messages take no longer
        (timed("all_reduce", 5.6, 2.2, wait=1.9), "waiting for slower ranks", "Why"),
        # other settings
        (timed("all_reduce", 9.0, 0.3, threads=2), "had 1 threads, those of all_reduce 2", "noise"),
        # busy during one of the two runs: its messages were slowed as well
        (timed("all_reduce", 5.6, 2.2, load=2.4), "not equally busy", "Why"),
        # compute that takes less: the messages are more than the whole difference
        (timed("all_reduce", 5.0, 2.0), "all of the difference", "noise"),
        # messages that leave during backward share the cores with it
        (timed("overlapped", 9.0, 0.1), "overlapped does within backward", "Why"),
        # 2 % of a step, with one run each
        (timed("all_reduce", 5.6, 0.3), "The messages of gather_scatter", "Why"),
    ],
)
def test_what_makes_the_difference(slow, said, unsaid):
    found = answer(QUIET, slow)
    assert said in found.why
    assert unsaid not in found.why


def test_repeats_tell_noise_from_a_difference():
    fast = timed("gather_scatter", 5.6, 0.2, repeats=3)
    apart = timed("all_reduce", 11.4, 0.8, repeats=3)
    assert "91 %" in answer(fast, apart).why
    set_times(apart, 12.2, 5.0, 19.4)  # they overlap
    assert "%" not in answer(fast, apart).why


def test_a_busy_machine_is_named_with_its_runs():
    text = answer(QUIET, timed("all_reduce", 11.4, 0.8, load=2.4)).text
    assert "load 2.4 per core during all_reduce on 2 ranks" in text
    found = block(timed("ring", 0.5, 0.1))
    found.baseline.cell.repeats[0].load_per_core = 3.1
    assert "load 3.1 per core during none on 1 rank" in verdict(found, findings(found)).text


def test_one_run_has_no_intervals_that_overlap():
    found = findings(block(timed("ring", 1.0, 0.5, wait=0.4)))
    [late] = [finding for finding in found if "wait longer" in finding.text]
    assert late.caution
    assert "interval" not in late.text
    assert "once" in late.text


def test_a_prediction_of_a_busy_machine_is_no_fault_of_the_model():
    data = results(("ring",), (1, 2))
    ring = data.cells[1]
    data.prediction.cells = {ring.id: predicted(ring, -0.6)}
    for load, said in ((0.5, False), (2.0, True)):
        ring.repeats[0].load_per_core = load
        [found] = [entry for entry in findings(blocks(data)[0]) if "in scope" in entry.text]
        assert ("busy during ring" in found.text) == said


@pytest.mark.parametrize(
    ("hosts", "nodes", "rate", "place"),
    [
        (("laptop", "laptop"), (0, 0), None, "2 ranks"),
        (("a", "b"), (0, 1), None, "2 nodes"),
        (("box", "box"), (0, 1), None, "2 nodes"),  # two machines of one name
        (("laptop", "laptop"), (0, 1), "1gbit", "2 emulated nodes"),
        # files of earlier versions have no nodes
        (("laptop", "laptop"), (None, None), None, "2 ranks"),
        (("a", "b"), (None, None), None, "2 nodes"),
        (("laptop", "laptop"), (None, None), "1gbit", "2 emulated nodes"),
    ],
)
def test_nodes_are_machines(hosts, nodes, rate, place):
    data = results(("ring",), (1, 2), predict=False, emulated=rate is not None)
    data.cells[1].rate = rate
    for run in data.cells[1].repeats:
        for rank, host, node in zip(run.ranks, hosts, nodes, strict=True):
            rank.host, rank.node = host, node
    (found,) = blocks(data)
    shared = [f"1 node: ranks 0-1 on {hosts[0]}"] if nodes == (0, 0) else []
    assert found.shared_nodes == shared
    text = verdict(found, findings(found)).text
    assert text.startswith(f"On {place}")
    word = place.split()[-1]
    texts = [text, tables.markdown([found]), *(entry.text for entry in findings(found))]
    other = {"ranks": "node", "nodes": "on 2 rank"}[word]
    assert not any(other in each for each in texts)
    assert tables.heading("nodes", found.place) == word
