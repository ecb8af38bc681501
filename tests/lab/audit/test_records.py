"""The records of the probe as structs: what is read, and what no probe has written."""

import math
import re
from typing import get_args

import pytest

from lab.audit import probe
from lab.audit.records import CodeLine, Record, Step, decode_record
from tests.lab.audit.recordings import probe_record


def test_each_kind_of_record_that_the_probe_describes_has_a_struct():
    _, table, _ = probe.__doc__.split(f"\n{'=' * 8} ")
    described = re.findall(r"^(\w+) ", table, re.MULTILINE)
    tags = [kind.__struct_config__.tag for kind in get_args(Record)]
    assert sorted(described) == sorted(tags)


def test_numbers_that_json_lacks_are_read():
    clip = ["norm", math.inf, math.nan, 0, ["main.py", 9, "clip"]]
    step = probe_record("step", clips=[clip], own=[0, 2], got=[2, 2], got_norm=math.nan)
    assert isinstance(step, Step)
    assert step.clips[0].limit == math.inf
    assert step.clips[0].at == CodeLine("main.py", 9, "clip")
    assert math.isnan(step.got_norm)
    assert probe_record("step").own is None  # the probe could not sample it


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ('{"k": "step"', ValueError, "Expecting"),
        ("3", TypeError, "Expected `object`"),
        ('{"t": 0}', TypeError, "missing required field `k`"),
        ('{"k": "party", "t": 0}', TypeError, "Invalid value 'party'"),
        ('{"k": "cut", "t": 0}', TypeError, "missing required field `step`"),
        ('{"k": "group", "t": 0, "rank": []}', TypeError, "Expected `int`, got `array`"),
        ('{"k": "mesh", "t": 0, "at": ["main.py"]}', TypeError, "at least length 3, got 1"),
    ],
)
def test_what_no_probe_has_written(line, error, message):
    with pytest.raises(error, match=message):
        decode_record(line)
