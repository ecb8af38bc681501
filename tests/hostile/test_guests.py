"""Guests from elsewhere: their words on the terminal, their reports to lab doctor, their number."""

import io
import json

import pytest
from rich.console import Console

from common.cli import _launch_of_part, _say
from common.config.parser import parse_arguments
from common.config.recipes import print_recipe
from common.distributed.gpus import Peer
from common.errors import UserError
from common.sync import BY_HAND
from common.utils.environment import RUN_TOKEN
from common.utils.typed_json import calm, decode, encode
from lab.doctor.nodes import NodeReport
from lab.fleet import prefixed_output
from tests.helpers.hostile import CASES, altered, run_cases

HOSTILE = "\x1b[2J\x1b]0;owned\x07 \x9b31m \u202e\r"


def test_words_from_elsewhere_never_reach_the_terminal_raw(capsys, monkeypatch):
    assert calm("a\tb\n" + HOSTILE + "é") == "a\tb\n [2J ]0;owned   31m   é"
    _say(f"error (rank 0): rank 1 stopped: {HOSTILE}", 1)
    assert capsys.readouterr().err.strip("\n").isprintable()
    output = io.StringIO()
    monkeypatch.setattr(prefixed_output, "console", Console(file=output))
    prefixed_output.PrefixedOutput(2).show(1, HOSTILE)
    assert output.getvalue().startswith("node 1 | ")
    assert output.getvalue().strip("\n").isprintable()


@CASES
def test_reports_of_nodes_are_read_or_refused(cases):
    def read(content):
        return decode(json.dumps(content).encode(), NodeReport, name="the report")

    peer = Peer("a", 7, [], "a", "a 1")
    own = NodeReport(peer, "10.0.0.2", 4000, 2, {"same code": "x"}, [(0, "no")], (0.1, 0.01))
    good = json.loads(encode(own))
    assert read(good) == own
    for change in ({"cores": -1}, {"port": 0}, {"address": HOSTILE}, {"facts": {"x": HOSTILE}}):
        with pytest.raises(UserError, match="the report"):
            read(good | change)
    run_cases(cases, altered(good), read)


def test_the_token_of_the_flag_wins_and_is_shown_nowhere(monkeypatch):
    monkeypatch.setenv(RUN_TOKEN, "an old one")
    by_hand = ["--master-ip", "127.0.0.1", "--num-nodes", "2", "--rank", "1"]
    config = parse_arguments("PartTwo", "", BY_HAND, [*by_hand, "--run-token", "the-secret"])
    launch = _launch_of_part(config)
    assert launch is not None
    assert launch.token == "the-secret"
    shown = [config, config.as_json(), config.shared_settings(), print_recipe(config), launch]
    assert "the-secret" not in repr(shown)
    with pytest.raises(UserError, match="--run-token"):  # an unset variable of the shell
        parse_arguments("PartTwo", "", BY_HAND, [*by_hand, "--run-token", ""])


def test_a_recipe_cannot_set_the_token(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('run_token = "x"\n')
    with pytest.raises(UserError, match="run_token"):
        parse_arguments("PartTwo", "", BY_HAND, ["--recipe", str(recipe)])
