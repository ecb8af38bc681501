"""What a rubric may hold; what it costs is tested in test_grade.py."""

from pathlib import Path

import pytest

from common.errors import UserError
from lab.grade.rubric import check_pattern


@pytest.mark.parametrize("pattern", ["**main.py", "deep/**.py", "a**/main.py", "../x.py", "/x.py"])
def test_a_pattern_is_refused_whatever_this_pythons_glob_takes(monkeypatch, pattern):
    """Python 3.11 refuses ``**main.py`` and 3.13 takes it as ``*main.py``."""
    monkeypatch.setattr(Path, "glob", lambda *_, **__: iter(()))
    with pytest.raises(UserError, match="files of part1"):
        check_pattern(pattern, where="files of part1")


@pytest.mark.parametrize("pattern", ["main.py", "**/main.py", "a/**/b*.py", "**", "part[12]/*.py"])
def test_a_pattern_below_the_submission_is_taken(pattern):
    check_pattern(pattern, where="files of part1")
