"""The report's tables, figures, traces and page, also for unfinished and hostile results."""

import base64
import csv
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from matplotlib.figure import Figure
from msgspec.structs import replace

from common.profiling.records import RankTimeline, SentMessage
from common.runs import TimelineFile
from lab.report import write_report
from lab.report.drawings.timeline_figure import Row, draw_timeline
from lab.report.tables import csv_text, markdown
from lab.report.timeline import (
    hidden_seconds,
    label,
    mean_overlap,
    message_share,
    overlap,
    sync_parts,
    trace,
    union,
)
from lab.report.view import blocks, link_text
from tests.helpers.report_samples import cell, results

FIGURES = ("step_time", "scaling", "bytes", "ranks", "iterations", "loss")
HOSTILE = "<script>alert('x')</script> | \"quoted\" & `code` */"


class Page:
    """A report's page: its source, elements, table rows and text; unbalanced tags are an error."""

    def __init__(self, folder):
        self.source = (folder / "report.html").read_text(encoding="utf-8")
        text = self.source.replace("<!DOCTYPE html>", "").replace("<details open>", "<details>")
        xml = re.sub("<(meta|link)(.*?)>", r"<\1\2/>", text)
        self.elements = list(ElementTree.fromstring(xml).iter())
        self.rows = [
            ["".join(cell.itertext()).removesuffix(" (best)") for cell in row]
            for row in self.elements
            if row.tag == "tr"
        ]
        bare = ElementTree.fromstring(re.sub(r"<(svg|style)\b.*?</\1>", "", xml, flags=re.S))
        self.text = " ".join("".join(bare.itertext()).split())

    def values(self, attribute):
        return [one.attrib[attribute] for one in self.elements if attribute in one.attrib]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Write a report with failed, pending and partial cells, and text that looks like markup."""
    data = results(("gather_scatter", "ring", "ddp_powersgd"), accuracy=0.43, iteration=1.1)
    data.cells[-2:] = [
        cell("ring", 4, status="failed", message=HOSTILE),
        cell("ddp_powersgd", 4, status="pending"),
    ]
    data.cells[1].status = "partial"
    data.timelines = {"ring-n2": data.timelines["ring-n2"]}
    data.warnings.append(HOSTILE)
    data.settings.update(command=f"lab compare {HOSTILE}", note=HOSTILE)
    data.environment[HOSTILE] = HOSTILE
    folder = tmp_path_factory.mktemp("report")
    write_report(folder, data)
    return folder, data, Page(folder)


@pytest.fixture(autouse=True)
def plain_figures(report, monkeypatch):
    """Skip rendering and layout of figures after ``report``, which take most of the time."""
    savefig = Figure.savefig

    def save(figure, to, **options):
        figure.set_layout_engine("none")
        to.touch() if isinstance(to, Path) else savefig(figure, to, **options)

    monkeypatch.setattr(Figure, "savefig", save)


def test_files(report):
    folder, _, _ = report
    drawn = (*FIGURES, "timeline-ring-n2")
    assert {path.name for path in folder.iterdir()} == {
        *("table.md", "table.csv", "report.html", "trace-ring-n2.json"),
        *(f"{name}.{kind}" for name in drawn for kind in ("png", "svg")),
    }
    assert not any("<metadata>" in path.read_text("utf-8") for path in folder.glob("*.svg"))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))


def test_page_stands_alone(report):
    folder, _, page = report
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    inner = {value[1:] for value in page.values("href") if value.startswith("#")}
    assert inner | set(re.findall(r'(?:url\(|xlink:href=")#([^")]+)', page.source)) <= set(ids)
    assert not re.search(r"url\((?!#)|@import|<script|<iframe|<img", page.source)
    assert not page.values("src")
    # a page that is copied alone has no dead link
    links = [value for value in page.values("href") if not value.startswith("#")]
    assert [value.partition(";")[0] for value in links] == [
        *("data:,", "data:text/csv", "data:text/markdown", "https://ui.perfetto.dev")
    ]
    names = page.values("download")
    assert names == ["table.csv", "table.md"]
    for name, link in zip(names, links[1:], strict=False):
        content = base64.b64decode(link.partition(",")[2]).decode()
        assert content == (folder / name).read_text(encoding="utf-8")


def test_page_is_made_for_every_reader(report):
    _, _, page = report
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page.source
    labels = [one.get("aria-label") for one in page.elements if one.get("role") == "img"]
    drawn = re.findall(r'<svg aria-hidden="true".*?</svg>', page.source, re.S)
    assert len(drawn) == len(labels) == 2 * (len(FIGURES) + 1)
    assert all(len(label) > 80 for label in labels)
    assert all("currentColor" in text for text in drawn)
    assert not re.search("#1b1f23|#fffffe", "".join(drawn))
    names = [one.tag for one in page.elements]
    assert names.count("h1") == names.count("main") == 1


def test_words_cannot_become_markup(report):
    folder, _, page = report
    # warning, command, setting, environment's name and value, message
    assert page.text.count(" ".join(HOSTILE.split())) >= 5
    cells, _, _ = (folder / "table.md").read_text("utf-8").partition("Training loss")
    table = [line for line in cells.splitlines() if "|" in line]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert "<script" not in "".join(table)


def test_numbers_in_the_page_and_in_the_csv_equal_the_data(report):
    folder, data, page = report
    assert "4 of 7 cells are done" in page.text
    with (folder / "table.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for entry, line in zip(data.cells, lines, strict=True):
        nodes, middle = entry.nodes, entry.medians
        names = [entry.sync, str(nodes)]
        _, times, costs, _ = [row for row in page.rows if row[:2] == names]
        assert [line["strategy"], line["nodes"]] == names
        assert (line["status"], line["exact"]) == (entry.status, str(int(entry.exact)))
        if not middle:
            assert times[3] == costs[2] == "–"
            assert line["step_seconds"] == ""
            continue
        step, (low, high) = middle.step, entry.intervals["step"]
        parts = ("data", "forward", "backward", "sync", "wait", "update")
        del times[9]  # what the strategy computes
        assert times[3] == f"{step:.3f} [{low:.3f}, {high:.3f}]"
        assert times[4:10] == [f"{getattr(middle, part):.3f}" for part in parts]
        largest = max(rank.peak_memory_bytes for rank in entry.repeats[0].ranks)
        foretold = data.prediction.cells[entry.id].step_seconds
        values = {
            "mean_iteration_seconds": 1.1 * step,
            **{"speedup_ratio": 1 / step, "efficiency_ratio": 1 / step / nodes},
            **{"samples_per_second": 256 / 1.1 / step, "root_sent_bytes": middle.root_bytes_sent},
            "peak_memory_bytes": middle.peak_memory_bytes,
            "largest_peak_memory_bytes": largest,
            "predicted_step_seconds": foretold,
            "prediction_error_ratio": foretold / step - 1,
        }
        exact = values | {"step_seconds": step, "step_seconds_low95": low}
        assert {name: float(line[name]) for name in exact} == pytest.approx(exact)
        forms = (".3f", ".2f", ".1%", ".0f", ".2f", ".0f", ".0f", ".3f", "+.1%")
        shown = [value / 1e6 if "bytes" in name else value for name, value in values.items()]
        texts = [format(value, form) for value, form in zip(shown, forms, strict=True)]
        costs[2] = costs[2].partition(" [")[0]
        assert costs[2:7] + costs[8:] == [text.replace("%", " %") for text in texts]
    assert csv_text([]).splitlines() == ["strategy,nodes"]
    assert markdown([]) == "No cells.\n"


def test_groups_and_rates_never_share_a_figure(tmp_path):
    data = results(("ring",), (1, 2), predict=False, emulated=True)
    data.kind = "report"
    data.differences = ["compute: real in A, laptop in <B>"]
    data.timelines = {}
    data.groups = {"0": {"compute": "real"}, "1": {"compute": "laptop"}}
    data.cells += [
        cell("none", 1, group=1, batch=128, seeds=(7,)),
        cell("ring", 2, group=1, batch=128, seeds=(7,), scale=2.0),
    ]
    write_report(tmp_path, data)
    words = Page(tmp_path).text
    drawn = {path.name for path in tmp_path.glob("step_time*.png")}
    assert drawn == {"step_time-group0.png", "step_time-group1.png"}
    assert words.index("compute: real in A, laptop in <B>") < words.index("Findings: ")
    assert "These runs differ and cannot be compared" in words
    assert "global batch size 128" in words
    first, second = blocks(data)
    assert [row.cell.batch_size for row in first.rows] == [256, 256]
    assert (first.emulated, second.emulated) == (False, True)
    # compared with its own group's one-node cell
    assert second.find("ring", 2).speedup == pytest.approx(1 / 1.114)
    assert markdown([first, second]).count("| strategy |") == 2
    rated = results(("ring",), (1,), predict=False)
    rated.cells += [cell("ring", 2, rate="1gbit"), cell("ring", 2, rate=2e8)]
    assert [
        (part.label, part.suffix, [row.cell.id for row in part.rows]) for part in blocks(rated)
    ] == [
        ("1 Gbit/s", "-1gbit", ["none-n1", "ring-n2-1gbit"]),
        ("200 Mbit/s", "-200_Mbit_s", ["none-n1", "ring-n2-200000000.0"]),
    ]
    assert link_text(None) == "unshaped"


# an imported run: no one-node cell, no counted bytes, a loss that was not finite
BARE = cell("ring", 2, repeats=1)
BARE.medians = replace(
    BARE.medians, step=0.004, sync=0.001, root_bytes_sent=None, others_bytes_sent=None
)
BARE.repeats[0].losses = [(1, None), (2, 1.5)]
BARE.repeats[0].ranks = []
STEP = {"ring-n2": TimelineFile(1, "ring", 1, [])}
NOTHING = {"prediction": None, "timelines": {}, "finished": False}


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (NOTHING | {"cells": []}, "There are no cells"),
        (
            NOTHING | {"cells": [cell("ring", 2, status="pending")]},
            "Nothing has been measured yet.",
        ),
        ({}, "ring takes 0.559 s a step, 1.79 times as fast as one node."),
        (NOTHING | {"cells": [BARE], "environment": {}, "timelines": STEP}, "there is no speed-up"),
    ],
)
def test_any_stage_of_results_makes_a_report(tmp_path, change, phrase):
    whole = results(("ring",), (1, 2), repeats=1, emulated=True)
    write_report(tmp_path, replace(whole, **change))
    page = Page(tmp_path)
    assert phrase in page.text
    assert "EMULATED" in page.text
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.svg")}
    assert all("EMULATED" in text for text in drawn.values())
    # one strategy alone: its ranks send the same
    assert change or set(drawn) == {*FIGURES, "timeline-ring-n2"} - {"bytes"}


def test_emulated_compute_is_told_everywhere_and_shows_no_loss(tmp_path):
    data = results(("ddp", "ring"), (1, 2), emulated=True, losses=[None] * 30)
    for entry in data.cells[1:]:
        entry.rate = "200mbit"
    del data.timelines["ring-n2"]
    data.settings |= {"compute": "/somewhere/laptop.json", "rates": ["200mbit"]}
    write_report(tmp_path, data)
    page = Page(tmp_path)
    what = (
        "so nothing is learned: there are no losses and no accuracies, and memory is without "
        "activations; step times, overlap, waiting and bytes are valid; the nodes are network "
        "namespaces of one machine, with links of 200 Mbit/s."
    )
    assert what in (tmp_path / "table.md").read_text("utf-8")
    step = (tmp_path / "timeline-ddp-n2.svg").read_text("utf-8")
    assert all(label in step for label in ("ddp on 2 nodes at 200 Mbit/s", ">rank 1<"))
    for words in (what, "sleep for the times of profile 'laptop'", ": nothing was learned."):
        assert words in page.text
    drawn = list(tmp_path.glob("*.svg"))
    assert len(drawn) >= len(FIGURES) - 2  # no loss, and all send the same bytes
    assert all("EMULATED" in path.read_text(encoding="utf-8") for path in drawn)


def hand(rank, backward_end, *messages):
    """Return a rank; its ``messages`` have kind, begin and end."""
    sections = {
        "forward": [(0.0, 0.1)],
        "backward": [(0.1, backward_end)],
        "sync": [(backward_end, 0.5)],
    }
    sent = [SentMessage(kind, 8, 8.0, begin, end) for kind, begin, end in messages]
    return RankTimeline(rank, sections, sent)


SENT = (("all_reduce", 0.2, 0.3), ("all_reduce", 0.25, 0.4), ("broadcast", 0.4, 0.5))
HAND = TimelineFile(1, "overlapped", 9, [hand(0, 0.3, *SENT), hand(1, 0.35)])


def test_overlap_by_hand():
    first, second = HAND.ranks
    assert union([(0.2, 0.3), (0.25, 0.4), (0.4, 0.5), (0.7, 0.6)]) == [(0.2, 0.5)]
    # 0.1 s of the union's 0.3 s; the sum over messages would give 0.15 / 0.35
    assert overlap(first) == pytest.approx(1 / 3)
    assert overlap(second) is None
    assert mean_overlap(HAND.ranks) == pytest.approx(1 / 3)
    assert mean_overlap([second]) is None
    assert sync_parts(HAND.ranks, first) == {
        "wait": [(0.3, 0.35)],
        "wire": [(0.35, 0.5)],
        "own": [],
    }
    assert sync_parts(HAND.ranks, second) == {"wait": [], "wire": [(0.35, 0.5)], "own": []}
    # With a wait for weights within forward, and messages that block backward.
    sync = [(0.05, 0.08), (0.2, 0.25), (0.3, 0.5)]
    blocked = replace(first, sections=first.sections | {"sync": sync})
    assert overlap(blocked) == pytest.approx(1 / 6)
    assert sync_parts(HAND.ranks, blocked) == {
        "wait": [(0.3, 0.35)],
        "wire": [(0.2, 0.25), (0.35, 0.5)],
        "own": [(0.05, 0.08)],
    }


def test_between_its_messages_a_strategy_computes():
    """The rank searches for 50 ms after waiting and adds for 20 ms at the end, as topk does."""
    late = hand(0, 0.3, ("all_gather", 0.4, 0.45), ("all_gather", 0.44, 0.48))
    late.sections["sync"] = [(0.3, 0.5)]
    ranks = [late, hand(1, 0.35)]
    assert sync_parts(ranks, late) == {
        "wait": [(0.3, 0.35)],
        "wire": [(0.4, 0.48)],
        "own": [(0.35, 0.4), (0.48, 0.5)],
    }
    assert message_share([late]) == pytest.approx(0.08 / 0.2)
    assert hidden_seconds([late]) == 0
    assert hidden_seconds(HAND.ranks) == pytest.approx(0.1 / 2)  # of two ranks, one sends
    assert message_share([hand(0, 0.3)]) is None
    assert message_share([]) is None


def test_trace_is_one_that_perfetto_opens(report):
    folder, _, _ = report
    events = trace(HAND, "x")["traceEvents"]
    assert {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    } == {(0, 0): "sections", (0, 1): "messages", (0, 2): "messages (2)", (1, 0): "sections"}
    found = [
        (event["pid"], event["tid"], event["name"], round(event["ts"]), round(event["dur"]))
        for event in events
        if event["ph"] == "X"
        and event["name"] in ("backward", "sync: wait", "all_reduce", "broadcast")
    ]
    assert found == [  # in microseconds; no two messages overlap within a thread
        (0, 0, "backward", 100_000, 200_000),
        (0, 0, "sync: wait", 300_000, 50_000),
        (0, 1, "all_reduce", 200_000, 100_000),
        (0, 1, "broadcast", 400_000, 100_000),
        (0, 2, "all_reduce", 250_000, 150_000),
        (1, 0, "backward", 100_000, 250_000),
    ]
    written = json.loads((folder / "trace-ring-n2.json").read_text(encoding="utf-8"))
    assert sum(event.get("cat") == "message" for event in written["traceEvents"]) == 12


def test_a_timeline_tells_messages_inside_a_node_from_those_between_nodes():
    kinds = {"reduce": "inside", "all_reduce": "between", "broadcast": "inside"}
    messages = [SentMessage(kind, 8, 8.0, 0.3, 0.4, scope) for kind, scope in kinds.items()]
    rank = replace(HAND.ranks[0], messages=messages)
    events = trace(replace(HAND, ranks=[rank]), "x")["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "message"}
    assert names == {"reduce inside a node", "all_reduce between nodes", "broadcast inside a node"}
    row = Row("rank 0", rank, [rank])
    figure = draw_timeline([row], heading="a step", narrow=False, emulated=False)
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {f"message: {name}" for name in names} <= legend


def test_a_timeline_of_an_earlier_version_has_no_scopes():
    older = {"kind": "all_reduce", "bytes": 8, "sent_bytes": 8.0, "begin": 0.1, "end": 0.2}
    message = msgspec.convert(older, SentMessage)
    assert (message.scope, label(message)) == ("", "all_reduce")
