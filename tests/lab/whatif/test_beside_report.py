"""The page that ``lab report`` and ``lab compare`` write beside their report."""

import json
import re
import shutil

import pytest

from lab.cli import main
from lab.compare import reporting
from lab.comparison.record import read_comparison
from lab.report import html
from lab.report.view import blocks
from tests.helpers import ROOT

SHIPPED = ROOT / "reports" / "samples" / "compare-digits-1gbit"


@pytest.fixture
def linked(monkeypatch):
    """Leave out the report's figures, and return the pages that reports link to."""
    pages = []
    monkeypatch.setattr(
        reporting,
        "write_report",
        lambda folder, comparison, companion, latex: pages.append(companion),
    )
    return pages


def test_a_report_has_the_page_with_its_own_steps(tmp_path, linked):
    folder = tmp_path / "my comparison"
    folder.mkdir()
    shutil.copy(SHIPPED / "results.json", folder)
    assert main(["report", str(folder)]) == 0
    assert linked == ["whatif.html"]
    text = (folder / "whatif.html").read_text(encoding="utf-8")
    assert len(text) < 600_000
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    data = json.loads(found[1])
    own = data["measured"][0]
    assert data["begin"] == own["id"] == "my-comparison"
    measured = {point["strategy"]: point["seconds"] for point in own["points"]}
    (block,) = blocks(read_comparison(SHIPPED / "results.json"))
    assert measured == {row.sync: row.step for row in block.at(4)}, "as the report shows them"


def test_a_comparison_on_one_machine_has_a_page_that_says_why_nothing_is_drawn(tmp_path, linked):
    content = json.loads((SHIPPED / "results.json").read_text())
    for cell in content["cells"]:
        cell["rate"] = None
    folder = tmp_path / "alone"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(content))
    assert main(["report", str(folder)]) == 0
    assert linked == ["whatif.html"]
    text = (folder / "whatif.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    data = json.loads(found[1])
    assert data["begin"] is None
    assert data["problem"].startswith("alone has no step on two or more nodes")


@pytest.mark.slow
def test_the_report_does_without_a_page_that_cannot_be_written(
    tmp_path, linked, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "compared"
    (folder / "whatif.html").mkdir(parents=True)
    shutil.copy(SHIPPED / "results.json", folder)
    assert main(["report", str(folder)]) == 0
    assert linked == [None]
    assert "whatif.html was not written" in capsys.readouterr().out


@pytest.mark.parametrize("companion", [None, "whatif.html"])
def test_the_report_links_to_the_page(companion):
    comparison = read_comparison(SHIPPED / "results.json")
    page = html.render(comparison, [], [], companion=companion)
    links = [link for link in re.findall(r'href="([^"]*)"', page) if link.endswith(".html")]
    assert links == ([] if companion is None else [companion])
