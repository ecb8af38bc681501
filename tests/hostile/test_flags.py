"""Hostile values of flags: each flag of each command takes them or refuses them in one line.

Nothing is started: what the values become is a configuration, or the arguments of a command.
"""

import argparse
import functools
import random

import pytest

from common.config import parser as parts
from common.errors import UserError, explain
from common.sync import BUILT_IN, BY_HAND
from lab.cli import build_parser
from lab.ssh.hosts import SSHOptions, parse_hosts

PARTS = {"PartOne": ("none",), "PartTwo": BY_HAND, "PartThree": BUILT_IN}
VALUES = [
    *(
        "",
        "--",
        "-",
        "=",
        " ",
        ".",
        "..",
        "/",
        "~",
        "*",
        "-1",
        "0",
        "1",
        "9" * 5000,
        "1e999",
        "nan",
    ),
    *(
        "inf",
        "-0.0",
        "0x10",
        "1_000",
        "١",
        "½",
        "a\nb",
        "\t",
        "\0",
        "\x1b[31m",
        "\udcff",
        "é",
        "🙂",
    ),
    *("%s%n", "{}", "{0}", "{rank}", "$(x)", "`x`", "'", '"', "a,b", ",", "1,,2", "1:2:3", "[]"),
    *("{", "null", "None", "true", "-oProxyCommand=x", "--rank=1", "a=b", "a" * 10_000, "../../x"),
]


def flags_of(parser):
    return [
        action.option_strings[-1]
        for action in parser._actions
        if action.option_strings and action.nargs != 0
    ]


def commands():
    [subparsers] = [
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return subparsers.choices


def said(parse, words):
    """Return the one line that a command line says about an error; None if there is none."""
    try:
        parse(words)
    except UserError as error:
        text = explain(error)
    except SystemExit:  # --help and the like
        return None
    else:
        return None
    assert text, words
    assert len(text) < 2000, words
    return text


@pytest.mark.parametrize("part", PARTS)
def test_each_flag_of_a_part(part, monkeypatch):
    # Building the flags takes ten times as long as parsing a line.
    monkeypatch.setattr(parts, "build_parser", functools.cache(parts.build_parser))

    def parse(words):
        return parts.parse_arguments(part, "", PARTS[part], words)

    flags = flags_of(parts.build_parser(part, "", PARTS[part]))
    assert len(flags) > 30
    refused = [said(parse, [f"{flag}={value}"]) for flag in flags for value in VALUES]
    assert len(list(filter(None, refused))) > len(refused) / 2
    chosen = random.Random(0)
    for _ in range(500):
        words = [f"{chosen.choice(flags)}={chosen.choice(VALUES)}" for _ in range(3)]
        said(parse, words)


def test_each_flag_of_each_command_of_lab():
    parser = build_parser()
    tried = 0
    for name, command in commands().items():
        for flag in flags_of(command):
            for value in VALUES:
                said(parser.parse_args, [name, f"{flag}={value}"])
                tried += 1
    assert tried > 2000


HOSTILE = ["u\nv", "\0", "\x1b[31m", "a" * 100_000]


@pytest.mark.parametrize("flag", ["user", "python", "workdir"])
@pytest.mark.parametrize("value", HOSTILE)
def test_what_ssh_does_not_get(flag, value):
    args = build_parser().parse_args(["launch", "--hosts", "a", f"--{flag}={value}"])
    with pytest.raises(UserError, match=flag):
        SSHOptions.of(args)


def test_a_user_is_no_option_of_ssh():
    args = build_parser().parse_args(["launch", "--hosts", "a", "--user=-oProxyCommand=x"])
    with pytest.raises(UserError, match="user"):
        SSHOptions.of(args)


@pytest.mark.parametrize("host", ["..", ".", "-oProxyCommand=x", "a b", "a;b", "a\nb", "$(x)", ""])
def test_what_is_no_host_is_refused(host):
    with pytest.raises(UserError, match="--hosts"):
        parse_hosts(f"node0,{host}", shares_a_port=False)
