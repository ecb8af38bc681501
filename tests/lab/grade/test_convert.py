"""Notebooks and Python 2, made scripts; what Python 3 can run stays as it is."""

import json

import pytest

from lab.grade.convert import make_scripts

PYTHON_2 = """\
for i in xrange(2):
    if i: print "two", i
    print
    try:
        print "sum: %d" % i,
    except ValueError, error:
        print error
print("in brackets")
"""


def notebook(*cells):
    return json.dumps({"cells": [{"cell_type": kind, "source": text} for kind, text in cells]})


def test_a_notebooks_cells_become_a_script_beside_it(tmp_path):
    cells = notebook(
        ("markdown", "# Title"),
        ("code", ["%matplotlib inline\n", "if True:\n", "    !pip list\n", "x = 7 % 4"]),
        ("code", "y = x"),
    )
    (tmp_path / "a.ipynb").write_text(cells)
    (tmp_path / "b.ipynb").write_text(cells)
    (tmp_path / "b.py").write_text("own = 1\n")
    for name, text in {"c": "[]", "d": "{", "e": "[" * 10_000, "f": notebook()}.items():
        (tmp_path / f"{name}.ipynb").write_text(text)
    (tmp_path / "g.ipynb").mkdir()
    assert make_scripts(tmp_path) == {tmp_path / "a.py": "from the cells of a.ipynb"}
    seen = {}
    exec((tmp_path / "a.py").read_text(), seen)
    assert (seen["y"], (tmp_path / "b.py").read_text()) == (3, "own = 1\n")
    assert {path.name for path in tmp_path.glob("*.py")} == {"a.py", "b.py"}


def test_python_2_becomes_python_3_line_by_line(tmp_path, capsys):
    (tmp_path / "old.py").write_text(PYTHON_2)
    right = 'text = """\nprint "x"\n"""\nprint (1)\n'
    (tmp_path / "new.py").write_text(right)
    (tmp_path / "broken.py").write_text("print 'x'\ndef (\n")
    assert make_scripts(tmp_path) == {tmp_path / "old.py": "converted from Python 2"}
    exec((tmp_path / "old.py").read_text(), {})
    assert capsys.readouterr().out.split("\n") == [
        *("", "sum: 0", "two 1", "", "sum: 1", "in brackets", "")
    ]
    assert (tmp_path / "new.py").read_text() == right
    assert len((tmp_path / "old.py").read_text().splitlines()) == len(PYTHON_2.splitlines())


@pytest.mark.parametrize("line", [" " * 10**6 + "x", "print " * 10**5, "except a" * 10**5 + "("])
def test_a_line_that_was_made_to_be_slow_is_not(tmp_path, line):
    (tmp_path / "slow.py").write_text(line)
    assert make_scripts(tmp_path) == {}
