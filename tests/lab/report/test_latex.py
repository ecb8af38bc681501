"""The report as LaTeX: it compiles, and nothing that a run is called becomes markup."""

import re
import shutil
import subprocess

import pytest

from lab.report import write_report
from lab.report.latex import escape
from tests.helpers.report_samples import cell, results

LATEX = shutil.which("pdflatex") or shutil.which("xelatex")
HOSTILE = r"50 % of a_b & #1 {x} \input{/etc/passwd} ~^ <é → 中"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latex")
    data = results(("gather_scatter", "ddp"), (1, 2), accuracy=0.43, iteration=1.1)
    data.timelines = {}
    data.differences = ["data_dir: a in A, b in B"]
    data.groups = {"0": {"data_dir": HOSTILE}, "1": {"data_dir": "b"}}
    data.skipped = [HOSTILE]
    data.cells += [cell("none", 1, group=1), cell("ring", 2, group=1, status="failed")]
    write_report(folder, data, latex=True)
    return folder


def test_letters_with_a_meaning_are_escaped():
    assert escape("a_b & 5 %") == r"a\_b \& 5 \%"
    assert escape(r"\#{}") == r"\textbackslash{}\#\{\}"
    assert escape("--flag") == "-{}-flag"
    assert escape("中") == "?"


def test_environments_are_balanced_and_rows_complete(folder):
    text = (folder / "report.tex").read_text(encoding="utf-8")
    open_ones = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            open_ones.append(name)
        else:
            assert open_ones.pop() == name
    assert not open_ones
    for columns, body in re.findall(r"\\begin\{tabular\}\{(l\w*)\}\n(.*?)\n\}%", text, re.S):
        rows = [row for row in body.splitlines() if re.search(r"(?<!\\)&", row)]
        assert rows
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(columns)}
    labels = re.findall(r"\\label\{(.*?)\}", text)
    assert len(labels) == len(set(labels)) == text.count(r"\caption{")
    drawn = re.findall(r"\\includegraphics\[.*?\]\{(.*?)\}", text)
    assert drawn
    assert all((folder / name).is_file() for name in drawn)
    assert r"\input" not in text
    assert "booktabs" not in text
    # the losses of step 20, the accuracy and the mean iteration
    loss = next(value for step, value in results().cells[0].repeats[0].losses if step == 20)
    assert f"20 & {loss:.4f}" in text
    assert r"43.00 \%" in text
    assert "1.100" in text


@pytest.mark.skipif(LATEX is None, reason="no pdflatex and no xelatex on the path")
@pytest.mark.slow
def test_it_compiles(folder):
    command = [LATEX, "-interaction=nonstopmode", "-halt-on-error", "report.tex"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert (folder / "report.pdf").read_bytes().startswith(b"%PDF")
    assert "Overfull" not in done.stdout
