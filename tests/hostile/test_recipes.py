"""Recipe files that somebody else has written: one error at most, and no file touched."""

import os
import re

import pytest
from hypothesis import strategies as st

from common.config.parser import parse_arguments
from common.config.recipes import find_recipe, read_recipe
from common.errors import UserError
from common.utils.paths import RECIPES
from tests.helpers.hostile import CASES, damaged, run_cases, untouched

PLAIN = '0 -1 1e308 -1e308 nan inf true "" "x" "../x" "\\u001b[2J" "\\u0000" [] {} 1979-05-27'
LONG = ["9" * 4000, "0x" + "f" * 6000, '"' + "x" * 5000 + '"', "[" * 300 + "]" * 300]
VALUES = st.sampled_from([*PLAIN.split(), *LONG])


@CASES
def test_damaged_recipes(tmp_path, cases):
    """Damaged bytes of a good recipe, and impossible values of its keys."""
    path = tmp_path / "recipe.toml"
    good = sorted(RECIPES.glob("*.toml"))[0].read_bytes()
    keys = re.findall(r"^([\w-]+) *=", good.decode(), re.MULTILINE)

    def check(content):
        path.write_bytes(content)
        with untouched(tmp_path):
            read_recipe(find_recipe(str(path)))
            parse_arguments("PartThree", "", ("ddp",), ["--recipe", str(path)])

    run_cases(cases, damaged(good), check)
    lines = st.lists(st.tuples(st.sampled_from(keys), VALUES), min_size=1, max_size=4)

    def check_lines(pairs):
        check("".join(f"{key} = {value}\n" for key, value in dict(pairs).items()).encode())

    run_cases(cases, lines, check_lines)


def test_a_recipe_that_is_no_small_regular_file(tmp_path):
    """A FIFO does not block, and neither a device, a folder nor a file of 64 GB is read."""
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "device.toml").symlink_to("/dev/zero")
    (tmp_path / "missing.toml").symlink_to("nowhere")
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(2**36)
    for name in ("fifo", "folder", "device", "missing", "large"):
        with pytest.raises(UserError, match=f"{name}.toml"):
            read_recipe(find_recipe(str(tmp_path / f"{name}.toml")))
