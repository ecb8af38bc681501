"""A wrong line in a dict of names is named; an error inside the module is not hidden."""

import sys
from pathlib import Path

import pytest

from common.errors import UserError
from common.utils.registry import load


@pytest.mark.parametrize("target", ["my_stratgy:Ring", "json:Ring"])
def test_a_line_that_leads_nowhere_is_named(target: str) -> None:
    with pytest.raises(UserError, match=rf"strategy 'mine' is listed as {target}, but .*correct"):
        load({"mine": target}, "mine", kind="strategy")


def test_a_module_that_lacks_its_own_import_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_strategy.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_strategy", raising=False)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load({"mine": "broken_strategy:Mine"}, "mine", kind="strategy")
